"""What the fixes of a prediction save on a GPU: each kind applied to a copy, simulated and timed."""

from __future__ import annotations

from qdqtool.errors import QdqtoolError
from qdqtool.fixing.api import STEPS
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.timing.estimate import TimeEstimate, time_like
from qdqtool.timing.parts import FixTime
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction

_MOST_SITES = 512


def add_fixes(model: Model, prediction: Prediction, time: TimeEstimate, target: Target) -> None:
    """Adds to an estimate what the fixes that ``qdqtool fix`` does by itself save, those of one kind together.

    A kind that saves nothing is left out; so is one that the model refuses (weights not available).
    """
    if not time.gpu.has_int8:
        return
    view = View(model)
    found = {f.code for f in prediction.findings if f.automatic}
    for step in STEPS:
        wanted = found & set(step.codes)
        if not wanted or not step.default:
            continue
        try:
            sites = step.sites(view, target, prediction, wanted)
            if not 0 < len(sites) <= _MOST_SITES:
                continue
            editor = Editor(model.copy())
            for site in sites:
                site.apply(editor)
            after = time_like(time, editor.finish(), target)
        except QdqtoolError:
            continue
        if time.total_ms - after > 0:
            codes = sorted({s.code for s in sites})
            time.fixes.append(FixTime(codes, [s.node for s in sites], time.total_ms - after))
    time.fixes.sort(key=lambda f: -f.saves_ms)
