"""Where a command's answer goes: text or JSON, to stdout or a file."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

from qdqtool.errors import QdqtoolError
from qdqtool.outputs import commit, write_text
from qdqtool.process import silence_stdout
from qdqtool.text import as_line, visible

MIN_WIDTH, MAX_WIDTH = 60, 120


def emit(text: str, output: str | None) -> None:
    """Writes an answer to a file (atomically), or to stdout; control characters are written as escapes.

    What the command wrote before gets its name first: the answer may say that it is there.

    Raises:
        QdqtoolError: The file cannot be written, or stdout is closed.
    """
    text = visible(text if text.endswith("\n") else text + "\n")
    if output:
        write_text(output, text)
        return
    commit()
    if sys.stdout is None:
        raise QdqtoolError("standard output is closed: the answer cannot be printed")
    # A file name need not be UTF-8, nor the terminal; in JSON the replacement is an escape that means the same.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on (| head): the exit code still says what was found
        silence_stdout()


def to_json(data: Any) -> str:
    """JSON text as all commands print it; control characters of any kind are escaped."""
    from qdqtool.jsontext import json_text

    return visible(json_text(data))


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
        as_line(text), width, initial_indent=pad if first is None else first, subsequent_indent=pad,
        break_long_words=False, break_on_hyphens=False,
    )
