from qdqtool.trt.passes._infra import SWAP_TYPE, LayerKind, Network, Pass, seen

SUM = seen(
    "sum",
    "A sum that no convolution has fused becomes a pointwise layer.",
    "yolov8-orin-trt8412-excerpts:228",
    source="NVIDIA/TensorRT issue 3345 shows the same for <Add> + <Relu>",
)


class EltwiseAddToPwn(Pass):
    """Turns a sum that no convolution has fused into a pointwise layer."""

    cases = (SUM,)
    anonymous_lines = (SWAP_TYPE,)
    converted_kind = "ELEMENTWISE"

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE):
            if layer.operation == "SUM" and not layer.in_myelin:
                self.convert_kind(network, SUM, layer, LayerKind.POINTWISE)
