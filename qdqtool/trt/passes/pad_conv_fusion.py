"""Padding taken into a convolution; TensorRT's name for this pass is not known."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, weaken
from qdqtool.types import Evidence


class PadConvFusion(Pass):
    """Joins a Pad and the convolution behind it.

    Cases:
        * Pad -> convolution without a Q/DQ pair between them: ``<Pad> + <weights> + <Q> + <Conv>`` (engine names in
          NVIDIA/TensorRT issue 2527; issue 2592: a pair between them keeps the Pad a layer of its own).
    """

    evidence = Evidence.DOCUMENTED

    def apply(self, network: Network) -> None:
        for pad in network.of_kind(net.PADDING):
            conv = pad.out.only_reader()
            if conv is None or conv.kind != net.CONVOLUTION or not pad.attrs.get("zeros"):
                continue
            if conv.int8 and not pad.attrs.get("dq_passed"):
                continue
            if conv.data is not pad.out:
                continue
            weaken(conv, Evidence.DOCUMENTED)
            source = pad.data
            conv.name = f"{pad.name} + {conv.name}"
            conv.nodes.extend(pad.nodes)
            conv.attrs["padded"] = pad.name
            network.set_input(conv, 0, source)
            network.remove(pad)
