import math

from qdqtool.ir.operators import GATES
from qdqtool.reasons.fusions import QuantizerInsideActivation
from qdqtool.trt.neighbors import tensor_size
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    MAX_JOINED,
    SILU,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    can_absorb,
    constant_before,
    documented,
    dq_before,
    is_relu,
    node_name,
    q_after,
    seen,
)

CHAIN = seen(
    "chain",
    "Pointwise layers in a row become one, PWN(a, b), if each has the next one as single consumer.",
    "yolo-resnet18-orin-trt8502:5233",
    "yolov8-orin-trt8412-excerpts:185",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="SiLU: PWN(<Sigmoid>, <Mul>) in NVIDIA/TensorRT issue 3385 (8.5.2 with Q/DQ); "
    "PWN(PWN(s), PWN(m)) in 10.x",
)
CONSTANT = documented(
    "constant-operand",
    "A constant operand of one number is absorbed: the engine layer does not read it as an input.",
    "engine names of FP16 builds: PWN(PWN(...Constant_output_0 + (Unnamed Layer* 897) [Shuffle], "
    "...Div), ...Erf) and PWN(Constant + [Shuffle], Pow); a constant of several numbers remains an "
    "input (yolo-resnet18-orin-trt8502)",
)
WITH_ADD = documented(
    "with-add",
    "A residual Add is fused with the activation before it.",
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
    """Fuses pointwise layers into one kernel, ``PWN(a, b)``.

    Pointwise layers are activations other than Relu, elementwise and unary layers, SCALE layers
    with a single factor, and layers that this pass has fused already. A layer is fused if its
    single consumer is pointwise as well. On a target where Conv+SiLU+Add fuse, the SiLU is not
    fused with an Add whose other input comes from a DQ. A sum directly after a convolution is left
    for ConvEltwiseSumFusion (assumed). A sum whose inputs all come from DQs is quantized as a
    separate layer (yolov8-orin-trt8412-excerpts keeps such an Add).

    Layers are not fused if a Q/DQ pair is between a quantized convolution and its activation, or
    inside the activation. The pass records a reason for such a pair.
    """

    cases = (CHAIN, CONSTANT, WITH_ADD)

    def _apply(self, network: Network) -> None:
        for q in network.layers_of_kind(LayerKind.QUANTIZE):
            self._refuse_inside_activation(q)
        if self.target.constants_first:
            self._absorb_constants(network)
        for layer in network.layers_of_kind(*POINTWISE_KINDS):
            while layer.id in network.layers and _can_fuse_pointwise(layer):
                consumer = self._find_next_in_chain(network, layer)
                if consumer is None:
                    break
                self._fuse_pointwise(network, layer, consumer)
        if not self.target.constants_first:
            self._absorb_constants(network)

    # Pairs inside activations -----------------------------------------------------------------

    def _refuse_inside_activation(self, q: Layer) -> None:
        conv = _quantized_convolution(q.data)
        if conv is not None and q.data.single_consumer() is q:
            self._refuse_before_activation(q, conv)
            return
        gate = q.data.producer_of_kind(LayerKind.ACTIVATION)
        if gate is not None and gate.op in GATES:
            self._refuse_after_gate(q, gate)

    def _refuse_before_activation(self, q: Layer, conv: Layer) -> None:
        consumers = _consumers_past_dq(q)
        gates = [layer for layer in consumers if layer.kind == LayerKind.ACTIVATION]
        products = [layer for layer in consumers if layer.kind != LayerKind.ACTIVATION]
        if not gates or not all(_multiplies_by(layer, gates) for layer in products):
            return
        if self.target.fuses_quantized_relu and _is_quantized_relu(consumers):
            return
        self.refuse(
            QuantizerInsideActivation(
                self.name,
                node_name(q),
                node_name(conv),
                node_name(gates[0]),
                silu=any(layer.op == "Mul" for layer in products),
                second=node_name(_find_q_after_gate(gates, products)),
                elements=tensor_size(q.data),
            )
        )

    def _refuse_after_gate(self, q: Layer, gate: Layer) -> None:
        conv = _quantized_convolution(gate.data)
        if conv is None:
            return
        consumers = _consumers_past_dq(q)
        if any(layer.op == "Mul" and gate.data in layer.inputs for layer in consumers):
            self.refuse(
                QuantizerInsideActivation(
                    self.name,
                    node_name(q),
                    node_name(conv),
                    node_name(gate),
                    silu=True,
                    gate=True,
                    elements=tensor_size(gate.data),
                )
            )

    # Constants --------------------------------------------------------------------------------

    def _absorb_constants(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE, LayerKind.POINTWISE):
            if not layer.in_myelin and not layer.relu_name:
                while self._absorb_constant(network, layer):
                    pass

    def _absorb_constant(self, network: Network, layer: Layer) -> bool:
        """Absorb a layer's constant operand of one number; the last one if there are several.

        Returns:
            Whether an operand was absorbed. False also if all operands are such constants.
        """
        constants = [_constant_number(tensor) for tensor in layer.inputs]
        positions = [i for i, constant in enumerate(constants) if constant is not None]
        if not positions or len(positions) == len(constants):
            return False
        position = positions[-1]
        constant = constants[position]
        assert constant is not None
        operand = layer.inputs[position]
        if self.target.constants_first:
            self.fire_fusing(CONSTANT, layer, constant, layer)
            layer.name = f"PWN({constant.name}, {layer.name})"
        layer.add_cases(CONSTANT)
        network.drop_input(layer, position)
        network.set_kind(layer, LayerKind.POINTWISE)
        _remove_unused(network, operand)
        return True

    # Chains -----------------------------------------------------------------------------------

    def _find_next_in_chain(self, network: Network, layer: Layer) -> Layer | None:
        if layer.out.is_output or len(layer.out.consumers) != 1:
            return None
        (consumer,) = layer.out.consumers  # may read the output at several inputs (x * x)
        if not _can_fuse_pointwise(consumer):
            return None
        if len(layer.nodes) + len(consumer.nodes) > MAX_JOINED:
            return None
        if _is_before_quantized_residual(layer, consumer):
            network.adds_after_activation[node_name(consumer)] = None
            if self.target.residual_through_activation:
                return None
        return consumer

    def _fuse_pointwise(self, network: Network, layer: Layer, consumer: Layer) -> None:
        is_joined_add = consumer.op == "Add" and layer.kind == LayerKind.POINTWISE
        self.fire_fusing(WITH_ADD if is_joined_add else CHAIN, layer, layer, consumer)
        name = f"PWN({self._member_name(layer)}, {self._member_name(consumer)})"
        rank = consumer.rank
        if layer.activation_and_add is None and _adds_other_tensor(layer, consumer):
            activation = layer.nodes[-1] if layer.nodes else layer.name
            layer.activation_and_add = activation, consumer.nodes[0]
        layer.acts_as = (
            SILU if _is_gated_activation(layer, consumer) else consumer.acts_as or consumer.op
        )
        network.absorb_consumer(layer, consumer, name)
        layer.rank = rank
        for position in reversed(range(len(layer.inputs))):
            if layer.inputs[position] in layer.inputs[:position]:
                network.drop_input(layer, position)
        network.set_kind(layer, LayerKind.POINTWISE)

    def _member_name(self, layer: Layer) -> str:
        if self.target.multiply_in_pointwise_name and layer.kind != LayerKind.POINTWISE:
            return f"PWN({layer.name})"
        return layer.name


def _remove_unused(network: Network, tensor: Tensor) -> None:
    """Remove the producer of an unread tensor, and producers upstream that become unused.

    Only the first input of each removed layer is followed.
    """
    while tensor.producer is not None and not tensor.consumers and not tensor.is_output:
        unused = tensor.producer
        tensor = unused.data if unused.inputs else tensor
        network.remove(unused)


def _can_fuse_pointwise(layer: Layer) -> bool:
    if layer.in_myelin or len(layer.outputs) != 1:
        return False
    if layer.kind == LayerKind.ACTIVATION:
        return not is_relu(layer)
    if layer.kind == LayerKind.SCALE:
        return not layer.per_channel
    if layer.kind == LayerKind.ELEMENTWISE:
        return not (layer.relu_name or _is_residual_sum(layer) or all(map(dq_before, layer.inputs)))
    return layer.kind in (LayerKind.UNARY, LayerKind.POINTWISE)


def _is_residual_sum(layer: Layer) -> bool:
    """Return whether a layer is a sum with an operand from a convolution without activation.

    A BatchNormalization may be between convolution and sum.
    """
    if layer.operation != "SUM":
        return False
    for tensor in layer.inputs:
        scale = tensor.producer_of_kind(LayerKind.SCALE)
        is_folded = scale is not None and tensor.single_consumer() is layer
        source = scale.data if scale is not None and is_folded else tensor
        conv = source.producer_of_kind(LayerKind.CONVOLUTION)
        if conv is not None and not conv.fusion.has_activation:
            return True
    return False


def _is_before_quantized_residual(layer: Layer, consumer: Layer) -> bool:
    producers = {tensor.producer_of_kind(LayerKind.CONVOLUTION) for tensor in layer.inputs}
    return (
        len(producers) == 1
        and None not in producers
        and consumer.operation == "SUM"
        and any(dq_before(tensor) for tensor in consumer.inputs if tensor is not layer.out)
    )


def _adds_other_tensor(layer: Layer, consumer: Layer) -> bool:
    if consumer.operation != "SUM" or not consumer.nodes:
        return False
    others = [tensor for tensor in consumer.inputs if tensor is not layer.out]
    return any(constant_before(tensor) is None for tensor in others)


def _is_gated_activation(layer: Layer, consumer: Layer) -> bool:
    """Return whether two layers compute x * gate(x), as SiLU and a decomposed Hardswish do."""
    is_gate = layer.op in GATES and not layer.acts_as
    return is_gate and consumer.operation == "PROD" and layer.data in consumer.inputs


def _constant_number(tensor: Tensor) -> Layer | None:
    layer = tensor.producer
    while layer is not None and layer.kind == LayerKind.SHUFFLE and len(layer.inputs) == 1:
        layer = layer.data.producer
    if layer is None or layer.kind != LayerKind.CONSTANT or layer.dims is None:
        return None
    return layer if math.prod(layer.dims) == 1 else None


def _is_quantized_relu(consumers: list[Layer]) -> bool:
    return len(consumers) == 1 and is_relu(consumers[0]) and can_absorb(q_after(consumers[0].out))


def _quantized_convolution(tensor: Tensor) -> Layer | None:
    """Return the convolution with dequantized data and weights that produces a tensor.

    Between convolution and tensor, there may be a BatchNormalization, and the reshape after a
    matrix product.
    """
    shuffle = tensor.producer_of_kind(LayerKind.SHUFFLE)
    if shuffle is not None and shuffle.shuffling.after_matmul:
        tensor = shuffle.data
    scale = tensor.producer_of_kind(LayerKind.SCALE)
    conv = (tensor if scale is None else scale.data).producer_of_kind(*CONVOLVE)
    if conv is None or not dq_before(conv.data) or not any(map(dq_before, conv.inputs[1:])):
        return None
    if scale is None:
        return conv
    is_folded = conv.kind != LayerKind.DECONVOLUTION and scale.data.single_consumer() is scale
    return conv if is_folded else None


def _consumers_past_dq(q: Layer) -> list[Layer]:
    """Return the consumers of the DQs after a Q.

    The reshape after a matrix product that became a convolution may be between Q and DQ.
    """
    tensors = [q.out] + [
        layer.out
        for layer in q.out.consumers
        if layer.kind == LayerKind.SHUFFLE and layer.shuffling.after_matmul
    ]
    consumers: list[Layer] = []
    for tensor in tensors:
        for dq in tensor.consumers:
            if dq.kind == LayerKind.DEQUANTIZE:
                consumers.extend(dq.out.consumers)
    return consumers


def _multiplies_by(layer: Layer, gates: list[Layer]) -> bool:
    return layer.operation == "PROD" and any(
        _producer_past_pair(tensor) in gates for tensor in layer.inputs
    )


def _producer_past_pair(tensor: Tensor) -> Layer | None:
    dq = dq_before(tensor)
    q = dq.data.producer_of_kind(LayerKind.QUANTIZE) if dq is not None else None
    return (tensor if q is None else q.data).producer


def _find_q_after_gate(gates: list[Layer], products: list[Layer]) -> Layer | None:
    for gate in gates:
        if gate.op not in GATES:
            continue
        for q in gate.out.consumers:
            if q.kind == LayerKind.QUANTIZE:
                if any(layer in products for layer in _consumers_past_dq(q)):
                    return q
    return None
