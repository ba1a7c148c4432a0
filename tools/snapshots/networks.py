"""Float networks and images for scenarios of insert, tune and calibration."""

import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from tools.fuzz.grammar import network
from tools.fuzz.net import Net
from tools.growth.families import FAMILIES

Array = npt.NDArray[np.float32]


def classifier() -> onnx.ModelProto:
    """Return a residual network of five convolutions with a Gemm as its head."""
    net = Net(seed=1)
    x = net.op("Relu", net.conv(net.input((1, 3, 32, 32)), 32, weights="none"))
    for stride in (1, 2):
        branch = net.op("Relu", net.conv(x, 32, stride=stride, weights="none"))
        branch = net.conv(branch, 32, weights="none")
        skip = x if stride == 1 else net.conv(x, 32, k=1, stride=2, weights="none")
        x = net.op("Relu", net.op("Add", branch, skip))
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    weights, bias = net.weight((32, 10), "none"), net.const(np.zeros(10))
    return net.model(net.op("Gemm", pooled, weights, bias))


def segmenter() -> onnx.ModelProto:
    """Return an encoder and decoder with SiLU, a Concat, a Resize and a deconvolution."""
    net = Net(seed=2)
    x = net.input((1, 3, 32, 32))
    high = _add_silu(net, net.conv(x, 16, weights="none"))
    low = _add_silu(net, net.conv(high, 32, stride=2, weights="none"))
    scales = net.const(np.array([1, 1, 2, 2]), np.float32)
    resized = net.op("Resize", low, "", scales, mode="nearest")
    raised = net.deconv(low, 16, weights="none")
    joined = net.op("Concat", resized, raised, high, axis=1)
    return net.model(
        net.conv(_add_silu(net, net.conv(joined, 16, weights="none")), 4, 1, weights="none")
    )


def transformer() -> onnx.ModelProto:
    """Return a vision transformer of two blocks on 16 tokens of 32 channels."""
    net = Net(opset=17, seed=3)
    x = net.op("Relu", net.conv(net.input((1, 3, 16, 16)), 32, k=5, stride=4, weights="none"))
    x = net.op("Reshape", x, net.const(np.array([1, 32, 16]), np.int64))
    x = net.op("Transpose", x, perm=[0, 2, 1])
    for _ in range(2):
        x = net.op("Add", x, _add_attention(net, _add_norm(net, x)))
        x = net.op("Add", x, _add_mlp(net, _add_norm(net, x)))
    return net.model(_add_linear(net, net.op("ReduceMean", x, axes=[1], keepdims=0), 32, 10))


def _add_silu(net: Net, x: str) -> str:
    return net.op("Mul", x, net.op("Sigmoid", x))


def _add_norm(net: Net, x: str) -> str:
    return net.op(
        "LayerNormalization", x, net.const(np.linspace(0.5, 4.0, 32)), net.const(np.zeros(32))
    )


def _add_linear(net: Net, x: str, inputs: int, outputs: int) -> str:
    product = net.op("MatMul", x, net.weight((inputs, outputs), "none"))
    return net.op("Add", product, net.const(net.random.normal(0, 0.1, outputs)))


def _add_attention(net: Net, x: str) -> str:
    shape = net.const(np.array([1, 16, 4, 8]), np.int64)
    heads = [
        net.op("Transpose", net.op("Reshape", _add_linear(net, x, 32, 32), shape), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    ]
    scores = net.op("Mul", net.op("MatMul", heads[0], heads[1]), net.const(8**-0.5))
    mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), heads[2])
    joined = net.op("Transpose", mixed, perm=[0, 2, 1, 3])
    flat = net.op("Reshape", joined, net.const(np.array([1, 16, 32]), np.int64))
    return _add_linear(net, flat, 32, 32)


def _add_mlp(net: Net, x: str) -> str:
    x = _add_linear(net, x, 32, 64)
    half = net.op("Erf", net.op("Div", x, net.const(2**0.5)))
    gelu = net.op("Mul", net.op("Mul", x, net.op("Add", half, net.const(1.0))), net.const(0.5))
    return _add_linear(net, gelu, 64, 32)


def without_pairs(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the float network of a Q/DQ model.

    Returns:
        The network, or None if the input of a DQ is not the output of a Q, or if the output of a DQ
        is a network output.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    producers = {o: n for n in model.graph.node for o in n.output}
    renamed: dict[str, str] = {}
    nodes = []
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        if node.op_type == "QuantizeLinear":
            continue
        if node.op_type == "DequantizeLinear":
            quantizer = producers.get(node.input[0])
            if quantizer is None or quantizer.op_type != "QuantizeLinear":
                return None
            renamed[node.output[0]] = quantizer.input[0]
        else:
            nodes.append(node)
    if any(o.name in renamed for o in model.graph.output):
        return None
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def random_float_network(seed: int) -> onnx.ModelProto | None:
    return without_pairs(network(seed))


def float_family(name: str, size: int) -> onnx.ModelProto | None:
    """Return a network of a family of ``tools.growth``, without Q/DQ and with random weights."""
    model = without_pairs(FAMILIES[name](size))
    if model is None:
        return None
    for number, tensor in enumerate(model.graph.initializer):
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
            generator = np.random.default_rng(number)
            values = generator.normal(0, 0.4, tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return model


def input_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    weights = {t.name for t in model.graph.initializer}
    return {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in model.graph.input
        if v.name not in weights
    }


def samples(model: onnx.ModelProto, count: int) -> bytes:
    """Return an npz with ``count`` samples for each input of a model.

    Each sample has random values and one outlier.
    """
    generator = np.random.default_rng(5)
    arrays = {}
    for value in model.graph.input:
        shape = input_shapes(model)[value.name]
        array = generator.gamma(2.0, 0.15, (count, *shape[1:])).astype(np.float32)
        array.reshape(count, -1)[:, 0] *= 5
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        arrays[value.name] = array.astype(kind)
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


FLOAT_NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "classifier": classifier,
    "segmenter": segmenter,
    "transformer": transformer,
}
