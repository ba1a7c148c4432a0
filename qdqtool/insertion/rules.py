"""The rules of a placement: residual Adds behind Conv and activation (C2f's SiLU) by the worse of two outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdqtool.errors import QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.coded import MADE
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import Placement, PlacementRules, QuantizedInput, WeightSite, place
from qdqtool.insertion.rewrite import ActivationScale, insert_pairs
from qdqtool.insertion.scales import ScaleGroup, find_scale_groups
from qdqtool.ir.graph import EDITED, Model
from qdqtool.proto.slim import without_large_weights
from qdqtool.trt.faults import DepthwiseAdd, DepthwiseSilu, LargeKernel
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction, Severity
from qdqtool.util.records import replaced

OPTIONS = (
    "both",
    "skip",
)  # the first is taken where both are worth the same: seen with a YOLOv8 on TensorRT 8.4
Rating = tuple[int, int, int]


def choose_placement(
    model: Model, placing: PlacementOptions, target: Target
) -> tuple[PlacementRules, Placement]:
    """The rules for a prepared model, and what they place; errors are those of :func:`place`."""
    rules, placement = choose_rules(model, placing, target)
    return rules, placement or place(model, rules)


def choose_rules(
    model: Model, placing: PlacementOptions, target: Target
) -> tuple[PlacementRules, Placement | None]:
    """The rules that the user's choices and the target's abilities make for a prepared model; and what they place,
    where that was looked for to find them."""
    rules = PlacementRules(
        placing.head,
        placing.residual,
        OPTIONS[0],
        placing.exclude,
        placing.include,
        placing.exclude_op,
        not target.is_rtx,
        target.transposed_per_channel,
        attention=placing.attention,
        failing=[
            form
            for form in (LargeKernel, DepthwiseAdd, DepthwiseSilu)
            if (held := codes.get(MADE[form][0].code).on(target.name)) is not None
            and held.severity != Severity.INFO
        ],
    )
    option, placement = choose_residual_inputs(model, rules, target, placing.unify)
    return replace(rules, residual_after_activation=option), placement


def choose_residual_inputs(
    model: Model, rules: PlacementRules, target: Target, unify: bool
) -> tuple[str, Placement | None]:
    """The residual inputs to quantize behind an activation: that option of which the worse outcome is the better one.

    Whether Conv, SiLU and an Add with a quantized skip become one layer is reported both ways (fused, apart), and for
    small maps as the builder's choice by timing. With both inputs quantized the Add is an INT8 layer of its own, INT8
    in and out, whichever holds; with the skip alone quantized it is nothing at all where the three fuse, and leaves
    conversions where they do not. So each placement is simulated under both, the INT8 convolutions, those of them with
    INT8 output and the conversions are counted, and the placement with the better worst case is taken. TensorRT-RTX
    writes float from every convolution and fuses pointwise work anyway: a Q/DQ there only costs accuracy.

    Returns:
        ``both``, ``skip`` or ``none``: ``residual_after_activation`` of :class:`Rules`; and its placement, where that
        was made to find it.
    """
    if target.is_rtx:
        return "none", None
    if rules.residual != "auto":
        return OPTIONS[0], None
    first = place(model, replace(rules, residual_after_activation=OPTIONS[0]))
    if all(len(positions) == 1 for positions in _residual_positions(first).values()):  # no such Add
        return OPTIONS[0], first
    best, reached = (OPTIONS[0], first), None
    placements = [
        first,
        *(place(model, replace(rules, residual_after_activation=o)) for o in OPTIONS[1:]),
    ]
    for option, placement in zip(OPTIONS, placements, strict=True):
        try:
            slim = sketch(model, placement, find_scale_groups(model, placement.inputs, unify))
            worst = _worst(slim, placement, target, reached)
        except QdqtoolError:  # a graph that cannot be simulated is placed for as the evidence says
            return OPTIONS[0], first
        if worst is not None:
            best, reached = (option, placement), worst
    return best


def _worst(
    slim: Model, placement: Placement, target: Target, reached: Rating | None
) -> Rating | None:
    """What a placement is worth in its worse outcome; None as soon as that is no better than what is reached."""
    found: list[Rating] = []
    # Where every Add that is touched reads both inputs dequantized, no convolution can take it.
    all_read = all(len(positions) > 1 for positions in _residual_positions(placement).values())
    for fused in [False] if all_read else [False, True]:
        found.append(
            _worth(
                simulate_without_alternatives(
                    slim, replaced(target, residual_through_activation=fused)
                )
            )
        )
        if reached is not None and found[-1] <= reached:
            return None
    return min(found)


def _residual_positions(placement: Placement) -> dict[int, set[int]]:
    """Of each residual Add, by index, the inputs that it reads dequantized."""
    read: dict[int, set[int]] = {}
    for found in placement.inputs.values():
        for reader in found:
            if reader.role == "residual":
                read.setdefault(reader.node.index, set()).add(reader.position)
    return read


def _worth(prediction: Prediction) -> Rating:
    """INT8 convolutions, those with INT8 output, and conversions (fewer are better); greater is better."""
    summary = prediction.summary()
    return summary["int8"], summary["int8_to_int8"], -summary["conversions"]


def sketch(model: Model, placement: Placement, groups: Sequence[ScaleGroup]) -> Model:
    """A Q/DQ model for simulation alone: no large weights, and a group's number from 1 for the scale of its tensors."""
    slim = Model(without_large_weights(model.proto), model.path, EDITED, types=model)
    nodes = slim.nodes
    readers = {
        t: [QuantizedInput(nodes[r.node.index], r.position, r.role) for r in rs]
        for t, rs in placement.inputs.items()
    }
    weights = [WeightSite(nodes[w.node.index], w.tensor, w.axis) for w in placement.weights]
    scales = {
        tensor: ActivationScale(number, "", None)
        for number, group in enumerate(groups, 1)
        for tensor in group.quantized
    }
    insert_pairs(slim, Placement(readers, weights), scales, "sketch")
    return slim
