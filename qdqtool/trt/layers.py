"""Layers and tensors of TensorRT's network, with what passes need to know of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qdqtool.knowledge.tables import Case
from qdqtool.model.operators import CONVOLVE, INSERTED_SHUFFLE, OPERATORS, LayerKind, QPassage
from qdqtool.model.qdq import QuantParams, precision_of
from qdqtool.trt.refusals import NOWHERE, Scale, Step, Way
from qdqtool.types import MyelinRegion, Precision, Refusal

Dims = tuple[int | None, ...]

MERGED = 64
SILU = "SiLU"  # what the activation x * gate(x) goes by
WEIGHTED = (*CONVOLVE, LayerKind.MATRIX_MULTIPLY)
QDQ = (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)
# What is asked of nearly every layer: as names of this module, for a member of an enumeration is slow to look up.
_QUANTIZE, _DEQUANTIZE, _CONSTANT = LayerKind.QUANTIZE, LayerKind.DEQUANTIZE, LayerKind.CONSTANT
_INT8 = Precision.INT8
_IN_MYELIN = frozenset(name for name, known in OPERATORS.items() if known.myelin)


class Tensor:
    """A tensor between layers.

    Attributes:
        name: TensorRT's name; it stays with the position when a pass swaps layers.
        producer: The layer that writes it; None for a network input.
        consumers: The layers that read it, with the number of their inputs that do, in the order in which they began.
        source: The ONNX tensor it stands for.
        is_output: Whether it is a network output.
        elem_type: ONNX element type of the float graph.
        shape: Dimensions where known.
        view_of: The tensor in whose memory it lies, once a slice or concatenation was eliminated.
    """

    __slots__ = (
        "consumers",
        "elem_type",
        "is_output",
        "name",
        "producer",
        "shape",
        "source",
        "view_of",
    )

    def __init__(self, name: str, source: str = "", elem_type: int = 0) -> None:
        self.name = name
        self.source = source or name
        self.producer: Layer | None = None
        self.consumers: dict[Layer, int] = {}
        self.is_output = False
        self.elem_type = elem_type
        self.shape: Dims | None = None
        self.view_of: Tensor | None = None

    def __repr__(self) -> str:
        return f"<Tensor {self.name}>"

    @property
    def memory(self) -> Tensor:
        """The tensor that the engine names for it: itself, or the one it is a view of, once all passes have run."""
        tensor, passed = self, []
        while tensor.view_of is not None:
            passed.append(tensor)
            tensor = tensor.view_of
        for view in passed:  # of a chain, each link is followed once
            view.view_of = tensor
        return tensor

    def only_reader(self, *kinds: LayerKind) -> Layer | None:
        """The single layer that reads the tensor, at one input; None where it is of no such kind.

        None as well when several do, none does, or it is a network output.
        """
        if self.is_output or len(self.consumers) != 1:
            return None
        for reader, inputs in self.consumers.items():
            if inputs == 1 and (not kinds or reader.kind in kinds):
                return reader
        return None

    def sole_reader(self) -> Layer | None:
        """As :meth:`only_reader`, of a layer that may read the tensor at several of its inputs (``x * x``)."""
        return None if self.is_output or len(self.consumers) != 1 else next(iter(self.consumers))

    def maker(self, *kinds: LayerKind) -> Layer | None:
        """The layer that writes the tensor, where it is of one of some kinds."""
        return self.producer if self.producer is not None and self.producer.kind in kinds else None

    def read_by(self, layer: Layer, inputs: int = 1) -> None:
        """Notes that inputs of a layer, one if not said otherwise, read the tensor from now on."""
        self.consumers[layer] = self.consumers.get(layer, 0) + inputs

    def left_by(self, layer: Layer) -> None:
        """Notes that one input of a layer does not read the tensor any more."""
        left = self.consumers[layer] - 1
        if left:
            self.consumers[layer] = left
        else:
            del self.consumers[layer]


@dataclass(eq=False, repr=False)
class Weighted:
    """What a convolution, deconvolution or matrix product knows of its weights.

    Attributes:
        name: The weights' ONNX tensor.
        constant: Whether they are a constant, quantized or not.
        inside: Whether they are plain constants inside the layer: the layer has no weights input.
        dims: Dimensions of the weights; for a Conv [out, in/groups, ...].
        axis: Their axis along which the outputs lie.
        kernel, strides, pads, dilations, group, auto_pad: As in ONNX; empty for a matrix product.
        from_matmul: The layer was a matrix product.
        dfl: It is YOLO's distribution focal loss.
    """

    name: str
    constant: bool
    inside: bool
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


@dataclass(eq=False, repr=False)
class Window:
    """A pooling: ``MAX`` or ``AVERAGE``, and its window."""

    type: str
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class Shuffling:
    """What a shuffle does, and what it was made by.

    Attributes:
        moves: It changes the order of the values.
        perm: The permutation of a Transpose.
        joined: It was fused of several, or is behind a Softmax, and may turn out to change nothing.
        before_matmul: It was inserted in front of a matrix product turned convolution.
        after_matmul: It is behind one, and is pushed down past the bias.
        pushed: That was done.
    """

    moves: bool = False
    perm: tuple[int, ...] | None = None
    joined: bool = False
    before_matmul: bool = False
    after_matmul: bool = False
    pushed: bool = False


@dataclass(eq=False, repr=False)
class Fusion:
    """What a convolution took in behind and in front of it.

    Attributes:
        activated: An activation, or the Relu of an Add: no other is taken.
        activation: The pointwise activation; SiLU and its like are named by their last node.
        bare: The ONNX tensor in front of the first that is no scale: of an activation or a sum; empty without one.
        pointwise: A pointwise layer (an activation other than Relu).
        pooled: A MaxPool.
        padded: A Pad in front.
        weights: Its quantized constant weights.
        merged: Name of the layer that it shares with convolutions beside it (``A || B``).
    """

    activated: bool = False
    activation: Step | None = None
    bare: str = ""
    pointwise: bool = False
    pooled: bool = False
    padded: bool = False
    weights: bool = False
    merged: str = ""


Rank = tuple[int, int, int]
"""Where the optimizer visits a layer: the place of itself or of the one that a pass inserted it beside; -1 in front of
that, 1 behind it, 0 itself; the order among several in front or behind.
"""
UNRANKED: Rank = (0, 0, 0)


def rank_before(rank: Rank, part: int = 0) -> Rank:
    """The rank of a layer that is inserted in front of one; ``part``: which of several."""
    return rank[0], -1, part


def rank_behind(rank: Rank) -> Rank:
    """The rank of a layer that is inserted behind one."""
    return rank[0], 1, 0


def next_rank(rank: Rank) -> Rank:
    """The rank right after one, at the same place."""
    return rank[0], rank[1], rank[2] + 1


class Layer:
    """A layer.

    Attributes:
        id: Place in the order of creation.
        kind: What it is.
        name: TensorRT's name; fusions join names with `` + ``.
        op: The ONNX operator it came from.
        inputs: Data inputs; for a convolution with computed or dequantized weights the weights are the second.
        outputs: Output tensors.
        nodes: ONNX nodes it stands for or absorbed.
        of: The ONNX node that a layer which the parser left unnamed belongs to.
        rank: Where the optimizer visits it.
        cases: What its state rests on, in the order in which it came about.
        passage: How a Q passes it; None: it does not.
        activation: TensorRT's type of an ACTIVATION.
        operation: TensorRT's operation of an ELEMENTWISE.
        relu: Name of the Relu that was fused to an ELEMENTWISE or SCALE.
        per_channel: A SCALE with a factor for each channel.
        shift_only: A SCALE that only adds.
        strided: A SLICE with steps of more than 1.
        dims: Dimensions of a CONSTANT; None where they are not known.
        pooling: Of a REDUCE the pooling that it can become.
        window: Of a POOLING.
        weights: Of a layer with weights, which alone has the attribute.
        quant: Scale and zero point of a Q, DQ or copy.
        computed_scale: A Q or DQ whose scale is computed at run time.
        clone: A Q that is a copy in front of a Concat.
        pair: The Q in front of a DQ.
        passed: What a Q moved up past, or a DQ down, in the order of its moves.
        merged: Qs that this one stands for as well, each with what it moved up past; the first :data:`MERGED`, as a Q
            that comes to a tensor by several ways is there once for each of them.
        blocked: What kept a Q from moving on, where it last stood.
        held: What says that a DQ stays in front of its readers; they rest on it only where they would move it.
        acts_as: Of a POINTWISE made of several ``SiLU``, or else the operator of its last node.
        joined: Of a POINTWISE the Add that was joined behind an activation, after the node in front of it.
        first_scale: The scale that a conversion from INT8 to INT8 reads.
        dq_passed: A DQ moved down past it.
        requantizes: A copy from INT8 to INT8.
        int8: The layer computes in INT8 (inputs are quantized).
        int8_out: The layer writes INT8 because a Q was absorbed.
        quantized_as: The type that ``int8`` stands for.
        residual: The residual input of a convolution that took an Add.
        in_myelin: It was handed to Myelin.
        region: The region of Myelin that it runs in, on targets where such regions take in Q and DQ.
        copied: A Slice that is a copy in the engine.
        eliminated: A Slice or Concat whose tensors share memory.
        copies: Names and tensors of the copies that an eliminated Concat needs.
    """

    __slots__ = (
        "_fusion",
        "_shuffling",
        "activation",
        "acts_as",
        "blocked",
        "cases",
        "clone",
        "computed_scale",
        "copied",
        "copies",
        "dims",
        "dq_passed",
        "eliminated",
        "first_scale",
        "held",
        "id",
        "in_myelin",
        "inputs",
        "int8",
        "int8_out",
        "joined",
        "kind",
        "merged",
        "name",
        "nodes",
        "of",
        "op",
        "operation",
        "outputs",
        "pair",
        "passage",
        "passed",
        "per_channel",
        "pooling",
        "quant",
        "quantized_as",
        "rank",
        "region",
        "relu",
        "requantizes",
        "residual",
        "shift_only",
        "strided",
        "weights",
        "window",
    )
    weights: Weighted

    def __init__(self, kind: LayerKind, name: str, op: str = "") -> None:
        self.id = -1
        self.kind = kind
        self.name = name
        self.op = op
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.nodes: list[str] = []
        self.rank = UNRANKED
        self.cases: dict[Case, None] = {}
        self.of = ""
        self.passage: QPassage | None = None
        self.activation = ""
        self.operation = ""
        self.relu = ""
        self.per_channel = True
        self.shift_only = False
        self.strided = False
        self.dims: tuple[int, ...] | None = None
        self.pooling: str | None = None
        self.window: Window | None = None
        self.quant: QuantParams | None = None
        self.computed_scale = False
        self.clone = False
        self.pair = ""
        self.passed: Way = NOWHERE
        self.merged: tuple[tuple[str, Way], ...] = ()
        self.blocked: Refusal | None = None
        self.held: tuple[Case, ...] = ()
        self.acts_as = ""
        self.joined: tuple[str, str] | None = None
        self.first_scale: Scale = None
        self.dq_passed = False
        self.requantizes = False
        self.int8 = False
        self.int8_out = False
        self.quantized_as = _INT8
        self.residual: Tensor | None = None
        self.in_myelin = False
        self.region: MyelinRegion | None = None
        self.copied = False
        self.eliminated = False
        self.copies: tuple[tuple[str, Tensor], ...] = ()
        self._shuffling: Shuffling | None = None
        self._fusion: Fusion | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    @property
    def shuffling(self) -> Shuffling:
        """Of a SHUFFLE."""
        if self._shuffling is None:
            self._shuffling = Shuffling()
        return self._shuffling

    @property
    def fusion(self) -> Fusion:
        """What a layer with weights took in."""
        if self._fusion is None:
            self._fusion = Fusion()
        return self._fusion

    @property
    def pools(self) -> str:
        """``MAX`` or ``AVERAGE`` for a POOLING; empty for others."""
        return "" if self.window is None else self.window.type

    def moved_past(self, step: Step) -> None:
        """Notes that a Q, with those that it stands for, moved past an operator."""
        self.passed = self.passed.then(step)
        self.merged = tuple((name, way.then(step)) for name, way in self.merged)

    def stand_for(self, name: str, other: Layer) -> None:
        """Notes that a Q stands for another one, and for those that this stood for."""
        if len(self.merged) < MERGED:
            self.merged = (*self.merged, (name, other.passed), *other.merged)[:MERGED]

    def rest_on(self, *cases: Case) -> None:
        """Notes that the layer's state rests on cases."""
        for case in cases:
            self.cases[case] = None

    @property
    def above(self) -> list[Layer]:
        """The layers that write what it reads."""
        return [t.producer for t in self.inputs if t.producer is not None]

    @property
    def is_read(self) -> bool:
        """Whether a layer or the network's user reads what it writes."""
        return any(tensor.consumers or tensor.is_output for tensor in self.outputs)

    @property
    def readers(self) -> list[Layer]:
        """The layers that read what it writes."""
        return [r for t in self.outputs for r in t.consumers]

    @property
    def beside(self) -> list[Layer]:
        """The layers above and behind: those that write what it reads, and those that read what it writes."""
        return [*self.above, *self.readers]

    @property
    def out(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def data(self) -> Tensor:
        """The first input."""
        return self.inputs[0]


def reached(
    start: Iterable[Layer], further: Callable[[Layer], Iterable[Layer]]
) -> dict[Layer, None]:
    """What can be reached from some layers, these first, in the order of a search in breadth."""
    found = dict.fromkeys(start)
    queue = list(found)
    for layer in queue:
        for other in further(layer):
            if other not in found:
                found[other] = None
                queue.append(other)
    return found


def inserted_shuffle(name: str, rank: Rank) -> Layer:
    """A shuffle that a pass puts in, not yet in the network."""
    layer = Layer(LayerKind.SHUFFLE, name)
    layer.passage, layer.rank = INSERTED_SHUFFLE, rank
    return layer


def dq_of(tensor: Tensor) -> Layer | None:
    """The DQ that writes a tensor."""
    maker = tensor.producer
    return maker if maker is not None and maker.kind is _DEQUANTIZE else None


def constant_of(tensor: Tensor) -> Layer | None:
    """The constant layer that writes a tensor."""
    maker = tensor.producer
    return maker if maker is not None and maker.kind is _CONSTANT else None


def only_q(tensor: Tensor) -> Layer | None:
    """The Q that is a tensor's single reader."""
    reader = tensor.only_reader()
    return reader if reader is not None and reader.kind is _QUANTIZE else None


def is_relu(layer: Layer) -> bool:
    """Whether a layer is a Relu, which TensorRT fuses by passes of its own."""
    return layer.kind == LayerKind.ACTIVATION and layer.activation == "RELU"


def can_absorb(q: Layer | None) -> bool:
    """Whether a layer can take a Q in: it has one scale, known when the engine is built."""
    return (
        q is not None and not q.computed_scale and not (q.quant is not None and q.quant.per_channel)
    )


def weights_position(layer: Layer) -> int | None:
    """Which input of a weighted layer is its weights; None where they are plain constants inside the layer."""
    if layer.kind not in WEIGHTED or layer.fusion.weights or layer.weights.inside:
        return None
    return 1 if len(layer.inputs) > 1 else None


def needs_myelin(layer: Layer) -> bool:
    """Whether only Myelin runs a layer's operator."""
    return layer.op in _IN_MYELIN


def node_name(layer: Layer | None) -> str:
    """The ONNX name to show users for a layer."""
    if layer is None:
        return ""
    return layer.nodes[0] if layer.nodes else layer.of or layer.name


def float_precision(elem_type: int, strongly_typed: bool) -> Precision:
    """The precision of a float tensor: the ONNX type for strongly typed targets, else FLOAT."""
    found = precision_of(elem_type)
    weak = found.is_float and not strongly_typed
    return Precision.FLOAT if weak or found == Precision.UNKNOWN else found
