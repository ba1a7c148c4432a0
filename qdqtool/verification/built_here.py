"""Builds a model on this machine and verifies it in one step, or verifies a log against the graph that it prints."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import onnx

from qdqtool.buildlog.agreement import BuildFacts, BuildSource, Mismatch, MismatchKind
from qdqtool.buildlog.complete import PARSE
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuilderError, BuildLogError, QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.qdq import quantizers
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS, Target, target_named
from qdqtool.types import Prediction
from qdqtool.verification.api import check_explicit, choose_target, compare
from qdqtool.verification.result import Verification


def verify_with_builder(
    model: str | os.PathLike[str], builder: str, sm: str | None = None, target: str | Target | None = None
) -> Verification:
    """Builds ``model`` with a TensorRT found here and compares the prediction with what came out.

    Args:
        model: Path of the Q/DQ model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        sm: Compute capability to build for (TensorRT-RTX), such as ``86`` or ``sm86``.
        target: Overrides the target that the builder's version chooses.

    Raises:
        BuilderError: The builder is not here, or the build ran out of time.
        ModelError: The model cannot be read.
    """
    from qdqtool.builders.child import print_once
    from qdqtool.rtx.predict import status_of
    from qdqtool.verification import api
    from qdqtool.verification.build_model import build_model
    from qdqtool.verification.lines import of_pairs
    from qdqtool.verification.pairs import compare, status_agrees

    index = load(model)
    if builder == "tensorrt-rtx":
        print_once()
    result = build_model(model, builder, sm=_capability(sm))
    if result.status == "timeout":
        raise BuilderError(f"{model}: the build did not end in time; {result.message}")
    if builder != "tensorrt-rtx" and result.build is not None and result.status == "built":
        return api.verify(index, result.build, target=target)
    prediction = predict(index, target_named(target) if target is not None else TARGETS["rtx1.7"])
    described = BuildFacts(
        BuildSource(builder), tensorrt=result.version or None, complete=True, status=result.status,
        message=result.message,
    )
    verification = of_pairs(prediction, compare(prediction, result) if result.status == "built" else [], described)
    if status_agrees(prediction, result) is False:
        said = status_of(prediction)
        why = f"predicted to be {said}, the compiler says {result.status}"
        if result.message:
            why += f": {result.message}"
        verification.mismatches.append(
            Mismatch(MismatchKind.BUILD, index.path or "model", {"status": said}, {"status": result.status}, why)
        )
    elif result.status != "built":
        verification.notes.append(f"predicted and built alike: {result.status}: {result.message}")
    return verification


def _capability(sm: str | None) -> list[int] | None:
    if sm is None:
        return None
    digits = sm.lower().removeprefix("sm")
    if not digits.isdigit():
        raise QdqtoolError(f"'{sm}' is not a compute capability; give it as 86 or sm86")
    return [int(digits)]


def verify_from_log(*sources: str | os.PathLike[str] | Build, target: str | Target | None = None) -> Verification:
    """Rebuilds the graph from a log, predicts it, and compares the prediction with the same log.

    Args:
        sources: The log, and further files of the same build.
        target: Overrides the target that the log's version chooses.

    Raises:
        BuildLogError: The log has no parse section, or the graph has no Q/DQ nodes.
    """
    given = [s for s in sources if isinstance(s, Build)]
    build = given[0] if given else read_build(*(s for s in sources if not isinstance(s, Build)))
    check_explicit(build)
    proto, unknowns = graph_from_log(build)
    name = f"graph of {', '.join(build.files) or 'the log'}"
    chosen, notes = choose_target(build, target)
    if chosen.is_rtx:
        raise BuildLogError(f"{name}: a TensorRT-RTX log has no pass lines to compare with; give the model as well")
    _check_whole(build, proto, name)
    equal, different = (Model(_with_scales(proto, same), name) for same in (True, False))
    if next(quantizers(equal), None) is None:
        raise BuildLogError(f"{name}: no Q/DQ nodes in the parse section, nothing to predict")
    first, second = predict(equal, chosen), predict(different, chosen, advice=False)
    unsure = _differing(first, second)
    events = tuple(sorted(set(first.trace) ^ set(second.trace), key=lambda e: (e.pass_name, e.kind, e.subject)))
    result = compare(equal, first, build, unsure, events)
    if first.conversions != second.conversions:
        result.conversions = replace(result.conversions, predicted=None)
        few, *_, many = sorted(p.conversions for p in (first, second) if p.conversions is not None)
        result.notes.append(f"between {few} and {many} conversions predicted, depending on scales")
    result.notes[:0] = [*notes, *unknowns]
    if events:
        result.notes.append(f"{len(events)} pass lines depend on scales being equal and were left out")
    return result


def _check_whole(build: Build, proto: onnx.ModelProto, name: str) -> None:
    """Refuses a graph with holes where later sections describe all of it: each hole would count as a mismatch."""
    if not build.trace and not build.layers:
        return  # the log ends in its parse section; nothing is compared
    torn = next((m for m in build.missing if m.startswith(PARSE)), "")
    known = {t.name for t in (*proto.graph.input, *proto.graph.initializer)} | {""}
    known.update(o for node in proto.graph.node for o in node.output)
    loose = next((i for node in proto.graph.node for i in node.input if i not in known), None)
    if torn or loose is not None:
        why = f"{torn} is missing" if torn else f"no node makes {loose}"
        raise BuildLogError(f"{name}: {why}, and a part of a network cannot be predicted; give the model as well")


def _differing(first: Prediction, second: Prediction) -> tuple[str, ...]:
    """Convolutions whose outcome depends on scales."""
    other = {c.name: (c.precision, tuple(c.inputs), c.output, tuple(sorted(c.fused))) for c in second.convolutions}
    return tuple(
        c.name
        for c in first.convolutions
        if other.get(c.name) != (c.precision, tuple(c.inputs), c.output, tuple(sorted(c.fused)))
    )


def _with_scales(proto: onnx.ModelProto, same: bool) -> onnx.ModelProto:
    """A copy whose scales are all 1/64, or all different."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    model = Model(copy)
    names = dict.fromkeys(node.input(1) for node in quantizers(model))
    for position, name in enumerate(names):
        tensor = model.constant_proto(name)
        if tensor is None:
            continue
        shape, value = tuple(tensor.dims), 2.0**-6 * (1.0 if same else 1.0 + position * 1e-5)
        filled = onnx.numpy_helper.from_array(np.full(shape, value, np.float32), tensor.name)
        if name in model.initializers:
            tensor.CopyFrom(filled)
            continue
        node = model.producers[name].proto
        for attribute in node.attribute:
            if attribute.name == "value":
                attribute.t.CopyFrom(filled)
    return copy
