from qdqtool.trt.passes._infra import (
    CONVOLVE,
    Layer,
    LayerKind,
    Network,
    Pass,
    assumed,
    is_relu,
    node_name,
    seen,
)

CONVOLUTION = seen(
    "convolution",
    "An INT8 convolution fuses the Relu after its own Q/DQ pair if a Q follows the Relu, "
    "<Conv> + PWN(<Relu>).",
    "resnet50-ort-orin-trt103",
    "resnet50-ort-rtx3080-trt10161",
    source="the engines have 72 and 74 nodes for 121 layers, 48 of which are such Relus; an error "
    "of the second build, with a quantized stem, contains the fused name",
    about=("Relu",),
)
SUM = seen(
    "sum",
    "An INT8 sum fuses the Relu after its own Q/DQ pair if a Q follows the Relu.",
    "resnet50-ort-orin-trt103",
    "resnet50-ort-rtx3080-trt10161",
    source="16 of the 48 Relus follow a sum",
    about=("Add",),
)
DECONVOLUTION = assumed(
    "deconvolution",
    "An INT8 deconvolution fuses the Relu after its own Q/DQ pair if a Q follows the Relu.",
    "as a convolution; a listing with both would refute it",
    about=("ConvTranspose",),
)
_CASES = {
    LayerKind.CONVOLUTION: CONVOLUTION,
    LayerKind.DECONVOLUTION: DECONVOLUTION,
    LayerKind.ELEMENTWISE: SUM,
}


class QuantizedReluFusion(Pass):
    """Fuses a Relu that reads and writes INT8 into the INT8 layer before it.

    By default, the quantization tool of onnxruntime places a Q/DQ pair before such a Relu.
    TensorRT's name for this pass is unknown.
    """

    cases = (CONVOLUTION, SUM, DECONVOLUTION)
    is_compared = False

    def _apply(self, network: Network) -> None:
        if not self.target.fuses_quantized_relu:
            return
        pairs = network.single_consumer_pairs(*_CASES, consumer_kind=LayerKind.ACTIVATION)
        for layer, relu in pairs:
            if is_relu(relu) and relu.int8_out and layer.int8_out and _has_no_activation(layer):
                self._fuse_relu(network, layer, relu)

    def _fuse_relu(self, network: Network, layer: Layer, relu: Layer) -> None:
        layer.add_cases(_CASES[layer.kind])
        name = relu.name
        if layer.kind in CONVOLVE:
            layer.fusion.has_activation = True
            layer.fusion.quantized_relu = node_name(relu)
            name = f"PWN({name})"
        network.absorb_consumer(layer, relu, f"{layer.name} + {name}")


def _has_no_activation(layer: Layer) -> bool:
    if layer.kind in CONVOLVE:
        return not layer.fusion.has_activation
    return layer.operation == "SUM" and not layer.relu_name
