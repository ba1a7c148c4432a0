"""``qdqtool.verify``: compare a prediction with a real build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import onnx

from qdqtool.builders.compiler_process import print_license_notice
from qdqtool.builders.options import BUILDERS
from qdqtool.buildlog.agreement import BuildFacts, BuildSource, Difference, Mismatch, MismatchKind
from qdqtool.buildlog.build_status import (
    IMPLICIT_INT8,
    LATEST_SPELLING,
    find_missing_layer_gap,
    is_implicit_int8,
)
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.types import Build, Section
from qdqtool.errors import BuilderError, BuildLogError, QdqtoolError
from qdqtool.ir.file_types import is_model_name
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import quantizers
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.result import Prediction
from qdqtool.trt.rtx.predict import build_status
from qdqtool.trt.targets import (
    DEFAULT_TARGET,
    RTX,
    TARGETS,
    Target,
    target_named,
    target_of_version,
    version_numbers,
)
from qdqtool.trt.trace import Event
from qdqtool.util.checks import check_choice
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_count_were
from qdqtool.verification import local_build
from qdqtool.verification.convolutions import compare_convolutions
from qdqtool.verification.layer_mapping import (
    NodeMapper,
    count_named_convolutions,
    find_name_conflicts,
    find_output_conflicts,
    has_shapes,
)
from qdqtool.verification.log_comparison import (
    MAX_MISMATCHES,
    compare_conversions,
    compare_layers,
    compare_trace,
    find_inconsistent_tensors,
)
from qdqtool.verification.result import Verification, verification_from_pairs, verify_rtx_build

BuildFile: TypeAlias = str | os.PathLike[str]
# Maximum share of the named convolutions whose names conflict. With more conflicts, the build is of
# another export.
_MAX_CONFLICTS = 0.1
# Minimum share of a model's convolutions that a build must name to count as its build.
MIN_NAMED = 0.2


def verify(
    model: ModelSource | Model,
    *builds: BuildFile | Build | Sequence[BuildFile],
    target: str | Target | None = None,
    gpu: str | None = None,
    clock: float | None = None,
) -> Verification:
    """Predict for the TensorRT version of a build and compare the prediction with the build.

    Args:
        model: The Q/DQ model that was built.
        builds: A trtexec or Python-API log, a layer JSON, a profile, or several files of the
            same build, one by one or as a list; ``-`` is standard input.
        target: TensorRT to predict for instead of the build's own version, such as ``8.5``,
            ``10.3``, ``11`` or ``rtx1.7``.
        gpu: GPU that the build ran on, if the log does not name it; see ``qdqtool gpus``.
            Estimated and measured times are compared.
        clock: SM clock in MHz under load.

    Returns:
        Counts of agreements, and the mismatches (of pass lines, layers and conversions, the first
        50 each). A convolution that the build does not show counts as unknown.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build cannot be read, or is of another model.
        QdqtoolError: The target or the GPU is unknown.
    """
    with record_inputs() as inputs:
        build = load_build(builds)
        verification, _ = verify_model(load(model), build, target, GpuOptions(gpu, clock))
    verification.read = inputs
    return verification


def verify_model(
    model: Model, build: Build, target: str | Target | None, gpu: GpuOptions
) -> tuple[Verification, Target]:
    """Return the verification of a model in memory, and the target of the prediction.

    Raises:
        BuildLogError: The build is of another model, or its INT8 comes from a calibration table.
        QdqtoolError: The target or the GPU is unknown.
    """
    resolved, notes = choose_target_for_gpu(build, target, gpu)
    if _is_empty(build):  # warnings alone can show implicit INT8
        reject_implicit_int8(build)
    check_same_model(model, build)
    # A build of another model lists none of this model's Qs, so the models are compared first.
    reject_implicit_int8(build, model)
    prediction = predict(model, resolved)
    if resolved.is_rtx:
        verification = verify_rtx_build(model, prediction, build)
    else:
        verification = compare_under_assumptions(model, prediction, build, resolved)
        assert verification.prediction is not None
        from qdqtool.verification.times import compare_times, explain_missing_estimate

        verification.times = compare_times(model, verification.prediction, build, resolved, gpu)
        if verification.times is None and gpu.gpu is None:
            notes += explain_missing_estimate(build)
    verification.notes[:0] = [*build.notes, *notes, *_note_missing_shapes(build)]
    return verification, resolved


def load_build(builds: Sequence[BuildFile | Build | Sequence[BuildFile]]) -> Build:
    """Read the files of one build, or return a build that is already read."""
    if len(builds) == 1 and isinstance(builds[0], Build):
        return builds[0]
    files: list[BuildFile] = []
    for build in builds:
        if isinstance(build, (str, os.PathLike)):
            files.append(build)
        elif not isinstance(build, Build):
            files += build
    if not files:
        raise BuildLogError(
            "no build given: give a trtexec log or a layer JSON",
            code="missing-argument",
            parameter="builds",
        )
    model = next((os.fspath(f) for f in files if is_model_name(f)), None)
    if model is not None:
        raise BuildLogError(
            "is an ONNX model, not a build. Give the log or the layer JSON of a build of the first "
            "model; 'qdqtool compare' takes two models",
            model,
            code="wrong-format",
            parameter="builds",
        )
    return read_build(*files)


def choose_target_for_gpu(
    build: Build, target: str | Target | None, options: GpuOptions
) -> tuple[Target, list[Note]]:
    """Return the target of :func:`choose_target` with the GPU's compute capability, and notes.

    The GPU is the GPU in the options; if the options name none, the GPU of the build. The compute
    capability is only set if the options name a GPU, or if the rules of the target depend on it.

    Raises:
        QdqtoolError: The GPU is unknown, or the target or the build does not support the GPU.
    """
    resolved, notes = choose_target(build, target)
    resolved = replace(resolved, has_built_typing=True)
    depends_on_gpu = resolved.is_rtx or resolved.needs_hopper_for_fp8
    if not depends_on_gpu and options.gpu is None:
        return resolved, notes
    from qdqtool.timing import gpus
    from qdqtool.timing.built_engine import find_build_gpu, parse_device

    built_capability = parse_device("", build.gpu).cc
    gpu = None if options.gpu is None else gpus.choose_gpu(options.gpu)
    if resolved.is_rtx and build.targets:
        resolved = replace(resolved, capabilities=build.targets, has_named_capability=True)
        if gpu is not None and gpu.cc not in resolved.capability_names:
            raise QdqtoolError(
                f"`gpu` {gpu.name} has compute capability {gpu.cc}, but the build is for "
                f"{', '.join(resolved.capability_names)}; give the GPU of the build",
                code="different-gpus",
                parameter="gpu",
            )
    elif gpu is not None:
        resolved = resolved.with_capability(gpu.cc, gpu.name, seen=gpu.cc == built_capability)
    elif built_capability is not None:
        resolved = resolved.with_capability(built_capability, seen=True)
    elif (build_gpu := find_build_gpu(build)) is not None:
        resolved = resolved.with_capability(build_gpu.cc, seen=True)
    return resolved, notes


def choose_target(build: Build, target: str | Target | None) -> tuple[Target, list[Note]]:
    """Return the target to predict for: `target`, or else the target of the build's version.

    A build without a version gets the version that its log format suggests, or the default
    target. A note explains such a choice, or states that `target` is not the version of the build.
    Other choices get no note.
    """
    if target is not None:
        resolved = target_named(target)
        return resolved, _list_version_notes(build, resolved)
    if build.is_rtx:
        return RTX, []
    version = build.tensorrt or build.version_hint
    if build.tensorrt is not None:
        return target_of_version(build.tensorrt), []
    resolved = TARGETS[DEFAULT_TARGET]
    if version not in (None, LATEST_SPELLING):
        resolved = target_of_version(version)
    spelling = f", and its format is that of {version} or later" if version else ""
    note = Note(
        f"the build does not state its TensorRT version{spelling}: the prediction is for "
        f"{resolved.name}. Give `target` for a build of another version",
        code="no-version",
        version=version,
        target=resolved.name,
    )
    return resolved, [note]


def _list_version_notes(build: Build, target: Target) -> list[Note]:
    if build.tensorrt is None or _is_same_version(build.tensorrt, build.is_rtx, target):
        return []
    note = Note(
        f"the build is of {build.title}, but the prediction is for {target.title} (`target`): "
        f"an agreement does not confirm predictions for {target.title}",
        code="other-version",
        version=build.tensorrt,
        target=target.display_name,
    )
    return [note]


def _is_same_version(version: str, is_rtx: bool, target: Target) -> bool:
    """Return whether a build's version equals a target's, up to the digits that the user gave."""
    if is_rtx or target.is_rtx:
        return is_rtx == target.is_rtx
    numbers, named = version_numbers(version), target.version_name.split(".")[:2]
    return numbers is None or [str(n) for n in numbers[: len(named)]] == named


def reject_implicit_int8(build: Build, model: Model | None = None) -> None:
    """Reject a build whose INT8 comes from a calibration table instead of the model's Q/DQ."""
    if not is_implicit_int8(build):
        return
    names = {event.subject for event in build.trace}
    for layer in build.layers:
        names.update(layer.parse_name().bases)
    if model is None or not any(q.parser_name in names for q in quantizers(model)):
        raise BuildLogError(
            f"{IMPLICIT_INT8}. To verify a prediction, build a model with Q/DQ ('qdqtool insert')",
            build.display_name,
            code="implicit-int8",
        )


def check_same_model(model: Model, build: Build) -> None:
    """Reject a build of another model, or of another export with equal names."""
    check_not_empty(build)
    named, total = count_named_convolutions(model, build)
    if named < MIN_NAMED * total and not is_all_myelin(build):
        raise BuildLogError(
            f"contains {named or 'none'} of the {format_count(total, 'convolution')} of "
            f"{model.path or 'the model'}: the build is of another model, or its log is cut off. "
            "Give the model and the complete log of one build",
            build.display_name,
            code="different-models",
        )
    view, mapper = View(model), NodeMapper(model, build.layers)
    conflicts = find_name_conflicts(view, build, mapper)
    if len(conflicts) > _MAX_CONFLICTS * named:
        name, in_model, in_build = conflicts[0]
        names = format_count(len(conflicts), "name")
        raise BuildLogError(
            f"the build is of another export or network: in {model.path or 'the model'}, {names} "
            f"of the build {'is' if len(conflicts) == 1 else 'are'} used for other nodes ({name} "
            f"is {in_build} in the build, but {in_model} in the model). Give the model of the "
            "build, or match by structure with 'qdqtool compare'",
            build.display_name,
            code="different-exports",
            node=name,
        )
    conflicts = find_output_conflicts(view, build, mapper)
    if len(conflicts) > _MAX_CONFLICTS * named:
        name, in_model, in_build = conflicts[0]
        raise BuildLogError(
            f"the build is of another model or input size: {name} has output {in_build}, but "
            f"{in_model} in {model.path or 'the model'}. Give the model of the build",
            build.display_name,
            code="different-models",
            node=name,
        )


def _note_missing_shapes(build: Build) -> list[Note]:
    if has_shapes(build):
        return []
    note = Note(
        "the build lists no shapes, so a build of another model with the same layer names is not "
        "detected",
        code="no-shapes",
    )
    return [note]


def check_not_empty(build: Build) -> None:
    """Reject a build that names neither layers nor nodes."""
    if _is_empty(build):
        raise BuildLogError(
            "contains no engine layers and no optimizer lines; build again with --verbose "
            "--profilingVerbosity=detailed",
            build.display_name,
            code="empty-build",
        )


def _is_empty(build: Build) -> bool:
    return not build.layers and not build.trace and not build.parse.nodes


def is_all_myelin(build: Build) -> bool:
    """Return whether a build has only Myelin blocks, which need not name their nodes.

    False for a build with pass lines or without layers.
    """
    return (
        bool(build.layers)
        and not build.trace
        and all(layer.type == "Myelin" for layer in build.layers)
    )


def compare_under_assumptions(
    model: Model, prediction: Prediction, build: Build, target: Target
) -> Verification:
    """Return the verification under the assumed values that fit the build best.

    A note for each assumption states which value the build shows or fits best, or that the build
    does not show the value.
    """
    best = compare_with_build(model, prediction, build)
    for assumption in prediction.assumptions:
        name, assumed = assumption.name, assumption.value
        results = {assumed: best}
        for value in assumption.alternatives:
            alternative = predict(model, target, assume={name: value})
            results[value] = compare_with_build(model, alternative, build)
        errors = {value: count_disagreements(result) for value, result in results.items()}
        value = min(errors, key=lambda value: errors[value])
        best = results[value]
        if len(set(errors.values())) == 1:
            best.notes.append(
                Note(
                    f"{name}: the build does not show whether {' or '.join(errors)} applies; the "
                    f"comparison assumes {assumed}",
                    code="not-shown-by-build",
                    name=name,
                    values=tuple(errors),
                    value=assumed,
                )
            )
            continue
        if value != assumed:
            assumptions = best.prediction.assumptions if best.prediction else []
            why = Note("shown by the build", code="shown-by-build")
            assumptions[:1] = [replace(a, why=why) for a in assumptions[:1]]
        fits = errors[value] == (0, 0)
        shown = f"shows {value}" if fits else f"fits {value} best, but not everywhere"
        best.notes.append(
            Note(
                f"{name}: the build {shown} (assumed for {target.name}: {assumed})",
                code="shown-by-build" if fits else "nearest-to-build",
                name=name,
                value=value,
                assumed=assumed,
                target=target.name,
            )
        )
    return best


def count_disagreements(verification: Verification) -> tuple[int, int]:
    """Return the number of mismatched convolutions, and the total of all disagreements.

    The total is the number of pass lines and layers that do not agree, plus all mismatches.
    """
    trace = verification.trace
    lines = max(trace.predicted or 0, trace.built or 0) - (trace.agree or 0) if trace.built else 0
    layers = (verification.layers.total or 0) - (verification.layers.agree or 0)
    convolutions = sum(m.kind == MismatchKind.CONVOLUTION for m in verification.mismatches)
    return convolutions, lines + layers + len(verification.mismatches)


def compare_with_build(
    model: Model,
    prediction: Prediction,
    build: Build,
    uncertain_convolutions: tuple[str, ...] = (),
    uncertain_events: tuple[Event, ...] = (),
) -> Verification:
    """Compare every part of a prediction with a build.

    Args:
        model: The model that was built.
        prediction: Prediction of the model.
        build: The build.
        uncertain_convolutions: Convolutions that depend on unknown scales and count as unknown.
        uncertain_events: Pass lines that depend on unknown scales and are not compared.
    """
    build = _add_listing_gap(model, build)
    mapper = NodeMapper(model, build.layers)
    complete = not build.has_gap(Section.PASSES)
    convolutions, mismatches = compare_convolutions(
        model, prediction, build, mapper, uncertain_convolutions
    )
    reported = {str(m.built["layer"]) for m in mismatches if m.built.get("layer")}
    layers = compare_layers(prediction, build, mapper, reported)
    trace = compare_trace(prediction, build, complete, uncertain_events)
    copies = compare_trace(prediction, build, complete, uncertain_events, MismatchKind.COPY)
    conversions = compare_conversions(prediction, build, complete)
    notes: list[Note] = []
    mismatches += find_inconsistent_tensors(model, build)[:MAX_MISMATCHES]
    parts = [trace.mismatches, copies.mismatches]
    # If scales are unknown, conversions and layer names are uncertain as well.
    if not uncertain_convolutions:
        parts[:0] = [conversions.mismatches, layers.mismatches]
    for part in parts:
        mismatches.extend(part[:MAX_MISMATCHES])
        if len(part) > MAX_MISMATCHES:
            count, kind = len(part) - MAX_MISMATCHES, part[0].kind
            word = "mismatch" if count == 1 else "mismatches"
            verb = "is" if count == 1 else "are"
            text = f"{count} more {word} of kind '{kind}' {verb} not listed"
            notes.append(Note(text, code="more-mismatches", count=count, kind=kind))
    if has_fp32_convolutions(build):
        notes.append(
            Note(
                "the float layers run in FP32, because the build had no --fp16. Build with --fp16 "
                "if these layers may run in FP16",
                code="no-fp16-flag",
            )
        )
    return Verification(
        build.facts,
        convolutions=convolutions,
        layers=layers.counts,
        trace=trace.counts,
        conversions=conversions.counts,
        mismatches=mismatches,
        prediction=prediction,
        notes=notes,
        copies=copies.counts,
    )


def _add_listing_gap(model: Model, build: Build) -> Build:
    """Return the build, or an incomplete copy with a gap if its listing lacks layers."""
    if build.bindings or build.parse.inputs or not build.complete:
        return build
    hole = find_missing_layer_gap(build, model.inputs)
    if hole is None:
        return build
    return replace(build, gaps=[*build.gaps, hole], complete=False)


def has_fp32_convolutions(build: Build) -> bool:
    """Return whether float convolutions run in FP32 because the builder had no 16-bit flag."""
    flags = build.precision_flags
    if not flags or flags & {"fp16", "best", "stronglyTyped", "bf16"}:
        return False
    convolutions = [layer for layer in build.layers if layer.is_convolution]
    tensors = [t for layer in convolutions for t in (*layer.inputs[:2], *layer.outputs[:1])]
    return {t.precision for t in tensors if t.precision.is_float} == {Precision.FP32}


def exit_code(
    result: Verification, allow_partial: bool = False, require_shapes: bool = False
) -> int:
    """Return the exit code of a verification.

    0: everything agrees. 1: mismatches. 2: no mismatches, but the build is incomplete or some
    convolutions are unknown; `allow_partial` turns this 2 into 0. With `require_shapes`, a build
    that lists no shapes also gives 2.
    """
    if result.mismatches:
        return 1
    if require_shapes and not result.has_shapes:
        return 2
    return 0 if allow_partial or result.complete else 2


# A local build, and a log without its model


def verify_with_builder(
    model: ModelSource | Model,
    builder: str | None = None,
    sm: str | None = None,
    target: str | Target | None = None,
) -> Verification:
    """Build a model with a local TensorRT, and compare the prediction with the build.

    Args:
        model: The Q/DQ model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        sm: Compute capability to build for (TensorRT-RTX), such as ``86`` or ``sm86``.
        target: TensorRT to predict for instead of the builder's own version.

    Raises:
        ModelError: The model cannot be read.
        BuilderError: The builder is unknown or missing, or the build did not end in time.
        QdqtoolError: The compute capability or the target is unknown.
    """
    loaded = load(model)
    name = loaded.path or "model in memory"
    if builder == "tensorrt-rtx":
        print_license_notice()
    capability = _parse_capability(sm)
    check_choice("builder", builder, BUILDERS, BuilderError)
    assert builder is not None
    capabilities = None if capability is None else [int(capability)]
    built = local_build.build_model(model, builder, sm=capabilities)
    if built.status == "timeout":
        raise BuilderError(
            f"the build did not end in time: {built.message}. Build the model separately, and "
            "give the log",
            name,
            code="timeout",
        )
    if builder != "tensorrt-rtx" and built.build is not None and built.status == "built":
        return verify(loaded, built.build, target=target)
    resolved = target_named(target or RTX)
    if capability is not None:
        resolved = resolved.with_capability(capability)
    return _compare_with_local_build(predict(loaded, resolved), built, name)


def _parse_capability(sm: str | None) -> str | None:
    if sm is None:
        return None
    digits = sm.lower().removeprefix("sm")
    if not digits.isdigit():
        raise QdqtoolError(
            f"'{sm}' is not a compute capability; give a number such as 86 or sm86",
            code="wrong-format",
            parameter="sm",
        )
    return digits


def _compare_with_local_build(
    prediction: Prediction, built: local_build.BuiltModel, name: str
) -> Verification:
    facts = BuildFacts(
        BuildSource(built.builder),
        tensorrt=built.version or None,
        complete=True,
        status=built.status,
        message=built.message,
    )
    is_built = built.status == "built"
    pairs = local_build.pair_convolutions(prediction, built.nodes) if is_built else []
    verification = verification_from_pairs(prediction, pairs, facts)
    if local_build.is_status_as_predicted(prediction, built) is False:
        predicted = build_status(prediction)
        actual = f"{built.status}: {built.message}" if built.message else built.status
        verification.mismatches.append(
            Mismatch(
                MismatchKind.BUILD,
                name,
                {"status": predicted},
                {"status": built.status},
                Difference.STATUS,
                (predicted, actual),
            )
        )
    elif not is_built:
        verification.notes.append(
            Note(
                "the prediction agrees with the build, which ended with the status "
                f"{built.status}: {built.message}",
                code="built-alike",
                status=built.status,
                message=built.message,
            )
        )
    return verification


def verify_from_log(
    *sources: str | os.PathLike[str] | Build, target: str | Target | None = None
) -> Verification:
    """Rebuild the graph from a log, and compare its prediction with the same log.

    Args:
        sources: The log, and further files of the same build.
        target: TensorRT to predict for instead of the build's own version.

    Raises:
        BuildLogError: The log cannot be read, is of TensorRT-RTX, or lacks a complete parse
            section with Q/DQ.
    """
    build = load_build(sources)
    reject_implicit_int8(build)
    proto, unknowns = graph_from_log(build)
    name = f"graph of {build.display_name if build.files else 'the log'}"
    resolved, notes = choose_target(build, target)
    if resolved.is_rtx:
        raise BuildLogError(
            f"{name}: a TensorRT-RTX log has no pass lines to compare with; give the model as well",
            code="no-pass-lines",
        )
    _check_complete_graph(build, proto, name)
    equal, different = (
        Model(copy_with_artificial_scales(proto, same), name) for same in (True, False)
    )
    if next(quantizers(equal), None) is None:
        raise BuildLogError(
            f"{name}: the parse section has no Q/DQ nodes, so there is nothing to predict; give a "
            "log of a model with Q/DQ",
            code="no-qdq",
        )
    first, second = predict(equal, resolved), predict(different, resolved, advice=False)
    differences = set(first.trace) ^ set(second.trace)
    events = tuple(sorted(differences, key=lambda e: (e.pass_name, e.kind, e.subject)))
    convolutions = _find_scale_dependent_convolutions(first, second)
    verification = compare_with_build(equal, first, build, convolutions, events)
    counts = sorted({p.conversions for p in (first, second) if p.conversions is not None})
    if len(counts) > 1:
        verification.conversions = replace(verification.conversions, predicted=None)
        few, many = counts
        verification.notes.append(
            Note(
                f"{few} to {many} conversions predicted, depending on the scales",
                code="conversions-between",
                few=few,
                many=many,
            )
        )
    verification.notes[:0] = [*notes, *unknowns]
    if events:
        verification.notes.append(
            Note(
                f"{format_count_were(len(events), 'pass line')} not compared, because such lines "
                "depend on which scales are equal",
                code="lines-left-out",
                count=len(events),
            )
        )
    return verification


def _check_complete_graph(build: Build, proto: onnx.ModelProto, name: str) -> None:
    """Reject a graph with missing nodes, because each missing node would count as a mismatch."""
    if not build.trace and not build.layers:
        return  # The log ends in its parse section, so nothing will be compared.
    gap = next((g for g in build.gaps if g.section == Section.PARSE), None)
    missing = _find_missing_tensor(proto.graph)
    if gap is not None or missing is not None:
        why = str(gap) if gap is not None else f"no node produces {missing}"
        raise BuildLogError(
            f"{name}: {why}, so the log has only a part of the network, which cannot be "
            "predicted; give the model as well",
            code="incomplete-graph",
            node=missing if missing is not None and gap is None else "",
        )


def _find_missing_tensor(graph: onnx.GraphProto) -> str | None:
    """Return the first tensor that a node reads and nothing defines; None if there is none."""
    produced = {tensor.name for tensor in (*graph.input, *graph.initializer)} | {""}
    produced.update(output for node in graph.node for output in node.output)
    inputs = (tensor for node in graph.node for tensor in node.input)
    return next((tensor for tensor in inputs if tensor not in produced), None)


def _map_outcomes(prediction: Prediction) -> dict[str, tuple[object, ...]]:
    return {
        c.name: (c.precision, list(c.inputs), c.output, set(c.fused))
        for c in prediction.convolutions
    }


def _find_scale_dependent_convolutions(first: Prediction, second: Prediction) -> tuple[str, ...]:
    outcomes, others = _map_outcomes(first), _map_outcomes(second)
    return tuple(name for name, outcome in outcomes.items() if others.get(name) != outcome)


def copy_with_artificial_scales(proto: onnx.ModelProto, equal: bool) -> onnx.ModelProto:
    """Return a copy whose Q scales are all 1/64 if `equal`, else all slightly different."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    model = Model(copy)
    names = dict.fromkeys(node.input(1) for node in quantizers(model))
    for position, name in enumerate(names):
        # The tensor belongs to the copy, so `proto` is not changed.
        tensor = model.constant_proto(name)
        if tensor is not None:
            scale = 2.0**-6 * (1.0 if equal else 1.0 + position * 1e-5)
            filled = np.full(tuple(tensor.dims), scale, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(filled, tensor.name))
    return copy
