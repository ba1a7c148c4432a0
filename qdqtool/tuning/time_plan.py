"""Estimate the duration of a search, and reduce samples if a time limit is short."""

import math
import time
from collections.abc import Sequence

from qdqtool.tuning.image_sets import select_evenly
from qdqtool.tuning.recipe import FLOAT_RECIPE
from qdqtool.tuning.search import PlacementSearch
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

# Fractions of a time limit at which steps end. The rest is for ranges, prediction and files.
SEARCH_END = 0.7
JUDGING_END = 0.8

TIMED_SAMPLES = 2  # number of samples from which the time of a sample is estimated
_COMBINATIONS = 30  # typical number of combinations that a search measures
_FEWEST_SAMPLES = 4  # minimum number of samples in a set, even if the time limit is short
# Number of placements that are measured first: float, every layer in INT8, and the simple
# placements of `PlacementSearch`.
_SIMPLE_PLACEMENTS = 10
_SIMPLE_TIME = 1 / 3  # maximum fraction of a time limit for measuring the simple placements
_JUDGING_TIME = 0.1  # maximum fraction of a time limit for evaluating one placement
_RANGES_TIME = 1 / 3  # maximum fraction of a time limit for collecting the ranges of the search
# Runs before there is a result: the float model on two smallest sets, the INT8 model on one.
_FEWEST_RUNS = 3 * _FEWEST_SAMPLES
_STEPS = 20  # number of steps that solve the equation of the shortest time limit
_MARGIN = 1.2  # factor of a suggested time limit, because the times of two runs differ


def measure_run_seconds(search: PlacementSearch) -> float:
    """Return the seconds of one run on one sample.

    0 if the store already has the measurements that would be timed.
    """
    evaluator = search.evaluator
    recipes = [FLOAT_RECIPE, search.recipe(search.start)]
    samples = evaluator.sets.chosen_on
    seconds_per_run = 0.0
    # The runs on the first sample also open the sessions, so the times of further samples replace
    # the time of the first.
    for timed in (samples[:1], samples[1 : 1 + TIMED_SAMPLES]):
        runs, start = evaluator.runs, time.monotonic()
        evaluator.measure_metric(recipes, timed, "Duration of a run")
        if evaluator.runs > runs:
            seconds_per_run = (time.monotonic() - start) / (evaluator.runs - runs)
    return seconds_per_run


def describe_work(
    search: PlacementSearch, seconds_per_run: float, time_limit: float | None, started: float
) -> str:
    """Return a sentence about the work of a search and its duration.

    Args:
        search: The prepared search.
        seconds_per_run: Result of :func:`measure_run_seconds`.
        time_limit: Time limit of the whole tuning in seconds; None for no limit.
        started: Value of ``time.monotonic()`` at the start of the tuning.
    """
    sets = search.evaluator.sets
    choices = len(search.list_measured_decisions())
    skipped = len(search.decisions) - choices
    unmeasured = f" ({skipped} left out: no benefit possible)" if skipped else ""
    if seconds_per_run:
        # A choice needs runs from the changed node to the end, half of the network on average.
        single = choices * len(sets.swept_on) / 2
        combined = _COMBINATIONS * (len(sets.chosen_on) + len(sets.judged_on) / 3)
        seconds = seconds_per_run * (single + combined)
        minutes = "a minute" if seconds < 90 else f"{seconds / 60:.0f} minutes"
        workers = format_count(search.evaluator.workers, "worker")
        duration = f"at most about {minutes} with {workers}"
        if seconds >= 90:
            duration += f" (the first runs took {seconds_per_run:.2g} s each)"
        if time_limit is not None:
            left = started + SEARCH_END * time_limit - time.monotonic()
            duration += _describe_limit(time_limit, is_short=seconds > left)
    else:
        duration = "an earlier run has measured most of the candidates"
    # A time limit may leave no time for some choices, and for some images.
    most = "" if time_limit is None else "at most "
    return (
        f"testing {most}{format_count(choices, 'choice')} on "
        f"{most}{format_count(len(sets.swept_on), 'image')}{unmeasured}, then combinations: "
        f"{duration}"
    )


def _describe_limit(time_limit: float, is_short: bool) -> str:
    limit = f"{time_limit:g} s"
    if time_limit % 60 == 0:
        limit = format_count(round(time_limit / 60), "minute")
    end = f"{SEARCH_END:.0%} of the time limit of {limit}"
    if is_short:
        return f"; the search ends earlier, after {end}"
    return f"; if choices are not measured by then, the search goes on within {end}"


def count_calibration_samples(limit: float, spent: float, seconds_per_sample: float) -> int:
    """Return the number of samples for which there is time to collect ranges: at least 4.

    Args:
        limit: Time limit of the whole tuning in seconds.
        spent: Seconds since the start of the tuning.
        seconds_per_sample: Time of collecting ranges from one sample.
    """
    seconds = _RANGES_TIME * limit - spent
    return max(_FEWEST_SAMPLES, int(seconds / max(seconds_per_sample, 1e-9)))


def estimate_shortest_limit(
    other_seconds: float,
    ranges: tuple[float, int],
    runs: tuple[float, int],
) -> int:
    """Return a time limit in seconds that is long enough for a result, rounded up to 10 s.

    Args:
        other_seconds: Seconds for all but collecting ranges and running placements.
        ranges: Seconds of collecting ranges from one sample, and the number of all samples.
        runs: Seconds of one run on one sample (or an upper bound), and the number of runs before
            the first result if all samples are used.
    """
    (per_sample, all_samples), (per_run, all_runs) = ranges, runs
    # Parts of the limit: the float model runs on both sets, the INT8 model on selection samples.
    share = 2 * _SIMPLE_TIME / _SIMPLE_PLACEMENTS + _JUDGING_TIME
    limit = other_seconds
    # With a longer limit, more samples are used, up to all of them. Each step at least halves the
    # distance to the solution, because at most half of the limit is for samples.
    for _ in range(_STEPS):
        samples = min(count_calibration_samples(limit, 0.0, per_sample), all_samples)
        run_seconds = min(max(share * limit, _FEWEST_RUNS * per_run), all_runs * per_run)
        limit = other_seconds + (TIMED_SAMPLES + samples) * per_sample + run_seconds
    return 10 * max(1, math.ceil(limit * _MARGIN / 10))


def fit_samples_to_time(search: PlacementSearch, limit: float, seconds_per_run: float) -> None:
    """Reduce the samples of a search if measuring all of them would take too long.

    If samples are left out, a note reports the number of remaining samples. If an earlier run used
    at least as many samples, the earlier samples are used again, because the store has measurements
    on them.

    Args:
        search: The search.
        limit: Time limit of the whole tuning in seconds.
        seconds_per_run: Result of :func:`measure_run_seconds`.
    """
    sets, store = search.evaluator.sets, search.evaluator.store
    runs_per_second = 1 / max(seconds_per_run or store.seconds_per_run, 1e-9)
    chosen_on, judged_on = store.samples
    runs = _SIMPLE_TIME * limit / _SIMPLE_PLACEMENTS * runs_per_second
    sets.chosen_on = _limit_samples(search, "chosen", sets.chosen_on, int(runs), chosen_on)
    sets.swept_on = tuple(select_evenly(sets.chosen_on, len(sets.swept_on)))
    runs = _JUDGING_TIME * limit * runs_per_second
    sets.judged_on = _limit_samples(search, "judged", sets.judged_on, int(runs), judged_on)


def _limit_samples(
    search: PlacementSearch,
    verb: str,
    samples: Sequence[int],
    runs: int,
    earlier: Sequence[int],
) -> tuple[int, ...]:
    """Return the samples for which there is time: at least 4, or all if there are fewer.

    Args:
        search: The search, which receives a note.
        verb: Use of the samples: "chosen" or "judged".
        samples: All samples for this use.
        runs: Number of samples for which there is time.
        earlier: Samples that an earlier run measured. They are returned if they are at least as
            many as there is time for.
    """
    known = [n for n in samples if n in set(earlier)]
    chosen = select_evenly(samples, max(_FEWEST_SAMPLES, runs))
    if len(known) >= len(chosen):
        chosen = known
    count = len(chosen)
    if count == len(samples):
        return tuple(samples)
    work, use = ("candidates compared", "selection")
    if verb == "judged":
        work, use = ("results measured", "held-out")
    text = f"{work} on {count} of {len(samples)} {use} images: more would exceed the time limit"
    search.notes.append(Note(text, code=f"{verb}-on", room=count, images=len(samples)))
    return tuple(chosen)
