"""Whether the scales of activations fit data: what each Q clips, the bits that it uses, and outliers that it covers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.ir.qdq import SMOOTHED, is_qdq, read_smoothed_tensors
from qdqtool.ir.sizes import last_axis_sources
from qdqtool.patterns.heads import is_attention_probability
from qdqtool.patterns.layernorm import last_axis_gains, skip_identities
from qdqtool.patterns.view import View
from qdqtool.reasons.faults import CHECK, ActivationFit, ActivationScales, OutlierScales
from qdqtool.types import Precision

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.statistics import TensorStatistics

_STEPS = 127.0
# Entropy calibration, which clips on purpose, comes to a twelfth of the values and half of the power of some tensors.
_CLIPPED = 0.1  # share of the values
_LOST = 0.6  # share of the power
_WASTED = 0.25  # of the steps: two bits are lost
# What the quantizer in the middle may be off by: entropy calibration clips at half of the largest value in the median.
_EVERYWHERE = 3.0
_FEW = 1000  # values of a tensor that say nothing of its range: what pooling leaves of a few images
_ALIKE = (
    1 / 3
)  # of the quantizers: so many with one scale share it by mistake, fewer because a Concat joins them
_NAMED = 5
_ONE, _MOST, _SEVERAL = (
    1.4,
    0.8,
    3,
)  # other images move ranges by so much; share and number of quantizers that agree
_OUTLIER = 100.0  # largest value held over the typical one; docs/scales.md says what networks have
_REACH = (
    4.0  # standard deviations to each side, which a channel's range has on some thousand values
)
_ROWS = 100  # values of a channel that say what its range is
_BY_GAINS = 25.0  # the same by gains alone, which at most 17 were that spread as trained ones do (docs/scales.md)
_LOWER, _BELOW = (
    1 / 6,
    0.967,
)  # so many of a normal distribution are so many standard deviations below its middle
_TYPICAL = 2 / 3  # of the magnitudes stay below the typical one


def quantized(view: View) -> list[Node]:
    """The Qs to look at: INT8, one known scale for the whole tensor."""
    scales = (
        (q, params.scale)
        for q in view.activation_qs
        if (params := view.params(q)).precision == Precision.INT8
    )
    return [
        q for q, s in scales if s is not None and s.size == 1 and s[0] > 0 and math.isfinite(s[0])
    ]


def run(view: View, report: FindingReport, statistics: Statistics) -> None:
    """Adds one finding for the network where scales do not fit, and one where they cover outliers.

    The statistics are of the tensors in front of the Qs.
    """
    fits, found = [], []
    for q in quantized(view):
        seen = statistics.get(q.input(0))
        scale = view.params(q).scale
        if seen is not None and seen.count >= _FEW and seen.absmax > 0 and scale is not None:
            fits.append(_fit(q.name, seen, float(scale[0])))
            found.append((q.name, q.input(0), float(scale[0]), [seen]))
    outliers(report, view.model, found, statistics.images)
    by_gains(view, report, {name for name, *_ in found})
    bad = _bad(fits)
    if bad:
        bad.sort(
            key=lambda f: max(f.clipped / _CLIPPED, f.lost / _LOST, _WASTED / f.used), reverse=True
        )
        report.add(
            ActivationScales(
                CHECK,
                bad[0].quantizer,
                tuple(bad[:_NAMED]),
                len(bad),
                len(fits),
                statistics.images,
                one_factor(fits),
            )
        )


def by_gains(view: View, report: FindingReport, judged: Collection[str] = ()) -> None:
    """Adds the same finding as :func:`outliers` where a model without data tells it: behind normalizations.

    What these give has a mean square of 1 over the channels before the gains, so that a typical value of a channel is
    its gain, or less. Compared with is the largest gain that so many would have by chance, if all of them were
    distributed (lognormal) as those below the middle are. Of what was smoothed the gains say nothing: the weights make
    up for them. ``judged`` are Qs that data tell of.
    """
    gains, apart = last_axis_gains(view.model), read_smoothed_tensors(view.model)
    spreads = []
    for q in quantized(view) if gains else ():
        scale, tensor = view.params(q).scale, q.input(0)
        if q.name in judged or tensor in apart:
            continue
        gain = view.model.constant(
            skip_identities(view.model, gains.get(_normalized(view.model, tensor, gains), ""))
        )
        sizes = np.abs(np.zeros(0) if gain is None else gain.astype(np.float64))
        if scale is not None and sizes.any() and np.isfinite(sizes).all():
            lower, middle = np.quantile(sizes[sizes > 0.0], [_LOWER, 0.5])
            above = math.log(middle / lower) / _BELOW * math.sqrt(2.0 * math.log(sizes.size))
            spreads.append(
                (
                    q.name,
                    float(scale[0]),
                    _STEPS * float(scale[0]) / float(middle) * math.exp(-above),
                )
            )
    _covering(report, view.model, spreads, 0)


def _normalized(model: Model, tensor: str, gains: Mapping[str, str]) -> str:
    """What a normalization over the last axis made, of which a tensor was only moved or rounded; empty for another."""
    while tensor not in gains:
        node, above = model.producer(tensor), last_axis_sources(model, tensor)
        if node is not None and (is_qdq(node) or node.op == "Cast"):
            above = [node.input(0)]
        if len(above) != 1:
            return ""
        tensor = above[0]
    return tensor


def outliers(
    report: FindingReport,
    model: Model,
    found: Sequence[tuple[str, str, float, Sequence[TensorStatistics]]],
    samples: int,
) -> None:
    """Adds one finding for the network where scales cover outliers, seen on so many samples.

    ``found`` are a Q, what it quantizes, its scale, and the statistics of that or of all that it is made of; of these
    the one that the scale fits best counts.
    """
    gains, apart = last_axis_gains(model), read_smoothed_tensors(model)
    spreads = []
    for name, tensor, scale, parts in found:
        seen = [s for s in parts if s.count >= _FEW and s.absmax > 0.0]
        if seen and not is_attention_probability(model, tensor, quantized=True):
            by_channel = tensor not in apart and bool(_normalized(model, tensor, gains))
            spreads.append((name, scale, min(_spread(s, scale, by_channel) for s in seen)))
    _covering(report, model, spreads, samples)


def _covering(
    report: FindingReport, model: Model, spreads: Sequence[tuple[str, float, float]], samples: int
) -> None:
    """Adds the finding for Qs, with their scales and how many times the typical value these hold."""
    bad = sorted(
        (s for s in spreads if s[2] > (_OUTLIER if samples else _BY_GAINS)), key=lambda s: -s[2]
    )
    if bad:
        linear = any(_read_by_product(model, name) for name, *_ in bad)
        report.add(
            OutlierScales(
                CHECK,
                bad[0][0],
                tuple(bad[:_NAMED]),
                len(bad),
                len(spreads),
                samples,
                linear and SMOOTHED not in model.metadata,
            )
        )


def _read_by_product(model: Model, quantizer: str) -> bool:
    """Whether a matrix product reads what a Q quantizes."""
    dqs = model.consumers(model.node(quantizer).output)
    return any(
        operator_of(reader).kind == LayerKind.MATRIX_MULTIPLY
        for dq in dqs
        for reader in model.consumers(dq.output)
    )


def _spread(seen: TensorStatistics, scale: float, by_channel: bool) -> float:
    """The largest magnitude that a scale holds and the tensor has, over the typical one.

    Typical is what two thirds of the magnitudes above zero stay below, so that outliers may be up to a third of them.
    By channel it is at most a quarter of half the range of the channel in the middle: outliers of one sign behind a
    LayerNormalization move the other channels away from zero, and leave them no range. Elsewhere, and behind one that
    was smoothed, channels that stay away from zero do no harm.
    """
    held = min(seen.absmax, _STEPS * scale)
    histogram = seen.histogram
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    below = np.cumsum(np.where(histogram.edges[:-1] > 0.0, histogram.counts, 0.0))
    if not below[-1]:
        return 1.0
    typical = float(middles[np.searchsorted(below, _TYPICAL * below[-1])])
    if by_channel and seen.channels is not None:
        ranges = seen.channels[1] - seen.channels[0]
        if ranges.any() and seen.count >= _ROWS * ranges.size:
            typical = min(typical, float(np.median(ranges[ranges > 0.0])) / 2 / _REACH)
    return held / typical


def _bad(fits: list[ActivationFit]) -> list[ActivationFit]:
    """Those that do not fit; what shares a scale, as the members of a Concat do, may use it together."""
    together: dict[float, list[float]] = defaultdict(list)
    for fit in fits:
        together[fit.scale].append(fit.used)
    used = {s: max(u) if len(u) <= max(2, _ALIKE * len(fits)) else 0.0 for s, u in together.items()}
    bad = [
        f
        for f in fits
        if f.clipped > _CLIPPED or f.lost > _LOST or max(f.used, used[f.scale]) < _WASTED
    ]
    middle = float(np.median([f.used for f in fits])) if fits else 1.0
    if 1 / _EVERYWHERE <= middle <= _EVERYWHERE:
        return bad
    return [
        f
        for f in fits
        if f in bad or (f.used > _EVERYWHERE if middle > 1 else f.used < 1 / _EVERYWHERE)
    ]


def one_factor(fits: list[ActivationFit]) -> float:
    """How far all of them are off in the median, if that is one factor; 0 if not."""
    middle = float(np.median([f.used for f in fits]))
    alike = sum(1 / _ONE <= f.used / middle <= _ONE for f in fits)
    off = not 1 / _ONE <= middle <= _ONE
    return middle if off and len(fits) >= _SEVERAL and alike >= _MOST * len(fits) else 0.0


def _fit(name: str, seen: TensorStatistics, scale: float) -> ActivationFit:
    """Shares clipped and lost by the histogram, whose bins are finer than a step; share of the steps that are used."""
    histogram = seen.histogram
    held = (_STEPS + 0.5) * scale
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    clipped = float(np.sum(histogram.counts[middles > held])) / seen.count
    beyond = np.clip(middles - held, 0, None)
    lost = float(np.sum(histogram.counts * beyond**2) / np.sum(histogram.counts * middles**2))
    return ActivationFit(name, scale, clipped, lost, seen.absmax / (_STEPS * scale))
