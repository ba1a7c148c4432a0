"""Operators between a Q/DQ pair and a convolution.

Each operator keeps the rank, so that operators can be chained.
"""

import random
from collections.abc import Callable

import numpy as np

from tools.fuzz.net import Net

I64 = np.int64
Move = Callable[[Net, random.Random, str], str]


def _ints(net: Net, *values: int) -> str:
    return net.const(np.array(values, I64))


def _unary(kind: str) -> Move:
    return lambda net, r, x: net.op(kind, x)


def _pool(net: Net, r: random.Random, x: str) -> str:
    rank = len(net.shape(x)) - 2
    return net.op(
        "MaxPool",
        x,
        kernel_shape=[3] * rank,
        pads=[1] * 2 * rank,
        strides=[r.choice((1, 2))] * rank,
    )


def _average(net: Net, r: random.Random, x: str) -> str:
    k = r.choice((1, 2, 3))
    return net.op("AveragePool", x, kernel_shape=[k, k], strides=[1, 1])


def _transpose(net: Net, r: random.Random, x: str) -> str:
    perm = [1, 2, 3]
    r.shuffle(perm)
    return net.op("Transpose", x, perm=[0, *perm])


def _reshape(net: Net, r: random.Random, x: str) -> str:
    n, c, h, w = net.shape(x)
    shape = r.choice(((n, c * h, 1, w), (n, c, 1, h * w), (n, c, w, h)))
    return net.op("Reshape", x, _ints(net, *shape))


def _squeeze(net: Net, r: random.Random, x: str) -> str:
    axes = _ints(net, 0)
    return net.op("Unsqueeze", net.op("Squeeze", x, axes), axes)


def _pad(net: Net, r: random.Random, x: str) -> str:
    mode = r.choice(("constant", "constant", "constant", "edge", "reflect"))
    pads = r.choice(((0, 0, 1, 1, 0, 0, 1, 1), (0, 0, 0, 0, 0, 0, 1, 1), (0, 1, 0, 0, 0, 1, 0, 0)))
    extra = (
        [net.const(r.choice((0.0, 0.0, 1.0)))] if mode == "constant" and r.random() < 0.5 else []
    )
    return net.op("Pad", x, _ints(net, *pads), *extra, mode=mode)


def _crop(net: Net, r: random.Random, x: str) -> str:
    axis = r.choice((1, 2, 3))
    size = net.shape(x)[axis]
    stop = max(1, size - r.choice((1, 2)))
    return net.op(
        "Slice",
        x,
        _ints(net, 0),
        _ints(net, stop),
        _ints(net, axis),
        _ints(net, r.choice((1, 1, 2))),
    )


def _split(net: Net, r: random.Random, x: str) -> str:
    axis = r.choice([a for a in (1, 2, 3) if net.shape(x)[a] > 1] or [0])
    size = net.shape(x)[axis]
    if size < 2:
        return x
    return r.choice(
        net.ops("Split", x, _ints(net, size // 2, size - size // 2), outputs=2, axis=axis)
    )


def _gather(net: Net, r: random.Random, x: str) -> str:
    return net.op("Gather", x, _ints(net, *range(0, net.shape(x)[1], r.choice((1, 2)))), axis=1)


def _depth_to_space(net: Net, r: random.Random, x: str) -> str:
    _, c, h, w = net.shape(x)
    if c % 4 == 0:
        return net.op("DepthToSpace", x, blocksize=2, mode=r.choice(("DCR", "CRD")))
    return (
        net.op("SpaceToDepth", x, blocksize=2)
        if h % 2 == 0 and w % 2 == 0
        else net.op("Identity", x)
    )


def _scalar(net: Net, r: random.Random, x: str) -> str:
    value = net.const(np.full(r.choice(((), (1,), (1, 1, 1))), r.choice((2.0, 0.5, -1.0, 3.0))))
    kind = r.choice(("Mul", "Mul", "Mul", "Div", "Add", "Sub", "Max", "Min"))
    pair = [x, value] if r.random() < 0.7 else [value, x]
    return net.op(kind, *pair)


def _channels(net: Net, r: random.Random, x: str) -> str:
    vector = np.linspace(0.5, 1.5, net.shape(x)[1]).reshape(-1, 1, 1)
    return net.op(r.choice(("Mul", "Add")), x, net.const(vector))


def _resize(net: Net, r: random.Random, x: str) -> str:
    factor = r.choice((1.0, 2.0, 2.0))
    mode = r.choice(("nearest", "linear"))
    return net.op(
        "Resize", x, "", net.const(np.array([1, 1, factor, factor]), np.float32), mode=mode
    )


def _expand(net: Net, r: random.Random, x: str) -> str:
    if r.random() < 0.5:
        return net.op("Tile", x, _ints(net, 1, r.choice((1, 2)), 1, 1))
    return net.op("Expand", x, _ints(net, *net.shape(x)))


def _reduce(net: Net, r: random.Random, x: str) -> str:
    kind = r.choice(("ReduceMax", "ReduceMean", "ReduceMin"))
    if net.opset >= 18:
        return net.op(kind, x, _ints(net, 2, 3), keepdims=1)
    return net.op(kind, x, axes=[2, 3], keepdims=1)


def _join(net: Net, r: random.Random, x: str) -> str:
    """Combine a tensor with a function of the tensor, or with the quantized tensor."""
    other = r.choice(
        (
            lambda: net.op("Neg", x),
            lambda: net.op("Abs", x),
            lambda: net.qdq(x, r.choice((0.02, 0.05))),
            lambda: net.op("Relu", x),
            lambda: net.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4),
        )
    )()
    kind = r.choice(("Concat", "Concat", "Max", "Min", "Add", "Mul"))
    return net.op(kind, x, other, **({"axis": 1} if kind == "Concat" else {}))


def _again(net: Net, r: random.Random, x: str) -> str:
    return net.qdq(x, r.choice((0.02, 0.05)))


def _cast(net: Net, r: random.Random, x: str) -> str:
    own = 10 if net.dtype == np.float16 else 1
    if r.random() < 0.5:
        return net.op("Cast", x, to=own)
    return net.op("Cast", net.op("Cast", x, to=11 - own), to=own)


def _norm(net: Net, r: random.Random, x: str) -> str:
    c = net.shape(x)[1]
    if r.random() < 0.5:
        return net.op(
            "BatchNormalization", x, *(net.const(np.linspace(0.5, 1.5, c)) for _ in range(4))
        )
    return net.op("InstanceNormalization", x, net.const(np.ones(c)), net.const(np.zeros(c)))


MOVES: tuple[Move, ...] = (
    *(
        _unary(k)
        for k in (
            "Relu",
            "Sigmoid",
            "Tanh",
            "Neg",
            "Abs",
            "Identity",
            "Dropout",
            "Exp",
            "HardSigmoid",
            "LeakyRelu",
            "Softplus",
            "Floor",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "Elu",
            "Sqrt",
        )
    ),
    _pool,
    _pool,
    _average,
    _transpose,
    _transpose,
    _reshape,
    _reshape,
    _squeeze,
    _pad,
    _pad,
    _pad,
    _crop,
    _crop,
    _split,
    _gather,
    _depth_to_space,
    _scalar,
    _scalar,
    _scalar,
    _channels,
    _resize,
    _expand,
    _reduce,
    _join,
    _join,
    _again,
    _cast,
    _norm,
)


def add_random_operator(net: Net, r: random.Random, x: str) -> str:
    return r.choice(MOVES)(net, r, x)
