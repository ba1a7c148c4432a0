"""Which choices are worth measuring, by what the prediction says of each.

Never measured is a choice that cannot pay, whatever its accuracy:

* ``INT8 gains nothing here``: with the site float the network is predicted to be no slower; the site is float at once;
* ``a larger site costs no more``: another choice leaves these nodes and others float for the same cost or less;
* ``between two conversions``: the nodes alone are float, every activation that they read stays INT8 for others, and
  conversions are added in front and behind: only the rounding of these weights goes, and that is the smallest part of
  the error (weights per channel), at the highest price;
* ``INT8 gains nothing here`` for what the preset leaves float: quantizing it is predicted to bring no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdqtool.tuning.configuration import FLOAT, Configuration, Cost
from qdqtool.tuning.sites import Candidate

FREE = "INT8 gains nothing here: float is predicted to be no slower"
NO_GAIN = "INT8 is predicted to be no faster here"
BETWEEN = "would be float between two conversions, and what it reads stays INT8 for others"
LARGER = "costs as much as leaving {} float, which frees more"


@dataclass(frozen=True)
class Judged:
    """A candidate, what it costs, and why it is not measured (empty where it is)."""

    candidate: Candidate
    cost: Cost
    why_not: str = ""


def judge(found: Sequence[Candidate], cost: Callable[[Configuration], Cost]) -> tuple[Configuration, list[Judged]]:
    """Decides which candidates to measure.

    Args:
        found: Floats, and INT8 for what the preset leaves float.
        cost: Predicts.

    Returns:
        What is float from the start because it costs nothing, and all candidates.
    """
    before = cost(Configuration())
    costs = [cost(candidate.configuration) for candidate in found]
    free = Configuration()
    floats = [(c, k) for c, k in zip(found, costs, strict=True) if c.choice == FLOAT]
    for candidate, single in sorted(floats, key=lambda x: x[1].value):
        if single.value <= before.value:
            joined = free.joined(candidate.configuration)
            if cost(joined).value <= cost(free).value:
                free = joined
    start = cost(free)
    judged = []
    for candidate, single in zip(found, costs, strict=True):
        why = ""
        if candidate.choice != FLOAT:
            if single.value >= before.value:
                why = NO_GAIN
        elif candidate.configuration.floats <= free.floats:
            why = FREE
        else:
            larger = next((o for o, k in floats if candidate.configuration.floats < o.configuration.floats
                           and k.value <= single.value), None)  # fmt: skip
            if larger is not None:
                why = LARGER.format(larger.site.name)
            elif not candidate.site.tensors and single.conversions - before.conversions >= 2:
                why = BETWEEN
        judged.append(Judged(candidate, single if not free.floats else _moved(single, before, start), why))
    return free, judged


def _moved(single: Cost, before: Cost, start: Cost) -> Cost:
    """A candidate's cost seen from the start, to which the free floats belong."""
    ms = None
    if single.ms is not None and before.ms is not None and start.ms is not None:
        ms = single.ms + start.ms - before.ms
    return Cost(single.convolutions, single.int8 + start.int8 - before.int8,
                single.conversions + start.conversions - before.conversions, ms)  # fmt: skip
