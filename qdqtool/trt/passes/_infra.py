"""The pass contract: what a pass is, what it leaves behind, and what several passes are made of."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from qdqtool.knowledge.tables import Case, assumed, documented, seen
from qdqtool.model.operators import CONVOLVE, LayerKind
from qdqtool.trt.layers import QDQ, Layer, Tensor, constant_of, dq_of, is_relu, node_name, only_q
from qdqtool.trt.network import Network, weakest
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import FUSING, FUSING_INTO, REMOVING, RUNNING, SWAP_TYPE, SWAPPING
from qdqtool.types import Event, Refusal

__all__ = [  # what passes are written with
    "assumed",
    "Case",
    "constant_of",
    "CONVOLVE",
    "documented",
    "dq_of",
    "FUSING",
    "FUSING_INTO",
    "is_relu",
    "joined_name",
    "Layer",
    "LayerKind",
    "MAX_JOINED",
    "MAX_NAME",
    "Network",
    "node_name",
    "only_q",
    "Pass",
    "QDQ",
    "ReluFusion",
    "REMOVING",
    "seen",
    "SWAPPING",
    "Tensor",
    "weakest",
]
MAX_JOINED = 64  # members of one chain; no log shows so long a one, and names grow with each
MAX_NAME = 1000  # characters of a name that a pass goes on from; bounds what a hostile nest or chain can take


class Pass(ABC):
    """One optimizer pass, named as in TensorRT's log.

    A pass never raises for a strange graph: it refuses. :meth:`fire` is the only way to emit a line of the trace, and
    the case that is fired stays with the layer.

    Attributes:
        cases: What is known of it.
        unnamed: Kinds of its lines that do not name it,
        turned: and which kind of layer its lines about types name.
        compared: Whether `verify` compares its lines with a build's. Those that only prepare names of constants and
            shuffles, and those whose name in TensorRT is not known, are not.
        events: The lines that TensorRT logs for its last run, as data.
        refusals: Where it looked and did not fire, and why.
    """

    cases: ClassVar[tuple[Case, ...]]
    unnamed: ClassVar[tuple[str, ...]] = ()
    turned: ClassVar[str] = ""
    compared: ClassVar[bool] = True

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

    def fire(
        self,
        case: Case,
        layer: Layer,
        kind: str,
        subject: str,
        obj: str = "",
        *,
        by: str | None = None,
    ) -> None:
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

    def fusing(self, case: Case, layer: Layer, first: Layer, second: Layer) -> None:
        """Two lines: it runs on the first of two layers, and fuses them."""
        self.running(case, first)
        self.fire(case, layer, FUSING, first.name, second.name)

    def join(self, network: Network, case: Case, layer: Layer, reader: Layer) -> None:
        """Fuses the single reader of a layer into it, ``<layer> + <reader>``, logged with two lines."""
        self.fusing(case, layer, layer, reader)
        network.absorb_reader(layer, reader, joined_name(layer, reader))

    def turn(self, network: Network, case: Case, layer: Layer, kind: LayerKind) -> None:
        """Makes a layer one of another kind, logged with two lines."""
        self.running(case, layer)
        self.fire(case, layer, SWAP_TYPE, layer.name, f"{layer.kind} to {kind}")
        network.set_kind(layer, kind)

    def refuse(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)


def joined_name(layer: Layer, reader: Layer) -> str:
    """``<layer> + <reader>``; of a constant, into which any number of readers is folded, the beginning at most."""
    name = layer.name[:MAX_NAME] if layer.kind is LayerKind.CONSTANT else layer.name
    return f"{name} + {reader.name}"


class ReluFusion(Pass):
    """Joins a layer of one kind and the Relu that alone reads it, as its one case says."""

    kind: ClassVar[LayerKind]

    def apply(self, network: Network) -> None:
        (case,) = self.cases
        for layer, relu in network.pairs(self.kind, read_by=LayerKind.ACTIVATION):
            if is_relu(relu) and not layer.in_myelin:
                layer.relu = relu.name
                layer.fusion.activated = True
                self.join(network, case, layer, relu)
