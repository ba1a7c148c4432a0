"""The parse section: what the ONNX parser says of each node. Enough to rebuild the graph."""

from __future__ import annotations

import re
from collections.abc import Callable

from qdqtool.buildlog.records import MAX_DIMENSION, ParsedNode, ParsedTensor, ParseSection, Shape

_NODE = re.compile(r"Parsing node: (.*) ?\[([\w.:]{1,80})\]", re.DOTALL)
_INPUT = "Adding network input: "
_MARKED = re.compile(r"Marking (.*) as output: (.*)")
_LAYER = re.compile(r"Registering layer: (.*) for ONNX node: (.*)")
_KERNEL = re.compile(r"(kernel|strides|prepadding|postpadding|dilations|numOutputs): (\([\d, -]{1,80}\)|\d{1,9})")
_AXIS = re.compile(r"Using Gather axis: (-?\d{1,4})")
_DETAILS = {  # printed on lines of their own, without a prefix, inside one message
    "Transformation mode": "coordinate_transformation_mode",
    "Resize mode": "mode",
    "Padding mode": "padding_mode",
    "Pre-padding": "prepadding",
    "Post-padding": "postpadding",
}
_HEADER = {
    "Input filename:": "onnx_file",
    "Opset version:": "opset",
    "Producer name:": "producer",
    "Producer version:": "version",
    "ONNX IR version:": "",
    "Domain:": "",
    "Model version:": "",
    "Doc string:": "",
    "IR version:": "",
}
_DTYPES = {
    "float32": "FLOAT",
    "float16": "FLOAT16",
    "int32": "INT32",
    "int64": "INT64",
    "int8": "INT8",
    "bool": "BOOL",
    "uint8": "UINT8",
    "bfloat16": "BFLOAT16",
    "float": "FLOAT",
    "half": "FLOAT16",
}


class ParseReader:
    """Fills a ParseSection, line by line."""

    def __init__(self, section: ParseSection) -> None:
        self.section = section
        self._node: ParsedNode | None = None

    def read(self, text: str, line: int, keep: Callable[[str], bool]) -> bool:
        """Takes a line; False when it is not one of the parser's.

        Args:
            text: The message.
            line: Its number.
            keep: Whether there is room to keep another record.
        """
        section = self.section
        first = text.split(" ", 1)[0]
        if first == "Searching":
            return text.startswith("Searching for input: ")
        if first == "Static":
            return text.startswith("Static check for parsing node: ")
        if first == "Parsing":
            match = _NODE.fullmatch(text)
            if match:
                self._node = ParsedNode(match[1].strip(), match[2], line=line)
                if keep(text):
                    section.nodes.append(self._node)
            return match is not None or text.startswith("Parsing model")
        if first == "Importing":
            if text.startswith("Importing initializer: "):
                if keep(text):
                    section.initializers.append(text[len("Importing initializer: ") :])
                return True
            return False
        if first == "Registering":
            match = _LAYER.fullmatch(text)
            if match and keep(text):
                section.layers[match[1]] = match[2]
            return match is not None or text.startswith(("Registering tensor: ", "Registering layer: "))
        if first == "Adding":
            found = _network_input(text)
            if found and keep(text):
                section.inputs.append(found)
            return found is not None
        if first == "Marking":
            match = _MARKED.fullmatch(text)
            if match and keep(text):
                section.outputs.append(match[2])
            return match is not None
        return self._edges(text, line, keep) or self._detail(text) or self._header(text)

    def _edges(self, text: str, line: int, keep: Callable[[str], bool]) -> bool:
        """``Conv_0 [Conv] inputs: [x -> (1, 3, 8, 8)[FLOAT]], [optional input, not set], ``"""
        for word in ("inputs", "outputs"):
            cut = text.find(f"] {word}:")
            if cut < 0:
                continue
            head, body = text[:cut], text[cut + len(word) + 3 :]
            name, _, op = head.rpartition("[")
            name = name.strip()
            node = self._node
            if node is None or (node.name != name and name):
                if not op or not op.replace("_", "").replace(".", "").isalnum():
                    return False
                node = self._node = ParsedNode(name, op, line=line)  # the log begins inside this node
                if keep(text):
                    self.section.nodes.append(node)
            tensors = _tensors(body)
            if keep(text):
                setattr(node, word, tensors)
            return True
        return False

    def _detail(self, text: str) -> bool:
        if text.startswith("Using kernel: "):
            if self._node is not None:
                for match in _KERNEL.finditer(text):
                    numbers = [int(n) for n in re.findall(r"-?\d{1,9}", match[2])]
                    self._node.details[match[1]] = numbers if match[2].startswith("(") else numbers[0]
            return True
        axis = _AXIS.fullmatch(text)
        if axis is not None:
            if self._node is not None:
                self._node.details["axis"] = int(axis[1])
            return True
        key, separator, value = text.partition(": ")
        if not separator or key not in _DETAILS or len(text) > 200:
            return False
        if self._node is not None:
            numbers = [int(n) for n in re.findall(r"-?\d{1,9}", value)]
            self._node.details[_DETAILS[key]] = numbers if value.startswith("(") else value.strip()
        return True

    def _header(self, text: str) -> bool:
        for key, target in _HEADER.items():
            if text.startswith(key):
                value = text[len(key) :].strip()[:500]
                if target == "onnx_file":
                    self.section.onnx_file = value
                elif target == "opset" and value.isdecimal() and len(value) < 6:
                    self.section.opset = int(value)
                elif target == "producer":
                    self.section.producer = value
                elif target == "version" and value:
                    self.section.producer = f"{self.section.producer} {value}".strip()
                return True
        return False


def _tensors(body: str) -> list[ParsedTensor | None]:
    tensors: list[ParsedTensor | None] = []
    stripped = body.strip().rstrip(",").strip()
    if not stripped:
        return tensors
    for item in stripped.removeprefix("[").removesuffix("]").split("], [")[:20_000]:
        name, arrow, rest = item.rpartition(" -> (")
        dims, _, dtype = rest.rpartition(")[")
        if item.startswith(("optional input", "optional output")) or not item:
            tensors.append(None)
        elif not arrow:
            tensors.append(ParsedTensor(item, None, ""))
        else:
            tensors.append(ParsedTensor(name, _shape(dims), dtype.rstrip("]")) if name else None)
    return tensors


def _network_input(text: str) -> ParsedTensor | None:
    """``Adding network input: NAME with dtype: float32, dimensions: (1, 3, 8, 8)``"""
    if not text.startswith(_INPUT) or not text.endswith(")"):
        return None
    head, cut, dims = text[len(_INPUT) : -1].rpartition(", dimensions: (")
    name, joint, dtype = head.rpartition(" with dtype: ")
    if not cut or not joint or not dtype.isidentifier():
        return None
    return ParsedTensor(name, _shape(dims), _DTYPES.get(dtype.lower(), dtype.upper()))


def _shape(text: str) -> Shape:
    shape: list[int | None] = []
    for piece in text.split(", ") if text.strip() else []:
        stripped = piece.strip()
        value = int(stripped) if stripped.isascii() and stripped.isdecimal() and len(stripped) < 19 else MAX_DIMENSION
        shape.append(value if value < MAX_DIMENSION else None)
    return tuple(shape)
