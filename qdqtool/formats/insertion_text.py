"""Text for a terminal about placements: the results of ``insert``, ``tune`` and ``fix``."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.formats.output import TextPage, as_options
from qdqtool.formats.predict_text import verdict
from qdqtool.insertion.losses import SMALL_ERROR
from qdqtool.reasons.placement import SkippedNode
from qdqtool.types import Prediction
from qdqtool.util.text import format_count, keep_end

if TYPE_CHECKING:
    from qdqtool.fixing.api import Fixed
    from qdqtool.fixing.session import FixAttempt
    from qdqtool.insertion.result import Insertion
    from qdqtool.insertion.scales import GroupScale
    from qdqtool.tuning.result import PlacementResult, SiteResult, Tuning

# How many are named unless everything is asked for: nodes left float for one reason, groups, conversions, sites, fixes.
_NAMED, _GROUPS, _CONVERSIONS, _SITES, _FIXES = 3, 3, 8, 8, 4
_REPORTED = 1.5  # bits lost from which a group is listed
_WORTH = 0.1  # of the error, from which on an activation is worth leaving float
# Effect of an error below each limit on detections; measured, see docs/accuracy.md.
_JUDGED = (
    (SMALL_ERROR, "little"),
    (0.2, "more than usual, so compare detections (qdqtool tune does)"),
    (math.inf, "much, and detections may suffer (qdqtool tune measures them)"),
)


def render(insertion: Insertion, width: int = 80, *, everything: bool = False) -> str:
    """The whole answer of ``insert``; ``everything`` names every node, group and scale."""
    page = TextPage(width, everything)
    _add_quantized(page, insertion)
    _add_skipped(page, insertion.skipped)
    _add_groups(page, insertion.groups)
    _add_losses(page, insertion)
    found = insertion.agreement
    if found is not None:
        far = "to values that are not numbers"
        if math.isfinite(found.error):
            far = f"by {found.error:.1%} of their standard deviation"
        page.add_heading(
            f"Agreement with the float model: INT8 and FP16 together change the outputs {far} "
            f"({format_count(found.samples, 'sample')})"
        )
    _add_remarks(
        page,
        [*insertion.notes, *insertion.calibration.get("notes", ())],
        [*insertion.warnings, *insertion.calibration.get("warnings", ())],
    )
    if everything:
        page.add_lines("", "Activation scales")
        for row in insertion.activations:
            group = "" if row.group is None else f"  group {row.group}"
            page.add_lines(f"  {row.scale:<12.6g} {row.method:<10} {row.tensor}{group}")
    if insertion.prediction is not None:
        _add_prediction(page, insertion.prediction)
    return str(page)


def _add_quantized(page: TextPage, insertion: Insertion) -> None:
    activations, weights = insertion.activations, insertion.weights
    methods = ", ".join(f"{m} {n}" for m, n in Counter(q.method for q in activations).most_common())
    channels = sum(isinstance(q.scale, list) for q in weights)
    detail = (
        "per output channel"
        if channels == len(weights)
        else f"{channels} of them per output channel"
    )
    page.fill(
        f"quantized {format_count(len(activations), 'activation')} ({methods}) and the weights of "
        f"{format_count(len(weights), 'node')} ({detail})"
    )
    images = insertion.calibration.get("images", 0)
    origin = (
        format_count(images, "image")
        if images
        else f"the table {insertion.calibration.get('table', '')}"
    )
    page.fill(f"ranges from {origin}; for {insertion.target}", 2, "  ")


def _add_skipped(page: TextPage, skipped: list[SkippedNode]) -> None:
    by_reason: dict[str, list[str]] = {}
    for node in skipped:
        by_reason.setdefault(node.reason, []).append(node.node)
    if skipped:
        page.add_lines("", f"Left float ({format_count(len(skipped), 'node')})")
    for reason, names in by_reason.items():
        shown = page.first_rows(names, _NAMED)
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        page.fill(f"{as_options(reason)}: {', '.join(shown)}{more}", 4, "  - ")


def _add_groups(page: TextPage, groups: list[GroupScale]) -> None:
    if not groups:
        page.add_heading("No tensors share a scale")
        return
    ranked = sorted(groups, key=lambda g: -max((m.bits_lost for m in g.members), default=0.0))
    shown = ranked
    if not page.everything:
        shown = [g for g in ranked[:_GROUPS] if any(m.bits_lost >= _REPORTED for m in g.members)]
    worst = max((m.bits_lost for g in ranked[len(shown) :] for m in g.members), default=0.0)
    if not shown:
        page.add_heading(
            f"Scale groups: {len(groups)}; sharing a scale costs no tensor more than {worst:.1f} bits (--all)"
        )
        return
    page.add_heading(
        f"Scale groups ({len(groups)}): Concat, Split, MaxPool, Resize and the like tie these tensors to one scale; "
        "bits of precision lost by sharing it (below zero: clipped sooner)"
    )
    for group in shown:
        members = ", ".join(f"{m.tensor} {round(m.bits_lost, 1) + 0.0:+.1f}" for m in group.members)
        page.fill(f"scale {group.scale:.4g}: {members}", 4, "  - ")
    rest = ranked[len(shown) :]
    if rest:
        page.fill(
            f"and {len(rest)} more, where no tensor loses more than {worst:.1f} bits (--all)",
            4,
            "    ",
        )


def _add_losses(page: TextPage, insertion: Insertion) -> None:
    """How far INT8 moves the outputs and whether that is much, and the activations that it loses most on."""
    losses = insertion.losses
    if losses is None or (losses.tried and not losses.tensors):
        return
    judged = next((words for limit, words in _JUDGED if losses.error < limit), _JUDGED[-1][1])
    found = (
        f"Limit of accuracy: INT8 activations change the head's outputs by {losses.error:.1%} of their "
        f"standard deviation ({format_count(losses.samples, 'sample')}): {judged}."
    )
    if not losses.tried:
        page.add_heading(
            f"{found} So no single ones were looked at (--losses {losses.samples} does)"
        )
        return
    if losses.tensors[0].gain < _WORTH and not page.everything:
        page.add_heading(
            f"{found} No single one in float takes off {_WORTH:.0%} of that ({losses.tried} tried; --all "
            "lists them)"
        )
        return
    page.add_heading(
        f"{found} What one of them in float takes off that ({losses.tried} tried), and costs"
    )
    for loss in losses.tensors:
        price = ""
        if loss.convolutions is not None:
            more = "" if loss.conversions is None else f", {_format_conversions(loss.conversions)}"
            price = f"; costs {format_count(loss.convolutions, 'INT8 layer')}{more}"
        page.fill(f"{loss.tensor}: {loss.gain:.1%}{price}", 4, "  - ")
    if losses.tensors[0].gain < _WORTH:
        page.fill(
            f"none takes off {_WORTH:.0%}: leaving single layers float helps little", 4, "    "
        )
    else:  # the option that leaves the worst one float; as one line, to be pasted
        names = [re.escape(name).replace(r"\-", "-") for name in losses.tensors[0].readers]
        pattern = f"^{names[0]}$" if len(names) == 1 else f"^({'|'.join(names)})$"
        page.add_lines(f"    the first one float: --exclude {shlex.quote(pattern)}")


def _format_conversions(more: int) -> str:
    return f"{more:+d} conversion{'s' * (abs(more) != 1)}"


def _add_remarks(page: TextPage, notes: Iterable[str], warnings: Iterable[str]) -> None:
    for kind, texts in (("note", notes), ("warning", warnings)):
        for text in texts:
            page.fill(f"{kind}: {as_options(text)}")


def _add_prediction(page: TextPage, prediction: Prediction) -> None:
    """Return the verdict on a prediction, and its conversions by name."""
    page.add_heading(f"Predicted for {prediction.target}: {verdict(prediction)}")
    for name in page.iterate_rows(prediction.conversion_nodes, _CONVERSIONS, "    "):
        page.add_lines(f"  - conversion at {name}")


# tune ---------------------------------------------------------------------------------------------------------------


def render_tuning(tuning: Tuning, width: int = 80, *, everything: bool = False) -> str:
    """Return the result of ``tune``: the float layers, their cost and gain, and the front.

    ``everything`` shows every site.
    """
    page = TextPage(width, everything)
    _add_verdict(page, tuning)
    _add_choices(page, tuning)
    _add_front(page, tuning)
    _add_sites(page, tuning)
    _add_remarks(page, tuning.notes, tuning.warnings)
    _add_prediction(page, tuning.prediction)
    return str(page)


def _add_verdict(page: TextPage, tuning: Tuning) -> None:
    point, images, cost = tuning.chosen, tuning.images, tuning.chosen.cost
    took = "" if cost.ms is None else f", {cost.ms:.4g} ms predicted on {tuning.gpu}"
    if tuning.keep is not None:
        wanted = tuning.keep * tuning.metric["float"]
        first = (
            f"goal met (target {wanted:.3f})"
            if tuning.reached
            else (f"goal NOT met (target {wanted:.3f}); this is the best that was found")
        )
    else:
        first = (
            f"goal met (within {tuning.budget_ms:g} ms)"
            if tuning.reached
            else (f"goal NOT met: nothing fits {tuning.budget_ms:g} ms; this is the fastest")
        )
    page.fill(
        f"{first}: {_format_metric(point)} on {images['judged_on']} held-out images; "
        f"{cost.int8} of {cost.convolutions} convolutions INT8, {format_count(cost.conversions, 'conversion')}{took}"
    )
    facts = [tuning.metric["sentence"]]
    if tuning.metric["float"] != 1.0:
        facts.append(f"the float model itself has {tuning.metric['float']:.4f}")
    facts.append(
        f"ranges from {images['calibration']} images, choices made on {images['chosen_on']} others"
    )
    if tuning.effort["stopped"]:
        facts.append(
            f"stopped by the {tuning.effort['stopped']}: more time may find something better"
        )
    for fact in facts:
        page.fill(fact, 2, "  ")


def _format_metric(point: PlacementResult) -> str:
    if point.metric is None:
        return "not judged"
    return f"{point.metric:.3f} ({point.low:.3f} to {point.high:.3f})"


def _add_choices(page: TextPage, tuning: Tuning) -> None:
    if not tuning.chosen.sites and not tuning.chosen.changed:
        page.add_heading(
            "Nothing has to be float except the head preset"
            if tuning.chosen.cost.int8
            else "Nothing is quantized"
        )
        return
    if not tuning.bought:
        page.add_heading(f"Float: {', '.join(tuning.chosen.sites)}")
        return
    timed = tuning.gpu is not None
    head = f"{'bought':>8} {'INT8':>5} {'conv.':>6}" + (f" {'ms':>8}" if timed else "")
    page.add_lines("", f"Float, and what each bought and costs{head:>{max(0, page.width - 37)}}")
    room = max(20, page.width - len(head) - 3)
    for one in tuning.bought:
        metric = "-" if one.metric is None else f"{one.metric:+.4f}"
        row = f"{metric:>8} {one.int8:>+5d} {one.conversions:>+6d}"
        if timed:
            row += f" {'-' if one.ms is None else f'{one.ms:+.3f}':>8}"
        page.add_lines(f"  {keep_end(one.site, room):<{room}} {row}")
    rest = set(tuning.chosen.sites) - {one.site for one in tuning.bought}
    if rest:
        page.fill(f"float too: {', '.join(s for s in tuning.chosen.sites if s in rest)}", 4, "  ")
    for tensor, choice in tuning.chosen.changed.items():
        page.fill(f"{tensor}: {choice}", 4, "  ")


def _add_front(page: TextPage, tuning: Tuning) -> None:
    unit = "ms" if tuning.gpu is not None else "cost"
    page.add_heading(
        f"Front: each is the most accurate at its price ({as_options(tuning.cost['sentence'])})"
    )
    page.add_lines(f"  {unit:>8} {'INT8':>5} {'conv.':>6} {'chosen':>7}  {'judged':<23} float")
    for point in tuning.front:
        mark = "*" if point is tuning.chosen else " "
        cost = point.cost
        what = point.name if len(point.sites) > 1 or not point.sites else point.sites[0]
        row = f"{mark} {cost.value:>8.4g} {cost.int8:>5d} {cost.conversions:>6d} {point.chosen_on:>7.3f}  "
        row += f"{_format_metric(point):<23} "
        page.add_lines(row + keep_end(what, max(12, page.width - len(row))))


def _add_sites(page: TextPage, tuning: Tuning) -> None:
    measured = sorted(
        (s for s in tuning.sites if s.loss is not None), key=lambda s: -(s.loss or 0.0)
    )
    if not measured and not page.everything:
        page.add_heading(
            "Everything INT8 is enough, so that no single site was measured (--front does)"
        )
        return
    page.add_heading(
        "Where INT8 costs most: the part of the outputs' standard deviation that this alone adds to the "
        "error, and what float costs there"
    )
    for site in page.first_rows(measured, _SITES):
        change = site.as_json(tuning.base)
        price = f"{change['int8']:+d} INT8, {_format_conversions(change['conversions'])}"
        price += "" if change["ms"] is None else f", {change['ms']:+.3f} ms"
        page.fill(
            f"{site.site} ({_format_kind(site)}): {site.loss:.2%}; {price}; {site.choice}",
            4,
            "  - ",
        )
    for site in tuning.sites if page.everything else ():
        if site.loss is None:
            page.fill(f"{site.site} ({_format_kind(site)}): {site.choice}; {site.why}", 4, "  - ")
    never = tuning.effort["never_measured"]
    if never and not page.everything:
        page.add_lines(f"    {never} choices cannot pay and were never measured (--all says why)")


def _format_kind(site: SiteResult) -> str:
    return site.kind if len(site.nodes) == 1 else f"{site.kind} of {len(site.nodes)} nodes"


# fix ----------------------------------------------------------------------------------------------------------------


def render_fixed(fixed: Fixed, output: str, width: int) -> str:
    """Return the applied fixes, the others with the reason, and the verdicts before and after."""
    page = TextPage(width)
    count = len(fixed.applied)
    page.add_lines(f"{count} fix{'' if count == 1 else 'es'} applied, written to {output}")
    for label, text in [("before", verdict(fixed.before)), ("after", verdict(fixed.after))]:
        page.fill(text, 10, f"  {label:<8}")
    _add_errors(page, fixed)
    for note in fixed.notes:
        page.fill(as_options(note), 10, "  note    ")
    _add_changes(page, "Applied", fixed.applied)
    _add_changes(page, "Not applied", fixed.refused)
    left = fixed.after.findings_by_code()
    serious = {f.code: None for f in fixed.after.findings if f.severity != "info"}
    if serious:
        listed = ", ".join(f"{code} ({left[code]})" for code in serious)
        page.add_heading(f"left: {listed}; see qdqtool predict {output}")
    return str(page)


def _add_errors(page: TextPage, fixed: Fixed) -> None:
    """The distance of each output from the float network's, before and after."""
    if not fixed.errors:
        return
    inputs = f"{fixed.samples} images" if fixed.samples else "random inputs; --calib takes images"
    page.fill(
        f"distance from the float network before and after (root mean square, {inputs})",
        10,
        "  outputs ",
    )
    for error in fixed.errors:
        change = f"{error.before:>8.2%} -> {error.after:>7.2%}"
        mark = "  lost" if error.lost else "  grew" if error.grew else ""
        page.fill(f"{change}{mark}  {error.title}", 12, "          ")


def _add_changes(page: TextPage, title: str, changes: list[FixAttempt]) -> None:
    def kind(change: FixAttempt) -> tuple[str, str]:
        return change.code, change.why_not

    if changes:
        page.add_lines("", title)
    for (code, why_not), group in itertools.groupby(sorted(changes, key=kind), key=kind):
        same = list(group)
        page.fill(
            f"{code} ({len(same)})" + (f": {as_options(why_not)}" if why_not else ""), 4, "  "
        )
        for change in page.iterate_rows(same, _FIXES, "      ", ""):
            page.fill(change.what, 6, "    - ")
