"""Tables in pages, between two markers that the script which writes them knows."""

from __future__ import annotations

import sys
from pathlib import Path


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between the markers; exits where the page has none."""
    before, mark, rest = page.read_text("utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        sys.exit(f"{page}: has no '{begin}' ... '{end}'")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")
