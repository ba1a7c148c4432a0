"""PointWiseFusion."""

import math

from qdqtool.model.operators import GATES
from qdqtool.trt.layers import SILU, Layer, Tensor, constant_before, dq_before, is_relu, node_name
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    MAX_JOINED,
    LayerKind,
    Network,
    Pass,
    documented,
    seen,
)
from qdqtool.trt.refusals import InsideActivation
from qdqtool.trt.surroundings import tensor_size

CHAIN = seen(
    "chain",
    "Pointwise layers in a row, of which each is the next one's only input, become one, PWN(a, b).",
    "yolo-resnet18-orin-trt8502:5233",
    "yolov8-orin-trt8412-excerpts:185",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="SiLU: PWN(<Sigmoid>, <Mul>) in NVIDIA/TensorRT issue 3385 (8.5.2 with Q/DQ); PWN(PWN(s), PWN(m)) in 10.x",
)
CONSTANT = documented(
    "constant-operand",
    "An operand that is one constant number is taken in: it is not an input at run time.",
    "engine names of FP16 builds: PWN(PWN(...Constant_output_0 + (Unnamed Layer* 897) [Shuffle], ...Div), ...Erf) and "
    "PWN(Constant + [Shuffle], Pow); a constant of several numbers stays an input (yolo-resnet18-orin-trt8502)",
)
WITH_ADD = documented(
    "with-add",
    "A residual Add behind an activation is joined with it.",
    "NVIDIA/TensorRT issue 2204, 8.4.1",
)
POINTWISE_KINDS = (
    LayerKind.ACTIVATION,
    LayerKind.ELEMENTWISE,
    LayerKind.UNARY,
    LayerKind.SCALE,
    LayerKind.POINTWISE,
)


class PointWiseFusion(Pass):
    """Joins pointwise layers into one kernel, ``PWN(a, b)``.

    Activation (other than Relu), elementwise, unary, scale by one number or an earlier ``PWN``, whose only reader is
    another of these. On a target where Conv+SiLU+Add fuse, the SiLU is left apart from an Add whose other input comes
    from a DQ. A sum that a bare convolution feeds is left for ConvEltwiseSumFusion (assumed), and so is one whose
    inputs all come from DQs, which is quantized by itself (yolov8-orin-trt8412-excerpts keeps such an Add).

    A pair between a quantized convolution and its activation, or inside that, is refused: they stay layers apart.
    """

    cases = (CHAIN, CONSTANT, WITH_ADD)

    def apply(self, network: Network) -> None:
        for q in network.layers_of_kind(LayerKind.QUANTIZE):
            self._refuse_inside(q)
        if self.target.constants_first:
            self._take_constants(network)
        for layer in network.layers_of_kind(*POINTWISE_KINDS):
            while network.contains(layer) and _fusable(layer):
                reader = layer.out.single_consuming_layer()
                if (
                    reader is None
                    or not _fusable(reader)
                    or len(layer.nodes) + len(reader.nodes) > MAX_JOINED
                ):
                    break
                if _quantized_residual(layer, reader):
                    network.adds_after_activation[node_name(reader)] = None
                    if self.target.residual_through_activation:
                        break
                self._fuse(network, layer, reader)
        if not self.target.constants_first:
            self._take_constants(network)

    def _refuse_inside(self, q: Layer) -> None:
        above = q.data.producer_of_kind(LayerKind.ACTIVATION)
        conv = _quantized_convolution(q.data)
        if conv is not None and q.data.single_consumer() is q:
            ends = _dequantized(q)
            gates = [r for r in ends if r.kind == LayerKind.ACTIVATION]
            muls = [r for r in ends if r.kind != LayerKind.ACTIVATION]
            if gates and all(
                m.operation == "PROD" and any(_made_of(t) in gates for t in m.inputs) for m in muls
            ):
                inner = (
                    n
                    for g in gates
                    if g.op in GATES
                    for n in g.out.consumers
                    if n.kind == LayerKind.QUANTIZE and any(m in muls for m in _dequantized(n))
                )
                self.refuse(
                    InsideActivation(
                        self.name,
                        node_name(q),
                        node_name(conv),
                        node_name(gates[0]),
                        any(m.op == "Mul" for m in muls),
                        False,
                        node_name(next(inner, None)),
                        tensor_size(q.data),
                    )
                )
        elif (
            above is not None
            and above.op in GATES
            and (conv := _quantized_convolution(above.data)) is not None
        ):
            if any(m.op == "Mul" and above.data in m.inputs for m in _dequantized(q)):
                self.refuse(
                    InsideActivation(
                        self.name,
                        node_name(q),
                        node_name(conv),
                        node_name(above),
                        True,
                        True,
                        "",
                        tensor_size(above.data),
                    )
                )

    def _take_constants(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE, LayerKind.POINTWISE):
            while (
                not layer.in_myelin and not layer.relu_name and self._take_constant(network, layer)
            ):
                pass

    def _take_constant(self, network: Network, layer: Layer) -> bool:
        numbers = [_number_behind(t) for t in layer.inputs]
        found = [(i, n) for i, n in enumerate(numbers) if n is not None]
        if not found or len(found) == len(numbers):
            return False
        position, constant = found[-1]
        direct = layer.inputs[position]
        if self.target.constants_first:
            self.fire_fusing(CONSTANT, layer, constant, layer)
            layer.name = f"PWN({constant.name}, {layer.name})"
        layer.add_cases(CONSTANT)
        network.drop_input(layer, position)
        network.set_kind(layer, LayerKind.POINTWISE)
        while direct.producer is not None and not direct.consumers and not direct.is_output:
            unused = direct.producer
            direct = unused.data if unused.inputs else direct
            network.remove(unused)
        return True

    def _fuse(self, network: Network, layer: Layer, reader: Layer) -> None:
        case = WITH_ADD if reader.op == "Add" and layer.kind == LayerKind.POINTWISE else CHAIN
        self.fire_fusing(case, layer, layer, reader)
        name = f"PWN({self._member(layer)}, {self._member(reader)})"
        rank = reader.rank
        if (
            reader.operation == "SUM"
            and reader.nodes
            and layer.activation_and_add is None
            and _several(layer, reader)
        ):
            layer.activation_and_add = (
                layer.nodes[-1] if layer.nodes else layer.name,
                reader.nodes[0],
            )
        layer.acts_as = SILU if _gates(layer, reader) else reader.acts_as or reader.op
        network.absorb_consumer(layer, reader, name)
        layer.rank = rank
        for position in reversed(range(len(layer.inputs))):
            if layer.inputs[position] in layer.inputs[:position]:
                network.drop_input(layer, position)
        network.set_kind(layer, LayerKind.POINTWISE)

    def _member(self, layer: Layer) -> str:
        if self.target.multiply_in_pointwise_name and layer.kind != LayerKind.POINTWISE:
            return f"PWN({layer.name})"
        return layer.name


def _dequantized(q: Layer) -> list[Layer]:
    """What reads the results of a Q's DQs, past the reshape behind a matrix product that became a convolution."""
    tensors = [
        q.out,
        *(
            r.out
            for r in q.out.consumers
            if r.kind == LayerKind.SHUFFLE and r.shuffling.after_matmul
        ),
    ]
    return [
        r
        for t in tensors
        for dq in t.consumers
        if dq.kind == LayerKind.DEQUANTIZE
        for r in dq.out.consumers
    ]


def _made_of(tensor: Tensor) -> Layer | None:
    """What makes a tensor, a pair aside."""
    dq = dq_before(tensor)
    q = dq.data.producer_of_kind(LayerKind.QUANTIZE) if dq is not None else None
    return (tensor if q is None else q.data).producer


def _quantized_convolution(tensor: Tensor) -> Layer | None:
    """The convolution with dequantized data and weights that makes a tensor, through BatchNormalization at most, and
    the reshape behind a matrix product."""
    shuffle = tensor.producer_of_kind(LayerKind.SHUFFLE)
    tensor = shuffle.data if shuffle is not None and shuffle.shuffling.after_matmul else tensor
    scale = tensor.producer_of_kind(LayerKind.SCALE)
    conv = (tensor if scale is None else scale.data).producer_of_kind(*CONVOLVE)
    if conv is None or not dq_before(conv.data) or not any(map(dq_before, conv.inputs[1:])):
        return None
    folded = scale is None or (
        conv.kind != LayerKind.DECONVOLUTION and scale.data.single_consumer() is scale
    )
    return conv if folded else None


def _number_behind(tensor: Tensor) -> Layer | None:
    """The constant of one element that a tensor is made of, through reshapes at most."""
    layer = tensor.producer
    while layer is not None and layer.kind == LayerKind.SHUFFLE and len(layer.inputs) == 1:
        layer = layer.data.producer
    dims = None if layer is None or layer.kind != LayerKind.CONSTANT else layer.dims
    return layer if dims is not None and math.prod(dims) == 1 else None


def _fusable(layer: Layer) -> bool:
    if layer.in_myelin or len(layer.outputs) != 1:
        return False
    if layer.kind == LayerKind.ACTIVATION:
        return not is_relu(layer)
    if layer.kind == LayerKind.SCALE:
        return not layer.per_channel
    if layer.kind == LayerKind.ELEMENTWISE:
        return not (layer.relu_name or _residual(layer) or all(map(dq_before, layer.inputs)))
    return layer.kind in (LayerKind.UNARY, LayerKind.POINTWISE)


def _several(layer: Layer, reader: Layer) -> bool:
    return any(t is not layer.out and constant_before(t) is None for t in reader.inputs)


def _gates(layer: Layer, reader: Layer) -> bool:
    """Whether two layers are x * gate(x): SiLU, or Hardswish written out."""
    return (
        layer.op in GATES
        and not layer.acts_as
        and reader.operation == "PROD"
        and layer.data in reader.inputs
    )


def _quantized_residual(layer: Layer, reader: Layer) -> bool:
    """Whether a convolution's activation feeds an Add whose other input is quantized."""
    makers = {t.producer_of_kind(LayerKind.CONVOLUTION) for t in layer.inputs}
    if len(makers) != 1 or None in makers or reader.operation != "SUM":
        return False
    return any(dq_before(t) for t in reader.inputs if t is not layer.out)


def _residual(layer: Layer) -> bool:
    """A sum of which one input is a convolution's own output (through BatchNormalization at most)."""
    for tensor in layer.inputs if layer.operation == "SUM" else ():
        scale = tensor.producer_of_kind(LayerKind.SCALE)
        above = scale.data if scale is not None and tensor.single_consumer() is layer else tensor
        conv = above.producer_of_kind(LayerKind.CONVOLUTION)
        if conv is not None and not conv.fusion.has_activation:
            return True
    return False
