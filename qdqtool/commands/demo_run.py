"""The demo: a YOLOv8-style model of its own, and each step reported as it is done."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw, ImageFilter

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.formats.insertion_text import render
from qdqtool.formats.output import terminal_width, wrap
from qdqtool.insertion.api import insert
from qdqtool.insertion.result import Insertion
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load, save
from qdqtool.prediction import predict
from qdqtool.runtime.sessions import open_session
from qdqtool.trt.targets import RTX, Target
from qdqtool.types import Precision
from qdqtool.util import limits
from qdqtool.util.notes import Note
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.local_build import ConvolutionPair
from qdqtool.verification.result import Verification, verification_from_pairs

STRIDES = (8, 16, 32)
REG_MAX = 16  # bins of the distribution over each box side (DFL)
OPSET = 17

# Channels of layers 0, 1, 3, 5 and 7, and how often the blocks 2, 4, 6 and 8 repeat; of the published networks.
SIZES = {
    "n": ((16, 32, 64, 128, 256), (1, 2, 2, 1)),
    "s": ((32, 64, 128, 256, 512), (1, 2, 2, 1)),
    "m": ((48, 96, 192, 384, 576), (2, 4, 4, 2)),
    "l": ((64, 128, 256, 512, 512), (3, 6, 6, 3)),
    "x": ((80, 160, 320, 640, 640), (3, 6, 6, 3)),
}

# Size of the activation around its mean for a unit normal input (the weights do not see the mean).
_SECOND_MOMENT = {"silu": 0.356, "relu": 0.41}
_IMAGE_MOMENT = 0.05  # mean square of an image's contrast, in units of full scale
_POOL_GROWTH = 2.2  # a 5x5 maximum picks large values (measured on the demo images)


def yolov8n(
    size: int = 640, classes: int = 80, seed: int = 0, activation: str = "silu"
) -> onnx.ModelProto:
    """Builds the model.

    Args:
        size: Side of the square input in pixels, a multiple of 32.
        classes: Number of classes.
        seed: Of the random weights; the same seed gives the same bytes.
        activation: ``silu`` (as trained models have it) or ``relu``.

    Returns:
        A model with input ``images`` [1, 3, size, size] (RGB, 0 to 1) and output ``output0``
        [1, 4 + classes, anchors]: centre x, centre y, width and height in pixels, then class scores; opset 17.

    Raises:
        ModelError: ``size`` is not a positive multiple of 32, ``classes`` is below 1, or ``activation`` is unknown.
    """
    return yolov8("n", size, classes, seed, activation)


def yolov8(
    letter: str,
    size: int = 640,
    classes: int = 80,
    seed: int = 0,
    activation: str = "silu",
) -> onnx.ModelProto:
    """Builds YOLOv8n, s, m, l or x, by the ``letter`` of :data:`SIZES`; otherwise as :func:`yolov8n`."""
    if size < 32 or size % 32:
        raise ModelError(
            f"demo model: size {size} is not a positive multiple of 32",
            code="out-of-range",
            parameter="size",
        )
    if classes < 1:
        raise ModelError(
            f"demo model: classes {classes} is below 1", code="out-of-range", parameter="classes"
        )
    if activation not in _SECOND_MOMENT:
        raise ModelError(
            f"demo model: activation '{activation}' is unknown; use silu or relu",
            code="unknown-choice",
            parameter="activation",
        )
    net = YoloBuilder(seed, activation)
    levels = add_backbone_and_neck(net, *SIZES[letter])
    add_head(net, levels, size, classes)
    return net.finish(size, classes, letter)


class YoloBuilder:
    """Collects nodes and initializers; every method returns the name of the tensor it makes."""

    def __init__(self, seed: int, activation: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)
        self.activation = activation
        # Expected mean square of each tensor. Weights divide by it, so that every convolution's output has size 1.
        self.moments: dict[str, float] = {"images": _IMAGE_MOMENT}

    def node(
        self, op: str, name: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any
    ) -> list[str]:
        made = [f"{name}_output_{i}" for i in range(outputs)]
        moment = max((self.moments[t] for t in inputs if t in self.moments), default=1.0)
        if op == "Add":
            moment = sum(self.moments.get(t, 0.0) for t in inputs)
        self.moments.update(
            dict.fromkeys(made, moment * (_POOL_GROWTH if op == "MaxPool" else 1.0))
        )
        self.nodes.append(helper.make_node(op, list(inputs), made, name=name, **attributes))
        return made

    def one(self, op: str, name: str, *inputs: str, **attributes: Any) -> str:
        """The same of a node with one output."""
        return self.node(op, name, inputs, **attributes)[0]

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def integers(self, name: str, *values: int) -> str:
        return self.constant(name, np.array(values, np.int64))

    def conv2d(
        self,
        name: str,
        tensor: str,
        cin: int,
        cout: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        gain: float = 0.8,
        bias: float = 0.0,
        spread: float = 0.6,
    ) -> str:
        """A bare convolution whose output varies by about ``gain`` with the image and by ``spread`` between channels.

        Together they make a variance of 1. With all of it from the image, random layers would amplify every rounding
        error until nothing of the picture is left.
        """
        fan_in = cin * kernel * kernel
        weight = self.rng.standard_normal((cout, cin, kernel, kernel))
        # Inputs have a positive mean. Without it in the weights' reach, the signal does not drown in a constant.
        weight -= weight.mean(axis=(1, 2, 3), keepdims=True) if fan_in > 1 else 0.0
        # Channels of a trained network differ in size once BatchNormalization is folded in.
        weight *= np.exp(0.3 * self.rng.standard_normal((cout, 1, 1, 1)))
        weight *= gain / np.sqrt(fan_in * self.moments[tensor])
        offsets = bias + spread * self.rng.standard_normal(cout)
        parameter = name.removeprefix("/").removesuffix("/Conv").replace("/", ".")
        if parameter.startswith(
            "model.22.cv"
        ):  # /model.22/cv2.0/cv2.0.1/conv is model.22.cv2.0.1.conv
            head = parameter.split(".")
            parameter = ".".join([*head[:2], *head[4:]])
        self.constant(f"{parameter}.weight", weight.astype(np.float32))
        self.constant(f"{parameter}.bias", offsets.astype(np.float32))
        return self.one(
            "Conv",
            name,
            tensor,
            f"{parameter}.weight",
            f"{parameter}.bias",
            dilations=[1, 1],
            group=1,
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )

    def conv(
        self, name: str, tensor: str, cin: int, cout: int, kernel: int = 1, stride: int = 1
    ) -> str:
        """Ultralytics' Conv: convolution and activation."""
        raw = self.conv2d(f"{name}/conv/Conv", tensor, cin, cout, kernel, stride)
        if self.activation == "relu":
            result = self.one("Relu", f"{name}/act/Relu", raw)
        else:
            result = self.one(
                "Mul", f"{name}/act/Mul", raw, self.one("Sigmoid", f"{name}/act/Sigmoid", raw)
            )
        self.moments[result] = _SECOND_MOMENT[self.activation]
        return result

    def concat(self, name: str, tensors: Sequence[str], axis: int = 1) -> str:
        return self.one("Concat", name, *tensors, axis=axis)

    def c2f(self, name: str, tensor: str, cin: int, cout: int, repeats: int, shortcut: bool) -> str:
        """C2f: split, a chain of bottlenecks, and the Concat of all of it."""
        half = cout // 2
        joined = self.conv(f"{name}/cv1", tensor, cin, cout)
        sizes = self.integers(f"{name}/Split_sizes", half, half)
        parts = self.node("Split", f"{name}/Split", [joined, sizes], 2, axis=1)
        for i in range(repeats):
            inner = self.conv(f"{name}/m.{i}/cv1", parts[-1], half, half, 3)
            inner = self.conv(f"{name}/m.{i}/cv2", inner, half, half, 3)
            if shortcut:
                inner = self.one("Add", f"{name}/m.{i}/Add", parts[-1], inner)
            parts.append(inner)
        return self.conv(
            f"{name}/cv2", self.concat(f"{name}/Concat", parts), half * (2 + repeats), cout
        )

    def sppf(self, name: str, tensor: str, channels: int) -> str:
        parts = [self.conv(f"{name}/cv1", tensor, channels, channels // 2)]
        for suffix in ("", "_1", "_2"):
            parts.append(
                self.one(
                    "MaxPool",
                    f"{name}/m{suffix}/MaxPool",
                    parts[-1],
                    kernel_shape=[5, 5],
                    pads=[2] * 4,
                    strides=[1, 1],
                    ceil_mode=0,
                    dilations=[1, 1],
                )
            )
        return self.conv(
            f"{name}/cv2", self.concat(f"{name}/Concat", parts), channels * 2, channels
        )

    def upsample(self, name: str, tensor: str) -> str:
        scales = self.constant(f"{name}/scales", np.array([1, 1, 2, 2], np.float32))
        return self.one(
            "Resize",
            f"{name}/Resize",
            tensor,
            "",
            scales,
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )

    def finish(self, size: int, classes: int, letter: str = "n") -> onnx.ModelProto:
        anchors = sum((size // s) ** 2 for s in STRIDES)
        image = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, size, size])
        output = helper.make_tensor_value_info(
            "output0", TensorProto.FLOAT, [1, 4 + classes, anchors]
        )
        self.nodes[-1].output[0] = "output0"
        graph = helper.make_graph(self.nodes, "main_graph", [image], [output], self.initializers)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="qdqtool-demo"
        )
        model.ir_version = 8
        names = {i: f"class{i}" for i in range(classes)}
        helper.set_model_props(
            model,
            {
                "description": f"YOLOv8{letter} architecture with random weights",
                "task": "detect",
                "stride": "32",
                "batch": "1",
                "imgsz": str([size, size]),
                "names": str(names),
            },
        )
        return onnx.shape_inference.infer_shapes(model)


def add_backbone_and_neck(
    net: YoloBuilder, widths: Sequence[int], repeats: Sequence[int]
) -> list[tuple[str, int]]:
    """Layers 0 to 21; returns the three feature maps (tensor, channels) that the head reads."""
    a, b, c, d, e = widths
    first, second, third, last = repeats
    x = net.conv("/model.0", "images", 3, a, 3, 2)
    x = net.conv("/model.1", x, a, b, 3, 2)
    x = net.c2f("/model.2", x, b, b, first, True)
    x = net.conv("/model.3", x, b, c, 3, 2)
    p3 = net.c2f("/model.4", x, c, c, second, True)
    x = net.conv("/model.5", p3, c, d, 3, 2)
    p4 = net.c2f("/model.6", x, d, d, third, True)
    x = net.conv("/model.7", p4, d, e, 3, 2)
    x = net.c2f("/model.8", x, e, e, last, True)
    p5 = net.sppf("/model.9", x, e)
    x = net.concat("/model.11/Concat", [net.upsample("/model.10", p5), p4])
    n4 = net.c2f("/model.12", x, e + d, d, first, False)
    x = net.concat("/model.14/Concat", [net.upsample("/model.13", n4), p3])
    out3 = net.c2f("/model.15", x, d + c, c, first, False)
    x = net.concat("/model.17/Concat", [net.conv("/model.16", out3, c, c, 3, 2), n4])
    out4 = net.c2f("/model.18", x, c + d, d, first, False)
    x = net.concat("/model.20/Concat", [net.conv("/model.19", out4, d, d, 3, 2), p5])
    out5 = net.c2f("/model.21", x, d + e, e, first, False)
    return [(out3, c), (out4, d), (out5, e)]


def add_head(net: YoloBuilder, levels: Sequence[tuple[str, int]], size: int, classes: int) -> None:
    """The head: three levels of box and class branches, then the box decoding; it makes the graph output."""
    name = "/model.22"
    box = 4 * REG_MAX
    box_width = max(16, levels[0][1] // 4, box)
    class_width = max(levels[0][1], min(classes, 100))
    flat = []
    for i, (tensor, channels) in enumerate(levels):
        branches = []
        plan = (("cv2", box_width, box, 2.0, 1.0), ("cv3", class_width, classes, 1.5, -6.0))
        for branch, width, out, gain, bias in plan:
            base = f"{name}/{branch}.{i}/{branch}.{i}"
            x = net.conv(f"{base}.0", tensor, channels, width, 3)
            x = net.conv(f"{base}.1", x, width, width, 3)
            branches.append(net.conv2d(f"{base}.2/Conv", x, width, out, gain=gain, bias=bias))
        suffix = f"_{i}" if i else ""
        joined = net.concat(f"{name}/Concat{suffix}", branches)
        shape = net.integers(f"{name}/Reshape{suffix}_shape", 1, box + classes, -1)
        flat.append(net.one("Reshape", f"{name}/Reshape{suffix}", joined, shape, allowzero=0))
    joined = net.concat(f"{name}/Concat_3", flat, axis=2)
    sizes = net.integers(f"{name}/Split_sizes", box, classes)
    boxes, scores = net.node("Split", f"{name}/Split", [joined, sizes], 2, axis=1)
    distances = _dfl(net, f"{name}/dfl", boxes)
    centres, strides = _anchors(size)
    centre = net.constant(f"{name}/Constant_anchors", centres)
    axis = net.integers(f"{name}/Constant_axis", 1)
    bounds = [net.integers(f"{name}/Constant_{n}", n) for n in (0, 2, 4)]
    lower = net.one("Slice", f"{name}/Slice", distances, bounds[0], bounds[1], axis)
    upper = net.one("Slice", f"{name}/Slice_1", distances, bounds[1], bounds[2], axis)
    low = net.one("Sub", f"{name}/Sub", centre, lower)
    high = net.one("Add", f"{name}/Add", centre, upper)
    total = net.one("Add", f"{name}/Add_1", low, high)
    middle = net.one(
        "Div", f"{name}/Div", total, net.constant(f"{name}/Constant_two", np.array(2, np.float32))
    )
    cells = net.concat(f"{name}/Concat_4", [middle, net.one("Sub", f"{name}/Sub_1", high, low)])
    pixels = net.one("Mul", f"{name}/Mul", cells, net.constant(f"{name}/Constant_strides", strides))
    net.concat(f"{name}/Concat_5", [pixels, net.one("Sigmoid", f"{name}/Sigmoid", scores)])


def _dfl(net: YoloBuilder, name: str, boxes: str) -> str:
    """Expected distance of each box side from its distribution over 16 bins: [1, 64, anchors] to [1, 4, anchors]."""
    shape = net.integers(f"{name}/Reshape_shape", 1, 4, REG_MAX, -1)
    bins = net.one("Reshape", f"{name}/Reshape", boxes, shape, allowzero=0)
    moved = net.one("Transpose", f"{name}/Transpose", bins, perm=[0, 2, 1, 3])
    chances = net.one("Softmax", f"{name}/Softmax", moved, axis=1)
    weight = net.constant(
        "model.22.dfl.conv.weight", np.arange(REG_MAX, dtype=np.float32).reshape(1, REG_MAX, 1, 1)
    )
    mean = net.one(
        "Conv",
        f"{name}/conv/Conv",
        chances,
        weight,
        dilations=[1, 1],
        group=1,
        kernel_shape=[1, 1],
        pads=[0] * 4,
        strides=[1, 1],
    )
    return net.one(
        "Reshape",
        f"{name}/Reshape_1",
        mean,
        net.integers(f"{name}/Reshape_1_shape", 1, 4, -1),
        allowzero=0,
    )


def _anchors(size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cell centres [1, 2, anchors] in cells, and strides [1, anchors] in pixels."""
    centres, strides = [], []
    for stride in STRIDES:
        cells = size // stride
        y, x = np.meshgrid(np.arange(cells) + 0.5, np.arange(cells) + 0.5, indexing="ij")
        centres.append(np.stack([x.ravel(), y.ravel()]))
        strides.append(np.full(cells * cells, stride))
    return np.concatenate(centres, 1)[None].astype(np.float32), np.concatenate(strides)[
        None
    ].astype(np.float32)


# Pictures to calibrate it with: gradients, shapes and noise; deterministic, saved as PNG ----------------------------

OWN_NAME = re.compile(r"demo-\d{3,6}\.png")  # of what :func:`write_images` writes


def make_image(size: int, index: int, seed: int = 0) -> Image.Image:
    """One picture, ``size`` pixels square, RGB; the same arguments give the same picture."""
    rng = np.random.default_rng((seed, index))
    image = Image.fromarray(_background(rng, size))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(3, 14))):
        _shape(draw, rng, size)
    if index % 4 == 1:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.5, 3.0))))
    pixels = np.asarray(image, np.float32)
    pixels = (
        (pixels - 128.0) * rng.uniform(0.5, 1.3) + 128.0 + rng.uniform(-50.0, 50.0)
    )  # contrast, light
    pixels += rng.normal(0.0, rng.uniform(1.0, 18.0), pixels.shape)  # sensor noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _background(rng: np.random.Generator, size: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    result = np.empty((size, size, 3), np.float32)
    for channel in range(3):
        a, b, c, d = rng.uniform(-1.0, 1.0, 4)
        waves = np.sin(2 * np.pi * (rng.uniform(0.5, 8) * x + rng.uniform(0.5, 8) * y + d))
        result[..., channel] = 128 + 70 * (a * x + b * y) + 30 * c * waves
    return np.clip(result, 0, 255).astype(np.uint8)


def _shape(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int) -> None:
    fill, edge = (tuple(int(v) for v in rng.integers(0, 256, 3)) for _ in range(2))
    width, height = (float(v) for v in np.exp(rng.uniform(np.log(0.03), np.log(0.6), 2)) * size)
    left, top = (float(v) for v in rng.uniform(-0.1, 0.95, 2) * size)
    box = (left, top, left + width, top + height)
    kind = rng.integers(0, 4)
    if kind < 2:
        (draw.ellipse if kind else draw.rectangle)(
            box, fill=fill, outline=edge, width=max(1, size // 160)
        )
    elif kind == 2:
        draw.polygon(
            [(left, top + height), (left + width / 2, top), (left + width, top + height)], fill=fill
        )
    else:
        draw.line(box, fill=fill, width=int(rng.integers(1, max(2, size // 40))))


def write_images(
    folder: str | os.PathLike[str], count: int, size: int, seed: int = 0
) -> list[Path]:
    """Writes ``count`` PNG files ``demo-000.png`` ... of ``size`` by ``size`` pixels into an existing folder.

    Raises:
        DataError: The folder is missing or cannot be written.
    """
    paths = [Path(folder) / f"demo-{index:03d}.png" for index in range(count)]
    for index, path in enumerate(paths):
        try:
            make_image(size, index, seed).save(path, compress_level=1)
        except OSError as error:
            raise DataError(
                f"cannot be written: {error.strerror or error}", str(path), code="not-written"
            ) from error
    return paths


# The steps -----------------------------------------------------------------------------------------------------------

_CHECKED = 8
_GPU = "RTX 3060"  # that the page estimates times for


def run(folder: Path, size: int, images: int, activation: str, target: Target) -> Iterator[str]:
    """Runs the demo in a folder, which is made when it is missing, and yields what to print.

    Raises:
        QdqtoolError: The folder cannot be made or written, or the size is wrong.
    """
    started = time.perf_counter()
    if size > limits.DEMO_SIZE:
        raise DataError(
            f"`size={size}`: the limit of the demo is {limits.DEMO_SIZE} pixels",
            code="out-of-range",
            parameter="size",
        )
    proto = yolov8n(size, activation=activation)
    pictures = folder / "images"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QdqtoolError(
            f"cannot be made: {error.strerror or error}",
            str(folder),
            code="not-written",
            parameter="output",
        ) from error
    model, quantized = folder / "yolov8n-demo.onnx", folder / "yolov8n-demo_qdq.onnx"
    save(proto, model)
    for old in pictures.glob("demo-*.png"):
        if OWN_NAME.fullmatch(
            old.name
        ):  # of an earlier run with more images; others are the user's
            old.unlink()
    write_images(pictures, images, size)
    yield f"1. wrote {model} (YOLOv8n architecture, random weights)"
    yield f"   and {images} generated images of {size} x {size} pixels to {pictures}"
    yield ""
    yield "2. qdqtool insert: calibrating, placing Q/DQ pairs, predicting"
    cache = folder / "calibration.npz"
    result = insert(
        model, pictures, target=target, progress=True, calib_cache=cache, overwrite_cache=True
    )
    result.save(quantized)
    yield from _indented(render(result, terminal_width() - 3))
    yield f"   wrote {quantized}"
    pixels, correlation = _difference(proto, result.model, size, images)
    yield f"   on {_CHECKED} other images boxes move by {pixels:.1f} px on average;"
    yield f"   the correlation of the scores is {correlation:.3f}"
    yield ""
    yield "3. qdqtool verify: a real compiler's answer"
    yield from _verified(quantized)
    yield ""
    yield "4. qdqtool report: one page to look at"
    yield from _reported(model, quantized, cache, target)
    yield ""
    yield from _next(result, quantized, time.perf_counter() - started)


def _indented(text: str) -> Iterator[str]:
    return (f"   {line}".rstrip() for line in text.rstrip().splitlines())


def _difference(
    before: onnx.ModelProto, after: onnx.ModelProto, size: int, first: int
) -> tuple[float, float]:
    """Mean distance of box coordinates in pixels and correlation of scores, on images that calibration did not see."""
    outputs = []
    for proto in (before, after):
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        rows = []
        for index in range(first, first + _CHECKED):
            pixels = np.asarray(make_image(size, index), np.float32).transpose(2, 0, 1)[None] / 255
            rows.append(session.run(None, {"images": pixels})[0])
        outputs.append(np.concatenate(rows))
    boxes = float(np.abs(outputs[0] - outputs[1])[:, :4].mean())
    return boxes, float(np.corrcoef(outputs[0][:, 4:].ravel(), outputs[1][:, 4:].ravel())[0, 1])


def _verified(quantized: Path) -> Iterator[str]:
    from qdqtool.builders.compiler_process import is_installed
    from qdqtool.formats.build_text import render_verification

    if not is_installed("tensorrt_rtx"):
        recorded = verify_recorded(quantized)
        if recorded is None:
            yield "   no TensorRT-RTX here, and the recorded build is of the default demo model, not of this one"
        else:
            yield "   no TensorRT-RTX here: compared with the record of an earlier build of this model"
            yield from _indented(render_verification(recorded, terminal_width() - 3))
        yield from wrap(
            "After 'pip install qdqtool[rtx]' (which accepts NVIDIA's licence) the demo builds the model with "
            "TensorRT-RTX, which needs no GPU; with any other TensorRT, verify takes trtexec's log:",
            3,
            terminal_width(),
        )
        yield f"     qdqtool verify {quantized} build.log"
        return
    from qdqtool.verification.api import verify_with_builder

    yield from _indented(
        render_verification(verify_with_builder(quantized, "tensorrt-rtx"), terminal_width() - 3)
    )


def _reported(model: Path, quantized: Path, cache: Path, target: Target) -> Iterator[str]:
    from qdqtool.reporting.page import describe_missing_packages

    missing = describe_missing_packages()
    if missing:
        yield from wrap(missing, 3, terminal_width())
        yield f"     qdqtool report {quantized} --float {model}"
        return
    from qdqtool.reporting.api import report

    page = quantized.with_name("yolov8n-demo_report.html")
    report(quantized, before=model, target=target, gpu=_GPU, calib_cache=cache).save(page)
    yield f"   wrote {page}: open it in a browser"
    yield f"   (its times are estimates for one GPU, {_GPU})"


def _next(result: Insertion, quantized: Path, seconds: float) -> Iterator[str]:
    yield f"done in {seconds:.1f} s. With a model of your own and a few hundred of its images:"
    yield f"  qdqtool insert yolov8n.onnx --calib images/ --target {result.target}"
    yield "Look closer at this one:"
    yield f"  {_this_program()} predict {shlex.quote(str(quantized))} --target {result.target} --all"


def _this_program() -> str:
    """How to call it again: by its name where the shell finds that, else as it was called (``.venv/bin/qdqtool``)."""
    called = sys.argv[0]
    found = shutil.which("qdqtool")
    if found is not None or not called.endswith("qdqtool"):
        return "qdqtool" if found is not None else f"{shlex.quote(sys.executable)} -m qdqtool"
    return shlex.quote(os.path.relpath(called))


# The recorded build, for machines without a compiler ----------------------------------------------------------------

RECORDING = Path(__file__).with_name("recorded_build.json")


def structure(model: Model) -> str:
    """SHA-256 over nodes, connections and the shapes of initializers: equal for models that differ in values alone."""
    rows: list[Any] = [[n.op, n.name, n.inputs, n.outputs] for n in model.nodes]
    rows += sorted([t.name, *t.dims] for t in model.initializers.values())
    rows += [
        [v.name, *(d.dim_value for d in v.type.tensor_type.shape.dim)]
        for v in model.proto.graph.input
    ]
    return hashlib.sha256(json.dumps(rows, default=list).encode()).hexdigest()


def verify_recorded(source: str | os.PathLike[str]) -> Verification | None:
    """Holds the prediction for a quantized demo model against the recorded build; None where that is of another.

    Raises:
        ModelError: The model cannot be read.
    """
    model = load(source)
    recorded = json.loads(RECORDING.read_text())
    if recorded["structure"] != structure(model):
        return None
    built = {row["name"]: row for row in recorded["convolutions"]}
    prediction = predict(model, RTX)
    pairs = []
    for conv in prediction.convolutions:
        row = built.get(conv.name)
        node = (
            None
            if row is None
            else BuiltNode(
                conv.index,
                conv.name,
                conv.op,
                Precision(row["precision"]),
                output=Precision(row["output"]),
            )
        )
        pairs.append(ConvolutionPair(conv, node))
    facts = BuildFacts(
        BuildSource.RECORDING, (RECORDING.name,), recorded["tensorrt"], complete=True
    )
    result = verification_from_pairs(prediction, pairs, facts)
    text = "the build was made when this demo was written, not on this machine"
    result.notes.append(Note(text, code="built-before"))
    return result
