"""ConstEltFusion."""

from __future__ import annotations

import math

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import FUSING


class ConstEltFusion(Pass):
    """Turns an elementwise sum or product with a constant into a scale.

    Cases:
        * SUM or PROD of a tensor and a constant, the last-listed constant where both are: SCALE
          ``<constant> + <elementwise>`` (yolo-resnet18-orin-trt8502: decomposed BatchNormalization, whose subtraction
          and division are left; resnet18-qat-rtx2000-trt8510: the Gemm's bias).
        * Such a sum with its Relu right behind a convolution or a Gemm turned convolution: SCALE with Relu (assumed;
          otherwise no hidden fully connected layer could write INT8).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.ELEMENTWISE):
            if layer.attrs.get("operation") not in ("SUM", "PROD") or len(layer.inputs) != 2 or in_myelin(layer):
                continue
            constant = next((c for c in map(constant_of, reversed(layer.inputs)) if c is not None), None)
            if constant is None or constant.out.only_reader() is not layer:
                continue
            if layer.attrs.get("relu"):
                if not _of_convolution(layer):
                    continue
                layer.attrs["relu_name"] = layer.attrs.pop("relu")
                self.assume(layer)
            self.running(constant)
            self.event(FUSING, constant.name, layer.name)
            layer.attrs["per_channel"] = _count(constant) != 1
            layer.attrs["shift_only"] = layer.attrs["operation"] == "SUM"
            layer.name = f"{constant.name} + {layer.name}"
            network.drop_input(layer, layer.inputs.index(constant.out))
            network.remove(constant)
            network.set_kind(layer, net.SCALE)


def _of_convolution(layer: Layer) -> bool:
    """Whether the other operand comes straight from a convolution, which then takes sum and Relu."""
    producers = [t.producer for t in layer.inputs if t.only_reader() is layer]
    return any(p is not None and p.kind in (net.CONVOLUTION, net.DECONVOLUTION) for p in producers)


def _count(constant: Layer) -> int:
    dims = constant.attrs.get("dims")
    return 1 if dims is None else math.prod(dims)
