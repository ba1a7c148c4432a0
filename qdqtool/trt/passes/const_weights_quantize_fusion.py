"""ConstWeightsQuantizeFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import FUSING


class ConstWeightsQuantizeFusion(Pass):
    """Quantizes constant weights at build time.

    Cases:
        * CONSTANT -> Q: constant ``<weights> + <Q>``, now INT8 (both complete 8.5 logs: one for each quantized
          convolution, 43 and 21). TensorRT 8.0 appends ``_quantize_scale_node`` to the Q's name.
        * A constant that several Qs read is quantized for each of them (assumed).
    """

    def apply(self, network: Network) -> None:
        for constant in network.of_kind(net.CONSTANT):
            readers = [r for r in constant.out.consumers if r.kind == net.QUANTIZE and r.data is constant.out]
            for q in readers:
                self.running(constant)
                self.event(FUSING, constant.name, q.name)
                name = f"{constant.name} + {q.name}{self.target.quantize_suffix}"
                if constant.out.only_reader() is q:
                    network.absorb_reader(constant, q, name)
                    constant.attrs["quantized"] = q.quant
                    continue
                self.assume(q)
                self._separate(network, constant, q, name)

    @staticmethod
    def _separate(network: Network, constant: Layer, q: Layer, name: str) -> None:
        """A quantized constant of its own for one of several Qs on the same weights."""
        copy = Layer(net.CONSTANT, name)
        copy.rank = constant.rank
        copy.attrs = dict(constant.attrs, quantized=q.quant, shared=constant.name)
        copy.nodes = list(q.nodes)
        out: Tensor = q.out
        network.remove(q)
        network.add(copy, [], [out])
