"""The result of ``fix`` as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.render.output import wrap
from qdqtool.render.predict_text import verdict
from qdqtool.text import as_text

if TYPE_CHECKING:
    from qdqtool.fixing.api import Change, Fixed

_SHOWN = 4


def render(fixed: Fixed, output: str, width: int) -> str:
    """What was done, what was not and why, and the verdict before and after."""
    count = len(fixed.applied)
    lines = [f"{count} fix{'' if count == 1 else 'es'} applied, written to {output}"]
    lines += wrap(verdict(fixed.before), 10, width, f"  {'before':<8}")
    lines += wrap(verdict(fixed.after), 10, width, f"  {'after':<8}")
    if fixed.noise_before is not None and fixed.noise_after is not None:
        lines += wrap(
            f"{fixed.noise_before:.2%} from the float network before, {fixed.noise_after:.2%} after (root mean square)",
            10, width, f"  {'outputs':<8}",
        )
    lines += [line for note in fixed.notes for line in wrap(note, 10, width, f"  {'note':<8}")]
    lines += _changes("Applied", fixed.applied, width)
    lines += _changes("Not applied", fixed.refused, width)
    left = fixed.after.findings_by_code()
    serious = {f.code: None for f in fixed.after.findings if f.severity != "info"}
    if serious:
        lines += ["", *wrap(
            "left: " + ", ".join(f"{code} ({left[code]})" for code in serious) + "; see qdqtool predict " + output,
            2, width, "",
        )]
    return as_text(lines)


def _changes(title: str, changes: Iterable[Change], width: int) -> list[str]:
    lines: list[str] = []
    for (code, why_not), group in itertools.groupby(
        sorted(changes, key=lambda c: (c.code, c.why_not)), key=lambda c: (c.code, c.why_not)
    ):
        same = list(group)
        lines += wrap(f"{code} ({len(same)})" + (f": {why_not}" if why_not else ""), 4, width, "  ")
        for change in same[:_SHOWN]:
            lines += wrap(change.what, 6, width, "    - ")
        if len(same) > _SHOWN:
            lines.append(f"      and {len(same) - _SHOWN} more")
    return ["", title, *lines] if lines else []
