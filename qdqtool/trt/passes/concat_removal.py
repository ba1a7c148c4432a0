"""Concatenation elimination."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import COPY_STOMPING, COPY_STRIDING, ELIMINATING_CONCAT, RETARGETING


class ConcatRemoval(Pass):
    """Lets the inputs of a Concat be written straight into its output.

    Cases:
        * ``Eliminating concatenation <c>``, then for each input ``Retargeting <t> to <u>``
          (yolo-resnet18-orin-trt8502, yolov8-orin-trt8412-excerpts).
        * The input is written by a Resize: a copy layer ``<t> copy``, "because input does not support striding"
          (yolo-resnet18-orin-trt8502).
        * The input is already a view of, or written into, another tensor, or is the network's input: a copy "because
          of stomping hazard" (yolov8-orin-trt8412-excerpts has one such line; the condition is assumed).
    """

    def apply(self, network: Network) -> None:
        taken: set[int] = set()
        for concat in reversed(network.of_kind(net.CONCATENATION)):
            if in_myelin(concat):
                continue
            self.unowned(ELIMINATING_CONCAT, concat.name)
            concat.attrs["eliminated"] = True
            copies: list[tuple[str, Tensor]] = []
            for tensor in concat.inputs:
                kind = self._how(tensor, taken)
                self.unowned(kind, tensor.name, concat.out.name)
                if kind == RETARGETING:
                    taken.add(id(tensor))
                    tensor.view_of = concat.out
                else:
                    copies.append((f"{tensor.name} copy", tensor))
            concat.attrs["copies"] = copies

    @staticmethod
    def _how(tensor: Tensor, taken: set[int]) -> str:
        producer: Layer | None = tensor.producer
        if producer is not None and producer.kind == net.RESIZE:
            return COPY_STRIDING
        if producer is None or id(tensor) in taken or producer.attrs.get("eliminated") or producer.kind == net.CONSTANT:
            return COPY_STOMPING
        return RETARGETING
