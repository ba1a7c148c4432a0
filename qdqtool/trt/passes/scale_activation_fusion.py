"""ScaleActivationFusion."""

from qdqtool.trt.passes._infra import LayerKind, ReluFusion, seen

PLAIN = seen(
    "relu",
    "A BatchNormalization fuses the Relu that alone reads it, <BN> + <Relu>.",
    "yolo-resnet18-orin-trt8502:5090",
    "resnet18-qat-rtx2000-trt8510:2469",
    "yolov8-orin-trt8412-excerpts:148",
    source="those before an Add or a LeakyRelu are not fused",
)


class ScaleActivationFusion(ReluFusion):
    """Fuses a BatchNormalization and the Relu after it."""

    cases = (PLAIN,)
    kind = LayerKind.SCALE
