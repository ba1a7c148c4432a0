from qdqtool.trt.passes._infra import MAX_JOINED, LayerKind, Network, Pass, seen

PLAIN = seen("two-scales", "Two scales in a row become one.", "yolo-resnet18-orin-trt8502:5765")


class ScaleScaleFusion(Pass):
    """Fuses two SCALE layers in a row, such as those of a decomposed BatchNormalization."""

    cases = (PLAIN,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.SCALE):
            while layer.id in network.layers and len(layer.nodes) < MAX_JOINED:
                consumer = layer.out.single_consumer(LayerKind.SCALE)
                if consumer is None or layer.relu_name:
                    break
                layer.relu_name = consumer.relu_name
                self.fuse_consumer(network, PLAIN, layer, consumer)
