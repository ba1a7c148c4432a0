"""QuantizeDoubleInputNodes."""

from __future__ import annotations

import numpy as np

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import (
    Pass,
    constant_of,
    dq_of,
    node_name,
    only_q,
    reader_names,
    weaken,
    weights_position,
)
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import FUSING_INTO, REMOVING
from qdqtool.types import Evidence, Precision


def can_quantize(layer: Layer, position: int) -> bool:
    """Whether both inputs of a weighted layer come from DQs that it can absorb."""
    return refusal_of(layer, position) is None


def refusal_of(layer: Layer, position: int) -> tuple[str, dict[str, object]] | None:
    """Why a weighted layer cannot run in INT8, None when it can."""
    data, weights = dq_of(layer.data), dq_of(layer.inputs[position])
    if data is None:
        producer = layer.data.producer
        return "input-not-dequantized", {
            "producer": node_name(producer) if producer else layer.data.name,
            "op": producer.op or producer.kind if producer else "Input",
        }
    if weights is None:
        return "weights-not-dequantized", {"weight": layer.attrs.get("weights", "")}
    if data.attrs.get("computed_scale") or weights.attrs.get("computed_scale"):
        return "scale-computed", {"dq": node_name(data)}
    kinds = [_kind(dq) for dq in (data, weights)]
    if None in kinds or kinds[0] != kinds[1]:
        written = tuple(str(dq.quant.precision) if dq.quant is not None else "" for dq in (data, weights))
        return "types", {"dq": node_name(data), "weight_dq": node_name(weights), "types": written}
    if data.quant is not None and data.quant.per_channel:
        return "activation-per-channel", {"dq": node_name(data), "scales": data.quant.scale_shape}
    for dq in (data, weights):
        zero = dq.quant.zero_point if dq.quant is not None else None
        if zero is not None and np.any(zero):
            return "zero-point", {"dq": node_name(dq), "zero_point": int(zero[np.argmax(zero != 0)])}
    axis = layer.attrs.get("axis")
    if weights.quant is not None and weights.quant.per_channel and not layer.attrs.get("from_matmul"):
        if axis is not None and weights.quant.axis is not None:
            rank = len(layer.attrs.get("weight_dims", ())) or 4
            if weights.quant.axis % rank != axis:
                return "weights-axis", {"dq": node_name(weights), "axis": weights.quant.axis, "expected": axis}
    if layer.attrs.get("constant_weights") is False and layer.kind != net.MATRIX_MULTIPLY:
        if constant_of(weights.data) is None:
            return "weights-not-constant", {"weight": layer.attrs.get("weights", "")}
    return None


def _kind(dq: Layer) -> str | None:
    """``INT8`` or ``FP8``, the types that both inputs must share; None for a type that no convolution computes in."""
    quant = dq.quant
    if quant is None or quant.precision == Precision.FP8:
        return None if quant is None else "FP8"
    known = quant.precision in (Precision.INT8, Precision.UINT8)
    return "INT8" if known or (quant.precision == Precision.UNKNOWN and not quant.has_zero_point) else None


def drop_reader(network: Network, dq: Layer, reader: Layer) -> bool:
    """Makes ``reader`` read the DQ's INT8 input; says whether the DQ was thereby removed."""
    network.replace_reader(dq.out, dq.data, reader)
    if dq.out.consumers or dq.out.is_output:
        return False
    network.remove(dq)
    return True


class QuantizeDoubleInputNodes(Pass):
    """Lets a layer with two quantized inputs compute in INT8.

    Cases:
        * Convolution whose data and weights come from DQs: both DQs are absorbed, it runs in INT8 (64 of 64
          convolutions in the two complete 8.5 logs).
        * Its output, BatchNormalization and activation folded, has a Q as its only reader: that is absorbed first and
          the output is INT8. Any other reader, or a network output: the output is float.
        * ConvTranspose alike (centernet-resnet34-qat-trt80, 3 of 3).
        * MatMul of two dequantized tensors, and an elementwise or pointwise layer whose inputs all come from DQs and
          whose only reader is a Q: INT8 (an INT8 pointwise Add is seen in yolov8-orin-trt8412-excerpts and in
          bev-blackwell-trt10; the pass line for it is assumed). Without the Q they stay float: a layer without weights
          takes INT8 only if it gives INT8 (documented).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(*net.WEIGHTED):
            self._weighted(network, layer)
        for layer in network.of_kind(net.ELEMENTWISE, net.POINTWISE):
            if len(layer.inputs) >= 2 and not in_myelin(layer):
                self._pointwise(network, layer)

    def _weighted(self, network: Network, layer: Layer) -> None:
        if layer.int8 or in_myelin(layer):
            return
        position = weights_position(layer)
        if position is None:
            dq = dq_of(layer.data)
            self.refuse(
                layer,
                "weights-not-dequantized" if dq is not None else "input-not-dequantized",
                weight=layer.attrs.get("weights", ""),
                producer=node_name(layer.data.producer) if layer.data.producer else layer.data.name,
                op=layer.data.producer.op if layer.data.producer else "Input",
            )
            return
        refused = refusal_of(layer, position)
        if refused is not None:
            self.refuse(layer, refused[0], **refused[1])
            return
        if layer.kind == net.MATRIX_MULTIPLY:
            weaken(layer, Evidence.DOCUMENTED)
        if layer.kind == net.DECONVOLUTION and self.target.version != (8, 0):
            weaken(layer, Evidence.DOCUMENTED)
        self._absorb(network, layer, (0, position))
        if not layer.int8_out:
            self._explain_output(layer)

    def _pointwise(self, network: Network, layer: Layer) -> None:
        q = only_q(layer.out)
        if not all(dq_of(t) for t in layer.inputs):
            return
        if q is None:
            self.refuse(layer, "output-not-quantized", consumers=tuple(reader_names(layer.out)))
            return
        weaken(layer, Evidence.SEEN if layer.op == "Add" and len(layer.nodes) == 1 else Evidence.ASSUMED)
        self._absorb(network, layer, tuple(range(len(layer.inputs))))

    def _absorb(self, network: Network, layer: Layer, positions: tuple[int, ...]) -> None:
        dqs = [dq for dq in (dq_of(layer.inputs[p]) for p in positions) if dq is not None]
        self.running(layer)
        q = only_q(layer.out)
        if q is not None and (q.attrs.get("computed_scale") or (q.quant is not None and q.quant.per_channel)):
            q = None
        if q is not None:
            self.event(FUSING_INTO, q.name, layer.name)
        self.event(FUSING_INTO, f"({' and '.join(d.name for d in dqs)})", layer.name)
        if q is not None:
            self.event(REMOVING, q.name)
            out = q.out
            layer.nodes.extend(q.nodes)
            network.remove(q)
            network.set_output(layer, out)
            layer.int8_out = True
        for dq in dict.fromkeys(dqs):
            if drop_reader(network, dq, layer):
                self.event(REMOVING, dq.name)
        layer.int8 = True
        if dqs and dqs[0].quant is not None:
            layer.attrs["quantized_as"] = dqs[0].quant.precision

    def _explain_output(self, layer: Layer) -> None:
        out = layer.out
        readers = reader_names(out)
        qs = [r for r in out.consumers if r.kind == net.QUANTIZE]
        if not qs:
            self.refuse(layer, "output-not-quantized", consumers=tuple(readers), reached_output=out.is_output)
            if any(op == "PRelu" for _, op in readers):
                self.assume(layer)  # no build shows whether it fuses
        elif len(qs) == len(out.consumers) and not out.is_output:
            scales = tuple(None if q.quant is None or q.quant.scale is None else q.quant.scale.tolist() for q in qs)
            self.refuse(layer, "output-different-scales", quantizers=tuple(map(node_name, qs)), scales=scales)
            self.assume(layer)
        else:
            self.refuse(
                layer,
                "output-many-consumers",
                consumers=tuple(readers),
                quantizers=tuple(map(node_name, qs)),
                float_consumers=tuple(n for n, op in readers if op != "QuantizeLinear"),
            )
