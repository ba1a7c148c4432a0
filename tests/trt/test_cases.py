"""Every case of every pass and operator fires, on a published build or a small graph."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.ir.modelfile import load
from qdqtool.trt import pipeline
from tests.trt.builder import Graph
from tests.trt.evidence import DIFFERENT, Basis, simulate, simulated

Build = Callable[[Graph], str | list[str]]


def _image(g: Graph, channels: int = 4, size: int = 8) -> str:
    return g.op("Softmax", g.input(1, channels, size, size), "before")


def _operator_before_q(op: str, *constants: tuple[str, list[int]], **attributes: object) -> Build:
    def build(g: Graph) -> list[str]:
        x = g.conv(_image(g), "front")
        inputs = [x, *(g.const(name, np.array(value, np.int64)) for name, value in constants)]
        moved = g.ops(op, inputs, "op", count=2 if op == "Split" else 1, **attributes)[0]
        return [g.op("Softmax", g.pair(moved, "p"), "end")]

    return build


def _product(g: Graph) -> list[str]:
    x = g.pair(g.input(1, 8), "in")
    return [
        g.op("MatMul", [x, g.pair(g.const("w", np.ones((8, 4), np.float32)), "wq", 0.01)], "fc")
    ]


def _silu_add(g: Graph, own: bool = False, out: bool = False) -> list[str]:
    x = _image(g, 8)
    y = g.silu(g.conv(x, "c"), "act")
    y = g.add(g.pair(y, "own") if own else y, g.pair(x, "skip"), "Add")
    return [g.op("Softmax", g.pair(y, "out") if out else y, "end")]


def _transposed(g: Graph, weights: str, scale: float | None) -> str:
    return g.conv(_image(g), "d", k=2, stride=2, op="ConvTranspose", weights=weights, scale=scale)


def _attention(g: Graph) -> list[str]:
    values = g.op("Softmax", g.input(1, 2, 8, 8, name="y"), "values")
    chances = g.op("Softmax", g.input(1, 2, 8, 8), "chances")
    return [g.op("MatMul", [g.pair(chances, "p"), g.pair(values, "v")], "m")]


def _mixed_floats(g: Graph) -> list[str]:
    # The scale of the weights is float16, that of the data is float32.
    w = g.const("w", np.ones((8, 4, 3, 3)), np.float16)
    zero, half = g.const("zero", np.zeros((), np.int8)), g.const("half", 0.1, np.float16)
    w = g.op("DequantizeLinear", [g.op("QuantizeLinear", [w, half, zero], "wq"), half, zero], "wd")
    return [g.op("Conv", [g.pair(_image(g), "in"), w], "c", kernel_shape=[3, 3])]


def _requantized(g: Graph, between: bool) -> list[str]:
    x = g.conv(_image(g), "c") if not between else _image(g)
    return [g.conv(g.pair(g.pair(x, "first", 0.1), "second", 0.2), "end", scale=None)]


def _gemm(g: Graph, behind: str, weights: str = "qdq") -> list[str]:
    x = g.op("Softmax", g.input(2, 8), "before")
    y = g.gemm(x, "fc", 8, 4, 0.1 if weights == "qdq" else None, weights, behind != "activation")
    y = g.relu(y, "r") if behind in ("relu", "activation") else y
    return [g.op("Softmax", g.pair(y, "p"), "end")]


def _computed_scale(g: Graph) -> list[str]:
    x = _image(g)
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "top", keepdims=0)
    q = g.op("QuantizeLinear", [x, scale, g.const("zero", np.int8(0))], "q")
    return [g.op("DequantizeLinear", [q, scale, "zero"], "dq"), g.conv(x, "c")]


def _shared_weights(g: Graph) -> list[str]:
    x, w = _image(g), g.const("w", np.ones((8, 4, 3, 3)))
    return [
        g.op(
            "Conv",
            [g.pair(x, f"in{i}"), g.pair(w, f"w{i}", 0.1 * (i + 1))],
            f"c{i}",
            kernel_shape=[3, 3],
        )
        for i in range(2)
    ]


def _gelu(g: Graph) -> list[str]:
    x = g.conv(_image(g), "c")
    y = g.op("Erf", g.op("Div", [x, g.const("root", 1.41421)], "div"), "erf")
    y = g.op("Mul", [x, g.op("Add", [y, g.const("one", 1.0)], "plus")], "times")
    return [g.op("Softmax", g.pair(g.op("Mul", [y, g.const("half", 0.5)], "halved"), "p"), "end")]


def _concat_of(g: Graph, part: str) -> list[str]:
    image = "before:0" if any(n.name == "before" for n in g.nodes) else _image(g)
    return [g.op("Softmax", g.concat([part, g.op("Neg", image, "n")], "cat"), "end")]


def _cast_twice(g: Graph, tensor: str) -> str:
    """Add Casts to float16 and back."""
    half = g.op("Cast", tensor, "half", to=onnx.TensorProto.FLOAT16)
    return g.op("Cast", half, "cast", to=onnx.TensorProto.FLOAT)


GRAPHS: dict[str, Build] = {
    "ActivationToPointwiseConversion/other": lambda g: g.op("Tanh", _image(g), "t"),
    "Cast/q-past-cast": lambda g: g.conv(_cast_twice(g, g.op("Neg", _image(g), "n")), "c"),
    "ConcatRemoval/deconvolution-copied": lambda g: _concat_of(g, _transposed(g, "float", None)),
    "ConcatRemoval/stomping": lambda g: _concat_of(g, g.input(1, 4, 8, 8, name="y")),
    "ConstCastFold/cast": lambda g: [
        g.op(
            "Conv",
            [
                g.pair(_image(g), "in"),
                _cast_twice(g, g.pair(g.const("w", np.ones((8, 4, 3, 3))), "w.q")),
            ],
            "c",
            kernel_shape=[3, 3],
        )
    ],
    "ConstEltFusion/with-relu": lambda g: _gemm(g, "relu"),
    "ConstQDQInitializersFusion/computed": _computed_scale,
    "ConstWeightsQuantizeFusion/several-readers": _shared_weights,
    "ConstantFoldDanglingQDQ/dequantized-weights": lambda g: g.conv(
        _image(g), "c", scale=None, weights="qdq"
    ),
    "ConvActPoolFusion/stem-other": lambda g: [
        g.conv(
            g.pool(g.relu(g.conv(g.input(1, 3, 32, 32), "a", k=3, stride=2), "r"), "pool", k=3), "b"
        )
    ],
    "ConvScaleFusion/float": lambda g: g.bn(
        g.conv(_image(g), "c", scale=None, weights="float"), "bn"
    ),
    "DeconvReluFusion/deconvolution": lambda g: g.relu(_transposed(g, "float", None), "r"),
    "DeconvScaleFusion/deconvolution": lambda g: g.bn(_transposed(g, "float", None), "bn"),
    "DepthToSpace/q-past-depthtospace": _operator_before_q("DepthToSpace", blocksize=2),
    "DqQFusion/several-readers": lambda g: [
        g.conv(x := g.pair(_image(g), "a"), "c"),
        g.op("Neg", x, "n"),
    ],
    "EltwiseAddToPwn/sum": lambda g: g.add(
        _image(g), g.op("Softmax", g.input(1, 4, 8, 8, name="y"), "s"), "Add"
    ),
    "GenericConvActFusion/activation-pointwise": lambda g: g.op(
        "Softmax", g.op("Tanh", g.conv(_image(g), "c"), "t"), "end"
    ),
    "GenericConvActFusion/deconvolution": lambda g: g.op(
        "Tanh", _transposed(g, "float", None), "t"
    ),
    "GenericConvActFusion/depthwise": lambda g: g.silu(g.conv(_image(g, 8), "c", groups=8), "act"),
    "GenericConvActFusion/pointwise": lambda g: g.silu(g.conv(_image(g), "c"), "act"),
    "GenericConvActFusion/joined-with-add": _silu_add,
    "HorizontalMergeQNodes/clone": lambda g: [
        g.conv(x := g.relu(g.conv(_image(g), "c"), "r"), "d"),
        g.conv(g.concat([x, g.op("Neg", x, "n")], "cat"), "e"),
    ],
    "HorizontalMergeQNodes/network-output": lambda g: [
        g.q(x := _image(g), "out"),
        g.conv(x, "c"),
    ],
    "HorizontalMergeQNodes/unknown-scale": _computed_scale,
    "MatMulToConvTransform/matmul": lambda g: g.op(
        "MatMul",
        [
            g.pair(g.op("Softmax", g.input(2, 8), "before"), "in"),
            g.pair(g.const("w", np.ones((8, 4))), "w.q"),
        ],
        "m",
    ),
    "MatMulToConvTransform/plain-gemm": lambda g: _gemm(g, "relu", "float"),
    "MergeLayers/equal-convolutions": lambda g: [
        g.conv(x := _image(g), "a", scale=0.1),
        g.conv(x, "b", scale=0.1),
    ],
    "MyelinOptimization/constants": lambda g: [
        g.op("Expand", [g.const("one", [1.0]), g.const("dims", np.array([2], np.int64))], "grid"),
        g.conv(_image(g), "c"),
    ],
    "Pad/q-past-copying-pad": lambda g: g.op(
        "Softmax", g.pair(g.pad(_image(g), "pad", "reflect"), "p"), "end"
    ),
    "Pad/q-past-zero-pad": lambda g: g.op("Softmax", g.pair(g.pad(_image(g), "pad"), "p"), "end"),
    "Resize/q-past-cubic-resize": lambda g: g.op(
        "Softmax", g.pair(g.resize(_image(g), "up", mode="cubic"), "p"), "end"
    ),
    "PadConvFusion/pad": lambda g: g.conv(
        g.pad(_image(g), "pad"), "c", scale=None, weights="float"
    ),
    "PointWiseFusion/constant-operand": _gelu,
    "PointWiseFusion/with-add": _silu_add,
    "QConvScaleFusion/convtranspose": lambda g: g.bn(_transposed(g, "qdq", 0.1), "bn"),
    "QuantizeConvWithResidualAdd/activated": lambda g: _silu_add(g, out=True),
    "QuantizeDoubleInputNodes/deconvolution-later": lambda g: _transposed(g, "qdq", 0.1),
    "QuantizeDoubleInputNodes/different-scales": lambda g: [
        g.conv(x := g.conv(_image(g), "c"), "a", scale=0.1),
        g.conv(x, "b", scale=0.2),
    ],
    "QuantizeDoubleInputNodes/deconvolution-3d": lambda g: [
        g.op(
            "ConvTranspose",
            [
                g.pair(g.op("Softmax", g.input(1, 4, 4, 4, 4), "before"), "in"),
                g.pair(g.const("w", np.ones((4, 8, 2, 2, 2))), "wq"),
            ],
            "up",
        )
    ],
    "QuantizeDoubleInputNodes/int8-matmul": _attention,
    "QuantizeDoubleInputNodes/mixed-floats": _mixed_floats,
    "QuantizeDoubleInputNodes/pointwise": lambda g: [
        g.op(
            "Softmax",
            g.pair(
                g.op(
                    "Max",
                    [g.pair(x := _image(g), "a"), g.pair(g.op("Neg", x, "n"), "b")],
                    "two",
                ),
                "p",
            ),
            "end",
        )
    ],
    "MyelinRegions/edge": _product,
    "MyelinRegions/inside": lambda g: g.conv(_image(g), "c"),
    "MyelinRegions/pointwise": lambda g: g.conv(g.op("Tanh", _image(g), "t"), "c"),
    "MyelinRegions/product": _product,
    "QuantizeDoubleInputNodes/pointwise-to-float": lambda g: g.op(
        "Softmax", g.relu(g.pair(_image(g), "a"), "r"), "s"
    ),
    "QuantizeDoubleInputNodes/sum-to-float": lambda g: g.add(
        g.pair(x := _image(g), "a"), g.pair(g.relu(x, "r"), "b"), "sum"
    ),
    "QuantizeDoubleInputNodes/prelu": lambda g: g.op(
        "PRelu", [g.conv(_image(g), "c"), g.const("slope", np.ones((8, 1, 1)))], "p"
    ),
    "QuantizeDoubleInputNodes/sum": lambda g: _silu_add(g, own=True, out=True),
    "QuantizeSingleInputNodes/average-window": lambda g: g.op(
        "Softmax", g.pair(g.pool(g.pair(_image(g), "a"), "pool", "AveragePool"), "b"), "end"
    ),
    "QDQToCopy/attention": _attention,
    "ReduceToPoolingFusion/global-max": _operator_before_q("GlobalMaxPool"),
    "ReduceToPoolingFusion/mean": lambda g: g.op("ReduceMean", _image(g), "mean", axes=[2, 3]),
    "ReduceToPoolingFusion/reduce-max": lambda g: g.op("ReduceMax", _image(g), "max", axes=[3]),
    "RequantizeFusion/conversion": lambda g: _requantized(g, True),
    "RequantizeFusion/into-convolution": lambda g: _requantized(g, False),
    "Slice/q-past-slice": lambda g: g.op(
        "Softmax", g.pair(g.slice(_image(g), "cut", 0, 2), "p"), "end"
    ),
    "SpaceToDepth/q-past-spacetodepth": _operator_before_q("SpaceToDepth", blocksize=2),
    "Split/q-past-split": _operator_before_q("Split", axis=1),
    "SplitQAcrossPrecedingFanIn/nested": lambda g: [
        g.op(
            "Softmax",
            g.pair(
                g.concat(
                    [
                        g.concat([g.op("Neg", x := _image(g), "n"), g.op("Abs", x, "a")], "inner"),
                        x,
                    ],
                    "outer",
                ),
                "p",
            ),
            "end",
        )
    ],
    "Squeeze/q-past-squeeze": _operator_before_q("Squeeze", ("axes", [0])),
    "SqueezePushDownJoin/activation": lambda g: _gemm(g, "activation"),
    "SqueezePushDownJoin/followed-by-q": lambda g: _gemm(g, "q"),
    "Transpose/q-past-transpose": _operator_before_q("Transpose", perm=[0, 2, 3, 1]),
    "Unsqueeze/q-past-unsqueeze": _operator_before_q("Unsqueeze", ("axes", [0])),
    "VanillaSwapWithPreceedingDQ/copied": lambda g: [
        g.conv(g.pool(x := g.pair(_image(g), "a"), "pool"), "c", scale=None),
        x,
    ],
    "VanillaSwapWithPreceedingDQ/listed": lambda g: g.conv(
        g.pool(g.pair(_image(g), "a"), "pool"), "c", scale=None
    ),
    "VanillaSwapWithPreceedingDQ/per-channel": lambda g: [
        g.op(
            "Conv",
            [
                g.pair(_image(g), "in"),
                g.op(
                    "Transpose",
                    g.pair(
                        g.const("w", np.ones((3, 3, 4, 8))),
                        "w.q",
                        np.linspace(0.1, 0.2, 8),
                        axis=3,
                    ),
                    "turn",
                    perm=[3, 2, 0, 1],
                ),
            ],
            "c",
            kernel_shape=[3, 3],
            pads=[1] * 4,
        )
    ],
    "VanillaSwapWithPreceedingDQ/several-readers": lambda g: [
        g.conv(g.pool(x := g.pair(_image(g), "a"), "pool"), "c", scale=None),
        x,
    ],
}
TARGETS = dict.fromkeys(GRAPHS, "trt8.5") | {
    "MatMulToConvTransform/plain-gemm": "trt8.6",
    "QuantizeConvWithResidualAdd/activated": "trt11",
    "QuantizeDoubleInputNodes/mixed-floats": "trt11",
    "VanillaSwapWithPreceedingDQ/copied": "trt11",
    "MyelinRegions/edge": "trt10",
    "MyelinRegions/inside": "trt10",
    "MyelinRegions/pointwise": "trt10",
    "MyelinRegions/product": "trt10",
}
for _file in sorted(Path(__file__).with_name("passes").glob("test_*.py")):
    _module = importlib.import_module(f"tests.trt.passes.{_file.stem}")
    for _name, (_build, _target) in getattr(_module, "GRAPHS", {}).items():
        GRAPHS[_name], TARGETS[_name] = _build, _target


def model_of(name: str) -> onnx.ModelProto:
    g = Graph()
    outputs = GRAPHS.get(name, _operator_before_q(name.partition("/")[0]))(g)
    return g.model(*([outputs] if isinstance(outputs, str) else outputs))


@functools.cache
def simulated_graph(name: str) -> Basis:
    return simulate(load(model_of(name)), TARGETS[name])


@pytest.mark.parametrize("name", GRAPHS)
def test_case_fires(name: str) -> None:
    assert name in simulated_graph(name).cases


def test_passes_declare_lines_that_do_not_name_them() -> None:
    # qdqtool explain finds the pass of such a line by this declaration.
    simulations = (*map(simulated_graph, GRAPHS), *map(simulated, DIFFERENT))
    printed = {line for basis in simulations for line in basis.unnamed_lines}
    assert printed == {
        (kind.__name__, line) for kind in pipeline.passes() for line in kind.anonymous_lines
    }


def test_every_case_fires_somewhere() -> None:
    # An operator with one input and no attributes needs no graph in GRAPHS.
    on_builds = {name for case in DIFFERENT for name in simulated(case).cases}
    others = pipeline.cases().keys() - on_builds - GRAPHS.keys()
    assert [
        name for name in others if name not in simulate(load(model_of(name)), "trt8.5").cases
    ] == []
