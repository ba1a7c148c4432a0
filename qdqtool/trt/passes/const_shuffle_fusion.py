from qdqtool.trt.passes._infra import LayerKind, Network, Pass, constant_before, seen

PLAIN = seen(
    "single-reader",
    "A shuffle is folded into a constant that no other layer reads, <constant> + <shuffle>.",
    "yolo-resnet18-orin-trt8502:4648",
    "resnet18-qat-rtx2000-trt8510:2179",
    "yolov8-orin-trt8412-excerpts:124",
)


class ConstShuffleFusion(Pass):
    """Folds a shuffle of a constant (plain, or quantized weights) into the constant."""

    cases = (PLAIN,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for shuffle in network.layers_of_kind(LayerKind.SHUFFLE):
            constant = constant_before(shuffle.data)
            if constant is not None and constant.out.single_consumer():
                self.fuse_consumer(network, PLAIN, constant, shuffle)
