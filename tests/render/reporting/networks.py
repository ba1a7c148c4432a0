"""A Q/DQ network of the size of YOLOv8x, whose large weights are named and never there."""

import functools

import numpy as np
import onnx
from onnx import numpy_helper

from qdqtool.commands import demo_run as demo
from qdqtool.model.editor import placeholder
from qdqtool.model.graph import Model
from qdqtool.model.qdq import is_dq, is_q
from qdqtool.timing.twin import best_placement
from qdqtool.trt.targets import TARGETS

CONVOLUTIONS = 104
_SLIM = 8  # by which the widths are divided while Q/DQ are placed, which needs the weights


class _Net(demo.YoloBuilder):
    """The demo's blocks; with ``whole`` weights of a known shape without data."""

    whole = False

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
        if not self.whole:
            return super().conv2d(
                name, tensor, cin, cout, kernel, stride, gain=gain, bias=bias, spread=spread
            )
        self.moments.setdefault(tensor, 1.0)
        made = super().conv2d(name, tensor, 1, 1, kernel, stride)
        bias_data, weight = self.initializers.pop(), self.initializers.pop()
        self.initializers += [
            placeholder(weight.name, (cout, cin, kernel, kernel)),
            numpy_helper.from_array(np.zeros(cout, np.float32), bias_data.name),
        ]
        return made


def yolov8x(size: int = 640, slim: int = 1) -> onnx.ModelProto:
    """Layers, channels and repeats of YOLOv8x (depth 1.0, width 1.25, at most 640 channels), in float."""
    net = _Net(0, "silu")
    net.whole = slim == 1
    widths, repeats = demo.SIZES["x"]
    levels = demo.add_backbone_and_neck(net, [width // slim for width in widths], repeats)
    demo.add_head(net, levels, size, 80)
    return net.finish(size, 80)


@functools.cache
def yolov8x_qdq(size: int = 640) -> onnx.ModelProto:
    """The same with Q/DQ where ``insert`` would put it, and a scale for each output channel of the weights."""
    proto = onnx.ModelProto()
    proto.CopyFrom(best_placement(Model(yolov8x(size, _SLIM)), TARGETS["trt8.5"]).proto)
    whole = {t.name: t for t in yolov8x(size).graph.initializer}
    constants = {t.name: t for t in proto.graph.initializer}
    for name, tensor in constants.items():
        if name in whole:
            tensor.CopyFrom(whole[name])
    index = Model(proto)
    rng = np.random.default_rng(0)
    for node in index.nodes:
        q = index.producer(node.input(0)) if is_dq(node) else node if is_q(node) else None
        weights = constants.get(q.input(0)) if q is not None else None
        if weights is None or len(weights.dims) < 4:
            continue
        channels = weights.dims[0]
        for name, values in (
            (node.input(1), rng.uniform(0.001, 0.02, channels).astype(np.float32)),
            (node.input(2), np.zeros(channels, np.int8)),
        ):
            if constants[name].dims != [channels]:
                constants[name].CopyFrom(numpy_helper.from_array(values, name))
    del proto.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(proto)
