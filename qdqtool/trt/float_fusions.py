"""Fusions of convolutions in the float network, before any Q/DQ exists.

Insertion and findings need to know which layers (BatchNormalization, activation) TensorRT fuses
into each convolution. This module runs the simulated passes on the float network to find out.
"""

from qdqtool.errors import QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.operators import CONVOLVE, LayerKind
from qdqtool.patterns.pointwise import activation_input
from qdqtool.trt import importer, pipeline
from qdqtool.trt.layers import Layer, Tensor, constant_before
from qdqtool.trt.neighbors import is_sum
from qdqtool.trt.network import Network
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.passes.point_wise_fusion import POINTWISE_KINDS
from qdqtool.trt.targets import TARGETS

# Maximum number of tensors between a residual Add and its convolution; real networks have few.
MAX_TENSORS_BETWEEN = 200
# The target does not matter, because all targets fuse the same layers (a test checks this).
ANY_TARGET = TARGETS["trt8.5"]


class FloatFusions:
    """Fused layers of the convolutions and deconvolutions of a float network.

    Residual Adds are not fused here: whether a convolution fuses an Add depends on the Q/DQ around
    the Add. All attributes are empty if the network cannot be simulated.

    Attributes:
        layers: Layer of each convolution by its ONNX node. ``fusion`` of a layer describes the
            fused layers.
        add_inputs: Convolution layer upstream of an input of a residual Add, by the ONNX tensor
            that the Add reads. Between convolution and Add are only pointwise layers, whose tensors
            no other layer reads. An Add input without such a convolution has no entry.
        add_inputs_without_activation: Keys of ``add_inputs`` without an activation between
            convolution and Add. Every target fuses such an Add into the convolution.
    """

    def __init__(self, model: Model) -> None:
        self.layers: dict[str, Layer] = {}
        self.add_inputs: dict[str, Layer] = {}
        self.add_inputs_without_activation: set[str] = set()
        try:
            network = importer.build(model)
            residual_adds = _exclude_residual_adds(network, model)
            pipeline.run(network, ANY_TARGET, last=GenericConvActFusion)
        except QdqtoolError:
            return
        for layer in network.layers_of_kind(*CONVOLVE):
            if layer.nodes:
                self.layers[layer.nodes[0]] = layer
        for add in residual_adds:
            for tensor in add.inputs:
                self._record_add_input(tensor, add)

    def _record_add_input(self, tensor: Tensor, add: Layer) -> None:
        convolution = _find_convolution(tensor, add)
        if convolution is None:
            return
        self.add_inputs[tensor.source] = convolution
        if _has_no_activation(convolution, tensor):
            self.add_inputs_without_activation.add(tensor.source)


def _exclude_residual_adds(network: Network, model: Model) -> list[Layer]:
    """Change residual Adds in place to a kind that no pass fuses; return these Adds."""
    adds = [
        layer
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE)
        if is_sum(layer) and not _is_part_of_activation(layer, model)
    ]
    for add in adds:
        network.set_kind(add, LayerKind.OTHER)
    return adds


def _is_part_of_activation(layer: Layer, model: Model) -> bool:
    return any(activation_input(model, model.node(name)) for name in layer.nodes)


def _find_convolution(tensor: Tensor, add: Layer) -> Layer | None:
    """Return the convolution upstream of an Add's input, with only pointwise layers between.

    None if the tensor also depends on a layer other than this convolution, if a layer outside this
    part of the network reads a tensor between convolution and Add, or if there are more than
    :data:`MAX_TENSORS_BETWEEN` such tensors.
    """
    queue, visited, layers = [tensor], {tensor}, {add}
    ends: set[Layer | None] = set()
    for current in queue:
        if len(queue) > MAX_TENSORS_BETWEEN or current.is_output:
            return None
        pointwise = current.producer_of_kind(*POINTWISE_KINDS)
        if pointwise is None:
            ends.add(current.producer_of_kind(*CONVOLVE))
            continue
        if pointwise not in layers:
            layers.add(pointwise)
            operands = [t for t in _list_variable_operands(pointwise) if t not in visited]
            visited.update(operands)
            queue += operands
    if len(ends) != 1 or not all(layers.issuperset(tensor.consumers) for tensor in queue):
        return None
    return ends.pop()


def _list_variable_operands(layer: Layer) -> dict[Tensor, None]:
    return dict.fromkeys(tensor for tensor in layer.inputs if not constant_before(tensor))


def _has_no_activation(convolution: Layer, tensor: Tensor) -> bool:
    """Return whether no activation is between a convolution and a tensor.

    SCALE layers may be between them, because they are folded into a convolution even with Q/DQ.
    False for a deconvolution.
    """
    while (scale := tensor.producer_of_kind(LayerKind.SCALE)) is not None:
        tensor = scale.data
    return (
        convolution.kind == LayerKind.CONVOLUTION
        and tensor is convolution.out
        and not convolution.fusion.has_activation
    )


def find_float_fusions(model: Model) -> FloatFusions:
    """Return the fusions of a float network, cached until the model is edited."""
    cache: dict[str, FloatFusions] = model.cache.setdefault("float fusions", {})
    if not cache:
        cache[""] = FloatFusions(model)
    return cache[""]
