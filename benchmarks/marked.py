"""Tables of scripts: rows that are kept as they are measured, and pages between two markers that the script knows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between the markers; exits where the page has none."""
    before, mark, rest = page.read_text("utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        sys.exit(f"{page}: has no '{begin}' ... '{end}'")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def write_rows(file: Path | None, rows: Sequence[Any]) -> None:
    """Writes dataclasses as a JSON list; nothing where no file was named."""
    if file is not None:
        file.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")


def publish(rows: Sequence[Any], text: str, file: Path | None, page: Path | None, begin: str, end: str) -> None:
    """Prints a table; where they are named, writes its rows to a JSON file and itself between the markers of a page."""
    print(text)
    write_rows(file, rows)
    if page is not None:
        replace_between(page, begin, end, text)


def kept_rows(
    names: Iterable[str], file: Path | None, measure: Callable[[str], dict[str, Any]], told: str = ""
) -> dict[str, Any]:
    """The rows of a JSON file and those of the names that it lacks, each written as soon as it is measured."""
    found: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    for name in names:
        if name in found:
            continue
        found[name] = measure(name)
        if file is not None:
            file.write_text(json.dumps(found, indent=1))
        print(f"{told}{name}: {found[name]}", file=sys.stderr, flush=True)
    return found
