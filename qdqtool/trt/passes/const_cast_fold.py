"""ConstCastFold."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.trt.trace import FUSING


class ConstCastFold(Pass):
    """Folds an Identity or Cast of a constant into the constant.

    Cases:
        * CONSTANT -> IDENTITY: ``<constant> + <identity>`` (yolo-resnet18-orin-trt8502: ``bn2.bias`` with
          ``Identity_0``). A constant that several layers read is folded for each.
        * A Cast of weights that their DQ moved past, in half-precision exports (assumed).
    """

    def apply(self, network: Network) -> None:
        for identity in network.of_kind(net.IDENTITY):
            constant = constant_of(identity.data)
            if constant is None:
                continue
            self.running(constant)
            self.event(FUSING, constant.name, identity.name)
            name = f"{constant.name} + {identity.name}"
            if constant.out.only_reader() is identity:
                network.absorb_reader(constant, identity, name)
                continue
            network.drop_input(identity, 0)
            network.set_kind(identity, net.CONSTANT)
            identity.attrs.update(constant.attrs)
            identity.name = name
