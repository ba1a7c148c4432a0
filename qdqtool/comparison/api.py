"""``qdqtool.compare``: two models, two builds, or what a model asks for and what its build made of that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from qdqtool.buildlog.costs import EngineReport, analyze, compare_engines
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.summary import find_listing_hole, is_float_build
from qdqtool.buildlog.types import Build
from qdqtool.comparison import builds, models, words
from qdqtool.comparison.matching import ALIKE, match
from qdqtool.comparison.models import Asked
from qdqtool.comparison.result import (
    NO_LISTING,
    Change,
    Comparison,
    Lost,
    NodeChange,
    NodeSide,
    compare_sides,
    is_model,
)
from qdqtool.errors import BuildLogError, QdqtoolError
from qdqtool.findings.coded import codes_of
from qdqtool.findings.messages import obstacles
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.faults import IntegerOperator, UnsignedZeroPoint
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import Finding, Precision, Prediction, Severity
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import Parameter, said
from qdqtool.verification.api import check_not_empty, choose_target

_ONE_NETWORK = 0.9  # likeness from which on nothing needs to be said about it
Side: TypeAlias = ModelSource | Model | Build | EngineReport | Sequence[str | os.PathLike[str]]


def compare(
    a: Side, b: Side, *, target: str | Target | None = None, gpu: str | None = None
) -> Comparison:
    """Compare two models, two builds, or a model and a build; losses come first.

    Args:
        a: An ONNX model (float or with Q/DQ), or a build: a log, a layer JSON, a profile, or a
            list of several files of one build.
        b: The other side. Two models are matched by structure and names; a model and a build
            must be of one network.
        target: TensorRT to predict for instead of the build's own version. Default without a
            build: ``trt10``.
        gpu: GPU to estimate the times of two models for; see ``qdqtool gpus``.

    Returns:
        The comparison; ``ok`` says whether nothing got worse for INT8 from ``a`` to ``b``.

    Raises:
        ModelError: A model cannot be read.
        BuildLogError: A build cannot be read, or is of another model.
        QdqtoolError: The target or the GPU is unknown, or two models have no layer in common.
    """
    with record_inputs() as inputs:
        comparison = _compare(a, b, target, gpu)
    comparison.read = inputs
    return comparison


def _compare(a: Side, b: Side, target: str | Target | None, gpu: str | None) -> Comparison:
    one, two = _read(a, "a"), _read(b, "b")
    if isinstance(one, Model) and isinstance(two, Model):
        return _models(one, two, target, gpu)
    if gpu is not None:
        raise QdqtoolError(
            said("{`gpu`} is for two models; a build has the times that were measured"),
            code="option-without-effect",
            parameter="gpu",
        )
    if isinstance(one, EngineReport) and isinstance(two, EngineReport):
        return _builds(one, two)
    return _model_and_build(one, two, target)


def _read(source: Side, name: str) -> Model | EngineReport:
    if isinstance(source, (Model, EngineReport)):
        return source
    if isinstance(source, Build):
        return analyze(source)
    if isinstance(source, (list, tuple)):
        if not source:
            raise QdqtoolError(
                said("{side}: no file given", side=Parameter(name)),
                code="missing-argument",
                parameter=name,
            )
        if len(source) > 1:
            return analyze(read_build(*source))
        source = source[0]
    known: Any = source
    if isinstance(source, (str, os.PathLike)) and not is_model(source):
        return analyze(read_build(source))
    return load(known)


# Two models -------------------------------------------------------------------------------------------------------


def _models(one: Model, two: Model, target: str | Target | None, gpu: str | None) -> Comparison:
    chosen = target_named(target if target is not None else DEFAULT_TARGET)
    names = distinct_names([one.path or "first model"], [two.path or "second model"])
    first, second = (
        _asked(model, chosen, gpu, name) for model, name in zip((one, two), names, strict=True)
    )
    matching = match(first.view, second.view)
    weighted = [n.index for n in first.view.weighted]
    common = any(i in matching.pairs for i in weighted)
    if matching.likeness < ALIKE or (not common and (weighted or second.view.weighted)):
        for asked in (first, second):
            findings = asked.prediction.findings if asked.prediction is not None else []
            if any(isinstance(f.causes[0].refusal, IntegerOperator) for f in findings):
                raise QdqtoolError(
                    f"{asked.title} has {obstacles(findings)}; there are no layers to compare",
                    code="unsupported",
                )
        reason = (
            f"only {matching.likeness:.0%} of the layers have their like"
            if common
            else "no layer in common"
        )
        raise QdqtoolError(
            f"{first.title} and {second.title} are models of different networks: {reason}",
            code="different-models",
        )
    result = Comparison(models.side_of(first), models.side_of(second), matched_by=matching.by)
    if matching.likeness < _ONE_NETWORK:
        result.notes.append(Remark.FEW_ALIKE(likeness=matching.likeness))
    left, right = models.nodes_of(first), models.nodes_of(second)
    for whole, nodes in (
        (result.a, left),
        (result.b, right),
    ):  # what is quantized to UINT8 does not count
        int8 = [n for n in nodes.values() if n.is_int8]
        whole.int8, whole.int8_to_int8 = len(int8), sum(n.output == Precision.INT8 for n in int8)
    reasons = _Reasons(second.prediction)
    for index, other in matching.pairs.items():
        a, b = left.get(index), right.get(other.index)
        if a is not None or b is not None:
            a = a or NodeSide(one.nodes[index].name, one.nodes[index].op, data=False)
            b = b or NodeSide(other.name, other.op, data=False)
            result.nodes.append(reasons.explained(compare_sides(a, b)))
    taken = {other.index for other in matching.pairs.values()}
    result.nodes += [
        _alone(side, None) for index, side in left.items() if index not in matching.pairs
    ]
    result.nodes += [_alone(None, side) for index, side in right.items() if index not in taken]
    places = {node.name: node.index for node in one.nodes}
    result.nodes.sort(
        key=lambda n: places.get(n.a.name, len(places)) if n.a is not None else len(places)
    )
    return result


def _asked(model: Model, target: Target, gpu: str | None, title: str) -> Asked:
    if gpu is None:
        return Asked(View(model), predict(model, target), title)
    from qdqtool.timing.estimate import predict_on

    prediction, _ = predict_on(model, target, TimingOptions(gpu=gpu))
    return Asked(View(model), prediction, title)


def distinct_names(one: Sequence[str], two: Sequence[str]) -> tuple[str, str]:
    """What to call two sets of files: their names, with as many folders in front as make them differ."""

    def named(paths: Sequence[str], parts: int) -> str:
        return ", ".join(os.sep.join(path.split(os.sep)[-parts:]) for path in paths)

    deepest = max((path.count(os.sep) + 1 for path in (*one, *two)), default=1)
    named_apart = ((named(one, parts), named(two, parts)) for parts in range(1, deepest + 1))
    return next(
        (pair for pair in named_apart if pair[0] != pair[1]), (named(one, 1), named(two, 1))
    )


def _alone(a: NodeSide | None, b: NodeSide | None) -> NodeChange:
    """A node of one side: a convolution, or another one with Q/DQ."""
    changes = (
        (Change.ONLY_IN_A, Change.LOST_QDQ) if b is None else (Change.ONLY_IN_B, Change.GAINED_QDQ)
    )
    is_convolution = any(side is not None and side.precision is not None for side in (a, b))
    node = NodeChange(a, b, (changes[0 if is_convolution else 1],))
    node.why = words.why(node)
    return node


class _Reasons:
    """Why convolutions lost INT8, as far as the prediction of the model, or of the second of two, shows it.

    ``fallback`` is what to say where that has them in INT8; ``said`` how what A and B write is told.
    """

    def __init__(
        self,
        prediction: Prediction | None,
        fallback: Lost | None = None,
        said: tuple[str, str] = ("wrote", "writes"),
    ) -> None:
        self.fallback, self.said = fallback, said
        convolutions = prediction.convolutions if prediction is not None else ()
        # A finding explains what the prediction has in float; one about the output says nothing of what computes.
        self.int8 = {c.name for c in convolutions if c.is_int8}
        self.to_int8 = {c.name for c in convolutions if c.int8_in_int8_out}
        self.findings: dict[str, Finding] = {}
        findings = prediction.findings if prediction is not None else ()
        for finding in sorted(findings, key=lambda found: list(Severity).index(found.severity)):
            for name in finding.convolutions:
                self.findings.setdefault(name, finding)

    def explained(self, node: NodeChange) -> NodeChange:
        """The node with the reason, and in words."""
        name, message = node.b.name if node.b is not None else "", ""
        lost = Change.LOST_INT8 in node.changes
        if (
            node.lost == Lost.UNKNOWN
            and self.fallback is not None
            and (name in self.int8 or self.fallback == Lost.FLOAT_BUILD)
        ):
            node.lost = self.fallback
        elif lost and node.b is not None and node.b.is_unsigned:
            node.finding, node.lost = (
                codes_of(UnsignedZeroPoint)[-1],
                Lost.FINDING,
            )  # what holds always
        elif (finding := self.findings.get(name)) is not None and (
            (lost and name not in self.int8)
            or (Change.LOST_INT8_OUTPUT in node.changes and name not in self.to_int8)
        ):
            node.finding, message = finding.code, finding.message
            if node.lost == Lost.UNKNOWN:
                node.lost = Lost.FINDING
        node.why = words.why(node, message, self.said)
        return node


# Builds -----------------------------------------------------------------------------------------------------------


def _builds(one: EngineReport, two: EngineReport) -> Comparison:
    profiles = [
        not report.build.layers and bool(report.build.profile_rows) for report in (one, two)
    ]
    if any(profiles):  # names and times are all that both have
        one, two = (analyze(builds.with_profile_rows(report.build)) for report in (one, two))
    for build in (one.build, two.build):
        if build.names_only and not build.profile_rows:
            raise BuildLogError(
                "layer names without precisions; build with --profilingVerbosity=detailed",
                build.display_name,
                code="no-precisions",
            )
        if not build.layers:
            raise BuildLogError(
                "no engine listing; give a layer JSON or a verbose build log",
                build.display_name,
                code="no-layer-listing",
            )
    engines = compare_engines(one, two)
    names = distinct_names(one.build.files, two.build.files)
    first, second = (builds.side_of(r, name) for r, name in zip((one, two), names, strict=True))
    result = Comparison(first, second, matched_by=engines.by, engines=engines)
    for node in builds.changes_of(engines):
        if node.a is not None and node.b is not None:
            node = compare_sides(node.a, node.b, scales=False)
        node.why = words.why(node)
        result.nodes.append(node)
    if (result.nodes or any(profiles)) and not any(p.first and p.second for p in engines.pairs):
        raise BuildLogError(
            f"{names[0]} and {names[1]} have no layer in common: they are builds of different networks",
            code="different-models",
        )
    alone = [name for profile, name in zip(profiles, names, strict=True) if profile]
    if alone:
        result.notes.append(Remark.UNTYPED_TIMES(files=alone))
    if one.has_times != two.has_times:
        result.notes.append(Remark.ONE_UNTIMED())
    return result


def _model_and_build(
    one: Model | EngineReport, two: Model | EngineReport, target: str | Target | None
) -> Comparison:
    """What the file asks for, and what the engine realized."""
    model = one if isinstance(one, Model) else two
    report = two if isinstance(one, Model) else one
    assert isinstance(model, Model) and isinstance(report, EngineReport)
    build = report.build
    check_not_empty(build)
    chosen, notes = choose_target(build, target)
    prediction = predict(model, chosen)
    names = distinct_names([model.path or "model in memory"], build.files)
    asked = Asked(View(model), None, names[0])
    requested = models.nodes_of(asked)
    realized, by = builds.nodes_of(asked.view, prediction, build)
    if not realized and prediction.convolutions:
        raise BuildLogError(
            "shows no data type of any of the model's convolutions; "
            "build with --profilingVerbosity=detailed",
            names[1],
            code="no-precisions",
        )
    file, engine = models.side_of(asked), builds.side_of(report, names[1])
    if not build.layers:
        engine.gaps.append(NO_LISTING)
    if not (engine.gaps or build.bindings or build.parse.inputs):
        hole = find_listing_hole(build, model.inputs)
        engine.gaps += [] if hole is None else [hole]
    engine.conversions = None if engine.gaps else sum(layer.is_qdq for layer in build.layers)
    prediction, said = _nearest(model, prediction, chosen, realized, engine.conversions)
    weighted = [c for c in prediction.convolutions if c.index in requested]
    for conv in weighted:
        if requested[conv.index].is_int8 and conv.is_int8:
            requested[conv.index].output = conv.output
    file.int8 = sum(requested[c.index].is_int8 for c in weighted)
    file.int8_to_int8 = sum(requested[c.index].output == Precision.INT8 for c in weighted)
    file.conversions = _conversions(prediction, engine.conversions)
    file.obstacle = obstacles(prediction.findings)
    file.convolutions = engine.convolutions = len(prediction.convolutions)
    file.products = engine.products = sum(c.is_product for c in prediction.convolutions)
    file.plain = engine.plain = file.convolutions - file.products
    engine.int8 = sum(side.is_int8 for side in realized.values())
    engine.int8_to_int8 = sum(
        side.is_int8 and side.output == Precision.INT8 for side in realized.values()
    )
    swapped = isinstance(one, EngineReport)
    sides = (engine, file) if swapped else (file, engine)
    result = Comparison(*sides, matched_by=by, notes=notes + said)
    is_float = is_float_build(build) and file.quantized
    if is_float and swapped:
        result.notes.append(Remark.OF_FLOAT_MODEL())
    fallback = None if swapped else Lost.FLOAT_BUILD if is_float else Lost.UNEXPLAINED
    asks, shows = "is predicted to write", "writes"
    reasons = _Reasons(prediction, fallback, (shows, asks) if swapped else (asks, shows))
    for conv in weighted:
        a, b = (
            requested[conv.index],
            realized.get(conv.index) or NodeSide(conv.name, conv.op, Precision.UNKNOWN),
        )
        result.nodes.append(
            reasons.explained(compare_sides(*((b, a) if swapped else (a, b)), scales=False))
        )
    return result


def _conversions(prediction: Prediction, built: int | None) -> int | None:
    """The predicted number; of a range (what Myelin takes in is not always known) the one nearest to the build's."""
    if built is None or prediction.conversions is None or not prediction.regions:
        return prediction.conversions
    few, many = prediction.conversions_range or (prediction.conversions, prediction.conversions)
    return min(max(built, few), many)


def _nearest(
    model: Model,
    prediction: Prediction,
    target: Target,
    realized: dict[int, NodeSide],
    built: int | None,
) -> tuple[Prediction, list[Note]]:
    """The prediction under the assumption that the build contradicts least, and what to say of it."""

    def wrong(one: Prediction) -> int:
        outputs = sum(
            c.output != r.output
            for c in one.convolutions
            if (r := realized.get(c.index)) is not None
            and c.is_int8
            and r.is_int8
            and r.output is not None
        )
        return outputs + (
            abs(built - one.conversions) if built is not None and one.conversions is not None else 0
        )

    best, notes = prediction, []
    for assumption in prediction.assumptions:
        for value in assumption.alternatives:
            other = predict(model, target, assume={assumption.name: value})
            if wrong(other) < wrong(best):
                best, notes = other, [Remark.COMPARED_WITH(name=assumption.name, value=value)]
    return best, notes
