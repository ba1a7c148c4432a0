"""The pass contract: what a pass is, what it returns, and the questions that several passes ask of the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import RUNNING
from qdqtool.types import Event, Evidence, Refusal

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

    A pass never raises for a strange graph: it refuses. Subclasses list their cases and the evidence for each.
    """

    #: How well the pass is proven where nothing else is said.
    evidence: ClassVar[Evidence] = Evidence.SEEN

    def __init__(self, target: Target) -> None:
        self.target = target
        self._result = PassResult()

    @property
    def name(self) -> str:
        return type(self).__name__

    def run(self, network: Network) -> PassResult:
        """Applies the pass once over the whole network."""
        self._result = PassResult()
        self.apply(network)
        return self._result

    @abstractmethod
    def apply(self, network: Network) -> None:
        """Edits the network and reports through :meth:`event` and :meth:`refuse`."""

    def event(self, kind: str, subject: str, obj: str = "", *, pass_name: str = "") -> None:
        self._result.changed = True
        self._result.events.append(Event(pass_name or self.name, kind, subject, obj))

    def unowned(self, kind: str, subject: str, obj: str = "") -> None:
        """An event whose line names no pass (merging of layers, elimination of slices and concatenations)."""
        self._result.changed = True
        self._result.events.append(Event("", kind, subject, obj))

    def running(self, layer: Layer) -> None:
        self.event(RUNNING, layer.name)

    def refuse(self, layer: Layer, reason: str, **details: Any) -> None:
        node = layer.nodes[0] if layer.nodes else layer.name
        self._result.refusals.append(Refusal(self.name, node, reason, tuple(details.items())))

    def assume(self, layer: Layer) -> None:
        """Marks an outcome as resting on a rule that no real build has shown."""
        weaken(layer, Evidence.ASSUMED)


def weaken(layer: Layer, evidence: Evidence) -> None:
    """Lowers what the outcome of a layer is worth."""
    layer.attrs["evidence"] = evidence_of(layer).weaker(evidence)


def evidence_of(layer: Layer) -> Evidence:
    found = layer.attrs.get("evidence", Evidence.SEEN)
    assert isinstance(found, Evidence)
    return found


def dq_of(tensor: Tensor) -> Layer | None:
    """The DQ that writes a tensor."""
    layer = tensor.producer
    return layer if layer is not None and layer.kind == net.DEQUANTIZE else None


def only_q(tensor: Tensor) -> Layer | None:
    """The Q that is a tensor's single reader."""
    reader = tensor.only_reader()
    return reader if reader is not None and reader.kind == net.QUANTIZE else None


def constant_of(tensor: Tensor) -> Layer | None:
    """The constant layer that writes a tensor."""
    layer = tensor.producer
    return layer if layer is not None and layer.kind == net.CONSTANT else None


def weights_position(layer: Layer) -> int | None:
    """Which input of a weighted layer is its weights; None where they are plain constants inside the layer."""
    if layer.kind not in net.WEIGHTED or layer.attrs.get("fused_weights"):
        return None
    inside = layer.attrs.get("constant_weights", True) and not layer.attrs.get("from_matmul")
    if layer.kind == net.MATRIX_MULTIPLY or not inside:
        return 1 if len(layer.inputs) > 1 else None
    return None


def node_name(layer: Layer | None) -> str:
    """The ONNX name to tell users for a layer."""
    if layer is None:
        return ""
    return layer.nodes[0] if layer.nodes else str(layer.attrs.get("of", layer.name))


def reader_names(tensor: Tensor) -> list[tuple[str, str]]:
    """Name and ONNX operator of every reader, and ``("<output>", "Output")`` for a network output."""
    readers = [(node_name(r), r.op or r.kind) for r in tensor.consumers]
    if tensor.is_output:
        readers.append((tensor.name, "Output"))
    return readers
