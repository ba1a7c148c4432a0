"""How long a tuning will take, from one measured run and the parts of the network that will run."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qdqtool.graph import Model
from qdqtool.operators import WEIGHTED
from qdqtool.timing.products import product_of
from qdqtool.timing.shapes import Shapes
from qdqtool.tuning.measurements import Measurements
from qdqtool.tuning.recipe import first_change
from qdqtool.tuning.search import BETTER, FIRST_SAMPLES, FLOAT_RECIPE, Search

_WHOLE = 30  # combinations that a search usually measures
_FEW = 2


@dataclass(frozen=True)
class Estimate:
    """What is to come.

    Attributes:
        choices: Choices that are swept.
        never: Choices that are not.
        images: Samples that they are swept on.
        seconds: Of all of it, at worst; none where an earlier run has measured so much that nothing could be timed.
        workers: At the same time.
        each: Seconds for one run on one sample, all workers at work.
    """

    choices: int
    never: int
    images: int
    seconds: float | None
    workers: int
    each: float | None = None

    @staticmethod
    def of(search: Search, bench: Measurements) -> Estimate:
        """Runs the float model and everything INT8 on a few samples, and multiplies."""
        samples = bench.sets.chosen_on[:_FEW]
        known = bench.runs
        began = time.monotonic()
        bench.whole([FLOAT_RECIPE, search.recipe(search.start)], samples, "How long a run takes")
        ran = bench.runs - known
        seconds = (time.monotonic() - began) / ran if ran else None
        behind = share_behind(search.planner.model)
        base = search.recipe(search.start)
        sweep = 0.0
        for judged in search.swept():
            recipe = search.recipe(search.start.joined(judged.candidate.configuration))
            sweep += behind[first_change(search.planner.model, base, recipe)]
        whole = _WHOLE * (len(bench.sets.chosen_on) + len(bench.sets.judged_on) / 3)
        images = len(bench.sets.swept_on)
        swept = min(images, FIRST_SAMPLES) + BETTER * max(0, images - FIRST_SAMPLES)
        total = None if seconds is None else seconds * (sweep * swept + whole)
        return Estimate(len(search.swept()), len(search.judged) - len(search.swept()), len(bench.sets.swept_on),
                        total, bench.workers, seconds)  # fmt: skip

    @property
    def sentence(self) -> str:
        never = f" ({self.never} more cannot pay and are not measured)" if self.never else ""
        many = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        if self.seconds is None:
            long = "what an earlier run measured is taken"
        elif self.seconds < 90:
            long = f"at most about a minute with {many}"
        else:
            long = f"at most about {self.seconds / 60:.0f} minutes with {many}"
        images = "1 image" if self.images == 1 else f"{self.images} images"
        return f"{self.choices} choices to measure on {images}{never}, then combinations: {long}"


def share_behind(model: Model) -> list[float]:
    """For each cut the part of all multiplications that lies behind it, from 1 at the inputs to 0 at the end."""
    shapes = Shapes(model)
    work = []
    for node in model.ordered:
        product = product_of(node, shapes.get) if node.op in WEIGHTED else None
        work.append(1.0 if product is None else product.rows * product.columns * product.depth * product.groups)
    total = sum(work) or 1.0
    behind, left = [], total
    for amount in work:
        behind.append(left / total)
        left -= amount
    return [*behind, 0.0]
