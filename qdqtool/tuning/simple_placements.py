"""Placements that need no search: float heads, and float convolutions with the largest errors."""

import functools
from collections.abc import Sequence

from qdqtool.insertion import losses
from qdqtool.tuning.planner import Configuration, Planner
from qdqtool.tuning.sites import CONVOLUTION, HEAD, INT8, LAST_CONVOLUTIONS, TuningSite

_FLOAT_COUNTS = (1, 2, 4, 8, 16)  # numbers of float convolutions


def list_head_floats(
    start: Configuration, sites: Sequence[TuningSite]
) -> list[tuple[str, Configuration]]:
    """Return placements with the last convolutions in float, and with the whole head in float.

    Args:
        start: Configuration to which the float choices are added.
        sites: Sites of the network.
    """
    heads = [s for s in sites if s.kind == HEAD and s.default == INT8]
    nodes = frozenset(name for site in heads for name in site.nodes)
    whole = Configuration(floats=nodes)
    last = [site.as_float() for site in heads if site.name == LAST_CONVOLUTIONS]
    placements = [(f"{LAST_CONVOLUTIONS} float", start.merge(site)) for site in last]
    if nodes and whole not in last:
        placements.append(("whole head float", start.merge(whole)))
    return placements


def list_worst_floats(
    start: Configuration, ranked: Sequence[Configuration], reason: str
) -> list[tuple[str, Configuration]]:
    """Return placements with the first 1, 2, 4, 8 and 16 of the ranked choices.

    If there are fewer choices, the list is shorter.

    Args:
        start: Configuration to which the choices are added.
        ranked: Configurations with one choice each; the choice for the worst site is first.
        reason: Text after the number of choices in the names of the placements.
    """
    return [
        (f"{count} {reason}", functools.reduce(Configuration.merge, ranked[:count], start))
        for count in _FLOAT_COUNTS
        if count <= len(ranked)
    ]


def rank_floats_by_input_error(
    planner: Planner, start: Configuration, sites: Sequence[TuningSite]
) -> list[Configuration]:
    """Return configurations with one float convolution each, largest input error first.

    The quantization error of an input is relative to the values of the input. It follows from the
    calibration statistics, without a run, so it does not include the effect on the outputs.

    Args:
        planner: Planner of the network.
        start: Configuration whose INT8 convolutions are ranked.
        sites: Sites of the network.
    """
    plan = planner.plan(start)
    sources = {t: s.group.sources for s in plan.scales for t in s.group.quantized}
    quantized = [q for q in plan.recipe.build(planner.model)[1] if q.tensor in sources]
    worst = losses.rank_activations(quantized, planner.statistics, sources, len(quantized))
    single = {}
    for site in sites:
        floats = site.as_float()
        is_int8 = site.kind == CONVOLUTION and site.default == INT8
        if is_int8 and not floats.floats <= start.floats:
            single[site.nodes[0]] = floats
    names = (i.node.name for q in worst for i in plan.placement.inputs[q.tensor])
    return [single[name] for name in dict.fromkeys(names) if name in single]
