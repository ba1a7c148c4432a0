"""One small graph for each refusal class: the smallest in which a pass refuses for that reason."""

from collections.abc import Callable

import numpy as np
import onnx

from qdqtool.prediction import predict
from qdqtool.types import Finding, Prediction
from tests.trt.builder import Graph


def _stem(g: Graph) -> str:
    return g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")


def _end(g: Graph, x: str, scale: float = 0.05) -> onnx.ModelProto:
    return g.model(g.conv(x, "end", 16, scale=scale))


def input_not_dequantized() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.conv(g.op("Softmax", g.pair(g.input(1, 16, 8, 8), "p"), "soft"), "c", 16, scale=None))


def weights_not_dequantized() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, weights="float"))


def weights_not_constant() -> onnx.ModelProto:
    g = Graph()
    w = g.pair(g.input(16, 16, 1, 1, name="w"), "wq")
    return g.model(g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "in"), w], "c", kernel_shape=[1, 1]))


def scale_computed() -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 16, 8, 8)
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    q = g.op("QuantizeLinear", [x, scale, g.const("z", np.int8(0))], "q")
    data = g.op("DequantizeLinear", [q, scale, "z"], "dq")
    return g.model(g.conv(data, "c", 16, scale=None))


def types_differ() -> onnx.ModelProto:
    g = Graph(opset=21)
    data = g.pair(g.input(1, 16, 8, 8), "a", integer=np.int16)
    g.channels[data] = 16
    return g.model(g.conv(data, "c", 16, scale=None))


def float_types() -> onnx.ModelProto:
    """The scale of the weights' DQ is float16, that of the data's is float32."""
    g = Graph()
    half, zero = g.const("half", 0.1, np.float16), g.const("zero", np.int8(0))
    w = g.op("QuantizeLinear", [g.const("w", np.ones((16, 16, 1, 1)), np.float16), half, zero], "wq.Q")
    w = g.op("DequantizeLinear", [w, half, zero], "wq.DQ")
    return g.model(g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "in"), w], "c", kernel_shape=[1, 1]))


def transposed_3d(activated: bool = False, quantized: bool = False, axes: int = 3) -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.input(1, 16, *[4] * axes), "in")
    w = g.pair(g.const("w", np.ones((16, 16, *[2] * axes), np.float32)), "wq")
    x = g.op("ConvTranspose", [x, w], "up", kernel_shape=[2] * axes)
    x = g.relu(x, "r") if activated else x
    return g.model(g.op("Softmax", g.pair(x, "out") if quantized else x, "soft"))


def activation_per_channel() -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "a", np.full(16, 0.1), axis=1)
    g.channels[x] = 16
    return g.model(g.conv(x, "c", 16, scale=None))


def zero_point() -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "a", zero=3)
    g.channels[x] = 16
    return g.model(g.conv(x, "c", 16, scale=None))


def weights_axis() -> onnx.ModelProto:
    g = Graph()
    w = g.pair(g.const("w", np.ones((16, 16, 1, 1), np.float32)), "wq", np.full(16, 0.1), axis=1)
    return g.model(g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "in"), w], "c", kernel_shape=[1, 1]))


def weights_shared() -> onnx.ModelProto:
    g = Graph()
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), g.weights("w", (16, 16, 1, 1), "qdq")
    return g.model(*(g.op("Conv", [x, w], name, kernel_shape=[1, 1]) for name in ("a", "b")))


def output_not_quantized() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.op("Softmax", _stem(g), "soft"))


def output_different_scales() -> onnx.ModelProto:
    g = Graph()
    x = _stem(g)
    return g.model(g.conv(x, "a", 16, scale=0.02), g.conv(g.pool(x, "pool"), "b", 16, scale=0.05))


def output_many_consumers() -> onnx.ModelProto:
    g = Graph()
    x = _stem(g)
    return g.model(g.conv(x, "a", 16), g.op("Softmax", x, "soft"))


def output_scale() -> onnx.ModelProto:
    g = Graph()
    x = g.pair(_stem(g), "wide", np.full(16, 0.1), axis=1)
    g.channels[x] = 16
    return g.model(g.conv(x, "c1", 16, scale=None))


def residual(skip: bool, side: bool, quantized: bool, activated: bool = False) -> onnx.ModelProto:
    g = Graph()
    x = _stem(g)
    y = g.conv(g.relu(g.conv(x, "c1", 16, scale=0.07), "r1"), "c2", 16, scale=0.06)
    y = g.silu(y, "s2") if activated else y
    y = g.pair(y, "side", 0.08) if side else y
    y = g.add(y, g.pair(x, "res", 0.07) if skip else x, "sum")
    return _end(g, y) if quantized else g.model(g.op("Softmax", y, "soft"))


def activation_joined() -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 16, 16, 16)
    gate = g.op("Sigmoid", g.conv(x, "c0", 16), "sig")
    return g.model(g.conv(g.op("Mul", [gate, g.op("Softmax", x, "soft")], "mul"), "end", 16))


def batchnorm_not_constant() -> onnx.ModelProto:
    g = Graph()
    y = g.bn(g.conv(g.input(1, 16, 16, 16), "c0", 16), "bn")
    norm = g.nodes.pop()
    norm.input[2] = g.op("Identity", norm.input[2], "alias")
    g.nodes.append(norm)
    return _end(g, y)


def convtranspose_batchnorm() -> onnx.ModelProto:
    g = Graph()
    return _end(g, g.bn(g.conv(g.input(1, 16, 8, 8), "up", 16, 2, 2, op="ConvTranspose"), "bn"))


def not_commuting() -> onnx.ModelProto:
    g = Graph()
    x = g.op("Pad", [_stem(g), g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)),
                     g.const("one", np.float32(1))], "pad")
    g.channels[x] = 16
    return _end(g, x)


def many_consumers() -> onnx.ModelProto:
    g = Graph()
    x = g.pool(g.op("Softmax", _stem(g), "soft"), "pool")
    g.channels[x] = 16
    return g.model(g.conv(x, "a", 16), g.op("Neg", x, "neg"))


def concat_read_elsewhere() -> onnx.ModelProto:
    g = Graph()
    x = _stem(g)
    y = g.concat([g.op("Neg", x, "neg"), g.op("Abs", x, "abs")], "cat")
    g.channels[y] = 32
    return g.model(g.conv(y, "a", 16), g.op("Softmax", y, "soft"))


def concat_scales() -> onnx.ModelProto:
    g = Graph()
    x = _stem(g)
    y = g.relu(g.conv(x, "c1", 16, scale=0.02), "r1")
    return _end(g, g.concat([x, y], "cat"))


def scales_differ() -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.pool(_stem(g), "pool"), "first", 0.2)
    g.channels[x] = 16
    return g.model(g.conv(x, "end", 16, scale=0.05), g.op("Neg", x, "neg"))


def pooling_one_side() -> onnx.ModelProto:
    g = Graph()
    x = g.op("GlobalAveragePool", _stem(g), "gap")
    g.channels[x] = 16
    return g.model(g.conv(x, "end", 16, k=1))


def reduce_not_pooling() -> onnx.ModelProto:
    g = Graph()
    x = g.op("ReduceMean", g.pair(_stem(g), "gap"), "mean", axes=[2, 3], keepdims=0)
    return g.model(g.gemm(x, "fc", 16))


def in_myelin() -> onnx.ModelProto:
    g = Graph()
    x = g.op("Flatten", _stem(g), "flat")
    y = g.gemm(x, "fc", 16 * 16 * 16, scale=None, weights="float")
    return g.model(g.op("ArgMax", y, "best", axis=1))


def outside_rules() -> onnx.ModelProto:
    g = Graph(opset=19)
    for kind, name in ((onnx.TensorProto.FLOAT8E4M3FN, "zero8"),):
        g.initializers.append(onnx.helper.make_tensor(name, kind, [], [0.0]))
    x, w = g.input(1, 16, 8, 8), g.const("w", np.ones((16, 16, 1, 1), np.float32))
    g.const("scale", np.float32(0.1))
    pairs = [
        g.op("DequantizeLinear", [g.op("QuantizeLinear", [t, "scale", "zero8"], f"{n}.Q"), "scale", "zero8"], f"{n}.DQ")
        for t, n in ((x, "in"), (w, "wq"))
    ]
    return g.model(g.op("Conv", pairs, "c", kernel_shape=[1, 1]))


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "input-not-dequantized": input_not_dequantized,
    "weights-not-dequantized": weights_not_dequantized,
    "weights-not-constant": weights_not_constant,
    "scale-computed": scale_computed,
    "types": types_differ,
    "float-types": float_types,
    "convtranspose-3d": transposed_3d,
    "activation-per-channel": activation_per_channel,
    "zero-point": zero_point,
    "weights-axis": weights_axis,
    "weights-shared": weights_shared,
    "output-not-quantized": output_not_quantized,
    "output-different-scales": output_different_scales,
    "output-many-consumers": output_many_consumers,
    "output-scale": output_scale,
    "residual-float": lambda: residual(skip=False, side=False, quantized=True),
    "residual-both-quantized": lambda: residual(skip=True, side=True, quantized=True),
    "add-output-not-quantized": lambda: residual(skip=True, side=False, quantized=False),
    "activation-before-add": lambda: residual(skip=True, side=False, quantized=True, activated=True),
    "activation-joined": activation_joined,
    "batchnorm-not-constant": batchnorm_not_constant,
    "convtranspose-batchnorm": convtranspose_batchnorm,
    "not-commuting": not_commuting,
    "many-consumers": many_consumers,
    "output-not-only-quantized": concat_read_elsewhere,
    "concat-scales": concat_scales,
    "scales-differ": scales_differ,
    "pooling-one-side": pooling_one_side,
    "reduce-not-pooling": reduce_not_pooling,
    "in-myelin": in_myelin,
    "outside-rules": outside_rules,
    "stays": lambda: residual(skip=False, side=False, quantized=True),
}


def concat(scales: tuple[float, ...], behind: float) -> onnx.ModelProto:
    """Three convolutions into a Concat; each has another reader with a scale of its own."""
    g = Graph()
    x = g.input(1, 16, 16, 16)
    parts, ends = [], []
    for i, scale in enumerate(scales):
        y = g.relu(g.conv(x, f"c{i}", 16, scale=0.1), f"r{i}")
        ends.append(g.conv(y, f"other{i}", 16, scale=scale))
        parts.append(y)
    ends.append(g.conv(g.concat(parts, "join"), "next", 16, scale=behind))
    return g.model(*ends)


def split(inner: float, outer: float) -> onnx.ModelProto:
    """A convolution of a whole tensor, and one of its first half, each with a scale."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 32), "r0")
    whole = g.conv(x, "whole", 16, scale=outer)
    part = g.conv(g.slice(x, "cut", 0, 16), "part", 16, scale=inner)
    return g.model(whole, part)


def outcome(proto: onnx.ModelProto, target: str = "trt8.5") -> tuple[Prediction, dict[str, Finding]]:
    """A prediction, and its last finding of each code."""
    prediction = predict(proto, target)
    codes = {f.code: f for f in prediction.findings}
    return prediction, codes
