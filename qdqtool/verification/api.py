"""``qdqtool.verify``: a prediction compared with a real build."""

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
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.summary import (
    IMPLICIT_INT8,
    LATEST_SPELLING,
    find_listing_hole,
    is_implicit_int8,
)
from qdqtool.buildlog.types import Build, Section
from qdqtool.errors import BuilderError, BuildLogError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.qdq import quantizers
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.rtx.predict import status_of
from qdqtool.trt.targets import (
    DEFAULT_TARGET,
    RTX,
    TARGETS,
    Target,
    target_named,
    target_of_version,
)
from qdqtool.types import Event, Precision, Prediction
from qdqtool.util.checks import check_choice
from qdqtool.util.file_types import is_model_name
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.records import replaced
from qdqtool.util.said import said
from qdqtool.verification import build_model as built
from qdqtool.verification.convolutions import (
    Mapper,
    common_names,
    compare_convolutions,
    contradicted_names,
    trt_name,
)
from qdqtool.verification.lines import (
    MOST,
    Verification,
    compare_conversions,
    compare_layers,
    compare_trace,
    inconsistent_tensors,
    of_pairs,
    verify_rtx_build,
)

Source: TypeAlias = str | os.PathLike[str]
FEW_WRONG = 0.1  # names that may stand for another node
FEW = 0.2  # fewer of a model's convolutions named by a log than this: the log is of another model


def verify(
    model: ModelSource | Model,
    *builds: Source | Build | Sequence[Source],
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
            Estimated times are compared with measured ones.
        clock: SM clock in MHz under load.

    Returns:
        Agreement in counts, and every mismatch. Unknown is not agreement.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build cannot be read, or is of another model.
        QdqtoolError: The target or the GPU is unknown.
    """
    with record_inputs() as inputs:
        build = build_of(builds)
        result, _ = verified(load(model), build, target, GpuOptions(gpu, clock))
    result.read = inputs
    return result


def verified(
    index: Model, build: Build, target: str | Target | None, gpu: GpuOptions
) -> tuple[Verification, Target]:
    """Verify a model that was read; return the target that was predicted for as well."""
    check_explicit(build, index)
    chosen, notes = target_of(build, target, gpu)
    check_same_model(index, build)
    prediction = predict(index, chosen)
    if chosen.is_rtx:
        result = verify_rtx_build(index, prediction, build)
    else:
        result = compare_assuming(index, prediction, build, chosen)
        assert result.prediction is not None
        from qdqtool.verification.times import compare_times, not_compared

        result.times = compare_times(index, result.prediction, build, chosen, gpu)
        if result.times is None and gpu.gpu is None:
            notes += not_compared(build)
    result.notes[:0] = [*build.notes, *notes]
    return result, chosen


def build_of(builds: tuple[Source | Build | Sequence[Source], ...]) -> Build:
    """The build that files are of, or the one that was read already."""
    if len(builds) == 1 and isinstance(builds[0], Build):
        return builds[0]
    files: list[Source] = []
    for build in builds:
        if isinstance(build, (str, os.PathLike)):
            files.append(build)
        elif not isinstance(build, Build):
            files += build
    if not files:
        raise BuildLogError(
            "no build given: name a trtexec log or a layer JSON",
            code="missing-argument",
            parameter="builds",
        )
    model = next((os.fspath(f) for f in files if is_model_name(f)), None)
    if model is not None:
        raise BuildLogError(
            "an ONNX model, not a build: give the log or the layer JSON that TensorRT wrote "
            "when it built the first model; 'qdqtool compare' takes two models",
            model,
            code="wrong-format",
            parameter="builds",
        )
    return read_build(*files)


def target_of(
    build: Build, target: str | Target | None, gpu: GpuOptions
) -> tuple[Target, list[Note]]:
    """As :func:`choose_target`, for the GPUs that the build says it is for, the one that was named or the log's.

    Raises:
        QdqtoolError: The GPU that was named is not known, or none that the target builds for or that the build is for.
    """
    chosen, notes = choose_target(build, target)
    if chosen.is_rtx or gpu.gpu is not None:
        from qdqtool.timing import gpus
        from qdqtool.timing.built_engine import find_build_gpu, parse_device

        stated = parse_device("", build.gpu).cc
        named = None if gpu.gpu is None else gpus.choose_gpu(gpu.gpu)
        if chosen.is_rtx and build.targets:
            chosen = replaced(chosen, capabilities=build.targets)
            if named is not None and named.cc not in chosen.capability_names:
                raise QdqtoolError(
                    said(
                        "{`gpu`} {name}: has compute capability {cc}, and the build is for "
                        "{told:joined , }; name the GPU that it ran on",
                        name=named.name,
                        cc=named.cc,
                        told=chosen.capability_names,
                    ),
                    code="different-gpus",
                    parameter="gpu",
                )
        elif named is not None:
            chosen = chosen.with_capability(named.cc, named.name, seen=named.cc == stated)
        elif stated is not None:
            chosen = chosen.with_capability(stated, seen=True)
        elif (ran_on := find_build_gpu(build)) is not None:
            chosen = chosen.with_capability(ran_on.cc, seen=True)
    return chosen, notes


def choose_target(build: Build, target: str | Target | None) -> tuple[Target, list[Note]]:
    """The target to predict for, and what to report about the choice."""
    if target is not None:
        return target_named(target), []
    if build.is_rtx:
        return RTX, []
    version = build.tensorrt or build.version_hint
    if version is None:
        return TARGETS[DEFAULT_TARGET], [Remark.NO_VERSION(target=DEFAULT_TARGET)]
    if build.tensorrt is None and version == LATEST_SPELLING:
        return TARGETS[DEFAULT_TARGET], [
            Remark.AMBIGUOUS_VERSION(version=version, target=DEFAULT_TARGET)
        ]
    chosen = target_of_version(version)
    return chosen, [] if build.tensorrt is not None else [
        Remark.VERSION_OF_SPELLING(version=version, target=chosen.name)
    ]


def check_explicit(build: Build, model: Model | None = None) -> None:
    """Refuses a build whose INT8 comes from a calibration table, and that names none of the model's Qs."""
    if not is_implicit_int8(build):
        return
    named = {part for layer in build.layers for part in layer.parse_name().bases} | {
        e.subject for e in build.trace
    }
    if model is None or not any(trt_name(q) in named for q in quantizers(model)):
        raise BuildLogError(
            f"{IMPLICIT_INT8}, so that there is nothing to verify; build a model with Q/DQ ('qdqtool insert')",
            build.display_name,
            code="implicit-int8",
        )


def check_same_model(model: Model, build: Build) -> None:
    """Refuses a build that names few of the model's convolutions, or other nodes by their names."""
    check_told(build)
    found, wanted = common_names(model, build)
    if wanted and found < FEW * wanted and not all_in_myelin(build):
        why = f"; it is a build of another model than {model.path or 'the one given'}"
        if found and not build.layers and not build.trace:
            why = " and ends in its parse section: cut off too early, or a build of another model"
        raise BuildLogError(
            f"names {found} of the model's {wanted} convolutions{why}",
            build.display_name,
            code="different-models",
        )
    wrong = contradicted_names(View(model), build, Mapper(model, build.layers))
    if len(wrong) > FEW_WRONG * found:
        name, mine, theirs = wrong[0]
        raise BuildLogError(
            f"{len(wrong)} names stand for other nodes than in {model.path or 'the model given'} "
            f"({name}: {theirs}, in the model {mine}): a build of another export or network; 'qdqtool compare' matches "
            "by structure",
            build.display_name,
            code="different-exports",
            node=name,
        )


def check_told(build: Build) -> None:
    """Refuses a build that names nothing."""
    if not build.layers and not build.trace and not build.parse.nodes:
        raise BuildLogError(
            "holds no engine layers and no optimizer lines; "
            "build again with --verbose --profilingVerbosity=detailed",
            build.display_name,
            code="empty-build",
        )


def all_in_myelin(build: Build) -> bool:
    """Whether the listing opens up nothing of Myelin, so that no node is named."""
    return (
        bool(build.layers)
        and all(layer.type == "Myelin" for layer in build.layers)
        and not build.trace
    )


def compare_assuming(
    model: Model, prediction: Prediction, build: Build, target: Target
) -> Verification:
    """Compares under each assumption, keeps the one that the build contradicts least, and says which that is."""
    best = compare(model, prediction, build)
    for assumption in prediction.assumptions:
        others = {
            value: compare(model, predict(model, target, assume={assumption.name: value}), build)
            for value in assumption.alternatives
        }
        wrong = {assumption.value: count_wrong(best)} | {
            value: count_wrong(result) for value, result in others.items()
        }
        shown = min(wrong, key=lambda value: wrong[value])
        if len(set(wrong.values())) == 1:
            best.notes.append(
                Remark.NOT_SHOWN_BY_BUILD(
                    name=assumption.name, values=tuple(wrong), value=assumption.value
                )
            )
            continue
        fits = wrong[shown] == (0, 0)
        remark = Remark.SHOWN_AS_ASSUMED if fits else Remark.NEAREST_AS_ASSUMED
        if shown != assumption.value:
            remark = Remark.SHOWN_OTHERWISE if fits else Remark.NEAREST_OTHERWISE
            best = others[shown]
            assumed = best.prediction.assumptions if best.prediction else []
            assumed[:1] = [replace(one, why=Remark.SHOWN_BY_BUILD()) for one in assumed[:1]]
        best.notes.append(
            remark(name=assumption.name, value=shown, assumed=assumption.value, target=target.name)
        )
    return best


def count_wrong(result: Verification) -> tuple[int, int]:
    """Count the wrong convolutions, and the wrong lines, layers and mismatches together."""
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

    ``unsure_convolutions`` are unknown whatever the build says; pass lines that are ``unsure_events`` are left out.
    """
    if not build.bindings and not build.parse.inputs and build.complete:
        if (hole := find_listing_hole(build, model.inputs)) is not None:
            build = replace(build, gaps=[*build.gaps, hole], complete=False)
    mapper = Mapper(model, build.layers)
    ended = not build.has_gap(Section.PASSES)
    convolutions, mismatches = compare_convolutions(
        model, prediction, build, mapper, unsure_convolutions
    )
    reported = {str(m.built["layer"]) for m in mismatches if m.built.get("layer")}
    layers = compare_layers(prediction, build, mapper, reported)
    trace = compare_trace(prediction, build, ended, unsure_events)
    copies = compare_trace(prediction, build, ended, unsure_events, MismatchKind.COPY)
    conversions = compare_conversions(prediction, build, ended)
    notes: list[Note] = []
    mismatches += inconsistent_tensors(model, build)[:MOST]
    found = [trace.mismatches, copies.mismatches]
    if not unsure_convolutions:  # unknown scales decide over conversions and layer names as well
        found[:0] = [conversions.mismatches, layers.mismatches]
    for listed in found:
        mismatches.extend(listed[:MOST])
        if len(listed) > MOST:
            notes.append(Remark.MORE_MISMATCHES(count=len(listed) - MOST, kind=listed[0].kind))
    notes.extend(flag_notes(build))
    return Verification(
        build.facts,
        convolutions,
        layers.counts,
        trace.counts,
        conversions.counts,
        mismatches,
        prediction,
        notes,
        copies.counts,
    )


def flag_notes(build: Build) -> list[Note]:
    """What the command line, not the placement, costs."""
    flags = build.precision_flags
    floats = {
        t.precision
        for layer in build.layers
        if layer.is_convolution
        for t in (*layer.inputs[:2], *layer.outputs[:1])
        if t.precision.is_float
    }
    if (
        floats == {Precision.FP32}
        and flags
        and not flags & {"fp16", "best", "stronglyTyped", "bf16"}
    ):
        return [Remark.NO_FP16_FLAG()]
    return []


def exit_code(result: Verification, allow_partial: bool = False) -> int:
    """0 everything agrees, 1 a mismatch, 2 nothing contradicts but the build is incomplete or leaves something open."""
    if result.mismatches:
        return 1
    if allow_partial or (result.complete and not result.convolutions.unknown):
        return 0
    return 2


# A build made here, and a log without its model ----------------------------------------------------------------------


def verify_with_builder(
    model: str | os.PathLike[str],
    builder: str | None = None,
    sm: str | None = None,
    target: str | Target | None = None,
) -> Verification:
    """Build a model with a TensorRT of this machine and compare the prediction with the build.

    Args:
        model: The Q/DQ model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        sm: Compute capability to build for (TensorRT-RTX), such as ``86`` or ``sm86``.
        target: TensorRT to predict for instead of the builder's own version.
    """
    index = load(model)
    if builder == "tensorrt-rtx":
        print_license_notice()
    digits = None if sm is None else sm.lower().removeprefix("sm")
    if digits is not None and not digits.isdigit():
        raise QdqtoolError(
            f"'{sm}' is not a compute capability; give it as 86 or sm86",
            code="wrong-format",
            parameter="sm",
        )
    check_choice("builder", builder, BUILDERS, BuilderError)
    assert builder is not None
    result = built.build_model(model, builder, sm=None if digits is None else [int(digits)])
    if result.status == "timeout":
        raise BuilderError(
            f"the build did not end in time; {result.message}", str(model), code="timeout"
        )
    if builder != "tensorrt-rtx" and result.build is not None and result.status == "built":
        return verify(index, result.build, target=target)
    on_target = target_named(target) if target is not None else RTX
    prediction = predict(index, on_target if digits is None else on_target.with_capability(digits))
    described = BuildFacts(
        BuildSource(result.builder),
        tensorrt=result.version or None,
        complete=True,
        status=result.status,
        message=result.message,
    )
    pairs = built.compare(prediction, result) if result.status == "built" else []
    verification = of_pairs(prediction, pairs, described)
    if built.status_agrees(prediction, result) is False:
        ours = status_of(prediction)
        says = f"{result.status}: {result.message}" if result.message else result.status
        verification.mismatches.append(
            Mismatch(
                MismatchKind.BUILD,
                index.path or "model",
                {"status": ours},
                {"status": result.status},
                Difference.STATUS,
                (ours, says),
            )
        )
    elif result.status != "built":
        verification.notes.append(Remark.BUILT_ALIKE(status=result.status, message=result.message))
    return verification


def verify_from_log(
    *sources: str | os.PathLike[str] | Build, target: str | Target | None = None
) -> Verification:
    """Rebuild the graph from a log, predict it, and compare the prediction with the same log.

    Args:
        sources: The log, and further files of the same build.
        target: TensorRT to predict for instead of the build's own version.
    """
    given = [s for s in sources if isinstance(s, Build)]
    build = given[0] if given else read_build(*(s for s in sources if not isinstance(s, Build)))
    check_explicit(build)
    proto, unknowns = graph_from_log(build)
    name = f"graph of {build.display_name if build.files else 'the log'}"
    chosen, notes = choose_target(build, target)
    if chosen.is_rtx:
        raise BuildLogError(
            f"{name}: a TensorRT-RTX log has no pass lines to compare with; give the model as well",
            code="no-pass-lines",
        )
    _check_whole(build, proto, name)
    equal, different = (Model(copy_with_scales(proto, same), name) for same in (True, False))
    if next(quantizers(equal), None) is None:
        raise BuildLogError(
            f"{name}: no Q/DQ nodes in the parse section, nothing to predict", code="no-qdq"
        )
    first, second = predict(equal, chosen), predict(different, chosen, advice=False)
    unsure = _differing(first, second)
    events = tuple(
        sorted(set(first.trace) ^ set(second.trace), key=lambda e: (e.pass_name, e.kind, e.subject))
    )
    result = compare(equal, first, build, unsure, events)
    if first.conversions != second.conversions:
        result.conversions = replace(result.conversions, predicted=None)
        few, *_, many = sorted(p.conversions for p in (first, second) if p.conversions is not None)
        result.notes.append(Remark.CONVERSIONS_BETWEEN(few=few, many=many))
    result.notes[:0] = [*notes, *unknowns]
    if events:
        result.notes.append(Remark.LINES_LEFT_OUT(count=len(events)))
    return result


def _check_whole(build: Build, proto: onnx.ModelProto, name: str) -> None:
    """Refuses a graph with holes where later sections describe all of it: each hole would count as a mismatch."""
    if not build.trace and not build.layers:
        return  # the log ends in its parse section; nothing is compared
    torn = next((g for g in build.gaps if g.section == Section.PARSE), None)
    known = {t.name for t in (*proto.graph.input, *proto.graph.initializer)} | {""}
    known.update(o for node in proto.graph.node for o in node.output)
    loose = next((i for node in proto.graph.node for i in node.input if i not in known), None)
    if torn is not None or loose is not None:
        why = f"{torn} is missing" if torn is not None else f"no node makes {loose}"
        raise BuildLogError(
            f"{name}: {why}, and a part of a network cannot be predicted; give the model as well",
            code="incomplete-graph",
            node=loose if loose is not None and torn is None else "",
        )


def _differing(first: Prediction, second: Prediction) -> tuple[str, ...]:
    """Convolutions whose outcome depends on scales."""
    mine, other = (
        {c.name: (c.precision, list(c.inputs), c.output, sorted(c.fused)) for c in p.convolutions}
        for p in (first, second)
    )
    return tuple(name for name, outcome in mine.items() if other.get(name) != outcome)


def copy_with_scales(proto: onnx.ModelProto, equal: bool) -> onnx.ModelProto:
    """Return a copy whose scales are all 1/64, or all different."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    model = Model(copy)
    names = dict.fromkeys(node.input(1) for node in quantizers(model))
    for position, name in enumerate(names):
        tensor = model.constant_proto(name)  # the copy's own, of an initializer or a Constant
        if tensor is not None:
            value = 2.0**-6 * (1.0 if equal else 1.0 + position * 1e-5)
            filled = np.full(tuple(tensor.dims), value, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(filled, tensor.name))
    return copy
