"""Experiments with TensorRT-RTX: each is the smallest graph that answers one question.

The question is the name of the experiment. ``python -m tools.rtx.record`` builds the graphs and
writes the answers to ``tests/data/rtx/answers.json``. The tests compare the prediction with these
answers, and do not need the compiler.
"""

from collections.abc import Callable, Iterator

import numpy as np
import onnx

from tools.fuzz.net import Net
from tools.rtx import operators as ops
from tools.rtx.operators import OPERATORS, Step, chain, ints

Outputs = str | tuple[str, ...]
Make = Callable[[Net], Outputs]
SHAPE = (1, 8, 16, 16)


def quantized(net: Net, scale: float = 0.05) -> str:
    return net.qdq(net.input(SHAPE), scale)


def conv(net: Net, x: str, name: str = "c") -> str:
    return net.conv(x, 8, name=name)


def before_conv(step: Step) -> Make:
    """Return a function that builds a pair, a step, and a convolution without its own pair."""
    return lambda net: conv(net, step(net, quantized(net)))


def finish(make: Make, opset: int = 17, half: bool = False) -> onnx.ModelProto:
    net = Net(opset, half)
    outputs = make(net)
    return net.model(*([outputs] if isinstance(outputs, str) else outputs))


def moves() -> Iterator[tuple[str, Make]]:
    """Yield a pair, an operator and a convolution. Does the convolution inherit INT8?"""
    for name, step in OPERATORS.items():
        yield f"through {name}", before_conv(step)
    movers = {
        "mul": ops.TWICE,
        "maxpool": ops.MAXPOOL,
        "transpose": ops.TRANSPOSE,
        "slice": ops.HALVES,
        "identity": ops.IDENTITY,
        "neg": ops.NEG,
    }
    for name, step in movers.items():
        for padding, first in (("pad", ops.PAD), ("pad-edge", ops.EDGE)):
            yield from {
                f"through {padding}, then {name}": before_conv(chain(first, step)),
                f"through {name}, then {padding}": before_conv(chain(step, first)),
            }.items()
    yield from {
        "through relu, then maxpool": before_conv(chain(ops.RELU, ops.MAXPOOL)),
        "through maxpool, then relu": before_conv(chain(ops.MAXPOOL, ops.RELU)),
        "through pad twice": before_conv(chain(ops.PAD, ops.PAD)),
        "through seven movers": before_conv(chain(*movers.values(), ops.ABS)),
    }.items()

    def pad_two(net: Net) -> Outputs:
        x = ops.PAD(net, quantized(net))
        return conv(net, x, "c0"), conv(net, x, "c1")

    yield "a pad that two convolutions read", pad_two

    def pad_shown(net: Net) -> Outputs:
        x = ops.PAD(net, quantized(net))
        return conv(net, x), x

    yield from {
        "a pad that is an output": pad_shown,
        "a pad in front of auto_pad": lambda net: net.op(
            "Conv",
            ops.PAD(net, quantized(net)),
            net.weight((8, 8, 3, 3)),
            name="c",
            auto_pad="SAME_UPPER",
        ),
        "a pad of one dimension": lambda net: net.conv(
            net.op("Pad", net.qdq(net.input((1, 8, 16))), ints(net, 0, 0, 1, 0, 0, 1)), 8, name="c"
        ),
        "a pad of three dimensions": lambda net: net.conv(
            net.op(
                "Pad", net.qdq(net.input((1, 4, 8, 8, 8))), ints(net, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1)
            ),
            4,
            name="c",
        ),
    }.items()


def integers() -> Iterator[tuple[str, Make]]:
    for name in (
        "maxpool",
        "transpose",
        "reshape",
        "slice",
        "identity",
        "relu",
        "depthtospace",
        "resize-nearest",
        "split",
        "gather",
        "expand",
        "abs",
    ):
        yield (
            f"between Q and DQ: {name}",
            lambda net, s=OPERATORS[name]: conv(net, net.dq(s(net, net.q(net.input(SHAPE))))),
        )


def stored() -> Iterator[tuple[str, Make]]:
    """Yield stored integers of weights that operators other than DQ read."""
    steps: dict[str, Step] = {
        "a DQ alone": chain(),
        "Identity": ops.unary("Identity"),
        "Transpose": ops.unary("Transpose", perm=[1, 0, 2, 3]),
        "Cast": ops.unary("Cast", to=onnx.TensorProto.INT8),
        "Reshape": ops.with_ints("Reshape", 8, 8, 3, 3),
    }
    for name, step in steps.items():
        yield (
            f"stored integers: {name}",
            lambda net, s=step: net.op(
                "Conv",
                quantized(net),
                net.dq(s(net, net.const(np.ones((8, 8, 3, 3)), np.int8))),
                name="c",
            ),
        )
    yield from {
        "stored integers: a node that nothing needs": _unused,
        "stored integers: an Add": lambda net: net.op(
            "Add", net.input((8, 8), onnx.TensorProto.INT8), net.const(np.ones((8, 8)), np.int8)
        ),
    }.items()


def _unused(net: Net) -> str:
    w = net.const(np.ones((8, 8, 3, 3)), np.int8)
    net.op("Identity", w)
    return net.op("Conv", quantized(net), net.dq(w), name="c")


def joins() -> Iterator[tuple[str, Make]]:
    """Yield two quantized tensors, an operator on both tensors, and a convolution."""

    def of(
        kind: str,
        left: float,
        right: float,
        a: Step | None = None,
        b: Step | None = None,
        **more: object,
    ) -> Make:
        def make(net: Net) -> Outputs:
            x, y = quantized(net, left), quantized(net, right)
            x, y = (a(net, x) if a else x), (b(net, y) if b else y)
            return conv(net, net.op(kind, x, y, **more))

        return make

    for kind in ("Max", "Min", "Add", "Sub", "Mul", "Div", "Sum", "Mean", "Pow"):
        yield from {
            f"{kind} of equal scales": of(kind, 0.05, 0.05),
            f"{kind} of unequal scales": of(kind, 0.05, 0.1),
        }.items()
    one = {"axis": 1}
    yield from {
        "Concat of equal scales": of("Concat", 0.05, 0.05, **one),
        "Concat of unequal scales": of("Concat", 0.05, 0.06, **one),
        "Concat of nearly equal scales": of("Concat", 0.05, 0.05 * (1 + 1e-7), **one),
        "Concat along the batch": of("Concat", 0.05, 0.05, axis=0),
        "Concat along the height": of("Concat", 0.05, 0.05, axis=2),
        "Concat, both doubled": of("Concat", 0.05, 0.05, ops.TWICE, ops.TWICE, **one),
        "Concat, one doubled": of("Concat", 0.05, 0.05, ops.TWICE, **one),
        "Concat, doubled to the other's scale": of("Concat", 0.05, 0.1, ops.TWICE, **one),
        "Concat, doubled and divided by a half": of(
            "Concat", 0.05, 0.05, ops.TWICE, ops.binary("Div", 0.5), **one
        ),
        "Concat, by six and by two and three": of(
            "Concat",
            0.05,
            0.05,
            ops.binary("Mul", 6.0),
            chain(ops.TWICE, ops.binary("Mul", 3.0)),
            **one,
        ),
        "Concat, one pooled": of("Concat", 0.05, 0.05, ops.MAXPOOL, **one),
        "Concat, one negated": of("Concat", 0.05, 0.05, ops.NEG, **one),
        "Concat, one behind a Relu": of("Concat", 0.05, 0.05, ops.RELU, **one),
        "Concat, both padded": of("Concat", 0.05, 0.05, ops.PAD, ops.PAD, **one),
        "Concat, one quantized again": of(
            "Concat", 0.05, 0.06, lambda net, x: net.qdq(x, 0.06), **one
        ),
        "Concat, one reciprocal": of("Concat", 0.05, 0.05, ops.unary("Reciprocal"), **one),
        "Concat with a float input": lambda net: conv(
            net, net.op("Concat", quantized(net), net.input(SHAPE), axis=1)
        ),
        "Concat with a constant": lambda net: conv(
            net, net.op("Concat", quantized(net), net.const(np.zeros((1, 4, 16, 16))), axis=1)
        ),
        "Concat with a quantized constant": lambda net: conv(
            net,
            net.op("Concat", quantized(net), net.qdq(net.const(np.ones((1, 4, 16, 16)))), axis=1),
        ),
        "Concat of uint8 and int8": lambda net: conv(
            net,
            net.op(
                "Concat",
                net.dq(net.q(net.input(SHAPE), integer=np.uint8), integer=np.uint8),
                quantized(net),
                axis=1,
            ),
        ),
        "Where of equal scales": lambda net: conv(
            net,
            net.op(
                "Where", net.input(SHAPE, onnx.TensorProto.BOOL), quantized(net), quantized(net)
            ),
        ),
        "Where of unequal scales": lambda net: conv(
            net,
            net.op(
                "Where",
                net.input(SHAPE, onnx.TensorProto.BOOL),
                quantized(net),
                quantized(net, 0.1),
            ),
        ),
    }.items()


def sharing() -> Iterator[tuple[str, Make]]:
    """Yield two consumers of one tensor. Does the first change the second?"""
    readers: dict[str, Step] = {
        "relu": ops.RELU,
        "output": lambda net, x: x,
        "conv": lambda net, x: conv(net, x, "c1"),
        "q": lambda net, x: net.q(x, 0.07),
        "transpose and conv": lambda net, x: conv(net, ops.TRANSPOSE(net, x), "c1"),
        "same factor": lambda net, x: conv(net, ops.TWICE(net, x), "c1"),
        "other factor": lambda net, x: conv(net, ops.binary("Mul", 3.0)(net, x), "c1"),
    }
    for name, step in readers.items():
        for mover in ("mul-scalar", "maxpool", "transpose", "neg"):
            move = OPERATORS[mover]

            def before(net: Net, s: Step = step, m: Step = move) -> Outputs:
                x = quantized(net)
                return conv(net, m(net, x)), s(net, x)

            def after(net: Net, s: Step = step, m: Step = move) -> Outputs:
                x = m(net, quantized(net))
                return conv(net, x), s(net, x)

            yield from {
                f"{mover}, its input read by {name}": before,
                f"{mover}, its result read by {name}": after,
            }.items()

    def root_of_shape(net: Net, x: str) -> str:
        size = net.op("Gather", net.op("Shape", x), net.const(np.int64(1)))
        return net.op("Sqrt", net.op("Cast", size, to=onnx.TensorProto.FLOAT))

    for mover, of_shape in {
        "mul": lambda net, x: net.op("Mul", x, root_of_shape(net, x)),
        "pad": lambda net, x: net.op("Mul", ops.PAD(net, x), root_of_shape(net, ops.PAD(net, x))),
    }.items():
        yield (
            f"{mover}, by a root of the shape",
            lambda net, s=of_shape: conv(  # type: ignore[misc]
                net, s(net, quantized(net))
            ),
        )
    yield (
        "pad that a Shape reads",
        lambda net: (
            lambda x: (conv(net, x), net.op("Mul", net.input((1,)), root_of_shape(net, x)))
        )(ops.PAD(net, quantized(net))),
    )
    for name in (
        "transpose",
        "maxpool",
        "neg",
        "abs",
        "pad-edge",
        "tile",
        "gather",
        "depthtospace",
        "spacetodepth",
        "reshape",
        "globalmaxpool",
        "reducemax",
        "slice",
        "slice-step",
        "split",
        "expand",
        "mul-scalar",
        "identity",
        "cast-same",
        "squeeze",
        "flatten",
        "gatherelements",
        "topk",
        "resize-nearest",
        "clip",
        "relu",
        "averagepool",
        "leakyrelu",
        "add-scalar",
        "batchnormalization",
        "maxpool-stride2",
    ):
        step = OPERATORS[name]

        def pulled(net: Net, s: Step = step) -> Outputs:
            x = ops.MAXPOOL(net, quantized(net))
            return conv(net, x), net.q(s(net, x), 0.07)

        def pulled_with_other(net: Net, s: Step = step) -> Outputs:
            x = ops.MAXPOOL(net, quantized(net))
            y = s(net, x)
            return conv(net, x), net.q(y, 0.07), net.op("Relu", y)

        def in_front(net: Net, s: Step = step) -> Outputs:
            x = ops.MAXPOOL(net, s(net, quantized(net)))
            return conv(net, x), net.q(x, 0.07)

        yield from {
            f"a pool whose Q stands behind {name}": pulled,
            f"a pool whose Q stands behind {name}, read by another": pulled_with_other,
            f"a pool with a Q, behind {name}": in_front,
        }.items()
    for order in ("scalar first", "shape [1] first"):

        def merged(net: Net, scalar_first: bool = order == "scalar first") -> Outputs:
            x = net.input(SHAPE)
            first, second = ((), (1,)) if scalar_first else ((1,), ())
            return tuple(
                conv(net, net.qdq(x, np.full(s, 0.05)), f"c{i}")
                for i, s in enumerate((first, second))
            )

        yield f"equal pairs on one tensor, {order}", merged


def forms() -> Iterator[tuple[str, Make]]:
    """Yield operators next to a convolution. Does the parser accept the operators?"""
    index, update = np.zeros((1, 1), np.int64), np.ones((1, 8, 16, 16))
    scales = np.asarray([1, 1, 2, 2], np.float32)
    steps: dict[str, Step] = {
        "NonZero": lambda net, x: net.op("Cast", net.op("NonZero", x), to=onnx.TensorProto.FLOAT),
        "Det": ops.unary("Det"),
        "CumSum": lambda net, x: net.op("CumSum", x, net.const(np.int64(1))),
        "RoiAlign": lambda net, x: net.op(
            "RoiAlign", x, net.const(np.ones((2, 4))), ints(net, 0, 0)
        ),
        "dilated MaxPool": ops.unary("MaxPool", kernel_shape=[3, 3], dilations=[2, 2]),
        "dilated AveragePool": ops.unary("AveragePool", kernel_shape=[3, 3], dilations=[2, 2]),
        "AveragePool with dilations of 1": ops.unary(
            "AveragePool", kernel_shape=[3, 3], dilations=[1, 1]
        ),
        "indices of MaxPool": lambda net, x: net.ops("MaxPool", x, outputs=2, kernel_shape=[2, 2])[
            0
        ],
        "LpPool of 2": ops.unary("LpPool", kernel_shape=[2, 2]),
        "LpPool of 3": ops.unary("LpPool", kernel_shape=[2, 2], p=3),
        **{
            f"ScatterND {how}": lambda net, x, how=how: net.op(  # type: ignore[misc]
                "ScatterND", x, net.const(index), net.const(update), reduction=how
            )
            for how in ("none", "add")
        },
        **{
            f"Einsum {how}": ops.unary("Einsum", equation=how)
            for how in ("abcd->abdc", "aBcd->aBdc", "a b c d->adcb")
        },
        **{
            f"Resize {how}": lambda net, x, how=how: net.op(  # type: ignore[misc]
                "Resize",
                x,
                "",
                net.const(scales),
                coordinate_transformation_mode=how,
                mode="linear",
            )
            for how in ("half_pixel", "half_pixel_symmetric", "align_corners")
        },
        "Resize with antialiasing": lambda net, x: net.op(
            "Resize", x, "", net.const(scales), mode="linear", antialias=1
        ),
        **{
            f"Mod of floats, fmod {how}": lambda net, x, how=how: net.op(  # type: ignore[misc]
                "Mod", x, net.const(2.0), fmod=how
            )
            for how in (0, 1)
        },
        **{
            f"Cast to {kind.lower()}": chain(
                ops.unary("Cast", to=getattr(onnx.TensorProto, kind)),
                ops.unary("Cast", to=onnx.TensorProto.FLOAT),
            )
            for kind in ("INT16", "INT64", "UINT8", "UINT16", "UINT64", "BOOL", "DOUBLE")
        },
    }
    for name, step in steps.items():
        yield (
            f"form: {name}",
            lambda net, s=step: (lambda x: (conv(net, net.qdq(x)), s(net, x)))(net.input(SHAPE)),
        )
    for kind in ("INT16", "UINT16", "UINT32", "UINT64", "DOUBLE", "BOOL", "INT64"):
        yield (
            f"form: a network input of {kind.lower()}",
            lambda net, k=kind: (
                conv(net, quantized(net)),
                net.op(
                    "Cast",
                    net.input((1, 4), getattr(onnx.TensorProto, k)),
                    to=onnx.TensorProto.FLOAT,
                ),
            ),
        )


def products() -> Iterator[tuple[str, Make]]:
    """Yield Einsums that are matrix products. Are they INT8?

    They are INT8 if both operands are INT8 and no scale varies along the summed axis.
    """

    def of(
        equation: str,
        left: tuple[int, ...],
        right: tuple[int, ...],
        form: str = "",
        first: bool = True,
    ) -> Make:
        def make(net: Net) -> Outputs:
            x = net.qdq(net.input(left)) if first else net.input(left)
            y = net.weight(right, form) if form else net.qdq(net.input(right))
            return net.op("Einsum", x, y, name="c", equation=equation)

        return make

    cube, heads = (2, 64, 64), (1, 4, 64, 64)
    yield from {
        "Einsum bij,bjk->bik": of("bij,bjk->bik", cube, cube),
        "Einsum bij,bjk": of("bij,bjk", cube, cube),
        "Einsum bhid,bhjd->bhij": of("bhid,bhjd->bhij", heads, heads),
        "Einsum bihd,bjhd->bhij": of("bihd,bjhd->bhij", (1, 64, 4, 64), (1, 64, 4, 64)),
        "Einsum ijk,jil->kl": of("ijk,jil->kl", (4, 64, 64), (64, 4, 64)),
        # This Einsum also sums along an axis that only one operand has.
        "Einsum bij,bkj->bk": of("bij,bkj->bk", cube, cube),
        "Einsum bij,bjk->bik, one side float": of("bij,bjk->bik", cube, cube, first=False),
    }.items()
    for form in ("axis0", "axis1", "tensor"):
        yield f"Einsum bij,jk->bik, weights {form}", of("bij,jk->bik", cube, (64, 32), form)
    yield from {
        "Einsum bij,jk->bik, weights alone": of("bij,jk->bik", cube, (64, 32), "axis1", False),
        "Einsum bchw,oc->bohw, weights axis0": of(
            "bchw,oc->bohw", (1, 64, 16, 16), (32, 64), "axis0"
        ),
    }.items()
    for form in ("axis0", "axis2"):
        yield f"Einsum bij,bjk->bik, weights {form}", of("bij,bjk->bik", cube, (2, 64, 32), form)


FORMS = dict(forms())
EXPERIMENTS: dict[str, Make] = dict(
    [*moves(), *integers(), *stored(), *joins(), *sharing(), *products()]
)
