"""Result of :func:`qdqtool.tune`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx

from qdqtool.insertion.result import maxima_as_json
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import save
from qdqtool.trt.result import Prediction
from qdqtool.tuning.planner import Configuration, PlacementCost
from qdqtool.tuning.sites import INT8
from qdqtool.util.files import InputFiles, forbid_overwrite, save_answer
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    import onnx_graphsurgeon

    from qdqtool.timing.results import TimeEstimate

SCHEMA = "qdqtool/tuning/1"
METRIC_DECIMALS = 3  # printed decimals of metrics of about 1
MAX_METRIC_DECIMALS = 6  # to tell a metric from a goal, or if the scale is unknown
# Codes of the notes on a written model that has the ranges of the search.
_SEARCH_RANGES = {"ranges-on", "ranges-from-all-worse"}


@dataclass
class SiteChoice:
    """One alternative for a site, with its predicted cost and measured error.

    Attributes:
        choice: ``float``, ``int8``, a calibration method, or ``own-scale`` (a separate scale for a
            tensor of a scale group).
        cost: Predicted cost of the start configuration of the search with this choice applied. In
            the start configuration, every layer is INT8 except sites that cost no time in float.
        error: Estimated output error with this choice; None if the choice was not measured.
        why: Reason why the choice was not measured, else empty.
        left_out: Whether the choice was left out before the search, because no benefit is possible.
    """

    choice: str
    cost: PlacementCost
    error: float | None = None
    why: str = ""
    left_out: bool = False

    def as_json(self, base: PlacementCost) -> Json:
        """Return the fields of the JSON. Costs are relative to `base`."""
        return {
            "choice": self.choice,
            "measured": self.error is not None,
            "error": _round_number(self.error),
            **_cost_change(self.cost, base),
            "cost": _round_number(self.cost.value - base.value),
            "why": self.why,
            "left_out": self.left_out,
        }


@dataclass
class SiteResult:
    """A site (nodes that are quantized or float together), and the choice of the search.

    Attributes:
        site: Name of the site.
        kind: ``convolution``, ``group``, ``residual``, ``pooling``, ``head`` or ``attention``.
        nodes: Names of the site's nodes.
        tensors: Activations that are no longer quantized if the site is float.
        choice: Choice in the chosen placement, see :attr:`SiteChoice.choice`.
        why: Reason for the choice, in one sentence.
        loss: Decrease of the output error of the start configuration of the search (see
            :class:`SiteChoice`) if the site is float. It is much smaller than `error_alone`,
            because squared errors add up. None if this was not measured, or if the site is float
            in the start configuration.
        choices: All alternatives for the site.
        swept_on: Number of samples on which the site was measured alone, which depends on the time
            limit.
        error_alone: Output error if only this site is quantized; None if this was not measured.
    """

    site: str
    kind: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    choice: str
    why: str
    loss: float | None
    choices: list[SiteChoice]
    swept_on: int = 0
    error_alone: float | None = None

    def as_json(self, base: PlacementCost) -> Json:
        """Return the fields of the JSON. Costs are relative to `base`."""
        change: Json = {"ms": None, "int8": 0, "conversions": 0}
        if self.choices:
            change = _cost_change(self.choices[0].cost, base)
        return {
            "site": self.site,
            "kind": self.kind,
            "nodes": list(self.nodes),
            "tensors": list(self.tensors),
            "choice": self.choice,
            "why": self.why,
            "loss": _round_number(self.loss),
            "error_alone": _round_number(self.error_alone),
            "swept_on": self.swept_on,
            **change,
            "choices": [choice.as_json(base) for choice in self.choices],
        }


def _cost_change(cost: PlacementCost, base: PlacementCost) -> Json:
    ms = None if cost.ms is None or base.ms is None else _round_number(cost.ms - base.ms)
    return {
        "ms": ms,
        "int8": cost.int8 - base.int8,
        "conversions": cost.conversions - base.conversions,
    }


def count_metric_decimals(float_metric: float) -> int:
    """Return the number of decimals that show a tenth of a percent of a metric.

    Smaller differences between two placements are neither printed nor used for the choice within a
    time budget.

    Args:
        float_metric: Metric of the float model.

    Returns:
        3 for metrics of 1 or more, more decimals for lower metrics.
    """
    if float_metric <= 0.0:
        return MAX_METRIC_DECIMALS
    return METRIC_DECIMALS + max(0, math.ceil(-round(math.log10(float_metric), 6)))


def _round_number(number: float | None) -> float | None:
    return None if number is None else round(number, 6)


@dataclass(repr=False)
class PlacementResult:
    """A placement with its cost and its accuracy.

    Attributes:
        name: Short description.
        configuration: Differences from the placement with every layer in INT8.
        sites: Names of the sites that are float, but INT8 in the start configuration of the search
            (see :class:`SiteChoice`).
        changed: Further choices: calibration method or ``own-scale`` by tensor, ``int8`` by node.
        cost: Predicted cost.
        chosen_on: Metric on the samples on which the search compares placements.
        metric: Metric on the held-out samples; None if it was not measured.
        low: Lower end of the 95 % interval of `metric`.
        high: Upper end of the 95 % interval of `metric`.
    """

    name: str
    configuration: Configuration
    sites: list[str]
    changed: dict[str, str]
    cost: PlacementCost
    chosen_on: float
    metric: float | None = None
    low: float | None = None
    high: float | None = None

    def __repr__(self) -> str:
        time = "" if self.cost.ms is None else f", {self.cost.ms:.4g} ms"
        metric = self.chosen_on if self.metric is None else self.metric
        return f"<PlacementResult {self.name}: {self.cost.int8} INT8{time}, {metric:.4f}>"

    @property
    def is_start(self) -> bool:
        """Whether this is the start configuration of the search."""
        return bool(self.cost.int8) and not self.sites and not self.changed

    @property
    def title(self) -> str:
        """Name for the output: the float site if there is only one, else :attr:`name`."""
        return self.sites[0] if len(self.sites) == 1 else self.name

    def as_json(self) -> Json:
        """Return the fields of the JSON."""
        return {
            "name": self.name,
            "float": list(self.sites),
            "changed": dict(self.changed),
            "nodes": sorted(self.configuration.floats),
            "convolutions": self.cost.convolutions,
            "int8": self.cost.int8,
            "conversions": self.cost.conversions,
            "ms": _round_number(self.cost.ms),
            "cost": _round_number(self.cost.value),
            "metric": _round_number(self.metric),
            "low": _round_number(self.low),
            "high": _round_number(self.high),
            "chosen_on": _round_number(self.chosen_on),
        }


@dataclass
class ChoiceBenefit:
    """Effect of one choice: the placement compared with the placement without the choice.

    Attributes:
        site: Name of the site.
        choice: The choice, such as ``float``.
        metric: Increase of the metric by the choice.
        int8: Change of the number of INT8 convolutions; negative for a decrease.
        conversions: Change of the number of conversions.
        ms: Change of the predicted time in milliseconds; None without a GPU.
        measured_on: Set of images on which `metric` was measured: ``judged_on`` (held-out), or
            ``chosen_on`` (those of the search) if the time limit left no time for held-out images.
    """

    site: str
    choice: str
    metric: float
    int8: int
    conversions: int
    ms: float | None
    measured_on: str = "judged_on"

    def as_json(self) -> Json:
        """Return the fields of the JSON."""
        return {
            "site": self.site,
            "choice": self.choice,
            "metric": _round_number(self.metric),
            "int8": self.int8,
            "conversions": self.conversions,
            "ms": _round_number(self.ms),
            "measured_on": self.measured_on,
        }


@dataclass(repr=False)
class Tuning:
    """Result of a tuning: the chosen Q/DQ model, and the results of the search.

    Attributes:
        model: The Q/DQ model.
        quantized: Tensors with a Q/DQ pair.
        prediction: Prediction for the model.
        times: Estimated time of the model; empty without a GPU.
        reached: Whether the goal is reached: the metric on held-out images or, with a budget, the
            predicted time.
        keep: Fraction of the float model's metric to keep; None if the goal is a time budget.
        budget_ms: Maximum predicted milliseconds; None without a budget.
        chosen: The chosen placement.
        bought: Effects of at most six choices of the chosen placement. These choices removed most
            output error when each was measured alone.
        front: Pareto front, evenly thinned: placements that no other placement beats in both cost
            and accuracy on the samples of the search.
        others: All other placements that were measured.
        sites: All sites of the network.
        base: Predicted cost of the start configuration of the search (see :class:`SiteChoice`).
        metric: JSON with the metric's name, its definition and the float model's value on the
            held-out samples (``float``) and on the samples of the search (``float_chosen_on``).
        cost: JSON with unit and definition of the cost.
        images: JSON with the number of images of each set, and their sources.
        effort: Counts and times of the measurements.
        info: Path, hash, opset and number of nodes of the float model.
        target: Name of the TensorRT version.
        gpu: Name of the GPU; None without a GPU.
        unchanged: Whether the result is the unchanged float model.
        cheapest_plausible: Cheapest placement whose 95 % interval on the held-out images reaches
            the goal, if it is cheaper than the chosen placement. With more images, it may turn out
            to be accurate enough.
        cheaper_alternative: With a budget, a placement that is cheaper than the chosen placement
            and whose 95 % interval on the held-out images reaches the metric of the chosen
            placement. With more images, it may turn out to be as accurate.
        float_type: Type of the layers that are not quantized, ``fp32`` or ``fp16``.
        precision: Format of the Q/DQ pairs, ``int8`` or ``fp8``.
        float32: Tensors that remain FP32 in an FP16 model, with their largest value in the data.
        notes: Notes about the result.
        warnings: Warnings about the result.
        source: Path of the float model; empty for a model in memory.
        output: Path of the saved model; empty before :meth:`save`.
        builder: Function that builds the Q/DQ model of a configuration.
        written_metric: Metric of the written model on the held-out samples, if its ranges come from
            more images than those of the search, including the held-out samples; None otherwise.
            The metric of `chosen` was measured with the ranges of the search.
        read: Input files, which are never overwritten.
    """

    model: onnx.ModelProto
    quantized: list[QuantizedTensor]
    prediction: Prediction
    times: list[TimeEstimate]
    reached: bool
    keep: float | None
    budget_ms: float | None
    chosen: PlacementResult
    bought: list[ChoiceBenefit]
    front: list[PlacementResult]
    others: list[PlacementResult]
    sites: list[SiteResult]
    base: PlacementCost
    metric: Json
    cost: Json
    images: Json
    effort: Json
    info: Json
    target: str
    gpu: str | None = None
    unchanged: bool = False
    cheapest_plausible: PlacementResult | None = None
    cheaper_alternative: PlacementResult | None = None
    notes: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    source: str = ""
    output: str = ""
    float_type: str = "fp32"
    precision: str = "int8"
    float32: dict[str, float] = field(default_factory=dict)
    builder: Callable[[Configuration], onnx.ModelProto] | None = field(
        default=None, repr=False, compare=False
    )
    written_metric: float | None = None
    read: InputFiles | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        name = self.source or "a model in memory"
        return f"<Tuning of {name} for {self.target}: {len(self.front)} placements in front>"

    @property
    def ok(self) -> bool:
        """Whether the goal is reached, see :attr:`reached`."""
        return self.reached

    def summary(self) -> Json:
        """Return the goal and the numbers of the chosen placement."""
        chosen = self.chosen.as_json()
        names = ("int8", "convolutions", "conversions", "ms", "metric", "low", "high")
        return {"reached": self.reached, **{name: chosen[name] for name in names}}

    def model_of(self, point: PlacementResult) -> onnx.ModelProto:
        """Build the Q/DQ model of another placement of :attr:`front` or :attr:`others`."""
        assert self.builder is not None
        return self.builder(point.configuration)

    def insert_arguments(self) -> dict[str, list[str]] | None:
        """Return arguments with which :func:`qdqtool.insert` writes the chosen placement.

        Further arguments, such as `input_type`, can be added. The arguments of
        :func:`qdqtool.tune` that `insert` has too must be repeated.

        Returns:
            Regular expressions for `exclude` and `tuned`. None if the ranges differ from those
            of `insert`, or if the result is the float model.
        """
        has_other_ranges = any(choice != INT8 for choice in self.chosen.changed.values())
        if has_other_ranges or _SEARCH_RANGES & {note.code for note in self.notes}:
            return None
        if not self.chosen.cost.int8:
            return None
        names = {"exclude": self.chosen.configuration.floats, "tuned": self.chosen.changed}
        return {key: [f"^{re.escape(n)}$" for n in sorted(nodes)] for key, nodes in names.items()}

    def to_graphsurgeon(self) -> onnx_graphsurgeon.Graph:
        """Return the model as an onnx-graphsurgeon graph, which can be edited independently."""
        return to_graphsurgeon(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Q/DQ model, atomically.

        Raises:
            QdqtoolError: `path` is an input, or cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.model, path, source=self.source)
        self.output = os.fspath(path)

    def save_result(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON to a file, for ``qdqtool report``.

        Raises:
            QdqtoolError: `path` is an input, or cannot be written.
        """
        save_answer(path, self.as_json(), self.read)

    def as_json(self) -> Json:
        """Return the result as JSON."""
        front = [{"index": i, **p.as_json()} for i, p in enumerate(self.front)]
        index = next((i for i, p in enumerate(self.front) if p is self.chosen), None)
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.info,
            "output": self.output,
            "target": self.target,
            "compute_capabilities": list(self.prediction.compute_capabilities),
            "gpu": self.gpu,
            "goal": {"keep": self.keep, "budget_ms": self.budget_ms, "reached": self.reached},
            "metric": self.metric,
            "written_metric": _round_number(self.written_metric),
            "cost": self.cost,
            "images": self.images,
            "sites": [s.as_json(self.base) for s in self.sites],
            "front": front,
            "others": [p.as_json() for p in self.others],
            "chosen": {
                **self.chosen.as_json(),
                "index": index,
                "choices": [b.as_json() for b in self.bought],
            },
            "cheapest_plausible": (
                None if self.cheapest_plausible is None else self.cheapest_plausible.as_json()
            ),
            "cheaper_alternative": (
                None if self.cheaper_alternative is None else self.cheaper_alternative.as_json()
            ),
            "unchanged": self.unchanged,
            "float_type": self.float_type,
            "precision": self.precision,
            "float32": maxima_as_json(self.float32),
            "effort": self.effort,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }
