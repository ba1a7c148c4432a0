"""QuantizeConvWithResidualAdd."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
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
from qdqtool.trt.passes.quantize_double_input_nodes import can_quantize, drop_reader
from qdqtool.trt.trace import FUSING, FUSING_INTO, REMOVING, SWAPPING


class QuantizeConvWithResidualAdd(Pass):
    """Quantizes a convolution together with the residual Add that it feeds.

    Cases:
        * Both inputs from DQs; the output goes straight to an Add (with its Relu), no Q between; the Add's other input
          is a DQ; the Add's only reader is a Q: ``INT8, INT8 -> INT8`` (resnet18-qat-rtx2000-trt8510, 8 of 8; the
          residual's scale may differ from the output's).
        * Residual float: refused, ``residual-float`` (yolo-resnet18-orin-trt8502, resnet18-a100-qat).
        * The Add is not quantized: refused, ``add-output-not-quantized`` (resnet18-a100-qat-residual, last block).
        * Q/DQ on the convolution's side as well: refused, ``residual-both-quantized``; the Add is a layer of its own
          (yolov8-orin-trt8412-excerpts).
        * An activation between convolution and Add: refused unless the target says that it fuses.
    """

    def apply(self, network: Network) -> None:
        for conv in network.of_kind(net.CONVOLUTION):
            position = weights_position(conv)
            if position is None or conv.int8:
                continue
            add = self._add_behind(conv)
            if add is None or not can_quantize(conv, position):
                continue
            other = next((t for t in add.inputs if t is not conv.out), None)
            if other is None or constant_of(other) is not None:
                continue
            dq = dq_of(other)
            if dq is None:
                self.refuse(conv, "residual-float", add=node_name(add), residual=other.source)
                continue
            q = only_q(add.out)
            if q is None:
                self.refuse(
                    conv, "add-output-not-quantized", add=node_name(add), consumers=tuple(reader_names(add.out))
                )
                continue
            if conv.attrs.get("activated"):
                weaken(conv, self.target.residual_evidence)
            self._fuse(network, conv, position, add, dq, q)

    def _add_behind(self, conv: Layer) -> Layer | None:
        reader = conv.out.only_reader()
        if reader is not None and reader.kind == net.QUANTIZE:
            self._both(conv, reader)
            return None
        if reader is None or reader.kind != net.ELEMENTWISE or reader.attrs.get("operation") != "SUM":
            return None
        if conv.attrs.get("activated") and not self.target.residual_through_activation:
            self.refuse(conv, "activation-before-add", add=node_name(reader))
            weaken(conv, self.target.residual_evidence)
            return None
        return reader if len(reader.inputs) == 2 else None

    def _both(self, conv: Layer, q: Layer) -> None:
        dq = q.out.only_reader()
        add = dq.out.only_reader() if dq is not None and dq.kind == net.DEQUANTIZE else None
        if add is not None and add.kind == net.ELEMENTWISE and all(map(dq_of, add.inputs)):
            self.refuse(conv, "residual-both-quantized", add=node_name(add), q=node_name(q))

    def _fuse(self, network: Network, conv: Layer, position: int, add: Layer, dq: Layer, q: Layer) -> None:
        conv_dq, weight_dq = dq_of(conv.data), dq_of(conv.inputs[position])
        assert conv_dq is not None and weight_dq is not None
        self.running(conv)
        self.event(SWAPPING, add.name, q.name)
        self.event(FUSING_INTO, q.name, conv.name, pass_name="QuantizeDoubleInputNodes")
        pair = f"({conv_dq.name} and {weight_dq.name})"
        self.event(FUSING_INTO, pair, conv.name, pass_name="QuantizeDoubleInputNodes")
        self.event(REMOVING, q.name)
        residual: Tensor = dq.data
        for used in (conv_dq, weight_dq):
            if drop_reader(network, used, conv):
                self.event(REMOVING, used.name)
        weights = constant_of(conv.inputs[position])
        if weights is not None and weights.out.only_reader() is conv:
            self.event(FUSING, weights.name, conv.name, pass_name="ConstWeightsFusion")
            network.drop_input(conv, position)
            network.remove(weights)
            conv.name = f"{weights.name} + {conv.name}"
            conv.attrs["fused_weights"] = True
        self.event(FUSING, conv.name, add.name, pass_name="ConvEltwiseSumFusion")
        if drop_reader(network, dq, add):
            self.event(REMOVING, dq.name)
        q_out = q.out
        network.remove(q)
        network.absorb_reader(conv, add, f"{conv.name} + {add.name}")
        network.set_output(conv, q_out)
        conv.residual = residual
        conv.int8 = conv.int8_out = True
        conv.attrs["activated"] = True
