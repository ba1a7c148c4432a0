"""Choice of the placement rules, by the options and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdqtool.errors import QdqtoolError
from qdqtool.findings import codes
from qdqtool.insertion.number_formats import FP8, find_number_format
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import (
    Placement,
    PlacementRules,
    QuantizedInput,
    WeightSite,
    compute_placement,
)
from qdqtool.insertion.rewrite import ActivationScale, insert_pairs
from qdqtool.insertion.scales import ScaleGroup, find_scale_groups
from qdqtool.ir.graph import EDITED, Model
from qdqtool.proto.slim import strip_large_weights
from qdqtool.reasons.convolutions import DepthwiseAdd, DepthwiseSilu, LargeKernel
from qdqtool.reasons.finding import Reason, Severity
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, strongly_typed
from qdqtool.util.notes import Note

OPTIONS = ("both", "skip")
"""Values of `residual_after_activation` to compare, for an Add after an activation.

If the ratings of both are equal, the first is used, as in the YOLOv8 of builds with TensorRT 8.4.
"""
Rating = tuple[int, int, int]
"""Number of INT8 convolutions, number of these that write INT8, negative number of conversions.

Greater is better.
"""


def choose_placement(
    model: Model, options: PlacementOptions, target: Target
) -> tuple[PlacementRules, Placement]:
    """Return the placement rules for options and target, and the placement of a model.

    Raises:
        QdqtoolError: See :func:`qdqtool.insertion.placement.compute_placement`.
    """
    rules = PlacementRules(
        options.head,
        options.residual,
        OPTIONS[0],
        options.exclude,
        options.include,
        options.exclude_op,
        not target.is_rtx,
        target.transposed_per_channel,
        attention=options.attention,
        max_head=target.fp8_head,
        product_per_channel=options.precision != "fp8" or target.has_fp8_product_channels,
        number_format=find_number_format(options.precision),
        tuned=options.tuned,
        failing=[f for f in (LargeKernel, DepthwiseAdd, DepthwiseSilu) if _is_warning(f, target)],
    )
    option, placement = choose_residual_inputs(model, rules, target, options.unify)
    rules = replace(rules, residual_after_activation=option)
    return rules, placement or compute_placement(model, rules)


def restrict_to_fp8(target: Target) -> Target:
    """Return the strongly typed variant of a target, restricted to GPUs that have FP8.

    NVIDIA advises strongly typed networks for FP8 (NVIDIA/TensorRT issue 3987). If no GPU is named,
    TensorRT-RTX builds for compute capability 8.9.

    Raises:
        QdqtoolError: The target has no FP8.
    """
    if not target.has_fp8:
        raise QdqtoolError(
            f"`precision='fp8'`: {target.name} has no FP8 for Q/DQ. Use TensorRT 10.3 or newer, or "
            "INT8",
            code="unsupported",
            parameter="precision",
        )
    return strongly_typed(target.for_fp8())


def warn_fp8_version(placement: Placement, target: Target) -> list[Note]:
    """Return a warning (in a list) if the target may not compute convolutions in FP8."""
    nodes = (consumer.node for entries in placement.inputs.values() for consumer in entries)
    if placement.number_format != FP8 or not any(node.op == "Conv" for node in nodes):
        return []
    version, capability = target.version_name, target.named_capability
    if not target.has_fp8_convolutions:
        place = f" on compute capability {capability}" if target.needs_hopper_for_fp8 else ""
        text = (
            f"TensorRT {version} has no FP8 convolutions{place}: they run in float, and each Q and "
            "DQ costs time. Use TensorRT 10.3 or newer, or INT8"
        )
    elif target.needs_hopper_for_fp8 and not capability:
        text = (
            f"TensorRT {version} has FP8 convolutions on Hopper (compute capability 9.0) only; "
            "on other GPUs they run in float. Use TensorRT 10.3 or newer, or set `gpu`"
        )
    else:
        return []
    return [Note(text, code="fp8-version", version=version)]


def _is_warning(form: type[Reason], target: Target) -> bool:
    code = codes.get(form.rules[0].code).scope_on(target.name)
    return code is not None and code.severity != Severity.INFO


def choose_residual_inputs(
    model: Model, rules: PlacementRules, target: Target, unify: bool
) -> tuple[str, Placement | None]:
    """Choose which inputs of residual Adds after an activation to quantize.

    In some builds, Conv, SiLU (in C2f) and an Add with a quantized skip input become one layer. In
    other builds, the Add is not fused. If both inputs are quantized, the Add is always an INT8
    layer of its own. If only the skip input is quantized, the Add costs nothing if it is fused, and
    otherwise it adds conversions. Each placement is therefore simulated under both assumptions, and
    the placement with the better worst case is chosen.

    TensorRT-RTX fuses the Add into the kernel after the convolution. This kernel reads a quantized
    skip input as INT8. For a ResNet-18, TensorRT-RTX 1.7.1 then builds 41 instead of 42 kernels,
    and the kernels read 13 % fewer bytes of activations. A second quantized input changes no
    kernel. In FP8, a quantized skip input changes no kernel either. The kernels of a ResNet-18 then
    read 4 % fewer bytes of activations, and the kernels of a YOLOv8n 1 % (compute capability 8.9).
    This does not justify the error of one more quantized tensor.

    Returns:
        ``both``, ``skip`` or ``none`` for `residual_after_activation` of
        :class:`~qdqtool.insertion.placement.PlacementRules`; and the placement with this choice, or
        None if no placement was computed.
    """
    if target.is_rtx:
        return "none" if rules.number_format == FP8 else "skip", None
    if rules.residual != "auto":
        return OPTIONS[0], None
    first = compute_placement(model, replace(rules, residual_after_activation=OPTIONS[0]))
    if all(len(positions) == 1 for positions in _residual_positions(first).values()):
        return OPTIONS[0], first  # no Add follows an activation, so all choices are the same
    best: Rating | None = None
    choice = OPTIONS[0], first
    for option in OPTIONS:
        placement = first
        if option != OPTIONS[0]:
            placement = compute_placement(model, replace(rules, residual_after_activation=option))
        try:
            groups = find_scale_groups(model, placement.inputs, unify)
            rating = _rate_worst_case(
                build_simulation_model(model, placement, groups), placement, target, best
            )
        except QdqtoolError:  # the model cannot be simulated
            return OPTIONS[0], first
        if rating is not None:
            best, choice = rating, (option, placement)
    return choice


def _rate_worst_case(
    model: Model, placement: Placement, target: Target, best: Rating | None
) -> Rating | None:
    """Return the lower of two ratings of a placement; None if it is not better than `best`.

    One rating assumes that TensorRT fuses a residual Add into the convolution and SiLU before it.
    The other rating assumes that it does not.
    """
    ratings: list[Rating] = []
    # One rating is enough: an Add with two dequantized inputs is never fused into a convolution.
    is_decided = all(len(positions) > 1 for positions in _residual_positions(placement).values())
    for fuses in [False] if is_decided else [False, True]:
        assumption = replace(target, residual_through_activation=fuses)
        ratings.append(_rate_prediction(simulate_without_alternatives(model, assumption)))
        if best is not None and ratings[-1] <= best:
            return None
    return min(ratings)


def _residual_positions(placement: Placement) -> dict[int, set[int]]:
    positions: dict[int, set[int]] = {}
    for inputs in placement.inputs.values():
        for consumer in inputs:
            if consumer.role == "residual":
                positions.setdefault(consumer.node.index, set()).add(consumer.position)
    return positions


def _rate_prediction(prediction: Prediction) -> Rating:
    summary = prediction.summary()
    return summary["int8"], summary["int8_to_int8"], -summary["conversions"]


def build_simulation_model(
    model: Model, placement: Placement, groups: Sequence[ScaleGroup]
) -> Model:
    """Return a Q/DQ model for simulation, without large weights and without real scales.

    The scale of an activation is the number of its scale group, starting at 1.
    """
    slim = Model(strip_large_weights(model.proto), model.path, EDITED, types=model)
    nodes = slim.nodes
    inputs = {
        tensor: [QuantizedInput(nodes[e.node.index], e.position, e.role) for e in entries]
        for tensor, entries in placement.inputs.items()
    }
    weights = [WeightSite(nodes[w.node.index], w.tensor, w.axis) for w in placement.weights]
    scales = {
        tensor: ActivationScale(number, "", None)
        for number, group in enumerate(groups, 1)
        for tensor in group.quantized
    }
    sketched = Placement(inputs, weights, number_format=placement.number_format)
    insert_pairs(slim, sketched, scales, "sketch")
    return slim
