"""How long a search will take, before it begins."""

import itertools
import time

from qdqtool.base.text import counted
from qdqtool.tuning.search import BETTER, FLOAT_RECIPE, Search

_WHOLE = 30  # combinations that a search usually measures
_FEW = 2


def expected(search: Search) -> tuple[str, float]:
    """What is to come, in a sentence, and seconds for one run on one sample, all workers at work.

    Runs the float model and everything INT8 on a few samples, and multiplies; the seconds are 0 where an earlier run
    has measured so much that nothing could be timed.
    """
    bench, base = search.bench, search.recipe(search.start)
    ran, each = 0, 0.0
    for samples in (bench.sets.chosen_on[:1], bench.sets.chosen_on[1 : 1 + _FEW]):  # sessions are opened on the first
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
