"""Lines of a log by what they say: memory, performance, profile; the parse section; messages; nothing to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from qdqtool.buildlog.types import (
    MAX_DIMENSION,
    Build,
    LogMessage,
    MemoryUse,
    ParsedNode,
    ParsedTensor,
    ParseSection,
    ProfileRow,
    Shape,
)
from qdqtool.util.tables import read_rows

_LAYER_MEMORY = re.compile(
    r"Layer: .* Host Persistent: \d{1,15}(?: bytes)? Device Persistent: \d{1,15}(?: bytes)? "
    r"Scratch Memory: \d{1,15}(?: bytes)?"
)
_MEMORY_LINES = ("[MemUsageChange]", "[MemUsageStats]", "[MemUsageSnapshot]", "[BlockAssignment]")
_ABOUT_MEMORY = (*_MEMORY_LINES, "Total ", "Max Scratch", "Loaded engine size: ", "Layer: ")
_TOTALS = ("host_persistent", "device_persistent", "scratch", "activation", "weights")
_TOTAL = re.compile(
    r"(?:Total|Max(?= Scratch)) ([A-Z][a-z]+(?: [A-Z][a-z]+)?) Memory: (\d{1,19})(?: bytes)?"
)
_PEAK = re.compile(
    r"\[MemUsageStats\] Peak memory usage of TRT CPU/GPU memory allocators: CPU (\d{1,9}) MiB, GPU (\d{1,9}) MiB"
)
_ENGINE = re.compile(r"Loaded engine size: (\d{1,9}) MiB")
_METRIC = re.compile(
    r"(Throughput|Total Host Walltime|Total GPU Compute Time): ([\d.e+-]{1,20}) (qps|s)"
)
_LATENCY = re.compile(r"([\w-]{1,20}(?: [\w-]{1,20}){0,4}): (min = .*)")
_NAME = re.compile(r"[\w()%.]{1,30}")
_VALUE = re.compile(r" = ([\d.e+-]{1,20}|-?nan|inf) ?(?:ms)?")
_MAX_ROWS = 100_000


def read_memory(memory: MemoryUse, text: str) -> bool:
    """Takes a line about memory; False when it is none."""
    if not text.startswith(_ABOUT_MEMORY):  # as nearly all
        return False
    if match := _TOTAL.fullmatch(text):
        name = match[1].lower().replace(" ", "_")
        if (
            name in _TOTALS
        ):  # printed before and after block assignment: the last one is the engine's
            setattr(memory, name, int(match[2]))
    elif match := _PEAK.fullmatch(text):
        memory.peak_cpu_mib, memory.peak_gpu_mib = int(match[1]), int(match[2])
    elif match := _ENGINE.fullmatch(text):
        memory.engine_mib = int(match[1])
    return (
        match is not None
        or text.startswith(_MEMORY_LINES)
        or _LAYER_MEMORY.fullmatch(text) is not None
    )


def read_metric(performance: dict[str, dict[str, float]], text: str) -> bool:
    """Takes a line of the performance summary; False when it is none."""
    if ": " not in text:
        return False
    if text.startswith("T") and (match := _METRIC.fullmatch(text)):
        if (value := parse_number(match[2])) is not None:
            performance[match[1]] = {"value": value}
        return value is not None
    if ": min = " not in text or (match := _LATENCY.match(text)) is None:
        return False
    values = {name: parse_number(value) for name, value in _find_values(match[2])}
    if len(performance) < 50:
        performance[match[1]] = {name: value for name, value in values.items() if value is not None}
    return bool(values)


def _find_values(text: str) -> Iterator[tuple[str, str]]:
    """``min = 1.5 ms, percentile(99%) = 2 ms``; a name is read from its end, so that a long one costs no more."""
    end, at = 0, text.find(" = ")
    while at >= 0:
        name, value = _NAME.match(text[max(end, at - 30) : at][::-1]), _VALUE.match(text, at)
        if name is not None and value is not None:
            yield name[0][::-1], value[1]
            end = value.end()
        at = text.find(" = ", max(end, at + 1))


def is_profile_head(text: str) -> bool:
    """Whether a line is the head of the profile table, in the spelling to 8.5 or from 8.6 on."""
    return "Layer" in text and ("Time (ms)" in text or "Time(ms)" in text) and "Avg" in text


def read_profile_row(build: Build, text: str) -> bool:
    """Takes a row of the profile table, name first (to 8.5) or last (from 8.6); False when it is none.

    The columns are total, average, median (from 8.4) and percent; the heading says which.
    """
    columns = build.options.setdefault("Profile columns", {})
    for order, word in (("first", "Time (ms)"), ("last", "Time(ms)")):
        if word in text and "Layer" in text:
            columns.update(order=order, median="yes" if "Median" in text else "")
            return True
    if not columns and not _guess_columns(columns, text):
        return False
    count = 4 if columns["median"] else 3
    pieces = text.rsplit(None, count) if columns["order"] == "first" else text.split(None, count)
    name = pieces.pop(0 if columns["order"] == "first" else -1).strip() if pieces else ""
    values = [value for piece in pieces if (value := parse_number(piece)) is not None]
    if len(values) != count:
        return False
    total, average, *rest = values
    if name == "Total":
        build.profile_total_ms = average
    elif len(build.profile_rows) < _MAX_ROWS:
        build.profile_rows.append(
            ProfileRow(name, total, average, rest[0] if count == 4 else None, rest[-1])
        )
    return True


def _guess_columns(columns: dict[str, str], text: str) -> bool:
    """The columns of a row without a head: three or four numbers behind the name, or in front of it."""
    for count in (4, 3):
        for order, pieces in (
            ("first", text.rsplit(None, count)),
            ("last", text.split(None, count)),
        ):
            numbers = pieces[1:] if order == "first" else pieces[:-1]
            if len(pieces) == count + 1 and all(
                "." in p and parse_number(p) is not None for p in numbers
            ):
                columns.update(order=order, median="yes" if count == 4 else "")
                return True
    return False


def parse_number(text: str | bytes) -> float | None:
    """The number that a short text is, None when it is none or not finite."""
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


# The parse section: what the ONNX parser says of each node, enough to rebuild the graph ------------------------------

_NODE = re.compile(r"Parsing node: (.*) ?\[([\w.:]{1,80})\]", re.DOTALL)
_INPUT = "Adding network input: "
_MARKED = re.compile(r"Marking (.*) as output: (.*)")
_LAYER = re.compile(r"Registering layer: (.*) for ONNX node: (.*)")
_KERNEL = re.compile(
    r"(kernel|strides|prepadding|postpadding|dilations|numOutputs): (\([\d, -]{1,80}\)|\d{1,9})"
)
_AXIS = re.compile(r"Using Gather axis: (-?\d{1,4})")
_DETAILS = {  # printed on lines of their own, without a prefix, inside one message
    "Transformation mode": "coordinate_transformation_mode",
    "Resize mode": "mode",
    "Padding mode": "padding_mode",
    "Pre-padding": "prepadding",
    "Post-padding": "postpadding",
}
_HEADER = {
    "Input filename": "onnx_file",
    "Opset version": "opset",
    "Producer name": "producer",
    "Producer version": "version",
    **dict.fromkeys(("ONNX IR version", "Domain", "Model version", "Doc string", "IR version"), ""),
}
_DTYPES = {"float32": "FLOAT", "half": "FLOAT16"}  # other words are ONNX's own


# First words of the parser's lines, which begin none of the optimizer's.
PARSER_WORDS = frozenset(
    ("Searching", "Static", "Parsing", "Importing", "Registering", "Adding", "Marking")
)


class ParseReader:
    """Fills a ParseSection, line by line."""

    def __init__(self, section: ParseSection) -> None:
        self.section = section
        self._node: ParsedNode | None = None

    def read(self, text: str, line: int, keep: Callable[[str], bool]) -> bool:
        """Takes a line; False when it is not one of the parser's. ``keep`` says whether there is room for a record."""
        section = self.section
        first = text.split(" ", 1)[0]
        if first not in PARSER_WORDS:
            return (
                self._read_edges(text, line, keep)
                or self._read_detail(text)
                or self._read_header(text)
            )
        if first in ("Searching", "Static"):
            return text.startswith(("Searching for input: ", "Static check for parsing node: "))
        if first == "Parsing":
            if match := _NODE.fullmatch(text):
                self._begin_node(ParsedNode(match[1].strip(), match[2], line=line), keep(text))
            return match is not None or text.startswith("Parsing model")
        if first == "Importing":
            if (named := text.startswith("Importing initializer: ")) and keep(text):
                section.initializers.append(text[len("Importing initializer: ") :])
            return named
        if first == "Registering":
            if (match := _LAYER.fullmatch(text)) and keep(text):
                section.layers[match[1]] = match[2]
            return text.startswith(("Registering tensor: ", "Registering layer: "))
        if first == "Adding":
            if (found := _parse_network_input(text)) and keep(text):
                section.inputs.append(found)
            return found is not None
        if (match := _MARKED.fullmatch(text)) and keep(text):
            section.outputs.append(match[2])
        return match is not None

    def _begin_node(self, node: ParsedNode, kept: bool) -> None:
        self._node = node
        if kept:
            self.section.nodes.append(node)

    def _read_edges(self, text: str, line: int, keep: Callable[[str], bool]) -> bool:
        """``Conv_0 [Conv] inputs: [x -> (1, 3, 8, 8)[FLOAT]], [optional input, not set], ``"""
        word = "inputs" if "] inputs:" in text else "outputs"
        if word == "outputs" and "] outputs:" not in text:  # as nearly all
            return False
        head, _, body = text.partition(f"] {word}:")
        name, _, op = head.rpartition("[")
        name = name.strip()
        if self._node is None or (self._node.name != name and name):
            if not op or not op.replace("_", "").replace(".", "").isalnum():
                return False
            self._begin_node(
                ParsedNode(name, op, line=line), keep(text)
            )  # the log begins inside this node
        tensors = _parse_tensors(body)
        if keep(text):
            setattr(self._node, word, tensors)
        return True

    def _read_detail(self, text: str) -> bool:
        details = self._node.details if self._node is not None else {}
        if text.startswith("Using "):
            if text.startswith("Using kernel: "):
                for match in _KERNEL.finditer(text):
                    details[match[1]] = (
                        _parse_integers(match[2]) if match[2].startswith("(") else int(match[2])
                    )
                return True
            if axis := _AXIS.fullmatch(text):
                details["axis"] = int(axis[1])
                return True
        key, _, value = text.partition(": ")
        if key not in _DETAILS or key == text or len(text) > 200:
            return False
        details[_DETAILS[key]] = _parse_integers(value) if value.startswith("(") else value.strip()
        return True

    def _read_header(self, text: str) -> bool:
        key, _, rest = text.partition(":")
        target = _HEADER.get(key)
        if target is None or key == text:  # as nearly all
            return False
        value = rest.strip()[:500]
        if target in ("onnx_file", "producer"):
            setattr(self.section, target, value)
        elif target == "opset" and value.isdecimal() and len(value) < 6:
            self.section.opset = int(value)
        elif target == "version" and value:
            self.section.producer = f"{self.section.producer} {value}".strip()
        return True


def _parse_integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d{1,9}", text)]


def _parse_tensors(body: str) -> list[ParsedTensor | None]:
    tensors: list[ParsedTensor | None] = []
    stripped = body.strip().rstrip(",").strip()
    for item in (
        stripped.removeprefix("[").removesuffix("]").split("], [")[:20_000] if stripped else ()
    ):
        name, arrow, rest = item.rpartition(" -> (")
        dims, _, dtype = rest.rpartition(")[")
        if item.startswith(("optional input", "optional output")) or not item:
            tensors.append(None)
        elif not arrow:
            tensors.append(ParsedTensor(item, None, ""))
        else:
            tensors.append(
                ParsedTensor(name, _parse_shape(dims), dtype.rstrip("]")) if name else None
            )
    return tensors


def _parse_network_input(text: str) -> ParsedTensor | None:
    """``Adding network input: NAME with dtype: float32, dimensions: (1, 3, 8, 8)``"""
    if not text.startswith(_INPUT) or not text.endswith(")"):
        return None
    head, cut, dims = text[len(_INPUT) : -1].rpartition(", dimensions: (")
    name, joint, dtype = head.rpartition(" with dtype: ")
    if not cut or not joint or not dtype.isidentifier():
        return None
    return ParsedTensor(name, _parse_shape(dims), _DTYPES.get(dtype.lower(), dtype.upper()))


def _parse_shape(text: str) -> Shape:
    shape: list[int | None] = []
    for piece in text.split(", ") if text.strip() else []:
        stripped = piece.strip()
        value = (
            int(stripped)
            if stripped.isascii() and stripped.isdecimal() and len(stripped) < 19
            else MAX_DIMENSION
        )
        shape.append(value if value < MAX_DIMENSION else None)
    return tuple(shape)


# Lines with nothing to keep, and messages ----------------------------------------------------------------------------

_BEGINNINGS = tuple(row["beginning"] for row in read_rows(Path(__file__).with_name("chatter.tsv")))
_SHORTEST = min(map(len, _BEGINNINGS))
_BY_LETTERS = {
    letters: tuple(line for line in _BEGINNINGS if line.startswith(letters))
    for letters in {line[:_SHORTEST] for line in _BEGINNINGS}
}
_UNMISTAKABLE = (
    *(line for line in _BEGINNINGS if len(line.split()) > 2 or line.startswith("[")),
    "Engine built in",
    "Engine generation completed",
    "Engine deserialized in",
    "Created engine",
    "Graph construction and",
    "Graph optimization time",
    "Formats and tactics selection",
    "Total Host Persistent",
    "Total Device Persistent",
    "Total Scratch Memory",
    "Total Activation Memory",
    "Total Weights Memory",
    "Max Scratch Memory",
    "Loaded engine size",
    "[MemUsage",
    "[BlockAssignment]",
)


def is_chatter(text: str) -> bool:
    """Whether a line is one of TensorRT's that holds nothing to keep, or a note that someone wrote into the log."""
    if text.startswith(_BY_LETTERS.get(text[:_SHORTEST], ())) or text.endswith(" to plan file."):
        return True
    # TensorRT's own words are ASCII: a line in another script that nothing else knew is a translation or a comment.
    return not text.isascii() and sum(c.isalpha() and ord(c) >= 0x2E80 for c in text[:200]) >= 2


def is_unmistakable(text: str) -> bool:
    """Whether a line of chatter could be TensorRT's only: most beginnings of three words or more are."""
    return text.startswith(_UNMISTAKABLE)


_EXCEPTION = re.compile(
    r"(?:[\w.]*(?:Error|Exception): |Traceback \(most recent call last\)|trtexec: |Aborted|Segmentation)"
)
_MAX_MESSAGES = 2000
_MAX_TEXT = 2000


class MessageCollector:
    """Collects messages in ``build.messages``; ``keep`` says whether there is room for another record."""

    def __init__(self, build: Build, keep: Callable[[str], bool]) -> None:
        self._build = build
        self._keep = keep
        self._known: dict[tuple[str, str], LogMessage] = {}
        self._last: LogMessage | None = None

    def add(self, level: str, text: str, line: int) -> None:
        """Takes a warning or error."""
        key = (level, text[:500])
        found = self._known.get(key)
        if found is None:
            found = LogMessage(level, text[:_MAX_TEXT], line, 0)
            if len(self._known) < _MAX_MESSAGES and self._keep(text[:_MAX_TEXT]):
                self._known[key] = found
                self._build.messages.append(found)
        found.count += 1
        self._last = found

    def continue_message(self, text: str, line: int) -> bool:
        """An unstamped line after a warning or error belongs to it; an exception is an error of its own."""
        if _EXCEPTION.match(text):
            self.add("E", text, line)
            return True
        if self._last is None:
            return False
        if len(self._last.text) < _MAX_TEXT:
            self._last.text += "\n" + text[:500]
        return True

    def end(self) -> None:
        """A stamped line of another kind: what follows belongs to no message."""
        self._last = None
