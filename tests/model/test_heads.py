"""YOLO's distribution focal loss is found by one test, whoever asks and however its bins are stored."""

import numpy as np
import onnx
import pytest

from qdqtool.explain.lint.heads import last_convolutions
from qdqtool.model import heads
from qdqtool.model.editor import placeholder
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_dfl, find_head
from qdqtool.model.view import View
from qdqtool.trt import importer
from qdqtool.trt.layers import WEIGHTED
from tests.trt.builder import Graph

FORMS = ("read", "unread", "pair", "stored", "moved", "joined")


def detector(form: str, op: str = "Conv") -> onnx.ModelProto:
    """A convolution of boxes in front of the DFL, and one of classes."""
    g = Graph()
    stem = g.op("Relu", g.conv(g.input(1, 16, 4, 4), "stem", 16), "r")
    box, score = (
        g.conv(stem, "box", 8, k=1, scale=None, weights="float"),
        g.conv(stem, "score", 4, k=1),
    )
    soft = (
        g.op("Softmax", g.op("Transpose", box, "t", perm=[0, 2, 3, 1]), "soft", axis=3)
        if op == "MatMul"
        else (g.op("Softmax", box, "soft", axis=1))
    )
    bins = np.arange(8, dtype=np.float32).reshape((8, 1) if op == "MatMul" else (1, 8, 1, 1))
    if form == "moved":
        for i in range(12):
            soft = g.op("Identity", soft, f"i{i}")
    if form == "joined":
        soft = g.op("Concat", [soft, soft], "joined", axis=2)
    if form in ("pair", "stored"):
        soft = g.pair(soft, "s", 1 / 127)
    weights = g.const("bins", bins)
    if form == "pair":
        weights = g.pair(weights, "w", 7 / 127)
    elif form == "stored":
        weights = g.dq(g.const("codes", np.rint(bins * 127 / 7).astype(np.int8)), "w.DQ", 7 / 127)
    proto = g.model(score, g.op(op, [soft, weights], "dfl"))
    if form == "unread":
        stored = next(t for t in proto.graph.initializer if t.name == "bins")
        stored.CopyFrom(placeholder("bins", bins.shape))
    return proto


@pytest.mark.parametrize(
    ("op", "form"), [*(("Conv", form) for form in FORMS), ("MatMul", "read"), ("MatMul", "moved")]
)
def test_all_who_ask_find_the_same(op: str, form: str) -> None:
    model = Model(detector(form, op))
    view, head = View(model), find_head(model)

    def named(found: set[int]) -> set[str]:
        return {model.nodes[i].name for i in found}

    assert named(find_dfl(model)) == named(head.dfl) == {"dfl"} and "dfl" not in named(head.finals)
    network = importer.build(model)
    assert [layer.nodes[0] for layer in network.of_kind(*WEIGHTED) if layer.weights.dfl] == ["dfl"]
    assert {n.name for n in view.weighted if n.index not in view.feeds_weighted} == {
        "box",
        "score",
        "dfl",
    }
    assert {n.name for n in last_convolutions(view)} == {"box", "score"}


def test_nobody_has_a_test_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_are_bins", lambda model, node, tensor: False)
    model = Model(detector("read"))
    view = View(model)
    assert not find_head(model).dfl
    assert not any(layer.weights.dfl for layer in importer.build(model).of_kind(*WEIGHTED))
    assert {n.name for n in view.weighted if n.index not in view.feeds_weighted} == {"score", "dfl"}


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
def test_what_is_none(shape: tuple[int, ...], step: int) -> None:
    g = Graph()
    op, count = ("Conv", shape[1]) if len(shape) == 4 else ("MatMul", shape[0])
    soft = g.op("Softmax", g.input(1, count, 4, count), "soft", axis=1)
    weights = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * step
    proto = g.model(g.op(op, [soft, g.const("w", weights)], "end"))
    assert not find_dfl(Model(proto))


def test_what_branches_and_joins_again_is_looked_at_once() -> None:
    """Behind 60 Splits and Concats there are 2^60 ways."""
    g = Graph()
    x = g.op("Softmax", g.input(1, 8, 4, 4), "s")
    for i in range(60):
        x = g.concat(list(reversed(g.ops("Split", [x], f"split{i}", count=2, axis=1))), f"join{i}")
        g.channels[x] = 8
    assert find_dfl(Model(g.model(g.conv(x, "c")))) == set()
