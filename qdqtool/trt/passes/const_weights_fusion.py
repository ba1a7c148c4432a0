import itertools

from qdqtool.reasons.tensors import STEPS
from qdqtool.trt import fault_checks
from qdqtool.trt.passes._infra import WEIGHTED, Layer, LayerKind, Network, Pass, node_name, seen
from qdqtool.util.records import SharedTuple

PLAIN = seen(
    "single-reader",
    "An INT8 convolution absorbs INT8 weights that no other layer reads, <weights> + <Q> + <Conv>.",
    "yolo-resnet18-orin-trt8502:5633",
    "resnet18-qat-rtx2000-trt8510:2626",
    "yolov8-orin-trt8412-excerpts:206",
    "bevfusion-camera-orin-trt8502:335",
    "bevfusion-camera-rtx3080ti-trt8600:5271",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="10.14.1: all 64 convolutions have INT8 weights",
)


class ConstWeightsFusion(Pass):
    """Fuses quantized constant weights into the convolution that reads them.

    The pass refuses if several layers read the weights. TensorRT then fails with "Could not fuse
    2nd input (kernel weights) of CONVOLUTION" (NVIDIA/TensorRT issues 2131 and 1864).
    """

    cases = (PLAIN,)

    def _apply(self, network: Network) -> None:
        for constant in network.layers_of_kind(LayerKind.CONSTANT):
            consumers = constant.out.consumers
            convolutions = [layer for layer in consumers if layer.kind in WEIGHTED and layer.int8]
            if not convolutions or self._refuse_shared(constant, convolutions):
                continue
            (conv,) = convolutions
            self.fire_fusing(PLAIN, conv, constant, conv)
            network.absorb_weights(conv, constant)
            conv.add_cases(*constant.cases)

    def _refuse_shared(self, constant: Layer, convolutions: list[Layer]) -> bool:
        """Record a reason for each convolution if its weights are shared or a network output.

        Returns:
            Whether a reason was recorded.
        """
        consumers = constant.out.consumers
        names = SharedTuple(map(node_name, itertools.islice(consumers, STEPS)))
        more = max(len(consumers) - STEPS, 0)
        reasons = [
            fault_checks.check_weights_shared(
                self.name, node_name(conv), constant.name, names, constant.out.is_output, more
            )
            for conv in convolutions
        ]
        shared = [reason for reason in reasons if reason is not None]
        self.reasons.extend(shared)
        return bool(shared)
