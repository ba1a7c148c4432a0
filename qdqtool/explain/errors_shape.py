"""The form of TensorRT's error lines: which part speaks, which code, which condition failed.

``[E] Error[2]: [weightConvertors.cpp::quantizeBiasCommon::310] Error Code 2: Internal Error (Assertion x)``   8.x
``Error[9]: IBuilder::buildSerializedNetwork: Error Code 9: ... In compileGraph at /.../codeGenerator.cpp:895``   10.x
``../builder/Layers.cpp (3986) - Assertion Error in validate: 0 (nbResizeDim >= 0)``   7.x
``ERROR: builtin_op_importers.cpp:1235 In function importPad: [8] Assertion failed: inputs.at(1).is_weights()``   parser
``In node 4 (parseGraph): UNSUPPORTED_NODE: No importer registered for op: Foo``   parser, as onnxruntime prints it

A line without any of these that a logger of TensorRT marked as a warning or an error is one, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdqtool.buildlog import prefix
from qdqtool.explain.errors_entry import ERROR, WARNING, KnownError

_PLACE = re.compile(r"\[([\w.-]{1,80}\.(?:cpp|h|cu|hpp|cuh))::?([\w:~<>]{1,200}?)::?(\d{1,6})\]")
_PATH = re.compile(r"([\w-]{1,80}\.(?:cpp|h|cu|hpp|cuh))(?: \((\d{1,6})\)|:(\d{1,6}))")
_FUNCTION = re.compile(r"In function (\w{1,80})|Assertion Error in (\w{1,80})|In node -?\d{1,9} \((\w{1,80})\)")
_CODE = re.compile(r"Error Code:? (\d{1,2})\b|Error\[(\d{1,2})\]")
_BARE_CODE = re.compile(r"(?:^|\] |ERROR: |INTERNAL_ERROR: )(\d{1,2}): (?=\[|Assertion|Could|Internal)")
_ASSERTION = re.compile(r"Assertion(?: failed:)? [`']?(.{1,300}?)'?(?: failed|$|\n|\. ?\))")
_CATEGORY = re.compile(r"Error Code:? \d{1,2}: ([A-Z][A-Za-z ]{2,40}?) (?:Error|Failure)")
_STATUS = re.compile(
    r"\b(INVALID_(?:NODE|GRAPH|VALUE)|UNSUPPORTED_(?:NODE|GRAPH|NODE_ATTR|NODE_INPUT|NODE_DATATYPE|NODE_DYNAMIC)"
    r"|MODEL_DESERIALIZE_FAILED): (.{1,300})"
)  # what the parser's functions return
_PROVIDER = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:WARNING|ERROR)\]")  # onnxruntime's stamp, alone
_LINES = 50  # of an excerpt, in which a marked line is looked for
_OLD_ASSERTION = re.compile(r"Assertion Error in \w{1,80}: \d{1,9} \((.{1,300})\)")  # to TensorRT 7
_MAX_TEXT = 20_000

CODES = {
    1: "an error that fits no other class: mostly one of CUDA, cuDNN, Cask or Myelin",
    2: "an internal error: a condition in TensorRT's own code did not hold",
    3: "an argument that is wrong in itself: the API was used wrongly",
    4: "a network or a setting that contradicts itself",
    5: "memory could not be allocated",
    6: "a library that TensorRT needs could not be started",
    7: "a kernel failed while running (CUDA or DLA)",
    8: "a computation went wrong while running",
    9: "a call in a state that does not allow it; in TensorRT 10 also a kernel that was passed over",
    10: "something that TensorRT does not support, mostly a layer without a kernel",
}
"""Meaning of ``Error Code N`` (ErrorCode in TensorRT's API documentation)."""

# Which part of TensorRT a source file belongs to, by the beginning of its name.
_PARTS = (
    (("builtin_op_importers", "modelimporter", "onnx2trt", "onnxopimporters", "onnxopcheckers", "shapedweights",
      "weightscontext", "conditionalhelpers", "loophelpers", "rnnhelpers", "importerutils"), "the ONNX parser",
     "The model's file is the place to look: the node that the lines around name."),
    (("qdqgraphoptimizer",), "the Q/DQ optimizer", "Q/DQ pairs are where it cannot place or fuse them."),
    (("graphoptimizer", "shapemachine", "cgraph", "graph.", "layeraspects", "fusion"), "the graph optimizer",
     "A fusion or rewriting of layers failed."),
    (("pointwise",), "the fusion of elementwise layers", "Elementwise nodes around Q/DQ pairs were fused wrongly."),
    (("weightconvert", "weightsconvert", "quantiz", "calibrat"), "the conversion of weights and scales",
     "A scale or range is missing, zero or of the wrong number."),
    (("scalenode", "convnode", "deconvnode", "nodebase", "node"), "the checks of one kind of layer",
     "The layer's parameters do not fit each other."),
    (("cask", "cudnn", "convbase", "deconv", "gemm"), "the kernels of convolutions and matrix products",
     "The kernel refuses the layer's parameters, weights or scales."),
    (("cublas", "ltwrapper"), "cuBLAS", "The library is missing, of another version, or out of memory."),
    (("plugin",), "plugins", "A plugin failed or was given types or scales that it does not take."),
    (("optimizer", "tactic", "autotuner", "timing"), "the choice of kernels",
     "No kernel worked, or timing one failed; memory is the first suspect."),
    (("builder",), "the builder", "It reports what failed in the lines above."),
    (("myelin", "codegenerator", "type.cpp", "operation", "compiler", "kqv", "symbolic", "foreign"), "Myelin",
     "It compiles whole regions: transformer blocks, shape computations, what classic layers cannot do."),
    (("dla",), "DLA", "DLA supports few layers and no Q/DQ."),
    (("runtime", "rthelper", "engine", "serialization", "context", "coreread"), "the runtime",
     "The engine was built with another version or for another GPU, or is used wrongly."),
    (("cuda", "defaultallocator", "resources", "allocator", "memory"), "CUDA and memory",
     "Mostly too little GPU memory, or a driver that does not fit."),
    (("network", "layers.cpp", "api", "parametercheck"), "the network API",
     "A layer was described with parameters that do not fit."),
)
_PARSER = _PARTS[0][1]


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """An error text, taken apart; empty or None where it does not say.

    Attributes:
        file: Source file of TensorRT.
        function: Function in it.
        line: Line in it.
        code: ``Error Code N``.
        condition: The condition that did not hold.
        part: Which part of TensorRT the file belongs to.
        about: What errors of that part are about.
        status: What the parser says of the node, with the code in front.
    """

    file: str = ""
    function: str = ""
    line: int | None = None
    code: int | None = None
    condition: str = ""
    part: str = ""
    about: str = ""
    status: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the text has the form of an error at all."""
        return bool(self.condition or self.code is not None or self.status or (self.file and self.function))


def parse_error(text: str) -> ErrorLine:
    """Takes an error text apart."""
    text = text[:_MAX_TEXT]
    file = function = ""
    line: int | None = None
    place = _PLACE.search(text)
    if place:
        file, function, line = place[1], place[2].rsplit("::", 1)[-1], int(place[3])
    else:
        path = _PATH.search(text)
        if path:
            file, line = path[1], int(path[2] or path[3])
        named = _FUNCTION.search(text)
        function = next((g for g in named.groups() if g), "") if named else ""
    code = _CODE.search(text) or _BARE_CODE.search(text)
    number = int(next(g for g in code.groups() if g)) if code else None
    assertion = _OLD_ASSERTION.search(text) or _ASSERTION.search(text)
    condition = assertion[1].strip().rstrip(".") if assertion else ""
    status = _STATUS.search(text)
    lower = file.lower()
    part, about = next(((p, a) for names, p, a in _PARTS if lower.startswith(names)), ("", ""))
    if not part and (status or function.startswith("import")):
        part, about = _PARTS[0][1:]
    said = f"{status[1]}: {status[2].strip().rstrip('.')}" if status else ""
    return ErrorLine(file, function, line, number, condition, part, about, said)


def from_shape(text: str) -> KnownError | None:
    """What the form of an error text says where its words are not known; None where it is no error of TensorRT."""
    found = parse_error(text)
    if not found.is_error:
        return _marked(text)
    parts: list[str] = []
    if found.status:
        parts.append(f"The parser says {found.status}.")
    if found.condition:
        parts.append(f"A condition in TensorRT's code did not hold: {found.condition}.")
    if found.code is not None:
        parts.append(f"Error code {found.code} is {CODES.get(found.code, 'none that the documentation names')}.")
    if found.file:
        inside = f", function {found.function}" if found.function else ""
        owner = f", belongs to {found.part}" if found.part else ""
        parts.append(f"{found.file}{inside}{owner}. {found.about}".rstrip())
    hint = _scales(found)
    if hint:
        parts.append(hint)
    first = (
        "Read the lines above: they name the node. "
        if found.part in ("", "the builder") else "The lines above name the node or layer. "
    )
    return KnownError(
        "unknown-error", f"An error of {found.part or 'TensorRT'} that is not in our table", "", ERROR,
        " ".join(parts), first + _steps(found),
        "the form of the text; error codes: TensorRT's API documentation",
        unknown="Its cause. Nothing about these words is in our table; search NVIDIA's issues for "
                f"'{(found.condition or found.status or found.function or found.file)[:80]}'.",
    )  # fmt: skip


def _marked(text: str) -> KnownError | None:
    """A line that only its prefix shows to be a warning or an error of TensorRT: nothing else is known of it."""
    for line in text.encode(errors="replace").split(b"\n", _LINES)[:_LINES]:
        cleaned = prefix.clean(line)
        level, _, message = prefix.split(cleaned)
        said = message.decode(errors="replace").strip()
        if level not in ("W", "E") or not said or not (prefix.is_marked(cleaned) or _PROVIDER.match(cleaned)):
            continue
        error = level == "E"
        name = "An error" if error else "A warning"
        return KnownError(
            f"unknown-{'error' if error else 'warning'}", f"{name} of TensorRT that is not in our table", "",
            ERROR if error else WARNING, f"TensorRT's logger marks this line as {name.lower()}; nothing more is known.",
            _steps(ErrorLine()) if error else
            "Compare the engine's layers with the prediction ('qdqtool verify'): a warning that changes nothing there "
            "can stay.",
            "the line's prefix", unknown=f"What it means. Search NVIDIA's issues for '{said[:80]}'.",
        )  # fmt: skip
    return None


def _scales(found: ErrorLine) -> str:
    words = f"{found.condition} {found.function}".lower()
    if "scale" in words:
        return "It is about scales: their number, or that there is one at all."
    if "axis" in words or "dims" in words or "shape" in words:
        return "It is about shapes or axes."
    if "memory" in words or "alloc" in words:
        return "It is about memory."
    return ""


def _steps(found: ErrorLine) -> str:
    if found.part == _PARSER:
        return (
            "Check the model (onnx.checker, onnxruntime), fold constants ('polygraphy surgeon sanitize "
            "--fold-constants') and see whether this operator and opset are in onnx-tensorrt's operators.md."
        )
    if found.code == 5 or "alloc" in found.function.lower():
        return "Free GPU memory, lower the workspace or the batch, and close other programs on this GPU."
    if found.part in ("the runtime", "CUDA and memory"):
        return "Check that engine, TensorRT, driver and GPU belong together; build the engine again on this machine."
    return (
        "Find out whether Q/DQ is the cause: build the model without Q/DQ (or without --int8). If that works, run "
        "'qdqtool predict' for what it knows before a build, then leave the Q/DQ of one block after another out. "
        "Try a newer TensorRT before anything longer: most texts of this form are bugs of one version."
    )
