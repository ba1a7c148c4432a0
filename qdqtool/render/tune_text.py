"""A tuning as text for a terminal: what stays float, what it bought and costs, and the front."""

from __future__ import annotations

from qdqtool.render.insertion_text import predicted
from qdqtool.render.output import as_options, wrap
from qdqtool.text import as_text, ending
from qdqtool.tuning.result import Point, SiteResult, Tuning

_WHY = 8  # sites shown with their loss, unless everything is asked for


def render(tuning: Tuning, width: int = 80, *, everything: bool = False) -> str:
    """The whole answer; ``everything`` shows every site."""
    lines = _verdict(tuning, width)
    lines += ["", *_bought(tuning, width)]
    lines += ["", *_front(tuning, width)]
    lines += ["", *_sites(tuning, width, everything)]
    for kind, texts in (("note", tuning.notes), ("warning", tuning.warnings)):
        for text in texts:
            lines += wrap(f"{kind}: {as_options(text)}", 2, width, "")
    lines += ["", *predicted(tuning.prediction, width, everything)]
    return as_text(lines)


def _verdict(tuning: Tuning, width: int) -> list[str]:
    point, images = tuning.chosen, tuning.images
    cost = point.cost
    took = "" if cost.ms is None else f", {cost.ms:.4g} ms predicted on {tuning.gpu}"
    if tuning.keep is not None:
        wanted = tuning.keep * tuning.metric["float"]
        first = f"goal met (target {wanted:.3f})" if tuning.reached else (
            f"goal NOT met (target {wanted:.3f}); this is the best that was found")
    else:
        first = f"goal met (within {tuning.budget_ms:g} ms)" if tuning.reached else (
            f"goal NOT met: nothing fits {tuning.budget_ms:g} ms; this is the fastest")
    lines = wrap(
        f"{first}: {_interval(point)} on {images['judged_on']} held-out images; "
        f"{cost.int8} of {cost.convolutions} convolutions INT8, {_conversions(cost.conversions)}{took}", 2, width, "",
    )  # fmt: skip
    lines += wrap(tuning.metric["sentence"], 2, width)
    if tuning.metric["float"] != 1.0:
        lines += wrap(f"the float model itself has {tuning.metric['float']:.4f}", 2, width)
    lines += wrap(f"ranges from {images['calibration']} images, choices made on {images['chosen_on']} others", 2, width)
    if tuning.effort["stopped"]:
        lines += wrap(f"stopped by the {tuning.effort['stopped']}: more time may find something better", 2, width)
    return lines


def _conversions(count: int) -> str:
    return f"{count} conversion{'s' * (count != 1)}"


def _interval(point: Point) -> str:
    if point.metric is None:
        return "not judged"
    return f"{point.metric:.3f} ({point.low:.3f} to {point.high:.3f})"


def _bought(tuning: Tuning, width: int) -> list[str]:
    if not tuning.chosen.sites and not tuning.chosen.changed:
        return wrap("Nothing has to stay float beyond the head preset", 2, width, "")
    if not tuning.bought:
        return wrap(f"Float: {', '.join(tuning.chosen.sites)}", 2, width, "")
    timed = tuning.gpu is not None
    head = f"{'bought':>8} {'INT8':>5} {'conv.':>6}" + (f" {'ms':>8}" if timed else "")
    lines = [f"Float, and what each bought and costs{head:>{max(0, width - 37)}}"]
    room = max(20, width - len(head) - 3)
    for one in tuning.bought:
        metric = "-" if one.metric is None else f"{one.metric:+.4f}"
        row = f"{metric:>8} {one.int8:>+5d} {one.conversions:>+6d}"
        if timed:
            row += f" {'-' if one.ms is None else f'{one.ms:+.3f}':>8}"
        lines.append(f"  {ending(one.site, room):<{room}} {row}")
    for tensor, choice in tuning.chosen.changed.items():
        lines += wrap(f"{tensor}: {choice}", 4, width, "  ")
    return lines


def _front(tuning: Tuning, width: int) -> list[str]:
    unit = "ms" if tuning.gpu is not None else "cost"
    lines = wrap(f"Front: each is the most accurate at its price ({tuning.cost['sentence']})", 2, width, "")
    lines.append(f"  {unit:>8} {'INT8':>5} {'conv.':>6} {'chosen':>7}  {'judged':<23} float")
    for point in tuning.front:
        mark = "*" if point is tuning.chosen else " "
        cost = point.cost
        what = point.name if len(point.sites) > 1 or not point.sites else point.sites[0]
        row = f"{mark} {cost.value:>8.4g} {cost.int8:>5d} {cost.conversions:>6d} {point.chosen_on:>7.3f}  "
        row += f"{_interval(point):<23} "
        lines.append(row + ending(what, max(12, width - len(row))))
    return lines


def _sites(tuning: Tuning, width: int, everything: bool) -> list[str]:
    measured = [s for s in tuning.sites if s.loss is not None]
    if not measured and not everything:
        return wrap("Everything INT8 is enough, so that no single site was measured (--front does)", 2, width, "")
    ranked = sorted(measured, key=lambda s: -(s.loss or 0.0))
    shown = ranked if everything else ranked[:_WHY]
    lines = wrap("Where INT8 costs most: part of the outputs' spread that goes when this alone is float, and what "
                 "that costs", 2, width, "")
    for site in shown:
        lines += wrap(f"{site.site} ({_kind(site)}): {site.loss:.2%}; {_price(site, tuning)}; {site.choice}", 4, width,
                      "  - ")
    if everything:
        for site in tuning.sites:
            if site.loss is None:
                lines += wrap(f"{site.site} ({_kind(site)}): {site.choice}; {site.why}", 4, width, "  - ")
    never = tuning.effort["never_measured"]
    if never and not everything:
        lines.append(f"    {never} choices cannot pay and were never measured (--all says why)")
    return lines


def _kind(site: SiteResult) -> str:
    return site.kind if len(site.nodes) == 1 else f"{site.kind} of {len(site.nodes)} nodes"


def _price(site: SiteResult, tuning: Tuning) -> str:
    change = site.as_json(tuning.base)
    more = change["conversions"]
    text = f"{change['int8']:+d} INT8, {more:+d} conversion{'s' * (abs(more) != 1)}"
    return text if change["ms"] is None else f"{text}, {change['ms']:+.3f} ms"
