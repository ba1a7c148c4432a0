"""Where a command's answer goes: text or JSON, to stdout or a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from typing import Any

from qdqtool.files import write_text

MIN_WIDTH, MAX_WIDTH = 60, 120


def emit(text: str, output: str | None) -> None:
    """Writes an answer to a file (atomically), or to stdout.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    text = text if text.endswith("\n") else text + "\n"
    if output:
        write_text(output, text)
    else:
        # A file name need not be UTF-8, nor the terminal; in JSON the replacement is an escape that means the same.
        encoding = sys.stdout.encoding or "utf-8"
        try:
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads on (| head): the exit code still says what was found
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_json(data: Any) -> str:
    """JSON text as all commands print it."""
    return json.dumps(data, indent=1, ensure_ascii=False)


def terminal_width() -> int:
    """Columns to write for: the terminal's (or ``COLUMNS``), 80 where there is none."""
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns))


def wrap(text: str, indent: int, width: int, first: str | None = None) -> list[str]:
    """Lines of a paragraph, indented; names are never cut in two.

    Args:
        text: One paragraph.
        indent: Spaces in front of each line.
        width: Columns.
        first: What stands in front of the first line instead of spaces.
    """
    pad = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=pad if first is None else first, subsequent_indent=pad,
        break_long_words=False, break_on_hyphens=False,
    )
