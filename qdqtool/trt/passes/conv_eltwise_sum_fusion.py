"""ConvEltwiseSumFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, constant_of, weights_position
from qdqtool.trt.trace import FUSING


class ConvEltwiseSumFusion(Pass):
    """Joins a convolution that writes float and the sum it feeds.

    Cases:
        * CONVOLUTION -> SUM (with its Relu), single reader, equal shapes: ``<Conv> + <Add> + <Relu>``, ``INT8, FLOAT ->
          FLOAT`` (yolo-resnet18-orin-trt8502, 8 of 8). The Q behind stays a conversion even if it is the only reader.
        * Both inputs of the sum are convolutions: the later-listed one takes it (resnet18-a100-qat: the downsample
          branch).
        * The residual comes from a DQ whose Add is not quantized: taken as float, the DQ stays
          (resnet18-a100-qat-residual, DequantizeLinear_291).
    """

    def apply(self, network: Network) -> None:
        for conv in network.of_kind(net.CONVOLUTION):
            add = conv.out.only_reader()
            if add is None or add.kind != net.ELEMENTWISE or add.attrs.get("operation") != "SUM":
                continue
            if len(add.inputs) != 2 or not _can_take(conv):
                continue
            last = add.inputs[1].producer
            if last is not None and last is not conv and last.kind == net.CONVOLUTION and _can_take(last):
                if last.out.only_reader() is add:
                    conv = last
            self._take(network, conv, add)

    def _take(self, network: Network, conv: Layer, add: Layer) -> None:
        other = next((t for t in add.inputs if t is not conv.out), None)
        if other is None or constant_of(other) is not None:
            return
        if other.shape is not None and conv.out.shape is not None and other.shape != conv.out.shape:
            return
        self.running(conv)
        self.event(FUSING, conv.name, add.name)
        network.absorb_reader(conv, add, f"{conv.name} + {add.name}")
        conv.residual = other
        conv.attrs["activated"] = True


def _can_take(conv: Layer) -> bool:
    return not conv.int8_out and not conv.attrs.get("activated") and weights_position(conv) is None
