"""Output of commands: text, JSON, colors, line width, and parameters written as options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO, TypeVar

from qdqtool.errors import QdqtoolError
from qdqtool.formats.wrapping import shorten_indent, wrap_words
from qdqtool.reasons.finding import Severity
from qdqtool.util.files import write_text
from qdqtool.util.process import silence_stdout, terminal_columns
from qdqtool.util.text import as_line, as_text, escape_hidden, escape_unencodable

MIN_WIDTH, MAX_WIDTH = 60, 120
ROW_COLUMN = 19  # where the texts of rows start; the longest labels have 15 characters
_OPTION = re.compile(r"--?[a-z][a-z-]*")  # an option without its argument
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""")
# Indent, option with a value, and end of a line of a command.
_OPTION_LINE = re.compile(r"( *)('?--\w+=.+?)((?: \\)?)")
_Row = TypeVar("_Row")


class Style(StrEnum):
    """Color and weight of a line. The value is the parameter of an SGR escape code (ECMA-48)."""

    PLAIN = ""
    BOLD = "1"
    GOOD = "1;32"
    UNCLEAR = "1;33"
    BAD = "1;31"
    NOTE = "1;36"
    COMMAND = "32"


SEVERITY_STYLES = {
    Severity.ERROR: Style.BAD,
    Severity.WARNING: Style.UNCLEAR,
    Severity.INFO: Style.NOTE,
}


def emit(answer: str | TextPage, output: str | None) -> None:
    """Write a result to a file (atomically) or to stdout, with control characters escaped.

    A :class:`TextPage` is colored if stdout supports colors, see :func:`supports_color`.

    Raises:
        QdqtoolError: The file cannot be written, or stdout is closed.
    """
    text = str(answer)
    text = escape_hidden(text if text.endswith("\n") else text + "\n")
    if output:
        write_text(output, text)
        return
    if sys.stdout is None:
        raise QdqtoolError(
            "standard output is closed: the result cannot be printed; give `output`, or open "
            "standard output",
            code="not-written",
        )
    try:
        if isinstance(answer, TextPage) and supports_color(sys.stdout):
            # The text is already escaped. The filter of stdout would also escape the color codes.
            stream = getattr(sys.stdout, "unfiltered", sys.stdout)
            stream.write(escape_unencodable(answer.colored(), sys.stdout))
        else:
            sys.stdout.write(escape_unencodable(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe (such as head) has ended
        silence_stdout()


def supports_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colors, and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def to_json(data: Any) -> str:
    """Return the JSON text that commands print, with control characters escaped."""
    from qdqtool.util.json_text import json_text

    return escape_hidden(json_text(data))


def terminal_width() -> int:
    """Return the width of the terminal or ``COLUMNS``, limited to 60 to 120 columns."""
    return max(MIN_WIDTH, min(MAX_WIDTH, terminal_columns()))


def wrap(text: str, indent: int, width: int, first: str | None = None) -> list[str]:
    """Wrap a paragraph between words, and write parameters in backticks as options.

    Args:
        text: The paragraph.
        indent: Number of spaces before each line.
        width: Columns.
        first: Text in place of the spaces before the first line. None: spaces.
    """
    return wrap_words(as_line(as_options(text)), width, indent, first)


def wrap_command(command: str, width: int, first: str, indent: int = 4) -> list[str]:
    """Wrap a shell command with backslashes, so that it can be pasted.

    A line does not end between ``>`` and its file, nor between an option and its argument if both
    fit in a line. An option whose value is a long list (``--layerPrecisions``) is broken after
    commas.
    """
    words: list[str] = []
    for word in _SHELL_WORD.findall(as_line(command)):
        if words and _belongs_to(word, words[-1], width):
            words[-1] += f" {word}"
        else:
            words.append(word)
    lines = _fill_lines(words, width, first, indent, "\\")
    return [row for line in lines for row in _break_list(line, width)]


def _break_list(line: str, width: int) -> list[str]:
    """Break the list of an option after commas, if the line is too long.

    The shell joins the rows to one word, so only the first row is indented.
    """
    option = _OPTION_LINE.fullmatch(line)
    if len(line) <= width or option is None:
        return [line]
    indent, word, end = option.groups()
    rows = [""]
    for part in re.findall(r"[^,]*,|[^,]+$", "".join(shlex.split(word))):
        if rows[-1] and len(indent) + len(shlex.quote(rows[-1] + part)) + 2 > width:
            rows.append("")
        rows[-1] += part
    text = "\\\n".join(map(shlex.quote, rows))
    return f"{indent}{text}{end}".split("\n")


def wrap_call(call: str, width: int) -> list[str]:
    """Wrap a Python call with its arguments on indented lines, so that it can be pasted."""
    function, _, arguments = as_line(call).removesuffix(")").partition("(")
    words = _SHELL_WORD.findall(arguments)
    if max(map(len, words)) > width:
        words = _SHELL_WORD.findall(arguments.replace("=['", "=[ '"))
    return [f"{function}(", *_fill_lines(words, width, "    ", 4, ""), ")"]


def _fill_lines(
    words: Iterable[str], width: int, first: str, indent: int, line_end: str
) -> list[str]:
    """Return lines of words.

    Args:
        words: The words, which are not broken.
        width: Columns.
        first: Start of the first line.
        indent: Number of spaces before each other line.
        line_end: Text after each line but the last.
    """
    lines: list[str] = []
    line = first
    for word in words:
        if len(line) + len(word) + 2 > width and line.strip() and line != first:
            lines.append(f"{line}{line_end}".rstrip())
            line = " " * indent
        line += f"{word} "
    lines.append(line.rstrip())
    rest = [x for row in lines[1:] for x in shorten_indent(row, indent, width)]
    return shorten_indent(lines[0], len(first), width) + rest


def _belongs_to(word: str, previous: str, width: int) -> bool:
    if previous == ">":
        return True
    is_argument = _OPTION.fullmatch(previous) and not word.startswith(("-", ">", "2>"))
    return bool(is_argument) and len(previous) + len(word) + 3 <= width


class TextPage:
    """Lines of text, wrapped to a width. Each line has a style.

    Args:
        width: Columns.
        everything: Whether lists are printed in full (``--all``).
    """

    def __init__(self, width: int = 80, everything: bool = False) -> None:
        self.width, self.everything = width, everything
        self.lines: list[str] = []
        self.styles: list[Style] = []

    def add_lines(self, *lines: str, style: Style = Style.PLAIN) -> None:
        """Add lines. A line that is too long for the page is continued below, indented."""
        for line in lines:
            indent = len(line) - len(line.lstrip(" "))
            rows = [line]
            if len(line) > self.width:
                rows = wrap_words(as_line(line[indent:]), self.width, indent + 4, " " * indent)
            self.add_verbatim(*rows, style=style)

    def add_verbatim(self, *lines: str, style: Style = Style.PLAIN) -> None:
        """Add lines as they are."""
        self.lines += lines
        self.styles += [style] * len(lines)

    def fill(self, text: str, indent: int = 2, first: str = "", style: Style = Style.PLAIN) -> None:
        """Add a paragraph, with `first` before its first line and `indent` spaces before others."""
        self.add_verbatim(*wrap(text, indent, self.width, first), style=style)

    def add_gap(self) -> None:
        """Add an empty line, unless the page is empty or ends with an empty line."""
        if self.lines and self.lines[-1]:
            self.add_lines("")

    def add_heading(self, text: str) -> None:
        """Add an empty line (see :meth:`add_gap`) and a bold paragraph."""
        self.add_gap()
        self.fill(text, style=Style.BOLD)

    def add_row(self, label: str, text: str, column: int = ROW_COLUMN) -> None:
        """Add a label, and a text that starts at a column."""
        self.fill(text, column, f"  {label} ".ljust(column))

    def add_row_item(self, text: str) -> None:
        """Add a list item below the text of a row."""
        self.fill(text, ROW_COLUMN + 2, f"{'':{ROW_COLUMN}}- ")

    def add_command(self, label: str, command: str) -> None:
        """Add a label, and a shell command that can be pasted."""
        first = f"{label} ".ljust(9) if label else "  "
        lines = wrap_command(command, self.width, first, len(first) + 2)
        self.add_verbatim(*lines, style=Style.COMMAND)

    def add_page(self, other: TextPage) -> None:
        """Add the lines of another page."""
        self.lines += other.lines
        self.styles += other.styles

    def first_rows(self, rows: Sequence[_Row], limit: int) -> Sequence[_Row]:
        """Return the first `limit` rows, or all rows if `everything` is set."""
        return rows if self.everything else rows[:limit]

    def iterate_rows(
        self, rows: Sequence[_Row], limit: int, lead: str = "  ... ", hint: str = " (--all)"
    ) -> Iterator[_Row]:
        """Yield the rows to print. Then add a line with the number of omitted rows, if any."""
        yield from self.first_rows(rows, limit)
        if len(rows) > limit and not self.everything:
            self.add_lines(f"{lead}and {len(rows) - limit} more{hint}")

    def __str__(self) -> str:
        return as_text(self.lines)

    def colored(self) -> str:
        """Return the text with color codes."""
        return "".join(
            f"{_add_style(as_line(line), style)}\n"
            for line, style in zip(self.lines, self.styles, strict=True)
        )


def _add_style(line: str, style: Style) -> str:
    text = line.lstrip(" ")
    if not style or not text:
        return line
    return f"{line[: len(line) - len(text)]}\033[{style}m{text}\033[0m"


# Parameters as options ----------------------------------------------------------------------------

# JSON fields that contain messages
_NOTE_FIELDS = ("skipped", "refused", "notes", "warnings", "findings", "sites")
# JSON fields that contain names of the model
_NAME_FIELDS = ("node", "nodes", "tensor", "tensors", "name", "site", "convolutions", "values")
# Options whose names differ from those of the parameters, by parameter.
_OPTION_NAMES = {"data": "calib", "evaluation": "eval", "way": "for", "whole_front": "front"}
# Parameters that messages name. Other words in backticks are from a model or a compiler.
_PARAMETERS = """
    activation assume attention batch bgr budget_ms builder calib_cache calib_table calibrate check
    check_timeout clock cluster data dot effort evaluation exclude exclude_op finding gpu head
    high_precision hops include input_type inputs issue keep layers limit losses max_images mean
    method method_for metric minimize mixed_cpus no_fp16 node only other output outputs
    overwrite_cache percentile power precision predict preprocess private profile require_gain
    required residual resize save_calibration scale says shapes size sm smooth state std
    strongly_typed target time_limit timeout tuning unify way weights whole_front workers
""".split()
_PARAMETER = rf"`({'|'.join(_PARAMETERS)})(?:=([^`]*))?`"


def as_options(text: str) -> str:
    """Write parameters in backticks as options: ``--exclude`` instead of `exclude`."""
    if "`" not in text:
        return text
    return re.sub(_PARAMETER, lambda match: _format_option(match[1], match[2] or ""), text)


def _format_option(name: str, value: str) -> str:
    option = _OPTION_NAMES.get(name, name).replace("_", "-")
    if value == "False":
        return f"--no-{option}"
    return f"--{option} {shlex.quote(value.strip(chr(39)))}" if value else f"--{option}"


def fixed_model_path(path: str) -> str:
    """Return the path to suggest for ``fix -o``: ``a_fixed.onnx``, then ``a_fixed_2.onnx``.

    The number is separate, because digits after ``fixed`` may be a version: ``a_fixed86_2.onnx``.
    """
    file = Path(path)
    match = re.fullmatch(r"(.*fixed\d*)(?:_(\d+))?", file.stem)
    if match is None:
        return str(file.with_name(f"{file.stem}_fixed.onnx"))
    return str(file.with_name(f"{match[1]}_{int(match[2] or 1) + 1}.onnx"))


def use_option_names(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object with option names in place of parameters in its messages."""
    notes = {name: _replace_parameters(answer[name]) for name in _NOTE_FIELDS if name in answer}
    return answer | notes


def _replace_parameters(data: Any) -> Any:
    if isinstance(data, str):
        return as_options(data)
    if isinstance(data, list):
        return [_replace_parameters(d) for d in data]
    if isinstance(data, dict):
        return {k: v if k in _NAME_FIELDS else _replace_parameters(v) for k, v in data.items()}
    return data
