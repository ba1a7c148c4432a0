"""Operators between a pair and a convolution in experiments.

Each operator is a function of a network and a tensor.
"""

from collections.abc import Callable

import numpy as np

from tools.fuzz.net import Net

Step = Callable[[Net, str], str]
I64 = np.int64


def chain(*steps: Step) -> Step:
    def add(net: Net, tensor: str) -> str:
        for step in steps:
            tensor = step(net, tensor)
        return tensor

    return add


def ints(net: Net, *values: int) -> str:
    return net.const(np.array(values, I64))


def unary(kind: str, **attributes: object) -> Step:
    return lambda net, x: net.op(kind, x, **attributes)


def binary(kind: str, value: object, swap: bool = False) -> Step:
    return lambda net, x: net.op(kind, *([net.const(value), x] if swap else [x, net.const(value)]))


def with_ints(kind: str, *values: int, **attributes: object) -> Step:
    return lambda net, x: net.op(kind, x, ints(net, *values), **attributes)


def pad(*pads: int, mode: str = "constant", value: float | None = None) -> Step:
    def step(net: Net, x: str) -> str:
        extra = [] if value is None else [net.const(value)]
        return net.op("Pad", x, ints(net, *pads), *extra, mode=mode)

    return step


def cut(start: int, stop: int, axis: int, step: int = 1) -> Step:
    return lambda net, x: net.op(
        "Slice", x, ints(net, start), ints(net, stop), ints(net, axis), ints(net, step)
    )


def resize(*scales: float, **attributes: object) -> Step:
    return lambda net, x: net.op(
        "Resize", x, "", net.const(np.array(scales), np.float32), **attributes
    )


def casts(*types: int) -> Step:
    def step(net: Net, x: str) -> str:
        for kind in types:
            x = net.op("Cast", x, to=kind)
        return x

    return step


def _norm(net: Net, x: str) -> str:
    return net.op("BatchNormalization", x, *(net.const(np.linspace(0.5, 1.5, 8)) for _ in range(4)))


MAXPOOL = unary("MaxPool", kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1])
TRANSPOSE = unary("Transpose", perm=[0, 1, 3, 2])
RELU, NEG, ABS = unary("Relu"), unary("Neg"), unary("Abs")
TWICE = binary("Mul", 2.0)
PAD = pad(0, 0, 1, 1, 0, 0, 1, 1)
EDGE = pad(0, 0, 1, 1, 0, 0, 1, 1, mode="edge")
IDENTITY = unary("Identity")
HALVES = cut(0, 4, 1)
CHANNELS = np.linspace(0.5, 1.5, 8).reshape(1, 8, 1, 1)

# Operators on a tensor [1, 8, 16, 16]. Experiments show whether a convolution after the operator
# runs in INT8.
OPERATORS: dict[str, Step] = {
    **{
        k.lower(): unary(k)
        for k in (
            "Relu",
            "Sigmoid",
            "Tanh",
            "Neg",
            "Abs",
            "Exp",
            "Sqrt",
            "Erf",
            "Softplus",
            "HardSwish",
            "HardSigmoid",
            "LeakyRelu",
            "Elu",
            "Identity",
            "Dropout",
            "Floor",
            "Ceil",
            "Round",
            "Sin",
            "Softsign",
            "Selu",
            "Sign",
            "Reciprocal",
            "ThresholdedRelu",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "Log",
            "Trilu",
            "LpNormalization",
            "Celu",
            "Shrink",
        )
    },
    "softmax": unary("Softmax", axis=1),
    "logsoftmax": unary("LogSoftmax", axis=1),
    "clip": lambda net, x: net.op("Clip", x, net.const(0.0), net.const(6.0)),
    "clip-wide": lambda net, x: net.op("Clip", x, net.const(-1e9), net.const(1e9)),
    "prelu": lambda net, x: net.op("PRelu", x, net.const(np.full((8, 1, 1), 0.1))),
    **{
        f"{k.lower()}-scalar": binary(k, 2.0)
        for k in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max")
    },
    **{
        f"{k.lower()}-of-scalar": binary(k, 2.0, swap=True)
        for k in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max")
    },
    **{
        f"{k.lower()}-channels": binary(k, CHANNELS)
        for k in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max")
    },
    "mul-shape1": binary("Mul", [2.0]),
    "mul-shape1111": binary("Mul", np.full((1, 1, 1, 1), 2.0)),
    "mul-negative": binary("Mul", -2.0),
    "mul-one": binary("Mul", 1.0),
    "mul-equal-channels": binary("Mul", np.full((1, 8, 1, 1), 2.0)),
    "mul-computed-constant": lambda net, x: net.op("Mul", x, net.op("Exp", net.const(1.0))),
    "mul-network-input": lambda net, x: net.op("Mul", x, net.input(())),
    "mul-quantized-constant": lambda net, x: net.op("Mul", x, net.qdq(net.const(2.0))),
    "add-zero": binary("Add", 0.0),
    "pow-one": binary("Pow", 1.0),
    "silu": lambda net, x: net.op("Mul", x, net.op("Sigmoid", x)),
    "maxpool": MAXPOOL,
    "maxpool-stride2": unary("MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "maxpool-ceil": unary("MaxPool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
    "averagepool": unary("AveragePool", kernel_shape=[3, 3], pads=[1] * 4),
    "averagepool-1x1": unary("AveragePool", kernel_shape=[1, 1]),
    "averagepool-1x1-stride2": unary("AveragePool", kernel_shape=[1, 1], strides=[2, 2]),
    **{
        k.lower(): unary(k, axes=[2, 3])
        for k in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
    },
    "reducemean-of-one": unary("ReduceMean", axes=[0]),
    "reducesum": with_ints("ReduceSum", 2, 3),
    "transpose": TRANSPOSE,
    "transpose-channels": unary("Transpose", perm=[0, 2, 1, 3]),
    "reshape": with_ints("Reshape", 1, 16, 8, 16),
    "flatten": chain(unary("Flatten"), with_ints("Reshape", 1, 8, 16, 16)),
    "squeeze": chain(with_ints("Squeeze", 0), with_ints("Unsqueeze", 0)),
    "expand": with_ints("Expand", 2, 8, 16, 16),
    "tile": with_ints("Tile", 1, 2, 1, 1),
    "depthtospace": unary("DepthToSpace", blocksize=2),
    "depthtospace-crd": unary("DepthToSpace", blocksize=2, mode="CRD"),
    "spacetodepth": unary("SpaceToDepth", blocksize=2),
    "pad": PAD,
    "pad-one-side": pad(0, 0, 0, 1, 0, 0, 2, 3),
    "pad-value": pad(0, 0, 1, 1, 0, 0, 1, 1, value=3.0),
    "pad-value0": pad(0, 0, 1, 1, 0, 0, 1, 1, value=0.0),
    "pad-edge": EDGE,
    "pad-reflect": pad(0, 0, 1, 1, 0, 0, 1, 1, mode="reflect"),
    "pad-negative": pad(0, 0, -1, -1, 0, 0, -1, -1),
    "pad-mixed": pad(0, 0, -1, 1, 0, 0, 2, 3),
    "pad-nothing": pad(0, 0, 0, 0, 0, 0, 0, 0),
    "pad-channels": pad(0, 4, 0, 0, 0, 4, 0, 0),
    "pad-batch": pad(1, 0, 0, 0, 0, 0, 0, 0),
    "slice": HALVES,
    "slice-step": cut(0, 16, 2, 2),
    "slice-backwards": cut(-1, -100, 2, -1),
    "split": lambda net, x: net.ops("Split", x, ints(net, 4, 4), outputs=2, axis=1)[0],
    "split-second": lambda net, x: net.ops("Split", x, ints(net, 4, 4), outputs=2, axis=1)[1],
    "gather": with_ints("Gather", 3, 1, 2, 0, axis=1),
    "gathernd": lambda net, x: net.op("GatherND", x, net.const(np.array([[0]], I64))),
    "gatherelements": lambda net, x: net.op(
        "GatherElements", x, net.const(np.zeros((1, 4, 16, 16), I64)), axis=1
    ),
    "scatternd": lambda net, x: net.op(
        "ScatterND", x, net.const(np.array([[0]], I64)), net.const(np.zeros((1, 8, 16, 16)))
    ),
    "topk": lambda net, x: net.ops("TopK", x, ints(net, 4), outputs=2, axis=1)[0],
    "resize-nearest": resize(1, 1, 2, 2, mode="nearest"),
    "resize-nearest-floor": resize(
        1,
        1,
        2,
        2,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    "resize-linear": resize(1, 1, 2, 2, mode="linear"),
    "resize-down": resize(1, 1, 0.5, 0.5, mode="nearest"),
    "resize-nothing": resize(1, 1, 1, 1, mode="nearest"),
    "cast-same": casts(1),
    "cast-half-and-back": casts(10, 1),
    "cast-double-and-back": casts(11, 1),
    "cast-int-and-back": casts(6, 1),
    "where-zero": lambda net, x: net.op("Where", net.input((1, 8, 16, 16), 9), x, net.const(0.0)),
    "batchnormalization": _norm,
    "instancenormalization": lambda net, x: net.op(
        "InstanceNormalization", x, net.const(np.ones(8)), net.const(np.zeros(8))
    ),
    "layernormalization": lambda net, x: net.op(
        "LayerNormalization", x, net.const(np.ones(16)), net.const(np.zeros(16))
    ),
    "lrn": unary("LRN", size=3),
    "cumsum": lambda net, x: net.op("CumSum", x, net.const(np.array(1, I64))),
    "einsum-transpose": unary("Einsum", equation="abcd->abdc"),
    "einsum-sum": chain(unary("Einsum", equation="abcd->acd"), with_ints("Unsqueeze", 1)),
    "gridsample": lambda net, x: net.op("GridSample", x, net.const(np.zeros((1, 4, 4, 2)))),
    "concat-alone": unary("Concat", axis=1),
    "sum-alone": unary("Sum"),
    "mean-alone": unary("Mean"),
    "pair": lambda net, x: net.qdq(x, 0.07),
    "relu-pair": lambda net, x: net.qdq(net.op("Relu", x), 0.07),
}
