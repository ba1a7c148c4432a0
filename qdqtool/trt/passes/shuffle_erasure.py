from qdqtool.trt.passes._infra import REMOVING, Layer, LayerKind, Network, Pass, seen

NOTHING = seen(
    "changes-nothing",
    "A pair of shuffles that restores the original shape is removed, and so is the shuffle that "
    "the parser puts after a Softmax.",
    "resnet18-qat-rtx2000-trt8510:2569",
    "yolo-resnet18-orin-trt8502:4698",
    "bevfusion-camera-orin-trt8502:6",
    "bevfusion-camera-rtx3080ti-trt8600:4298",
)


class ShuffleErasure(Pass):
    """Removes shuffles that change nothing."""

    cases = (NOTHING,)
    anonymous_lines = (REMOVING,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for shuffle in network.layers_of_kind(LayerKind.SHUFFLE):
            if _changes_nothing(shuffle):
                self._erase_shuffle(network, shuffle)

    def _erase_shuffle(self, network: Network, shuffle: Layer) -> None:
        source, out = shuffle.data, shuffle.out
        self.fire_running(NOTHING, shuffle)
        self.fire(NOTHING, shuffle, REMOVING, shuffle.name)
        if out.is_output:
            source.name = out.name
        source.source = out.source
        network.redirect_consumers(out, source)
        network.remove(shuffle)


def _changes_nothing(shuffle: Layer) -> bool:
    source, out = shuffle.data, shuffle.out
    if not shuffle.shuffling.may_be_identity or source.shape is None or source.shape != out.shape:
        return False
    if shuffle.shuffling.reorders_values:
        return False  # equal dimensions do not make a transpose a no-op
    # A network output needs separate memory. It cannot share the memory of a network input or of
    # another network output.
    return not (out.is_output and (source.is_output or source.producer is None))
