"""``qdqtool.verify``: a prediction compared with a real build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from qdqtool.base.parameters import typed
from qdqtool.buildlog.agreement import Mismatch, MismatchKind
from qdqtool.buildlog.complete import AS_TODAY, IMPLICIT, implicit_int8, listing_hole
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from qdqtool.io.files import watched
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource, load
from qdqtool.model.qdq import quantizers
from qdqtool.model.view import View
from qdqtool.prediction import predict
from qdqtool.trt.targets import DEFAULT_TARGET, TARGETS, Target, target_named, target_of_version
from qdqtool.types import Event, Precision, Prediction
from qdqtool.verification.convolutions import compare_convolutions
from qdqtool.verification.lines import (
    MOST,
    compare_conversions,
    compare_copies,
    compare_layers,
    compare_trace,
    inconsistent_tensors,
)
from qdqtool.verification.mapping import Mapper, common_names, contradicted_names, trt_name
from qdqtool.verification.result import Verification

BuildSource = str | os.PathLike[str]
FEW_WRONG = 0.1  # names that may stand for another node
FEW = 0.2  # fewer of a model's convolutions named by a log than this: the log is of another model


@typed
@watched
def verify(
    model: ModelSource | Model, *builds: BuildSource | Build | Sequence[BuildSource],
    target: str | Target | None = None, gpu: str | None = None, clock: float | None = None,
) -> Verification:
    """Predicts for the build's own TensorRT version and compares the prediction with the build.

    Args:
        model: The Q/DQ model that was built.
        builds: A trtexec or Python-API log, a layer JSON, a profile, or several files of the same build, one by one
            or as a list; ``-`` is standard input.
        target: Overrides the target that the build's version chooses.
        gpu: Where it ran, for comparing times, if the build does not say.
        clock: SM clock in MHz, if the build does not say.

    Returns:
        Agreement in counts and every mismatch; what the build does not say is unknown, never agreement.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build cannot be read, or is of another model.
    """
    build = build_of(builds)
    index = load(model)
    check_explicit(build, index)
    chosen, notes = choose_target(build, target)
    check_same_model(index, build)
    prediction = predict(index, chosen)
    if chosen.is_rtx:
        from qdqtool.verification.lines import verify_rtx_build

        result = verify_rtx_build(index, prediction, build)
    else:
        result = compare_assuming(index, prediction, build, chosen)
        assert result.prediction is not None
        prediction = result.prediction
        from qdqtool.verification.times import compare_times, not_compared

        result.times = compare_times(index, prediction, build, chosen, gpu, clock)
        if result.times is None and gpu is None:
            notes += not_compared(build)
    result.notes[:0] = [*build.notes, *notes]
    return result


def build_of(builds: tuple[BuildSource | Build | Sequence[BuildSource], ...]) -> Build:
    """The build that files are of, or the one that was read already.

    Raises:
        BuildLogError: None is given, or one is an ONNX model.
    """
    if len(builds) == 1 and isinstance(builds[0], Build):
        return builds[0]
    files: list[BuildSource] = []
    for build in builds:
        if isinstance(build, (str, os.PathLike)):
            files.append(build)
        elif not isinstance(build, Build):
            files += build
    if not files:
        raise BuildLogError("no build given: name a trtexec log or a layer JSON")
    model = next((os.fspath(f) for f in files if os.fspath(f).lower().endswith((".onnx", ".onnx.gz"))), None)
    if model is not None:
        raise BuildLogError(f"{model}: an ONNX model, not a build: give the log or the layer JSON that TensorRT wrote "
                            "when it built the first model; 'qdqtool compare' takes two models")
    return read_build(*files)


def choose_target(build: Build, target: str | Target | None) -> tuple[Target, list[str]]:
    """The target to predict for, and what to report about the choice."""
    if target is not None:
        return target_named(target), []
    if build.is_rtx:
        return TARGETS["rtx1.7"], []
    version = build.tensorrt or build.version_hint
    if version is None:
        return TARGETS[DEFAULT_TARGET], [f"the build does not state its version; predicted for {DEFAULT_TARGET}"]
    chosen = target_of_version(version)
    notes = []
    if build.tensorrt is None and version == AS_TODAY:
        chosen = TARGETS[DEFAULT_TARGET]
        notes.append(f"the build does not state its version, and its spelling is that of {version} and of 10: "
                     f"predicted for {chosen.name} (`target` decides)")
    elif build.tensorrt is None:
        notes.append(f"the build does not state its version; its spelling is that of {version}, taken as {chosen.name}")
    return chosen, notes


def check_explicit(build: Build, model: Model | None = None) -> None:
    """Refuses a build whose INT8 comes from a calibration table: it says nothing about Q/DQ.

    Raises:
        BuildLogError: It is one, and names none of the model's Qs.
    """
    if not implicit_int8(build):
        return
    named = {part for layer in build.layers for part in layer.fused().bases} | {e.subject for e in build.trace}
    if model is None or not any(trt_name(q) in named for q in quantizers(model)):
        raise BuildLogError(f"{', '.join(build.files) or 'build'}: {IMPLICIT}, so that there is nothing to verify; "
                            "build a model with Q/DQ ('qdqtool insert')")


def check_same_model(model: Model, build: Build) -> None:
    """Refuses a build of another model.

    Raises:
        BuildLogError: The build names few of the model's convolutions.
    """
    check_told(build)
    found, wanted = common_names(model, build)
    if wanted and found < FEW * wanted and not all_in_myelin(build):
        if found and not build.layers and not build.trace:
            raise BuildLogError(
                f"{', '.join(build.files) or 'build'}: names {found} of the model's {wanted} convolutions and ends in "
                "its parse section: cut off too early, or a build of another model"
            )
        raise BuildLogError(
            f"{', '.join(build.files) or 'build'}: names {found} of the model's {wanted} convolutions; "
            f"it is a build of another model than {model.path or 'the one given'}"
        )
    wrong = contradicted_names(View(model), build)
    if len(wrong) > FEW_WRONG * found:
        name, mine, theirs = wrong[0]
        raise BuildLogError(
            f"{', '.join(build.files) or 'build'}: {len(wrong)} names stand for other nodes than in "
            f"{model.path or 'the model given'} ({name}: {theirs}, in the model {mine}): a build of another export or "
            "network; 'qdqtool compare' matches by structure"
        )


def check_told(build: Build) -> None:
    """Refuses a build that names nothing.

    Raises:
        BuildLogError: It has no layers, no optimizer lines and no parse section.
    """
    if not build.layers and not build.trace and not build.parse.nodes:
        raise BuildLogError(
            f"{', '.join(build.files) or 'build'}: holds no engine layers and no optimizer lines; "
            "build again with --verbose --profilingVerbosity=detailed"
        )


def all_in_myelin(build: Build) -> bool:
    """Whether the listing opens up nothing of Myelin, so that no node is named."""
    return bool(build.layers) and all(layer.type == "Myelin" for layer in build.layers) and not build.trace


def compare_assuming(model: Model, prediction: Prediction, build: Build, target: Target) -> Verification:
    """Compares under each assumption, keeps the one that the build contradicts least, and says which that is."""
    best = compare(model, prediction, build)
    for assumption in prediction.assumptions:
        others = {
            value: compare(model, predict(model, target, assume={assumption.name: value}), build)
            for value in assumption.alternatives
        }
        wrong = {assumption.value: _wrong(best)} | {value: _wrong(result) for value, result in others.items()}
        shown = min(wrong, key=lambda value: wrong[value])
        if len(set(wrong.values())) == 1:
            best.notes.append(f"{assumption.name}: the build does not show which of {', '.join(wrong)} it is; compared "
                              f"with {assumption.value}")
            continue
        fits = "" if wrong[shown] == (0, 0) else ", the nearest, though it does not fit everywhere"
        if shown != assumption.value:
            best = others[shown]
            assumed = best.prediction.assumptions[0] if best.prediction and best.prediction.assumptions else None
            if best.prediction is not None and assumed is not None:
                best.prediction.assumptions[0] = replace(assumed, why="shown by the build")
            best.notes.append(
                f"{assumption.name}: the build shows {shown}{fits}; {assumption.value} is what {target.name} assumes"
            )
        else:
            best.notes.append(f"{assumption.name}: the build shows {shown}{fits}, as is assumed for {target.name}")
    return best


def _wrong(result: Verification) -> tuple[int, int]:
    """How much of a comparison is wrong: convolutions first, then anything."""
    trace = result.trace
    lines = max(trace.predicted or 0, trace.built or 0) - (trace.agree or 0) if trace.built else 0
    layers = (result.layers.total or 0) - (result.layers.agree or 0)
    convolutions = sum(m.kind == MismatchKind.CONVOLUTION for m in result.mismatches)
    return convolutions, lines + layers + len(result.mismatches)


def compare(
    model: Model,
    prediction: Prediction,
    build: Build,
    unsure_convolutions: tuple[str, ...] = (),
    unsure_events: tuple[Event, ...] = (),
) -> Verification:
    """Compares a prediction with a build, part by part.

    Args:
        model: The model predicted.
        prediction: Its prediction.
        build: The build.
        unsure_convolutions: Convolutions that are unknown whatever the build says.
        unsure_events: Pass lines that are left out.
    """
    if not build.bindings and not build.parse.inputs and build.complete:
        hole = listing_hole(build, model.inputs)
        if hole:
            build = replace(build, missing=[*build.missing, hole], complete=False)
    mapper = Mapper(model, build.layers)
    ended = not any(m.startswith("optimizer passes") for m in build.missing)
    convolutions = compare_convolutions(model, prediction, build, mapper, unsure_convolutions)
    layers = compare_layers(prediction, build, mapper, _layers_of(convolutions.mismatches))
    trace = compare_trace(prediction, build, ended, unsure_events)
    copies = compare_copies(prediction, build, ended, unsure_events)
    conversions = compare_conversions(prediction, build, ended)
    notes: list[str] = []
    mismatches: list[Mismatch] = [*convolutions.mismatches, *inconsistent_tensors(model, build)[:MOST]]
    found = [trace.mismatches, copies.mismatches]
    if not unsure_convolutions:  # unknown scales decide over conversions and layer names as well
        found[:0] = [conversions.mismatches, layers.mismatches]
    for listed in found:
        mismatches.extend(listed[:MOST])
        if len(listed) > MOST:
            notes.append(f"{len(listed) - MOST} more mismatches of kind '{listed[0].kind}'")
    notes.extend(flag_notes(build))
    return Verification(
        build=build.facts,
        convolutions=convolutions.counts,
        layers=layers.counts,
        trace=trace.counts,
        conversions=conversions.counts,
        copies=copies.counts,
        mismatches=mismatches,
        prediction=prediction,
        notes=notes,
    )


def _layers_of(mismatches: list[Mismatch]) -> set[str]:
    return {str(m.built["layer"]) for m in mismatches if m.built.get("layer")}


def flag_notes(build: Build) -> list[str]:
    """What the command line, not the placement, costs."""
    flags = build.precision_flags
    floats = {
        t.precision
        for layer in build.layers
        if layer.is_convolution
        for t in (*layer.inputs[:2], *layer.outputs[:1])
        if t.precision.is_float
    }
    if floats == {Precision.FP32} and flags and not flags & {"fp16", "best", "stronglyTyped", "bf16"}:
        return ["the float remainder runs in FP32 because --fp16 was not given: a matter of flags, not of placement"]
    return []


def exit_code(result: Verification, allow_partial: bool = False) -> int:
    """0 everything agrees, 1 a mismatch, 2 nothing contradicts but the build is incomplete or leaves something open."""
    if result.mismatches:
        return 1
    if allow_partial or (result.complete and not result.convolutions.unknown):
        return 0
    return 2
