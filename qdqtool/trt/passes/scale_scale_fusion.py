"""ScaleScaleFusion."""

from qdqtool.trt.passes._infra import MAX_JOINED, LayerKind, Network, Pass, seen

PLAIN = seen("two-scales", "Two scales in a row become one.", "yolo-resnet18-orin-trt8502:5765")


class ScaleScaleFusion(Pass):
    """Joins two scales in a row (the decomposed BatchNormalizations)."""

    cases = (PLAIN,)
    compared = False

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.SCALE):
            while network.alive(layer) and len(layer.nodes) < MAX_JOINED and not layer.relu:
                reader = layer.out.only_reader(LayerKind.SCALE)
                if reader is None:
                    break
                layer.relu = reader.relu
                self.join(network, PLAIN, layer, reader)
