"""Estimated time that each kind of fix saves on a GPU."""

from __future__ import annotations

from qdqtool.errors import QdqtoolError
from qdqtool.fixing.session import apply_sites
from qdqtool.fixing.steps import STEPS
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.timing.estimate import TimeEstimate, time_like
from qdqtool.timing.parts import FixTime
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction

_MAX_SITES = 512


def add_fixes(model: Model, prediction: Prediction, time: TimeEstimate, target: Target) -> None:
    """Add to an estimate the time that automatic fixes save, those of one kind together.

    A kind that saves nothing is left out, and one that cannot be applied (weights not available).
    """
    if not time.gpu.has_int8:
        return
    view = View(model)
    automatic = {f.code for f in prediction.findings if f.automatic}
    for step in STEPS:
        codes = automatic.intersection(step.codes)
        if not codes or step.costs_speed:
            continue
        try:
            sites = step.find_sites(view, target, prediction, codes)
            sites = [s for s in sites if not s.skip_reason]
            if not 0 < len(sites) <= _MAX_SITES:
                continue
            candidate, _ = apply_sites(model, sites)
            saved_ms = time.total_ms - time_like(time, candidate, target)
        except QdqtoolError:
            continue
        if saved_ms > 0:
            time.fixes.append(
                FixTime(sorted({s.code for s in sites}), [s.node for s in sites], saved_ms)
            )
    time.fixes.sort(key=lambda f: -f.saves_ms)
