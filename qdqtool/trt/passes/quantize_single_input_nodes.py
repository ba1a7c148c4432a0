"""QuantizeSingleInputNodes."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, dq_of, only_q, reader_names, weaken
from qdqtool.trt.passes.quantize_double_input_nodes import drop_reader
from qdqtool.trt.trace import REMOVING
from qdqtool.types import Evidence


class QuantizeSingleInputNodes(Pass):
    """Lets an average pooling between a DQ and a Q run in INT8.

    Cases:
        * DQ -> global average pooling -> Q, single readers (resnet18-qat-rtx2000-trt8510; outcome also in
          resnet18-a100-qat-residual-qgap). There is no ``fusing`` line.
        * Average pooling with a window alike (documented: pooling is quantizable).
        * One side only: refused; the other stays in the engine as a conversion.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.POOLING):
            if layer.attrs.get("pooling") != "AVERAGE":
                continue
            dq, q = dq_of(layer.data), only_q(layer.out)
            if dq is None and q is None:
                continue
            if dq is None or q is None:
                reason = "input-not-dequantized" if dq is None else "output-not-quantized"
                self.refuse(layer, reason, consumers=tuple(reader_names(layer.out)), input=layer.data.source)
                continue
            if layer.op == "AveragePool":
                weaken(layer, Evidence.DOCUMENTED)
            self.running(layer)
            self.event(REMOVING, q.name)
            out = q.out
            layer.nodes.extend(q.nodes)
            network.remove(q)
            network.set_output(layer, out)
            if drop_reader(network, dq, layer):
                self.event(REMOVING, dq.name)
            layer.int8 = layer.int8_out = True
