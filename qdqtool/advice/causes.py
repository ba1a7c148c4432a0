"""Why an INT8 convolution writes float: the readers of its result, and the numbers that differ between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qdqtool import qdq
from qdqtool.advice.report import names, number, scalar, size_text
from qdqtool.graph import Node
from qdqtool.onnxgraph.flow import (
    AVERAGES,
    CUTS,
    JOINS,
    POOLS,
    Boundary,
    Use,
    boundary,
    is_sum,
    layer_of,
    no_pooling,
    root,
    uses,
)
from qdqtool.onnxgraph.view import WEIGHTED, View


@dataclass(slots=True)
class Cause:
    """Why a tensor is written as float although a quantizer wants it.

    Attributes:
        code: Finding code.
        node: The node at the boundary that costs: the Add, the Concat, the pooling ...
        message: The chain of causes, one or two sentences.
        fix: What to change here; empty for the code's general advice.
        values: Elements of the tensor.
        convolutions: Other convolutions that it concerns.
    """

    code: str
    node: str
    message: str
    fix: str = ""
    values: int | None = None
    convolutions: list[str] = field(default_factory=list)


def of_convolution(view: View, conv: Node) -> Cause:
    """Why the layer of an INT8 convolution writes float."""
    edge = boundary(view, conv)
    if edge.stopped is not None:
        return Cause(
            "BN-UNFOLDED", edge.stopped.name,
            f"{conv.name} writes float because {edge.stopped.name} behind it has parameters that are not plain "
            "constants and stays a layer of its own.",
            values=view.values(edge.tensor),
        )
    found = uses(view, edge.tensor)
    takes_add = edge.activation is None or view.add_behind_activation
    if takes_add and len(found) == 1 and found[0].kind == "add" and not found[0].path:
        assert found[0].node is not None
        return _fused_add(view, conv, edge, found[0].node)
    return of_tensor(view, edge.tensor, conv, edge, found)


def _fused_add(view: View, conv: Node, edge: Boundary, add: Node) -> Cause:
    """The convolution's layer takes the Add; its other input and its readers decide."""
    size = _size(view, edge.tensor)
    other = next((t for t in add.inputs if t != edge.tensor), "")
    residual = qdq.source_of_dq(view.model, other)
    if residual is None:
        return Cause(
            "SKIP-FLOAT", add.name,
            f"{conv.name} writes float{size} because {add.name} is fused into it and reads {_origin(view, other)} as "
            "float.",
            _skip_fix(view, other, add), view.values(edge.tensor),
        )
    behind = uses(view, _after_add(view, add))
    if behind and all(u.kind == "q" for u in behind):
        cause = of_tensor(view, _after_add(view, add), conv, edge, behind)
        if cause.code == "CONVERSION" and edge.activation is not None:
            return Cause("ADD-ACT", add.name, f"{conv.name} writes float{size}: {edge.activation.name} stands between "
                         f"it and {add.name}.", values=cause.values)
        return cause
    readers = _readers_text(behind)
    return Cause(
        "ADD-OUT-FLOAT", add.name,
        f"{conv.name} reads and writes float{size} at {add.name}: its residual is quantized "
        f"({residual[0].name}), but {readers}.",
        f"Quantize {add.name}'s result, or remove {residual[0].name}'s pair in front of the Add.",
        view.values(edge.tensor),
    )


def _after_add(view: View, add: Node) -> str:
    readers = view.model.readers(add.output)
    if len(readers) == 1 and readers[0].op == "Relu" and not view.model.is_output(add.output):
        return readers[0].output
    return add.output


def _skip_fix(view: View, tensor: str, add: Node) -> str:
    q = quantizer_of(view, tensor)
    if q is not None:
        fix = (
            f"Let {add.name} read '{tensor}' through {q.name} and its DequantizeLinear (scale "
            f"{number(scalar(view.params(q)))}): no new scale is needed."
        )
    else:
        fix = f"Put Q/DQ on '{tensor}' in front of {add.name}; its scale needs calibration."
    others = [u for u in uses(view, _after_add(view, add)) if u.kind in ("op", "output")]
    if others:  # a quantized skip alone would then only add a DQ that stays (resnet18-a100-qat-residual, last block)
        fix += f" It helps only if {add.name}'s result is quantized as well: {_readers_text(others)}."
    return fix


def quantizer_of(view: View, tensor: str) -> Node | None:
    """A per-tensor Q that already reads a tensor, directly or behind the MaxPool or other commuting node above it."""
    for use in uses(view, tensor):
        if use.kind == "q" and use.node is not None and not use.path and not view.params(use.node).per_channel:
            return use.node
    return None


def of_tensor(
    view: View, tensor: str, conv: Node | None, edge: Boundary | None = None, found: list[Use] | None = None
) -> Cause:
    """Why the layer that makes a tensor writes float, judged by the tensor's readers.

    Args:
        view: The model.
        tensor: What the layer writes.
        conv: The layer's convolution, None for another layer.
        edge: The convolution's boundary, if at hand.
        found: The tensor's uses, if at hand.
    """
    found = uses(view, tensor) if found is None else found
    quantized = [u for u in found if u.kind == "q"]
    floats = [u for u in found if u.kind != "q"]
    who = conv.name if conv is not None else f"'{tensor}'"
    size = _size(view, tensor)
    writes = f"{who} writes float{size}" if conv is not None else f"{who} is float{size}"
    if quantized and floats:
        return _mixed(view, tensor, writes, quantized, floats)
    if quantized:
        return _only_quantized(view, tensor, writes, quantized)
    return _only_float(view, tensor, writes, edge, floats)


def _mixed(view: View, tensor: str, writes: str, quantized: list[Use], floats: list[Use]) -> Cause:
    q = quantized[0].node
    assert q is not None
    add = next((u.node for u in floats if u.kind == "add" and u.node is not None), None)
    shared = quantized[0].path[0] if quantized[0].path else None
    values = view.values(tensor)
    if shared is not None and all(u.path and u.path[0] is shared for u in (*quantized, *floats)) and (
        shared.op in POOLS
    ):
        fix = _skip_fix(view, shared.output, add) if add is not None else ""
        return Cause(
            "POOL-MIXED", shared.name,
            f"{writes} because {shared.name} ({shared.op}) is read by {names(_reader_names(quantized))} in INT8 and "
            f"by {names(_reader_names(floats))} as float: no Q can move up past it.",
            fix, values,
        )
    if add is not None:
        return Cause(
            "SKIP-FLOAT", add.name,
            f"{writes} because {add.name} reads it as float (its residual input has no Q/DQ), beside "
            f"{names(_reader_names(quantized))}.",
            _skip_fix(view, tensor, add), values,
        )
    return Cause(
        "OUT-MIXED", floats[0].node.name if floats[0].node is not None else tensor,
        f"{writes} because {names(_reader_names(floats))} {'reads' if len(floats) == 1 else 'read'} it as float, "
        f"beside {names(_reader_names(quantized))}.",
        f"Quantize the float reader too with scale {number(scalar(view.params(q)))}, if it can run in INT8.", values,
    )


def _only_quantized(view: View, tensor: str, writes: str, quantized: list[Use]) -> Cause:
    scales = [scalar(view.params(u.node)) for u in quantized if u.node is not None]
    values = view.values(tensor)
    known = {s for s in scales if s is not None}
    if len(known) > 1:
        for code, ops in (("CONCAT-SCALE", JOINS), ("SPLIT-SCALE", CUTS), ("POOL-SCALE", None)):
            crossed = next((n for u in quantized for n in u.path if ops is None or n.op in ops), None)
            if crossed is not None:
                return scale_cause(view, code, crossed, tensor, writes, quantized)
        return scale_cause(view, "SIBLING-SCALE", None, tensor, writes, quantized)
    if None in scales and len(quantized) > 1:
        return Cause(
            "SIBLING-SCALE", tensor,
            f"{writes}: {names(_reader_names(quantized))} quantize it, and their scales are not at hand to compare.",
            values=values,
        )
    q = quantized[0].node
    assert q is not None
    return Cause(
        "CONVERSION", q.name, f"{writes}: no pass takes {q.name} (scale {number(scales[0])}) into it.", values=values
    )


def differing_scales(view: View, tensor: str) -> Cause | None:
    """What the scales of a tensor's quantizers cost, once its float readers are quantized too; None if they agree."""
    quantized = [u for u in uses(view, tensor) if u.kind == "q"]
    if len({scalar(view.params(u.node)) for u in quantized if u.node is not None} - {None}) < 2:
        return None
    return _only_quantized(view, tensor, f"'{tensor}' is converted once for each", quantized)


def scale_cause(
    view: View, code: str, crossed: Node | None, tensor: str, writes: str, quantized: list[Use]
) -> Cause:
    """A cause that consists of scales that differ, with the numbers."""
    unified = max((s for u in quantized if u.node is not None
                   if (s := scalar(view.params(u.node))) is not None), default=None)
    parts: list[float | None] = []
    after: list[float | None] = []
    if code == "CONCAT-SCALE" and crossed is not None:
        parts = [part_scale(view, t) for t in crossed.inputs if t]
        after = [scalar(view.params(u.node)) for u in uses(view, crossed.output) if u.kind == "q" and u.node]
        told = ", ".join(number(s) if s is not None else "none" for s in parts)
        behind = ", ".join(dict.fromkeys(number(s) for s in after)) or "none"
        message = f"{crossed.name} takes scales {told} and is quantized with {behind} behind it; {writes}"
        unified = max([s for s in (*parts, *after) if s is not None], default=unified)
    else:
        told = ", ".join(f"{number(scalar(view.params(u.node)))} ({u.node.name})" for u in quantized if u.node)
        where = f"{crossed.name} ({crossed.op}) stands between scales " if crossed is not None else "scales "
        message = f"{where}{told} on '{tensor}'; {writes}" if crossed is None else f"{where}{told}; {writes}"
    own = [scalar(view.params(u.node)) for u in quantized if u.node is not None]
    smallest = min((s for s in (*own, *parts, *after) if s is not None and s > 0), default=None)
    cost = ""
    if unified and smallest:
        cost = f" (the smallest range loses {np.log2(unified / smallest):.1f} bits)"
    return Cause(
        code, crossed.name if crossed is not None else tensor, message + ".",
        f"Give them one scale, {number(unified)}{cost}: qdqtool fix --only {code}." if unified else "",
        view.values(tensor),
    )


def part_scale(view: View, tensor: str) -> float | None:
    """The scale that a Concat's input already has: of its DQ, or of another Q on the tensor above it."""
    above = root(view, tensor)
    found = qdq.source_of_dq(view.model, above.tensor)
    if found is not None:
        return scalar(view.params(found[1] or found[0]))
    for use in uses(view, above.tensor):
        if use.kind == "q" and use.node is not None and not any(n.op in JOINS for n in use.path):
            return scalar(view.params(use.node))
    return None


def _only_float(view: View, tensor: str, writes: str, edge: Boundary | None, floats: list[Use]) -> Cause:
    values = view.values(tensor)
    add = next((u.node for u in floats if u.kind == "add"), None)
    if add is not None and edge is not None and edge.activation is not None and len(floats) == 1:
        other = next((t for t in add.inputs if t != tensor), "")
        residual = qdq.source_of_dq(view.model, other)
        told = "is quantized" if residual is not None else "is not quantized either"
        return Cause(
            "ADD-ACT", add.name,
            f"{writes}: {edge.activation.name} stands between it and {add.name}, whose other input "
            f"{_origin(view, other)} {told}.",
            values=values,
        )
    average = next((u.node for u in floats if u.node is not None and u.node.op in AVERAGES), None)
    if average is not None and len(floats) == 1 and no_pooling(view, average):
        return reduction(view, average, f"{writes} because ")
    if average is not None and len(floats) == 1:
        behind = [u for u in uses(view, average.output) if u.kind == "q"]
        told = f"only {behind[0].node.name} behind it is there" if behind and behind[0].node else "nothing quantizes it"
        return Cause(
            "POOL-FLOAT", average.name, f"{writes} because {average.name} runs in float: {told}.", values=values
        )
    told = _readers_text(floats)
    expected = all(_float_by_design(view, u) for u in floats)
    if edge is not None and edge.silu and not expected:
        return Cause("SILU-NO-Q-AFTER", edge.activation.name if edge.activation else tensor,
                     f"{writes} behind SiLU: {told}.", values=values)
    outputs_only = all(u.kind == "output" for u in floats)
    why = " (left float)" if floats and expected and not outputs_only else ""
    maker = layer_of(view, tensor)
    return Cause("OUT-FLOAT", maker.name if maker is not None else tensor, f"{writes}: {told}{why}.", values=values)


def reduction(view: View, mean: Node, lead: str = "") -> Cause:
    """A ReduceMean that TensorRT does not turn into a pooling, and so runs in float whatever is around it."""
    return Cause(
        "POOL-FLOAT", mean.name,
        f"{lead}{mean.name} (ReduceMean) runs in float: TensorRT makes a pooling only of one over height and width "
        "with keepdims=1.",
        "Use GlobalAveragePool and Flatten instead (the same result), with Q/DQ in front and behind; or remove the "
        "pair in front of it.",
        view.values(mean.input(0)),
    )


def _float_by_design(view: View, use: Use) -> bool:
    """A network output, or a reader with no quantized convolution behind it."""
    if use.node is None:
        return True
    if use.node.op in WEIGHTED:
        return qdq.source_of_dq(view.model, use.node.input(0)) is None and view.weights(use.node).dq is None
    return use.node.index not in view.feeds_weighted


def _readers_text(found: list[Use]) -> str:
    if not found:
        return "nothing reads it"
    if all(u.kind == "output" for u in found):
        return "it is the network's output"
    floats = [u for u in found if u.kind != "q"]
    if not floats:
        return f"{names(_reader_names(found))} quantizes it"
    plural = len(set(_reader_names(floats))) > 1
    return f"{names(_reader_names(floats))} {'read' if plural else 'reads'} it as float"


def _reader_names(found: list[Use]) -> list[str]:
    result = []
    for use in found:
        if use.node is None:
            result.append("the network's output")
        elif use.kind == "q":
            result.append(use.node.name)
        else:
            result.append(f"{use.node.name} ({use.node.op})" if use.node.op not in use.node.name else use.node.name)
    return result


def _origin(view: View, tensor: str) -> str:
    """Where a tensor comes from, in words."""
    above = root(view, tensor)
    conv = layer_of(view, above.tensor)
    if conv is not None:
        return f"the result of {conv.name}"
    if above.maker is None:
        return f"the network's input '{above.tensor}'"
    told = above.maker.name if above.maker.op in above.maker.name else f"{above.maker.name} ({above.maker.op})"
    return f"the result of {told}" if is_sum(view, above.maker) or above.path else f"'{tensor}' of {told}"


def _size(view: View, tensor: str) -> str:
    text = size_text(view.shape(tensor))
    return f" ({text})" if text else ""
