"""ConstShuffleFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.trt.trace import FUSING


class ConstShuffleFusion(Pass):
    """Folds a shuffle of a constant into the constant.

    Cases:
        * CONSTANT -> SHUFFLE, the constant having no other reader: ``<constant> + <shuffle>``
          (yolo-resnet18-orin-trt8502: BatchNormalization parameters; resnet18-qat-rtx2000-trt8510: ``fc.bias``, and
          the quantized weights ``fc.weight + QuantizeLinear_309`` with ``transpose_before_Gemm_311``).
    """

    def apply(self, network: Network) -> None:
        for shuffle in network.of_kind(net.SHUFFLE):
            constant = constant_of(shuffle.data)
            if constant is None or constant.out.only_reader() is not shuffle:
                continue
            self.running(constant)
            self.event(FUSING, constant.name, shuffle.name)
            network.absorb_reader(constant, shuffle, f"{constant.name} + {shuffle.name}")
