"""TensorRT's network as the optimizer passes see it: layers, tensors, and the edits that passes make.

Layer kinds carry TensorRT's own names where its log prints them (``CONVOLUTION``, ``QUANTIZE``, ``POINTWISE`` ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from qdqtool.qdq import QuantParams, precision_of
from qdqtool.types import Precision

CONSTANT = "CONSTANT"
QUANTIZE = "QUANTIZE"
DEQUANTIZE = "DEQUANTIZE"
CONVOLUTION = "CONVOLUTION"
DECONVOLUTION = "DECONVOLUTION"
MATRIX_MULTIPLY = "MATRIX_MULTIPLY"
SCALE = "SCALE"
ACTIVATION = "ACTIVATION"
ELEMENTWISE = "ELEMENTWISE"
UNARY = "UNARY"
POINTWISE = "POINTWISE"
POOLING = "POOLING"
REDUCE = "REDUCE"
PADDING = "PADDING"
SHUFFLE = "SHUFFLE"
SLICE = "SLICE"
CONCATENATION = "CONCATENATION"
RESIZE = "RESIZE"
SOFTMAX = "SOFTMAX"
IDENTITY = "IDENTITY"
COPY = "COPY"  # kQDQ: a Q or DQ that stays in the engine
OTHER = "OTHER"

WEIGHTED = (CONVOLUTION, DECONVOLUTION, MATRIX_MULTIPLY)


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
        self.shape: tuple[int | None, ...] | None = None
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


class Layer:
    """A layer.

    Attributes:
        kind: One of this module's kinds.
        name: TensorRT's name; fusions join names with `` + ``.
        op: The ONNX operator it came from.
        inputs: Data inputs; for a convolution with computed or dequantized weights the weights are the second.
        outputs: Output tensors.
        nodes: ONNX nodes it stands for or absorbed.
        quant: Scale and zero point of a Q, DQ or copy.
        attrs: What passes need to know: kernel, groups, activation, constants, weights ...
        rank: Where the optimizer visits it.
        int8: The layer computes in INT8 (inputs are quantized).
        int8_out: The layer writes INT8 because a Q was absorbed.
        residual: The residual input of a convolution that took an Add.
    """

    __slots__ = (
        "attrs",
        "id",
        "inputs",
        "int8",
        "int8_out",
        "kind",
        "name",
        "nodes",
        "op",
        "outputs",
        "quant",
        "rank",
        "residual",
    )

    def __init__(self, kind: str, name: str, op: str = "") -> None:
        self.id = -1
        self.kind = kind
        self.name = name
        self.op = op
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.nodes: list[str] = []
        self.quant: QuantParams | None = None
        self.attrs: dict[str, Any] = {}
        self.rank: tuple[float, int] = (0.0, 0)
        self.int8 = False
        self.int8_out = False
        self.residual: Tensor | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

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
        focus: Tensors that a round of a loop looks at, those that the last one touched; None for all.
        touched: Tensors whose producer or readers were edited in this round.
        q_copies: Quantizers that were copied to the inputs of a layer so far; bounded in SplitQAcrossPrecedingFanIn.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.relisted = False
        self.q_copies = 0
        self.focus: dict[Tensor, None] | None = None
        self.touched: dict[Tensor, None] = {}
        self._by_kind: dict[str, dict[int, Layer]] = {}
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

    def order(self) -> None:
        """Removes dead layers and ranks the rest as the optimizer visits them.

        Depth first from the outputs, first to last, a layer after its inputs, of which the later-listed come first:
        the order in which yolov8-orin-trt8412-excerpts names merged layers. TensorRT's own order differs between
        passes and is not known in full; the outcomes do not depend on it, only names and the order of lines do.
        """
        rank = 0
        done: set[int] = set()
        started: set[int] = set()
        stack: list[tuple[Layer, int]] = [(t.producer, 0) for t in reversed(self.outputs) if t.producer is not None]
        while stack:
            layer, state = stack.pop()
            if state:
                done.add(layer.id)
                layer.rank = (float(rank), 0)
                rank += 1
                continue
            if layer.id in started:
                continue
            started.add(layer.id)
            stack.append((layer, 1))
            for tensor in layer.inputs:
                producer = tensor.producer
                if producer is not None and producer.id not in started:
                    stack.append((producer, 0))
        for layer in [layer for layer in self.layers.values() if layer.id not in done]:
            self.remove(layer)

    # Reading --------------------------------------------------------------------------------------------------

    def of_kind(self, *kinds: str) -> list[Layer]:
        """The layers of some kinds, in the order in which the optimizer visits them."""
        found = [layer for kind in kinds for layer in self._by_kind.get(kind, {}).values()]
        found.sort(key=lambda layer: layer.rank)
        return found

    def near(self, kind: str) -> list[Layer]:
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
        """Every layer, inputs before readers."""
        waiting = {layer.id: sum(t.producer is not None for t in layer.inputs) for layer in self.layers.values()}
        ready = sorted((layer for layer in self.layers.values() if not waiting[layer.id]), key=lambda x: x.rank)
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

    def set_kind(self, layer: Layer, kind: str) -> None:
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
