"""ShuffleShuffleFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import MAX_JOINED, Pass
from qdqtool.trt.trace import FUSING


class ShuffleShuffleFusion(Pass):
    """Joins two shuffles in a row.

    Cases:
        * SHUFFLE -> SHUFFLE, single reader (yolo-resnet18-orin-trt8502: ``/head/Transpose`` with ``/head/Reshape``;
          resnet18-qat-rtx2000-trt8510: ``Flatten_301`` with ``reshape_before_Gemm_311``).
    """

    def apply(self, network: Network) -> None:
        for shuffle in network.of_kind(net.SHUFFLE):
            if not network.alive(shuffle):
                continue
            while True:
                reader = shuffle.out.only_reader()
                if reader is None or reader.kind != net.SHUFFLE or reader.attrs.get("squeeze_after"):
                    break
                if len(shuffle.nodes) >= MAX_JOINED:
                    break
                self.running(shuffle)
                self.event(FUSING, shuffle.name, reader.name)
                network.absorb_reader(shuffle, reader, f"{shuffle.name} + {reader.name}")
                shuffle.attrs["fused"] = True
                shuffle.attrs["moves"] = shuffle.attrs.get("moves") or reader.attrs.get("moves")
