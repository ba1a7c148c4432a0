"""Layers and tensors of TensorRT's network, with the state that passes read and change.

A convolution, for instance, is a :class:`Layer` with :class:`LayerWeights`. Passes record in
:class:`FusedParts` which layers the convolution has fused. A pass sets ``int8`` when the
convolution absorbs the DQs of its inputs, and ``int8_out`` when it absorbs the Q of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from qdqtool.evidence import Case
from qdqtool.ir.operators import CONVOLVE, INSERTED_SHUFFLE, OPERATORS, LayerKind, QPassage
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import QuantParams, precision_of
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.tensors import EMPTY_PATH, OperatorPath, PathStep, Scale
from qdqtool.trt.result import MyelinRegion

Dims = tuple[int | None, ...]

SILU = "SiLU"  # name of the activation x * gate(x)
WEIGHTED = (*CONVOLVE, LayerKind.MATRIX_MULTIPLY)
QDQ = (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)

# Looking up an enumeration member is slow, and nearly every layer is compared with these members.
_QUANTIZE, _DEQUANTIZE, _CONSTANT = LayerKind.QUANTIZE, LayerKind.DEQUANTIZE, LayerKind.CONSTANT
_INT8 = Precision.INT8
_FLOAT_WITH_FP8 = (LayerKind.POOLING, LayerKind.RESIZE)
_MYELIN_OPERATORS = frozenset(name for name, operator in OPERATORS.items() if operator.myelin)


@dataclass(eq=False, repr=False, slots=True)
class Tensor:
    """A tensor between layers.

    Attributes:
        name: TensorRT's name. When a pass swaps layers, the name stays at its position in the
            network.
        producer: Layer that writes the tensor; None for a network input.
        consumers: Layers that read the tensor, each with the number of inputs at which it reads the
            tensor, in the order in which the layers were connected.
        source: ONNX tensor that the tensor stands for.
        is_output: Whether the tensor is a network output.
        elem_type: Element type of the ONNX tensor (``onnx.TensorProto``); 0 if unknown. A
            quantized tensor has the type of its float tensor.
        shape: Dimensions; None if unknown.
        view_of: Tensor whose memory this tensor uses after a Slice or Concat was eliminated; None
            if the tensor has separate memory.
    """

    name: str
    source: str = ""
    elem_type: int = 0
    shape: Dims | None = None
    producer: Layer | None = None
    consumers: dict[Layer, int] = field(default_factory=dict)
    is_output: bool = False
    view_of: Tensor | None = None

    def __post_init__(self) -> None:
        self.source = self.source or self.name

    def __repr__(self) -> str:
        return f"<Tensor {self.name}>"

    @property
    def memory(self) -> Tensor:
        """Tensor that the engine lists: this tensor, or the tensor whose memory it uses.

        Valid after all passes have run. The first access shortens chains of views, so that later
        accesses are fast.
        """
        tensor, views = self, []
        while tensor.view_of is not None:
            views.append(tensor)
            tensor = tensor.view_of
        for view in views:
            view.view_of = tensor
        return tensor

    def single_consumer(self, *kinds: LayerKind) -> Layer | None:
        """Return the tensor's only consumer, if this layer reads the tensor at one input only.

        Args:
            kinds: Kinds that the layer may have; any if none is named.

        Returns:
            The layer. None if no layer or several layers read the tensor, if the layer is of
            another kind or reads the tensor at several inputs, or if the tensor is a network
            output.
        """
        if self.is_output or len(self.consumers) != 1:
            return None
        for consumer, inputs in self.consumers.items():
            if inputs == 1 and (not kinds or consumer.kind in kinds):
                return consumer
        return None

    def producer_of_kind(self, *kinds: LayerKind) -> Layer | None:
        """Return the producer if it is of one of the kinds, else None."""
        producer = self.producer
        return producer if producer is not None and producer.kind in kinds else None

    def add_consumer(self, layer: Layer, inputs: int = 1) -> None:
        """Record that ``inputs`` further inputs of a layer read the tensor."""
        self.consumers[layer] = self.consumers.get(layer, 0) + inputs

    def drop_consumer(self, layer: Layer) -> None:
        """Record that one of the layer's inputs no longer reads the tensor."""
        remaining = self.consumers[layer] - 1
        if remaining:
            self.consumers[layer] = remaining
        else:
            del self.consumers[layer]


@dataclass(eq=False, repr=False, slots=True)
class LayerWeights:
    """Weights of a convolution, deconvolution or matrix product.

    Attributes:
        name: ONNX tensor of the weights.
        constant: Whether the weights are a constant, with or without Q/DQ.
        in_layer: Whether the layer stores its weights, because they are a constant without Q/DQ.
            Such a layer has no weights input.
        dims: Dimensions; [out, in/groups, ...] for a Conv.
        axis: Axis of the output channels.
        kernel: ``kernel_shape`` as in ONNX; empty for a matrix product.
        strides: As in ONNX; empty for a matrix product.
        pads: As in ONNX; empty for a matrix product.
        dilations: As in ONNX; empty for a matrix product.
        group: As in ONNX.
        auto_pad: As in ONNX.
        from_matmul: Whether the layer is a convolution that replaced a matrix product.
        dfl: Whether the layer is the convolution of YOLO's distribution focal loss (DFL).
    """

    name: str
    constant: bool
    in_layer: bool
    dims: Dims = ()
    axis: int = 0
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    group: int = 1
    auto_pad: str = "NOTSET"
    from_matmul: bool = False
    dfl: bool = False


@dataclass(eq=False, repr=False, slots=True)
class PoolingWindow:
    """Type of a pooling, ``MAX`` or ``AVERAGE``, and its geometry as in ONNX."""

    type: str
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()


@dataclass(eq=False, repr=False, slots=True)
class ShuffleEffect:
    """Effect and origin of a SHUFFLE.

    Attributes:
        reorders_values: Whether the shuffle changes the order of the values in memory.
        perm: Permutation of a Transpose; None for other shuffles or an unknown permutation.
        may_be_identity: Whether the shuffle may change nothing, because a pass fused it from
            several shuffles, or because the parser inserted it after a Softmax.
        before_matmul: Whether a pass inserted the shuffle before a matrix product that became a
            convolution.
        after_matmul: Whether a pass inserted the shuffle after such a product. SqueezePushDownJoin
            moves the shuffle down past the bias.
        is_pushed_down: Whether SqueezePushDownJoin has moved the shuffle down.
    """

    reorders_values: bool = False
    perm: tuple[int, ...] | None = None
    may_be_identity: bool = False
    before_matmul: bool = False
    after_matmul: bool = False
    is_pushed_down: bool = False


@dataclass(eq=False, repr=False, slots=True)
class FusedParts:
    """Neighboring layers that a convolution has fused.

    Attributes:
        has_activation: Whether the convolution can fuse no further activation, because it has fused
            an activation or a residual Add.
        activation: Fused activation other than Relu, with its last ONNX node (the Mul of a SiLU);
            None if no such activation is fused.
        tensor_before_activation: ONNX tensor between the convolution (with its BatchNormalization)
            and the first fused activation or sum; empty if neither is fused.
        has_pointwise: Whether a pointwise layer (an activation other than Relu) is fused.
        quantized_relu: ONNX node of a fused Relu that has Q/DQ before and after it; empty if no
            such Relu is fused.
        has_pooling: Whether the MaxPool after the convolution is fused.
        has_padding: Whether the Pad before the convolution is fused.
        has_weights: Whether the convolution has absorbed its quantized constant weights.
        merged_name: Name of the engine layer that computes the convolution together with parallel
            convolutions (``A || B``); empty for a separate layer.
    """

    has_activation: bool = False
    activation: PathStep | None = None
    tensor_before_activation: str = ""
    has_pointwise: bool = False
    quantized_relu: str = ""
    has_pooling: bool = False
    has_padding: bool = False
    has_weights: bool = False
    merged_name: str = ""


Rank = tuple[int, int, int]
"""Position of a layer in the optimizer's order of visits.

For a layer of the model, the first number is its place and the others are 0. A layer that a pass
inserted has the place of its neighbor, then -1 if it was inserted before the neighbor and 1 if
after. The third number orders several layers inserted at the same point.
"""


def rank_before(rank: Rank, part: int = 0) -> Rank:
    """Return the rank of an inserted layer that is visited before the layer of ``rank``.

    ``part`` orders the layers if several are inserted at this point.
    """
    return rank[0], -1, part


def rank_after(rank: Rank) -> Rank:
    """Return the rank of an inserted layer that is visited after the layer of ``rank``."""
    return rank[0], 1, 0


def next_rank(rank: Rank) -> Rank:
    """Return the rank of a layer that is inserted directly after another inserted layer."""
    return rank[0], rank[1], rank[2] + 1


@dataclass(eq=False, repr=False, slots=True)
class Layer:
    """A layer of TensorRT's network, with the state that passes give it.

    Attributes:
        id: Position in the order of creation.
        kind: Kind of the layer.
        name: TensorRT's name. Fusions join names with `` + ``.
        op: ONNX operator that the layer was created for; empty for layers that TensorRT inserts.
        inputs: Data inputs. The second input of a convolution with computed or dequantized weights
            is the weights.
        outputs: Output tensors.
        nodes: ONNX nodes that the layer computes: its own node and the nodes of absorbed layers.
        owner: For a layer to which the parser gives no name: the ONNX node of the layer.
        rank: Position in the order in which the optimizer visits the layers.
        cases: Cases of passes (:class:`qdqtool.evidence.Case`) that gave the layer its state, in
            the order in which they applied.
        passage: Rule by which a Q moves up past the layer; None if a Q cannot pass the layer.
        activation: TensorRT's type of an ACTIVATION.
        operation: TensorRT's operation of an ELEMENTWISE.
        relu_name: Name of the Relu that was fused into an ELEMENTWISE or SCALE.
        per_channel: Whether a SCALE has a factor for each channel.
        shift_only: Whether a SCALE only adds.
        has_steps: Whether a SLICE has steps greater than 1.
        part_of_split: Axis of a Split and first index of the output that a SLICE computes; None if
            unknown, and for other layers.
        dims: Dimensions of a CONSTANT; None if unknown.
        possible_pooling: Type of pooling (``MAX`` or ``AVERAGE``) that a REDUCE can become; None if
            it cannot.
        window: Type and geometry of a POOLING.
        weights: Weights. Only layers of a kind in :data:`WEIGHTED` have the attribute.
        quant: Scale and zero point of a Q, DQ or copy.
        has_computed_scale: Whether the scale of a Q or DQ is computed at run time.
        is_clone: Whether a Q is one of the copies before the inputs of a Concat.
        paired_q: ONNX node of the Q before a DQ.
        path: Operators that a Q has moved up past, or a DQ down past, in the order of the moves.
        merged_quantizers: ONNX node of each Q that was merged into this Q, with the operators that
            the merged Q had moved up past. Only the first 64 are listed. A Q that was merged along
            several paths is listed once for each path.
        blocked_by: Reason why a Q could not move farther up; None if no pass recorded a reason.
        stationary_cases: Cases that kept a DQ from moving. They are evidence for the DQ if it
            remains in the engine, but not for a layer that absorbs the DQ.
        acts_as: Operator that a POINTWISE of several nodes computes: ``SiLU``, or the operator of
            its last node.
        activation_and_add: ONNX nodes of the activation and of the Add after it, if a POINTWISE
            contains both; else None.
        source_scale: Input scale of a COPY that converts INT8 to INT8 of another scale.
        dq_moved_past: Whether a DQ has moved down past the layer.
        requantizes: Whether a Q or COPY converts INT8 to INT8 of another scale.
        int8: Whether the layer has absorbed the DQs of its inputs and computes in INT8 or FP8.
        int8_out: Whether the layer has absorbed the Q after it and writes INT8 or FP8.
        quantized_type: 8-bit type in which a layer with ``int8`` computes, such as INT8.
        residual: Residual input of a convolution that has fused an Add.
        in_myelin: Whether TensorRT hands the layer to its compiler Myelin.
        region: Region of Myelin that contains the layer, on targets whose regions absorb Q and DQ.
        becomes_copy: Whether a Slice is a copy in the engine.
        is_eliminated: Whether a Slice or Concat is not in the engine, because its input and output
            tensors share memory.
        copies: Copies that an eliminated Concat needs: the name and the copied tensor of each.
    """

    kind: LayerKind
    name: str
    op: str = ""
    id: int = -1
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    owner: str = ""
    rank: Rank = (0, 0, 0)
    cases: dict[Case, None] = field(default_factory=dict)
    passage: QPassage | None = None
    activation: str = ""
    operation: str = ""
    relu_name: str = ""
    per_channel: bool = True
    shift_only: bool = False
    has_steps: bool = False
    part_of_split: tuple[int, int] | None = None
    dims: tuple[int, ...] | None = None
    possible_pooling: str | None = None
    window: PoolingWindow | None = None
    weights: LayerWeights = field(init=False)
    _shuffling: ShuffleEffect | None = field(default=None, init=False)
    _fusion: FusedParts | None = field(default=None, init=False)
    quant: QuantParams | None = None
    has_computed_scale: bool = False
    is_clone: bool = False
    paired_q: str = ""
    path: OperatorPath = EMPTY_PATH
    merged_quantizers: tuple[tuple[str, OperatorPath], ...] = ()
    blocked_by: Reason | None = None
    stationary_cases: tuple[Case, ...] = ()
    acts_as: str = ""
    activation_and_add: tuple[str, str] | None = None
    source_scale: Scale = None
    dq_moved_past: bool = False
    requantizes: bool = False
    int8: bool = False
    int8_out: bool = False
    quantized_type: Precision = _INT8
    residual: Tensor | None = None
    in_myelin: bool = False
    region: MyelinRegion | None = None
    becomes_copy: bool = False
    is_eliminated: bool = False
    copies: tuple[tuple[str, Tensor], ...] = ()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    @property
    def shuffling(self) -> ShuffleEffect:
        """State of a SHUFFLE. Created on first use, because most layers need none."""
        if self._shuffling is None:
            self._shuffling = ShuffleEffect()
        return self._shuffling

    @property
    def fusion(self) -> FusedParts:
        """Neighboring layers that the layer has fused. Created on first use."""
        if self._fusion is None:
            self._fusion = FusedParts()
        return self._fusion

    @property
    def pooling_type(self) -> str:
        """``MAX`` or ``AVERAGE`` for a POOLING; empty for other kinds."""
        return "" if self.window is None else self.window.type

    def record_move(self, step: PathStep) -> None:
        """Record that this Q or DQ, and the Qs merged into it, moved past an operator."""
        self.path = self.path.with_step(step)
        self.merged_quantizers = tuple(
            (name, path.with_step(step)) for name, path in self.merged_quantizers
        )

    def add_cases(self, *cases: Case) -> None:
        """Record cases of passes that gave the layer its state, without duplicates."""
        for case in cases:
            self.cases[case] = None

    @property
    def producers(self) -> list[Layer]:
        """Layers that write the inputs, in the order of the inputs; network inputs are left out."""
        return [t.producer for t in self.inputs if t.producer is not None]

    @property
    def is_used(self) -> bool:
        """Whether a layer reads an output, or an output is a network output."""
        return any(tensor.consumers or tensor.is_output for tensor in self.outputs)

    def touches(self, tensors: set[Tensor]) -> bool:
        """Return whether the layer reads or writes one of the tensors."""
        return not (tensors.isdisjoint(self.inputs) and tensors.isdisjoint(self.outputs))

    @property
    def consumers(self) -> list[Layer]:
        """Layers that read the outputs; a layer that reads several outputs is repeated."""
        return [consumer for tensor in self.outputs for consumer in tensor.consumers]

    @property
    def neighbors(self) -> list[Layer]:
        """Producers and consumers."""
        return [*self.producers, *self.consumers]

    @property
    def out(self) -> Tensor:
        """First output."""
        return self.outputs[0]

    @property
    def data(self) -> Tensor:
        """First input."""
        return self.inputs[0]


def find_reachable(
    start: Collection[Layer], neighbors: Callable[[Layer], Iterable[Layer]]
) -> dict[Layer, None]:
    """Return start layers and all layers reachable from them, in breadth-first order."""
    return dict.fromkeys(walk(start, neighbors))


def walk(start: Iterable[Layer], neighbors: Callable[[Layer], Iterable[Layer]]) -> Iterator[Layer]:
    """Yield start layers and all layers reachable from them, each once, breadth first."""
    visited = set(start)
    queue = list(start)
    for layer in queue:
        yield layer
        for neighbor in neighbors(layer):
            if neighbor not in visited:
                visited.add(neighbor)
                queue.append(neighbor)


def create_shuffle(name: str, rank: Rank) -> Layer:
    """Create a shuffle for a pass. The caller adds the shuffle to the network."""
    layer = Layer(LayerKind.SHUFFLE, name)
    layer.passage, layer.rank = INSERTED_SHUFFLE, rank
    return layer


def dq_before(tensor: Tensor) -> Layer | None:
    """Return the producer of a tensor if the producer is a DQ, else None."""
    producer = tensor.producer
    return producer if producer is not None and producer.kind is _DEQUANTIZE else None


def constant_before(tensor: Tensor) -> Layer | None:
    """Return the producer of a tensor if the producer is a constant, else None."""
    producer = tensor.producer
    return producer if producer is not None and producer.kind is _CONSTANT else None


def q_after(tensor: Tensor) -> Layer | None:
    """Return the single consumer of a tensor if the consumer is a Q, else None."""
    consumer = tensor.single_consumer()
    return consumer if consumer is not None and consumer.kind is _QUANTIZE else None


def is_relu(layer: Layer) -> bool:
    """Return whether a layer is a Relu, for which TensorRT has separate fusion passes."""
    return layer.kind == LayerKind.ACTIVATION and layer.activation == "RELU"


def can_absorb(q: Layer | None) -> bool:
    """Return whether layers can absorb a Q or DQ; False for None.

    Layers absorb only a Q or DQ with a single scale that is known when the engine is built.
    """
    return (
        q is not None
        and not q.has_computed_scale
        and (q.quant is None or not q.quant.is_per_channel)
    )


def quantized_type(quantizer: Layer | None) -> Precision:
    """Return the quantized type of a Q or DQ; INT8 for uint8, unknown types and None."""
    if quantizer is None or quantizer.quant is None:
        return Precision.INT8
    precision = quantizer.quant.precision
    return _INT8 if precision in (Precision.UINT8, Precision.UNKNOWN) else precision


def is_computed_in_float(op: Layer, quantizer: Layer) -> bool:
    """Return whether an operator remains float because an FP8 quantizer cannot pass it.

    INT8 quantizers pass pooling and resizing, FP8 quantizers do not. TensorRT-RTX 1.7.1 shows this
    for MaxPool; for Resize and for TensorRT 10 it is assumed.
    """
    return op.kind in _FLOAT_WITH_FP8 and quantized_type(quantizer) is Precision.FP8


def weights_position(layer: Layer) -> int | None:
    """Return the index of the weights among a layer's inputs.

    None if the layer has no weights, or stores its weights.
    """
    if layer.kind not in WEIGHTED or layer.fusion.has_weights or layer.weights.in_layer:
        return None
    return 1 if len(layer.inputs) > 1 else None


def needs_myelin(layer: Layer) -> bool:
    """Return whether only Myelin has kernels for the layer's operator."""
    return layer.op in _MYELIN_OPERATORS


def node_name(layer: Layer | None) -> str:
    """Return the ONNX node name that messages show for a layer; empty for None."""
    if layer is None:
        return ""
    return layer.nodes[0] if layer.nodes else layer.owner or layer.name


def float_precision(elem_type: int, strongly_typed: bool) -> Precision:
    """Return the precision of an unquantized tensor.

    FLOAT if the type is unknown, or if it is a float type of a weakly typed network, because the
    builder then chooses FP32 or FP16. Otherwise the ONNX type.
    """
    precision = precision_of(elem_type)
    is_builders_choice = precision.is_float and not strongly_typed
    if is_builders_choice or precision == Precision.UNKNOWN:
        return Precision.FLOAT
    return precision
