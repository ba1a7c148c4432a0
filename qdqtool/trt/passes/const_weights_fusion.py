"""ConstWeightsFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, node_name
from qdqtool.trt.trace import FUSING


class ConstWeightsFusion(Pass):
    """Puts quantized constant weights into the convolution that reads them.

    Cases:
        * INT8 constant -> INT8 convolution, single reader: ``<weights> + <Q> + <Conv>`` (both complete 8.5 logs).
        * Several convolutions read the constant: refused; TensorRT ends with "Could not fuse 2nd input (kernel
          weights) of CONVOLUTION" (NVIDIA/TensorRT issues 2131 and 1864).
    """

    def apply(self, network: Network) -> None:
        for constant in network.of_kind(net.CONSTANT):
            readers = [r for r in constant.out.consumers if r.kind in net.WEIGHTED and r.int8]
            if not readers:
                continue
            if len(constant.out.consumers) != 1 or constant.out.is_output:
                names = tuple(node_name(r) for r in constant.out.consumers)
                for reader in readers:
                    self.refuse(reader, "weights-shared", weight=constant.name, convolutions=names)
                continue
            conv = readers[0]
            self.running(constant)
            self.event(FUSING, constant.name, conv.name)
            network.drop_input(conv, conv.inputs.index(constant.out))
            conv.name = f"{constant.name} + {conv.name}"
            conv.attrs["fused_weights"] = True
            network.remove(constant)
