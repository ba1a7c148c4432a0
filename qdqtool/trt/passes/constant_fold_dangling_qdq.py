"""The "constant fold dangling QDQ" pass."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.types import Evidence


class ConstantFoldDanglingQDQ(Pass):
    """Folds a DQ (or Q) of a constant that no layer absorbed: weights whose layer runs in float.

    Cases:
        * INT8 constant -> DQ -> float layer: a float constant, no conversion at run time. The log has a heading for
          it ("QDQ graph optimizer constant fold dangling QDQ pass") and no case was seen under it (assumed).
    """

    evidence = Evidence.ASSUMED

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.QUANTIZE, net.DEQUANTIZE):
            constant = constant_of(layer.data)
            if constant is None or layer.out.is_output:
                continue
            nodes = list(layer.nodes)
            if constant.out.only_reader() is layer:
                network.absorb_reader(constant, layer, constant.name)
            else:
                network.drop_input(layer, 0)
                network.set_kind(layer, net.CONSTANT)
                layer.nodes = nodes
