import functools

import onnx
import pytest

from qdqtool.demo.network import SIZES, yolov8
from qdqtool.ir.graph import Model
from qdqtool.timing.model_variants import quantized_variant
from qdqtool.trt.targets import TARGETS

CONVOLUTIONS = 104


@functools.cache
def narrow_yolov8x_qdq() -> onnx.ModelProto:
    """Return YOLOv8x with an eighth of its channels and the Q/DQ of `insert`.

    The whole one takes 2 GB and seconds; the report depends on the number of layers.
    """
    widths, repeats = SIZES["x"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "narrow", (tuple(width // 8 for width in widths), repeats))
        model = yolov8("narrow")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    proto = onnx.ModelProto()
    proto.CopyFrom(quantized_variant(Model(model), TARGETS["trt8.5"]).proto)
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
    return proto
