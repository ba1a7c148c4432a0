"""What convolutions take in behind them before there is any Q/DQ: as the passes have it, run on the float network."""

from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.operators import CONVOLVE, LayerKind
from qdqtool.model.pointwise import activation_input
from qdqtool.trt import importer, pipeline
from qdqtool.trt.layers import Layer, Tensor, constant_of
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.passes.point_wise_fusion import KINDS
from qdqtool.trt.surroundings import is_sum
from qdqtool.trt.targets import TARGETS, Target

_BETWEEN = 200  # tensors between a sum and a convolution; networks have a handful
_ANY = TARGETS["trt8.5"]  # they take in the same on all, which a test holds


class Taken:
    """The layers of a float network's convolutions and deconvolutions, with what they took in as their ``fusion``.

    Residual sums are set apart: which of them a convolution takes depends on the Q/DQ around them, what writes each of
    their inputs does not. A network that cannot be simulated has none.

    Attributes:
        nodes: The layers by the ONNX node of the convolution.
        summed: Those that a residual sum alone reads, by the ONNX tensor that it reads: what they write, or that behind
            pointwise layers that they did not take.
        bare: Those of these tensors without an activation, so that the convolution takes the sum whatever else.
    """

    def __init__(self, model: Model, target: Target = _ANY) -> None:
        self.nodes: dict[str, Layer] = {}
        self.summed: dict[str, Layer] = {}
        self.bare: set[str] = set()
        try:
            network = importer.build(model)
            sums = [
                layer
                for layer in network.of_kind(LayerKind.ELEMENTWISE)
                if is_sum(layer)
                and not any(activation_input(model, model.node(name)) for name in layer.nodes)
            ]
            for layer in sums:
                network.set_kind(layer, LayerKind.OTHER)
            pipeline.run(network, target, GenericConvActFusion)
        except QdqtoolError:
            return
        self.nodes = {
            node: layer for layer in network.of_kind(*CONVOLVE) for node in layer.nodes[:1]
        }
        for layer in sums:
            found = {t: maker for t in layer.inputs if (maker := _behind(t, layer)) is not None}
            self.summed.update({t.source: maker for t, maker in found.items()})
            self.bare.update(t.source for t, maker in found.items() if _is_bare(maker, t))


def _is_bare(layer: Layer, tensor: Tensor) -> bool:
    """Whether a convolution has no activation in front of a sum's input: what scales it is folded with Q/DQ there."""
    while (scale := tensor.maker(LayerKind.SCALE)) is not None:
        tensor = scale.data
    return (
        layer.kind == LayerKind.CONVOLUTION and tensor is layer.out and not layer.fusion.activated
    )


def _behind(tensor: Tensor, reader: Layer) -> Layer | None:
    """The convolution of whose result alone, read by nothing else on the way, a tensor is a pointwise function."""
    read, inside = {tensor: None}, {reader}
    ends: set[Layer | None] = set()
    queue = [tensor]
    for current in queue:
        if len(queue) > _BETWEEN or current.is_output:
            return None
        between = current.maker(*KINDS)
        if between is None:
            ends.add(current.maker(*CONVOLVE))
        elif between not in inside:
            inside.add(between)
            more = [
                t for t in dict.fromkeys(between.inputs) if not constant_of(t) and t not in read
            ]
            read.update(dict.fromkeys(more))
            queue += more
    alone = all(inside.issuperset(t.consumers) for t in read)
    return ends.pop() if alone and len(ends) == 1 else None


def taken(model: Model) -> Taken:
    """What a network's convolutions take in, kept until it is edited."""
    known: dict[str, Taken] = model.cache.setdefault("taken", {})
    return known[""] if known else known.setdefault("", Taken(model))
