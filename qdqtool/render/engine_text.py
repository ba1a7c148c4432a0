"""Tables of ``qdqtool engine``: layers with their costs, totals, two engines side by side."""

from __future__ import annotations

from qdqtool.buildlog.implicit import IMPLICIT
from qdqtool.engine.compare import Comparison, Pair
from qdqtool.engine.costs import EngineReport, LayerCost, Totals, describe, title_of
from qdqtool.render.log_text import count, short
from qdqtool.render.output import wrap
from qdqtool.text import as_text

_LISTED = 20
_SLOW = 1.5  # times the usual from which on a layer stands out
_SLOW_LISTED = 10


def render(report: EngineReport, sort: str, width: int = 80, *, everything: bool = False) -> str:
    """The layers (the first twenty unless ``everything``) and totals by kind, precision and type."""
    rows = report.sorted_rows(sort)
    shown = rows if everything else rows[:_LISTED]
    lines = [_headline(report), *(wrap(IMPLICIT, 2, width, "") if report.implicit_int8 else []), ""]
    lines += wrap("MACs and bytes of one execution; MAC/B is arithmetic intensity; tensors in, tensors out", 0, width)
    lines += [f"{'#':>4} {'ms':>8} {'share':>6} {'MMACs':>9} {'kB':>9} {'MAC/B':>7}  layer"]
    for row in shown:
        lines += _row(row, width, everything)
    if len(rows) > len(shown):
        lines.append(f"... and {len(rows) - len(shown)} more (--all)")
    lines += _slow(report, width)
    for key, title in (("kind", "By kind"), ("precision", "By precision"), ("type", "By type")):
        lines += ["", *_totals(title, report.totals(key), timed=report.timed)]
    if report.unmatched:
        lines += ["", *wrap(f"in the profile and not in the listing: {', '.join(report.unmatched[:10])}", 2, width, "")]
    return as_text(lines)


def _headline(report: EngineReport) -> str:
    build = report.build
    device = f" on {build.device}" if build.device else ""
    time = f", {report.total_ms:.4f} ms" if report.timed else ""
    return f"{build.title}{device}: {count(len(report.rows), 'layer')}{time}"


def _row(row: LayerCost, width: int, everything: bool) -> list[str]:
    ms = f"{row.ms:8.4f}" if row.ms is not None else " " * 8
    share = f"{row.share:6.1%}" if row.share is not None else " " * 6
    intensity = f"{row.intensity:7.1f}" if row.intensity else " " * 7
    name = row.name if everything else title_of(row)
    first = f"{row.index:>4} {ms} {share} {_millions(row.macs)} {_kilo(row.total_bytes)} {intensity}  {name}"
    inputs, outputs = (", ".join(map(describe, tensors)) or "-" for tensors in (row.layer.inputs, row.layer.outputs))
    usual = f"; usually {row.expected_ms:.4f} ms, at best {row.best_ms:.4f}" if row.expected_ms and row.best_ms else ""
    return [first, *wrap(f"{row.layer.type}: {inputs} -> {outputs}{usual}", 8, width)]


def _slow(report: EngineReport, width: int) -> list[str]:
    """Layers that take much longer than such layers usually do: a slow tactic, or work that does not show."""
    slow = [r for r in report.rows if r.times_expected is not None and r.times_expected > _SLOW]
    slow.sort(key=lambda r: (r.expected_ms or 0.0) - (r.ms or 0.0))
    if not slow:
        return []
    lines = ["", *wrap(f"Slower than such layers usually are on {report.gpu} ({len(slow)}): a slow tactic or format", 2,
                       width, "")]
    for row in slow[:_SLOW_LISTED]:
        lost = (row.ms or 0.0) - (row.expected_ms or 0.0)
        tactic = row.layer.extras.get("TacticName") or row.layer.tactic
        used = f"  [{short(str(tactic), 60)}]" if tactic else ""
        lines += wrap(f"{title_of(row)}{used}", 8, width, f"  x{row.times_expected:.1f}, {lost:.4f} ms more  "
                                                          f"#{row.index} ")
    return lines


def _millions(value: int | None) -> str:
    if value is None:
        return f"{'?':>9}"
    return f"{value / 1e6:9.1f}" if value else " " * 9


def _kilo(value: int | None) -> str:
    return f"{'?':>9}" if value is None else f"{value / 1000:9,.1f}"


def _totals(title: str, totals: dict[str, Totals], *, timed: bool) -> list[str]:
    lines = [f"{title:<26} {'layers':>6} {'ms':>9} {'GMACs':>9} {'MB':>10}"]
    unknown = 0
    for key, total in totals.items():
        ms = f"{total.ms:9.4f}" if timed else " " * 9
        lines.append(f"  {short(key, 24):<24} {total.layers:>6} {ms} {total.macs / 1e9:9.3f} {total.bytes / 1e6:10.3f}")
        unknown += total.unknown
    if unknown and title == "By kind":
        lines.append(f"  MACs or bytes of {count(unknown, 'layer')} are not known (?) and not in the sums")
    return lines


def render_engines(comparison: Comparison, *, everything: bool = False) -> list[str]:
    """Where the time of two engines goes, by kind and by layer, the largest changes first."""
    one, two = comparison.first, comparison.second
    lines = []
    if one.timed and two.timed and one.total_ms:
        change = two.total_ms - one.total_ms
        lines.append(f"Sum of layers: B is {abs(change):.4f} ms ({abs(change) / one.total_ms:.1%}) "
                     f"{'slower' if change > 0 else 'faster'}")
    timed = one.timed and two.timed
    lines += [f"{'By kind':<26} {'A':>7} {'B':>7}" + f" {'A ms':>10} {'B ms':>10} {'change':>10}" * timed]
    for kind, (a, b) in comparison.by_kind.items():
        times = f" {a.ms:10.4f} {b.ms:10.4f} {b.ms - a.ms:+10.4f}" if timed else ""
        lines.append(f"  {kind:<24} {a.layers:>7} {b.layers:>7}{times}")
    pairs = sorted(comparison.pairs, key=lambda pair: -abs(pair.change_ms or 0.0) if timed else 0.0)
    shown = pairs if everything else pairs[:_LISTED]
    order = "the largest changes first" if timed else "in the order of A"
    lines += ["", f"By layer, {order} (aligned by {comparison.by}); ms in A, in B, change"]
    for pair in shown:
        lines += _pair(pair, everything, timed)
    if len(pairs) > len(shown):
        lines.append(f"... and {len(pairs) - len(shown)} more (--all)")
    return lines


def _pair(pair: Pair, everything: bool, timed: bool) -> list[str]:
    def ms(cost: LayerCost | None) -> str:
        return f"{cost.ms:9.4f}" if cost is not None and cost.ms is not None else f"{'-':>9}"

    change = f"{pair.change_ms:+9.4f}" if timed and pair.change_ms is not None else " " * 9
    lines: list[str] = []
    for label, cost in (("A", pair.first), ("B", pair.second)):
        if cost is None:
            continue
        types = f"{', '.join(str(t.precision) for t in cost.layer.inputs)} -> {cost.layer.output_precision}"
        types = types if cost.layer.type else ""
        numbers = f"{ms(pair.first)} {ms(pair.second)} {change}" if not lines else " " * 29
        name = cost.name if everything else title_of(cost)
        lines.append(f"{numbers}  {label} {types:<20} {name}")
    return lines
