from qdqtool.trt.passes._infra import SWAP_TYPE, LayerKind, Network, Pass, assumed, is_relu, seen

LEAKY = seen(
    "leaky-relu",
    "A LeakyRelu that no earlier pass has fused becomes a pointwise layer.",
    "yolo-resnet18-orin-trt8502:5325",
    about=("LeakyRelu",),
)
CLIP = seen(
    "clip",
    "A Clip that no earlier pass has fused becomes a pointwise layer, PWN(<Clip>).",
    "mobilenetv2-titanrtx-qat-residual",
    about=("Clip",),
)
OTHER = assumed(
    "other",
    "An activation other than LeakyRelu and Clip that no earlier pass has fused becomes a "
    "pointwise layer.",
    "as LeakyRelu and Clip; a log that lists such an activation as a separate ACTIVATION layer "
    "would refute it",
)
_CASES = {"LEAKY_RELU": LEAKY, "CLIP": CLIP}


class ActivationToPointwiseConversion(Pass):
    """Turns an activation other than Relu into a pointwise layer, ``PWN(<activation>)``."""

    cases = (LEAKY, CLIP, OTHER)
    anonymous_lines = (SWAP_TYPE,)
    converted_kind = "ACTIVATION"

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ACTIVATION):
            if is_relu(layer) or layer.in_myelin:
                continue
            self.convert_kind(
                network, _CASES.get(layer.activation, OTHER), layer, LayerKind.POINTWISE
            )
            layer.name = f"PWN({layer.name})"
