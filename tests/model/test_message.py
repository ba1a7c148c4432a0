import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qdqtool
from qdqtool.base.parameters import fits, require
from qdqtool.commands.demo_run import yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.fixing.api import fix
from qdqtool.model import external
from qdqtool.model.external import Parts
from qdqtool.model.graph import Model
from qdqtool.model.subgraphs import part_of
from tests.calibration.nets import conv_net
from tests.trt.builder import Graph
from tests.verification.comparing.networks import float_network, network


def typed() -> onnx.ModelProto:
    """Weights in fields of their types, with documentation and metadata on every level."""
    model = conv_net()
    graph = model.graph
    graph.initializer.append(
        helper.make_tensor("floats", TensorProto.FLOAT, [300], np.arange(300.0))
    )
    graph.initializer.append(helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"\xff"]))
    graph.initializer.append(
        TensorProto(name="empty", data_type=TensorProto.FLOAT, dims=[0], raw_data=b"")
    )
    graph.initializer[0].doc_string = "behind the data"
    graph.initializer[0].metadata_props.add(key="k", value="v")
    graph.doc_string, model.doc_string, model.domain = "graph", "model", ""
    graph.metadata_props.add(key="k", value="v")
    model.metadata_props.add(key="names", value="{0: 'person'}")
    model.producer_name = "somebody"
    model.model_version = 3
    return model


def with_function() -> onnx.ModelProto:
    model = typed()
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(
        helper.make_function("f", "F", ["a"], ["b"], body, list(model.opset_import))
    )
    values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    at = numpy_helper.from_array(np.array([0, 3]), "at")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, at, [9]))
    return model


def from_the_future() -> onnx.ModelProto:
    """Fields that no onnx knows: 3000 of the model, of its graph and of a weight."""
    field = b"\xc2\xbb\x01\x03new"
    weight = TensorProto.FromString(conv_net().graph.initializer[0].SerializeToString() + field)
    graph = onnx.GraphProto.FromString(conv_net().graph.SerializeToString() + field)
    graph.initializer.append(weight)
    return onnx.ModelProto.FromString(
        onnx.ModelProto(ir_version=9, graph=graph).SerializeToString() + field
    )


def weight_from_the_future() -> onnx.ModelProto:
    model = conv_net()
    model.graph.initializer.append(from_the_future().graph.initializer[-1])
    return model


def documented_otherwise(
    field: bytes, part: Callable[[onnx.ModelProto], Any]
) -> Callable[[], onnx.ModelProto]:
    """Makes a model of which a part has a documentation of two bytes that are not UTF-8."""

    def made() -> onnx.ModelProto:
        model = typed()
        part(model).MergeFromString(field + b"\x02\xff\xfe")
        return model

    return made


OTHERWISE = [
    documented_otherwise(b"\x32", lambda m: m),
    documented_otherwise(b"\x52", lambda m: m.graph),
    documented_otherwise(b"\x62", lambda m: m.graph.initializer[0]),
]


@pytest.mark.parametrize(
    "made",
    [
        *OTHERWISE,
        conv_net,
        typed,
        with_function,
        from_the_future,
        weight_from_the_future,
        onnx.ModelProto,
        lambda: yolov8n(64),  # a graph whose length takes four bytes
        lambda: onnx.ModelProto(ir_version=8),
        lambda: onnx.ModelProto(graph=onnx.GraphProto()),
    ],
)
def test_parts_joined_are_the_message(
    made: Callable[[], onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    wanted = model.SerializeToString(deterministic=True)
    for large in (external._COPIED, 0):
        monkeypatch.setattr(external, "_COPIED", large)
        parts = Parts(model)
        assert b"".join(parts) == wanted == b"".join(parts), "and once more"
        assert parts.size == len(wanted)


def test_a_message_is_known_by_its_hash_and_its_parts_are_small() -> None:
    model = yolov8n(64)
    weights = [len(t.raw_data) for t in model.graph.initializer]
    assert max(map(len, Parts(model))) < max(weights) + 200_000 < sum(weights) / 8
    model = typed()
    assert (
        Model(model).sha256
        == hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(network(spoilt=[1]).SerializeToString())
    return tmp_path / "model.onnx"


def test_what_is_public_and_how_it_shows(model: Path) -> None:
    assert dir(qdqtool) == sorted(qdqtool.__all__)
    assert all(getattr(qdqtool, name) is not None for name in qdqtool.__all__)
    results = [
        qdqtool.predict(model),
        qdqtool.extract(model, finding="W-NO-DQ"),
        qdqtool.compare(model, model),
    ]
    assert all(len(repr(r)) < 300 and repr(r).startswith("<") for r in results)
    assert not qdqtool.predict(model, "trt8.5").ok
    assert qdqtool.predict(network(weights="tensor"), "trt8.5").ok
    assert qdqtool.extract(model, finding="W-NO-DQ").ok
    assert (
        qdqtool.compare(float_network(), network()).ok and not qdqtool.compare(network(), model).ok
    )


def test_an_extraction_never_writes_over_its_model_or_weights(model: Path, tmp_path: Path) -> None:
    result = qdqtool.extract(model, finding="W-NO-DQ")
    before = model.read_bytes()
    with pytest.raises(QdqtoolError):
        result.save(model)
    assert model.read_bytes() == before
    result.save(model.with_name("small.onnx"))
    assert onnx.load(model.with_name("small.onnx")) == result.proto
    onnx.save(
        network(spoilt=[1]),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    result = qdqtool.extract(tmp_path / "model.onnx", finding="W-NO-DQ")
    before = (tmp_path / "w.bin").read_bytes()
    with pytest.raises(QdqtoolError):
        result.save(tmp_path / "w.bin")
    assert (tmp_path / "w.bin").read_bytes() == before


FUNCTIONS = {
    **{
        n: getattr(qdqtool, n)
        for n in ("insert", "predict", "verify", "compare", "extract", "report", "tune")
    },
    "fix": fix,
}
WRONG: tuple[Any, ...] = (
    object(),
    5,
    2.5,
    True,
    None,
    "no such thing",
    b"\x00\x01",
    [],
    [object()],
    {},
    {1: 2},
    (1, "a"),
    {3},
    1j,
    int,
    np.zeros((2, 2)),
    np.float32(1),
    Path("no such file"),
    lambda: 0,
    float("nan"),
    [[1]],
    [None],
    "",
    -1,
)
CASES = [
    (f, p)
    for f, function in FUNCTIONS.items()
    for p in inspect.signature(function).parameters
    if p not in ("say", "mapper")
]


def relu_net() -> Any:
    g = Graph()
    return g.model(g.relu(g.conv(g.input(1, 8, 8, 8), "c0"), "r0"))


@pytest.mark.parametrize(
    ("number", "name", "parameter"), [(number, *case) for number, case in enumerate(CASES)]
)
def test_no_wrong_type_comes_from_inside(
    number: int, name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter gets half of the values, the next one the others; the slow test_parameters.py has all."""
    monkeypatch.chdir(tmp_path)
    function = FUNCTIONS[name]
    texts = {"data": "no such folder", "builds": "no such log"}
    network = relu_net()
    needed = {
        p: texts.get(p, network)
        for p in ("model", "source", "a", "b", "data", "builds")
        if p in inspect.signature(function).parameters
    }
    default = inspect.signature(function).parameters[parameter].default
    for value in (v for v in WRONG[number % 2 :: 2] if v is not default):
        given = {**needed, parameter: value}
        builds = (
            [given.pop("builds")]
            if "builds" in given and (name == "verify" or parameter == "builds")
            else []
        )
        given.pop("builds", None)
        first = [given.pop(p) for p in ("model", "source", "a") if p in given]
        message = ""
        try:
            function(*first, *builds, **given)
        except QdqtoolError as error:
            message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("predict", "model", 5),
        ("predict", "target", 8.5),
        ("predict", "assume", [1]),
        ("verify", "builds", None),
        ("compare", "b", 1),
        ("extract", "hops", "2"),
        ("extract", "check", ["ls"]),
        ("report", "calib_cache", 3),
        ("tune", "keep", "0.9"),
        ("tune", "exclude", "conv"),
        ("insert", "percentile", "high"),
        ("insert", "size", 320),
        ("insert", "calib_cache", 4),
        ("fix", "only", "BIAS-DQ"),
        ("fix", "source", []),
    ],
)
def test_the_parameter_is_named(name: str, parameter: str, value: object) -> None:
    given: dict[str, Any] = {"data": "images"} if name in ("tune", "insert") else {}
    given = {**given, "a": relu_net()} if name == "compare" else given
    first = (
        [value] if parameter in ("model", "source") else [] if name == "compare" else [relu_net()]
    )
    if parameter == "builds":
        first.append(value)
    elif parameter not in ("model", "source"):
        given[parameter] = value
    with pytest.raises(QdqtoolError, match=f"^`{parameter}=.*: is .*; give "):
        FUNCTIONS[name](*first, **given)


def test_what_is_right() -> None:
    assert (
        fits(np.int64(3), int)
        and fits(np.float32(3), float)
        and fits(3, float)
        and fits(np.int8(3), float)
    )
    assert fits([320, 320], tuple[int, int]) and fits(np.array([320, 320]), tuple[int, int])
    assert (
        not fits(True, int) and not fits([1], tuple[int, int]) and not fits("ab", tuple[str, str])
    )
    assert not fits(iter(["a"]), Sequence[str]) and not fits(
        np.array(["a"]), Sequence[str]
    )  # once only; no truth
    assert fits(Path("a"), os.PathLike[str])
    with pytest.raises(QdqtoolError, match="give a path"):
        require("path", next(os.scandir(b"/")), os.PathLike[str], __name__)  # a path of bytes
    for given, hint, plain in (
        (np.float32(3), float, 3.0),
        (Fraction(1, 2), "float | None", 0.5),
        (np.int8(3), "int | float", 3),
        (np.int8(3), float, 3.0),
        (np.array([32, 64]), "tuple[int, int] | None", (32, 64)),
    ):
        found = require("number", given, hint, __name__)
        assert found == plain and type(found) is type(plain)
    assert qdqtool.predict(relu_net(), advice=np.bool_(False)).summary()["convolutions"] == 1  # type: ignore[arg-type]


def test_a_part_is_what_its_outputs_need() -> None:
    """Nodes, also for a subgraph, and constants; the header is the whole's, what is given is not computed."""
    ends = [onnx.ValueInfoProto(name="in")]
    inner = helper.make_graph([helper.make_node("Add", ["a", "w"], ["in"])], "inner", [], ends)
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["unused"]),
        helper.make_node("If", ["given"], ["b"], then_branch=inner, else_branch=inner),
        helper.make_node("Mul", ["b", "sparse"], ["c"]),
    ]
    constants = [numpy_helper.from_array(np.ones(1, np.float32), n) for n in ("w", "other")]
    graph = helper.make_graph(nodes, "g", [], [], constants)
    for name in ("sparse", "far"):
        values = numpy_helper.from_array(np.ones(1, np.float32), name)
        graph.sparse_initializer.add(values=values, dims=[4])
    proto = helper.make_model(graph, producer_name="p", opset_imports=[helper.make_opsetid("", 17)])
    helper.set_model_props(proto, {"stride": "32"})
    part, needed = part_of(
        proto, proto.graph.node, [onnx.ValueInfoProto(name="c")], proto.graph.initializer
    )
    assert [n.op_type for n in part.graph.node] == ["Relu", "If", "Mul"]
    assert needed == {"x", "w", "sparse", "a", "b", "c", "given"}
    assert [t.name for t in part.graph.initializer] == ["w"]
    assert [t.values.name for t in part.graph.sparse_initializer] == ["sparse"]
    assert (part.producer_name, part.metadata_props[0].value, part.opset_import[0].version) == (
        "p",
        "32",
        17,
    )
    part, needed = part_of(
        proto, proto.graph.node, [onnx.ValueInfoProto(name="c")], proto.graph.initializer, {"b"}
    )
    assert [n.op_type for n in part.graph.node] == ["Mul"] and needed == {"b", "sparse", "c"}
    assert not part.graph.initializer and len(proto.graph.node) == 4
