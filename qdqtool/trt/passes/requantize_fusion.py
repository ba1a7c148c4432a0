"""A DQ followed by a Q of another scale."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, dq_of, weaken
from qdqtool.types import Evidence


class RequantizeFusion(Pass):
    """Joins DQ and Q of different scales into one requantization; TensorRT's name for this pass is not known.

    Cases:
        * INT8 convolution -> DQ -> Q, single readers: the convolution takes it,
          ``<Conv> + <DQ> + <Q>`` (NVIDIA/TensorRT issue 2527, engine names of an 8.5 build).
        * Elsewhere both become one INT8 to INT8 conversion (assumed).
    """

    evidence = Evidence.ASSUMED

    def apply(self, network: Network) -> None:
        for q in network.of_kind(net.QUANTIZE):
            dq = dq_of(q.data)
            if dq is None or (q.quant is not None and q.quant.per_channel):
                continue
            conv = dq.data.producer
            if (
                conv is not None
                and conv.kind in (net.CONVOLUTION, net.DECONVOLUTION)
                and conv.int8_out
                and dq.data.only_reader() is dq
                and dq.out.only_reader() is q
            ):
                self._into(network, conv, dq, q)
                continue
            name = f"{dq.name} + {q.name}"
            source = dq.data
            q.nodes = [*dq.nodes, *q.nodes]
            network.set_input(q, 0, source)
            q.name = name
            q.attrs["requantize"] = True
            if not dq.out.consumers and not dq.out.is_output:
                network.remove(dq)
            for reader in q.out.consumers:
                weaken(reader, Evidence.ASSUMED)

    @staticmethod
    def _into(network: Network, conv: Layer, dq: Layer, q: Layer) -> None:
        out = q.out
        name = f"{conv.name} + {dq.name} + {q.name}"
        nodes = [*dq.nodes, *q.nodes]
        network.remove(q)
        network.remove(dq)
        network.set_output(conv, out)
        conv.name = name
        conv.nodes.extend(nodes)
        weaken(conv, Evidence.DOCUMENTED)
