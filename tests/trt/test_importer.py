"""What the importer reads out of a model: geometry with ONNX's defaults, and the parser's own decompositions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.model.modelfile import load
from qdqtool.trt import importer
from qdqtool.trt.layers import WEIGHTED, Layer, LayerKind, Weighted
from qdqtool.trt.network import Network
from tests.trt.builder import Graph


def imported(model: onnx.ModelProto) -> Network:
    return importer.build(load(model))


def weights_of(model: onnx.ModelProto, node: str) -> Weighted:
    """How the importer read the weights of a node."""
    layers = imported(model).layers.values()
    return next(layer.weights for layer in layers if node in layer.nodes and layer.kind in WEIGHTED)


def bare(**attributes: object) -> onnx.ModelProto:
    g = Graph()
    weights = g.const("w", np.zeros((8, 8, 3, 3), np.float32))
    return g.model(g.op("Conv", [g.input(1, 8, 8, 8), weights], "c", **attributes))


def test_what_is_left_out_has_onnxs_defaults() -> None:
    """Kernel from the weights, strides and dilations 1, pads 0, one group, no automatic padding."""
    spelled = {"kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "pads": [0] * 4, "group": 1,
               "auto_pad": "NOTSET"}  # fmt: skip
    known, same = weights_of(bare(), "c"), weights_of(bare(**spelled), "c")
    for name in ("kernel", "strides", "pads", "dilations", "group", "auto_pad"):
        assert getattr(known, name) == getattr(same, name), name
    assert (known.kernel, known.strides, known.pads) == ((3, 3), (1, 1), (0, 0, 0, 0))
    assert (known.dilations, known.group, known.auto_pad) == ((1, 1), 1, "NOTSET")
    assert (known.dims, known.axis, known.constant) == ((8, 8, 3, 3), 0, True)


@pytest.mark.parametrize(("key", "value"), [("strides", [2, 2]), ("dilations", [2, 2]), ("pads", [1] * 4)])
def test_what_is_given_is_read(key: str, value: list[int]) -> None:
    assert getattr(weights_of(bare(**{key: value}), "c"), key) == tuple(value)


@pytest.mark.parametrize(("op", "attributes", "axis"), [
    ("MatMul", {}, 1), ("Gemm", {}, 1), ("Gemm", {"transB": 1}, 0),
])
def test_outputs_of_a_matrix_product_lie_along_the_axis_of_its_weights(op: str, attributes: dict, axis: int) -> None:
    g = Graph()
    g.input(2, 16)
    shape = (4, 16) if attributes else (16, 4)
    product = g.op(op, ["x", g.const("w", np.zeros(shape, np.float32))], "m", **attributes)
    known = weights_of(g.model(product), "m")
    assert (known.dims, known.axis, known.name, known.constant) == (shape, axis, "w", True)
    assert known.inside is False, "its weights are an input; those of a convolution lie in it"
    assert weights_of(bare(), "c").inside is True


def test_a_batch_normalization_with_computed_parameters_is_taken_apart() -> None:
    """(x - mean) / sqrt(var + epsilon) * scale + bias; each parameter passes a shuffle, the bias is added last."""
    g = Graph()
    x = g.input(1, 4, 8, 8)
    names = [g.op("Abs", g.const(n, np.ones(4, np.float32)), f"abs_{n}") for n in ("scale", "bias", "mean", "var")]
    network = imported(g.model(g.op("BatchNormalization", [x, *names], "bn")))
    last = next(layer for layer in network.layers.values() if layer.out.name == "bn:0")

    def sources(layer: Layer) -> list[str]:
        """The ONNX tensors behind an elementwise layer's inputs, through the shuffles."""
        found = []
        for tensor in layer.inputs:
            maker = tensor.producer
            found.append(maker.inputs[0].name if maker is not None and maker.kind == LayerKind.SHUFFLE else "computed")
        return found

    assert last.operation == "SUM"
    assert sources(last) == ["computed", "abs_bias:0"]
    scaled = last.inputs[0].producer
    assert scaled is not None and scaled.operation == "PROD" and sources(scaled) == ["abs_scale:0", "computed"]
    divided = scaled.inputs[1].producer
    assert divided is not None and divided.operation == "DIV"
    centred = divided.inputs[0].producer
    assert centred is not None and centred.operation == "SUB" and sources(centred) == ["computed", "abs_mean:0"]
    for layer in network.layers.values():  # the constant epsilon has no type of its own: what adds it has that of var
        if layer.kind in (LayerKind.ELEMENTWISE, LayerKind.UNARY):
            assert layer.out.elem_type == onnx.TensorProto.FLOAT, layer
    deviation = divided.inputs[1].producer
    assert deviation is not None and (deviation.out.shape, centred.out.shape) == ((4,), (1, 4, 8, 8))


@pytest.mark.parametrize("where", ["plain", "captured", "mixed"])
def test_shape_arithmetic_is_no_layer(where: str) -> None:
    """It is folded while parsing; what reads another tensor as well, a subgraph included, is a layer."""
    g = Graph()
    x = g.input(1, 8, 4, 4)
    size = g.op("Gather", [g.op("Shape", x, "shape"), g.const("at", np.array([0]))], "gather")
    size = g.op("Mul", [size, g.const("two", np.array([1], np.int64))], "times")
    if where == "captured":
        body = onnx.helper.make_graph(
            [onnx.helper.make_node("Cast", ["captured"], ["inside"], "cast", to=onnx.TensorProto.INT64)], "body", [],
            [onnx.helper.make_tensor_value_info("inside", onnx.TensorProto.INT64, [1])],
        )  # fmt: skip
        g.op("Softmax", g.reshape(x, "flat", 128), "s")
        g.slice("s:0", "captured", 0, 1, axis=0)
        g.nodes[-1].output[0] = "captured"
        flag = g.op("Cast", size, "flag", to=onnx.TensorProto.BOOL)
        size = g.op("If", flag, "mixed", then_branch=body, else_branch=body)
    elif where == "mixed":
        size = g.op("Mul", [size, g.op("Cast", g.input(1, name="n"), "cast", to=onnx.TensorProto.INT64)], "mixed")
    to = g.op("Concat", [size, g.const("rest", np.array([-1]))], "cat", axis=0)
    network = imported(g.model(g.op("Reshape", [g.op("Exp", x, "e"), to], "r"), *([] if where == "plain" else [size])))
    names = {layer.name for layer in network.layers.values()}
    assert {"e", "r"} <= names and not names & {"shape", "gather", "times", "flag"}
    assert ("mixed" in names) is (where != "plain")


@pytest.mark.parametrize("op", ["Relu", "HardSwish", "Softmax", "Sigmoid", "GlobalAveragePool", "GlobalMaxPool", "Exp",
                                "Identity", "Dropout", "Flatten", "Softplus", "Celu"])  # fmt: skip
def test_whatever_an_operator_becomes_reads_its_input(op: str) -> None:
    """Up from the output, layer by layer, one comes to the network's input."""
    g = Graph(opset=14)
    network = imported(g.model(g.op(op, g.input(1, 4, 8, 8), "n")))
    seen, queue = set(), [next(layer.out for layer in network.layers.values() if layer.out.name == "n:0")]
    for tensor in queue:
        seen.add(tensor.name)
        if tensor.producer is not None:
            queue.extend(tensor.producer.inputs)
    assert "x" in seen
