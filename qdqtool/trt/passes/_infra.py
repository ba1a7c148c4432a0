"""Base classes of the passes, and the names that the modules of passes import."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from qdqtool.evidence import Case, assumed, documented, seen
from qdqtool.ir.operators import CONVOLVE, OPERATORS, LayerKind, find_case
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Reason
from qdqtool.trt.layers import (
    QDQ,
    SILU,
    WEIGHTED,
    Dims,
    Layer,
    PoolingWindow,
    Tensor,
    can_absorb,
    constant_before,
    create_shuffle,
    dq_before,
    find_reachable,
    is_computed_in_float,
    is_relu,
    needs_myelin,
    next_rank,
    node_name,
    q_after,
    quantized_type,
    rank_after,
    rank_before,
    weights_position,
)
from qdqtool.trt.network import Network, weakest_evidence
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import (
    CONVERT_TYPE,
    COPY_STOMPING,
    COPY_STRIDING,
    ELIMINATING,
    ELIMINATING_CONCAT,
    ELIMINATING_SLICE,
    FUSING,
    FUSING_INTO,
    MERGING,
    REMOVING,
    REPLACING_SLICE,
    RETARGETING,
    RUNNING,
    SQUEEZE,
    SWAP_TYPE,
    SWAPPING,
    Event,
)

__all__ = [
    "assumed",
    "can_absorb",
    "Case",
    "constant_before",
    "CONVERT_TYPE",
    "CONVOLVE",
    "COPY_STOMPING",
    "COPY_STRIDING",
    "create_shuffle",
    "Dims",
    "documented",
    "dq_before",
    "ELIMINATING",
    "ELIMINATING_CONCAT",
    "ELIMINATING_SLICE",
    "find_case",
    "find_reachable",
    "FUSING",
    "FUSING_INTO",
    "is_computed_in_float",
    "is_relu",
    "join_names",
    "Layer",
    "LayerKind",
    "MAX_JOINED",
    "MAX_NAME",
    "MERGING",
    "needs_myelin",
    "Network",
    "next_rank",
    "node_name",
    "OPERATORS",
    "Pass",
    "PoolingWindow",
    "Precision",
    "q_after",
    "QDQ",
    "quantized_type",
    "rank_after",
    "rank_before",
    "Reason",
    "ReluFusion",
    "REMOVING",
    "REPLACING_SLICE",
    "RETARGETING",
    "seen",
    "SILU",
    "SQUEEZE",
    "SWAP_TYPE",
    "SWAPPING",
    "Tensor",
    "weakest_evidence",
    "WEIGHTED",
    "weights_position",
]
# Maximum number of layers that are fused in a chain. No log shows a chain of this length. The limit
# bounds the names, which grow with each fused layer.
MAX_JOINED = 64
MAX_NAME = 1000  # maximum length of an extended name; limits the cost of hostile models


class Pass(ABC):
    """One optimizer pass, named as in TensorRT's log.

    A pass edits the network in place. It emits a line of TensorRT's log for each change
    (:meth:`fire`), and records a reason for a change that it could not make (:meth:`refuse`). It
    raises no error for an unusual graph, except beyond a limit on the size of the network.

    Attributes:
        cases: Known behaviors (:class:`qdqtool.evidence.Case`) of the pass, with their evidence.
        anonymous_lines: Kinds of log lines of the pass that do not contain its name.
        converted_kind: Layer kind that the pass converts, as in log lines; empty if the pass
            converts no kind.
        is_compared: Whether `verify` compares the lines of the pass with the log of a build. Passes
            that only prepare the names of constants and shuffles are not compared, nor are passes
            whose name in TensorRT is unknown.
        events: Lines that TensorRT logs for the last run, as data.
        reasons: Reasons why the pass left layers unchanged in the last run.
    """

    cases: ClassVar[tuple[Case, ...]]
    anonymous_lines: ClassVar[tuple[str, ...]] = ()
    converted_kind: ClassVar[str] = ""
    is_compared: ClassVar[bool] = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name = type(self).__name__
        self.events: list[Event] = []
        self.reasons: list[Reason] = []
        self._case_ids = {case: f"{self.name}/{case.name}" for case in self.cases}

    def run(self, network: Network) -> Self:
        """Apply the pass once to the whole network."""
        self.events, self.reasons = [], []
        self._apply(network)
        return self

    @abstractmethod
    def _apply(self, network: Network) -> None:
        """Edit the network, and report with :meth:`fire` and :meth:`refuse`."""

    def fire(
        self,
        case: Case,
        layer: Layer,
        kind: str,
        subject: str,
        obj: str = "",
        *,
        logged_pass: str | None = None,
    ) -> None:
        """Emit one line of TensorRT's log, and record in the layer the case that explains it.

        Args:
            case: One of the pass's cases.
            layer: Layer that the line is about.
            kind: Kind of the line (:mod:`qdqtool.trt.trace`).
            subject: Layer or tensor that the line names first.
            obj: Layer or tensor that the line names second.
            logged_pass: Pass that the line names. None for this pass, an empty string if the line
                names no pass. TensorRT runs some passes inside others, so that a line may name
                another pass.
        """
        layer.cases[case] = None
        pass_name = self.name if logged_pass is None else logged_pass
        self.events.append(Event(pass_name, kind, subject, obj, self._case_ids[case]))

    def fire_running(self, case: Case, layer: Layer, *, logged_pass: str | None = None) -> None:
        """Emit the line that says that the pass runs on a layer."""
        self.fire(case, layer, RUNNING, layer.name, logged_pass=logged_pass)

    def fire_fusing(self, case: Case, layer: Layer, first: Layer, second: Layer) -> None:
        """Emit two log lines: the pass runs on the first of two layers, and fuses both."""
        self.fire_running(case, first)
        self.fire(case, layer, FUSING, first.name, second.name)

    def fuse_consumer(self, network: Network, case: Case, layer: Layer, consumer: Layer) -> None:
        """Fuse a layer's single consumer into the layer as ``<layer> + <consumer>``.

        Two lines of TensorRT's log are emitted.
        """
        self.fire_fusing(case, layer, layer, consumer)
        network.absorb_consumer(layer, consumer, join_names(layer, consumer))

    def convert_kind(self, network: Network, case: Case, layer: Layer, kind: LayerKind) -> None:
        """Change the kind of a layer, and emit two lines of TensorRT's log."""
        self.fire_running(case, layer)
        self.fire(case, layer, SWAP_TYPE, layer.name, f"{layer.kind} to {kind}")
        network.set_kind(layer, kind)

    def refuse(self, reason: Reason) -> None:
        """Record a reason why the pass left a layer unchanged."""
        self.reasons.append(reason)


def join_names(layer: Layer, consumer: Layer) -> str:
    """Return the name of two fused layers, ``<layer> + <consumer>``.

    The name of a constant is first cut off at ``MAX_NAME`` characters, because any number of layers
    may be folded into a constant.
    """
    name = layer.name[:MAX_NAME] if layer.kind is LayerKind.CONSTANT else layer.name
    return f"{name} + {consumer.name}"


class ReluFusion(Pass):
    """Base class of passes that fuse a layer with the Relu that is its single consumer.

    A subclass has exactly one case.

    Attributes:
        kind: Kind of the layer before the Relu.
    """

    kind: ClassVar[LayerKind]

    def _apply(self, network: Network) -> None:
        (case,) = self.cases
        pairs = network.single_consumer_pairs(self.kind, consumer_kind=LayerKind.ACTIVATION)
        for layer, relu in pairs:
            if is_relu(relu) and not layer.in_myelin:
                layer.relu_name = relu.name
                layer.fusion.has_activation = True
                self.fuse_consumer(network, case, layer, relu)
