"""The pass contract: what a pass is, what it returns, and the questions that several passes ask of the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from qdqtool.knowledge.evidence import Case
from qdqtool.model.operators import LayerKind
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import RUNNING
from qdqtool.types import Event, Refusal

MAX_JOINED = 64  # members of one chain; no log shows so long a one, and names grow with each


@dataclass
class PassResult:
    """What a pass did.

    Attributes:
        changed: Whether the network was edited.
        events: The lines that TensorRT logs for it, as data.
        refusals: Where the pass looked and did not fire, and why.
    """

    changed: bool = False
    events: list[Event] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


class Pass(ABC):
    """One optimizer pass, named as in TensorRT's log.

    A pass never raises for a strange graph: it refuses. ``cases`` lists what is known of it; :meth:`fire` is the only
    way to emit a line of the trace, and the case that is fired stays with the layer.
    """

    cases: ClassVar[tuple[Case, ...]]

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name = type(self).__name__
        self._result = PassResult()

    def run(self, network: Network) -> PassResult:
        """Applies the pass once over the whole network."""
        self._result = PassResult()
        self.apply(network)
        return self._result

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
        self._result.changed = True
        where = f"{self.name}/{case.name}"
        self._result.events.append(Event(self.name if by is None else by, kind, subject, obj, where))

    def running(self, case: Case, layer: Layer, *, by: str | None = None) -> None:
        self.fire(case, layer, RUNNING, layer.name, by=by)

    def refuse(self, refusal: Refusal) -> None:
        self._result.refusals.append(refusal)


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
