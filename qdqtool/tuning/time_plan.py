"""Estimate the duration of a search, and divide a time limit between the steps of the search."""

import itertools
import time

from qdqtool import prediction
from qdqtool.insertion.sample_runs import FP16_SAMPLES
from qdqtool.tuning.image_sets import thin
from qdqtool.tuning.recipe import FLOAT_RECIPE
from qdqtool.tuning.search import PlacementSearch
from qdqtool.tuning.sensitivity import BETTER_PART
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

_COMBINATIONS = 30  # typical number of combinations that a search measures
_TIMED_SAMPLES = 2
# Minimum number for calibration, search and final evaluation each, even if time is short.
_FEWEST_SAMPLES = 4

# Fractions of a time limit (..._TIME), and the numbers of placements that must fit into them.
_SIMPLE_PLACEMENTS = 10  # float, every layer in INT8, and simple placements of `PlacementSearch`
_SIMPLE_TIME = 1 / 3
_JUDGED_PLACEMENTS = 2
_JUDGING_TIME = 0.2
_FP16_TIME = 0.05  # maximum for comparing the outputs in FP32 and FP16 at the end
_WRITING_TIME = 0.03  # minimum for the final prediction and for writing the files
_WRITING_FACTOR = 2.0  # time for prediction and writing, as a multiple of the measured time
_RANGES_TIME = 0.25  # maximum for collecting ranges from all images at the end


def estimate_duration(search: PlacementSearch) -> tuple[str, float]:
    """Estimate the duration of a search from runs of the float and the INT8 model.

    Returns:
        A sentence about the work and its duration; and the seconds for one run on one sample with
        all workers busy, which are 0 if the store has the measurements already.
    """
    seconds_per_run = _time_runs(search)
    evaluator, sensitivity = search.evaluator, search.sensitivity
    decisions = search.list_measured_decisions()
    sweep = sum(sensitivity.share_of_run(d.candidate) for d in decisions)
    sizes = [0, *map(len, sensitivity.list_sample_sets())]
    swept = sum((b - a) * BETTER_PART**k for k, (a, b) in enumerate(itertools.pairwise(sizes)))
    sets = evaluator.sets
    combinations = _COMBINATIONS * (len(sets.chosen_on) + len(sets.judged_on) / 3)
    total = seconds_per_run * (sweep * swept + combinations) if seconds_per_run else None
    text = describe_duration(
        choices=len(decisions),
        skipped=len(search.decisions) - len(decisions),
        images=len(sets.swept_on),
        seconds=total,
        workers=evaluator.workers,
    )
    return text, seconds_per_run


def _time_runs(search: PlacementSearch) -> float:
    """Return the seconds of one run on one sample; 0 if the store has all measurements."""
    evaluator = search.evaluator
    recipes = [FLOAT_RECIPE, search.recipe(search.start)]
    samples = evaluator.sets.chosen_on
    seconds_per_run = 0.0
    # The runs on the first sample also open the sessions, so the times of further samples replace
    # the time of the first.
    for timed in (samples[:1], samples[1 : 1 + _TIMED_SAMPLES]):
        runs, start = evaluator.runs, time.monotonic()
        evaluator.measure_metric(recipes, timed, "Duration of a run")
        if evaluator.runs > runs:
            seconds_per_run = (time.monotonic() - start) / (evaluator.runs - runs)
    return seconds_per_run


def describe_duration(
    choices: int, skipped: int, images: int, seconds: float | None, workers: int
) -> str:
    """Return a sentence about the work of a search and its duration.

    Args:
        choices: Number of choices to measure.
        skipped: Number of choices that are not measured.
        images: Number of samples on which single choices are measured.
        seconds: Maximum duration; None if the store has most measurements already.
        workers: Number of workers.
    """
    unmeasured = (f" ({skipped} skipped, because they cannot save time)") if skipped else ""
    if seconds is None:
        duration = "an earlier run has measured most of the candidates"
    else:
        minutes = "a minute" if seconds < 90 else f"{seconds / 60:.0f} minutes"
        duration = f"at most about {minutes} with {format_count(workers, 'worker')}"
    return (
        f"testing {format_count(choices, 'choice')} on {format_count(images, 'image')}"
        f"{unmeasured}, then combinations: {duration}"
    )


def reserve_time(search: PlacementSearch, seconds_per_run: float) -> None:
    """Set the deadlines of a search so that time remains to evaluate and write the result.

    If samples would take too long, their number is reduced, and a note reports this. Without a time
    limit, nothing changes.
    """
    evaluator, sets, limit = search.evaluator, search.evaluator.sets, search.limit
    if evaluator.deadline is None:
        return
    search.seconds_per_run = seconds_per_run
    fitting = count_fitting_samples(_SIMPLE_TIME * limit, _SIMPLE_PLACEMENTS * seconds_per_run)
    if fitting < len(sets.chosen_on):
        search.notes.append(_limit_note("chosen", fitting, len(sets.chosen_on)))
        sets.chosen_on = tuple(thin(sets.chosen_on, fitting))
        sets.swept_on = tuple(thin(sets.chosen_on, len(sets.swept_on)))
    fitting = count_fitting_samples(_JUDGING_TIME * limit, _JUDGED_PLACEMENTS * seconds_per_run)
    if fitting < len(sets.judged_on):
        search.notes.append(_limit_note("judged", fitting, len(sets.judged_on)))
        sets.judged_on = tuple(thin(sets.judged_on, fitting))
    judging = seconds_per_run * len(sets.judged_on)
    writing = max(_WRITING_TIME * limit, _WRITING_FACTOR * _time_writing(search))
    if search.planner.fp16:
        comparing = 3 * seconds_per_run
        search.fp16_samples = min(
            FP16_SAMPLES, count_fitting_samples(_FP16_TIME * limit, comparing)
        )
        writing += comparing * search.fp16_samples
    if search.ranges_seconds is not None:
        if search.ranges_seconds + judging > _RANGES_TIME * limit:
            search.ranges_seconds = None
        else:
            writing += search.ranges_seconds + judging * bool(search.ranges_seconds)
    seconds_left = evaluator.deadline - time.monotonic()
    search.final_deadline = evaluator.deadline - writing
    search.last_judging = search.final_deadline - 1.5 * judging
    evaluator.deadline -= min(_JUDGED_PLACEMENTS * judging + writing, seconds_left / 2)


def _limit_note(verb: str, count: int, images: int) -> Note:
    work = "candidates compared" if verb == "chosen" else "results measured"
    text = f"{work} on {count} of {images} images: more would exceed the time limit"
    return Note(text, code=f"{verb}-on", room=count, images=images)


def count_fitting_samples(seconds: float, seconds_per_sample: float) -> int:
    """Return the number of samples that fit into a time in seconds, at least 4."""
    return max(_FEWEST_SAMPLES, int(seconds / max(seconds_per_sample, 1e-9)))


def _time_writing(search: PlacementSearch) -> float:
    """Measure the seconds to build, predict and serialize the INT8 model."""
    start, planner = time.monotonic(), search.planner
    model, _ = planner.build(planner.plan(search.start), "float")
    prediction.predict(model, planner.target)
    model.proto.SerializeToString()
    return time.monotonic() - start
