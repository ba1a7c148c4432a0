"""The smaller records that a build is made of: parse section, tuning, memory, profile, messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int | None, ...]
"""Dimensions as printed (NCHW for images); None where TensorRT prints a dynamic one as a negative number."""

MAX_DIMENSION = 1 << 40  # a larger one is damage, and is taken as unknown


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """A tensor of the ONNX graph as the parser printed it; ``dtype`` is ONNX's word (``FLOAT``, ``INT64``)."""

    name: str
    shape: Shape | None
    dtype: str


@dataclass(slots=True)
class ParsedNode:
    """An ONNX node of the parse section.

    Attributes:
        name: As printed.
        op: Operator type.
        inputs: In order; a None is an optional input that is not set.
        outputs: In order.
        line: Where its parsing begins.
        details: What the parser says of it: ``kernel``, ``strides``, ``prepadding``, ``axis``, ...
    """

    name: str
    op: str
    inputs: list[ParsedTensor | None] = field(default_factory=list)
    outputs: list[ParsedTensor | None] = field(default_factory=list)
    line: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ParseSection:
    """What the ONNX parser printed.

    Attributes:
        nodes: The graph's nodes in order.
        initializers: Names, in order.
        inputs: Network inputs with type and dimensions.
        outputs: Tensor names marked as outputs, in order.
        layers: TensorRT layer name to ONNX node name (``Registering layer``).
        onnx_file: ``Input filename``.
        opset: ``Opset version``.
        producer: ``Producer name`` and version.
    """

    nodes: list[ParsedNode] = field(default_factory=list)
    initializers: list[str] = field(default_factory=list)
    inputs: list[ParsedTensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    onnx_file: str = ""
    opset: int = 0
    producer: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Every node and initializer name, and the layer names made of them: to settle doubtful cuts in fused names."""
        return frozenset({*(n.name for n in self.nodes), *self.initializers, *self.layers})


@dataclass(frozen=True, slots=True)
class Milestone:
    """``After tensor merging: 82 layers``."""

    what: str
    layers: int
    line: int


@dataclass(slots=True)
class Message:
    """A warning or error, once for each wording, with the first line and how often it came."""

    level: str
    text: str
    line: int
    count: int = 1


@dataclass(slots=True)
class TunedLayer:
    """What the builder timed for one layer.

    Attributes:
        name: The layer, or ``<in> -> tensor`` of an optional reformat.
        tactics: Number of tactics timed.
        best_ms: Fastest time seen, over all formats; None where none was printed.
        seconds: Wall-clock time spent, from the log's timestamps (whole seconds).
        runner: The runner chosen last.
    """

    name: str
    tactics: int = 0
    best_ms: float | None = None
    seconds: float = 0.0
    runner: str = ""


@dataclass(slots=True)
class Tactics:
    """Counts over the autotuning section.

    Attributes:
        timed: Tactics timed.
        combinations: Format combinations tried.
        reformat_timings: Reformats timed or costed (``Autotuning Reformat``).
        skipped: Runners without a valid tactic.
        cached: Layers whose timing came from the cache.
        costed: Layers whose costs were computed, where the line names them (8.6 and later).
        reasons: Why tactics were passed over (``Skipping tactic ... due to``) to how often; the first hundred wordings.
        refused: (runner, layer) without a valid tactic to how often; the first few hundred.
        chosen: Runner type to how often it was chosen.
        layers: By name; optional reformats apart.
        reformats: The builder's trial reformats (``Optimizer Reformat``), by name.
    """

    timed: int = 0
    combinations: int = 0
    reformat_timings: int = 0
    skipped: int = 0
    cached: int = 0
    costed: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    chosen: Counter[str] = field(default_factory=Counter)
    layers: dict[str, TunedLayer] = field(default_factory=dict)
    reformats: dict[str, TunedLayer] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets everything: another build begins."""
        self.timed = self.combinations = self.reformat_timings = self.skipped = self.cached = 0
        for kept in (self.chosen, self.layers, self.reformats, self.costed, self.reasons,
                     self.refused):
            kept.clear()

    @property
    def anything(self) -> bool:
        """Whether any line of the autotuner was read."""
        return bool(self.timed or self.combinations or self.reformat_timings or self.skipped or self.cached
                    or self.costed or self.chosen or self.layers)


@dataclass(frozen=True, slots=True)
class AddedReformat:
    """``Adding reformat layer: Reformatted Input Tensor 0 to L (T) from A to B``; formats as printed."""

    name: str
    tensor: str
    source: str
    target: str
    line: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Time of one layer in the profile; milliseconds, ``median_ms`` None before TensorRT 8.4."""

    name: str
    total_ms: float
    average_ms: float
    median_ms: float | None
    percent: float

    @property
    def ms(self) -> float:
        """The median, which one slow execution does not move; the average where there is none."""
        return self.median_ms or self.average_ms


@dataclass(slots=True)
class Memory:
    """Memory as the builder reports it: bytes, but for the ``_mib`` fields; None where not printed."""

    host_persistent: int | None = None
    device_persistent: int | None = None
    scratch: int | None = None
    activation: int | None = None
    weights: int | None = None
    engine_mib: int | None = None
    peak_cpu_mib: int | None = None
    peak_gpu_mib: int | None = None
    layers: dict[str, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class LineCounts:
    """How the lines of the files were understood. Timing lines are those that the autotuner and the timer repeat.

    ``marked`` are lines that say themselves that TensorRT wrote them, but for most timing lines.
    """

    total: int = 0
    timing: int = 0
    marked: int = 0
    blank: int = 0
    unexplained: int = 0
    samples: list[tuple[int, str]] = field(default_factory=list)

    @property
    def unexplained_share(self) -> float:
        """Unexplained lines over all non-timing, non-blank lines; 0 to 1."""
        rest = self.total - self.timing - self.blank
        return self.unexplained / rest if rest > 0 else 0.0
