"""The places that one step of ``fix`` finds in a model, from what its prediction reports."""

from collections.abc import Callable, Sequence

from qdqtool.fixing.site import FixSite
from qdqtool.fixing.steps import STEPS
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.trt.targets import Target, target_named
from qdqtool.types import Refusal

Find = Callable[[View, Target, Sequence[Refusal]], list[FixSite]]


def sites(find: Find, model: Model, target: Target | None = None) -> list[FixSite]:
    """What the step with that function finds; ``target`` is TensorRT 8.5 by default."""
    chosen = target or target_named("trt8.5")
    step = next(s for s in STEPS if s.find is find)
    view = View(model)
    return step.find_sites(view, chosen, predict(model, chosen), step.codes)
