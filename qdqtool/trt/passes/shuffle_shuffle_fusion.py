"""ShuffleShuffleFusion."""

from qdqtool.trt.passes._infra import MAX_JOINED, Layer, LayerKind, Network, Pass, seen

PLAIN = seen(
    "single-reader",
    "Two shuffles in a row become one.",
    "yolo-resnet18-orin-trt8502:4696",
    "resnet18-qat-rtx2000-trt8510:2567",
    "bevfusion-camera-orin-trt8502:4",
    "bevfusion-camera-rtx3080ti-trt8600:4296",
)


class ShuffleShuffleFusion(Pass):
    """Joins two shuffles in a row."""

    cases = (PLAIN,)
    is_compared = False

    def apply(self, network: Network) -> None:
        for shuffle in network.layers_of_kind(LayerKind.SHUFFLE):
            while network.contains(shuffle) and len(shuffle.nodes) < MAX_JOINED:
                reader = shuffle.out.single_consumer(LayerKind.SHUFFLE)
                if reader is None or reader.shuffling.after_matmul:
                    break
                moves, perm = (
                    shuffle.shuffling.reorders_values or reader.shuffling.reorders_values,
                    _one_after_other(shuffle, reader),
                )
                self.fuse_consumer(network, PLAIN, shuffle, reader)
                shuffle.shuffling.may_be_identity, shuffle.shuffling.perm = True, perm
                shuffle.shuffling.reorders_values = moves and perm != tuple(range(len(perm or ())))


def _one_after_other(first: Layer, second: Layer) -> tuple[int, ...] | None:
    """The permutation that two Transposes in a row come to; None where one of them is no Transpose."""
    before, after = first.shuffling.perm, second.shuffling.perm
    if before is None or after is None or len(before) != len(after):
        return None
    return tuple(before[i] for i in after)
