"""TensorRT's network as the optimizer passes see it: layers, tensors, and the edits that passes make."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qdqtool.evidence import Case
from qdqtool.operators import LayerKind, QPassage
from qdqtool.qdq import QuantParams, precision_of
from qdqtool.trt.provenance import Scale, Step
from qdqtool.types import Evidence, Precision, Refusal

Dims = tuple[int | None, ...]

WEIGHTED = (LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION, LayerKind.MATRIX_MULTIPLY)


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

    __slots__ = ("consumers", "elem_type", "is_output", "name", "producer", "shape", "source", "view_of")

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
        """The tensor that the engine names for it: itself, or the one it is a view of."""
        tensor, steps = self, 0
        while tensor.view_of is not None and steps < 1000:
            tensor, steps = tensor.view_of, steps + 1
        return tensor

    def only_reader(self) -> Layer | None:
        """The single layer that reads the tensor; None when several do, none does, or it is a network output."""
        if self.is_output or len(self.consumers) != 1:
            return None
        (reader, count), = self.consumers.items()
        return reader if count == 1 else None

    def sole_reader(self) -> Layer | None:
        """As :meth:`only_reader`, of a layer that may read the tensor at several of its inputs (``x * x``)."""
        return None if self.is_output or len(self.consumers) != 1 else next(iter(self.consumers))

    def read_by(self, layer: Layer) -> None:
        """Notes that one more input of a layer reads the tensor."""
        self.consumers[layer] = self.consumers.get(layer, 0) + 1

    def left_by(self, layer: Layer) -> None:
        """Notes that one input of a layer does not read the tensor any more."""
        if self.consumers[layer] == 1:
            del self.consumers[layer]
        else:
            self.consumers[layer] -= 1


@dataclass(slots=True)
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


@dataclass(slots=True)
class Window:
    """A pooling: ``MAX`` or ``AVERAGE``, and its window."""

    type: str
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()


@dataclass(slots=True)
class Shuffling:
    """What a shuffle does, and what it was made by.

    Attributes:
        moves: It changes the order of the values.
        perm: The permutation of a Transpose.
        joined: It was fused of several, or stands behind a Softmax, and may turn out to change nothing.
        before_matmul: It was inserted in front of a matrix product turned convolution.
        after_matmul: It stands behind one, and is pushed down past the bias.
        pushed: That was done.
    """

    moves: bool = False
    perm: tuple[int, ...] | None = None
    joined: bool = False
    before_matmul: bool = False
    after_matmul: bool = False
    pushed: bool = False


@dataclass(slots=True)
class Fusion:
    """What a convolution took in behind and in front of it.

    Attributes:
        activated: An activation, or the Relu of an Add: no other is taken.
        activation: The pointwise activation; SiLU and its like are named by their last node.
        pointwise: A pointwise layer (an activation other than Relu).
        pooled: A MaxPool.
        padded: A Pad in front.
        weights: Its quantized constant weights.
        merged: Name of the layer that it shares with convolutions beside it (``A || B``).
    """

    activated: bool = False
    activation: Step | None = None
    pointwise: bool = False
    pooled: bool = False
    padded: bool = False
    weights: bool = False
    merged: str = ""


class Rank(NamedTuple):
    """Where the optimizer visits a layer.

    Attributes:
        place: Place of the layer, or of the one that a pass inserted it beside.
        side: -1 in front of that, 1 behind it, 0 itself.
        part: Order among several in front or behind.
    """

    place: int
    side: int = 0
    part: int = 0

    def before(self, part: int = 0) -> Rank:
        return Rank(self.place, -1, part)

    def behind(self) -> Rank:
        return Rank(self.place, 1)

    def next(self) -> Rank:
        return Rank(self.place, self.side, self.part + 1)


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
        shuffling: Of a SHUFFLE.
        weights: Of a layer with weights.
        fusion: Of a layer with weights.
        quant: Scale and zero point of a Q, DQ or copy.
        computed_scale: A Q or DQ whose scale is computed at run time.
        clone: A Q that is a copy in front of a Concat.
        pair: The Q in front of a DQ.
        passed: What a Q moved up past, or a DQ down, in the order of its moves.
        merged: Qs that this one stands for as well, each with what it moved up past.
        blocked: What kept a Q from moving on, where it last stood.
        joined: Of a POINTWISE the Add that was joined behind an activation, after the node in front of it.
        first_scale: The scale that a conversion from INT8 to INT8 reads.
        dq_passed: A DQ moved down past it.
        requantizes: A copy from INT8 to INT8.
        int8: The layer computes in INT8 (inputs are quantized).
        int8_out: The layer writes INT8 because a Q was absorbed.
        quantized_as: The type that ``int8`` stands for.
        residual: The residual input of a convolution that took an Add.
        in_myelin: It was handed to Myelin.
        copied: A Slice that is a copy in the engine.
        eliminated: A Slice or Concat whose tensors share memory.
        copies: Names and tensors of the copies that an eliminated Concat needs.
    """

    of: str = ""
    passage: QPassage | None = None
    activation: str = ""
    operation: str = ""
    relu: str = ""
    per_channel: bool = True
    shift_only: bool = False
    strided: bool = False
    dims: tuple[int, ...] | None = None
    pooling: str | None = None
    window: Window | None = None
    quant: QuantParams | None = None
    computed_scale: bool = False
    clone: bool = False
    pair: str = ""
    passed: tuple[Step, ...] = ()
    merged: tuple[tuple[str, tuple[Step, ...]], ...] = ()
    blocked: Refusal | None = None
    joined: tuple[str, str] | None = None
    first_scale: Scale = None
    dq_passed: bool = False
    requantizes: bool = False
    int8: bool = False
    int8_out: bool = False
    quantized_as: Precision = Precision.INT8
    residual: Tensor | None = None
    in_myelin: bool = False
    copied: bool = False
    eliminated: bool = False
    copies: tuple[tuple[str, Tensor], ...] = ()
    _weights: Weighted | None = None
    _shuffling: Shuffling | None = None
    _fusion: Fusion | None = None

    def __init__(self, kind: LayerKind, name: str, op: str = "") -> None:
        self.id = -1
        self.kind = kind
        self.name = name
        self.op = op
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.nodes: list[str] = []
        self.rank = Rank(0)
        self.cases: dict[Case, None] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    @property
    def weights(self) -> Weighted:
        """Of a layer with weights, as the importer made it."""
        assert self._weights is not None, self
        return self._weights

    @weights.setter
    def weights(self, value: Weighted) -> None:
        self._weights = value

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
    def evidence(self) -> Evidence:
        """The weakest evidence of its cases."""
        return functools.reduce(Evidence.weaker, {case.evidence for case in self.cases}, Evidence.SEEN)

    def moved_past(self, step: Step) -> None:
        """Notes that a Q, with those that it stands for, moved past an operator."""
        self.passed = (*self.passed, step)
        self.merged = tuple((name, (*way, step)) for name, way in self.merged)

    def rest_on(self, *cases: Case) -> None:
        """Notes that the layer's state rests on cases."""
        for case in cases:
            self.cases[case] = None

    @property
    def out(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def data(self) -> Tensor:
        """The first input."""
        return self.inputs[0]


class Network:
    """Layers and tensors, with the edits that optimizer passes make.

    Attributes:
        layers: Layer id to layer, in creation order.
        inputs: Network input tensors.
        outputs: Network output tensors.
        relisted: Whether Myelin took a part out, after which the layers are listed anew.
        counts: Number of layers behind the stages for which TensorRT logs it (``Original``, ``After ...``).
        focus: Tensors that a round of a loop looks at, those that the last one touched; None for all.
        touched: Tensors whose producer or readers were edited in this round.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.relisted = False
        self.counts: dict[str, int] = {}
        self.focus: dict[Tensor, None] | None = None
        self.touched: dict[Tensor, None] = {}
        self._by_kind: dict[LayerKind, dict[int, Layer]] = {}
        self._next_id = 0

    # Building -------------------------------------------------------------------------------------------------

    def add(self, layer: Layer, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Layer:
        """Adds a layer and connects it."""
        layer.id = self._next_id
        self._next_id += 1
        layer.inputs = list(inputs)
        layer.outputs = list(outputs)
        for tensor in layer.inputs:
            tensor.read_by(layer)
        for tensor in layer.outputs:
            tensor.producer = layer
        self.layers[layer.id] = layer
        self._by_kind.setdefault(layer.kind, {})[layer.id] = layer
        return layer

    def remove_dead(self) -> None:
        """Removes the layers that no network output depends on."""
        alive: set[int] = set()
        stack = [t.producer for t in self.outputs if t.producer is not None]
        while stack:
            layer = stack.pop()
            if layer.id not in alive:
                alive.add(layer.id)
                stack.extend(t.producer for t in layer.inputs if t.producer is not None)
        for layer in [layer for layer in self.layers.values() if layer.id not in alive]:
            self.remove(layer)

    def order(self) -> None:
        """Ranks the layers as the optimizer visits them: breadth first, a layer once all its inputs were visited.

        So stand the lines of bevfusion-camera-orin-trt8502 (ConvReluFusion visits both input branches in turn) and
        those of the other complete logs, but for some convolutions that QuantizeDoubleInputNodes visits last.
        Outcomes do not depend on it, only names and the order of lines do.
        """
        for place, layer in enumerate(self.in_order()):
            layer.rank = Rank(place)

    def depth_first(self) -> list[Layer]:
        """The layers in the order in which convolutions are merged side by side.

        Depth first from the outputs, first to last, a layer after its inputs, of which the later-listed come first: so
        yolov8-orin-trt8412-excerpts names merged layers. Names rest on it alone.
        """
        found: list[Layer] = []
        started: set[int] = set()
        stack: list[tuple[Layer, bool]] = []
        stack.extend((t.producer, False) for t in reversed(self.outputs) if t.producer is not None)
        while stack:
            layer, behind = stack.pop()
            if behind:
                found.append(layer)
            elif layer.id not in started:
                started.add(layer.id)
                stack.append((layer, True))
                stack.extend((t.producer, False) for t in layer.inputs if t.producer is not None)
        return found

    # Reading --------------------------------------------------------------------------------------------------

    def of_kind(self, *kinds: LayerKind) -> list[Layer]:
        """The layers of some kinds, in the order in which the optimizer visits them."""
        found = [layer for kind in kinds for layer in self._by_kind.get(kind, {}).values()]
        found.sort(key=lambda layer: layer.rank)
        return found

    def near(self, kind: LayerKind) -> list[Layer]:
        """The layers of a kind, of which a loop's later rounds see only those at tensors that were touched."""
        if self.focus is None:
            return self.of_kind(kind)
        tensors = {**self.focus, **self.touched}
        found = {layer: None for t in tensors for layer in (*t.consumers, t.producer) if layer and layer.kind == kind}
        return sorted(found, key=lambda layer: layer.rank)

    def alive(self, layer: Layer) -> bool:
        """Whether the layer is still part of the network."""
        return layer.id in self.layers

    def in_order(self) -> Iterator[Layer]:
        """Every layer, breadth first: those that read none in the order of creation, then each behind its inputs."""
        waiting = {layer.id: sum(t.producer is not None for t in layer.inputs) for layer in self.layers.values()}
        ready = [layer for layer in self.layers.values() if not waiting[layer.id]]
        position = 0
        while position < len(ready):
            layer = ready[position]
            position += 1
            yield layer
            for tensor in layer.outputs:
                for reader, count in tensor.consumers.items():
                    waiting[reader.id] -= count
                    if not waiting[reader.id]:
                        ready.append(reader)

    # Editing --------------------------------------------------------------------------------------------------

    def set_kind(self, layer: Layer, kind: LayerKind) -> None:
        del self._by_kind[layer.kind][layer.id]
        layer.kind = kind
        self._by_kind.setdefault(kind, {})[layer.id] = layer

    def set_input(self, layer: Layer, position: int, tensor: Tensor) -> None:
        """Makes one input of a layer read another tensor."""
        old = layer.inputs[position]
        old.left_by(layer)
        layer.inputs[position] = tensor
        tensor.read_by(layer)
        self.touched[old] = self.touched[tensor] = None

    def add_input(self, layer: Layer, tensor: Tensor) -> None:
        layer.inputs.append(tensor)
        tensor.read_by(layer)
        self.touched[tensor] = None

    def drop_input(self, layer: Layer, position: int) -> None:
        tensor = layer.inputs.pop(position)
        tensor.left_by(layer)
        self.touched[tensor] = None

    def set_output(self, layer: Layer, tensor: Tensor) -> None:
        """Makes a layer's first output another tensor, whose producer it becomes."""
        if layer.outputs and layer.outputs[0].producer is layer:
            layer.outputs[0].producer = None
        layer.outputs[:1] = [tensor]
        tensor.producer = layer
        self.touched[tensor] = None

    def set_output_of(self, layer: Layer, old: Tensor, new: Tensor) -> None:
        """Makes a layer write ``new`` where it wrote ``old``."""
        layer.outputs = [new if t is old else t for t in layer.outputs]
        old.producer = None
        new.producer = layer
        self.touched[new] = None

    def replace_reader(self, old: Tensor, new: Tensor, reader: Layer) -> None:
        """Makes every input of ``reader`` that reads ``old`` read ``new``."""
        for position, tensor in enumerate(reader.inputs):
            if tensor is old:
                self.set_input(reader, position, new)

    def retarget(self, old: Tensor, new: Tensor) -> None:
        """Makes every reader of ``old`` read ``new``; a network output moves as well."""
        for reader, count in old.consumers.items():
            reader.inputs = [new if t is old else t for t in reader.inputs]
            new.consumers[reader] = new.consumers.get(reader, 0) + count
        old.consumers = {}
        self.touched[new] = None
        if old.is_output:
            old.is_output = False
            new.is_output = True
            self.outputs = [new if t is old else t for t in self.outputs]

    def remove(self, layer: Layer) -> None:
        """Takes a layer out; its outputs lose their producer."""
        for tensor in layer.inputs:
            tensor.left_by(layer)
            self.touched[tensor] = None
        for tensor in layer.outputs:
            if tensor.producer is layer:
                tensor.producer = None
        layer.inputs = []
        del self.layers[layer.id]
        del self._by_kind[layer.kind][layer.id]

    def absorb_reader(self, layer: Layer, reader: Layer, name: str) -> None:
        """Fuses the single reader of a layer's output into it: extra inputs, outputs and ONNX nodes move over.

        Args:
            layer: The layer that stays.
            reader: The layer that reads ``layer.out`` and is taken out.
            name: The new name of ``layer``.
        """
        middle = layer.out
        extra = [t for t in reader.inputs if t is not middle]
        outputs = reader.outputs
        reader.outputs = []
        self.remove(reader)
        for tensor in extra:
            self.add_input(layer, tensor)
        middle.producer = None
        layer.outputs = outputs
        for tensor in outputs:
            tensor.producer = layer
        layer.nodes.extend(reader.nodes)
        layer.cases.update(reader.cases)
        layer.name = name

    def insert_before(self, layer: Layer, position: int, new: Layer, between: Tensor) -> None:
        """Puts a single-input layer in front of one input of another; ``between`` becomes its output."""
        source = layer.inputs[position]
        self.add(new, [source], [between])
        self.set_input(layer, position, between)


def float_precision(elem_type: int, strongly_typed: bool) -> Precision:
    """The precision of a float tensor: the ONNX type for strongly typed targets, else FLOAT."""
    found = precision_of(elem_type)
    if found.is_float:
        return found if strongly_typed else Precision.FLOAT
    return found if found != Precision.UNKNOWN else Precision.FLOAT
