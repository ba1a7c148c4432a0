"""The difference of the estimated times of two models, in parts that add up.

The nodes of a comparison are not all layers of an engine. Activations that are fused in only one of
the models, copies and Q/DQ layers make up the rest of the difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from qdqtool.comparison.result import Comparison, NodeSide, TimeChange

if TYPE_CHECKING:
    from qdqtool.timing.results import TimeEstimate


_LAYER_NUMBER = re.compile(r"\(Unnamed Layer\* \d+\)")  # differs between models
_MAX_LARGEST = 3
_MIN_SHARE = 0.1  # of the difference of all other layers


def split_time_change(
    comparison: Comparison, a: TimeEstimate | None, b: TimeEstimate | None
) -> TimeChange | None:
    """Return the time of the second model minus that of the first, in parts.

    Args:
        comparison: Comparison of the models, with their times and nodes.
        a: Estimate of the first model; None if it was not estimated.
        b: Estimate of the second model; None if it was not estimated.

    Returns:
        The parts. None if the time of a model or the times of its layers are unknown.
    """
    ms = comparison.a.ms, comparison.b.ms
    if a is None or b is None or ms[0] is None or ms[1] is None:
        return None
    if all(node.change_ms is None for node in comparison.nodes):
        return None
    changed = [node for node in comparison.changed if node.change_ms is not None]
    first, second = [n.a for n in changed if n.a], [n.b for n in changed if n.b]
    total_ms = ms[1] - ms[0]
    nodes_ms = sum(node.change_ms or 0.0 for node in changed)
    shared_ms = _sum_repeated_ms(first) - _sum_repeated_ms(second)
    layouts_ms = b.layouts_ms - a.layouts_ms
    other_layers_ms = total_ms - nodes_ms - shared_ms - layouts_ms
    changes = _subtract_times(_sum_other_layers(b, second), _sum_other_layers(a, first))
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:_MAX_LARGEST]
    return TimeChange(
        total_ms,
        nodes_ms,
        shared_ms,
        layouts_ms,
        other_layers_ms,
        (_count_other_layers(a, first), _count_other_layers(b, second)),
        {name: ms for name, ms in largest if abs(ms) >= _MIN_SHARE * abs(other_layers_ms)},
    )


def _subtract_times(b: Mapping[str, float], a: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of B minus those of A by name.

    Layers that have only another name in B are left out: they take the same time in both models.
    """
    changes = {name: b.get(name, 0.0) - a.get(name, 0.0) for name in {**b, **a}}
    by_size: dict[float, list[str]] = {}
    for name, ms in changes.items():
        by_size.setdefault(round(abs(ms), 7), []).append(name)
    for names in by_size.values():
        gone = [name for name in names if changes[name] < 0]
        new = [name for name in names if changes[name] > 0]
        for pair in zip(gone, new, strict=False):
            for name in pair:
                del changes[name]
    return changes


def _sum_other_layers(time: TimeEstimate, nodes: Collection[NodeSide]) -> dict[str, float]:
    """Return the milliseconds of a model's other layers by name."""
    extras = [] if time.workload is None else time.workload.extras
    layouts = {extra.name for extra in extras if extra.layout_change is not None}
    listed = layouts.union(_times_by_layer(nodes))
    sums: dict[str, float] = {}
    for kernel in time.kernels:
        if kernel.name not in listed:
            name = _LAYER_NUMBER.sub("(Unnamed Layer)", kernel.name)
            sums[name] = sums.get(name, 0.0) + kernel.ms
    return sums


def _count_other_layers(time: TimeEstimate, nodes: Collection[NodeSide]) -> int:
    """Return the number of layers that take time, without the nodes' layers and layout changes."""
    return len(time.kernels) - time.layouts - len(_times_by_layer(nodes))


def _times_by_layer(nodes: Collection[NodeSide]) -> dict[str, float]:
    return {node.layer or node.name: node.ms for node in nodes if node.ms}


def _sum_repeated_ms(nodes: Collection[NodeSide]) -> float:
    """Return the milliseconds that a sum over nodes counts more than once."""
    return sum(node.ms or 0.0 for node in nodes) - sum(_times_by_layer(nodes).values())
