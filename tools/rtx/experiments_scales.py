"""Experiments with scales, weights, matrix products, float16 and rejected models.

See ``experiments``.
"""

from collections.abc import Iterator

import numpy as np
import onnx

from tools.fuzz.net import Net
from tools.rtx import operators as ops
from tools.rtx.experiments import SHAPE, Make, Outputs, conv, quantized
from tools.rtx.operators import Step, chain, ints

W = (8, 8, 3, 3)


def scales() -> Iterator[tuple[str, Make]]:
    def of(q: tuple[int, ...], dq: tuple[int, ...]) -> Make:
        return lambda net: conv(
            net, net.dq(net.q(net.input(SHAPE), np.full(q, 0.05)), np.full(dq, 0.05))
        )

    for q in ((), (1,)):
        for dq in ((), (1,)):
            yield f"scale shapes Q {list(q)} DQ {list(dq)}", of(q, dq)
    yield from {
        "scales by channel": lambda net: conv(net, net.qdq(net.input(SHAPE), np.full(8, 0.05), 1)),
        "scales by channel, then one": lambda net: conv(
            net, net.qdq(net.qdq(net.input(SHAPE), np.full(8, 0.05), 1), 0.05)
        ),
        "one scale, then by channel": lambda net: conv(
            net, net.qdq(net.qdq(net.input(SHAPE), 0.05), np.full(8, 0.05), 1)
        ),
        "scales by row": lambda net: conv(net, net.qdq(net.input(SHAPE), np.full(16, 0.05), 2)),
    }.items()
    made: dict[str, Step] = {
        "product": ops.binary("Mul", 0.5),
        "quotient": ops.binary("Div", 2.0),
        "Identity": ops.IDENTITY,
        "Exp": ops.unary("Exp"),
        "Unsqueeze": ops.with_ints("Unsqueeze", 0),
        "Squeeze of [1]": chain(ops.with_ints("Unsqueeze", 0), ops.with_ints("Squeeze", 0)),
    }
    for name, step in made.items():

        def computed(net: Net, s: Step = step) -> Outputs:
            scale = s(net, net.const(0.1))
            zero = net.const(np.zeros(net.shape(scale), np.int8))
            q = net.op("QuantizeLinear", net.input(SHAPE), scale, zero)
            return conv(net, net.op("DequantizeLinear", q, scale, zero))

        yield f"scale from constants: {name}", computed
    yield from {
        "uint8 with zero point 0": lambda net: conv(
            net, net.dq(net.q(net.input(SHAPE), integer=np.uint8), integer=np.uint8)
        ),
        "no zero point": lambda net: conv(
            net, net.dq(net.q(net.input(SHAPE), zero=None), zero=None)
        ),
        "int8 network input": lambda net: conv(
            net, net.dq(net.input(SHAPE, onnx.TensorProto.INT8))
        ),
    }.items()


def weights() -> Iterator[tuple[str, Make]]:
    forms = ("none", "tensor", "tensor-dq", "axis0", "axis0-dq", "axis1", "axis1-dq", "shape1")
    for form in forms:
        yield from {
            f"weights {form}": lambda net, f=form: net.conv(quantized(net), 8, weights=f, name="c"),
            f"weights {form}, float input": lambda net, f=form: net.conv(
                net.input(SHAPE), 8, weights=f, name="c"
            ),
            f"weights {form}, residual behind": lambda net, f=form: net.op(
                "Add", net.conv(quantized(net), 8, weights=f, name="c"), net.input(SHAPE)
            ),
            f"weights {form}, one pixel": lambda net, f=form: net.conv(
                net.qdq(net.input((1, 4, 1, 1))), 4, 1, weights=f, name="c"
            ),
            f"ConvTranspose weights {form}": lambda net, f=form: net.deconv(
                quantized(net), 8, weights=f, name="c"
            ),
        }.items()

    def through(form: str, step: Step, shape: tuple[int, ...] = W) -> Make:
        return lambda net: net.op(
            "Conv", quantized(net), step(net, net.weight(shape, form)), name="c"
        )

    outputs, inputs = (
        np.linspace(1, 2, 8).reshape(8, 1, 1, 1),
        np.linspace(1, 2, 8).reshape(1, 8, 1, 1),
    )
    swap = ops.unary("Transpose", perm=[1, 0, 2, 3])
    yield from {
        "weights times a scalar": through("axis0", ops.TWICE),
        "weights times output channels": through("axis0", ops.binary("Mul", outputs)),
        "weights times input channels": through("axis0", ops.binary("Mul", inputs)),
        "weights by tensor times output channels": through("tensor", ops.binary("Mul", outputs)),
        "weights behind Relu": through("axis0", ops.RELU),
        "weights plus a scalar": through("axis0", ops.binary("Add", 1.0)),
        "weights swapped, scales end on outputs": through("axis1", swap),
        "weights swapped, scales end on inputs": through("axis0", swap),
        "weights mirrored": through("axis0", ops.unary("Transpose", perm=[0, 1, 3, 2])),
        "weights reshaped": through("axis0", ops.with_ints("Reshape", *W), (8, 72)),
        "weights cut": through("axis0", ops.cut(0, 8, 0), (16, 8, 3, 3)),
        "weights split": through(
            "axis0",
            lambda net, w: net.ops("Split", w, ints(net, 8, 8), outputs=2, axis=0)[1],
            (16, 8, 3, 3),
        ),
        "weights quantized twice": through("axis0", lambda net, w: net.qdq(w, 0.02)),
        "weights cast to half and back": through("axis0", ops.casts(10, 1)),
        "depthwise weights with scales on axis 1": lambda net: net.op(
            "Conv", quantized(net), net.weight((8, 1, 3, 3), "axis1"), name="c", group=8
        ),
        "weights joined": lambda net: net.op(
            "Conv",
            quantized(net),
            net.op("Concat", net.weight((4, 8, 3, 3)), net.weight((4, 8, 3, 3)), axis=0),
            name="c",
        ),
        "weights from a network input": lambda net: net.op(
            "Conv", quantized(net), net.qdq(net.input(W), np.full(8, 0.01), 0), name="c"
        ),
        "weights computed before Q": lambda net: net.op(
            "Conv",
            quantized(net),
            net.qdq(ops.TWICE(net, net.weight(W, "none")), np.full(8, 0.01), 0),
            name="c",
        ),
    }.items()

    def shared(net: Net) -> Outputs:
        w = net.weight(W)
        return (
            net.op("Conv", quantized(net), w, name="c0"),
            net.op("Conv", net.input(SHAPE), w, name="c1"),
        )

    yield "weights shared with a float convolution", shared


def products() -> Iterator[tuple[str, Make]]:
    """Yield Gemm and MatMul. Along which axes may a scale vary?"""

    def matmul(left: object, axis: int | None, right: str, a: tuple[int, ...] = (4, 32)) -> Make:
        return lambda net: net.op(
            "MatMul", net.qdq(net.input(a), left, axis), net.weight((32, 16), right), name="c"
        )

    for form in ("none", "tensor", "axis0", "axis1", "axis1-dq", "shape1"):
        yield from {
            f"MatMul weights {form}": matmul(0.05, None, form),
            f"MatMul weights {form}, float input": lambda net, f=form: net.op(
                "MatMul", net.input((4, 32)), net.weight((32, 16), f), name="c"
            ),
            f"MatMul weights {form}, one row, float input": lambda net, f=form: net.op(
                "MatMul", net.input((1, 32)), net.weight((32, 16), f), name="c"
            ),
        }.items()
    yield from {
        "MatMul input shape [1]": matmul([0.05], 1, "axis1"),
        "MatMul input by row": matmul(np.full(4, 0.05), 0, "axis1"),
        "MatMul input by column": matmul(np.full(32, 0.05), 1, "axis1"),
        "MatMul of three dimensions": matmul(0.05, None, "axis1", (2, 4, 32)),
        "MatMul weights by batch": lambda net: net.op(
            "MatMul",
            net.qdq(net.input((2, 4, 32))),
            net.qdq(net.const(np.ones((2, 32, 16))), np.full(2, 0.01), 0),
            name="c",
        ),
    }.items()
    for sides in ("both", "left", "right", "none"):

        def acts(net: Net, s: str = sides) -> Outputs:
            a, b = net.input((2, 4, 32)), net.input((2, 32, 8))
            a = net.qdq(a) if s in ("both", "left") else a
            return net.op("MatMul", a, net.qdq(b) if s in ("both", "right") else b, name="c")

        yield f"MatMul of two activations, quantized: {sides}", acts
    for name in ("transpose", "neg", "softmax", "relu"):
        step = {
            "transpose": ops.unary("Transpose", perm=[1, 0]),
            "neg": ops.NEG,
            "softmax": ops.unary("Softmax", axis=-1),
            "relu": ops.RELU,
        }[name]
        yield (
            f"MatMul behind {name}",
            lambda net, s=step: net.op(
                "MatMul",
                s(net, net.qdq(net.input((32, 32)))),
                net.weight((32, 16), "axis1"),
                name="c",
            ),
        )
    for form, turned in (
        ("axis0", 1),
        ("axis1", 1),
        ("tensor", 1),
        ("axis0", 0),
        ("axis1", 0),
        ("none", 1),
    ):
        yield (
            f"Gemm weights {form}, transB={turned}",
            lambda net, f=form, t=turned: net.op(
                "Gemm",
                net.qdq(net.input((4, 16))),
                net.weight((16, 16), f),
                net.const(np.ones(16)),
                name="c",
                transB=t,
            ),
        )
    for name, step in (
        ("Flatten", ops.unary("Flatten")),
        ("pooling", chain(ops.unary("GlobalAveragePool"), ops.unary("Flatten"))),
        ("Relu", chain(ops.RELU, ops.unary("Flatten"))),
    ):

        def head(net: Net, s: Step = step) -> Outputs:
            x = s(net, net.qdq(net.input((1, 8, 4, 4))))
            return net.op("Gemm", x, net.weight((16, net.shape(x)[1]), "axis0"), name="c", transB=1)

        yield f"Gemm behind {name}", head


def halves() -> Iterator[tuple[str, Make]]:
    for form in ("none", "tensor", "axis0", "axis0-dq", "shape1"):
        yield from {
            f"half weights {form}": lambda net, f=form: net.conv(
                quantized(net), 8, weights=f, name="c"
            ),
            f"half weights {form}, float input": lambda net, f=form: net.conv(
                net.input(SHAPE), 8, weights=f, name="c"
            ),
        }.items()
    yield from {
        "half weights shape1, one output": lambda net: net.conv(
            quantized(net), 1, weights="axis0", name="c"
        ),
        "half ConvTranspose": lambda net: net.deconv(quantized(net), 8, name="c"),
        "half MatMul": lambda net: net.op(
            "MatMul", net.qdq(net.input((4, 32))), net.weight((32, 16), "axis1"), name="c"
        ),
    }.items()
    for name in ("maxpool", "mul-scalar", "relu", "transpose", "reciprocal"):
        yield (
            f"half through {name}",
            lambda net, s=ops.OPERATORS[name]: conv(net, s(net, quantized(net))),
        )

    def single(net: Net, x: str) -> str:
        scale, zero = net.const(0.05, np.float32), net.const(np.int8(0))
        return net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)

    yield from {
        "float DQ cast to half": lambda net: conv(
            net, net.op("Cast", single(net, net.input(SHAPE, onnx.TensorProto.FLOAT)), to=10)
        ),
        "half DQ cast to float and back": lambda net: conv(
            net, ops.casts(1, 10)(net, quantized(net))
        ),
        "half DQ cast to float": lambda net: net.op(
            "MatMul",
            net.op("Cast", net.qdq(net.input((4, 32))), to=1),
            net.op("Cast", net.weight((32, 16), "axis1"), to=1),
            name="c",
        ),
    }.items()


def refused() -> Iterator[tuple[str, Make]]:
    def pair(**more: object) -> Make:
        return lambda net: conv(net, net.dq(net.q(net.input(SHAPE), **more), **more))  # type: ignore[arg-type]

    yield from {
        "zero point 3": pair(zero=3),
        "uint8 with zero point 128": pair(zero=128, integer=np.uint8),
    }.items()
    for value in (0.0, -0.1, float("nan"), float("inf"), 1e-42):
        yield f"scale {value}", pair(scale=value)
    yield from {
        "scales of the wrong number": pair(scale=np.full(4, 0.1), axis=1),
        "axis out of range": pair(scale=np.full(8, 0.1), axis=7),
        "axis out of range, one scale": pair(scale=0.1, axis=9),
        "axis counted from the end": pair(scale=np.full(8, 0.1), axis=-3),
        "scale of four dimensions": pair(scale=np.full((1, 1, 1, 1), 0.1)),
        "no scale at all": pair(scale=np.zeros(0)),
        "a bad pair that nothing reads": lambda net: (
            net.qdq(net.input((1, 4)), 0.0),
            conv(net, quantized(net)),
        )[1],
        "weights without an axis": lambda net: net.op(
            "Conv",
            quantized(net),
            net.qdq(net.weight((8, 4, 3, 3), "none"), np.full(8, 0.1)),
            name="c",
            group=2,
        ),
        "int32 bias behind a DQ": lambda net: net.op(
            "Conv",
            quantized(net),
            net.weight(W),
            net.op(
                "DequantizeLinear",
                net.const(np.zeros(8, np.int32)),
                net.const(np.full(8, 0.01)),
                axis=0,
            ),
            name="c",
        ),
        "weights' scale from a network input": lambda net: net.op(
            "Conv",
            quantized(net),
            (
                lambda s, z: net.op(
                    "DequantizeLinear",
                    net.op("QuantizeLinear", net.weight(W, "none"), s, z, axis=0),
                    s,
                    z,
                    axis=0,
                )
            )(net.input((8,)), net.const(np.zeros(8, np.int8))),
            name="c",
        ),
    }.items()
    for where in ("Q", "DQ", "both"):

        def odd(net: Net, where: str = where) -> Outputs:
            scale, one, two = (
                net.const(0.05),
                net.const(np.int8(0)),
                net.const(np.zeros(2, np.int8)),
            )
            q = net.op("QuantizeLinear", net.input(SHAPE), scale, one if where == "DQ" else two)
            return conv(net, net.op("DequantizeLinear", q, scale, one if where == "Q" else two))

        yield f"two zero points for one scale, {where}", odd
    yield from {
        "scale from a network input": lambda net: conv(
            net,
            (
                lambda s, z: net.op(
                    "DequantizeLinear", net.op("QuantizeLinear", net.input(SHAPE), s, z), s, z
                )
            )(net.input(()), net.const(np.int8(0))),
        ),
        "only Q's scale from a network input": lambda net: conv(
            net,
            (
                lambda z: net.op(
                    "DequantizeLinear",
                    net.op("QuantizeLinear", net.input(SHAPE), net.input(()), z),
                    net.const(0.05),
                    z,
                )
            )(net.const(np.int8(0))),
        ),
        "dynamically quantized": lambda net: conv(
            net,
            net.op(
                "DequantizeLinear", *net.ops("DynamicQuantizeLinear", net.input(SHAPE), outputs=3)
            ),
        ),
        "uint8 network input": lambda net: conv(
            net, net.dq(net.input(SHAPE, onnx.TensorProto.UINT8), integer=np.uint8)
        ),
        "normalization of one value": lambda net: net.op(
            "InstanceNormalization",
            net.input((1, 8, 1, 1)),
            net.const(np.ones(8)),
            net.const(np.zeros(8)),
        ),
    }.items()


def old() -> Iterator[tuple[str, Make]]:
    for axis in (None, 0, 1):
        yield from {
            f"opset 12, weights along axis {axis}": lambda net, axis=axis: net.op(  # type: ignore[misc]
                "Conv",
                quantized(net),
                net.qdq(net.weight(W, "none"), np.full(8, 0.05), axis),
                name="c",
            ),
            f"opset 12, activation along axis {axis}": lambda net, axis=axis: conv(  # type: ignore[misc]
                net, net.qdq(net.input(SHAPE), np.full(8, 0.05), axis)
            ),
        }.items()


def new() -> Iterator[tuple[str, Make]]:
    for integer in (np.int16, np.uint16):
        yield (
            f"pair of {np.dtype(integer)}",
            lambda net, integer=integer: conv(  # type: ignore[misc]
                net, net.dq(net.q(net.input(SHAPE), integer=integer), integer=integer)
            ),
        )


SCALES: dict[str, Make] = dict([*scales(), *weights(), *products(), *refused()])
HALVES: dict[str, Make] = dict(halves())
OLD: dict[str, Make] = dict(old())
NEW: dict[str, Make] = dict(new())
