"""Every case of every pass and operator fires: on a published build, or on a graph of a few nodes."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.trt import importer, pipeline
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.evidence import CASES, truth
from tests.trt.evidence import model as published

Build = Callable[[Graph], list[str]]


def rested_on(model: Model, target: str) -> set[str]:
    """Ids of the cases that a simulation rests on: those of its lines and those of its layers."""
    network = importer.build(model)
    run = pipeline.run(network, target_named(target))
    ids = {event.case for event in run.trace}
    return ids | {pipeline.id_of(case) for layer in network.layers.values() for case in layer.cases}


@functools.cache
def on_builds() -> frozenset[str]:
    return frozenset(c for case in CASES for c in rested_on(published(case), truth(case)["target"]))


def _image(g: Graph, channels: int = 4, size: int = 8) -> str:
    return g.op("Softmax", g.input(1, channels, size, size), "before")


def _behind(op: str, *constants: tuple[str, list[int]], **attributes: object) -> Build:
    """A Q behind an operator that it moves past, up to the convolution in front."""

    def build(g: Graph) -> list[str]:
        x = g.conv(_image(g), "front")
        inputs = [x, *(g.const(name, np.array(value, np.int64)) for name, value in constants)]
        moved = g.ops(op, inputs, "op", count=2 if op == "Split" else 1, **attributes)[0]
        return [g.op("Softmax", g.pair(moved, "p"), "end")]

    return build


def _product(g: Graph) -> list[str]:
    x = g.pair(g.input(1, 8), "in")
    return [g.op("MatMul", [x, g.pair(g.const("w", np.ones((8, 4), np.float32)), "wq", 0.01)], "fc")]


def _silu_add(g: Graph) -> list[str]:
    x = _image(g, 8)
    return [g.op("Softmax", g.add(g.silu(g.conv(x, "c"), "act"), g.pair(x, "skip"), "Add"), "end")]


def _silu_add_both(g: Graph) -> list[str]:
    x = _image(g, 8)
    y = g.pair(g.silu(g.conv(x, "c"), "act"), "own")
    return [g.op("Softmax", g.pair(g.add(y, g.pair(x, "skip"), "Add"), "out"), "end")]


def _silu_add_fused(g: Graph) -> list[str]:
    x = _image(g, 8)
    y = g.add(g.silu(g.conv(x, "c"), "act"), g.pair(x, "skip"), "Add")
    return [g.op("Softmax", g.pair(y, "out"), "end")]


def _transposed(g: Graph, weights: str, scale: float | None) -> str:
    return g.conv(_image(g), "d", k=2, stride=2, op="ConvTranspose", weights=weights, scale=scale)


def _matmul(g: Graph, rank: int = 2) -> str:
    x = g.pair(g.op("Softmax", g.input(*([1] * (rank - 2)), 2, 8), "before"), "in")
    return g.op("MatMul", [x, g.pair(g.const("w", np.ones((8, 4))), "w.q")], "m")


def _attention(g: Graph) -> list[str]:
    """Softmax of one computed tensor, multiplied with another."""
    values = g.op("Softmax", g.input(1, 2, 8, 8, name="y"), "values")
    chances = g.op("Softmax", g.input(1, 2, 8, 8), "chances")
    return [g.op("MatMul", [g.pair(chances, "p"), g.pair(values, "v")], "m")]


def _transposed_3d(g: Graph) -> list[str]:
    x = g.pair(g.op("Softmax", g.input(1, 4, 4, 4, 4), "before"), "in")
    return [g.op("ConvTranspose", [x, g.pair(g.const("w", np.ones((4, 8, 2, 2, 2))), "wq")], "up")]


def _mixed_floats(g: Graph) -> list[str]:
    """The weights' scale is float16, the data's is not."""
    w = g.const("w", np.ones((8, 4, 3, 3)), np.float16)
    zero = g.const("zero", np.zeros((), np.int8))
    half = g.const("half", 0.1, np.float16)
    w = g.op("DequantizeLinear", [g.op("QuantizeLinear", [w, half, zero], "wq"), half, zero], "wd")
    return [g.op("Conv", [g.pair(_image(g), "in"), w], "c", kernel_shape=[3, 3])]


def _requantized(g: Graph, between: bool) -> list[str]:
    x = g.conv(_image(g), "c") if not between else _image(g)
    y = g.pair(g.pair(x, "first", 0.1), "second", 0.2)
    return [g.conv(y, "end", scale=None)]


def _nested_concat(g: Graph) -> list[str]:
    x = _image(g)
    inner = g.concat([g.op("Neg", x, "n"), g.op("Abs", x, "a")], "inner")
    return [g.op("Softmax", g.pair(g.concat([inner, x], "outer"), "p"), "end")]


def _merged_clone(g: Graph) -> list[str]:
    x = g.relu(g.conv(_image(g), "c"), "r")
    joined = g.concat([x, g.op("Neg", x, "n")], "cat")
    return [g.conv(x, "d"), g.conv(joined, "e")]


def _gemm(g: Graph, behind: str, weights: str = "qdq") -> list[str]:
    x = g.op("Softmax", g.input(2, 8), "before")
    y = g.gemm(x, "fc", 8, 4, 0.1 if weights == "qdq" else None, weights, behind != "activation")
    y = g.relu(y, "r") if behind in ("relu", "activation") else y
    return [g.op("Softmax", g.pair(y, "p"), "end")]


def _carried_axis(g: Graph) -> list[str]:
    weights = g.const("w", np.ones((3, 3, 4, 8)))
    stored = g.pair(weights, "w.q", np.linspace(0.1, 0.2, 8), axis=3)
    turned = g.op("Transpose", stored, "turn", perm=[3, 2, 0, 1])
    return [g.op("Conv", [g.pair(_image(g), "in"), turned], "c", kernel_shape=[3, 3], pads=[1] * 4)]


def _computed_scale(g: Graph) -> list[str]:
    x = _image(g)
    scale = g.op("ReduceMax", x, "top", keepdims=0)
    q = g.op("QuantizeLinear", [x, scale, g.const("zero", np.int8(0))], "q")
    return [g.op("DequantizeLinear", [q, scale, "zero"], "dq")]


def _shared_weights(g: Graph) -> list[str]:
    w = g.const("w", np.ones((8, 4, 3, 3)))
    x = _image(g)
    return [
        g.op("Conv", [g.pair(x, f"in{i}"), g.pair(w, f"w{i}", 0.1 * (i + 1))], f"c{i}", kernel_shape=[3, 3])
        for i in range(2)
    ]


def _cast_weights(g: Graph) -> list[str]:
    w = g.op("Cast", g.pair(g.const("w", np.ones((8, 4, 3, 3))), "w.q"), "cast", to=1)
    return [g.op("Conv", [g.pair(_image(g), "in"), w], "c", kernel_shape=[3, 3])]


def _network_output_q(g: Graph) -> list[str]:
    x = _image(g)
    q = g.q(x, "out")
    return [q, g.conv(x, "c")]


def _unknown_scale(g: Graph) -> list[str]:
    x = _image(g)
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "top", keepdims=0)
    q = g.op("QuantizeLinear", [x, scale, g.const("zero", np.int8(0))], "q")
    return [g.op("DequantizeLinear", [q, scale, "zero"], "dq"), g.conv(x, "c")]


def _anchors(g: Graph) -> list[str]:
    grid = g.op("Expand", [g.const("one", [1.0]), g.const("dims", np.array([2], np.int64))], "grid")
    return [grid, g.conv(_image(g), "c")]


def _gelu(g: Graph) -> list[str]:
    x = g.conv(_image(g), "c")
    y = g.op("Erf", g.op("Div", [x, g.const("root", 1.41421)], "div"), "erf")
    y = g.op("Mul", [x, g.op("Add", [y, g.const("one", 1.0)], "plus")], "times")
    return [g.op("Softmax", g.pair(g.op("Mul", [y, g.const("half", 0.5)], "halved"), "p"), "end")]


def _pad(g: Graph, mode: str = "constant") -> str:
    pads = g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    return g.op("Pad", [_image(g), pads], "pad", mode=mode)


def _pointwise(g: Graph, op: str) -> list[str]:
    x = g.pair(_image(g), "a")
    y = g.pair(g.op("Neg", _image_of(g), "n"), "b")
    return [g.op("Softmax", g.pair(g.op(op, [x, y], "two"), "p"), "end")]


def _image_of(g: Graph) -> str:
    return "before:0" if any(n.name == "before" for n in g.nodes) else _image(g)


def _stem(g: Graph) -> list[str]:
    x = g.relu(g.conv(g.input(1, 3, 32, 32), "a", k=3, stride=2), "r")
    return [g.conv(g.pool(x, "pool", k=3), "b")]


def _two_scales(g: Graph) -> list[str]:
    x = g.conv(_image(g), "c")
    return [g.conv(x, "a", scale=0.1), g.conv(x, "b", scale=0.2)]


def _concat_of(g: Graph, part: str) -> list[str]:
    return [g.op("Softmax", g.concat([part, g.op("Neg", _image_of(g), "n")], "cat"), "end")]


GRAPHS: dict[str, tuple[Build, str]] = {
    "ActivationToPointwiseConversion/other": (lambda g: [g.op("Tanh", _image(g), "t")], "trt8.5"),
    "Cast/q-past-cast": (lambda g: [g.conv(g.op("Cast", g.op("Neg", _image(g), "n"), "k", to=1), "c")], "trt8.5"),
    "ConcatRemoval/deconvolution-copied": (lambda g: _concat_of(g, _transposed(g, "float", None)), "trt8.5"),
    "ConcatRemoval/stomping": (lambda g: _concat_of(g, g.input(1, 4, 8, 8, name="y")), "trt8.5"),
    "ConstCastFold/cast": (_cast_weights, "trt8.5"),
    "ConstEltFusion/with-relu": (lambda g: _gemm(g, "relu"), "trt8.5"),
    "ConstQDQInitializersFusion/computed": (_computed_scale, "trt8.5"),
    "ConstWeightsQuantizeFusion/several-readers": (_shared_weights, "trt8.5"),
    "ConstantFoldDanglingQDQ/dequantized-weights": (
        lambda g: [g.conv(_image(g), "c", scale=None, weights="qdq")], "trt8.5"
    ),
    "ConvActPoolFusion/stem-other": (_stem, "trt8.5"),
    "ConvScaleFusion/float": (
        lambda g: [g.bn(g.conv(_image(g), "c", scale=None, weights="float"), "bn")], "trt8.5"
    ),
    "DeconvReluFusion/deconvolution": (lambda g: [g.relu(_transposed(g, "float", None), "r")], "trt8.5"),
    "DeconvScaleFusion/deconvolution": (lambda g: [g.bn(_transposed(g, "float", None), "bn")], "trt8.5"),
    "DepthToSpace/q-past-depthtospace": (_behind("DepthToSpace", blocksize=2), "trt8.5"),
    "DqQFusion/several-readers": (
        lambda g: [g.conv(x := g.pair(_image(g), "a"), "c"), g.op("Neg", x, "n")], "trt8.5"
    ),
    "EltwiseAddToPwn/sum": (
        lambda g: [g.add(_image(g), g.op("Softmax", g.input(1, 4, 8, 8, name="y"), "s"), "Add")],
        "trt8.5",
    ),
    "GenericConvActFusion/activation-pointwise": (
        lambda g: [g.op("Softmax", g.op("Tanh", g.conv(_image(g), "c"), "t"), "end")], "trt8.5"
    ),
    "GenericConvActFusion/deconvolution": (lambda g: [g.op("Tanh", _transposed(g, "float", None), "t")], "trt8.5"),
    "GenericConvActFusion/depthwise": (
        lambda g: [g.silu(g.conv(_image(g, 8), "c", groups=8), "act")], "trt8.5"
    ),
    "GenericConvActFusion/pointwise": (lambda g: [g.silu(g.conv(_image(g), "c"), "act")], "trt8.5"),
    "GenericConvActFusion/joined-with-add": (_silu_add, "trt8.5"),
    "HorizontalMergeQNodes/clone": (_merged_clone, "trt8.5"),
    "HorizontalMergeQNodes/network-output": (_network_output_q, "trt8.5"),
    "HorizontalMergeQNodes/unknown-scale": (_unknown_scale, "trt8.5"),
    "MatMulToConvTransform/matmul": (lambda g: [_matmul(g)], "trt8.5"),
    "MatMulToConvTransform/plain-gemm": (lambda g: _gemm(g, "relu", "float"), "trt8.6"),
    "MergeLayers/equal-convolutions": (
        lambda g: [g.conv(x := _image(g), "a", scale=0.1), g.conv(x, "b", scale=0.1)], "trt8.5"
    ),
    "MyelinOptimization/constants": (_anchors, "trt8.5"),
    "Pad/q-past-copying-pad": (lambda g: [g.op("Softmax", g.pair(_pad(g, "reflect"), "p"), "end")], "trt8.5"),
    "Pad/q-past-zero-pad": (lambda g: [g.op("Softmax", g.pair(_pad(g), "p"), "end")], "trt8.5"),
    "PadConvFusion/pad": (lambda g: [g.conv(_pad(g), "c", scale=None, weights="float")], "trt8.5"),
    "PointWiseFusion/constant-operand": (_gelu, "trt8.5"),
    "PointWiseFusion/with-add": (_silu_add, "trt8.5"),
    "QConvScaleFusion/convtranspose": (lambda g: [g.bn(_transposed(g, "qdq", 0.1), "bn")], "trt8.5"),
    "QuantizeConvWithResidualAdd/activated": (_silu_add_fused, "trt11"),
    "QuantizeDoubleInputNodes/deconvolution-later": (lambda g: [_transposed(g, "qdq", 0.1)], "trt8.5"),
    "QuantizeDoubleInputNodes/different-scales": (_two_scales, "trt8.5"),
    "QuantizeDoubleInputNodes/deconvolution-3d": (_transposed_3d, "trt8.5"),
    "QuantizeDoubleInputNodes/int8-matmul": (_attention, "trt8.5"),
    "QuantizeDoubleInputNodes/mixed-floats": (_mixed_floats, "trt11"),
    "QuantizeDoubleInputNodes/pointwise": (lambda g: _pointwise(g, "Max"), "trt8.5"),
    "MyelinRegions/edge": (_product, "trt10"),
    "MyelinRegions/inside": (lambda g: [g.conv(_image(g), "c")], "trt10"),
    "MyelinRegions/pointwise": (lambda g: [g.conv(g.op("Tanh", _image(g), "t"), "c")], "trt10"),
    "MyelinRegions/product": (_product, "trt10"),
    "QuantizeDoubleInputNodes/pointwise-to-float": (
        lambda g: [g.op("Softmax", g.relu(g.pair(_image(g), "a"), "r"), "s")], "trt8.5"
    ),
    "QuantizeDoubleInputNodes/sum-to-float": (
        lambda g: [g.add(g.pair(x := _image(g), "a"), g.pair(g.relu(x, "r"), "b"), "sum")], "trt8.5"
    ),
    "QuantizeDoubleInputNodes/prelu": (
        lambda g: [g.op("PRelu", [g.conv(_image(g), "c"), g.const("slope", np.ones((8, 1, 1)))], "p")], "trt8.5"
    ),
    "QuantizeDoubleInputNodes/sum": (_silu_add_both, "trt8.5"),
    "QuantizeSingleInputNodes/average-window": (
        lambda g: [g.op("Softmax", g.pair(g.pool(g.pair(_image(g), "a"), "pool", "AveragePool"), "b"), "end")],
        "trt8.5",
    ),
    "QDQToCopy/attention": (_attention, "trt8.5"),
    "ReduceToPoolingFusion/global-max": (_behind("GlobalMaxPool"), "trt8.5"),
    "ReduceToPoolingFusion/mean": (lambda g: [g.op("ReduceMean", _image(g), "mean", axes=[2, 3])], "trt8.5"),
    "ReduceToPoolingFusion/reduce-max": (lambda g: [g.op("ReduceMax", _image(g), "max", axes=[3])], "trt8.5"),
    "RequantizeFusion/conversion": (lambda g: _requantized(g, True), "trt8.5"),
    "RequantizeFusion/into-convolution": (lambda g: _requantized(g, False), "trt8.5"),
    "Slice/q-past-slice": (
        lambda g: [g.op("Softmax", g.pair(g.slice(_image(g), "cut", 0, 2), "p"), "end")], "trt8.5"
    ),
    "SpaceToDepth/q-past-spacetodepth": (_behind("SpaceToDepth", blocksize=2), "trt8.5"),
    "Split/q-past-split": (_behind("Split", axis=1), "trt8.5"),
    "SplitQAcrossPrecedingFanIn/nested": (_nested_concat, "trt8.5"),
    "Squeeze/q-past-squeeze": (_behind("Squeeze", ("axes", [0])), "trt8.5"),
    "SqueezePushDownJoin/activation": (lambda g: _gemm(g, "activation"), "trt8.5"),
    "SqueezePushDownJoin/followed-by-q": (lambda g: _gemm(g, "q"), "trt8.5"),
    "Transpose/q-past-transpose": (_behind("Transpose", perm=[0, 2, 3, 1]), "trt8.5"),
    "Unsqueeze/q-past-unsqueeze": (_behind("Unsqueeze", ("axes", [0])), "trt8.5"),
    "VanillaSwapWithPreceedingDQ/copied": (
        lambda g: [g.conv(g.pool(x := g.pair(_image(g), "a"), "pool"), "c", scale=None), x], "trt11"
    ),
    "VanillaSwapWithPreceedingDQ/listed": (
        lambda g: [g.conv(g.pool(g.pair(_image(g), "a"), "pool"), "c", scale=None)], "trt8.5"
    ),
    "VanillaSwapWithPreceedingDQ/per-channel": (_carried_axis, "trt8.5"),
    "VanillaSwapWithPreceedingDQ/several-readers": (
        lambda g: [g.conv(g.pool(x := g.pair(_image(g), "a"), "pool"), "c", scale=None), x], "trt8.5"
    ),
}


for _file in sorted(Path(__file__).with_name("passes").glob("test_*.py")):
    GRAPHS.update(getattr(importlib.import_module(f"tests.trt.passes.{_file.stem}"), "GRAPHS", {}))


def model_of(name: str) -> onnx.ModelProto:
    g = Graph()
    return g.model(*GRAPHS[name][0](g))


@pytest.mark.parametrize("name", GRAPHS)
def test_case_fires(name: str) -> None:
    assert name in rested_on(load(model_of(name)), GRAPHS[name][1])


def test_every_case_fires_somewhere() -> None:
    """An operator that a Q passes needs no graph of its own here where it has one input and no attributes."""
    left = pipeline.cases().keys() - on_builds() - GRAPHS.keys()
    assert {name for name in left if name not in rested_on(load(plain(name)), "trt8.5")} == set()


def plain(name: str) -> onnx.ModelProto:
    """A Q behind the operator that a case is of."""
    g = Graph()
    return g.model(*_behind(name.partition("/")[0])(g))
