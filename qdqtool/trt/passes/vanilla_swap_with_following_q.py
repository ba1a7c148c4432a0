"""VanillaSwapWithFollowingQ."""

from __future__ import annotations

from collections import deque

from qdqtool.qdq import precision_of
from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, node_name, reader_names
from qdqtool.trt.trace import SWAPPING


def commutes(layer: Layer) -> bool:
    """Whether an operator gives the same result before and after quantization: it only picks or moves values."""
    if layer.kind == net.IDENTITY and layer.op == "Cast":
        return all(precision_of(t.elem_type).is_float for t in (*layer.inputs, *layer.outputs))
    if layer.kind in (net.SHUFFLE, net.SLICE, net.IDENTITY):
        return len(layer.inputs) == 1
    if layer.kind == net.PADDING:
        return bool(layer.attrs.get("zeros"))  # zero is quantized to zero
    if layer.kind == net.POOLING:
        return layer.attrs.get("pooling") == "MAX" and len(layer.inputs) == 1
    return layer.kind == net.RESIZE and layer.attrs.get("mode") == "nearest"


class VanillaSwapWithFollowingQ(Pass):
    """Moves a Q backward, past an operator that commutes with it, so that the operator runs in INT8.

    Cases:
        * Resize, nearest (yolo-resnet18-orin-trt8502), MaxPool and Flatten (resnet18-qat-rtx2000-trt8510), Slice
          (yolov8-orin-trt8412-excerpts); Reshape, Transpose, Squeeze, Unsqueeze, Split and Identity alike (documented).
        * Pad with zeros (a published engine of a ResNet with a Pad in front of its MaxPool runs both in INT8).
        * The operator's output must have the Q as its only reader, once equal Qs were merged: MaxPool_12 of
          resnet18-qat-rtx2000-trt8510 is swapped only then, /backbone/maxpool/MaxPool of yolo-resnet18-orin-trt8502,
          which an Add reads as well, never.

    Tensor names stay with the position: the tensor between both keeps its name and becomes INT8.
    """

    def apply(self, network: Network) -> None:
        todo = deque(network.near(net.QUANTIZE))
        refused: set[int] = set()
        while todo:
            q = todo.popleft()
            op = q.data.producer
            if op is None or q.attrs.get("computed_scale"):
                continue
            if not commutes(op):
                if op.kind == net.RESIZE:
                    self.refuse(op, "not-commuting", op=op.op, mode=op.attrs.get("mode"), q=node_name(q))
                continue
            if q.data.only_reader() is not q:
                if op.id in refused:
                    continue  # said once for all Qs behind it
                refused.add(op.id)
                self.refuse(op, "many-consumers", consumers=tuple(reader_names(q.data)), q=node_name(q))
                continue
            if q.quant is not None and q.quant.per_channel:
                continue
            self.running(op)
            self.event(SWAPPING, op.name, q.name)
            swap(network, op, q)
            todo.append(q)


def swap(network: Network, op: Layer, q: Layer) -> None:
    """Puts a Q in front of the operator that it is the only reader of."""
    source, middle, out = op.data, op.out, q.out
    network.set_input(q, 0, source)
    network.set_input(op, 0, middle)
    network.set_output(q, middle)
    network.set_output(op, out)
    out.shape, middle.shape = middle.shape, source.shape
