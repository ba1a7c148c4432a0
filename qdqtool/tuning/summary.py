"""Summarize a tuning for its result: sites, images, effort, and notes on the search."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qdqtool.insertion.number_formats import MIN_GAIN, is_worthwhile
from qdqtool.timing import gpus
from qdqtool.tuning.image_sets import ImageSets
from qdqtool.tuning.options import SearchBudget
from qdqtool.tuning.planner import FLOAT
from qdqtool.tuning.result import PlacementResult, SiteChoice, SiteResult
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.sites import FREE, INT8, TuningSite
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_count_were

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.arrays import CalibrationSource

_SHOWN_POINTS = 10
_NO_FASTER = "no choice of layers in INT8 reached the goal in less time"
_NO_FASTER_BEFORE_LIMIT = (
    "no faster choice of layers in INT8 reached the goal on the selection images and the held-out "
    "images in the time limit"
)
_SiteKey = tuple[str, ...]  # kind and nodes of a site, because sites may have equal names


def thin_front(front: list[PlacementResult], placement: PlacementResult) -> list[PlacementResult]:
    """Return the front, reduced to about ten evenly spread placements with both ends.

    Args:
        front: Placements of the Pareto front.
        placement: The chosen placement, which is included even if it is not in the front.
    """
    if not any(point is placement for point in front):
        front = sorted([*front, placement], key=lambda point: point.cost.value)
    if len(front) <= _SHOWN_POINTS:
        return front
    step = (len(front) - 1) / (_SHOWN_POINTS - 1)
    indices = {round(i * step) for i in range(_SHOWN_POINTS)}
    return [p for i, p in enumerate(front) if i in indices or p is placement]


def list_other_placements(
    search: PlacementSearch, front: Sequence[PlacementResult]
) -> list[PlacementResult]:
    """Return the measured placements that are not in the front."""
    listed = {id(point) for point in front}
    return [point for point in search.list_placements() if id(point) not in listed]


def describe_metric(search: PlacementSearch) -> Json:
    """Return the JSON with the metric and its values for the float model."""
    sets, metric = search.evaluator.sets, search.evaluator.job.metric
    return {
        "name": metric.name,
        "sentence": metric.sentence,
        "float": search.float_value(sets.judged_on),
        "float_chosen_on": search.float_value(sets.chosen_on),
    }


def build_site_results(
    search: PlacementSearch, placement: PlacementResult, reached: bool
) -> list[SiteResult]:
    """Return the result of every site, in the order of the search's sites.

    Args:
        search: The search.
        placement: The chosen placement.
        reached: Whether `placement` reaches the goal.
    """
    measurements = _collect_choices(search)
    results = []
    for site in search.sites:
        measured = measurements[(site.kind, *site.nodes)]
        choice, reason = _explain_choice(search, placement, reached, site, measured.choices)
        results.append(
            SiteResult(
                site=site.name,
                kind=site.kind,
                nodes=site.nodes,
                tensors=site.tensors,
                choice=choice,
                why=reason,
                loss=measured.loss,
                choices=measured.choices,
                swept_on=measured.samples,
                error_alone=measured.error_alone,
            )
        )
    return results


@dataclass(slots=True)
class _SiteMeasurements:
    """Choices of a site, and the effect of the site on the output error.

    Attributes:
        choices: The choices.
        loss: See :attr:`SiteResult.loss`.
        error_alone: See :attr:`SiteResult.error_alone`.
        samples: See :attr:`SiteResult.swept_on`.
    """

    choices: list[SiteChoice] = field(default_factory=list)
    loss: float | None = None
    error_alone: float | None = None
    samples: int = 0


def _collect_choices(search: PlacementSearch) -> defaultdict[_SiteKey, _SiteMeasurements]:
    """Return the measurements of each site; empty ones for a site that was not measured."""
    measurements: defaultdict[_SiteKey, _SiteMeasurements] = defaultdict(_SiteMeasurements)
    entries = [(d.candidate, d.cost, d.skip_reason) for d in search.decisions]
    entries += [
        (candidate, search.planner.cost(search.sensitivity.apply_choice(candidate)), "")
        for candidate in search.scale_candidates
    ]
    for candidate, cost, reason in entries:
        measured = measurements[(candidate.site.kind, *candidate.site.nodes)]
        errors = None if reason else search.sensitivity.errors_with(candidate)
        error = None
        if errors is not None:
            before, error = errors
            if not measured.choices:
                measured.loss = before - error if candidate.choice == FLOAT else None
                measured.error_alone = search.sensitivity.error_alone(candidate)
                measured.samples = len(search.sensitivity.gains(candidate))
        is_left_out = bool(reason)
        if error is None:
            reason = reason or search.unmeasured_why
        measured.choices.append(SiteChoice(candidate.choice, cost, error, reason, is_left_out))
    return measurements


def _explain_choice(
    search: PlacementSearch,
    placement: PlacementResult,
    reached: bool,
    site: TuningSite,
    choices: list[SiteChoice],
) -> tuple[str, str]:
    nodes, configuration = set(site.nodes), placement.configuration
    if nodes <= search.start.floats:
        return FLOAT, FREE
    if not placement.cost.int8:
        return FLOAT, _NO_FASTER_BEFORE_LIMIT if search.stopped else _NO_FASTER
    if site.name in placement.sites or nodes <= configuration.floats:
        return FLOAT, "best accuracy for its time"
    accurate = f"the best measured placement has this layer in {search.format_title}"
    if reached and search.keep is not None:
        accurate = f"the placement reaches the goal with this layer in {search.format_title}"
    if site.default == FLOAT and nodes <= configuration.quantized:
        return INT8, accurate
    methods = dict(configuration.methods)
    for tensor in site.tensors:
        if tensor in methods:
            reason = "a smaller output error on the selection images"
            return methods[tensor], reason
    if choices and choices[0].left_out:
        return site.default, choices[0].why
    return site.default, accurate if site.default == INT8 else "left float by `head`"


def compare_with_float_model(search: PlacementSearch, placement: PlacementResult) -> list[Note]:
    """Return a note if the float model fits the budget, is the result, or is hardly slower."""
    float_ms, ms = search.planner.cost(search.float_configuration).ms, placement.cost.ms
    if float_ms is None or ms is None:
        return []
    if search.budget is not None and float_ms <= search.budget:
        code = "float-fits" if placement.cost.int8 else "float-fits-and-written"
        return [
            Note(
                f"the model without Q/DQ is predicted to take {float_ms:.4g} ms, which is within "
                "the budget: INT8 is not needed",
                code=code,
                ms=float_ms,
            )
        ]
    if not placement.cost.int8:
        return [
            Note(
                f"the model without Q/DQ is predicted to take {float_ms:.4g} ms",
                code="float-written",
                ms=float_ms,
            )
        ]
    if not is_worthwhile(float_ms / ms):
        return [
            Note(
                f"the result is predicted to be {float_ms / ms:.2f} times as fast as the float "
                f"model ({float_ms:.4g} ms); quantization is worth the effort only above "
                f"{MIN_GAIN:g} times",
                code="hardly-pays",
                ms=float_ms,
                times=float_ms / ms,
            )
        ]
    return []


def describe_cost(gpu: gpus.Gpu | None) -> Json:
    """Return unit and definition of the cost as JSON."""
    if gpu is None:
        sentence = "float convolutions and Q/DQ layers, counted together (no `gpu`)"
        return {"unit": "operations", "sentence": sentence}
    return {"unit": "ms", "sentence": f"predicted milliseconds on {gpu.name}"}


def describe_images(
    sets: ImageSets,
    data: CalibrationSource,
    evaluation: CalibrationSource | None,
    calibrated: int,
    searched: int,
) -> Json:
    """Return the JSON that describes the images of a tuning.

    Args:
        sets: The samples.
        data: Calibration data of the user.
        evaluation: Evaluation data of the user.
        calibrated: Number of images from which the ranges of the written model come.
        searched: Number of images from which the ranges in the search come.
    """
    paths = [os.fspath(d) if isinstance(d, str | os.PathLike) else "" for d in (data, evaluation)]
    return {
        "calibration": calibrated,
        "search_calibration": searched,
        "chosen_on": len(sets.chosen_on),
        "swept_on": len(sets.swept_on),
        "judged_on": len(sets.judged_on),
        "calibration_data": paths[0],
        "evaluation_data": paths[1],
        "fingerprint": sets.fingerprint,
    }


def describe_effort(search: PlacementSearch, seconds: float, cpu_seconds: float) -> Json:
    """Return counts and times (in seconds) of the measurements as JSON."""
    decisions = search.decisions
    return {
        "candidates": len(decisions) + len(search.scale_candidates),
        "never_measured": sum(bool(d.skip_reason) for d in decisions),
        "runs": search.evaluator.runs,
        "combinations": len(search.pool),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "resumed": search.evaluator.store.resumed,
        "stopped": search.stopped,
    }


def warn_small_sets(
    sets: ImageSets, budget: SearchBudget, evaluation: CalibrationSource | None
) -> list[Note]:
    """Return a warning if search or final evaluation has too few images, else an empty list."""
    chosen, judged = len(sets.chosen_on), len(sets.judged_on)
    if chosen >= budget.chosen_on and judged >= budget.judged_on:
        return []
    enough = max(budget.chosen_on, budget.judged_on) * sets.measured.batch
    more = f"`evaluation` with {2 * enough} images or more"
    if evaluation is None:
        more = f"{4 * enough} images or more, or {more}"
    return [
        Note(
            f"only {format_count(chosen, 'selection image')} and "
            f"{format_count(judged, 'held-out image')} are available: too few to distinguish "
            f"candidates whose metrics differ by a few hundredths. Give {more}",
            code="few-images-to-judge",
            chosen_on=chosen,
            judged_on=judged,
            enough=enough,
        )
    ]


def warn_unread_images(sets: ImageSets) -> list[Note]:
    """Return a warning if images could not be read, else an empty list."""
    skipped = sorted(set(sets.measured.skipped))
    if not skipped:
        return []
    name, reason = skipped[0]
    return [
        Note(
            f"{format_count_were(len(skipped), 'tuning image')} left out because of reading "
            f"errors; the first is {name}: {reason}",
            code="unread-images",
            count=len(skipped),
            file=name,
        )
    ]
