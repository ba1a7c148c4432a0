"""How long a search will take, before it begins, and what a time limit leaves time for."""

import itertools
import time
from collections.abc import Sequence

from calibration.dataset import spread_indices
from qdqtool import prediction
from qdqtool.insertion.sample_runs import FP16_SAMPLES
from qdqtool.tuning.search import BETTER, FLOAT_RECIPE, Search
from qdqtool.util.notes import Remark
from qdqtool.util.text import counted

_WHOLE = 30  # combinations that a search usually measures
_FEW = 2
_OBVIOUS = 10  # placements that are measured whatever the time: float, everything INT8, what one would try at once
_OBVIOUSLY = 1 / 3  # part of a time limit that these may take
_JUDGED = 2  # placements that are judged when the time is over
_JUDGING = 0.2  # part of a time limit that this may take
_MOVING = 0.05  # part of it that comparing the float model, FP32 and FP16 may take in the end
_FEWEST = 4  # samples for ranges, to choose on and to judge on, whatever the time
_WRITING = 0.03  # part of it that is left for the prediction and the files, at least,
_WRITTEN = 2.0  # and so many times what the prediction and the bytes of everything INT8 take


def expected(search: Search) -> tuple[str, float]:
    """What is to come, in a sentence, and seconds for one run on one sample, all workers at work.

    Runs the float model and everything INT8 on a few samples, and multiplies; the seconds are 0 where an earlier run
    has measured so much that nothing could be timed.
    """
    bench, base = search.bench, search.recipe(search.start)
    ran, each = 0, 0.0
    for samples in (
        bench.sets.chosen_on[:1],
        bench.sets.chosen_on[1 : 1 + _FEW],
    ):  # sessions are opened on the first
        known, began = bench.runs, time.monotonic()
        bench.whole([FLOAT_RECIPE, base], samples, "How long a run takes")
        if bench.runs > known:
            ran = bench.runs - known
            each = (time.monotonic() - began) / ran
    sweep = sum(map(search.share, search.swept()))
    images = len(bench.sets.swept_on)
    steps = [0, *map(len, search.ever_more())]
    swept = sum((b - a) * BETTER**k for k, (a, b) in enumerate(itertools.pairwise(steps)))
    whole = _WHOLE * (len(bench.sets.chosen_on) + len(bench.sets.judged_on) / 3)
    total = each * (sweep * swept + whole) if ran else None
    many = len(search.swept())
    return sentence(many, len(search.judged) - many, images, total, bench.workers), each


def sentence(choices: int, never: int, images: int, seconds: float | None, workers: int) -> str:
    """What is to come: choices that are swept and that are not, on so many images, and how long it takes at worst."""
    unmeasured = f" ({never} more cannot pay and are not measured)" if never else ""
    many = counted(workers, "worker")
    if seconds is None:
        long = "what an earlier run measured is taken"
    else:
        long = f"at most about {'a minute' if seconds < 90 else f'{seconds / 60:.0f} minutes'} with {many}"
    return f"{choices} choices to measure on {counted(images, 'image')}{unmeasured}, then combinations: {long}"


def leave_time(search: Search, each: float) -> None:
    """Moves the deadline so that what is found can be judged before the limit, on fewer samples if need be.

    Args:
        search: The search, prepared.
        each: Seconds that a run on one sample takes.
    """
    bench, sets, limit = search.bench, search.bench.sets, search.limit
    if bench.deadline is None:
        return
    search.each = each
    chosen, judged = len(sets.chosen_on), len(sets.judged_on)
    sets.chosen_on = _some(sets.chosen_on, fitting(_OBVIOUSLY * limit, _OBVIOUS * each))
    if len(sets.chosen_on) < chosen:
        sets.swept_on = _some(sets.chosen_on, len(sets.swept_on))
        search.notes.append(Remark.CHOSEN_ON(room=len(sets.chosen_on), images=chosen))
    sets.judged_on = _some(sets.judged_on, fitting(_JUDGING * limit, _JUDGED * each))
    if len(sets.judged_on) < judged:
        search.notes.append(Remark.JUDGED_ON(room=len(sets.judged_on), images=judged))
    one = each * len(sets.judged_on)
    writing = max(_WRITING * limit, _WRITTEN * _write_once(search))
    if search.planner.half:
        moved = 3 * each
        search.moved_on = min(FP16_SAMPLES, fitting(_MOVING * limit, moved))
        writing += moved * search.moved_on
    left = bench.deadline - time.monotonic()
    search.ends = bench.deadline - writing
    search.last_judged = search.ends - 1.5 * one
    bench.deadline -= min(_JUDGED * one + writing, left / 2)


def fitting(seconds: float, each: float) -> int:
    """Samples that there is time for."""
    return max(_FEWEST, int(seconds / max(each, 1e-9)))


def _some(samples: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of them, spread_indices over all."""
    return tuple(samples[i] for i in spread_indices(len(samples), min(count, len(samples))))


def _write_once(search: Search) -> float:
    """Seconds that it takes to build and predict everything INT8, as is done with what is chosen in the end."""
    began, planner = time.monotonic(), search.planner
    made, _ = planner.build(planner.plan(search.start), "float")
    prediction.predict(made, planner.target)
    made.proto.SerializeToString()
    return time.monotonic() - began
