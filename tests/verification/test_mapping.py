"""From engine layers back to nodes: which layers multiply, which no prediction speaks of, and whose they are."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.records import ParsedNode, ParsedTensor, ParseSection
from qdqtool.buildlog.types import Build, BuiltLayer, LogEvent
from qdqtool.graph import Model
from qdqtool.verification.mapping import Mapper, common_names, is_aside, product_rank, trt_name
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("correlation", 0), ("deconv", 1), ("gemm", 2), ("CaskConvolution", 5), ("CudnnGemm", 5), ("MatMul", 5),
     ("MatrixMultiply", 5), ("PointWise", None), ("kgen", None), ("fusion", None)],
)  # fmt: skip
def test_how_telling_a_layer_is_of_a_product(kind: str, rank: int | None) -> None:
    assert product_rank(BuiltLayer(name="n", type=kind)) == rank
    told = product_rank(BuiltLayer(name="__myl_MulCorrAdd_myl0_1", type=kind))
    assert told == {"kgen": 7, "fusion": 6}.get(kind, rank), "generated code tells its steps in its name"


@pytest.mark.parametrize(
    ("kind", "name", "aside"),
    [("Constant", "c", True), ("Myelin", "{ForeignNode[a...b]}", True), ("Myelin", "a", False),
     ("Convolution", "c", False), ("Myelin", "{ForeignNode[a", True), ("CaskConvolution", "{ForeignNode[a", False)],
)  # fmt: skip
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


def node_of(name: str) -> str | None:
    found = Mapper(MODEL, []).node(name)
    return None if found is None else found.op + str(found.index)


@pytest.mark.parametrize(("name", "node"), [
    ("/m.0/cv", FIRST), ("/m_1/cv", SECOND), ("node_of_r:0", RELU),
    ("/m_0/cv", FIRST),  # Myelin writes dots as underscores
    ("/m.0/cv_clone_2", FIRST),  # a copy of it
    ("/m.0", None), ("cv", None), ("", None), ("r:0", None),
])  # fmt: skip
def test_the_node_behind_a_name(name: str, node: object) -> None:
    expected = None if node is None else f"{node.op}{node.index}"  # type: ignore[attr-defined]
    assert node_of(name) == expected


def test_a_name_of_its_own_comes_before_one_that_is_spelled_alike() -> None:
    g = Graph()
    x = g.conv(g.input(1, 8, 4, 4), "a.b", 8, 1)
    model = Model(g.model(g.conv(x, "a_b", 8, 1)))
    mapper = Mapper(model, [])
    for name in ("a.b", "a_b"):
        found = mapper.node(name)
        assert found is not None and found.name == name


def test_names_of_the_build_outrank_the_parsers() -> None:
    """What a builder was given under other names; the model's own name is then another layer's."""
    names = {n.index: f"n{n.index}" for n in MODEL.nodes}
    mapper = Mapper(MODEL, [BuiltLayer(f"n{FIRST.index}", "CaskConvolution")], names)
    assert mapper.node(f"n{FIRST.index}") is FIRST and mapper.node(FIRST.name) is None
    assert mapper.layer_of(FIRST) is not None


def test_constants_are_known_names() -> None:
    """Weights of initializers and of Constant nodes settle where a fused name is cut; other tensors are none."""
    assert {t for n in MODEL.nodes if n.op == "Constant" for t in n.outputs} <= Mapper(MODEL, []).known
    assert not {FIRST.output, SECOND.output, "x"} & Mapper(MODEL, []).known
    g = Graph()
    plain = Model(g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1)))
    assert set(plain.initializers) <= Mapper(plain, []).known


def layer(name: str, kind: str = "CaskConvolution", *nodes: str) -> BuiltLayer:
    return BuiltLayer(name, kind, onnx_names=list(nodes))


@pytest.mark.parametrize(("layers", "found"), [
    ([layer("/m.0/cv")], 0), ([], None), ([layer("/m_1/cv")], None),
    ([layer("k0", "kgen", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")], 1),  # the more telling one
    ([layer("k1", "correlation", "/m.0/cv"), layer("k0", "kgen", "/m.0/cv")], 0),
    ([layer("k0", "correlation", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv")], None),  # either may be it
    ([layer("k0", "kgen", "/m.0/cv"), layer("k1", "kgen", "/m.0/cv")], None),
    ([layer("k0", "gemm", "/m.0/cv"), layer("k1", "correlation", "/m.0/cv"), layer("k2", "deconv", "/m.0/cv")], 1),
    ([layer("k0", "PointWiseV2", "/m.0/cv")], 0),  # the only one
    ([layer("Reformatting CopyNode for Input Tensor 0 to /m.0/cv", "Reformat"), layer("/m.0/cv")], 1),
])  # fmt: skip
def test_the_layer_of_a_convolution(layers: list[BuiltLayer], found: int | None) -> None:
    place = Mapper(MODEL, layers).layer_of(FIRST)
    assert (None if place is None else layers.index(place[0])) == found


def test_places_in_a_merged_layer() -> None:
    mapper = Mapper(MODEL, [layer("/m.0/cv || /m_1/cv + node_of_r:0")])
    places = [mapper.layer_of(n) for n in (FIRST, SECOND, RELU)]
    assert [None if p is None else p[1] for p in places] == [0, 1, 1]
    assert mapper.nodes(mapper.layers[0]) == [FIRST, SECOND, RELU]


def test_the_metadata_outranks_the_name() -> None:
    mapper = Mapper(MODEL, [layer("/m.0/cv", "CaskConvolution", "/m_1/cv", "unknown")])
    assert (mapper.layer_of(FIRST), mapper.layer_of(SECOND)) == (None, (mapper.layers[0], 0))
    block = layer("{ForeignNode[/m.0/cv.../m_1/cv]}", "Other")
    assert Mapper(MODEL, [block]).layer_of(FIRST) is None and Mapper(MODEL, []).nodes(block) == []


@pytest.mark.parametrize(("build", "found"), [
    (Build(), 0), (Build(layers=[layer("/m.0/cv")]), 1), (Build(layers=[layer("w + /m.0/cv || v + /m_1/cv")]), 2),
    (Build(layers=[layer("k", "kgen", "/m.0/cv", "/m_1/cv")]), 2),
    (Build(layers=[layer("/m_0/cv", "kgen")]), 0),  # dots as underscores: only Myelin
    (Build(layers=[layer("/m_0/cv_myl0_1", "kgen")]), 1),
    (Build(trace=[LogEvent("P", "Running", "/m.0/cv")]), 1),
    (Build(parse=ParseSection([ParsedNode("/m.0/cv", "Conv"), ParsedNode("other", "Conv")])), 1),
    (Build(trace=[LogEvent("P", "Fusing", "other", "w + /m_1/cv")]), 1),
])  # fmt: skip
def test_how_many_convolutions_a_build_names(build: Build, found: int) -> None:
    assert common_names(MODEL, build) == (found, 2)


def test_a_model_without_convolutions_is_known_by_all_its_nodes() -> None:
    g = Graph()
    model = Model(g.model(g.op("Neg", g.relu(g.input(1, 4), "r"), "n")))
    assert common_names(model, Build(layers=[layer("r", "PointWiseV2")])) == (1, 2)
    assert [trt_name(n) for n in model.nodes] == ["r", "n"]


def test_a_node_without_a_name_is_known_by_what_it_writes() -> None:
    g = Graph()
    proto = g.model(g.conv(g.input(1, 8, 4, 4), "c", 8, 1))
    written = ParsedTensor(next(n for n in proto.graph.node if n.op_type == "Conv").output[0], None, "FLOAT")
    for node in proto.graph.node:
        node.name = ""
    for name, found in (("", 1), ("another", 0)):
        section = ParseSection([ParsedNode(name, "Conv", outputs=[None, written])])
        assert common_names(Model(proto), Build(parse=section)) == (found, 1)
