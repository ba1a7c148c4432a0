"""``qdqtool.predict``: what TensorRT will do with a Q/DQ model."""

from __future__ import annotations

from collections import defaultdict

from qdqtool.base.files import records_inputs
from qdqtool.base.options import Images, takes
from qdqtool.base.parameters import typed
from qdqtool.base.process import pause_gc
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource, load, load_full
from qdqtool.model.qdq import without_pairs
from qdqtool.options import Assumed, Looking, On, Way
from qdqtool.trt.outcome import apply_assumptions, simulate, simulate_without_alternatives
from qdqtool.trt.targets import Target, target_named
from qdqtool.types import ConvOutcome, Finding, Prediction, Severity


@takes(on=On, assumed=Assumed, how=Way)
@typed
@records_inputs
def predict(
    model: ModelSource | Model,
    on: On,
    *,
    advice: bool = True,
    assumed: Assumed,
    how: Way,
) -> Prediction:
    """Says which convolutions TensorRT will run in INT8, which not, and why. Needs no GPU and no TensorRT.

    Args:
        model: Path, ModelProto or bytes of a Q/DQ model. Weights are not needed: external data may be missing.
        advice: Whether to look for findings as well.
        {options}

    Returns:
        The prediction: outcomes of every Conv, ConvTranspose, Gemm and MatMul, engine layers, the optimizer's trace,
        conversions that stay at run time, and findings with their fixes.

    Raises:
        ModelError: The model cannot be read.
        QdqtoolError: The target, the assumption or the way is not known.
    """
    chosen, way = apply_assumptions(target_named(on.target), assumed.assume), how.way
    if way is not None:
        from qdqtool.explain.ways import way_named

        way = way_named(way).name
    with pause_gc():
        index = load(model)
        if chosen.is_rtx:
            from qdqtool.trt.rtx.predict import predict_rtx

            prediction = predict_rtx(index, chosen)
        else:
            prediction = simulate(index, target_named(on.target), assumed.assume)
        if advice:
            prediction.findings = advise(index, prediction, way)
    return prediction


@takes(images=Images, looking=Looking)
def check_activations(
    model: ModelSource | Model,
    prediction: Prediction,
    data: object,
    *,
    images: Images,
    looking: Looking,
    progress: bool = False,
) -> None:
    """Runs a Q/DQ model on data and adds a finding where scales of activations do not fit it.

    It runs with the quantizers of activations taken out, so that what one clips says nothing of those behind it.

    Args:
        model: The model that was predicted; its weights are needed.
        prediction: Its prediction, to which the finding is added.
        data: What :func:`calibration.open_data` takes: a folder of images, a list file, npz or npy, arrays.
        {options}
        progress: Whether to draw progress on stderr (only when that is a terminal).

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: There is no usable data.
    """
    from calibration import Preprocess, Statistics, collect
    from qdqtool.explain.lint import activation_scales
    from qdqtool.explain.report import Report
    from qdqtool.model.editor import float_model
    from qdqtool.model.view import View
    from qdqtool.trt.faults import OutlierScales

    index = load_full(model)
    view = View(index)
    sources = {
        q.input(0): without_pairs(index, q.input(0)) for q in activation_scales.quantized(view)
    }
    if not sources:
        return
    # With Q/DQ at the weights alone onnxruntime loses tensors in front of an Add when it fuses that.
    statistics = collect(
        float_model(index.copy(), weights=True).proto,
        data,
        list(dict.fromkeys(sources.values())),
        preprocess=images.preprocess or Preprocess(),
        size=images.size,
        max_images=looking.max_images,
        progress=progress,
    )
    report = Report(prediction.target)
    seen = {tensor: statistics[source] for tensor, source in sources.items()}
    activation_scales.run(view, report, Statistics(seen, images=statistics.images))
    # A guess, where data tells it.
    known = [f for f in prediction.findings if not isinstance(f.causes[0].refusal, OutlierScales)]
    prediction.findings = _ordered([*known, *report.findings])
    _number(prediction.findings, prediction, index)


def outcome(model: Model, target: Target) -> Prediction:
    """The bare outcome: no findings, and what a target assumes is taken for settled."""
    with pause_gc():
        if target.is_rtx:
            from qdqtool.trt.rtx.predict import predict_rtx

            return predict_rtx(model, target)
        return simulate_without_alternatives(model, target)


def advise(model: Model, prediction: Prediction, way: str | None = None) -> list[Finding]:
    """Everything worth reporting about a prediction: build failures first, then the widest cost first.

    Numbers the findings from 0 and sets ``findings`` of each convolution to the ids that concern it.
    """
    findings = _ordered(_found(model, prediction, way))
    _number(findings, prediction, model)
    return findings


def of_part(model: Model, target: Target) -> Prediction:
    """The prediction of a part, to be compared with the whole's: its findings are in no order and have no numbers."""
    with pause_gc():
        prediction = outcome(model, target)
        prediction.findings = _found(model, prediction, None)
    return prediction


def _found(model: Model, prediction: Prediction, way: str | None) -> list[Finding]:
    from qdqtool.explain.lint.api import run as lint
    from qdqtool.explain.report import Report
    from qdqtool.model.view import View

    view = View(model)
    report = Report(prediction.target, way)
    if target_named(prediction.target).is_rtx:
        from qdqtool.explain.compiler import explain as explain_compiler

        explain_compiler(prediction, report, view)
        lint(view, report, prediction.convolutions)
    else:
        from qdqtool.explain.api import explain

        lint(view, report, prediction.convolutions)
        explain(prediction, report)
    if prediction.regions:
        from qdqtool.explain.api import name_regions

        name_regions(prediction, report)
    return report.findings


_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)


def _ordered(findings: list[Finding]) -> list[Finding]:
    """Errors first; within a severity the code that costs most first, and in it the widest tensor first."""
    values: dict[str, list[int]] = defaultdict(list)
    for finding in findings:
        values[finding.code].append(finding.values or 0)
    codes = sorted(values, key=lambda code: (-sum(values[code]), -len(values[code])))
    place = {code: number for number, code in enumerate(codes)}
    return sorted(
        findings, key=lambda f: (_ORDER.index(f.severity), place[f.code], -(f.values or 0))
    )


def _number(findings: list[Finding], prediction: Prediction, model: Model) -> None:
    by_name: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
    there = {n.name for n in model.nodes}
    for outcome in prediction.convolutions:
        outcome.findings.clear()
    for number, finding in enumerate(findings):
        finding.id = number
        named = {finding.node: None}
        for refusal in (r for c in finding.causes for r in (c.refusal, *c.also)):
            named.update(dict.fromkeys(refusal.names()))
        finding.nodes = tuple([n for n in named if n in there])
        if finding.node in by_name and finding.node not in finding.convolutions:
            finding.convolutions.append(finding.node)
        for name in finding.convolutions:
            concerned = by_name.get(name)
            if concerned is not None:
                concerned.findings.append(number)
