"""VanillaSwapWithPreceedingDQ (TensorRT's own spelling)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from qdqtool.qdq import QuantParams
from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, dq_of, reader_names, weaken
from qdqtool.trt.passes.vanilla_swap_with_following_q import commutes
from qdqtool.trt.trace import SWAPPING
from qdqtool.types import Evidence


class VanillaSwapWithPreceedingDQ(Pass):
    """Moves a DQ forward, past an operator that commutes with it, so that the operator runs in INT8.

    Cases:
        * DQ -> shuffle inserted around a Gemm, weights and data side (resnet18-qat-rtx2000-trt8510:
          DequantizeLinear_310 past ``transpose_before_Gemm_311``, DequantizeLinear_307 past
          ``reshape_before_Gemm_311``).
        * DQ -> MaxPool, nearest Resize, Slice or another shuffle, the DQ having no other reader (documented: DQ moves
          forward over commuting layers; not seen in a log). With a scale for each channel only past a Transpose, which
          says where the channels went (TensorFlow's weights; assumed).
        * Several readers: the DQ stays and is not copied for each (assumed).
    """

    def apply(self, network: Network) -> None:
        todo = deque(network.of_kind(net.DEQUANTIZE))
        while todo:
            dq = todo.popleft()
            op = dq.out.only_reader()
            if op is None:
                self._fan_out(dq)
                continue
            if not commutes(op) or op.attrs.get("squeeze_after") or dq_of(op.data) is not dq:
                continue
            inserted = op.attrs.get("inserted")
            if dq.quant is not None and dq.quant.axis is not None and not inserted:
                if not _carry_axis(dq, dq.quant, op):
                    continue
            self.running(dq)
            self.event(SWAPPING, dq.name, op.name)
            if not inserted:
                weaken(op, Evidence.DOCUMENTED)
            if op.op == "Cast":
                for reader in op.out.consumers:
                    self.assume(reader)
            op.attrs["dq_passed"] = True
            self._swap(network, dq, op)
            todo.append(dq)

    def _fan_out(self, dq: Layer) -> None:
        """Says what a DQ with several readers keeps float; what reads their results rests on an assumption then."""
        held = [r for r in dq.out.consumers if commutes(r) and not r.attrs.get("squeeze_after")]
        if not held:
            return
        self.refuse(dq, "many-consumers", consumers=tuple(reader_names(dq.out)))
        for op in held:
            for reader in (op, *op.out.consumers):
                self.assume(reader)

    @staticmethod
    def _swap(network: Network, dq: Layer, op: Layer) -> None:
        source, middle, out = dq.data, dq.out, op.out
        network.set_input(op, 0, source)
        network.set_input(dq, 0, middle)
        network.set_output(op, middle)
        network.set_output(dq, out)
        middle.shape = out.shape
        dq.rank = (op.rank[0], op.rank[1] + 1)


def _carry_axis(dq: Layer, quant: QuantParams, op: Layer) -> bool:
    """Gives the DQ the axis that its channels have behind a Transpose; False where that is not known."""
    if op.kind == net.IDENTITY:
        return True
    perm = op.attrs.get("perm")
    if perm is None or quant.axis is None:
        return False
    axis = quant.axis % len(perm)
    if axis not in perm:
        return False
    dq.quant = replace(quant, axis=list(perm).index(axis))
    return True
