from qdqtool.trt.passes._infra import LayerKind, ReluFusion, seen

PLAIN = seen(
    "relu",
    "A BatchNormalization fuses the Relu after it if no other layer reads it, <BN> + <Relu>.",
    "yolo-resnet18-orin-trt8502:5090",
    "resnet18-qat-rtx2000-trt8510:2469",
    "yolov8-orin-trt8412-excerpts:148",
    source="a BatchNormalization before an Add or a LeakyRelu is not fused",
)


class ScaleActivationFusion(ReluFusion):
    """Fuses a BatchNormalization and the Relu after it."""

    cases = (PLAIN,)
    kind = LayerKind.SCALE
