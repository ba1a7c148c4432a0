"""ShuffleShuffleFusion."""

from __future__ import annotations

from qdqtool.evidence import seen
from qdqtool.operator_facts import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import MAX_JOINED, Pass
from qdqtool.trt.trace import FUSING

PLAIN = seen(
    "single-reader", "Two shuffles in a row become one.",
    "yolo-resnet18-orin-trt8502:4696", "resnet18-qat-rtx2000-trt8510:2567", "bevfusion-camera-orin-trt8502:4",
    "bevfusion-camera-rtx3080ti-trt8600:4296",
)


class ShuffleShuffleFusion(Pass):
    """Joins two shuffles in a row."""

    cases = (PLAIN,)

    def apply(self, network: Network) -> None:
        for shuffle in network.of_kind(LayerKind.SHUFFLE):
            if not network.alive(shuffle):
                continue
            while True:
                reader = shuffle.out.only_reader()
                if reader is None or reader.kind != LayerKind.SHUFFLE or reader.shuffling.after_matmul:
                    break
                if len(shuffle.nodes) >= MAX_JOINED:
                    break
                self.running(PLAIN, shuffle)
                self.fire(PLAIN, shuffle, FUSING, shuffle.name, reader.name)
                moves = reader.shuffling.moves
                network.absorb_reader(shuffle, reader, f"{shuffle.name} + {reader.name}")
                shuffle.shuffling.joined = True
                shuffle.shuffling.moves = shuffle.shuffling.moves or moves
