"""An insertion as text for a terminal: what was quantized, what was left float and why, what TensorRT makes of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from qdqtool.render.output import as_options, wrap
from qdqtool.text import as_text
from qdqtool.types import Prediction, SkippedNode

if TYPE_CHECKING:
    from qdqtool.insertion.losses import Losses
    from qdqtool.insertion.result import Insertion
    from qdqtool.insertion.scales import GroupScale

_NAMED = 3  # node names listed for one reason, unless everything is asked for
_GROUPS = 3
_REPORTED = 1.5  # bits lost from which a group is listed
_CONVERSIONS = 8


def render(insertion: Insertion, width: int = 80, *, everything: bool = False) -> str:
    """The whole answer; ``everything`` names every node, group and scale."""
    lines = _quantized(insertion, width)
    lines += _skipped(insertion.skipped, width, everything)
    lines += _groups(insertion.groups, width, everything)
    lines += _losses(insertion.losses, width)
    lines += _agreement(insertion, width)
    for note in (*insertion.notes, *insertion.calibration.get("notes", ())):
        lines += wrap(f"note: {as_options(note)}", 2, width, "")
    for warning in (*insertion.warnings, *insertion.calibration.get("warnings", ())):
        lines += wrap(f"warning: {as_options(warning)}", 2, width, "")
    if everything:
        lines += ["", "Activation scales", *_scales(insertion)]
    if insertion.prediction is not None:
        lines += ["", *predicted(insertion.prediction, width, everything)]
    return as_text(lines)


def _quantized(insertion: Insertion, width: int) -> list[str]:
    activations, weights = insertion.activations, insertion.weights
    methods = ", ".join(f"{m} {n}" for m, n in Counter(q.method for q in activations).most_common())
    channels = sum(isinstance(q.scale, list) for q in weights)
    detail = "per output channel" if channels == len(weights) else f"{channels} of them per output channel"
    text = f"quantized {len(activations)} activations ({methods}) and the weights of {len(weights)} nodes ({detail})"
    lines = wrap(text, 2, width, "")
    images = insertion.calibration.get("images", 0)
    origin = f"{images} images" if images else f"the table {insertion.calibration.get('table', '')}"
    lines += wrap(f"ranges from {origin}; for {insertion.target}", 2, width)
    return lines


def _skipped(skipped: list[SkippedNode], width: int, everything: bool) -> list[str]:
    if not skipped:
        return []
    by_reason: dict[str, list[str]] = {}
    for node in skipped:
        by_reason.setdefault(as_options(node.reason), []).append(node.node)
    lines = ["", f"Left float ({len(skipped)} nodes)" if len(skipped) > 1 else "Left float (1 node)"]
    for reason, names in by_reason.items():
        shown = names if everything else names[:_NAMED]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        lines += wrap(f"{reason}: {', '.join(shown)}{more}", 4, width, "  - ")
    return lines


def _groups(groups: list[GroupScale], width: int, everything: bool) -> list[str]:
    if not groups:
        return ["", "No tensors share a scale"]
    lines = [""]
    lines += wrap(
        f"Scale groups ({len(groups)}): Concat, Split, MaxPool, Resize and the like tie these tensors to one scale; "
        "bits of precision that each loses by sharing it (below zero: it is clipped sooner)", 2, width, "",
    )  # fmt: skip
    ranked = sorted(groups, key=lambda g: -max((m.bits_lost for m in g.members), default=0.0))
    shown = ranked if everything else [g for g in ranked[:_GROUPS] if any(m.bits_lost >= _REPORTED for m in g.members)]
    for group in shown:
        members = ", ".join(f"{m.tensor} {round(m.bits_lost, 1) + 0.0:+.1f}" for m in group.members)
        lines += wrap(f"scale {group.scale:.4g}: {members}", 4, width, "  - ")
    rest = ranked[len(shown):]
    if rest:
        worst = max((m.bits_lost for g in rest for m in g.members), default=0.0)
        more = f"and {len(rest)} more, in which no" if shown else "in them no"
        lines += wrap(f"{more} tensor loses over {worst:.1f} bits (--all)", 4, width)
    return lines


def _losses(losses: Losses | None, width: int) -> list[str]:
    """The activations that cost most, and what each would bring and cost as float."""
    if losses is None or not losses.tensors:
        return []
    samples = f"{losses.samples} sample" + "s" * (losses.samples != 1)
    lines = ["", *wrap(
        f"What limits accuracy: INT8 activations move the head's outputs by {losses.error:.1%} of their spread "
        f"({samples}). How much less it would be with one of them float ({losses.tried} tried, those with the largest "
        "error of their own)",
        2, width, "",
    )]  # fmt: skip
    for loss in losses.tensors:
        less = f"{loss.gain:.1%} less"
        price = ""
        if loss.convolutions is not None:
            more = loss.conversions
            conversions = "" if more is None else f", {more:+d} conversion{'s' * (abs(more) != 1)}"
            price = f"; {loss.convolutions} fewer in INT8{conversions}"
        lines += wrap(f"{loss.tensor}: {less}{price}", 4, width, "  - ")
    return lines


def _agreement(insertion: Insertion, width: int) -> list[str]:
    found = insertion.agreement
    if found is None:
        return []
    far = f"by {found.error:.1%} of their spread" if math.isfinite(found.error) else "to values that are no numbers"
    samples = f"{found.samples} sample" + "s" * (found.samples != 1)
    return ["", *wrap(f"Agreement with the float model: INT8 and FP16 together move the outputs {far} ({samples})", 2,
                      width, "")]


def _scales(insertion: Insertion) -> list[str]:
    rows = insertion.activations
    lines = []
    for row in rows:
        group = "" if row.group is None else f"  group {row.group}"
        lines.append(f"  {row.scale:<12.6g} {row.method:<10} {row.tensor}{group}")
    return lines


def predicted(prediction: Prediction, width: int, everything: bool = False) -> list[str]:
    """The verdict on a prediction, and the conversions that stay, by name."""
    from qdqtool.render.predict_text import verdict

    lines = wrap(f"Predicted for {prediction.target}: {verdict(prediction)}", 2, width, "")
    names = prediction.conversion_nodes
    shown = names if everything else names[:_CONVERSIONS]
    lines += [f"  - conversion at {name}" for name in shown]
    if len(names) > len(shown):
        lines.append(f"    and {len(names) - len(shown)} more (--all)")
    return lines
