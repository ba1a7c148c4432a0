"""What convolutions take in behind them before there is any Q/DQ: as the passes have it, run on the float network."""

from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.operators import LayerKind
from qdqtool.model.pointwise import activation_input
from qdqtool.trt import importer, pipeline
from qdqtool.trt.layers import CONVOLUTIONS, Layer, constant_of
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.passes.point_wise_fusion import fusable
from qdqtool.trt.surroundings import is_sum
from qdqtool.trt.targets import TARGETS, Target

_ANY = TARGETS["trt8.5"]  # they take in the same on all, which a test holds


class Taken:
    """The layers of a float network's convolutions and deconvolutions, with what they took in as their ``fusion``.

    Residual sums are set apart: which of them a convolution takes depends on the Q/DQ around them, what writes each of
    their inputs does not. A network that cannot be simulated has none.

    Attributes:
        nodes: The layers by the ONNX node of the convolution.
        summed: Those that a residual sum alone reads, by the ONNX tensor that it reads: what they write, or that behind
            a pointwise layer that they did not take and that would be joined with the sum.
    """

    def __init__(self, model: Model, target: Target = _ANY) -> None:
        self.nodes: dict[str, Layer] = {}
        self.summed: dict[str, Layer] = {}
        try:
            network = importer.build(model)
            sums = [layer for layer in network.of_kind(LayerKind.ELEMENTWISE) if is_sum(layer)
                    and not any(activation_input(model, model.node(name)) for name in layer.nodes)]
            for layer in sums:
                network.set_kind(layer, LayerKind.OTHER)
            pipeline.run(network, target, GenericConvActFusion)
        except QdqtoolError:
            return
        self.nodes = {node: layer for layer in network.of_kind(*CONVOLUTIONS) for node in layer.nodes[:1]}
        for tensor in (t for layer in sums for t in layer.inputs if t.only_reader() is layer):
            last = tensor.producer
            read = [t for t in last.inputs if not constant_of(t)] if last is not None and fusable(last) else [tensor]
            maker = read[0].maker(*CONVOLUTIONS) if len(read) == 1 and read[0].only_reader() else None
            if maker is not None:
                self.summed[tensor.source] = maker


def taken(model: Model) -> Taken:
    """What a network's convolutions take in, kept until it is edited."""
    known: dict[str, Taken] = model.memory.setdefault("taken", {})
    return known[""] if known else known.setdefault("", Taken(model))
