from collections.abc import Iterable, Sequence

import numpy as np
import onnx
import pytest

from qdqtool.findings.lint.heads import find_last_convolutions
from qdqtool.ir.editor import make_placeholder
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_dfl, find_head, is_bin_sequence
from qdqtool.patterns.view import View
from qdqtool.trt import importer
from qdqtool.trt.layers import WEIGHTED
from tests.insertion.nets import Net
from tests.trt.builder import Graph

FORMS = ("read", "unread", "pair", "stored", "moved", "joined")


def detector(form: str, op: str = "Conv", power: int = 1) -> onnx.ModelProto:
    g = Graph()
    stem = g.op("Relu", g.conv(g.input(1, 16, 4, 4), "stem", 16), "r")
    box, score = (
        g.conv(stem, "box", 8, k=1, scale=None, weights="float"),
        g.conv(stem, "score", 4, k=1),
    )
    soft = (
        g.op("Softmax", g.op("Transpose", box, "t", perm=[0, 2, 3, 1]), "soft", axis=3)
        if op == "MatMul"
        else g.op("Softmax", box, "soft", axis=1)
    )
    bins = np.arange(8, dtype=np.float32) ** power
    bins = bins.reshape((8, 1) if op == "MatMul" else (1, 8, 1, 1))
    if form == "moved":
        for i in range(12):
            soft = g.op("Identity", soft, f"i{i}")
    if form == "joined":
        soft = g.op("Concat", [soft, soft], "joined", axis=2)
    if form in ("pair", "stored"):
        soft = g.pair(soft, "s", 1 / 127)
    weights = g.const("bins", bins)
    if form == "pair":
        weights = g.pair(weights, "w", float(bins.max()) / 127)
    elif form == "stored":
        codes = g.const("codes", np.rint(bins * 127 / bins.max()).astype(np.int8))
        weights = g.dq(codes, "w.DQ", float(bins.max()) / 127)
    proto = g.model(score, g.op(op, [soft, weights], "dfl"))
    if form == "unread":
        next(t for t in proto.graph.initializer if t.name == "bins").CopyFrom(
            make_placeholder("bins", bins.shape)
        )
    return proto


@pytest.mark.parametrize(
    ("op", "form", "power"),
    [
        *(("Conv", form, 1) for form in FORMS),
        ("MatMul", "read", 1),
        ("MatMul", "moved", 1),
        # Bins that do not count up. If the values are not available, the shape alone decides.
        *(("Conv", form, 2) for form in FORMS if form not in ("unread", "stored")),
    ],
)
def test_importer_head_and_view_agree_on_dfl(op: str, form: str, power: int) -> None:
    model = Model(detector(form, op, power))
    view, head = View(model), find_head(model)
    dfl = {"dfl"} if power == 1 else set()

    def names(indices: Iterable[int]) -> set[str]:
        return {model.nodes[i].name for i in indices}

    assert names(find_dfl(model)) == names(head.dfl) == dfl and not dfl & names(head.finals)
    layers = importer.build(model).layers_of_kind(*WEIGHTED)
    assert {layer.nodes[0] for layer in layers if layer.weights.dfl} == dfl
    last = {n.name for n in view.nodes_with_weights if n.index not in view.feeds_weighted}
    assert last == ({"box", "score", "dfl"} if dfl else {"score", "dfl"})


@pytest.mark.parametrize("form", FORMS)
def test_convolutions_before_dfl_are_the_last_ones(form: str) -> None:
    assert {n.name for n in find_last_convolutions(View(Model(detector(form))))} == {"box", "score"}


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ((1, 8, 1, 1), 0),
        ((1, 8, 3, 3), 0),
        ((2, 8, 1, 1), 0),
        ((8, 1), 0),
        ((8, 1), 2),
        ((3, 1), 1),
    ],
)
def test_product_with_other_bins_is_not_dfl(g: Graph, shape: tuple[int, ...], step: int) -> None:
    op, count = ("Conv", shape[1]) if len(shape) == 4 else ("MatMul", shape[0])
    soft = g.op("Softmax", g.input(1, count, 4, count), "soft", axis=1)
    weights = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * step
    assert not find_dfl(Model(g.model(g.op(op, [soft, g.const("w", weights)], "end"))))


def test_search_for_dfl_is_linear_in_branches(g: Graph) -> None:
    # 60 Splits and Concats have 2^60 paths.
    x = g.op("Softmax", g.input(1, 8, 4, 4), "s")
    for i in range(60):
        x = g.concat(list(reversed(g.ops("Split", [x], f"split{i}", count=2, axis=1))), f"join{i}")
        g.channels[x] = 8
    assert find_dfl(Model(g.model(g.conv(x, "c")))) == set()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(16), True),
        (range(1, 17), False),
        (range(3), False),
        ([0, 1, 2, 4], False),
        (range(4), True),
        pytest.param(np.rint(np.arange(16) * 127 / 15) * (15 / 127), True, id="stored-as-int8"),
        pytest.param(np.arange(16) * 1.01, False, id="other-step"),
    ],
)
def test_counts_up(net: Net, values: Sequence[int], expected: bool) -> None:
    net.const("k", list(values))
    assert is_bin_sequence(net.output(net.op("Relu", "r", "x")).index(), "k") is expected
