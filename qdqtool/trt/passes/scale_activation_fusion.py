"""ScaleActivationFusion."""

from qdqtool.knowledge.tables import seen
from qdqtool.model.operators import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, is_relu

PLAIN = seen(
    "relu", "A BatchNormalization takes the Relu that alone reads it, <BN> + <Relu>.",
    "yolo-resnet18-orin-trt8502:5090", "resnet18-qat-rtx2000-trt8510:2469", "yolov8-orin-trt8412-excerpts:148",
    source="those in front of an Add or a LeakyRelu are left alone",
)


class ScaleActivationFusion(Pass):
    """Joins a BatchNormalization and the Relu behind it."""

    cases = (PLAIN,)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.SCALE):
            relu = layer.out.only_reader()
            if relu is None or not is_relu(relu):
                continue
            layer.relu = relu.name
            self.join(network, PLAIN, layer, relu)
