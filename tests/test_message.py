from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.demo.model import yolov8n
from qdqtool.graph import Model
from qdqtool.message import Parts
from tests.calibration.nets import conv_net


def typed() -> onnx.ModelProto:
    """Weights in fields of their types, with documentation and metadata on every level."""
    model = conv_net()
    graph = model.graph
    graph.initializer.append(helper.make_tensor("floats", TensorProto.FLOAT, [300], np.arange(300.0)))
    graph.initializer.append(helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"\xff"]))
    graph.initializer.append(TensorProto(name="empty", data_type=TensorProto.FLOAT, dims=[0], raw_data=b""))
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
    model.functions.append(helper.make_function("f", "F", ["a"], ["b"], body, list(model.opset_import)))
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
    return onnx.ModelProto.FromString(onnx.ModelProto(ir_version=9, graph=graph).SerializeToString() + field)


def weight_from_the_future() -> onnx.ModelProto:
    model = conv_net()
    model.graph.initializer.append(from_the_future().graph.initializer[-1])
    return model


DAMAGED = b"\x02\xff\xfe"  # a text of two bytes that is not UTF-8


def model_documented_otherwise() -> onnx.ModelProto:
    return onnx.ModelProto.FromString(typed().SerializeToString() + b"\x32" + DAMAGED)


def graph_documented_otherwise() -> onnx.ModelProto:
    model = typed()
    model.graph.CopyFrom(onnx.GraphProto.FromString(model.graph.SerializeToString() + b"\x52" + DAMAGED))
    return model


def weight_documented_otherwise() -> onnx.ModelProto:
    model = typed()
    weight = model.graph.initializer[0]
    weight.CopyFrom(TensorProto.FromString(weight.SerializeToString() + b"\x62" + DAMAGED))
    return model


OTHERWISE = [model_documented_otherwise, graph_documented_otherwise, weight_documented_otherwise]


def large() -> onnx.ModelProto:
    """A graph whose length takes four bytes."""
    return yolov8n(64)


@pytest.mark.parametrize(
    "made",
    [*OTHERWISE, conv_net, typed, with_function, from_the_future, weight_from_the_future, large, onnx.ModelProto,
     lambda: onnx.ModelProto(ir_version=8), lambda: onnx.ModelProto(graph=onnx.GraphProto())],
)  # fmt: skip
def test_parts_joined_are_the_message(made: Callable[[], onnx.ModelProto]) -> None:
    model = made()
    wanted = model.SerializeToString(deterministic=True)
    parts = Parts(model)
    assert b"".join(parts) == wanted == b"".join(parts), "and once more"
    assert parts.size == len(wanted)


def test_no_part_is_much_larger_than_the_largest_weight() -> None:
    model = yolov8n(64)
    weights = [len(t.raw_data) for t in model.graph.initializer]
    assert max(map(len, Parts(model))) < max(weights) + 200_000 < sum(weights) / 8


def test_a_model_is_known_by_the_hash_of_its_message() -> None:
    model = typed()
    assert Model(model).sha256 == hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
