from qdqtool.reasons.fusions import BatchNormNotConstant, ConvTransposeBatchNorm
from qdqtool.trt.neighbors import tensor_size
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    REMOVING,
    Layer,
    LayerKind,
    Network,
    Pass,
    documented,
    dq_before,
    node_name,
    seen,
    weights_position,
)

FOLDED = seen(
    "batchnorm",
    "A quantized convolution folds BatchNormalization and Relu; the layer name omits both.",
    "yolo-resnet18-orin-trt8502:5251",
    "resnet18-qat-rtx2000-trt8510:2579",
    "yolov8-orin-trt8412-excerpts:187",
    source="TensorRT 8.0 keeps + Relu_11 (centernet-resnet34-qat-trt80)",
    about=("Conv", "BatchNormalization", "Relu"),
)
TRANSPOSED = documented(
    "convtranspose",
    "A quantized ConvTranspose does not fold the BatchNormalization after it.",
    "NVIDIA in NVIDIA/TensorRT issue 3412 (2023): no support for Q/DQ + convTranspose + BN fusion "
    "yet; nothing newer says that a later version folds it",
    about=("ConvTranspose", "BatchNormalization"),
)


class QConvScaleFusion(Pass):
    """Folds a BatchNormalization (and its Relu) into a convolution whose inputs come from DQs.

    A BatchNormalization that was decomposed because a parameter is not a plain constant is not
    folded (yolo-resnet18-orin-trt8502: three downsample branches).
    """

    cases = (FOLDED, TRANSPOSED)
    anonymous_lines = (REMOVING,)

    def _apply(self, network: Network) -> None:
        for layer, scale in network.single_consumer_pairs(*CONVOLVE):
            if scale.kind != LayerKind.SCALE and scale.op != "BatchNormalization":
                continue
            if not _is_quantized(layer):
                continue
            details = (self.name, node_name(layer), node_name(scale), tensor_size(layer.out))
            if scale.kind != LayerKind.SCALE:
                self.refuse(BatchNormNotConstant(*details))
            elif layer.fusion.has_activation:
                continue
            elif layer.kind == LayerKind.DECONVOLUTION:
                self.refuse(ConvTransposeBatchNorm(*details))
                layer.add_cases(TRANSPOSED)
            else:
                self._fold_scale(network, layer, scale)

    def _fold_scale(self, network: Network, layer: Layer, scale: Layer) -> None:
        self.fire_running(FOLDED, layer)
        self.fire(FOLDED, layer, REMOVING, scale.name)
        layer.fusion.has_activation = bool(scale.relu_name)
        name = layer.name
        if scale.relu_name and self.target.keeps_relu_name:
            name = f"{layer.name} + {scale.relu_name}"
        network.absorb_consumer(layer, scale, name)


def _is_quantized(layer: Layer) -> bool:
    position = weights_position(layer)
    return (
        position is not None
        and dq_before(layer.data) is not None
        and dq_before(layer.inputs[position]) is not None
    )
