"""Text of ``insert`` and ``fix``."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from calibration.presets import describe_use
from qdqtool.formats.output import TextPage, as_options
from qdqtool.formats.verdicts import verdict
from qdqtool.insertion.losses import MIN_GAIN, SMALL_ERROR, ActivationLosses, TensorLoss
from qdqtool.insertion.number_formats import find_number_format
from qdqtool.reasons.placement import SkippedNode
from qdqtool.types import Prediction
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from qdqtool.fixing.api import Fixed
    from qdqtool.fixing.session import FixAttempt
    from qdqtool.insertion.result import Insertion
    from qdqtool.insertion.scales import GroupScale

# Limits of lists, unless everything is printed.
_MAX_NAMES, _MAX_GROUPS, _MAX_CONVERSIONS, _MAX_FIXES = 3, 3, 8, 4
_MIN_BITS_LOST = 1.5  # from which a group is listed
# Effect on detections of an error below each limit; measured, see docs/accuracy.md.
_ERROR_RATINGS = (
    (SMALL_ERROR, "little"),
    (0.2, "more than usual"),
    (math.inf, "much"),
)


def render(insertion: Insertion, width: int = 80, *, everything: bool = False) -> TextPage:
    """Return the text of ``insert``; ``everything`` names every node, group and scale."""
    page = TextPage(width, everything)
    _add_counts(page, insertion)
    _add_skipped(page, insertion.skipped)
    _add_groups(page, insertion.groups, insertion.precision == "fp8")
    _add_losses(page, insertion)
    agreement = insertion.agreement
    if agreement is not None:
        change = "to values that are not numbers"
        if math.isfinite(agreement.error):
            change = f"by {agreement.error:.1%} of their standard deviation"
        page.add_heading(
            f"Agreement with the float model: {_title(insertion)} and FP16 together change the "
            f"outputs {change} ({format_count(agreement.samples, 'sample')})"
        )
    calibration = insertion.calibration
    _add_remarks(
        page,
        [*insertion.notes, *calibration.get("notes", ())],
        [*insertion.warnings, *calibration.get("warnings", ())],
    )
    if everything:
        page.add_lines("", "Activation scales")
        for row in insertion.activations:
            group = "" if row.group is None else f"  group {row.group}"
            page.add_lines(f"  {row.scale:<12.6g} {row.method:<10} {row.tensor}{group}")
    if insertion.prediction is not None:
        _add_prediction(page, insertion.prediction)
    return page


def _title(insertion: Insertion) -> str:
    """Return the format of an insertion's pairs, as texts name it."""
    return find_number_format(insertion.precision).title


def _add_counts(page: TextPage, insertion: Insertion) -> None:
    activations, weights = insertion.activations, insertion.weights
    methods = ", ".join(f"{m} {n}" for m, n in Counter(q.method for q in activations).most_common())
    detail = "per output channel"
    channels = sum(isinstance(q.scale, list) for q in weights)
    if channels < len(weights):
        detail = f"{channels} of them {detail}"
    page.fill(
        f"quantized {format_count(len(activations), 'activation')} ({methods}) and the weights of "
        f"{format_count(len(weights), 'node')} ({detail})"
    )
    origin = f"the table {insertion.calibration.get('table', '')}"
    if images := insertion.calibration.get("images", 0):
        origin = format_count(images, "image")
    page.fill(f"ranges from {origin}; for {insertion.target}", 2, "  ")
    if used := insertion.calibration.get("preprocess"):
        page.fill(describe_use(used), 2, "  ")


def _add_skipped(page: TextPage, skipped: list[SkippedNode]) -> None:
    by_reason: dict[str, list[str]] = {}
    for node in skipped:
        by_reason.setdefault(node.reason, []).append(node.node)
    if skipped:
        page.add_lines("", f"Left float ({format_count(len(skipped), 'node')})")
    for reason, names in by_reason.items():
        listed = page.first_rows(names, _MAX_NAMES)
        more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
        page.fill(f"{as_options(reason)}: {', '.join(listed)}{more}", 4, "  - ")


def _add_groups(page: TextPage, groups: list[GroupScale], is_fp8: bool) -> None:
    if not groups:
        page.add_heading("No tensors share a scale")
        return
    if is_fp8:
        page.add_heading(f"Scale groups: {len(groups)}; sharing a scale costs FP8 no precision")
        return
    ranked = sorted(groups, key=lambda group: -_max_loss([group]))
    listed = ranked
    if not page.everything:
        listed = [g for g in ranked[:_MAX_GROUPS] if _max_loss([g]) >= _MIN_BITS_LOST]
    rest = ranked[len(listed) :]
    if not listed:
        page.add_heading(
            f"Scale groups: {len(groups)}; sharing a scale costs no tensor more than "
            f"{_max_loss(rest):.1f} bits (--all)"
        )
        return
    page.add_heading(
        f"Scale groups ({len(groups)}): Concat, Split, MaxPool, Resize and the like tie these "
        "tensors to one scale; bits of precision lost by sharing it (below zero: clipped sooner)"
    )
    for group in listed:
        # Adding 0.0 turns -0.0 into 0.0.
        members = ", ".join(f"{m.tensor} {round(m.bits_lost, 1) + 0.0:+.1f}" for m in group.members)
        page.fill(f"scale {group.scale:.4g}: {members}", 4, "  - ")
    if rest:
        page.fill(
            f"and {len(rest)} more, where no tensor loses more than {_max_loss(rest):.1f} bits "
            "(--all)",
            4,
            "    ",
        )


def _max_loss(groups: Iterable[GroupScale]) -> float:
    return max((m.bits_lost for group in groups for m in group.members), default=0.0)


def _add_losses(page: TextPage, insertion: Insertion) -> None:
    """Add the output error, and the activations that contribute most to it."""
    losses = insertion.losses
    if losses is None:
        return
    rating = next((text for limit, text in _ERROR_RATINGS if losses.error < limit), "much")
    advice = "" if losses.error < SMALL_ERROR else ". Measure the results: qdqtool compare --calib"
    page.add_heading(
        f"Output error on {format_count(losses.samples, 'image')}: {losses.error:.1%} of the "
        f"outputs' standard deviation ({rating}){advice}"
    )
    if not losses.tried:
        page.fill(
            f"single activations were not tried (--losses {losses.samples} tries them)", 2, "  "
        )
        return
    confirmed = [loss for loss in losses.tensors if loss.confirmed]
    if not confirmed:
        page.fill(_describe_unconfirmed(losses), 2, "  ")
    title = _title(insertion)
    for loss in losses.tensors if page.everything else confirmed:
        page.fill(f"{_describe_loss(loss)}{_describe_price(loss, title)}", 4, "  - ")
    for loss in confirmed[:1]:
        # The option on one line, to be pasted.
        page.add_lines(f"    the first one float: --exclude {_exclude_pattern(loss)}")


def _describe_unconfirmed(losses: ActivationLosses) -> str:
    """Describe why no activation is proposed to be float."""
    tried = f"{losses.tried} tried on {format_count(losses.trial_samples, 'image')}"
    seen = [loss for loss in losses.tensors if loss.gain >= MIN_GAIN]
    if not seen or any(loss.confirmed_on for loss in seen):
        return f"no single activation in FP16 reliably reduces it by {MIN_GAIN:.0%} ({tried})"
    return f"too few images to say which activation costs most ({tried}; --losses 16 tries more)"


def _describe_loss(loss: TensorLoss) -> str:
    nodes = ", ".join(loss.readers)
    if loss.confirmed_gain is None:
        return f"input of {nodes} float: {-loss.gain:+.0%} error, not confirmed"
    reliable = "" if loss.confirmed else ", which may be chance"
    images = format_count(loss.confirmed_on, "image")
    return f"input of {nodes} float: {-loss.confirmed_gain:+.0%} error on {images}{reliable}"


def _describe_price(loss: TensorLoss, title: str) -> str:
    if loss.convolutions is None:
        return ""
    price = f"; costs {format_count(loss.convolutions, f'{title} layer')}"
    return (
        price if loss.conversions is None else f"{price}, {_format_conversions(loss.conversions)}"
    )


def _exclude_pattern(loss: TensorLoss) -> str:
    names = [re.escape(name).replace(r"\-", "-") for name in loss.readers]
    pattern = f"^{names[0]}$" if len(names) == 1 else f"^({'|'.join(names)})$"
    return shlex.quote(pattern)


def _format_conversions(change: int) -> str:
    return f"{change:+d} conversion" if abs(change) == 1 else f"{change:+d} conversions"


def _add_remarks(page: TextPage, notes: Iterable[str], warnings: Iterable[str]) -> None:
    for kind, texts in (("note", notes), ("warning", warnings)):
        for text in texts:
            page.fill(f"{kind}: {as_options(text)}")


def _add_prediction(page: TextPage, prediction: Prediction) -> None:
    """Add the verdict and the conversions that remain."""
    page.add_heading(f"Predicted for {prediction.target}: {verdict(prediction)}")
    for name in page.iterate_rows(prediction.conversion_nodes, _MAX_CONVERSIONS, "    "):
        page.add_lines(f"  - conversion at {name}")


def render_fixed(fixed: Fixed, output: str, width: int) -> TextPage:
    """Return the text of ``fix``: verdicts before and after, applied and refused changes."""
    page = TextPage(width)
    count = len(fixed.applied)
    page.add_lines(f"{count} fix{'' if count == 1 else 'es'} applied, written to {output}")
    page.fill(verdict(fixed.before), 10, "  before  ")
    page.fill(verdict(fixed.after), 10, "  after   ")
    _add_errors(page, fixed)
    for note in fixed.notes:
        page.fill(as_options(note), 10, "  note    ")
    _add_changes(page, "Applied", fixed.applied)
    _add_changes(page, "Not applied", fixed.refused)
    counts = fixed.after.findings_by_code()
    serious = dict.fromkeys(f.code for f in fixed.after.findings if f.severity != "info")
    if serious:
        remaining = ", ".join(f"{code} ({counts[code]})" for code in serious)
        page.add_heading(f"left: {remaining}; see qdqtool predict {output}")
    return page


def _add_errors(page: TextPage, fixed: Fixed) -> None:
    """Add the distance of each output from the float network's, before and after."""
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
        for change in page.iterate_rows(same, _MAX_FIXES, "      ", ""):
            page.fill(change.what, 6, "    - ")
