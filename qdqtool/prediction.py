"""Prediction of the engine that TensorRT builds from a Q/DQ model, without times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qdqtool.errors import QdqtoolError
from qdqtool.ir.constants import fold_constants
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load, load_full
from qdqtool.ir.qdq import find_float_tensor, uses_fp8
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.trt.outcome import apply_assumptions, simulate, simulate_without_alternatives
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note
from qdqtool.util.process import pause_gc
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource
    from calibration.options import ImageFunction, Preprocess
    from qdqtool.findings.report import FindingReport


def predict(
    model: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    *,
    advice: bool = True,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
) -> Prediction:
    """Predict in which type TensorRT runs each convolution, and what prevents INT8.

    No GPU and no TensorRT are needed.

    Args:
        model: Path, bytes, ModelProto or onnx-graphsurgeon graph of a Q/DQ model. External data
            may be missing.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        advice: Whether to add findings to the prediction. A prediction without findings is faster.
        assume: Assumed outcome of a fusion that TensorRT decides by timing: ``{"silu-add":
            "fused"}`` or ``{"silu-add": "apart"}``.
        way: Build method, such as ``trtexec`` or ``onnxruntime``. The findings name its flags. The
            error for an unknown method lists the choices.

    Returns:
        The prediction: outcomes of every Conv, ConvTranspose, Gemm and MatMul, engine layers,
        the optimizer's trace, remaining conversions, and findings with their fixes.

    Raises:
        ModelError: The model cannot be read.
        QdqtoolError: The target, the assumption or the build method is unknown.
    """
    with record_inputs() as inputs:
        prediction = _predict(model, target_named(target), advice, assume, way)
    prediction.read = inputs
    return prediction


def _predict(
    model: ModelSource | Model,
    target: Target,
    advice: bool,
    assume: Mapping[str, str] | None,
    way: str | None,
) -> Prediction:
    requested = target
    if way is not None:
        from qdqtool.findings.build_methods import find_build_method

        way = find_build_method(way).name
    with pause_gc():
        model = load(model)
        target = choose_typing(model, target)
        assumed_target = apply_assumptions(target, assume)
        if assumed_target.is_rtx:
            from qdqtool.trt.rtx.predict import predict_rtx

            prediction = predict_rtx(model, assumed_target)
        else:
            prediction = simulate(model, target, assume)
        prediction.requested_target = requested.display_name
        if advice:
            prediction.findings = collect_findings(model, prediction, way, target)
    return prediction


def choose_typing(model: Model, target: Target) -> Target:
    """Return the target, in its strongly typed form if the model has FP8 quantizers."""
    return target.for_fp8() if not target.strongly_typed and uses_fp8(model) else target


def check_activations(
    model: ModelSource | Model,
    prediction: Prediction,
    data: CalibrationSource,
    *,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
    max_images: int = 64,
    progress: bool = False,
) -> None:
    """Run a Q/DQ model on data, and add findings on scales that do not fit the activations.

    The model runs without its quantizers. A quantizer that clips large values therefore does not
    change the values at later quantizers. A Relu replaces a quantizer whose range starts at 0. The
    findings and notes of `prediction` change in place. A note states how many scales were checked,
    and the codes of the findings. A model without INT8 activations is not run.

    Args:
        model: The predicted model with its weights.
        prediction: Prediction of the model. It receives the findings.
        data: Images, as for :func:`calibration.open_data`: folder, list file, npz, npy or arrays.
        preprocess: How images become inputs: a name of :data:`calibration.PRESETS` (``yolo``,
            ``imagenet``, ...), a :class:`calibration.Preprocess`, or a function that converts an
            RGB image of Pillow to an input array. Default: the preprocessing in the model's
            metadata, else ``yolo`` (letterbox, RGB, divided by 255).
        size: Height and width in pixels if they are dynamic in the model. Default: ``imgsz`` in
            the model's metadata.
        max_images: Maximum number of samples, spread evenly over the data.
        progress: Whether to draw a progress bar on stderr, if stderr is a terminal.

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: The data cannot be used.
    """
    from calibration import Statistics, collect
    from calibration.presets import choose_preprocess
    from qdqtool.findings.lint import activation_scales
    from qdqtool.findings.preprocess_notes import describe_preprocess
    from qdqtool.findings.report import FindingReport
    from qdqtool.patterns.rewrites import insert_clipping_relus, remove_quantizers
    from qdqtool.reasons.scales import OutlierScales

    model = load_full(model)
    view = View(model)
    sources = {
        q.input(0): find_float_tensor(model, q.input(0))
        for q in activation_scales.find_int8_quantizers(view)
    }
    if not sources:
        prediction.notes.append(_note_check(0, 0, []))
        return
    choice = choose_preprocess(model.metadata, preprocess)
    # Weight quantizers are removed too. If only weights had Q/DQ, onnxruntime would fuse Adds,
    # whose input tensors could then not be measured.
    statistics = collect(
        remove_quantizers(insert_clipping_relus(model.copy()), weights=True).proto,
        data,
        list(dict.fromkeys(sources.values())),
        preprocess=choice.preprocess,
        size=size,
        max_images=max_images,
        progress=progress,
    )
    prediction.notes += describe_preprocess(model, statistics.preprocessing, choice.origin, data)
    report = FindingReport(prediction.target)
    seen = {tensor: statistics[source] for tensor, source in sources.items()}
    checked = activation_scales.run(view, report, Statistics(seen, images=statistics.images))
    prediction.notes.append(_note_check(checked, statistics.images, report.findings))
    # These findings replace the finding that is based on the scales only.
    findings = [f for f in prediction.findings if not isinstance(f.causes[0].reason, OutlierScales)]
    prediction.findings = findings
    add_findings(prediction, report.findings, model)


def _note_check(scales: int, samples: int, findings: Iterable[Finding]) -> Note:
    """Return a note on the check of activation scales, also if nothing was found."""
    codes = list(dict.fromkeys(finding.code for finding in findings))
    text = (
        f"checked the scales of {format_count(scales, 'activation')} on "
        f"{format_count(samples, 'sample')}: {', '.join(codes) or 'no finding'}"
        if scales
        else "no scales were checked: no INT8 activation has a known scale and enough values"
    )
    return Note(text, code="scales-checked", scales=scales, samples=samples, findings=codes)


def add_findings(prediction: Prediction, findings: Iterable[Finding], model: Model) -> None:
    """Add findings to a prediction, and sort and number all of its findings, in place."""
    prediction.findings = _sort_findings([*prediction.findings, *findings])
    _number_and_link_findings(prediction.findings, prediction, model)


def predict_outcome(model: Model, target: Target) -> Prediction:
    """Predict without findings, and with only one choice for Conv + activation + Add."""
    with pause_gc():
        if target.is_rtx:
            from qdqtool.trt.rtx.predict import predict_rtx

            return predict_rtx(model, target)
        return simulate_without_alternatives(model, target)


def collect_findings(
    model: Model, prediction: Prediction, way: str | None = None, target: Target | None = None
) -> list[Finding]:
    """Return the findings of a model and its prediction, sorted and numbered.

    Args:
        model: The predicted model.
        prediction: The prediction. For each of its convolutions, `findings` is set to the ids of
            the findings of the convolution, in place.
        way: Build method, such as ``trtexec``, whose flags the findings name. None if no method is
            named.
        target: Target with the version that the user requested. Default: the target of the
            prediction.
    """
    chosen = target or target_named(prediction.target)
    findings = _sort_findings(_find_findings(model, prediction, way, chosen))
    _number_and_link_findings(findings, prediction, model)
    return findings


def predict_part(model: Model, target: Target) -> Prediction:
    """Predict a model that is a part of another one. Findings are not sorted and have no ids."""
    with pause_gc():
        prediction = predict_outcome(model, target)
        prediction.findings = _find_findings(model, prediction, None, target)
    return prediction


def _find_findings(
    model: Model, prediction: Prediction, way: str | None, target: Target
) -> list[Finding]:
    from qdqtool.findings.lint.api import run as lint
    from qdqtool.findings.lint.heads import list_head_nodes
    from qdqtool.findings.lint.operators import report_fake_quantizers
    from qdqtool.findings.lint.quantizers import check_parameters
    from qdqtool.findings.report import FindingReport

    view = View(fold_constants(model))
    report = FindingReport(target, way)
    check_parameters(model, view, report)
    report_fake_quantizers(model, report)
    _report_subgraphs(model, report, target)
    if target.is_rtx:
        from qdqtool.findings.compiler import explain_compiler

        explain_compiler(prediction, report, view)
        lint(view, report, prediction.convolutions)
    else:
        from qdqtool.findings.api import explain_prediction

        lint(view, report, prediction.convolutions)
        explain_prediction(prediction, report)
    prediction.head_nodes = list_head_nodes(view)
    if prediction.regions:
        from qdqtool.findings.api import report_regions

        report_regions(prediction, report)
    return report.findings


def _report_subgraphs(model: Model, report: FindingReport, target: Target) -> None:
    from qdqtool.ir.branches import find_bodies, find_subgraph_contents
    from qdqtool.reasons import MODEL_CHECK
    from qdqtool.reasons.operators import UnanalyzedSubgraphs

    for content in find_subgraph_contents(model):
        try:
            parts = [predict_outcome(body, target) for body in find_bodies(model, content.node)]
            int8: int | None = sum(part.summary()["int8"] for part in parts)
        except QdqtoolError:  # a subgraph without types, for example
            int8 = None
        node = content.node
        counts = content.convolutions, content.products, content.quantizers
        report.add(UnanalyzedSubgraphs(MODEL_CHECK, node.name, node.op, *counts, int8))


def _sort_findings(findings: list[Finding]) -> list[Finding]:
    """Sort by severity, then by the sum of the tensor sizes of each code, then by tensor size."""
    values: dict[str, list[int]] = defaultdict(list)
    for finding in findings:
        values[finding.code].append(finding.values or 0)
    codes = sorted(values, key=lambda code: (-sum(values[code]), -len(values[code])))
    ranks = {code: number for number, code in enumerate(codes)}
    severities = list(Severity)
    return sorted(
        findings, key=lambda f: (severities.index(f.severity), ranks[f.code], -(f.values or 0))
    )


def _list_names(finding: Finding) -> list[str]:
    """Return the names in a finding and its causes, without duplicates. The node is first."""
    reasons = [reason for cause in finding.causes for reason in (cause.reason, *cause.also)]
    return list(dict.fromkeys([finding.node, *(name for r in reasons for name in r.names())]))


def _number_and_link_findings(
    findings: list[Finding], prediction: Prediction, model: Model
) -> None:
    convolutions: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
    node_names = {n.name for n in model.nodes}
    for conv in prediction.convolutions:
        conv.findings.clear()
    for number, finding in enumerate(findings):
        finding.id = number
        finding.nodes = tuple(filter(node_names.__contains__, _list_names(finding)))
        if finding.node in convolutions and finding.node not in finding.convolutions:
            finding.convolutions.append(finding.node)
        for name in finding.convolutions:
            if name in convolutions:
                convolutions[name].findings.append(number)
