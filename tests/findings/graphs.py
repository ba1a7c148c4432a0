from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from ml_dtypes import int4

from qdqtool import Finding, Prediction, predict
from tests.trt.builder import Graph


def _stem(g: Graph) -> str:
    return g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")


def _end(g: Graph, x: str, scale: float | None = 0.05, name: str = "end") -> onnx.ModelProto:
    return g.model(g.conv(x, name, 16, scale=scale))


def ones(g: Graph, *shape: int, dtype: Any = np.float32) -> str:
    return g.const("w", np.ones(shape or (16, 16, 1, 1)), dtype)


def weighted(g: Graph, weights: str, name: str = "c", **attributes: Any) -> str:
    return g.op(
        "Conv",
        [g.pair(g.input(1, 16, 8, 8), "in"), weights],
        name,
        kernel_shape=[1, 1],
        **attributes,
    )


def computed(g: Graph, x: str) -> str:
    """Add a pair whose scale the network computes."""
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    q = g.op("QuantizeLinear", [x, scale, g.const("z", np.int8(0))], "p.Q")
    return g.op("DequantizeLinear", [q, scale, "z"], "p.DQ")


def types(g: Graph) -> onnx.ModelProto:
    g.opset = 21
    return _end(g, g.pair(g.input(1, 16, 8, 8), "a", integer=np.int16), None, "c")


def float_types(g: Graph) -> onnx.ModelProto:
    half, zero = g.const("half", 0.1, np.float16), g.const("zero", np.int8(0))
    w = g.op("QuantizeLinear", [ones(g, dtype=np.float16), half, zero], "wq.Q")
    return g.model(weighted(g, g.op("DequantizeLinear", [w, half, zero], "wq.DQ")))


def transposed_3d(
    activated: bool = False, quantized: bool = False, axes: int = 3
) -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.input(1, 16, *[4] * axes), "in")
    x = g.op(
        "ConvTranspose",
        [x, g.pair(ones(g, 16, 16, *[2] * axes), "wq")],
        "up",
        kernel_shape=[2] * axes,
    )
    x = g.relu(x, "r") if activated else x
    return g.model(g.op("Softmax", g.pair(x, "out") if quantized else x, "soft"))


def weights_shared(g: Graph) -> onnx.ModelProto:
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), g.weights("w", (16, 16, 1, 1), "qdq")
    return g.model(*(g.op("Conv", [x, w], name, kernel_shape=[1, 1]) for name in ("a", "b")))


def residual(
    skip: bool, side: bool, quantized: bool, activated: bool = False
) -> Callable[[Graph], onnx.ModelProto]:
    def make(g: Graph) -> onnx.ModelProto:
        x = _stem(g)
        y = g.conv(g.relu(g.conv(x, "c1", 16, scale=0.07), "r1"), "c2", 16, scale=0.06)
        y = g.silu(y, "s2") if activated else y
        y = g.pair(y, "side", 0.08) if side else y
        y = g.add(y, g.pair(x, "res", 0.07) if skip else x, "sum")
        return _end(g, y) if quantized else g.model(g.op("Softmax", y, "soft"))

    return make


def batchnorm_not_constant(g: Graph) -> onnx.ModelProto:
    y = g.bn(g.conv(g.input(1, 16, 16, 16), "c0", 16), "bn")
    norm = g.nodes.pop()
    norm.input[2] = g.op("Identity", norm.input[2], "alias")
    g.nodes.append(norm)
    return _end(g, y)


def in_myelin(g: Graph) -> onnx.ModelProto:
    y = g.gemm(g.op("Flatten", _stem(g), "flat"), "fc", 16 * 16 * 16, scale=None, weights="float")
    return g.model(g.op("ArgMax", y, "best", axis=1))


def outside_rules(g: Graph) -> onnx.ModelProto:
    g.opset = 21
    return g.model(weighted(g, g.pair(ones(g), "wq", 0.01, integer=int4)))


def _fp8(g: Graph) -> Graph:
    g.opset, g.fp8 = 19, True
    return g


def mixed_operands(g: Graph) -> onnx.ModelProto:
    g.opset = 19
    x = g.pair(g.input(1, 16, 8, 8), "in")
    g.fp8 = True
    return g.model(g.op("Conv", [x, g.pair(ones(g), "wq")], "c", kernel_shape=[1, 1]))


def output_type(g: Graph) -> onnx.ModelProto:
    x = g.relu(g.conv(g.input(1, 32, 8, 8), "c0", 32), "r0")
    return g.model(_fp8(g).conv(x, "end", 32))


def stem_before_pool(g: Graph, is_between: bool = True) -> onnx.ModelProto:
    x = g.conv(g.input(1, 3, 64, 64), "stem", 16, k=7, stride=2)
    x = g.relu(g.pair(x, "inner", 0.1) if is_between else x, "r")
    return g.model(g.conv(g.pool(x, "pool", k=3), "c", 16))


def attention(head_size: int) -> onnx.ModelProto:
    g = Graph()
    q, k = g.input(1, 4, 64, head_size), g.input(1, 4, head_size, 64, name="k")
    scores = g.op(
        "MatMul", [g.pair(g.op("Neg", q, "nq"), "q"), g.pair(g.op("Neg", k, "nk"), "kq")], "s"
    )
    return g.model(g.op("Softmax", scores, "softmax", axis=-1))


_MAKERS: dict[str, Callable[[Graph], onnx.ModelProto]] = {
    "input-not-dequantized": lambda g: _end(
        g, g.op("Softmax", g.pair(g.input(1, 16, 8, 8), "p"), "soft"), None, "c"
    ),
    "weights-not-dequantized": lambda g: g.model(
        g.conv(g.input(1, 16, 8, 8), "c", 16, weights="float")
    ),
    "weights-not-constant": lambda g: g.model(
        weighted(g, g.pair(g.input(16, 16, 1, 1, name="w"), "wq"))
    ),
    "scale-computed": lambda g: _end(g, computed(g, g.input(1, 16, 8, 8)), None, "c"),
    "types": types,
    "float-types": float_types,
    "convtranspose-3d": lambda g: transposed_3d(),
    "activation-per-channel": lambda g: _end(
        g, g.pair(g.input(1, 16, 8, 8), "a", np.full(16, 0.1), axis=1), None, "c"
    ),
    "zero-point": lambda g: _end(g, g.pair(g.input(1, 16, 8, 8), "a", zero=3), None, "c"),
    "weights-axis": lambda g: g.model(weighted(g, g.pair(ones(g), "wq", np.full(16, 0.1), axis=1))),
    "weights-shared": weights_shared,
    "output-not-quantized": lambda g: g.model(g.op("Softmax", _stem(g), "soft")),
    "output-different-scales": lambda g: g.model(
        g.conv(x := _stem(g), "a", 16, scale=0.02),
        g.conv(g.pool(x, "pool"), "b", 16, scale=0.05),
    ),
    "output-many-consumers": lambda g: g.model(
        g.conv(x := _stem(g), "a", 16), g.op("Softmax", x, "soft")
    ),
    "output-scale": lambda g: _end(
        g, g.pair(_stem(g), "wide", np.full(16, 0.1), axis=1), None, "c1"
    ),
    "residual-float": residual(skip=False, side=False, quantized=True),
    "residual-both-quantized": residual(skip=True, side=True, quantized=True),
    "add-output-not-quantized": residual(skip=True, side=False, quantized=False),
    "activation-before-add": residual(skip=True, side=False, quantized=True, activated=True),
    "activation-joined": lambda g: _end(
        g,
        g.op(
            "Mul",
            [
                g.op("Sigmoid", g.conv(x := g.input(1, 16, 16, 16), "c0", 16), "sig"),
                g.op("Softmax", x, "soft"),
            ],
            "mul",
        ),
        0.1,
    ),
    "batchnorm-not-constant": batchnorm_not_constant,
    "convtranspose-batchnorm": lambda g: _end(
        g, g.bn(g.conv(g.input(1, 16, 8, 8), "up", 16, 2, 2, op="ConvTranspose"), "bn")
    ),
    "inside-activation": lambda g: _end(
        g,
        g.op(
            "Mul",
            [
                x := g.pair(g.conv(g.input(1, 16, 16, 16), "c0", 16), "inner", 0.1),
                g.pair(g.op("Sigmoid", x, "sig"), "gate", 0.008),
            ],
            "mul",
        ),
    ),
    "behind-pad": lambda g: _end(
        g,
        g.op(
            "Pad", [_stem(g), g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))], "pad"
        ),
    ),
    "not-commuting": lambda g: _end(
        g,
        g.op(
            "Pad",
            [
                _stem(g),
                g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)),
                g.const("one", np.float32(1)),
            ],
            "pad",
        ),
    ),
    "many-consumers": lambda g: g.model(
        g.conv(x := g.pool(g.op("Softmax", _stem(g), "soft"), "pool"), "a", 16),
        g.op("Neg", x, "neg"),
    ),
    "output-not-only-quantized": lambda g: g.model(
        g.conv(
            y := g.concat([g.op("Neg", x := _stem(g), "neg"), g.op("Abs", x, "abs")], "cat"),
            "a",
            16,
        ),
        g.op("Softmax", y, "soft"),
    ),
    "concat-scales": lambda g: _end(
        g, g.concat([x := _stem(g), g.relu(g.conv(x, "c1", 16, scale=0.02), "r1")], "cat")
    ),
    "scales-differ": lambda g: g.model(
        g.conv(x := g.pair(g.pool(_stem(g), "pool"), "first", 0.2), "end", 16, scale=0.05),
        g.op("Neg", x, "neg"),
    ),
    "pooling-one-side": lambda g: g.model(
        g.conv(g.op("GlobalAveragePool", _stem(g), "gap"), "end", 16, k=1)
    ),
    "reduce-not-pooling": lambda g: g.model(
        g.gemm(
            g.op("ReduceMean", g.pair(_stem(g), "gap"), "mean", axes=[2, 3], keepdims=0), "fc", 16
        )
    ),
    "in-myelin": in_myelin,
    "outside-rules": outside_rules,
    "fp8-kernel": lambda g: g.model(_fp8(g).conv(g.input(1, 32, 8, 8), "c", 32, k=7)),
    "fp8-deconvolution": lambda g: g.model(
        _fp8(g).conv(
            g.input(1, 32, 8, 8), "up", 32, k=2, stride=2, op="ConvTranspose", weights="tensor"
        )
    ),
    "fp8-version": lambda g: g.model(_fp8(g).conv(g.input(1, 32, 8, 8), "c", 32)),
    "mixed-operands": mixed_operands,
    "output-type": output_type,
    "stem-before-pool": stem_before_pool,
    "stays": residual(skip=False, side=False, quantized=True),
}
GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    name: lambda make=make: make(Graph())  # type: ignore[misc]
    for name, make in _MAKERS.items()
}


def concat(scales: tuple[float, ...], behind: float) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 16, 16, 16)
    parts, ends = [], []
    for i, scale in enumerate(scales):
        parts.append(g.relu(g.conv(x, f"c{i}", 16, scale=0.1), f"r{i}"))
        ends.append(g.conv(parts[-1], f"other{i}", 16, scale=scale))
    return g.model(*ends, g.conv(g.concat(parts, "join"), "next", 16, scale=behind))


def split(inner: float, outer: float) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 32), "r0")
    whole = g.conv(x, "whole", 16, scale=outer)
    return g.model(whole, g.conv(g.slice(x, "cut", 0, 16), "part", 16, scale=inner))


def outcome(
    proto: onnx.ModelProto, target: str = "trt8.5"
) -> tuple[Prediction, dict[str, Finding]]:
    prediction = predict(proto, target)
    return prediction, {f.code: f for f in prediction.findings}
