"""Readers of single log lines: memory, performance, profile, parser, messages.

The module also recognizes lines without information.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from qdqtool.buildlog.layers import parse_dims
from qdqtool.buildlog.types import (
    Build,
    LogMessage,
    MemoryUse,
    ParsedNode,
    ParsedTensor,
    ParseSection,
    ProfileRow,
)
from qdqtool.util.tables import read_rows

_LAYER_MEMORY = re.compile(
    r"Layer: .* Host Persistent: \d{1,15}(?: bytes)? Device Persistent: \d{1,15}(?: bytes)? "
    r"Scratch Memory: \d{1,15}(?: bytes)?"
)
_MEMORY_LINES = ("[MemUsageChange]", "[MemUsageStats]", "[MemUsageSnapshot]", "[BlockAssignment]")
_ABOUT_MEMORY = (*_MEMORY_LINES, "Total ", "Max Scratch", "Loaded engine size: ", "Layer: ")
_MEMORY_FIELDS = ("host_persistent", "device_persistent", "scratch", "activation", "weights")
_TOTAL = re.compile(
    r"(?:Total|Max(?= Scratch)) ([A-Z][a-z]+(?: [A-Z][a-z]+)?) Memory: (\d{1,19})(?: bytes)?"
)
_PEAK = re.compile(
    r"\[MemUsageStats\] Peak memory usage of TRT CPU/GPU memory allocators: "
    r"CPU (\d{1,9}) MiB, GPU (\d{1,9}) MiB"
)
_ENGINE = re.compile(r"Loaded engine size: (\d{1,9}) MiB")
_METRIC = re.compile(
    r"(Throughput|Total Host Walltime|Total GPU Compute Time): ([\d.e+-]{1,20}) (qps|s)"
)
_LATENCY = re.compile(r"([\w-]{1,20}(?: [\w-]{1,20}){0,4}): (min = .*)")
_VALUE = re.compile(r"(?<![\w()%.])([\w()%.]{1,30}) = ([\d.e+-]{1,20})")


def read_memory(memory: MemoryUse, text: str) -> bool:
    """Store a line about memory; return False if the line is about something else."""
    if not text.startswith(_ABOUT_MEMORY):
        return False
    if match := _TOTAL.fullmatch(text):
        name = match[1].lower().replace(" ", "_")
        # TensorRT prints the value before and after block assignment. The last value is final.
        if name in _MEMORY_FIELDS:
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
    """Store a line of the performance summary; return False for any other line."""
    if text.startswith("T") and (match := _METRIC.fullmatch(text)):
        value = parse_number(match[2])
        if value is not None:
            performance[match[1]] = {"value": value}
        return value is not None
    if ": min = " not in text or (match := _LATENCY.match(text)) is None:
        return False
    values = {name: parse_number(value) for name, value in _VALUE.findall(match[2])}
    performance[match[1]] = {name: value for name, value in values.items() if value is not None}
    return True


def is_profile_header(text: str) -> bool:
    """Return whether a line is the header of a profile table, of any TensorRT version."""
    return "Layer" in text and ("Time (ms)" in text or "Time(ms)" in text) and "Avg" in text


class ProfileReader:
    """Reader of the header and the rows of the profile table.

    The layer's name is the first column up to TensorRT 8.5, and the last column from 8.6 on. The
    other columns are total, average, median (from 8.4 on) and percent.

    Args:
        build: Build to fill.
        keep: Function that takes a record's text, and returns whether the limits allow storing it.
    """

    def __init__(self, build: Build, keep: Callable[[str], bool]) -> None:
        self._build = build
        self._keep = keep
        self._columns: tuple[bool, int] | None = None

    def read(self, text: str) -> bool:
        """Store a row or the header of the table; return False for any other line."""
        if is_profile_header(text):
            self._columns = "Time (ms)" in text, 4 if "Median" in text else 3
            return True
        if self._columns is None:
            return False
        name, numbers = _split_row(text, *self._columns)
        values = [value for number in numbers if (value := parse_number(number)) is not None]
        if len(values) != self._columns[1]:
            return False
        total, average, *median, share = values
        if name == "Total":
            self._build.profile_total_ms = average
        elif self._keep(text):
            row = ProfileRow(name, total, average, median[0] if median else None, share)
            self._build.profile_rows.append(row)
        return True


def _split_row(text: str, is_name_first: bool, count: int) -> tuple[str, list[str]]:
    if is_name_first:
        name, *numbers = text.rsplit(None, count) or [""]
    else:
        *numbers, name = text.split(None, count) or [""]
    return name.strip(), numbers


def parse_number(text: str | bytes) -> float | None:
    """Parse a text as a finite number; return None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# Parse section: the ONNX parser's lines, from which the graph can be rebuilt

_NODE = re.compile(r"Parsing node: (.*) ?\[([\w.:]{1,80})\]", re.DOTALL)
_INPUT = "Adding network input: "
_OUTPUT = re.compile(r"Marking (.*) as output: (.*)")
_LAYER = re.compile(r"Registering layer: (.*) for ONNX node: (.*)")
_KERNEL = re.compile(
    r"(kernel|strides|prepadding|postpadding|dilations|numOutputs): (\([\d, -]{1,80}\)|\d{1,9})"
)
_AXIS = re.compile(r"Using Gather axis: (-?\d{1,4})")
_DETAILS = {  # attributes that the parser prints on separate lines without a prefix
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
_DTYPES = {"float32": "FLOAT", "half": "FLOAT16"}  # other types are spelled as in ONNX
_INITIALIZER = "Importing initializer: "


# First words of the parser's lines. No line of the optimizer begins with these words.
PARSER_WORDS = frozenset(
    ("Searching", "Static", "Parsing", "Importing", "Registering", "Adding", "Marking")
)
_NO_CONTENT = (
    "Searching for input: ",
    "Static check for parsing node: ",
    "Parsing model",
    "Registering tensor: ",
)


class ParseReader:
    """Reader that fills a ParseSection line by line.

    Args:
        section: Section to fill.
        keep: Function that takes a record's text, and returns whether the limits allow storing it.
    """

    def __init__(self, section: ParseSection, keep: Callable[[str], bool]) -> None:
        self.section = section
        self._keep = keep
        self._node: ParsedNode | None = None
        self._readers: dict[str, Callable[[str, int], bool]] = {
            "Parsing": self._read_node,
            "Importing": self._read_initializer,
            "Registering": self._read_layer,
            "Adding": self._read_input,
            "Marking": self._read_output,
        }

    def read(self, text: str, line: int) -> bool:
        """Store a line of the parser; return False for any other line."""
        first = text.split(" ", 1)[0]
        if first not in PARSER_WORDS:
            return (
                self._read_edges(text, line) or self._read_detail(text) or self._read_header(text)
            )
        reader = self._readers.get(first)
        return (reader is not None and reader(text, line)) or text.startswith(_NO_CONTENT)

    def _read_node(self, text: str, line: int) -> bool:
        match = _NODE.fullmatch(text)
        if match is not None:
            self._begin_node(ParsedNode(match[1].strip(), match[2], line=line), text)
        return match is not None

    def _read_initializer(self, text: str, _line: int) -> bool:
        if not text.startswith(_INITIALIZER):
            return False
        if self._keep(text):
            self.section.initializers.append(text[len(_INITIALIZER) :])
        return True

    def _read_layer(self, text: str, _line: int) -> bool:
        if (match := _LAYER.fullmatch(text)) and self._keep(text):
            self.section.layers[match[1]] = match[2]
        return text.startswith("Registering layer: ")

    def _read_input(self, text: str, _line: int) -> bool:
        tensor = _parse_network_input(text)
        if tensor is not None and self._keep(text):
            self.section.inputs.append(tensor)
        return tensor is not None

    def _read_output(self, text: str, _line: int) -> bool:
        match = _OUTPUT.fullmatch(text)
        if match is not None and self._keep(text):
            self.section.outputs.append(match[2])
        return match is not None

    def _begin_node(self, node: ParsedNode, text: str) -> None:
        self._node = node
        if self._keep(text):
            self.section.nodes.append(node)

    def _read_edges(self, text: str, line: int) -> bool:
        """Read ``Conv_0 [Conv] inputs: [x -> (1, 3, 8, 8)[FLOAT]], [optional input, not set],``."""
        side = "inputs" if "] inputs:" in text else "outputs"
        if side == "outputs" and "] outputs:" not in text:
            return False
        head, _, body = text.partition(f"] {side}:")
        name, _, op = head.rpartition("[")
        name = name.strip()
        if self._node is None or (self._node.name != name and name):
            if not op or not op.replace("_", "").replace(".", "").isalnum():
                return False
            # The log begins inside this node.
            self._begin_node(ParsedNode(name, op, line=line), text)
        tensors = _parse_tensors(body)
        if self._keep(text):
            setattr(self._node, side, tensors)
        return True

    def _read_detail(self, text: str) -> bool:
        details = self._node.details if self._node is not None else {}
        if text.startswith("Using kernel: "):
            for match in _KERNEL.finditer(text):
                value = match[2]
                details[match[1]] = _parse_integers(value) if value[0] == "(" else int(value)
            return True
        if axis := _AXIS.fullmatch(text):
            details["axis"] = int(axis[1])
            return True
        key, separator, value = text.partition(": ")
        if key not in _DETAILS or not separator:
            return False
        details[_DETAILS[key]] = _parse_integers(value) if value.startswith("(") else value.strip()
        return True

    def _read_header(self, text: str) -> bool:
        key, separator, rest = text.partition(":")
        target = _HEADER.get(key)
        if target is None or not separator:
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
    return [int(number) for number in re.findall(r"-?\d{1,9}", text)]


def _parse_tensors(body: str) -> list[ParsedTensor | None]:
    tensors: list[ParsedTensor | None] = []
    stripped = body.strip().rstrip(",").strip()
    if not stripped:
        return tensors
    for item in stripped.removeprefix("[").removesuffix("]").split("], ["):
        name, arrow, rest = item.rpartition(" -> (")
        dims, _, dtype = rest.rpartition(")[")
        if item.startswith(("optional input", "optional output")) or not item:
            tensors.append(None)
        elif not arrow:
            tensors.append(ParsedTensor(item, None, ""))
        else:
            shape = parse_dims(dims)[0]
            tensors.append(ParsedTensor(name, shape, dtype.rstrip("]")) if name else None)
    return tensors


def _parse_network_input(text: str) -> ParsedTensor | None:
    """Parse ``Adding network input: NAME with dtype: float32, dimensions: (1, 3, 8, 8)``."""
    if not text.startswith(_INPUT) or not text.endswith(")"):
        return None
    head, cut, dims = text[len(_INPUT) : -1].rpartition(", dimensions: (")
    name, joint, dtype = head.rpartition(" with dtype: ")
    if not cut or not joint or not dtype.isidentifier():
        return None
    return ParsedTensor(name, parse_dims(dims)[0], _DTYPES.get(dtype.lower(), dtype.upper()))


# Lines without information, and messages

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


def is_uninformative(text: str) -> bool:
    """Return whether a line holds no information.

    True for known lines of TensorRT, and for lines in a script other than Latin, which a user
    added as comments or translations.
    """
    if text.startswith(_BY_LETTERS.get(text[:_SHORTEST], ())) or text.endswith(" to plan file."):
        return True
    # TensorRT prints only ASCII. So an unknown line in another script is a translation or comment.
    return not text.isascii() and sum(c.isalpha() and ord(c) >= 0x2E80 for c in text[:200]) >= 2


def is_tensorrt_only(text: str) -> bool:
    """Return whether only TensorRT prints lines that begin like this line."""
    return text.startswith(_UNMISTAKABLE)


_EXCEPTION = re.compile(
    r"(?:[\w.]*(?:Error|Exception): |Traceback \(most recent call last\)|trtexec: |Aborted|"
    r"Segmentation)"
)
_MAX_TEXT = 2000


class MessageCollector:
    """Collector of warnings and errors in ``build.messages``.

    Args:
        build: Build to fill.
        keep: Function that takes a record's text, and returns whether the limits allow storing it.
    """

    def __init__(self, build: Build, keep: Callable[[str], bool]) -> None:
        self._build = build
        self._keep = keep
        self._messages: dict[tuple[str, str], LogMessage] = {}
        self._last: LogMessage | None = None

    def add(self, level: str, text: str, line: int) -> None:
        """Add a warning or error, or count the repetition of an earlier message."""
        key = (level, text[:500])
        message = self._messages.get(key)
        if message is None:
            message = LogMessage(level, text[:_MAX_TEXT], line, 0)
            if self._keep(text[:_MAX_TEXT]):
                self._messages[key] = message
                self._build.messages.append(message)
        message.count += 1
        self._last = message

    def continue_message(self, text: str, line: int) -> bool:
        """Append a line without timestamp to the open message; return False if none is open.

        The first line of an exception starts a new message.
        """
        if _EXCEPTION.match(text):
            self.add("E", text, line)
            return True
        if self._last is None:
            return False
        if len(self._last.text) < _MAX_TEXT:
            self._last.text += "\n" + text[:500]
        return True

    def end(self) -> None:
        """Close the open message, so that no further lines are appended."""
        self._last = None
