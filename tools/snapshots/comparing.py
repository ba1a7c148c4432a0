"""Compare two records, and show the differences between stored JSON files."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.snapshots.recording import Record, kept_name

_SHOWN = 3  # maximum number of differences of one entry
_WIDTH = 70  # maximum number of characters of one value


@dataclass
class Comparison:
    """Differences between two records.

    Attributes:
        data: Entries in which not only texts differ.
        texts: Entries in which only texts or the names of qdqtool's tensors differ.
        before_only: Entries that only the first record has.
        after_only: Entries that only the second record has.
        inputs: Scenarios whose files differ, so that their entries cannot be compared.
        common: Number of entries that both records have.
        notes: Remarks about the comparison.
    """

    data: list[str]
    texts: list[str]
    before_only: list[str]
    after_only: list[str]
    inputs: list[str]
    common: int
    notes: list[str]

    @property
    def differing(self) -> list[str]:
        return [*self.data, *self.texts]

    @property
    def exit_code(self) -> int:
        return int(bool(self.data or self.before_only or self.after_only or self.inputs))

    def describe(self, *kept: Path) -> str:
        """Return the answer as text, with values if two folders have the JSON files."""
        lines = [f"note: {note}" for note in self.notes]
        lines += [f"inputs differ: {name}" for name in self.inputs]
        for title, entries in (
            ("only before", self.before_only),
            ("only after", self.after_only),
            ("texts", self.texts),
            ("data", self.data),
        ):
            for entry in entries:
                lines.append(f"{title}: {entry}")
                if kept and title in ("texts", "data"):
                    lines += _kept_differences(
                        entry, *kept, form="data" if title == "data" else "full"
                    )
        if self.data:
            groups = Counter(entry.partition("/")[0] for entry in self.data)
            lines.append("data by group: " + ", ".join(f"{g} {n}" for g, n in groups.most_common()))
        lines.append(
            f"{self.common} entries: {len(self.data)} differ in data, {len(self.texts)} in texts alone"
        )
        return "\n".join(lines)


def compare(before: Record, after: Record) -> Comparison:
    """Compare the entries of two records.

    If the records have different scopes, only the entries that both records have are compared.
    """
    notes = []
    if before.versions != after.versions:
        notes.append(f"the versions differ: {before.versions} and {after.versions}")
    common = [entry for entry in before.entries if entry in after.entries]
    inputs = sorted(n for n, h in before.inputs.items() if after.inputs.get(n, h) != h)
    compared = [entry for entry in common if entry.partition("|")[0] not in inputs]
    only: list[list[str]] = [[], []]
    if before.scope == after.scope:
        only = [
            sorted(set(one.entries) - set(other.entries))
            for one, other in ((before, after), (after, before))
        ]
    else:
        notes.append(
            f"the scopes differ ({before.scope}; {after.scope}): only the {len(common)} common "
            "entries are compared"
        )
    return Comparison(
        data=[e for e in compared if before.entries[e][0] != after.entries[e][0]],
        texts=[
            e
            for e in compared
            if before.entries[e][0] == after.entries[e][0]
            and before.entries[e][1] != after.entries[e][1]
        ],
        before_only=only[0],
        after_only=only[1],
        inputs=inputs,
        common=len(common),
        notes=notes,
    )


def _kept_differences(entry: str, before: Path, after: Path, form: str) -> list[str]:
    paths = [folder / kept_name(entry) for folder in (before, after)]
    if not all(path.exists() for path in paths):
        return []
    contents = [json.loads(path.read_text(encoding="utf-8"))[form] for path in paths]
    found = list(differences(*contents))
    lines = [f"    {path}: {_short(a)} -> {_short(b)}" for path, a, b in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"    and {len(found) - _SHOWN} more")
    return lines


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values for each place where two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            place = f"{path}.{key}"
            if key not in before or key not in after:
                yield place, before.get(key, "(missing)"), after.get(key, "(missing)")
            else:
                yield from differences(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path} (length)", len(before), len(after)
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{path}[{number}]")
    elif before != after or type(before) is not type(after):
        yield path, before, after


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
