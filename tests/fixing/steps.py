from collections.abc import Callable, Sequence

from qdqtool.fixing.site import FixSite
from qdqtool.fixing.steps import STEPS
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Reason
from qdqtool.trt.targets import Target, target_named

Find = Callable[[View, Target, Sequence[Reason]], list[FixSite]]


def find_sites(find: Find, model: Model, target: Target | None = None) -> list[FixSite]:
    chosen, step = target or target_named("trt8.5"), next(s for s in STEPS if s.find is find)
    return step.find_sites(View(model), chosen, predict(model, chosen), step.codes)


def apply_site(model: Model, find: Find) -> Model:
    (site,) = find_sites(find, model)
    editor = Editor(model.copy())
    site.apply(editor)
    return editor.finish()
