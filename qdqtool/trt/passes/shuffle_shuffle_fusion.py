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
    """Fuses two shuffles in a row."""

    cases = (PLAIN,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for shuffle in network.layers_of_kind(LayerKind.SHUFFLE):
            while shuffle.id in network.layers and len(shuffle.nodes) < MAX_JOINED:
                consumer = shuffle.out.single_consumer(LayerKind.SHUFFLE)
                if consumer is None or consumer.shuffling.after_matmul:
                    break
                state, perm = shuffle.shuffling, _compose_permutations(shuffle, consumer)
                reorders_values = state.reorders_values or consumer.shuffling.reorders_values
                is_identity = perm == tuple(range(len(perm or ())))
                self.fuse_consumer(network, PLAIN, shuffle, consumer)
                state.may_be_identity, state.perm = True, perm
                state.reorders_values = reorders_values and not is_identity


def _compose_permutations(first: Layer, second: Layer) -> tuple[int, ...] | None:
    before, after = first.shuffling.perm, second.shuffling.perm
    if before is None or after is None or len(before) != len(after):
        return None
    return tuple(before[i] for i in after)
