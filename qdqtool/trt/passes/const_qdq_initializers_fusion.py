"""ConstQDQInitializersFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.trt.trace import REMOVING


class ConstQDQInitializersFusion(Pass):
    """Folds scale and zero-point constants into each Q and DQ.

    Cases:
        * One ``Running`` for each Q and each DQ, then ``Removing`` for each parameter constant whose last reader this
          was: a constant shared by a Q and its DQ goes with the second of them (yolo-resnet18-orin-trt8502: 86 Q and
          86 DQ; resnet18-qat-rtx2000-trt8510: 51 and 51).
        * A parameter that is computed at run time stays, and the Q or DQ cannot be fused (assumed).
    """

    def apply(self, network: Network) -> None:
        for kind in (net.QUANTIZE, net.DEQUANTIZE):
            for layer in network.of_kind(kind):
                self.running(layer)
                if layer.attrs.get("computed_scale"):
                    self.refuse(layer, "scale-computed")
                while len(layer.inputs) > 1:
                    constant = constant_of(layer.inputs[1])
                    if constant is None:
                        break
                    network.drop_input(layer, 1)
                    if not constant.out.consumers and not constant.out.is_output:
                        self.event(REMOVING, constant.name)
                        network.remove(constant)
