"""Verifying without a model: the graph is rebuilt from the log's own parse section.

A log never prints a scale. The graph is therefore predicted twice, once with all scales equal and once with all
different: what both say is known, what they differ in depends on scales and counts as unknown, never as agreement.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import onnx

from qdqtool.buildlog.complete import PARSE
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from qdqtool.model.graph import Model
from qdqtool.model.qdq import quantizers
from qdqtool.prediction import predict
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction
from qdqtool.verification.api import check_explicit, choose_target, compare
from qdqtool.verification.result import Verification


def verify_from_log(*sources: str | os.PathLike[str] | Build, target: str | Target | None = None) -> Verification:
    """Rebuilds the graph from a log, predicts it, and holds the prediction against the same log.

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
