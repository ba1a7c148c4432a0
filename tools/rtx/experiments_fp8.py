"""Experiments with cases in which FP8 differs from INT8 (see ``experiments``)."""

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper

from tools.fuzz.fp8 import convert_to_fp8
from tools.fuzz.net import Net
from tools.rtx import operators as ops
from tools.rtx.experiments import SHAPE, Make, finish

Model = Callable[[], onnx.ModelProto]


def convolution(
    kernel: tuple[int, ...],
    shape: tuple[int, ...] = (1, 32, 16, 16),
    *,
    channels: int | None = None,
    groups: int = 1,
    weights: str = "axis0",
    **attributes: object,
) -> Make:
    def make(net: Net) -> str:
        count = channels or shape[1]
        w = net.weight((count, shape[1] // groups, *kernel), weights)
        pads = [size // 2 for size in kernel] * 2
        return net.op(
            "Conv",
            net.qdq(net.input(shape)),
            w,
            name="c",
            **{"kernel_shape": kernel, "pads": pads, "group": groups} | attributes,
        )

    return make


def kernels() -> Iterator[tuple[str, Make]]:
    for kernel in ((5, 5), (4, 8), (2, 16), (1, 32), (1, 33), (3, 11), (6, 6), (7, 7), (5, 7)):
        yield f"kernel {kernel}", convolution(kernel)
    for kernel, shape in (
        ((32,), (1, 8, 64)),
        ((33,), (1, 8, 64)),
        ((2, 4, 4), (1, 8, 4, 8, 8)),
        ((3, 3, 3), (1, 8, 4, 8, 8)),
        ((3, 3, 4), (1, 8, 4, 8, 8)),
    ):
        yield f"kernel {kernel}", convolution(kernel, shape)
    yield "kernel (7, 7), 4 groups", convolution((7, 7), groups=4)
    for kernel in ((3, 3), (5, 5), (6, 6), (7, 7), (7, 5), (9, 9)):
        yield f"depthwise {kernel}", convolution(kernel, groups=32)
    forms: dict[str, dict[str, object]] = {
        "one channel": {"shape": (1, 1, 16, 16)},
        "two channels": {"shape": (1, 2, 16, 16), "groups": 2},
        "stride 2": {"strides": [2, 2]},
        "stride 1 and 2": {"strides": [1, 2]},
        "dilated": {"dilations": [2, 2]},
        "two outputs for each input": {"channels": 64},
        "no padding": {"pads": [0] * 4},
        "one scale": {"weights": "tensor"},
    }
    for name, options in forms.items():
        yield f"depthwise (7, 7), {name}", convolution((7, 7), **{"groups": 32} | _grouped(options))  # type: ignore[arg-type]


def _grouped(options: dict[str, object]) -> dict[str, object]:
    return {"groups": 1} | options if options.get("shape") == (1, 1, 16, 16) else options


def columns() -> Iterator[tuple[str, Make]]:
    for channels in (1, 3, 4, 5, 8):
        yield f"column of {channels}", convolution((1, 1), (1, channels, 1, 1), channels=8)
    for shape in ((1, 4, 8, 1), (1, 4, 1, 8), (2, 4, 1, 1), (1, 4, 1), (1, 4, 1, 1, 1)):
        yield f"column {shape}", convolution((1,) * (len(shape) - 2), shape, channels=8)
    for weights in ("tensor", "shape1", "axis0-dq"):
        name = f"column of 4, weights {weights}"
        yield name, convolution((1, 1), (1, 4, 1, 1), channels=8, weights=weights)
    yield from {
        "column, 3x3": convolution((3, 3), (1, 4, 1, 1), channels=8),
        "column, stride 2": convolution((1, 1), (1, 4, 4, 1), channels=8, strides=[2, 2]),
        "column, 2 groups": convolution((1, 1), (1, 4, 1, 1), channels=8, groups=2),
    }.items()
    producers = {
        "relu": ops.RELU,
        "a global pool": ops.unary("GlobalAveragePool"),
        "a global pool, relu": ops.chain(ops.unary("GlobalAveragePool"), ops.RELU),
        "a maximum": ops.with_ints("ReduceMax", 2, 3),
        "max pooling": ops.unary("MaxPool", kernel_shape=[2, 1], strides=[2, 1]),
    }
    for name, step in producers.items():
        yield (
            f"column after {name}",
            lambda net, step=step: net.conv(
                net.qdq(step(net, net.input((1, 4, 8, 1)))), 8, 1, name="c"
            ),
        )

    def read_twice(net: Net) -> tuple[str, str]:
        x = net.qdq(net.input((1, 4, 1, 1)))
        return net.conv(x, 8, 1, name="c"), net.op("Relu", x)

    yield "column that another node reads", read_twice


def typed() -> Iterator[tuple[str, Model]]:
    types = {
        "E4M3FN": TensorProto.FLOAT8E4M3FN,
        "E5M2": TensorProto.FLOAT8E5M2,
        "E4M3FNUZ": TensorProto.FLOAT8E4M3FNUZ,
        "E5M2FNUZ": TensorProto.FLOAT8E5M2FNUZ,
    }
    for name, kind in types.items():
        yield from {
            f"zero point of {name}": lambda kind=kind: _with_zero_points(kind),
            f"output_dtype {name}": lambda kind=kind: _with_output_type(kind),
        }.items()
    yield "zero point 3 of FP8", lambda: _with_zero_points(TensorProto.FLOAT8E4M3FN, 3.0)
    for first in ("data", "weights"):
        yield from {
            f"{first} of INT8": lambda first=first: _mixed(first, product=False),
            f"{first} of INT8, product": lambda first=first: _mixed(first, product=True),
        }.items()
    yield from {
        "custom operators": lambda: _with_custom_operators(),
        "custom operators, stored weights": lambda: _with_custom_operators("axis0-dq"),
    }.items()


def _plain(weights: str = "axis0", opset: int = 19) -> onnx.ModelProto:
    net = Net(opset)
    x = net.qdq(net.input(SHAPE))
    return net.model(net.conv(x, 8, weights=weights, name="c"))


def _with_zero_points(kind: int, value: float = 0.0) -> onnx.ModelProto:
    model = convert_to_fp8(_plain())
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT8E4M3FN:
            count = int(np.prod(tensor.dims))
            tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, [value] * count))
    return model


def _with_output_type(kind: int) -> onnx.ModelProto:
    model = convert_to_fp8(_plain())
    model.opset_import[0].version = 21
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            del node.input[2:]
        if node.op_type == "QuantizeLinear":
            node.attribute.append(helper.make_attribute("output_dtype", kind))
    return model


def _mixed(int8: str, product: bool) -> onnx.ModelProto:
    net = Net(19)
    x = net.qdq(net.input((1, 8, 16, 8) if product else SHAPE))
    position = len(net.nodes)
    y = (
        net.op("MatMul", x, net.weight((8, 8), "axis1"), name="c")
        if product
        else net.conv(x, 8, name="c")
    )
    return convert_to_fp8(net.model(y), lambda index: (index >= position) == (int8 == "data"))


def _with_custom_operators(weights: str = "axis0") -> onnx.ModelProto:
    model = convert_to_fp8(_plain(weights))
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.op_type, node.domain = f"TRT_FP8{node.op_type}", "trt"
            del node.input[2:]
    model.opset_import.append(helper.make_opsetid("trt", 1))
    return model


def _converted(make: Make) -> Model:
    return lambda: convert_to_fp8(finish(make, 19))


FP8: dict[str, Model] = {
    **{f"FP8 {name}": _converted(make) for name, make in (*kernels(), *columns())},
    **{f"FP8 {name}": make for name, make in typed()},
}
