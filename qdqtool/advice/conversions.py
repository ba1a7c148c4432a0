"""Why each Q or DQ that stays at run time stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from qdqtool import qdq
from qdqtool.advice import causes
from qdqtool.advice.causes import Cause
from qdqtool.advice.report import Report, names, number, scalar
from qdqtool.graph import Node
from qdqtool.onnxgraph.flow import AVERAGES, CUTS, JOINS, Root, is_sum, layer_of, no_pooling, root, uses
from qdqtool.onnxgraph.view import WEIGHTED, View
from qdqtool.types import ConvOutcome

_CLONE = re.compile(r"(?:_clone_\d+)+$")
_CLONE_PART = re.compile(r"_clone_(\d+)$")


def explain(
    view: View, report: Report, conversions: list[str], outcome: Callable[[Node], ConvOutcome | None],
    made_of: Mapping[str, str],
) -> None:
    """Adds one finding for each conversion, and one for what causes it.

    Args:
        view: The model.
        report: Where the findings go.
        conversions: Names of the Q and DQ that stay; a copy in front of a Concat ends with ``_clone_<input>``.
        outcome: What the simulation says of a convolution.
        made_of: The node behind a layer, for nodes without a name or with one that others have too.
    """
    nodes = {n.name: n for n in view.quantizers}
    for name in dict.fromkeys(conversions):
        last = name.rpartition(" + ")[2]  # "<DQ> + <Q>": INT8 to INT8 in one layer
        base = next((n for n in (name, last) if n in nodes), _CLONE.sub("", last))
        node = nodes.get(base) or nodes.get(made_of.get(name, ""))
        if node is None:
            report.add("CONVERSION", name, f"{name} stays as a layer of its own.")
        elif qdq.is_q(node):
            match = _CLONE_PART.search(last) if last != base and name != base else None
            _quantize(view, report, name, node, int(match[1]) if match else None, outcome)
        else:
            _dequantize(view, report, name, node)


def _quantize(
    view: View, report: Report, name: str, q: Node, part: int | None,
    outcome: Callable[[Node], ConvOutcome | None],
) -> None:
    above = root(view, q.input(0), part)
    values = view.values(_converted(view, q, part))
    scale = number(scalar(view.params(q)))
    readers = _convolutions_behind(view, q)
    if above.maker is None and above.tensor in view.model.inputs:
        report.add(
            "INPUT-CONVERSION", name, f"{name} converts the network's input '{above.tensor}' to INT8 (scale {scale}).",
            convolutions=readers, values=values,
        )
        return
    cause = _cause(view, q, above, outcome)
    if cause is not None and cause.code != "CONVERSION":
        report.add(cause.code, cause.node, cause.message, cause.fix, cause.convolutions, cause.values)
        why = f"see {cause.code} at {cause.node}"
        scales = causes.differing_scales(view, above.tensor)
        if scales is not None and scales.code != cause.code:
            report.add(scales.code, scales.node, scales.message, scales.fix, cause.convolutions, scales.values)
            why += f", and {scales.code} at {scales.node}"
    elif above.maker is not None and (inner := _inner_pair(view, report, above.maker)):
        why = inner
    elif above.maker is not None and (known := _known_at(report, above.maker)):
        why = known
    elif above.maker is not None:
        maker = above.maker
        joined = " joins what is in front of it, and" if maker.op in JOINS else ""
        why = f"{maker.name} ({maker.op}){joined} runs in float"
    else:
        why = "nothing in front of it can take it"
    report.add("CONVERSION", name, f"{name} (scale {scale}) stays: {why}.", convolutions=readers, values=values)


def _inner_pair(view: View, report: Report, node: Node) -> str:
    """``see SILU-INNER-Q at ...`` where a node reads a pair that stands in front of an activation."""
    for tensor in node.inputs:
        found = qdq.source_of_dq(view.model, tensor)
        if found is not None and found[1] is not None:
            told = _told_inner(report, found[1])
            if told:
                return told
    return ""


def _known_at(report: Report, node: Node) -> str:
    return next((f"see {code} at {node.name}" for code in ("SKIP-FLOAT", "ADD-ACT", "ADD-OUT-FLOAT", "POOL-FLOAT")
                 if report.has(code, node.name)), "")


def _told_inner(report: Report, q: Node) -> str:
    return next(
        (f"see {code} at {q.name}" for code in ("SILU-INNER-Q", "ACT-INNER-Q") if report.has(code, q.name)), ""
    )


def _converted(view: View, q: Node, part: int | None) -> str:
    """The tensor that a Q converts; for its copy in front of a Concat, that input of the Concat."""
    maker = view.model.producer(q.input(0))
    if part is not None and maker is not None and maker.op in JOINS and part < len(maker.inputs):
        return str(maker.inputs[part])
    return q.input(0)


def _cause(view: View, q: Node, above: Root, outcome: Callable[[Node], ConvOutcome | None]) -> Cause | None:
    maker = above.maker
    if maker is not None and qdq.is_dq(maker):
        return _requantized(view, q, maker, above)
    conv = layer_of(view, above.tensor)
    if conv is not None:
        found = outcome(conv)
        if found is not None and not found.is_int8:
            return Cause("CONVERSION", q.name, "")  # the convolution in front is float: its own finding says why
        cause = causes.of_tensor(view, above.tensor, conv)
        cause.convolutions.append(conv.name)
        return cause
    if maker is not None and is_sum(view, maker):
        return _behind_sum(view, maker, above.tensor)
    if maker is not None and maker.op == "Relu":
        add = view.model.producer(maker.input(0))
        if add is not None and is_sum(view, add):
            return _behind_sum(view, add, above.tensor)
    if maker is not None and maker.op in AVERAGES:
        if no_pooling(view, maker):
            return causes.reduction(view, maker)
        if qdq.source_of_dq(view.model, maker.input(0)) is None:
            return Cause(
                "POOL-FLOAT", maker.name,
                f"{maker.name} runs in float: {q.name} is behind it, no DequantizeLinear in front.",
                values=view.values(maker.input(0)),
            )
    if any(n.op in (*JOINS, *CUTS) for n in above.path):
        cause = causes.of_tensor(view, above.tensor, None)
        return cause if cause.code.endswith("-SCALE") else None
    return None


def _behind_sum(view: View, add: Node, tensor: str) -> Cause | None:
    """The Q behind a residual Add stays: its residual is float, or its readers disagree."""
    for operand in add.inputs:
        conv = layer_of(view, operand)
        if conv is None:
            continue
        cause = causes.of_convolution(view, conv)
        if cause.node == add.name and cause.code == "SKIP-FLOAT":
            cause.convolutions.append(conv.name)
            return cause
    cause = causes.of_tensor(view, tensor, None)
    return cause if cause.code != "CONVERSION" else None


def _requantized(view: View, q: Node, dq: Node, above: Root) -> Cause:
    source = view.model.producer(dq.input(0))
    first = source if qdq.is_q(source) and source is not None else dq
    before, after = number(scalar(view.params(first))), number(scalar(view.params(q)))
    crossed = next((n for n in above.path if n.op in JOINS), None)
    code = "CONCAT-SCALE" if crossed is not None else "DOUBLE-QDQ"
    if crossed is None and above.path:
        crossed = next((n for n in above.path if n.op in CUTS), above.path[0])
        code = "SPLIT-SCALE" if crossed.op in CUTS else "POOL-SCALE"
    if code == "CONCAT-SCALE" and crossed is not None:
        quantized = [u for u in uses(view, above.tensor) if u.kind == "q"]
        return causes.scale_cause(view, code, crossed, above.tensor, f"{q.name} requantizes", quantized)
    where = f"{crossed.name} ({crossed.op}) stands between scales" if crossed is not None else "scales"
    return Cause(
        code, crossed.name if crossed is not None else q.name,
        f"{where} {before} ({first.name}) and {after} ({q.name}): INT8 is converted to INT8.",
        values=view.values(above.tensor),
    )


def _dequantize(view: View, report: Report, name: str, dq: Node) -> None:
    source = view.model.producer(dq.input(0))
    tensor = dq.output
    values = view.values(tensor)
    scale = number(scalar(view.params(dq)))
    add = next((n for n in view.model.readers(tensor) if is_sum(view, n)), None)
    if add is not None:
        for operand in add.inputs:
            conv = layer_of(view, operand)
            cause = causes.of_convolution(view, conv) if conv is not None and operand != tensor else None
            if cause is not None and cause.node == add.name and conv is not None:
                report.add(cause.code, cause.node, cause.message, cause.fix, [conv.name], cause.values)
                report.add("CONVERSION", name, f"{name} (scale {scale}) stays: see {cause.code} at {add.name}.",
                           convolutions=[conv.name], values=values)
                return
    average = next((u.node for u in uses(view, tensor) if u.node is not None and u.node.op in AVERAGES), None)
    if average is not None and no_pooling(view, average):
        cause = causes.reduction(view, average)
        report.add(cause.code, cause.node, cause.message, cause.fix, values=cause.values)
    elif average is not None:
        report.add(
            "POOL-FLOAT", average.name,
            f"{average.name} runs in float: {name} is in front of it, no QuantizeLinear behind.",
            values=view.values(tensor),
        )
    floats = [u for u in uses(view, tensor) if u.kind != "q"]
    who = names(u.node.name if u.node is not None else "the network's output" for u in floats) or "its reader"
    inner = _told_inner(report, source) if source is not None else ""
    why = inner or f"{who} cannot take it"
    report.add("CONVERSION", name, f"{name} (scale {scale}) stays: {why}.", values=values)


def _convolutions_behind(view: View, q: Node) -> list[str]:
    """Convolutions that read a Q through its DQs."""
    found: list[str] = []
    for dq in view.model.readers(q.output):
        if qdq.is_dq(dq):
            found.extend(u.node.name for u in uses(view, dq.output) if u.node is not None and u.node.op in WEIGHTED)
    return found
