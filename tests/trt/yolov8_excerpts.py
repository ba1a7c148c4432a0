"""The network behind yolov8-orin-trt8412-excerpts, as far as the quoted lines tell.

From the lines: every name; ReLU; BatchNormalization not folded in quantized layers and folded in float ones; C2f by
two Slices; an Add with Q/DQ on both inputs; the heads of each scale, quantized or float as their ``Merging layers``
lines say; two outputs; the DFL tail with its names. Invented: channels, repeats, scales, which are equal where a line
needs it (all Qs that read the halves of a C2f) and different elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx

from tests.trt.builder import Graph

QUANTIZED_HEADS = (("cv2", "cv3", "cv_occ"), ("cv3", "cv_occ"), ("cv2", "cv_occ"))
HEADS = {"cv2": 16, "cv3": 8, "cv_occ": 4, "cv4": 12}


class Excerpts(Graph):
    """Names as PyTorch 2.0 exports them."""

    def __init__(self) -> None:
        super().__init__(opset=13)
        self.scale = 0.01
        self.folded = 2651

    def output_names(self, name: str, count: int) -> list[str]:
        return [f"{name}_output_{i}" for i in range(count)]

    def quantizer(self, x: str, name: str, scale: npt.ArrayLike, axis: int | None = None) -> str:
        """A pair named like a module of pytorch-quantization; Q and DQ share their constants."""
        values = np.asarray(scale, np.float32)
        constants = [
            self.const(f"{name}/Constant{'_2' if axis is None else ''}_output_0", values),
            self.const(f"{name}/Constant_1_output_0", np.zeros(values.shape, np.int8)),
        ]
        attributes = {} if axis is None else {"axis": axis}
        quantized = self.op("QuantizeLinear", [x, *constants], f"{name}/QuantizeLinear", **attributes)
        return self.op("DequantizeLinear", [quantized, *constants], f"{name}/DequantizeLinear", **attributes)

    def fresh_scale(self) -> float:
        self.scale += 0.001
        return self.scale

    def cbr(self, x: str, name: str, channels: int, k: int = 3, stride: int = 1, scale: float | None = None) -> str:
        """Quantized convolution, BatchNormalization, Relu."""
        data = self.quantizer(x, f"/{name}/conv/_input_quantizer", scale or self.fresh_scale())
        module = re.sub(r"(\w+\.\d)/\1", r"\1", name).replace("/", ".")
        shape = (channels, self.channels[x], k, k)
        weights = self.const(f"model.{module}.conv.weight", self.random.normal(0, 0.3, shape))
        dequantized = self.quantizer(weights, f"/{name}/conv/_weight_quantizer", np.full(channels, 0.01), axis=0)
        out = self.op("Conv", [data, dequantized], f"/{name}/conv/Conv", kernel_shape=[k, k], strides=[stride] * 2,
                      pads=[k // 2] * 4)
        self.channels[out] = channels
        return self.relu(self.bn(out, f"/{name}/bn/BatchNormalization"), f"/{name}/act/Relu")

    def float_conv(self, x: str, name: str, channels: int, k: int = 3, relu: bool = True) -> str:
        """A convolution whose BatchNormalization the exporter folded."""
        shape = (channels, self.channels[x], k, k)
        weights = self.const(f"onnx::Conv_{self.folded}", self.random.normal(0, 0.3, shape))
        bias = self.const(f"onnx::Conv_{self.folded + 1}", self.random.normal(0, 1, channels))
        self.folded += 3
        inner = f"/{name}/conv" if relu else f"/{name}"
        out = self.op("Conv", [x, weights, bias], f"{inner}/Conv", kernel_shape=[k, k], strides=[1, 1],
                      pads=[k // 2] * 4)
        self.channels[out] = channels
        return self.relu(out, f"/{name}/act/Relu") if relu else out

    def c2f(self, x: str, name: str, channels: int, repeats: int = 1, shortcut: bool = True) -> str:
        half = channels // 2
        inner = self.fresh_scale()
        wide = self.cbr(x, f"{name}/cv1", channels, k=1)
        parts = [self.slice(wide, f"/{name}/Slice", 0, half), self.slice(wide, f"/{name}/Slice_1", half, channels)]
        for i in range(repeats):
            block = f"{name}/m.{i}"
            part = self.cbr(parts[-1], f"{block}/cv1", half, scale=inner)
            part = self.cbr(part, f"{block}/cv2", half)
            if shortcut:
                skip = self.quantizer(parts[-1], f"/{block}/addop/_input0_quantizer", inner)
                straight = self.quantizer(part, f"/{block}/addop/_input1_quantizer", self.fresh_scale())
                part = self.add(skip, straight, f"/{block}/addop/Add")
            parts.append(part)
        return self.cbr(self.concat(parts, f"/{name}/Concat"), f"{name}/cv2", channels, k=1, scale=inner)

    def sppf(self, x: str, name: str, channels: int) -> str:
        scale = self.fresh_scale()
        part = self.cbr(x, f"{name}/cv1", channels // 2, k=1)
        pools = [part]
        for suffix in ("", "_1", "_2"):
            pools.append(self.pool(pools[-1], f"/{name}/m/MaxPool{suffix}", k=5, stride=1))
        return self.cbr(self.concat(pools, f"/{name}/Concat"), f"{name}/cv2", channels, k=1, scale=scale)

    def head(self, x: str, level: int, kind: str) -> str:
        stem = f"model/taskhead22/{kind}.{level}/{kind}.{level}"
        if kind in QUANTIZED_HEADS[level]:
            part = self.cbr(x, f"{stem}.0", 16, scale=0.05 + level / 100)
        else:
            part = self.float_conv(x, f"{stem}.0", 16)
        part = self.float_conv(part, f"{stem}.1", 16)
        return self.float_conv(part, f"{stem}.2", HEADS[kind], k=1, relu=False)


def build() -> onnx.ModelProto:
    g = Excerpts()
    x = g.input(1, 3, 64, 96, name="images")
    b1 = g.cbr(g.cbr(x, "model/backbone0", 8, stride=2), "model/backbone1", 8, stride=2)
    b2 = g.c2f(b1, "model/backbone2", 8)
    b4 = g.c2f(g.cbr(b2, "model/backbone3", 16, stride=2), "model/backbone4", 16, repeats=2)
    b6 = g.c2f(g.cbr(b4, "model/backbone5", 16, stride=2), "model/backbone6", 16, repeats=2)
    b8 = g.c2f(g.cbr(b6, "model/backbone7", 16, stride=2), "model/backbone8", 16)
    b9 = g.sppf(b8, "model/backbone9", 16)
    h12 = _up(g, b9, b6, 10)
    h15 = _up(g, h12, b4, 13)
    h18 = _down(g, h15, h12, 16)
    h21 = _down(g, h18, b9, 19)
    _task_head(g, (h15, h18, h21))
    return g.model("output0", "output1")


def _up(g: Excerpts, x: str, skip: str, number: int) -> str:
    joined = g.concat([g.resize(x, f"/model/head{number}/Resize"), skip], f"/model/head{number + 1}/Concat")
    return g.c2f(joined, f"model/head{number + 2}", 16, shortcut=False)


def _down(g: Excerpts, x: str, skip: str, number: int) -> str:
    joined = g.concat([g.cbr(x, f"model/head{number}", 16, stride=2), skip], f"/model/head{number + 1}/Concat")
    return g.c2f(joined, f"model/head{number + 2}", 16, shortcut=False)


def _task_head(g: Excerpts, levels: Sequence[str]) -> None:
    """Three maps for each level to output0, a fourth to output1; the boxes go through DFL."""
    name = "/model/taskhead22"
    flat, embedded = [], []
    for level, x in enumerate(levels):
        maps = [g.head(x, level, kind) for kind in ("cv2", "cv3", "cv_occ")]
        suffix = f"_{level + 1}"
        joined = g.concat(maps, f"{name}/Concat{suffix}")
        flat.append(g.reshape(joined, f"{name}/Reshape_{level + 3}", 1, 28, -1))
        embedded.append(g.reshape(g.head(x, level, "cv4"), f"{name}/Reshape_{level + 6}", 1, HEADS["cv4"], -1))
    g.channels[flat[0]] = 28
    everything = g.concat(flat, f"{name}/Concat_4", axis=2)
    sizes = g.const(f"{name}/Split_1.split", np.array([16, 12], np.int64))
    box, scores = g.ops("Split", [everything, sizes], f"{name}/Split_1", count=2, axis=1)
    boxes = _boxes(g, box, name)
    g.op("Concat", [boxes, g.op("Sigmoid", scores, f"{name}/Sigmoid")], f"{name}/Concat_11", axis=1)
    _rename(g, f"{name}/Concat_11_output_0", "output0")
    g.op("Concat", embedded, f"{name}/Concat_12", axis=2)
    _rename(g, f"{name}/Concat_12_output_0", "output1")


def _boxes(g: Excerpts, box: str, name: str) -> str:
    grid = g.reshape(box, f"{name}/dfl/Reshape", 1, 4, 4, -1)
    turned = g.op("Transpose", grid, f"{name}/dfl/Transpose", perm=[0, 2, 1, 3])
    likely = g.op("Softmax", turned, f"{name}/dfl/Softmax", axis=1)
    g.channels[likely] = 4
    weights = g.const("model.model.taskhead22.dfl.conv.weight", np.arange(4.0).reshape(1, 4, 1, 1))
    expected = g.op("Conv", [likely, weights], f"{name}/dfl/conv/Conv", kernel_shape=[1, 1])
    sides = g.reshape(expected, f"{name}/dfl/Reshape_1", 1, 4, -1)
    left = g.slice(sides, f"{name}/Slice", 0, 2)
    right = g.slice(sides, f"{name}/Slice_1", 2, 4)
    count = sum((64 // s) * (96 // s) for s in (8, 16, 32))
    anchors = g.const(f"{name}/Unsqueeze_6_output_0", np.zeros((1, 2, count)))
    first = g.op("Sub", [anchors, left], f"{name}/Sub")
    second = g.op("Add", [anchors, right], f"{name}/Add_4")
    middle = g.add(first, second, f"{name}/Add_5")
    centre = g.op("Div", [middle, g.const(f"{name}/Constant_20_output_0", np.asarray(2.0))], f"{name}/Div_1")
    size = g.op("Sub", [second, first], f"{name}/Sub_1")
    joined = g.concat([centre, size], f"{name}/Concat_10")
    return g.op("Mul", [joined, g.const(f"{name}/Squeeze_output_0", np.ones((1, count)))], f"{name}/Mul_2")


def _rename(g: Excerpts, old: str, new: str) -> None:
    for node in g.nodes:
        node.output[:] = [new if o == old else o for o in node.output]


