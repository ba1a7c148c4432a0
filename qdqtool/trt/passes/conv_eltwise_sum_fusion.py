"""ConvEltwiseSumFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of, dq_of, weights_position
from qdqtool.trt.trace import FUSING


class ConvEltwiseSumFusion(Pass):
    """Joins a convolution that writes float and the sum it feeds.

    Cases:
        * CONVOLUTION -> SUM (with its Relu), single reader, equal shapes: ``<Conv> + <Add> + <Relu>``, ``INT8, FLOAT ->
          FLOAT`` (yolo-resnet18-orin-trt8502, 8 of 8). The Q behind stays a conversion even if it is the only reader.
        * Both inputs of the sum are convolutions: the one that the optimizer visits first takes it, that is the
          later-listed input (resnet18-a100-qat: the downsample branch).
        * The residual comes from a DQ whose Add is not quantized: taken as float, the DQ stays
          (resnet18-a100-qat-residual, DequantizeLinear_291).
    """

    def apply(self, network: Network) -> None:
        for conv in network.of_kind(net.CONVOLUTION):
            if conv.int8_out or conv.attrs.get("activated") or weights_position(conv) is not None:
                continue
            add = conv.out.only_reader()
            if add is None or add.kind != net.ELEMENTWISE or add.attrs.get("operation") != "SUM":
                continue
            other = next((t for t in add.inputs if t is not conv.out), None)
            if other is None or len(add.inputs) != 2 or constant_of(other) is not None:
                continue
            if other.shape is not None and conv.out.shape is not None and other.shape != conv.out.shape:
                continue
            self.running(conv)
            self.event(FUSING, conv.name, add.name)
            network.absorb_reader(conv, add, f"{conv.name} + {add.name}")
            conv.residual = other
            conv.attrs["activated"] = True
            if dq_of(other) is not None:
                conv.attrs["residual_dq"] = True
