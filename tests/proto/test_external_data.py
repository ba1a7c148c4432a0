import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.proto.external_data import serialize_in_parts
from qdqtool.proto.subgraphs import extract_submodel
from tests.calibration.nets import conv_net
from tests.comparison.networks import float_network, network
from tests.errors import has


def documented() -> onnx.ModelProto:
    model = conv_net()
    graph, large = model.graph, onnx.numpy_helper.from_array(np.ones(2048, np.float32), "large")
    large.doc_string = "after the data"
    large.metadata_props.add(key="k", value="v")
    graph.initializer.insert(0, large)
    graph.initializer.append(
        onnx.helper.make_tensor("floats", onnx.TensorProto.FLOAT, [300], np.arange(300.0))
    )
    graph.initializer.append(
        onnx.helper.make_tensor("texts", onnx.TensorProto.STRING, [2], [b"a", b"\xff"])
    )
    graph.initializer.append(
        onnx.TensorProto(name="empty", data_type=onnx.TensorProto.FLOAT, dims=[0], raw_data=b"")
    )
    graph.doc_string, model.doc_string, model.domain = "graph", "model", ""
    graph.metadata_props.add(key="k", value="v")
    model.metadata_props.add(key="names", value="{0: 'person'}")
    model.producer_name, model.model_version = "somebody", 3
    return model


def with_field(part: str, data: bytes) -> onnx.ModelProto:
    model = documented()
    message = {"model": model, "graph": model.graph, "weight": model.graph.initializer[0]}[part]
    message.MergeFromString(data)
    return model


BINARY_DOCUMENTATION = [
    pytest.param(
        functools.partial(with_field, part, field + b"\x02\xff\xfe"), id=f"documentation of {part}"
    )
    for part, field in (("model", b"\x32"), ("graph", b"\x52"), ("weight", b"\x62"))
]


def with_function() -> onnx.ModelProto:
    model, body = documented(), [onnx.helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(
        onnx.helper.make_function("f", "F", ["a"], ["b"], body, list(model.opset_import))
    )
    values = onnx.numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    indices = onnx.numpy_helper.from_array(np.array([0, 3]), "indices")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [9]))
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones(1 << 20, np.float32), "big")
    )
    return model


@pytest.mark.parametrize(
    "build",
    [
        *BINARY_DOCUMENTATION,
        *(
            # onnx does not define the field 3000.
            functools.partial(with_field, part, b"\xc2\xbb\x01\x03new")
            for part in ("model", "graph", "weight")
        ),
        conv_net,
        with_function,
        onnx.ModelProto,
        lambda: onnx.ModelProto(graph=onnx.GraphProto()),
    ],
)
def test_joined_parts_are_the_message(build: Callable[[], onnx.ModelProto]) -> None:
    model = build()
    assert b"".join(serialize_in_parts(model)) == model.SerializeToString(deterministic=True)


def test_sha256_is_that_of_the_message() -> None:
    message = documented().SerializeToString(deterministic=True)
    assert Model(documented()).sha256 == hashlib.sha256(message).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(network(spoilt=[1]).SerializeToString())
    return tmp_path / "model.onnx"


def test_public_names_are_listed() -> None:
    assert dir(qdqtool) == sorted(qdqtool.__all__)
    assert all(getattr(qdqtool, name) is not None for name in qdqtool.__all__)


def test_results_say_whether_they_are_ok(model: Path) -> None:
    assert not qdqtool.predict(model, "trt8.5").ok
    assert qdqtool.predict(network(weights="tensor"), "trt8.5").ok
    assert qdqtool.extract(model, finding="W-NO-DQ").ok
    assert qdqtool.compare(float_network(), network()).ok
    assert not qdqtool.compare(network(), model).ok


@pytest.mark.parametrize("victim", ["model.onnx", "w.bin"])
def test_extraction_never_overwrites_its_inputs(victim: str, tmp_path: Path) -> None:
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(network(spoilt=[1]), tmp_path / "model.onnx", **options)
    result = qdqtool.extract(tmp_path / "model.onnx", finding="W-NO-DQ")
    path = tmp_path / victim
    before = path.read_bytes()
    with pytest.raises(QdqtoolError, check=has("output-is-input", path=str(path))):
        result.save(path)
    assert path.read_bytes() == before
    result.save(tmp_path / "small.onnx")
    assert onnx.load(tmp_path / "small.onnx") == result.proto


def whole() -> onnx.ModelProto:
    """Build a = Relu(x), b = If(given) of a + w, c = b * sparse, and nodes without effect on c."""
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["a", "w"], ["in"])],
        "inner",
        [],
        [onnx.ValueInfoProto(name="in")],
    )
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["a"]),
        onnx.helper.make_node("Neg", ["x"], ["unused"]),
        onnx.helper.make_node("If", ["given"], ["b"], then_branch=inner, else_branch=inner),
        onnx.helper.make_node("Mul", ["b", "sparse"], ["c"]),
    ]
    constants = [onnx.numpy_helper.from_array(np.ones(1, np.float32), n) for n in ("w", "other")]
    graph = onnx.helper.make_graph(nodes, "g", [], [], constants)
    for name in ("sparse", "far"):
        values = onnx.numpy_helper.from_array(np.ones(1, np.float32), name)
        graph.sparse_initializer.add(values=values, dims=[4])
    proto = onnx.helper.make_model(
        graph, producer_name="p", opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    onnx.helper.set_model_props(proto, {"stride": "32"})
    return proto


def test_part_has_nodes_and_constants_that_its_outputs_need() -> None:
    proto = whole()
    part, needed = extract_submodel(
        proto, proto.graph.node, [onnx.ValueInfoProto(name="c")], proto.graph.initializer
    )
    assert [n.op_type for n in part.graph.node] == ["Relu", "If", "Mul"]
    assert needed == {"x", "w", "sparse", "a", "b", "c", "given"}
    assert [t.name for t in part.graph.initializer] == ["w"]
    assert [t.values.name for t in part.graph.sparse_initializer] == ["sparse"]
    assert (part.producer_name, part.metadata_props[0].value) == ("p", "32")
    assert part.opset_import[0].version == 17


def test_part_does_not_compute_tensors_that_are_fed() -> None:
    proto = whole()
    part, needed = extract_submodel(
        proto, proto.graph.node, [onnx.ValueInfoProto(name="c")], proto.graph.initializer, {"b"}
    )
    assert [n.op_type for n in part.graph.node] == ["Mul"] and needed == {"b", "sparse", "c"}
    assert not part.graph.initializer and len(proto.graph.node) == 4
