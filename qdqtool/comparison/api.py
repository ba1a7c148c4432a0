"""``qdqtool.compare``: compare two models, two builds, or a model and its build."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from qdqtool.buildlog.build_status import find_missing_layer_gap, is_float_build
from qdqtool.buildlog.costs import EngineReport, analyze
from qdqtool.buildlog.engine_comparison import EngineComparison, compare_engines
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build
from qdqtool.comparison.build_side import (
    add_profile_layers,
    list_layer_changes,
    map_nodes,
    summarize_build,
)
from qdqtool.comparison.interface import compare_interfaces
from qdqtool.comparison.matching import NodeMatching, is_same_network, match_nodes
from qdqtool.comparison.model_side import ModelSide, summarize_model, use_fp16_time
from qdqtool.comparison.result import (
    NO_LISTING,
    ChangeKind,
    Comparison,
    LossReason,
    NodeChange,
    NodeSide,
    SideSummary,
    compare_sides,
)
from qdqtool.comparison.text import (
    FLOAT_BUILD,
    describe_changes,
    list_image_notes,
    note_quantized_reference,
)
from qdqtool.comparison.time_change import split_time_change
from qdqtool.errors import BuildLogError, ModelError, QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.obstacles import describe_obstacles
from qdqtool.findings.rules import finding_codes
from qdqtool.insertion.options import ImageOptions
from qdqtool.ir import file_types
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import find_common_size, has_dynamic_size
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import is_qdq
from qdqtool.patterns.view import AXIS_OPSET, View
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Finding, FindingCode, Severity
from qdqtool.reasons.operators import IntegerOperator
from qdqtool.reasons.quantizers import UnsignedZeroPoint
from qdqtool.timing.gpus import choose_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.gpu_support import require_gpu_support
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util import compression
from qdqtool.util.files import open_input, record_inputs
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count
from qdqtool.verification.api import check_not_empty, choose_target

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource
    from calibration.options import ImageFunction, Preprocess
    from qdqtool.accuracy.agreement import NetworkAgreement

_MIN_SAME_NETWORK = 0.9  # a lower likeness of two graphs adds a note to the result
# Constants that differ by at most this are equal: rounding to FP16 changes them by less.
_MAX_RELATIVE_ERROR, _MAX_ERROR = 1e-3, 1e-6
_Side = TypeVar("_Side", NodeSide, SideSummary)
_IR_VERSION = b"\x08"  # first byte of most ONNX files: the key of the field ir_version
CompareInput: TypeAlias = (
    "ModelSource | Model | Build | EngineReport | Sequence[str | os.PathLike[str]]"
)


def compare(
    a: CompareInput,
    b: CompareInput,
    *,
    data: CalibrationSource | None = None,
    progress: bool = False,
    target: str | Target | None = None,
    gpu: str | None = None,
    power: str | None = None,
    max_images: int = 512,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
) -> Comparison:
    """Compare two models, two builds, or a model and a build.

    With images, measure how well the second of two models agrees with the first one: agreement mAP
    for detectors, top-1 agreement for classifiers, one minus the relative output error for others.

    Args:
        a: An ONNX model (float or with Q/DQ), or a build: a log, a layer JSON, a profile, or a
            list of several files of one build.
        b: The other side. Two models are matched by structure and names; a model and a build
            must be of one network.
        data: Images for the agreement, as for :func:`qdqtool.insert`.
        progress: Whether to draw progress on stderr if stderr is a terminal.
        target: TensorRT version to predict for. Default: the version of the build, or ``trt10``
            without a build.
        gpu: GPU to estimate the times of two models for; see ``qdqtool gpus``.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``; see ``qdqtool gpus NAME``.
        max_images: Maximum number of images, spread evenly over the data.
        preprocess: How images become inputs, as for :func:`qdqtool.insert`. Default: the
            preprocessing that the models' metadata name, else ``yolo`` (letterbox, RGB, divided by
            255).
        size: Height and width in pixels if they are dynamic in the models, for the agreement and
            the times. Default: the size that one of the models records.

    Returns:
        The comparison. ``ok`` is True if everything was compared and nothing got worse for INT8
        from ``a`` to ``b``. ``is_slower`` is True if ``b`` takes longer, by at least 0.5 % of an
        estimated time or 2 % of a measured time. ``agreement`` is the agreement on the images.

    Raises:
        ModelError: A model cannot be read or run in onnxruntime.
        DataError: The images cannot be used.
        BuildLogError: A build cannot be read, or is of another model.
        QdqtoolError: The target or the GPU is unknown, two models are of different networks, or
            ``data`` or ``gpu`` is given for a build.
    """
    images, timing = ImageOptions(preprocess, size), TimingOptions(gpu=gpu, power=power)
    with record_inputs() as inputs:
        first, second = _load_side(a, "a"), _load_side(b, "b")
        are_models = isinstance(first, Model) and isinstance(second, Model)
        if data is not None and not are_models:
            raise QdqtoolError(
                "`data`: images can compare two models only, because a build cannot run here; "
                "leave `data` out",
                code="option-without-effect",
                parameter="data",
            )
        if isinstance(first, Model) and isinstance(second, Model):
            if gpu is not None:
                from qdqtool.timing.on_gpu import check_image_size

                check_image_size(size, first, second)
            size = size or find_common_size(second, first)
            if has_dynamic_size(first):
                images = replace(images, size=size)
        comparison = _compare_by_kind(first, second, target, replace(timing, size=size))
        if isinstance(first, Model) and isinstance(second, Model) and data is not None:
            agreement = _measure_agreement(first, second, data, images, max_images, progress)
            comparison.agreement = agreement
            comparison.notes += [
                *agreement.notes,
                *list_image_notes(agreement),
                *note_quantized_reference(comparison),
            ]
    comparison.read = inputs
    return comparison


def _measure_agreement(
    first: Model,
    second: Model,
    data: CalibrationSource,
    images: ImageOptions,
    max_images: int,
    progress: bool,
) -> NetworkAgreement:
    from qdqtool.accuracy.agreement import measure_agreement

    views = View(first), View(second)
    for view in views:
        _require_axis_opset(view)
    pairs = match_nodes(*views).pairs
    return measure_agreement(
        first,
        second,
        data,
        images=images,
        max_images=max_images,
        counterparts={
            first.nodes[index].output: node.output
            for index, node in pairs.items()
            if first.nodes[index].outputs and node.outputs
        },
        progress=progress,
    )


def _require_axis_opset(view: View) -> None:
    model = view.model
    if view.needs_axis_opset:
        raise ModelError(
            f"its per-channel Q/DQ need opset {AXIS_OPSET}, but the model has opset {model.opset}, "
            "so onnxruntime cannot run it. Fix the model first (qdqtool fix raises the opset)",
            model.path or "model",
            code="axis-opset",
        )


def _compare_by_kind(
    first: Model | EngineReport,
    second: Model | EngineReport,
    target: str | Target | None,
    timing: TimingOptions,
) -> Comparison:
    if isinstance(first, Model) and isinstance(second, Model):
        resolved = target_named(DEFAULT_TARGET if target is None else target)
        return _compare_models(first, second, resolved, timing)
    if timing.gpu is not None:
        raise QdqtoolError(
            "`gpu` estimates the times of two models only, because a build has measured times; "
            "leave `gpu` out",
            code="option-without-effect",
            parameter="gpu",
        )
    if isinstance(first, Model):
        assert isinstance(second, EngineReport)
        return _compare_with_build(first, second, target, build_first=False)
    if isinstance(second, Model):
        return _compare_with_build(second, first, target, build_first=True)
    return _compare_builds(first, second)


def _load_side(source: CompareInput, parameter: str) -> Model | EngineReport:
    if isinstance(source, (Model, EngineReport)):
        return source
    if isinstance(source, Build):
        return analyze(source)
    if isinstance(source, (list, tuple)):
        if not source:
            raise QdqtoolError(
                f"`{parameter}`: no file given; give an ONNX model or the files of a build",
                code="missing-argument",
                parameter=parameter,
            )
        if len(source) > 1:
            return analyze(read_build(*source))
        source = source[0]
    model: Any = source
    if isinstance(source, (str, os.PathLike)) and not is_model_file(source):
        return analyze(read_build(source))
    return load(model)


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is an ONNX model, by its ending or its first byte.

    Raises:
        QdqtoolError: The file is neither a model nor a build (a PyTorch file, an engine, ...).
    """
    name = os.fspath(path)
    if file_types.is_model_name(name):
        return True
    if name == "-":
        return False
    with open_input(path) as file:
        head = file.read(compression.HEAD)
    if head[:1] == _IR_VERSION:
        return True
    file_type = (
        file_types.recognize_file_type(name, head) if not compression.find_magic(head) else None
    )
    if file_type is not None and not file_type.is_build_record:
        raise file_types.wrong_file_error(name, head, error=QdqtoolError)
    return False


def choose_distinct_names(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """Return display names for two sets of files, with their folders if the names are equal."""

    def join_names(paths: Sequence[str], parts: int) -> str:
        return ", ".join(os.sep.join(path.split(os.sep)[-parts:]) for path in paths)

    parts = 2 if join_names(first, 1) == join_names(second, 1) else 1
    return join_names(first, parts), join_names(second, parts)


# Two models


def _compare_models(
    first: Model, second: Model, target: Target, timing: TimingOptions
) -> Comparison:
    gpu_notes: Sequence[Note] = ()
    if timing.gpu is not None:
        device = choose_gpu(timing.gpu, power=timing.power)
        require_gpu_support(target, device.cc, device.name)
        gpu_notes = device.notes
    titles = choose_distinct_names([first.path or "first model"], [second.path or "second model"])
    a, b = (
        _predict_side(model, target, timing, title)
        for model, title in zip((first, second), titles, strict=True)
    )
    matching = match_nodes(a.view, b.view)
    _check_same_network(a, b, matching)
    comparison = Comparison(summarize_model(a), summarize_model(b), matched_by=matching.by)
    comparison.notes += gpu_notes
    if target.borrows_rules:
        note = Note(f"the rules are {target.borrowed_rules}", code="borrowed-rules")
        comparison.notes.append(note)
    if timing.gpu is not None and timing.size is None:
        comparison.notes += _note_assumed_size(first, second)
    if comparison.a.quantized != comparison.b.quantized:
        side, summary = (b, comparison.b) if comparison.a.quantized else (a, comparison.a)
        comparison.notes += use_fp16_time(side, summary)
    if matching.likeness < _MIN_SAME_NETWORK:
        comparison.notes.append(
            Note(
                f"only {matching.likeness:.0%} of the layers have a counterpart with the same "
                "neighbors: the models are different versions of a network, or different networks",
                code="few-alike",
                likeness=matching.likeness,
            )
        )
    comparison.notes += _note_different_constants(a.view, b.view, matching)
    comparison.nodes = _compare_nodes(a, b, matching)
    comparison.interface = compare_interfaces(first, second)
    comparison.time_change = split_time_change(comparison, a.time, b.time)
    return comparison


def _note_assumed_size(first: Model, second: Model) -> list[Note]:
    if not has_dynamic_size(first) and not has_dynamic_size(second):
        return []
    text = (
        "the models record no image size: the times are for 640x640; give `size` for another size"
    )
    return [Note(text, code="size-assumed")]


def _note_different_constants(a: View, b: View, matching: NodeMatching) -> list[Note]:
    """Return a note if nodes other than Q/DQ and layers with weights have other constants in B."""
    left_out = {node.index for node in a.nodes_with_weights}
    names = [
        node.name
        for node in a.model.nodes
        if node.index in matching.pairs
        and node.index not in left_out
        and not is_qdq(node)
        and _has_other_constants(a.model, node, b.model, matching.pairs[node.index])
    ]
    if not names:
        return []
    count = format_count(len(names), "node")
    text = f"B has other constants than A at {count}; the first is {names[0]}"
    return [Note(text, code="other-constants", count=len(names), node=names[0])]


def _has_other_constants(first: Model, node: Node, second: Model, partner: Node) -> bool:
    """Return whether float constants of one shape differ by more than rounding to FP16."""
    for tensors in zip(node.inputs, partner.inputs, strict=False):
        a, b = first.constant(tensors[0]), second.constant(tensors[1])
        if a is None or b is None or a.shape != b.shape or a.dtype.kind != "f":
            continue
        if not np.allclose(a, b, rtol=_MAX_RELATIVE_ERROR, atol=_MAX_ERROR, equal_nan=True):
            return True
    return False


def _predict_side(model: Model, target: Target, timing: TimingOptions, title: str) -> ModelSide:
    if timing.gpu is None:
        return ModelSide(View(model), predict(model, target), title)
    from qdqtool.timing.on_gpu import predict_on_gpu

    prediction, time = predict_on_gpu(model, target, timing, with_insert=False)
    return ModelSide(View(model), prediction, title, time)


def _check_same_network(a: ModelSide, b: ModelSide, matching: NodeMatching) -> None:
    """Raise an error with the cause unless two models are versions of one network."""
    if is_same_network(a.view, b.view, matching):
        return
    for side in (a, b):
        findings = side.prediction.findings if side.prediction is not None else []
        if any(isinstance(f.causes[0].reason, IntegerOperator) for f in findings):
            raise QdqtoolError(
                f"{side.title} cannot be compared. It has "
                f"{describe_obstacles(findings, side.view)}. Give a model with Q/DQ pairs",
                code="unsupported",
            )
    reason = "no layer in common"
    if any(n.index in matching.pairs for n in a.view.nodes_with_weights):
        reason = f"only {matching.likeness:.0%} of the layers match"
    raise QdqtoolError(
        f"{a.title} and {b.title} are models of different networks: {reason}. Give two models of "
        "the same network",
        code="different-models",
    )


def _compare_nodes(a: ModelSide, b: ModelSide, matching: NodeMatching) -> list[NodeChange]:
    """Return a change for each node with weights or Q/DQ, in the order of the first model."""
    assert b.prediction is not None
    errors = [f.code for f in b.prediction.errors() if not f.is_built]
    explainer = _ChangeExplainer(b.prediction, rejection=next(iter(errors), ""))
    nodes = a.view.model.nodes
    changes = []
    for index, partner in matching.pairs.items():
        if index in a.nodes or partner.index in b.nodes:
            change = compare_sides(a.find_node(nodes[index]), b.find_node(partner))
            changes.append(explainer.explain_change(change))
    changes += _list_one_sided_changes(a, b, matching)
    order = {node.name: node.index for node in nodes}
    return sorted(changes, key=lambda n: order.get(n.a.name, len(order)) if n.a else len(order))


def _list_one_sided_changes(a: ModelSide, b: ModelSide, matching: NodeMatching) -> list[NodeChange]:
    paired = {partner.index for partner in matching.pairs.values()}
    return [
        *(_one_sided_change(s, None) for i, s in a.nodes.items() if i not in matching.pairs),
        *(_one_sided_change(None, s) for i, s in b.nodes.items() if i not in paired),
    ]


def _one_sided_change(a: NodeSide | None, b: NodeSide | None) -> NodeChange:
    is_convolution = any(side is not None and side.precision is not None for side in (a, b))
    kind = ChangeKind.ONLY_IN_A if is_convolution else ChangeKind.LOST_QDQ
    if a is None:
        kind = ChangeKind.ONLY_IN_B if is_convolution else ChangeKind.GAINED_QDQ
    node = NodeChange(a, b, (kind,))
    node.why = describe_changes(node)
    return node


class _ChangeExplainer:
    """Adds reasons and descriptions to changes, from the findings of a prediction.

    Args:
        prediction: Prediction of the model, or of the second of two models.
        fallback: Reason for a lost INT8 that the prediction does not explain; None if unknown.
        verbs: Verbs of the text about a changed output, for the type on A and the type on B.
        rejection: Code of the error for which TensorRT rejects the second of two models.
    """

    def __init__(
        self,
        prediction: Prediction,
        fallback: LossReason | None = None,
        verbs: tuple[str, str] = ("wrote", "writes"),
        rejection: FindingCode = "",
    ) -> None:
        self._fallback, self._verbs, self._rejection = fallback, verbs, rejection
        self._rejection_verb = prediction.rejection
        # A finding explains a lost INT8 only if the convolution is float in the prediction too, and
        # a lost INT8 output only if the convolution is not INT8 to INT8 in the prediction either.
        self._int8 = {c.name for c in prediction.convolutions if c.is_quantized}
        self._int8_to_int8 = {
            c.name for c in prediction.convolutions if c.quantized_in_quantized_out
        }
        self._findings: dict[str, list[Finding]] = {}
        severities = list(Severity)
        for finding in sorted(prediction.findings, key=lambda f: severities.index(f.severity)):
            for name in finding.convolutions:
                self._findings.setdefault(name, []).append(finding)

    def _find_cause(self, name: str, changes: Container[ChangeKind]) -> Finding | None:
        """Return the finding that explains why a convolution lost INT8 or its INT8 output.

        None if nothing was lost, if the prediction does not show the loss, or without such a
        finding at the convolution. Findings on accuracy explain no float output.
        """
        findings = self._findings.get(name, [])
        if ChangeKind.LOST_INT8 in changes and name not in self._int8:
            return next(iter(findings), None)
        if ChangeKind.LOST_INT8_OUTPUT not in changes or name in self._int8_to_int8:
            return None
        causes = [f for f in findings if codes.get(f.code).saves_time]
        return min(
            causes,
            key=lambda f: (f.node != name, not codes.get(f.code).passes),
            default=None,
        )

    def explain_change(self, node: NodeChange) -> NodeChange:
        """Set `lost`, `finding` and `why` of a change in place, and return the change.

        Both sides of the change must have the node.
        """
        assert node.b is not None
        name, message = node.b.name, ""
        is_lost = ChangeKind.LOST_INT8 in node.changes
        finding = self._find_cause(name, node.changes)
        if (
            node.lost == LossReason.UNKNOWN
            and self._fallback is not None
            and (name in self._int8 or self._fallback == LossReason.FLOAT_BUILD)
        ):
            node.lost = self._fallback
        elif is_lost and node.b.is_unsigned:
            node.lost, node.finding = LossReason.FINDING, finding_codes(UnsignedZeroPoint)[-1]
        elif finding is not None:
            node.finding, message = finding.code, finding.message
            if node.lost == LossReason.UNKNOWN:
                node.lost = LossReason.FINDING
        elif node.lost == LossReason.UNKNOWN and self._rejection:
            node.lost, node.finding = LossReason.FINDING, self._rejection
            message = f"TensorRT {self._rejection_verb} the model ({self._rejection})"
        node.why = describe_changes(node, message, self._verbs)
        return node


# Two builds


def _compare_builds(first: EngineReport, second: EngineReport) -> Comparison:
    profiles = [not r.build.layers and bool(r.build.profile_rows) for r in (first, second)]
    if any(profiles):  # A profile has only names and times of layers.
        first, second = (analyze(add_profile_layers(r.build)) for r in (first, second))
    for report in (first, second):
        _check_listing(report.build)
    engines = compare_engines(first, second)
    titles = choose_distinct_names(first.build.files, second.build.files)
    comparison = Comparison(
        summarize_build(first, titles[0]),
        summarize_build(second, titles[1]),
        matched_by=engines.aligned_by,
        engines=engines,
    )
    comparison.nodes = _compare_layers(engines)
    has_pairs = any(p.first and p.second for p in engines.pairs)
    if not has_pairs and (comparison.nodes or any(profiles)):
        raise BuildLogError(
            f"{titles[0]} and {titles[1]} have no layer in common: they are builds of different "
            "networks. Give two builds of the same network",
            code="different-models",
        )
    untyped = [title for is_profile, title in zip(profiles, titles, strict=True) if is_profile]
    comparison.notes += _note_missing_parts(untyped, first.has_times == second.has_times)
    return comparison


def _note_missing_parts(untyped: Sequence[str], alike_timed: bool) -> list[Note]:
    notes = []
    if untyped:
        text = (
            f"{' and '.join(untyped)}: layer times without data types; give the layer JSON or the "
            "log as well"
        )
        notes.append(Note(text, code="untyped-times", files=untyped))
    if not alike_timed:
        text = "only one of the builds has layer times: give the profile of the other build as well"
        notes.append(Note(text, code="one-untimed"))
    return notes


def _compare_layers(engines: EngineComparison) -> list[NodeChange]:
    changes = []
    for node in list_layer_changes(engines):
        if node.a is not None and node.b is not None:
            node = compare_sides(node.a, node.b, scales=False)
        node.why = describe_changes(node)
        changes.append(node)
    return changes


def _check_listing(build: Build) -> None:
    """Reject a build without layers, or with neither data types nor times."""
    if build.names_only and not build.profile_rows:
        raise BuildLogError(
            "lists layer names without precisions; build again with --profilingVerbosity=detailed",
            build.display_name,
            code="no-precisions",
        )
    if not build.layers:
        raise BuildLogError(
            "has no engine listing; give a layer JSON or a verbose build log",
            build.display_name,
            code="no-layer-listing",
        )


# A model and its build


def _compare_with_build(
    model: Model, report: EngineReport, target: str | Target | None, build_first: bool
) -> Comparison:
    build = report.build
    check_not_empty(build)
    resolved, notes = choose_target(build, target)
    prediction = predict(model, resolved)
    titles = choose_distinct_names([model.path or "model in memory"], build.files)
    side = ModelSide(View(model), None, titles[0])
    requested = side.nodes
    realized, matched_by = map_nodes(side.view, prediction, build)
    if prediction.convolutions and not realized:
        raise BuildLogError(
            "lists no data type for any convolution of the model; build again with "
            "--profilingVerbosity=detailed",
            titles[1],
            code="no-precisions",
        )
    file, engine = summarize_model(side), _summarize_engine(report, titles[1], model)
    prediction, assumptions = _choose_assumptions(
        model, prediction, resolved, realized, engine.conversions
    )
    weighted = [c for c in prediction.convolutions if c.index in requested]
    for conv in weighted:
        if requested[conv.index].is_quantized and conv.is_quantized:
            requested[conv.index].output = conv.output
    file.count_int8([requested[c.index] for c in weighted])
    engine.count_int8(realized.values())
    file.count_layers(prediction)
    engine.count_layers(prediction)
    file.conversions = _choose_predicted_conversions(prediction, engine.conversions)
    file.conversions_range = None
    file.obstacle = describe_obstacles(prediction.findings, side.view)
    sides = _order_sides(file, engine, build_first)
    comparison = Comparison(*sides, matched_by=matched_by, notes=notes + assumptions)
    is_float = is_float_build(build) and file.quantized
    if build_first and is_float:
        comparison.notes.append(Note(FLOAT_BUILD, code="of-float-model"))
    explainer = _make_build_explainer(prediction, is_float, build_first)
    for conv in weighted:
        unknown = NodeSide(conv.name, conv.op, Precision.UNKNOWN)
        built = realized.get(conv.index, unknown)
        nodes = _order_sides(requested[conv.index], built, build_first)
        comparison.nodes.append(explainer.explain_change(compare_sides(*nodes, scales=False)))
    return comparison


def _order_sides(model_side: _Side, build_side: _Side, build_first: bool) -> tuple[_Side, _Side]:
    return (build_side, model_side) if build_first else (model_side, build_side)


def _make_build_explainer(
    prediction: Prediction, is_float: bool, build_first: bool
) -> _ChangeExplainer:
    if build_first:
        return _ChangeExplainer(prediction, None, ("writes", "is predicted to write"))
    fallback = LossReason.FLOAT_BUILD if is_float else LossReason.UNEXPLAINED
    return _ChangeExplainer(prediction, fallback, ("is predicted to write", "writes"))


def _summarize_engine(report: EngineReport, title: str, model: Model) -> SideSummary:
    """Return the totals of a build; record missing parts of its listing as gaps."""
    engine, build = summarize_build(report, title), report.build
    if not build.layers:
        engine.gaps.append(NO_LISTING)
    if not (engine.gaps or build.bindings or build.parse.inputs):
        hole = find_missing_layer_gap(build, model.inputs)
        engine.gaps += [] if hole is None else [hole]
    engine.conversions = None if engine.gaps else sum(layer.is_qdq for layer in build.layers)
    return engine


def _choose_predicted_conversions(prediction: Prediction, built: int | None) -> int | None:
    """Return the predicted number of conversions; None if unknown.

    If the fusions of Myelin are unknown, the prediction is a range. Then return the number in
    this range that is nearest to ``built``.
    """
    if built is None or prediction.conversions is None or not prediction.regions:
        return prediction.conversions
    few, many = prediction.conversions_range or (prediction.conversions, prediction.conversions)
    return min(max(built, few), many)


def _choose_assumptions(
    model: Model,
    prediction: Prediction,
    target: Target,
    realized: dict[int, NodeSide],
    conversions: int | None,
) -> tuple[Prediction, list[Note]]:
    """Return the prediction with the assumption that fits the build best, and a list of notes.

    The list has one note if this assumption is not the default; otherwise the list is empty.
    """
    best, notes = prediction, []
    fewest = _count_differences(best, realized, conversions)
    for assumption in prediction.assumptions:
        for value in assumption.alternatives:
            other = predict(model, target, assume={assumption.name: value})
            differences = _count_differences(other, realized, conversions)
            if differences < fewest:
                best, fewest = other, differences
                text = f"{assumption.name}: the comparison assumes {value}, as in the build"
                notes = [Note(text, code="compared-with", name=assumption.name, value=value)]
    return best, notes


def _count_differences(
    prediction: Prediction, realized: dict[int, NodeSide], conversions: int | None
) -> int:
    """Return the number of differences between a prediction and a build.

    Each convolution that is quantized on both sides and whose output types differ is a difference.
    Each missing or additional conversion is a difference as well.
    """
    count = 0
    if conversions is not None and prediction.conversions is not None:
        count = abs(conversions - prediction.conversions)
    for conv in prediction.convolutions:
        built = realized.get(conv.index)
        if (
            built is not None
            and built.output is not None
            and conv.is_quantized
            and built.is_quantized
        ):
            count += conv.output != built.output
    return count
