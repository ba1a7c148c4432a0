"""From engine layers back to nodes: which layers multiply, which no prediction speaks of, and whose they are."""

import json
import re
from collections import Counter

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.buildlog.agreement import TraceCounts
from qdqtool.buildlog.names import parts
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    LogEvent,
    ParsedNode,
    ParsedTensor,
    ParseSection,
)
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification import convolutions
from qdqtool.verification.api import exit_code, verify
from qdqtool.verification.build_model import BuiltModel, compare, status_agrees
from qdqtool.verification.convolutions import (
    BuiltNode,
    Mapper,
    common_names,
    is_aside,
    product_rank,
    trt_name,
)
from qdqtool.verification.lines import agreement, in_order
from tests.builders.models import two_convolutions
from tests.buildlog.samples import build_of
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of
from tools.fuzz.net import Net


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("correlation", 0),
        ("deconv", 1),
        ("gemm", 2),
        ("CaskConvolution", 5),
        ("CudnnGemm", 5),
        ("MatMul", 5),
        ("MatrixMultiply", 5),
        ("PointWise", None),
        ("kgen", None),
        ("fusion", None),
    ],
)
def test_how_telling_a_layer_is_of_a_product(kind: str, rank: int | None) -> None:
    assert product_rank(BuiltLayer(name="n", type=kind)) == rank
    told = product_rank(BuiltLayer(name="__myl_MulCorrAdd_myl0_1", type=kind))
    assert told == {"kgen": 7, "fusion": 6}.get(kind, rank), (
        "generated code tells its steps in its name"
    )


@pytest.mark.parametrize(
    ("kind", "name", "aside"),
    [
        ("Constant", "c", True),
        ("Myelin", "{ForeignNode[a...b]}", True),
        ("Myelin", "a", False),
        ("Convolution", "c", False),
        ("Myelin", "{ForeignNode[a", True),
        ("CaskConvolution", "{ForeignNode[a", False),
    ],
)
def test_what_no_prediction_speaks_of(kind: str, name: str, aside: bool) -> None:
    assert is_aside(BuiltLayer(name=name, type=kind)) is aside


def two() -> Model:
    """``/m.0/cv`` and ``/m_1/cv``, a Relu without a name, and weights by initializer and by Constant."""
    g = Graph(constant_nodes=True)
    x = g.relu(g.conv(g.input(1, 8, 4, 4), "/m.0/cv", 8, 1), "r")
    proto = g.model(g.conv(x, "/m_1/cv", 8, 1, scale=None, weights="float"))
    next(n for n in proto.graph.node if n.op_type == "Relu").name = ""
    return Model(proto)


MODEL = two()
FIRST, SECOND = (n for n in MODEL.nodes if n.op == "Conv")
RELU = next(n for n in MODEL.nodes if n.op == "Relu")


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("/m.0/cv", FIRST),
        ("/m_1/cv", SECOND),
        ("node_of_r:0", RELU),
        ("/m_0/cv", FIRST),  # Myelin writes dots as underscores
        ("/m.0/cv_clone_2", FIRST),  # a copy of it
        ("/m.0", None),
        ("cv", None),
        ("", None),
        ("r:0", None),
    ],
)
def test_the_node_behind_a_name(name: str, node: object) -> None:
    assert Mapper(MODEL, []).node(name) is node


def test_names_and_constants(g: Graph) -> None:
    x = g.conv(g.input(1, 8, 4, 4), "a.b", 8, 1)
    model = Model(g.model(g.conv(x, "a_b", 8, 1)))
    mapper = Mapper(model, [])
    for name in ("a.b", "a_b"):
        found = mapper.node(name)
        assert found is not None and found.name == name
    g = Graph()
    # Weights of initializers and of Constant nodes settle where a fused name is cut; other tensors are none
    assert {t for n in MODEL.nodes if n.op == "Constant" for t in n.outputs} <= Mapper(
        MODEL, []
    ).known
    assert not {FIRST.output, SECOND.output, "x"} & Mapper(MODEL, []).known
    plain = Model(g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1)))
    assert set(plain.initializers) <= Mapper(plain, []).known


def test_names_of_a_layer_are_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many convolutions in one layer asks for all nodes of it."""
    asked: list[str] = []
    monkeypatch.setattr(
        convolutions, "parts", lambda name, *known: asked.append(name) or parts(name, *known)
    )
    mapper = Mapper(MODEL, [layer("/m.0/cv || /m_1/cv")])
    assert [mapper.nodes(mapper.layers[0]) for _ in range(9)] == [[FIRST, SECOND]] * 9
    assert len(asked) == 2  # whether it is aside, and what it names


def test_metadata_and_places_in_a_merged_layer() -> None:
    mapper = Mapper(MODEL, [layer("/m.0/cv || /m_1/cv + node_of_r:0")])
    places = [mapper.layer_of(n) for n in (FIRST, SECOND, RELU)]
    assert [None if p is None else p[1] for p in places] == [0, 1, 1]
    assert mapper.nodes(mapper.layers[0]) == [FIRST, SECOND, RELU]
    mapper = Mapper(MODEL, [layer("/m.0/cv", "CaskConvolution", "/m_1/cv", "unknown")])
    assert (mapper.layer_of(FIRST), mapper.layer_of(SECOND)) == (None, (mapper.layers[0], 0))
    block = layer("{ForeignNode[/m.0/cv.../m_1/cv]}", "Other")
    assert Mapper(MODEL, [block]).layer_of(FIRST) is None and Mapper(MODEL, []).nodes(block) == []
    # What a builder was given under other names; the model's own name is then another layer's
    names = {n.index: f"n{n.index}" for n in MODEL.nodes}
    mapper = Mapper(MODEL, [BuiltLayer(f"n{FIRST.index}", "CaskConvolution")], names)
    assert mapper.node(f"n{FIRST.index}") is FIRST and mapper.node(FIRST.name) is None
    assert mapper.layer_of(FIRST) is not None


def layer(name: str, kind: str = "CaskConvolution", *nodes: str) -> BuiltLayer:
    return BuiltLayer(name, kind, onnx_names=list(nodes))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([layer("/m.0/cv")], 0),
        ([], None),
        ([layer("/m_1/cv")], None),
        (
            [layer("k0", "kgen", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")],
            1,
        ),  # the more telling one
        ([layer("k1", "correlation", "/m.0/cv"), layer("k0", "kgen", "/m.0/cv")], 0),
        (
            [layer("k0", "correlation", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")],
            None,
        ),  # either may be it
        ([layer("k0", "kgen", "/m.0/cv"), layer("k1", "kgen", "/m.0/cv")], None),
        (
            [
                layer("k0", "gemm", "/m.0/cv"),
                layer("k1", "correlation", "/m.0/cv"),
                layer("k2", "deconv", "/m.0/cv"),
            ],
            1,
        ),
        ([layer("k0", "PointWiseV2", "/m.0/cv")], 0),  # the only one
        (
            [
                layer("Reformatting CopyNode for Input Tensor 0 to /m.0/cv", "Reformat"),
                layer("/m.0/cv"),
            ],
            1,
        ),
    ],
)
def test_the_layer_of_a_convolution(layers: list[BuiltLayer], found: int | None) -> None:
    place = Mapper(MODEL, layers).layer_of(FIRST)
    assert (None if place is None else layers.index(place[0])) == found


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (Build(), 0),
        (Build(layers=[layer("/m.0/cv")]), 1),
        (Build(layers=[layer("w + /m.0/cv || v + /m_1/cv")]), 2),
        (Build(layers=[layer("k", "kgen", "/m.0/cv", "/m_1/cv")]), 2),
        (Build(layers=[layer("/m_0/cv", "kgen")]), 0),  # dots as underscores: only Myelin
        (Build(layers=[layer("/m_0/cv_myl0_1", "kgen")]), 1),
        (Build(trace=[LogEvent("P", "Running", "/m.0/cv")]), 1),
        (
            Build(parse=ParseSection([ParsedNode("/m.0/cv", "Conv"), ParsedNode("other", "Conv")])),
            1,
        ),
        (Build(trace=[LogEvent("P", "Fusing", "other", "w + /m_1/cv")]), 1),
    ],
)
def test_how_many_convolutions_a_build_names(build: Build, found: int) -> None:
    assert common_names(MODEL, build) == (found, 2)


def test_a_model_without_convolutions_is_known_by_all_its_nodes(g: Graph) -> None:
    model = Model(g.model(g.op("Neg", g.relu(g.input(1, 4), "r"), "n")))
    assert common_names(model, Build(layers=[layer("r", "PointWiseV2")])) == (1, 2)
    assert [trt_name(n) for n in model.nodes] == ["r", "n"]
    g = Graph()
    proto = g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1))
    written = ParsedTensor(
        next(n for n in proto.graph.node if n.op_type == "Conv").output[0], None, "FLOAT"
    )
    for node in proto.graph.node:
        node.name = ""
    for name, found in (("", 1), ("another", 0)):
        section = ParseSection([ParsedNode(name, "Conv", outputs=[None, written])])
        assert common_names(Model(proto), Build(parse=section)) == (found, 1)


def two_branches() -> onnx.ModelProto:
    """Two 3x3 convolutions that read one Q/DQ pair, each followed by a quantized 1x1 convolution."""
    net = Net()
    x = net.qdq(net.input((1, 8, 16, 16)))
    heads = [net.op("Relu", net.conv(x, 16, 3, name=f"c{i}")) for i in range(2)]
    return net.model(*(net.conv(net.qdq(head), 8, 1, name=f"d{i}") for i, head in enumerate(heads)))


MERGED_MODEL = two_branches()
LINES = log_of(predict(Model(MERGED_MODEL), TARGETS["trt8.5"]))
MERGED = next(i for i, line in enumerate(LINES) if line.startswith("Layer(") and " || " in line)


def check(lines: list[str]) -> tuple[int, set[str]]:
    result = verify(MERGED_MODEL, build_of(lines))
    return exit_code(result), {m.name for m in result.mismatches if m.kind == "convolution"}


@pytest.mark.parametrize(("place", "wrong"), [(0, {"c0", "c1"}), (1, {"c0"}), (2, {"c1"})])
def test_one_tensor_of_the_merged_layer_changed(place: int, wrong: set[str]) -> None:
    assert check(LINES) == (0, set())
    pieces = re.split(r"Int8(?=\[)", LINES[MERGED])
    assert len(pieces) == 4  # around one input and two outputs
    changed = "Int8".join(pieces[: place + 1]) + "Float" + "Int8".join(pieces[place + 1 :])
    assert check([*LINES[:MERGED], changed, *LINES[MERGED + 1 :]]) == (1, wrong)


PAIR = Model(two_convolutions())
PREDICTED = predict(PAIR, "rtx1.7")
ONE, OTHER = PREDICTED.convolutions
INT8, FP32, UNKNOWN = Precision.INT8, Precision.FP32, Precision.UNKNOWN


def built(precision: Precision, output: Precision, status: str = "built") -> BuiltModel:
    """The second convolution built as predicted, the first as given."""
    rows = [
        BuiltNode(ONE.index, "first", "Conv", precision, output=output),
        BuiltNode(OTHER.index, "second", "Conv", OTHER.precision, output=OTHER.output),
    ]
    return BuiltModel("tensorrt-rtx", status, nodes=rows)


@pytest.mark.parametrize(
    ("precision", "output", "same", "agrees"),
    [
        (INT8, ONE.output, True, True),
        (INT8, UNKNOWN, True, True),
        (FP32, ONE.output, False, False),
        (INT8, FP32 if ONE.output == INT8 else INT8, True, False),
        (FP32, UNKNOWN, False, False),
        (UNKNOWN, ONE.output, None, None),
    ],
)
def test_a_pair(
    precision: Precision, output: Precision, same: bool | None, agrees: bool | None
) -> None:
    """Both multiply in one type and write one; a row without a type is a convolution without a layer."""
    assert ONE.precision == INT8
    first, second = compare(PREDICTED, built(precision, output))
    assert (first.same_precision, first.agrees) == (same, agrees)
    assert (second.same_precision, second.agrees) == (True, True)


def test_outcomes_and_limits() -> None:
    for status, agrees in (("built", True), ("refused", False), ("timeout", None)):
        assert status_agrees(PREDICTED, built(INT8, INT8, status)) is agrees
    refused = predict(Model(two_convolutions(bad_zero_point=True)), "rtx1.7")
    assert status_agrees(refused, built(INT8, INT8, "refused")) is True
    assert in_order(range(100_000), range(100_000)) is None
    assert in_order(range(5000), range(5000)) == 5000


def by_table(first: list[int], second: list[int]) -> int:
    """Length of the longest common subsequence, by dynamic programming over both."""
    row = [0] * (len(second) + 1)
    for x in first:
        before = row[:]
        for j, y in enumerate(second):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


lists = st.lists(st.integers(0, 6), max_size=40)


@given(lists, lists)
def test_lines_in_order(first: list[int], second: list[int]) -> None:
    assert in_order(first, second) == by_table(first, second)
    found = agreement(first, second)
    common = sum(min(n, Counter(second)[x]) for x, n in Counter(first).items())
    assert found == TraceCounts(len(first), len(second), common, by_table(first, second))
    assert found.in_order is not None and found.in_order <= common


def chain_of_two() -> Model:
    net = Net()
    x = net.qdq(net.input((1, 8, 16, 16)))
    hidden = net.op("Relu", net.conv(x, 16, 3, name="first"))
    return Model(net.model(net.conv(net.qdq(hidden), 8, 1, name="second")))


def listing(*rows: tuple[str, str, str, str, str]) -> bytes:
    """Name, type, type of the first input, type of the output, and nodes of each layer."""

    def tensor(name: str, kind: str) -> dict[str, object]:
        return {"Name": name, "Dimensions": [1, 8, 16, 16], "Format/Datatype": kind}

    layers = [
        {
            "Name": name,
            "LayerType": kind,
            "Inputs": [tensor(f"t{i}", data)],
            "Outputs": [tensor(f"t{i + 1}", written)],
            "Constants": [tensor(f"w{i}", data)],
            "Metadata": "".join(f"[ONNX Layer: {n}]" for n in nodes.split()),
        }
        for i, (name, kind, data, written, nodes) in enumerate(rows)
    ]
    return json.dumps({"Layers": layers, "Bindings": ["t0", f"t{len(rows)}"]}).encode()


def test_the_kernel_that_multiplies_is_found_and_told() -> None:
    model = chain_of_two()
    mine = predict(model, "trt10")
    written = "Int8" if mine.convolution("first").output == Precision.INT8 else "Float"
    rows = [
        ("__myl_Quant_myl0_0", "kgen", "Float", "Int8", "q first"),
        ("first_myl0_1", "correlation", "Int8", written, "first"),
        ("second_myl0_2", "correlation", "Int8", "Float", "second"),
    ]
    result = verify(model, build_of(listing(*rows)), target="trt10")
    assert (result.convolutions.agree, result.convolutions.total) == (2, 2)
    rows[2] = ("second_myl0_2", "correlation", "Float", "Float", "second")
    result = verify(model, build_of(listing(*rows)), target="trt10")
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == ["second"]
