"""A command's answer: its lines, where it goes, text or JSON; parameters of the library as options."""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, TypeVar

from qdqtool.errors import QdqtoolError
from qdqtool.util.outputs import write_text
from qdqtool.util.process import silence_stdout, terminal_columns
from qdqtool.util.text import as_line, as_text, escape_hidden, escape_unencodable

MIN_WIDTH, MAX_WIDTH = 60, 120
# What a line of an answer begins with, and how a terminal shows it: SGR codes of ECMA-48.
_LOOKS = (
    ("ERROR ", "1;31"),
    ("warning", "1;33"),
    ("note", "1;36"),
    ("  > ", "32"),
    ("    > ", "32"),
)
_BOLD = "1"
_Row = TypeVar("_Row")


def emit(text: str, output: str | None) -> None:
    """Writes an answer to a file (atomically), or to stdout; control characters are written as escapes.

    Raises:
        QdqtoolError: The file cannot be written, or stdout is closed.
    """
    text = escape_hidden(text if text.endswith("\n") else text + "\n")
    if output:
        write_text(output, text)
        return
    if sys.stdout is None:
        raise QdqtoolError(
            "standard output is closed: the answer cannot be printed", code="not-written"
        )
    text = escape_unencodable(text, sys.stdout)
    try:
        if in_colour(sys.stdout) and not text.startswith(("{", "[")):  # JSON stays as it is
            getattr(sys.stdout, "unfiltered", sys.stdout).write(coloured(text))  # filtered above
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on (| head): the exit code still says what was found
        silence_stdout()


def in_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colour, and nobody asked for none (``NO_COLOR``)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """The text for a terminal: findings by severity, what to do green, the verdict and headings bold."""
    return "\n".join(
        re.sub(r"(\S.*)", rf"\033[{look}m\1\033[0m", line, count=1) if look else line
        for line, look in _looks(text.split("\n"))
    )


def _looks(lines: list[str]) -> Iterator[tuple[str, str]]:
    look = ""
    before = ""
    for line in lines:
        marked = next((code for start, code in _LOOKS if line.startswith(start)), None)
        if marked is not None:
            look = marked
        elif not line.startswith("    ") or line.startswith(
            "    - "
        ):  # else it goes on with the line above
            look = _BOLD if line and not line.startswith(" ") and not before else ""
        yield line, look
        before = line


def to_json(data: Any) -> str:
    """JSON text as all commands print it; control characters of any kind are escaped."""
    from qdqtool.util.json_text import json_text

    return escape_hidden(json_text(data))


def terminal_width() -> int:
    """Columns to write for: the terminal's (or ``COLUMNS``), 80 where there is none."""
    return max(MIN_WIDTH, min(MAX_WIDTH, terminal_columns()))


def wrap(text: str, indent: int, width: int, first: str | None = None) -> list[str]:
    """Lines of a paragraph, indented, its parameters as options; names are never cut in two.

    ``first`` is in front of the first line instead of spaces.
    """
    pad = " " * indent
    return textwrap.wrap(
        as_line(as_options(text)),
        width,
        initial_indent=pad if first is None else first,
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Page:
    """The lines of an answer, filled up to a width; names are never cut in two.

    Args:
        width: Columns.
        everything: Whether lists are written to their ends.
    """

    def __init__(self, width: int = 80, everything: bool = False) -> None:
        self.width, self.everything = width, everything
        self.lines: list[str] = []

    def line(self, *lines: str) -> None:
        """Lines as they are."""
        self.lines += lines

    def fill(self, text: str, indent: int = 2, first: str = "") -> None:
        """A paragraph: ``first`` is in front of its first line, ``indent`` spaces in front of the others."""
        self.lines += wrap(text, indent, self.width, first)

    def gap(self) -> None:
        """An empty line between what was written and what follows."""
        if self.lines:
            self.lines.append("")

    def heading(self, text: str) -> None:
        """The same, and a paragraph."""
        self.gap()
        self.fill(text)

    def shown(self, rows: Sequence[_Row], limit: int) -> Sequence[_Row]:
        """The first rows, or all where everything is asked for."""
        return rows if self.everything else rows[:limit]

    def each(
        self, rows: Sequence[_Row], limit: int, lead: str = "  ... ", hint: str = " (--all)"
    ) -> Iterator[_Row]:
        """The rows, the first ``limit`` unless everything is asked for; how many are left out is a line behind them."""
        yield from self.shown(rows, limit)
        if len(rows) > limit and not self.everything:
            self.line(f"{lead}and {len(rows) - limit} more{hint}")

    def __str__(self) -> str:
        return as_text(self.lines)


# Parameters as options ----------------------------------------------------------------------------------------------


_NOTE_FIELDS = ("skipped", "refused", "notes", "warnings")  # fields of an answer
_NAME_FIELDS = ("node", "nodes", "tensor", "tensors", "name")  # they hold names of the model
_OPTION_NAMES = {"data": "calib", "evaluation": "eval"}  # where they differ from the parameter
# Parameters that messages mention. Other words in backticks are those of a model or a compiler.
_PARAMETERS = """
    activation assume attention batch bgr budget_ms builder calib_cache calib_table calibrate check
    check_timeout clock cluster data dot effort evaluation exclude exclude_op finding gpu head
    high_precision hops include input_type inputs issue keep layers limit losses max_images mean method
    method_for metric minimize mixed_cpus node other output outputs overwrite_cache percentile power
    predict private profile require_gain required residual resize save_calibration scale says shapes size sm smooth
    state std strongly_typed target time_limit timeout tuning unify weights workers
""".split()
_PARAMETER = re.compile(rf"`({'|'.join(_PARAMETERS)})(?:=([^`]*))?`")


def as_options(text: str) -> str:
    """Spell the parameters in a message as options: ``--exclude`` for `exclude` in backticks."""
    return _PARAMETER.sub(lambda match: _option(match[1], match[2] or ""), text)


def _option(name: str, value: str) -> str:
    option = _OPTION_NAMES.get(name, name).replace("_", "-")
    if value == "False":
        return f"--no-{option}"
    return f"--{option} {value.strip(chr(39))}" if value else f"--{option}"


def worded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as JSON whose notes, warnings and reasons name options, not parameters."""
    return {
        **answer,
        **{name: _all_as_options(answer[name]) for name in _NOTE_FIELDS if name in answer},
    }


def _all_as_options(data: Any) -> Any:
    if isinstance(data, str):
        return as_options(data)
    if isinstance(data, list):
        return [_all_as_options(d) for d in data]
    if isinstance(data, dict):
        return {k: v if k in _NAME_FIELDS else _all_as_options(v) for k, v in data.items()}
    return data
