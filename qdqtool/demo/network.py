"""YOLOv8 networks with random weights."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError

STRIDES = (8, 16, 32)
REG_MAX = 16  # number of bins of the distribution over each box side (DFL)
OPSET = 17

# By size of the network: channels of layers 0, 1, 3, 5 and 7; repetitions of blocks 2, 4, 6 and 8.
SIZES = {
    "n": ((16, 32, 64, 128, 256), (1, 2, 2, 1)),
    "s": ((32, 64, 128, 256, 512), (1, 2, 2, 1)),
    "m": ((48, 96, 192, 384, 576), (2, 4, 4, 2)),
    "l": ((64, 128, 256, 512, 512), (3, 6, 6, 3)),
    "x": ((80, 160, 320, 640, 640), (3, 6, 6, 3)),
}

# Approximate variance of the output of each activation function. For a standard normal input, the
# variance is 0.31 (SiLU) or 0.34 (ReLU), and the mean square is 0.36 or 0.5. The mean has little
# effect, because the sum of the weights of the next convolution is 0.
_ACTIVATION_VARIANCES = {"silu": 0.356, "relu": 0.41}
_IMAGE_VARIANCE = 0.05  # variance of pixel values, which are from 0 to 1
_POOL_GROWTH = 2.2  # factor by which a 5x5 MaxPool increases the variance, for demo images


def yolov8n(
    size: int = 640, classes: int = 80, seed: int = 0, activation: str = "silu"
) -> onnx.ModelProto:
    """Build YOLOv8n with random weights.

    Args:
        size: Side of the square input in pixels, a multiple of 32.
        classes: Number of classes.
        seed: Seed of the weights. Equal seeds give equal bytes.
        activation: ``silu``, as in Ultralytics' models, or ``relu``.

    Returns:
        A model of opset 17 with input ``images`` [1, 3, size, size] (RGB, 0 to 1) and output
        ``output0`` [1, 4 + classes, anchors]: center x, center y, width and height in pixels, then
        class scores.

    Raises:
        ModelError: ``size`` is not a positive multiple of 32.
    """
    return yolov8("n", size, classes, seed, activation)


def yolov8(
    letter: str,
    size: int = 640,
    classes: int = 80,
    seed: int = 0,
    activation: str = "silu",
) -> onnx.ModelProto:
    """Build YOLOv8 of any size with random weights; see :func:`yolov8n`.

    Args:
        letter: Size of the network: ``n``, ``s``, ``m``, ``l`` or ``x``.
        size: Side of the square input in pixels, a multiple of 32.
        classes: Number of classes.
        seed: Seed of the weights.
        activation: ``silu`` or ``relu``.

    Raises:
        ModelError: ``size`` is not a positive multiple of 32.
    """
    if size < 32 or size % 32:
        raise ModelError(
            f"`size` {size} of the demo model is not a multiple of 32; give 32, 64, 96, ...",
            code="out-of-range",
            parameter="size",
        )
    net = YoloBuilder(seed, activation)
    add_head(net, add_backbone_and_neck(net, *SIZES[letter]), size, classes)
    return net.finish(size, classes, letter)


class YoloBuilder:
    """Builds a YOLOv8 network node by node.

    A method that adds nodes returns the name of the output tensor. The parameters `cin` and `cout`
    are the numbers of input and output channels.
    """

    def __init__(self, seed: int, activation: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)
        self.activation = activation
        # Approximate variance of each tensor. The weights of a convolution are divided by the
        # square root of the variance of its input, so that its output has a variance of about 1.
        self.variances: dict[str, float] = {"images": _IMAGE_VARIANCE}

    def _add_outputs(
        self, op: str, name: str, inputs: Sequence[str], count: int, **attributes: Any
    ) -> list[str]:
        outputs = [f"{name}_output_{i}" for i in range(count)]
        variance = max((self.variances[t] for t in inputs if t in self.variances), default=1.0)
        if op == "Add":
            variance = sum(self.variances.get(t, 0.0) for t in inputs)
        elif op == "MaxPool":
            variance *= _POOL_GROWTH
        self.variances.update(dict.fromkeys(outputs, variance))
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **attributes))
        return outputs

    def add_node(self, op: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        return self._add_outputs(op, name, inputs, 1, **attributes)[0]

    def add_split(self, name: str, tensor: str, *sizes: int) -> list[str]:
        """Add a Split of the channels, and return the names of its output tensors."""
        inputs = [tensor, self.add_integers(f"{name}_sizes", *sizes)]
        return self._add_outputs("Split", name, inputs, len(sizes), axis=1)

    def add_reshape(self, name: str, tensor: str, *shape: int) -> str:
        """Add a Reshape."""
        return self.add_node(
            "Reshape", name, tensor, self.add_integers(f"{name}_shape", *shape), allowzero=0
        )

    def add_constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        """Add an initializer, and return its name."""
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def add_integers(self, name: str, *values: int) -> str:
        """Add an initializer with a vector of 64-bit integers, and return its name."""
        return self.add_constant(name, np.array(values, np.int64))

    def add_conv2d(
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
    ) -> str:
        """Add a convolution without activation.

        With the default of `gain`, the output has a variance of about 1. The bias is random too. If
        all variance came from the image, random layers would amplify rounding errors until no
        information about the image is left.

        Args:
            name: Name of the node.
            tensor: Input tensor.
            cin: Number of input channels.
            cout: Number of output channels.
            kernel: Height and width of the kernel.
            stride: Stride in both directions.
            gain: Standard deviation of the output over an image.
            bias: Mean of the bias over the channels. The standard deviation is 0.6.
        """
        fan_in = cin * kernel * kernel
        weight = self.rng.standard_normal((cout, cin, kernel, kernel))
        # The inputs have a positive mean, which weights with a sum of 0 remove.
        weight -= weight.mean(axis=(1, 2, 3), keepdims=True)
        # Channels have different ranges, as in trained networks with folded BatchNormalization.
        weight *= np.exp(0.3 * self.rng.standard_normal((cout, 1, 1, 1)))
        weight *= gain / np.sqrt(fan_in * self.variances[tensor])
        offsets = bias + 0.6 * self.rng.standard_normal(cout)
        # For example, /model.22/cv2.0/cv2.0.1/conv/Conv has the weight
        # model.22.cv2.0.1.conv.weight.
        path = re.sub(r"/cv\d\.\d(?=/cv)", "", name)
        parameter = path.removeprefix("/").removesuffix("/Conv").replace("/", ".")
        self.add_constant(f"{parameter}.weight", weight.astype(np.float32))
        self.add_constant(f"{parameter}.bias", offsets.astype(np.float32))
        return self.add_node(
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

    def add_conv(
        self, name: str, tensor: str, cin: int, cout: int, kernel: int = 1, stride: int = 1
    ) -> str:
        """Add Ultralytics' Conv: a convolution and its activation."""
        raw = self.add_conv2d(f"{name}/conv/Conv", tensor, cin, cout, kernel, stride)
        if self.activation == "relu":
            result = self.add_node("Relu", f"{name}/act/Relu", raw)
        else:
            result = self.add_node(
                "Mul", f"{name}/act/Mul", raw, self.add_node("Sigmoid", f"{name}/act/Sigmoid", raw)
            )
        self.variances[result] = _ACTIVATION_VARIANCES[self.activation]
        return result

    def add_concat(self, name: str, tensors: Sequence[str], axis: int = 1) -> str:
        """Add a Concat."""
        return self.add_node("Concat", name, *tensors, axis=axis)

    def add_c2f(
        self, name: str, tensor: str, cin: int, cout: int, repeats: int, shortcut: bool
    ) -> str:
        """Add a C2f block.

        The block is a convolution, a Split, a chain of bottlenecks after the second half, a Concat
        of both halves and the outputs of all bottlenecks, and a second convolution.
        """
        half = cout // 2
        joined = self.add_conv(f"{name}/cv1", tensor, cin, cout)
        parts = self.add_split(f"{name}/Split", joined, half, half)
        for i in range(repeats):
            inner = self.add_conv(f"{name}/m.{i}/cv1", parts[-1], half, half, 3)
            inner = self.add_conv(f"{name}/m.{i}/cv2", inner, half, half, 3)
            if shortcut:
                inner = self.add_node("Add", f"{name}/m.{i}/Add", parts[-1], inner)
            parts.append(inner)
        return self.add_conv(
            f"{name}/cv2", self.add_concat(f"{name}/Concat", parts), half * (2 + repeats), cout
        )

    def add_sppf(self, name: str, tensor: str, channels: int) -> str:
        """Add an SPPF block.

        The block is a convolution, a chain of three MaxPools, a Concat of the outputs of the
        convolution and all MaxPools, and a second convolution.
        """
        parts = [self.add_conv(f"{name}/cv1", tensor, channels, channels // 2)]
        for suffix in ("", "_1", "_2"):
            parts.append(
                self.add_node(
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
        return self.add_conv(
            f"{name}/cv2", self.add_concat(f"{name}/Concat", parts), channels * 2, channels
        )

    def add_upsample(self, name: str, tensor: str) -> str:
        """Add a Resize to twice the height and width."""
        scales = self.add_constant(f"{name}/scales", np.array([1, 1, 2, 2], np.float32))
        return self.add_node(
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
        """Return the model. Its output is that of the last node.

        Args:
            size: Side of the square input in pixels.
            classes: Number of classes.
            letter: Size of the network, for the description in the metadata.
        """
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
    """Add the layers 0 to 21 (backbone and neck).

    Args:
        net: Builder of the network.
        widths: Numbers of channels of the layers 0, 1, 3, 5 and 7.
        repeats: Numbers of repetitions of the blocks 2, 4, 6 and 8.

    Returns:
        Tensor and number of channels of each of the three feature maps for the head.
    """
    a, b, c, d, e = widths
    first, second, third, last = repeats
    x = net.add_conv("/model.0", "images", 3, a, 3, 2)
    x = net.add_conv("/model.1", x, a, b, 3, 2)
    x = net.add_c2f("/model.2", x, b, b, first, True)
    x = net.add_conv("/model.3", x, b, c, 3, 2)
    p3 = net.add_c2f("/model.4", x, c, c, second, True)
    x = net.add_conv("/model.5", p3, c, d, 3, 2)
    p4 = net.add_c2f("/model.6", x, d, d, third, True)
    x = net.add_conv("/model.7", p4, d, e, 3, 2)
    x = net.add_c2f("/model.8", x, e, e, last, True)
    p5 = net.add_sppf("/model.9", x, e)
    x = net.add_concat("/model.11/Concat", [net.add_upsample("/model.10", p5), p4])
    n4 = net.add_c2f("/model.12", x, e + d, d, first, False)
    x = net.add_concat("/model.14/Concat", [net.add_upsample("/model.13", n4), p3])
    out3 = net.add_c2f("/model.15", x, d + c, c, first, False)
    x = net.add_concat("/model.17/Concat", [net.add_conv("/model.16", out3, c, c, 3, 2), n4])
    out4 = net.add_c2f("/model.18", x, c + d, d, first, False)
    x = net.add_concat("/model.20/Concat", [net.add_conv("/model.19", out4, d, d, 3, 2), p5])
    out5 = net.add_c2f("/model.21", x, d + e, e, first, False)
    return [(out3, c), (out4, d), (out5, e)]


def add_head(net: YoloBuilder, levels: Sequence[tuple[str, int]], size: int, classes: int) -> None:
    """Add the head: box and class branches for three levels, then the decoding of boxes."""
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
            x = net.add_conv(f"{base}.0", tensor, channels, width, 3)
            x = net.add_conv(f"{base}.1", x, width, width, 3)
            branches.append(net.add_conv2d(f"{base}.2/Conv", x, width, out, gain=gain, bias=bias))
        suffix = f"_{i}" if i else ""
        joined = net.add_concat(f"{name}/Concat{suffix}", branches)
        flat.append(net.add_reshape(f"{name}/Reshape{suffix}", joined, 1, box + classes, -1))
    joined = net.add_concat(f"{name}/Concat_3", flat, axis=2)
    boxes, scores = net.add_split(f"{name}/Split", joined, box, classes)
    pixels = _decode_boxes(net, name, boxes, size)
    net.add_concat(f"{name}/Concat_5", [pixels, net.add_node("Sigmoid", f"{name}/Sigmoid", scores)])


def _decode_boxes(net: YoloBuilder, name: str, boxes: str, size: int) -> str:
    """Add nodes that convert boxes to center, width and height in pixels, [1, 4, anchors]."""
    distances = _average_bins(net, f"{name}/dfl", boxes)
    centers, strides = _make_anchors(size)
    center = net.add_constant(f"{name}/Constant_anchors", centers)
    axis = net.add_integers(f"{name}/Constant_axis", 1)
    bounds = [net.add_integers(f"{name}/Constant_{n}", n) for n in (0, 2, 4)]
    lower = net.add_node("Slice", f"{name}/Slice", distances, bounds[0], bounds[1], axis)
    upper = net.add_node("Slice", f"{name}/Slice_1", distances, bounds[1], bounds[2], axis)
    low = net.add_node("Sub", f"{name}/Sub", center, lower)
    high = net.add_node("Add", f"{name}/Add", center, upper)
    total = net.add_node("Add", f"{name}/Add_1", low, high)
    middle = net.add_node(
        "Div",
        f"{name}/Div",
        total,
        net.add_constant(f"{name}/Constant_two", np.array(2, np.float32)),
    )
    cells = net.add_concat(
        f"{name}/Concat_4", [middle, net.add_node("Sub", f"{name}/Sub_1", high, low)]
    )
    return net.add_node(
        "Mul", f"{name}/Mul", cells, net.add_constant(f"{name}/Constant_strides", strides)
    )


def _average_bins(net: YoloBuilder, name: str, boxes: str) -> str:
    """Add the DFL, the mean distance of each box side: [1, 64, anchors] to [1, 4, anchors]."""
    bins = net.add_reshape(f"{name}/Reshape", boxes, 1, 4, REG_MAX, -1)
    transposed = net.add_node("Transpose", f"{name}/Transpose", bins, perm=[0, 2, 1, 3])
    probabilities = net.add_node("Softmax", f"{name}/Softmax", transposed, axis=1)
    weight = net.add_constant(
        "model.22.dfl.conv.weight", np.arange(REG_MAX, dtype=np.float32).reshape(1, REG_MAX, 1, 1)
    )
    mean = net.add_node(
        "Conv",
        f"{name}/conv/Conv",
        probabilities,
        weight,
        dilations=[1, 1],
        group=1,
        kernel_shape=[1, 1],
        pads=[0] * 4,
        strides=[1, 1],
    )
    return net.add_reshape(f"{name}/Reshape_1", mean, 1, 4, -1)


def _make_anchors(size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return centers in cells, [1, 2, anchors], and strides in pixels, [1, anchors]."""
    centers, strides = [], []
    for stride in STRIDES:
        cells = size // stride
        y, x = np.meshgrid(np.arange(cells) + 0.5, np.arange(cells) + 0.5, indexing="ij")
        centers.append(np.stack([x.ravel(), y.ravel()]))
        strides.append(np.full(cells * cells, stride))
    return (
        np.concatenate(centers, 1)[None].astype(np.float32),
        np.concatenate(strides)[None].astype(np.float32),
    )
