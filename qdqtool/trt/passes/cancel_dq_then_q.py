"""A DQ followed by a Q of the same scale."""

from __future__ import annotations

from qdqtool.evidence import documented
from qdqtool.operators import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, dq_of, node_name
from qdqtool.trt.refusals import ScalesDiffer
from qdqtool.trt.surroundings import scale_of
from qdqtool.trt.trace import REMOVING

EQUAL = documented(
    "equal-scales", "A Q behind a DQ of the same scale goes, and its readers read the DQ's INT8 input.",
    "ModelOpt's comments on Concat elimination: such a pair cancels only if the scales are equal",
)


class CancelDQThenQ(Pass):
    """Takes out a Q that requantizes to the scale it came from; TensorRT's name for this pass is not known.

    A Q that writes a network output stays (assumed); with unequal scales a requantization stays.
    """

    cases = (EQUAL,)

    def apply(self, network: Network) -> None:
        for q in network.near(LayerKind.QUANTIZE):
            dq = dq_of(q.data)
            if dq is None or dq.quant is None or q.quant is None or q.out.is_output:
                continue
            if dq.quant.same_as(q.quant) is not True:
                pair = (node_name(dq), node_name(q))
                self.refuse(ScalesDiffer(self.name, node_name(q), q.data.source, pair, (scale_of(dq), scale_of(q))))
                continue
            for reader in q.out.consumers:
                reader.rest_on(EQUAL)
            self.fire(EQUAL, dq, REMOVING, q.name)
            network.retarget(q.out, dq.data)
            network.remove(q)
            if not dq.out.consumers and not dq.out.is_output:
                self.fire(EQUAL, dq, REMOVING, dq.name)
                network.remove(dq)
