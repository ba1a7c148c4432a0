"""A DQ followed by a Q of the same scale."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, dq_of, node_name, weaken
from qdqtool.trt.trace import REMOVING
from qdqtool.types import Evidence


class CancelDQThenQ(Pass):
    """Takes out a Q that requantizes to the scale it came from; TensorRT's name for this pass is not known.

    Cases:
        * DQ -> Q with equal scales: the Q's readers read the DQ's INT8 input (documented by ModelOpt's comments on
          Concat elimination: such a pair cancels only if the scales are equal).
        * The Q writes a network output: both stay (assumed).
        * Unequal scales: a requantization stays (:class:`RequantizeFusion`).
    """

    evidence = Evidence.DOCUMENTED

    def apply(self, network: Network) -> None:
        for q in network.near(net.QUANTIZE):
            dq = dq_of(q.data)
            if dq is None or dq.quant is None or q.quant is None or q.out.is_output:
                continue
            if dq.quant.same_as(q.quant) is not True:
                self.refuse(
                    q,
                    "scales-differ",
                    dq=node_name(dq),
                    scales=tuple(None if p.scale is None else p.scale.tolist() for p in (dq.quant, q.quant)),
                )
                continue
            for reader in q.out.consumers:
                weaken(reader, Evidence.DOCUMENTED)
            self.event(REMOVING, q.name)
            source = dq.data
            network.retarget(q.out, source)
            network.remove(q)
            if not dq.out.consumers and not dq.out.is_output:
                self.event(REMOVING, dq.name)
                network.remove(dq)
