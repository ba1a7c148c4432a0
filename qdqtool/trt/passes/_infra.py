"""The pass contract: what a pass is, what it leaves behind, and the questions that several ask of the network."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from qdqtool.knowledge.tables import Case
from qdqtool.model.operators import OPERATORS, LayerKind
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import FUSING, RUNNING, SWAP_TYPE
from qdqtool.types import Event, Refusal

MAX_JOINED = 64  # members of one chain; no log shows so long a one, and names grow with each


class Pass(ABC):
    """One optimizer pass, named as in TensorRT's log.

    A pass never raises for a strange graph: it refuses. ``cases`` lists what is known of it; :meth:`fire` is the only
    way to emit a line of the trace, and the case that is fired stays with the layer.

    Attributes:
        events: The lines that TensorRT logs for its last run, as data.
        refusals: Where it looked and did not fire, and why.
    """

    cases: ClassVar[tuple[Case, ...]]

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name = type(self).__name__
        self.events: list[Event] = []
        self.refusals: list[Refusal] = []
        self._where: dict[Case, str] = {}  # what an event says of a case

    def run(self, network: Network) -> Self:
        """Applies the pass once over the whole network."""
        self.events, self.refusals = [], []
        self.apply(network)
        return self

    @abstractmethod
    def apply(self, network: Network) -> None:
        """Edits the network and reports through :meth:`fire` and :meth:`refuse`."""

    def fire(self, case: Case, layer: Layer, kind: str, subject: str, obj: str = "", *, by: str | None = None) -> None:
        """Emits one line of TensorRT's log and lets the layer rest on the case that shows it.

        Args:
            case: One of the pass's cases.
            layer: The layer that the line is about.
            kind: What the line says (:mod:`qdqtool.trt.trace`).
            subject: The layer or tensor that it names first.
            obj: The second one.
            by: The pass that the line names, where that is another one (TensorRT runs some passes inside others), or
                an empty string where it names none.
        """
        layer.cases[case] = None
        where = self._where.get(case)
        if where is None:
            where = self._where[case] = f"{self.name}/{case.name}"
        self.events.append(Event(self.name if by is None else by, kind, subject, obj, where))

    def running(self, case: Case, layer: Layer, *, by: str | None = None) -> None:
        self.fire(case, layer, RUNNING, layer.name, by=by)

    def join(self, network: Network, case: Case, layer: Layer, reader: Layer) -> None:
        """Fuses the single reader of a layer into it, ``<layer> + <reader>``, logged with two lines."""
        self.running(case, layer)
        self.fire(case, layer, FUSING, layer.name, reader.name)
        network.absorb_reader(layer, reader, f"{layer.name} + {reader.name}")

    def turn(self, network: Network, case: Case, layer: Layer, kind: LayerKind) -> None:
        """Makes a layer one of another kind, logged with two lines."""
        self.running(case, layer)
        self.fire(case, layer, SWAP_TYPE, layer.name, f"{layer.kind} to {kind}")
        network.set_kind(layer, kind)

    def refuse(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)


def dq_of(tensor: Tensor) -> Layer | None:
    """The DQ that writes a tensor."""
    layer = tensor.producer
    return layer if layer is not None and layer.kind == LayerKind.DEQUANTIZE else None


def only_q(tensor: Tensor) -> Layer | None:
    """The Q that is a tensor's single reader."""
    reader = tensor.only_reader()
    return reader if reader is not None and reader.kind == LayerKind.QUANTIZE else None


def constant_of(tensor: Tensor) -> Layer | None:
    """The constant layer that writes a tensor."""
    layer = tensor.producer
    return layer if layer is not None and layer.kind == LayerKind.CONSTANT else None


def is_relu(layer: Layer | None) -> bool:
    """Whether a layer is a Relu, which TensorRT fuses by passes of its own."""
    return layer is not None and layer.kind == LayerKind.ACTIVATION and layer.activation == "RELU"


def can_absorb(q: Layer | None) -> bool:
    """Whether a layer can take a Q in: it has one scale, known when the engine is built."""
    return q is not None and not q.computed_scale and not (q.quant is not None and q.quant.per_channel)


def weights_position(layer: Layer) -> int | None:
    """Which input of a weighted layer is its weights; None where they are plain constants inside the layer."""
    if layer.kind not in WEIGHTED or layer.fusion.weights or layer.weights.inside:
        return None
    return 1 if len(layer.inputs) > 1 else None


def needs_myelin(layer: Layer) -> bool:
    """Whether only Myelin runs a layer's operator."""
    known = OPERATORS.get(layer.op)
    return known is not None and known.myelin


def beside(layer: Layer) -> list[Layer]:
    """The layers that write what a layer reads, and those that read what it writes."""
    above = [t.producer for t in layer.inputs if t.producer is not None]
    return [*above, *(r for t in layer.outputs for r in t.consumers)]


def node_name(layer: Layer | None) -> str:
    """The ONNX name to show users for a layer."""
    if layer is None:
        return ""
    return layer.nodes[0] if layer.nodes else layer.of or layer.name


def swap(network: Network, op: Layer, q: Layer) -> None:
    """Puts a Q in front of the operator that it is the only reader of; tensor names stay with their position."""
    exchange(network, op, q)
    q.out.shape, op.out.shape = q.data.shape, q.out.shape


def exchange(network: Network, first: Layer, second: Layer) -> None:
    """Turns round two layers in a row; tensor names stay with their position, shapes are the caller's."""
    source, middle, out = first.data, first.out, second.out
    network.set_input(second, 0, source)
    network.set_input(first, 0, middle)
    network.set_output(second, middle)
    network.set_output(first, out)


def drop_reader(network: Network, dq: Layer, reader: Layer) -> bool:
    """Makes ``reader`` read the DQ's INT8 input; says whether the DQ was thereby removed."""
    network.replace_reader(dq.out, dq.data, reader)
    reader.rest_on(*dq.cases)
    if dq.out.consumers or dq.out.is_output:
        return False
    network.remove(dq)
    return True


def absorb_q(network: Network, layer: Layer, q: Layer) -> None:
    """Takes the Q behind a layer into it: the layer writes INT8."""
    out = q.out
    layer.nodes.extend(q.nodes)
    layer.rest_on(*q.cases)
    network.remove(q)
    network.set_output(layer, out)
    layer.int8_out = True
