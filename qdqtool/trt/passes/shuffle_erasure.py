"""ShuffleErasure."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import REMOVING


class ShuffleErasure(Pass):
    """Takes out a shuffle that changes nothing.

    Cases:
        * A fused pair of shuffles that gives back the shape it started from (resnet18-qat-rtx2000-trt8510:
          ``Flatten_301 + reshape_before_Gemm_311``, 1x512x1x1 to 1x512x1x1).
        * The shuffle that the parser puts behind a Softmax (both complete 8.5 logs).
    """

    def apply(self, network: Network) -> None:
        for shuffle in network.of_kind(net.SHUFFLE):
            before, after = shuffle.data.shape, shuffle.out.shape
            if not shuffle.attrs.get("fused") or before is None or before != after:
                continue
            if shuffle.attrs.get("moves"):
                continue  # equal dimensions do not make a transpose a no-op
            if shuffle.out.is_output and (shuffle.data.is_output or shuffle.data.producer is None):
                continue  # a network output has a name and memory of its own
            self.running(shuffle)
            self.event(REMOVING, shuffle.name)
            source, out = shuffle.data, shuffle.out
            if out.is_output:
                source.name = out.name
            source.source = out.source
            network.retarget(out, source)
            network.remove(shuffle)
