"""PointWiseFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import MAX_JOINED, Pass, constant_of, dq_of, weaken
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import FUSING
from qdqtool.types import Evidence


class PointWiseFusion(Pass):
    """Joins pointwise layers into one kernel, ``PWN(a, b)``.

    Cases:
        * Activation (other than Relu), elementwise, unary, scale by one number or an earlier ``PWN``, whose only reader
          is another of these (yolo-resnet18-orin-trt8502: the decomposed BatchNormalization, with exactly the logged
          nesting; yolov8-orin-trt8412-excerpts: ``Add_5`` with ``Div_1``).
        * SiLU: Sigmoid with Mul, ``PWN(<Sigmoid>, <Mul>)`` (NVIDIA/TensorRT issue 3385, 8.5.2 with Q/DQ;
          ``PWN(PWN(s), PWN(m))`` in 10.x); with a residual Add behind it as well (issue 2204, 8.4.1).
        * On a target where Conv+SiLU+Add fuse, the SiLU is left apart from an Add whose other input comes from a DQ.
        * A sum that a bare convolution feeds is left for ConvEltwiseSumFusion (assumed), and so is one whose inputs
          all come from DQs, which is quantized by itself (yolov8-orin-trt8412-excerpts keeps such an Add).
    """

    def apply(self, network: Network) -> None:
        kinds = (net.ACTIVATION, net.ELEMENTWISE, net.UNARY, net.SCALE, net.POINTWISE)
        for first in network.of_kind(*kinds):
            if not network.alive(first):
                continue
            layer = first
            while _fusable(layer):
                reader = layer.out.sole_reader()
                if reader is None or not _fusable(reader) or len(layer.nodes) + len(reader.nodes) > MAX_JOINED:
                    break
                if self.target.residual_through_activation and _quantized_residual(layer, reader):
                    break
                layer = self._fuse(network, layer, reader)

    def _fuse(self, network: Network, layer: Layer, reader: Layer) -> Layer:
        self.running(layer)
        self.event(FUSING, layer.name, reader.name)
        name = f"PWN({self._member(layer)}, {self._member(reader)})"
        if reader.op == "Add" and layer.kind == net.POINTWISE:
            weaken(layer, Evidence.DOCUMENTED)
        rank = reader.rank
        network.absorb_reader(layer, reader, name)
        layer.rank = rank
        unique = dict.fromkeys(layer.inputs)
        for tensor in list(unique):
            while layer.inputs.count(tensor) > 1:
                network.drop_input(layer, len(layer.inputs) - 1 - layer.inputs[::-1].index(tensor))
        if layer.kind != net.POINTWISE:
            network.set_kind(layer, net.POINTWISE)
        return layer

    def _member(self, layer: Layer) -> str:
        if self.target.multiply_in_pointwise_name and layer.kind != net.POINTWISE:
            return f"PWN({layer.name})"
        return layer.name


def _fusable(layer: Layer) -> bool:
    if in_myelin(layer) or len(layer.outputs) != 1:
        return False
    if layer.kind == net.ACTIVATION:
        return layer.attrs.get("activation") != "RELU"
    if layer.kind == net.SCALE:
        return not layer.attrs.get("per_channel", True)
    if layer.kind == net.ELEMENTWISE:
        return not (layer.attrs.get("relu") or _residual(layer) or all(map(dq_of, layer.inputs)))
    return layer.kind in (net.UNARY, net.POINTWISE)


def _quantized_residual(layer: Layer, reader: Layer) -> bool:
    """Whether a convolution's activation feeds an Add whose other input is quantized."""
    producers = {id(t.producer): t.producer for t in layer.inputs}
    conv = next(iter(producers.values())) if len(producers) == 1 else None
    if conv is None or conv.kind != net.CONVOLUTION or reader.attrs.get("operation") != "SUM":
        return False
    return any(dq_of(t) is not None for t in reader.inputs if t is not layer.out)


def _residual(layer: Layer) -> bool:
    """A sum of which one input is a convolution's own output (through BatchNormalization at most)."""
    if layer.attrs.get("operation") != "SUM":
        return False
    for tensor in layer.inputs:
        producer = tensor.producer
        if producer is not None and producer.kind == net.SCALE and tensor.only_reader() is layer and producer.inputs:
            producer = producer.data.producer
        if (
            producer is not None
            and producer.kind == net.CONVOLUTION
            and not producer.attrs.get("activated")
            and constant_of(tensor) is None
        ):
            return True
    return False
