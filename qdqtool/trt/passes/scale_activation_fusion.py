"""ScaleActivationFusion."""

from __future__ import annotations

from qdqtool.knowledge.evidence import seen
from qdqtool.model.operators import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, is_relu
from qdqtool.trt.trace import FUSING

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
            self.running(PLAIN, layer)
            self.fire(PLAIN, layer, FUSING, layer.name, relu.name)
            layer.relu = relu.name
            network.absorb_reader(layer, relu, f"{layer.name} + {relu.name}")
