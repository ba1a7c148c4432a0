import json
import re
from collections import Counter

import onnx
import pytest
from hypothesis import given, strategies as st

from qdqtool.buildlog.agreement import TraceCounts
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    LogEvent,
    ParsedNode,
    ParsedTensor,
    ParseSection,
)
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.verification.api import exit_code, verify
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.kernels import product_rank
from qdqtool.verification.layer_mapping import (
    NodeMapper,
    count_named_convolutions,
    find_name_conflicts,
    find_output_conflicts,
    is_auxiliary,
)
from qdqtool.verification.local_build import BuiltModel, is_status_as_predicted, pair_convolutions
from qdqtool.verification.log_comparison import count_agreement, longest_common_subsequence
from tests.builders.models import two_convolutions
from tests.buildlog.calls import count_calls
from tests.buildlog.samples import build_of
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of
from tools.fuzz.net import Net


@pytest.mark.parametrize(
    ("kind", "rank", "generated_rank"),
    [
        ("correlation", 0, 0),
        ("deconv", 1, 1),
        ("gemm", 2, 2),
        ("CaskConvolution", 5, 5),
        ("CudnnGemm", 5, 5),
        ("MatMul", 5, 5),
        ("MatrixMultiply", 5, 5),
        ("PointWise", None, None),
        ("kgen", None, 7),
        ("fusion", None, 6),
    ],
)
def test_product_rank(kind: str, rank: int | None, generated_rank: int | None) -> None:
    """The name of generated code contains its steps."""
    assert product_rank(BuiltLayer(name="n", type=kind)) == rank
    assert product_rank(BuiltLayer(name="__myl_MulCorrAdd_myl0_1", type=kind)) == generated_rank


@pytest.mark.parametrize(
    ("kind", "name", "auxiliary"),
    [
        ("Constant", "c", True),
        ("Myelin", "{ForeignNode[a...b]}", True),
        ("Myelin", "a", False),
        ("Convolution", "c", False),
        ("Myelin", "{ForeignNode[a", True),
        ("CaskConvolution", "{ForeignNode[a", False),
    ],
)
def test_is_auxiliary(kind: str, name: str, auxiliary: bool) -> None:
    assert is_auxiliary(BuiltLayer(name=name, type=kind)) is auxiliary


def two_in_a_row() -> Model:
    g = Graph(constant_nodes=True)
    x = g.relu(g.conv(g.input(1, 8, 4, 4), "/m.0/cv", 8, 1), "r")
    proto = g.model(g.conv(x, "/m_1/cv", 8, 1, scale=None, weights="float"))
    next(n for n in proto.graph.node if n.op_type == "Relu").name = ""
    return Model(proto)


MODEL = two_in_a_row()
FIRST, SECOND = (n for n in MODEL.nodes if n.op == "Conv")
RELU = next(n for n in MODEL.nodes if n.op == "Relu")


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("/m.0/cv", FIRST),
        ("/m_1/cv", SECOND),
        ("node_of_r:0", RELU),
        ("/m_0/cv", FIRST),  # Myelin replaces dots with underscores
        ("/m.0/cv_clone_2", FIRST),  # a copy
        ("/m.0", None),
        ("cv", None),
        ("", None),
        ("r:0", None),
    ],
)
def test_mapper_find_node(name: str, node: object) -> None:
    assert NodeMapper(MODEL, []).find_node(name) is node


@pytest.mark.parametrize(
    ("name", "maps", "kernel", "conflict"),
    [
        ("c.weight + c.w.Q + c", 8, [3, 3], None),
        ("c.weight + c.w.Q + c", 16, [3, 3], ("8x3x3", "16x3x3")),
        ("c.weight + c.w.Q + c", 8, [1, 1], ("8x3x3", "8x1x1")),
        ("d.weight + d.w.Q + c", 8, [3, 3], ("c.weight", "d.weight")),
        ("c", 8, [3, 3], None),
    ],
)
def test_name_conflicts_of_a_convolution(
    name: str, maps: int, kernel: list[int], conflict: tuple[str, str] | None, g: Graph
) -> None:
    """The layer states the filters and the kernel, and its name contains the weights."""
    model = Model(g.model(g.conv(g.conv(g.input(1, 4, 16, 16), "c", 8, 3), "d", 8, 3)))
    build = Build(
        layers=[BuiltLayer(name, "CaskConvolution", extras={"OutMaps": maps, "Kernel": kernel})]
    )
    assert find_name_conflicts(View(model), build, NodeMapper(model, build.layers)) == (
        [] if conflict is None else [("c", *conflict)]
    )


@pytest.mark.parametrize(
    ("op", "shape", "conflict"),
    [
        ("Conv", (8, 4, 3, 3), []),
        ("Conv", (8, None, 3, 3), []),
        ("MaxPool", (8, 4, 3, 3), [("c", "Conv", "MaxPool")]),
        ("Conv", (16, 4, 3, 3), [("c", "8x4x3x3", "16x4x3x3")]),
    ],
)
def test_name_conflicts_of_a_parsed_node(
    op: str, shape: tuple[int | None, ...], conflict: list[tuple[str, str, str]], g: Graph
) -> None:
    model = Model(g.model(g.conv(g.input(1, 4, 16, 16), "c", 8, 3)))
    node = ParsedNode("c", op, [None, ParsedTensor("w", shape, "FLOAT")])
    assert (
        find_name_conflicts(View(model), Build(parse=ParseSection([node])), NodeMapper(model, []))
        == conflict
    )


@pytest.mark.parametrize("name", ["a.b", "a_b"])
def test_mapper_find_node_prefers_the_exact_name(name: str, g: Graph) -> None:
    model = Model(g.model(g.conv(g.conv(g.input(1, 8, 4, 4), "a.b", 8, 1), "a_b", 8, 1)))
    assert NodeMapper(model, []).find_node(name).name == name


def test_mapper_splits_the_name_of_a_layer_once() -> None:
    # One layer can have many convolutions, and mapping each one needs all nodes of the layer.
    mapper = NodeMapper(MODEL, [layer("/m.0/cv || /m_1/cv")])
    assert mapper.layer_nodes(mapper.layers[0]) == [FIRST, SECOND]
    assert count_calls(mapper.layer_nodes, mapper.layers[0]) < 5


def test_mapper_positions_in_a_merged_layer() -> None:
    mapper = NodeMapper(MODEL, [layer("/m.0/cv || /m_1/cv + node_of_r:0")])
    positions = [mapper.find_layer(n) for n in (FIRST, SECOND, RELU)]
    assert [None if p is None else p[1] for p in positions] == [0, 1, 1]
    assert mapper.layer_nodes(mapper.layers[0]) == [FIRST, SECOND, RELU]


def test_mapper_prefers_metadata_to_the_name() -> None:
    mapper = NodeMapper(MODEL, [layer("/m.0/cv", "CaskConvolution", "/m_1/cv", "unknown")])
    assert (mapper.find_layer(FIRST), mapper.find_layer(SECOND)) == (None, (mapper.layers[0], 0))


def test_mapper_ignores_foreign_nodes() -> None:
    block = layer("{ForeignNode[/m.0/cv.../m_1/cv]}", "Other")
    assert (
        NodeMapper(MODEL, [block]).find_layer(FIRST) is None
        and NodeMapper(MODEL, []).layer_nodes(block) == []
    )


def test_mapper_with_the_names_of_the_build() -> None:
    names = {n.index: f"n{n.index}" for n in MODEL.nodes}
    mapper = NodeMapper(MODEL, [BuiltLayer(f"n{FIRST.index}", "CaskConvolution")], names)
    assert mapper.find_node(f"n{FIRST.index}") is FIRST and mapper.find_node(FIRST.name) is None
    assert mapper.find_layer(FIRST) is not None


def layer(name: str, kind: str = "CaskConvolution", *nodes: str) -> BuiltLayer:
    return BuiltLayer(name, kind, onnx_names=list(nodes))


@pytest.mark.parametrize(
    ("layers", "index"),
    [
        ([layer("/m.0/cv")], 0),
        ([], None),
        ([layer("/m_1/cv")], None),
        (
            [layer("k0", "kgen", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")],
            1,
        ),  # the better rank
        ([layer("k1", "correlation", "/m.0/cv"), layer("k0", "kgen", "/m.0/cv")], 0),
        (
            [layer("k0", "correlation", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")],
            None,
        ),  # equal ranks
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
def test_mapper_find_layer(layers: list[BuiltLayer], index: int | None) -> None:
    position = NodeMapper(MODEL, layers).find_layer(FIRST)
    assert (None if position is None else layers.index(position[0])) == index


@pytest.mark.parametrize(
    ("build", "common"),
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
def test_count_named_convolutions(build: Build, common: int) -> None:
    assert count_named_convolutions(MODEL, build) == (common, 2)


def test_count_named_convolutions_of_a_model_without_convolutions(g: Graph) -> None:
    model = Model(g.model(g.op("Neg", g.relu(g.input(1, 4), "r"), "n")))
    assert count_named_convolutions(model, Build(layers=[layer("r", "PointWiseV2")])) == (1, 2)
    assert [n.parser_name for n in model.nodes] == ["r", "n"]


@pytest.mark.parametrize(("name", "common"), [("", 1), ("another", 0)])
def test_count_named_convolutions_of_unnamed_nodes(name: str, common: int, g: Graph) -> None:
    # The parse section names them by their outputs.
    proto = g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1))
    for node in proto.graph.node:
        node.name = ""
    (conv,) = (n for n in proto.graph.node if n.op_type == "Conv")
    section = ParseSection(
        [ParsedNode(name, "Conv", outputs=[None, ParsedTensor(conv.output[0], None, "FLOAT")])]
    )
    assert count_named_convolutions(Model(proto), Build(parse=section)) == (common, 1)


def two_branches() -> onnx.ModelProto:
    net = Net()
    x = net.qdq(net.input((1, 8, 16, 16)))
    heads = [net.op("Relu", net.conv(x, 16, 3, name=f"c{i}")) for i in range(2)]
    return net.model(*(net.conv(net.qdq(head), 8, 1, name=f"d{i}") for i, head in enumerate(heads)))


MERGED_MODEL = two_branches()
LINES = log_of(predict(Model(MERGED_MODEL), TARGETS["trt8.5"]))
MERGED = next(i for i, line in enumerate(LINES) if line.startswith("Layer(") and " || " in line)


@pytest.mark.parametrize(
    ("place", "wrong"), [(None, set()), (0, {"c0", "c1"}), (1, {"c0"}), (2, {"c1"})]
)
def test_verify_finds_a_changed_tensor_of_a_merged_layer(
    place: int | None, wrong: set[str]
) -> None:
    pieces = re.split(r"(Int8)(?=\[)", LINES[MERGED])
    assert pieces.count("Int8") == 3  # one input and two outputs
    if place is not None:
        pieces[2 * place + 1] = "Float"
    result = verify(
        MERGED_MODEL, build_of([*LINES[:MERGED], "".join(pieces), *LINES[MERGED + 1 :]])
    )
    assert {m.name for m in result.mismatches if m.kind == "convolution"} == wrong
    assert exit_code(result) == bool(wrong)


PREDICTED = predict(Model(two_convolutions()), "rtx1.7")
ONE, OTHER = PREDICTED.convolutions
INT8, FP32, UNKNOWN = Precision.INT8, Precision.FP32, Precision.UNKNOWN


def built(precision: Precision, output: Precision, status: str = "built") -> BuiltModel:
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
def test_pair_convolutions_agreement(
    precision: Precision, output: Precision, same: bool | None, agrees: bool | None
) -> None:
    assert ONE.precision == INT8
    first, second = pair_convolutions(PREDICTED, built(precision, output).nodes)
    assert (first.same_precision, first.agrees) == (same, agrees)
    assert (second.same_precision, second.agrees) == (True, True)


@pytest.mark.parametrize(
    ("bad_zero_point", "status", "agrees"),
    [
        (False, "built", True),
        (False, "refused", False),
        (False, "timeout", None),
        (True, "refused", True),
    ],
)
def test_is_status_as_predicted(bad_zero_point: bool, status: str, agrees: bool | None) -> None:
    prediction = predict(Model(two_convolutions(bad_zero_point=bad_zero_point)), "rtx1.7")
    assert is_status_as_predicted(prediction, built(INT8, INT8, status)) is agrees


@pytest.mark.parametrize(("length", "expected"), [(5000, 5000), (100_000, None)])
def test_longest_common_subsequence_of_long_sequences(length: int, expected: int | None) -> None:
    assert longest_common_subsequence(range(length), range(length)) == expected


def dynamic_programming_length(first: list[int], second: list[int]) -> int:
    row = [0] * (len(second) + 1)
    for x in first:
        before = row[:]
        for j, y in enumerate(second):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


lists = st.lists(st.integers(0, 6), max_size=40)


@given(lists, lists)
def test_count_agreement(first: list[int], second: list[int]) -> None:
    ordered = dynamic_programming_length(first, second)
    common = (Counter(first) & Counter(second)).total()
    assert longest_common_subsequence(first, second) == ordered
    assert count_agreement(first, second) == TraceCounts(len(first), len(second), common, ordered)


@pytest.mark.parametrize(
    ("kind", "shape", "conflicts"),
    [
        ("CaskConvolution", (1, 8, 16, 16), []),
        ("CaskConvolution", (4, 8, 16, 16), []),  # the batch may differ
        ("CaskConvolution", (None, 8, 16, 16), []),
        ("CaskConvolution", (1, 8, None, 16), []),
        ("CaskConvolution", (8, 256), []),  # reshaped
        ("CaskConvolution", (), []),
        ("CaskConvolution", (1, 16, 16, 16), [("c", "1x8x16x16", "1x16x16x16")]),
        ("CaskConvolution", (None, 8, 8, 8), [("c", "1x8x16x16", "?x8x8x8")]),
        ("ConvActPool", (1, 8, 8, 8), []),
        ("", (1, 8, 16, 16), []),  # in the parse section
        ("", (None, 8, 32, 32), [("c", "1x8x16x16", "?x8x32x32")]),
    ],
)
def test_output_conflicts(
    kind: str, shape: tuple[int | None, ...], conflicts: list[tuple[str, str, str]], g: Graph
) -> None:
    model = Model(g.model(g.conv(g.input(1, 4, 16, 16), "c", 8, 3)))
    node = ParsedNode("c", "Conv", [], [ParsedTensor("y", shape, "FLOAT")])
    build = Build(
        layers=[BuiltLayer("c", kind, outputs=[BuiltTensor("y", shape=shape)])] if kind else [],
        parse=ParseSection([] if kind else [node]),
    )
    assert find_output_conflicts(View(model), build, NodeMapper(model, build.layers)) == conflicts


def listing(*rows: tuple[str, str, str, str, str]) -> bytes:
    def tensor(name: str, kind: str) -> dict[str, object]:
        return {"Name": name, "Dimensions": [1, 8, 16, 16], "Format/Datatype": kind}

    layers = [
        {
            "Name": name,
            "LayerType": kind,
            "Inputs": [tensor(f"t{i}", data)],
            "Outputs": [tensor(f"t{i + 1}", output)],
            "Constants": [tensor(f"w{i}", data)],
            "Metadata": "".join(f"[ONNX Layer: {n}]" for n in nodes.split()),
        }
        for i, (name, kind, data, output, nodes) in enumerate(rows)
    ]
    return json.dumps({"Layers": layers, "Bindings": ["t0", f"t{len(rows)}"]}).encode()


@pytest.mark.parametrize(("data", "wrong"), [("Int8", []), ("Float", ["second"])])
def test_verify_compares_the_kernel_that_multiplies(data: str, wrong: list[str]) -> None:
    net = Net()
    hidden = net.op("Relu", net.conv(net.qdq(net.input((1, 8, 16, 16))), 8, 3, name="first"))
    model = Model(net.model(net.conv(net.qdq(hidden), 8, 1, name="second")))
    predicted = predict(model, "trt10").convolution("first").output
    rows = [
        ("__myl_Quant_myl0_0", "kgen", "Float", "Int8", "q first"),
        ("first_myl0_1", "correlation", "Int8", "Int8" if predicted == INT8 else "Float", "first"),
        ("second_myl0_2", "correlation", data, "Float", "second"),
    ]
    result = verify(model, build_of(listing(*rows)), target="trt10")
    assert (result.convolutions.agree, result.convolutions.total) == (2 - len(wrong), 2)
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == wrong
