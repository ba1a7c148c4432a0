from qdqtool.trt.passes._infra import LayerKind, ReluFusion, seen

PLAIN = seen(
    "single-reader",
    "An elementwise layer fuses the Relu after it if no other layer reads it, <Add> + <Relu>.",
    "yolo-resnet18-orin-trt8502:5074",
    "resnet18-qat-rtx2000-trt8510:2453",
    "bevfusion-camera-orin-trt8502:17",
    "bevfusion-camera-rtx3080ti-trt8600:4953",
)


class EltReluFusion(ReluFusion):
    """Fuses an elementwise layer and the Relu after it."""

    cases = (PLAIN,)
    kind = LayerKind.ELEMENTWISE
