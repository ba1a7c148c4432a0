"""Causes and fixes of TensorRT's warnings and errors.

The table is ``qdqtool/findings/errors.toml``. Its texts and causes are from NVIDIA's issue threads,
the source code of onnx-tensorrt and trtexec, and TensorRT's documentation. An entry matches a part
of the text that is equal in all versions. ``error_forms.toml`` has general descriptions of errors
that are not in the table, and advice on missing kernels by kind of node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from qdqtool.buildlog import log
from qdqtool.buildlog.names import parse_layer_name
from qdqtool.util.json_text import Json
from qdqtool.util.tables import join_lines, make_entry, read_sections

HARMLESS, WARNING, ERROR = "harmless", "warning", "error"


@dataclass(frozen=True)
class KnownError:
    """Entry of the table: a warning or error of TensorRT.

    Attributes:
        id: Short name that does not change.
        title: Title of a few words.
        pattern: Regular expression that is searched for in the text. Case is ignored. It has no
            nested repetitions, so that a search takes linear time.
        severity: ``error``, ``warning`` or ``harmless``.
        cause: Cause in one or two sentences.
        fix: Advice.
        source: Source of cause and fix.
        codes: Codes of the findings by which ``qdqtool predict`` reports the problem before the
            build.
        versions: TensorRT versions that print the text; empty if unknown.
        fixed: For a bug of TensorRT: the version in which NVIDIA fixed it, and the source.
        unknown: Unknown facts about the problem.
        option: Option of trtexec that `fix` advises, if a build with it may print the text too.
        fix_with_option: Advice if the command has `option`.
    """

    id: str
    title: str
    pattern: str
    severity: str
    cause: str
    fix: str
    source: str
    codes: tuple[str, ...] = ()
    versions: str = ""
    fixed: str = ""
    unknown: str = ""
    option: str = ""
    fix_with_option: str = ""


_PLACE = re.compile(r"\[([\w.-]{1,80}\.(?:cpp|h|cu|hpp|cuh))::?([\w:~<>]{1,200}?)::?(\d{1,6})\]")
_PATH = re.compile(r"([\w-]{1,80}\.(?:cpp|h|cu|hpp|cuh))(?: \((\d{1,6})\)|:(\d{1,6}))")
_FUNCTION = re.compile(
    r"In function (\w{1,80})|Assertion Error in (\w{1,80})|In node -?\d{1,9} \((\w{1,80})\)"
)
_CODE = re.compile(r"Error Code:? (\d{1,2})\b|Error\[(\d{1,2})\]")
_BARE_CODE = re.compile(
    r"(?:^|\] |ERROR: |INTERNAL_ERROR: )(\d{1,2}): (?=\[|Assertion|Could|Internal)"
)
_ASSERTION = re.compile(r"Assertion(?: failed:)? [`']?(.{1,300}?)'?(?: failed|$|\n|\. ?\))")
_QUOTED = re.compile(r"Error Code:? \d{1,2}: [A-Z][\w ]{2,40}? \((.{1,300}?)\)?\s{0,4}(?:$|\n)")
_STATUS = re.compile(
    r"\b(INVALID_(?:NODE|GRAPH|VALUE)|UNSUPPORTED_(?:NODE|GRAPH|NODE_ATTR|NODE_INPUT|NODE_DATATYPE|NODE_DYNAMIC)"
    r"|MODEL_DESERIALIZE_FAILED): (.{1,300})"
)  # return values of functions of the ONNX parser
_PROVIDER = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:WARNING|ERROR)\]"
)  # prefix of onnxruntime's logger
# Maximum number of lines of a text that are searched for a line with a prefix of TensorRT's or
# onnxruntime's logger.
_MAX_LINES = 50
# Assertions have this form up to TensorRT 7.
_OLD_ASSERTION = re.compile(r"Assertion Error in \w{1,80}: \d{1,9} \((.{1,300})\)")
_MAX_TEXT = 20_000


@dataclass(frozen=True)
class _TensorrtComponent:
    """Part of TensorRT's source code. The names of its files identify it.

    Attributes:
        files: Prefixes of the names of its source files, separated by spaces.
        name: Name of the part.
        about: Topic of errors from these files.
    """

    files: str
    name: str
    about: str


@dataclass(frozen=True)
class NodeKind:
    """Kind of a node, with advice for a missing kernel. The name of a node shows its kind.

    Attributes:
        id: ``convolution``, ``other`` ...
        what: Description of the kind, such as "a convolution".
        operators: Operators and layer types of the kind, separated by spaces.
        cause: Cause of a missing kernel. Placeholders: ``{name}`` (of the node), ``{kind}``
            (`what`) and ``{ends}`` (first and last node of a region).
        fix: Advice.
        source: Source of cause and fix.
        unknown: Unknown facts about the problem.
    """

    id: str
    what: str
    operators: str = ""
    cause: str = ""
    fix: str = ""
    source: str = ""
    unknown: str = ""


_FORMS = read_sections(Path(__file__).with_name("error_forms.toml"))
# Meaning of ``Error Code N`` by number.
_CODES = {entry["number"]: join_lines(entry["meaning"]) for entry in _FORMS["code"]}
_PARTS = tuple(make_entry(_TensorrtComponent, entry, "part") for entry in _FORMS["part"])
_PARSER = _PARTS[0]
_KINDS = [make_entry(NodeKind, entry, entry.get("id", "node")) for entry in _FORMS["node"]]
NODE_KINDS = {kind.id: kind for kind in _KINDS}
_OTHER_KIND = NODE_KINDS["other"]
_KINDS_BY_WORD = {
    word: kind for kind in NODE_KINDS.values() for word in kind.operators.lower().split()
}


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """Fields that were found in an error text. A missing field is empty or None.

    Attributes:
        file: Source file of TensorRT.
        function: Function in the file.
        line: Line in the file.
        code: Number of ``Error Code N``.
        condition: Assertion that failed.
        part: Part of TensorRT's source code that contains the file.
        about: Topic of errors from this part.
        status: Status code of the ONNX parser, and the text after the code.
        quoted: Text in parentheses after ``Error Code N``.
    """

    file: str = ""
    function: str = ""
    line: int | None = None
    code: int | None = None
    condition: str = ""
    part: str = ""
    about: str = ""
    status: str = ""
    quoted: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the text has the form of an error."""
        return bool(
            self.condition or self.code is not None or self.status or (self.file and self.function)
        )


def parse_error(text: str) -> ErrorLine:
    """Find the fields of an error text, such as source file, line and error code."""
    text = text[:_MAX_TEXT]
    place = _parse_place(text)
    code = _CODE.search(text) or _BARE_CODE.search(text)
    assertion = _OLD_ASSERTION.search(text) or _ASSERTION.search(text)
    status = _STATUS.search(text)
    quoted = _QUOTED.search(text)
    is_parser = bool(status) or place.function.startswith("import")
    part, about = _find_part(place.file, is_parser=is_parser)
    return ErrorLine(
        place.file,
        place.function,
        place.line,
        int(code[code.lastindex or 0]) if code else None,
        assertion[1].strip().rstrip(".") if assertion else "",
        part,
        about,
        f"{status[1]}: {status[2].strip().rstrip('.')}" if status else "",
        quoted[1].strip().rstrip(".") if quoted else "",
    )


class _SourcePlace(NamedTuple):
    """Source file, function and line of an error; empty or None if the text lacks them."""

    file: str
    function: str
    line: int | None


def _parse_place(text: str) -> _SourcePlace:
    place = _PLACE.search(text)
    if place:
        return _SourcePlace(place[1], place[2].rsplit("::", 1)[-1], int(place[3]))
    path, function = _PATH.search(text), _FUNCTION.search(text)
    name = function[function.lastindex or 0] if function else ""
    if path is None:
        return _SourcePlace("", name, None)
    return _SourcePlace(path[1], name, int(path[2] or path[3]))


def _find_part(file: str, *, is_parser: bool) -> tuple[str, str]:
    for part in _PARTS:
        if file.lower().startswith(tuple(part.files.split())):
            return part.name, part.about
    return (_PARSER.name, _PARSER.about) if is_parser else ("", "")


_TOPICS = {  # by words in the condition or function of an error; the first match counts
    ("scale",): "The error concerns scales: their number, or a missing scale.",
    ("axis", "dims", "shape"): "The error concerns shapes or axes.",
    ("memory", "alloc"): "The error concerns memory.",
}


def explain_unlisted_error(text: str) -> KnownError | None:
    """Return an entry for an error that is not in the table, made from the form of its text.

    A line with the log prefix of a warning or error is explained too. None for other texts.
    """
    error = parse_error(text)
    if not error.is_error:
        return _explain_marked_line(text)
    first = "The lines above name the node or layer. "
    if error.part in ("", "the builder"):
        first = "The lines above name the node. "
    name = error.condition or error.quoted or error.status or error.function or error.file
    name = name or _find_message(text)
    return KnownError(
        "unknown-error",
        f"An error of {error.part or 'TensorRT'} that qdqtool does not know",
        "",
        ERROR,
        " ".join(_describe_error_parts(error)),
        first + _advise_fix(error),
        "the form of the text; error codes: TensorRT's API documentation",
        unknown="The cause, because qdqtool has no entry for this text. Search NVIDIA's issues "
        f"for '{name[:80]}'.",
    )


def _find_message(text: str) -> str:
    rest = text[max((match.end() for match in _CODE.finditer(text)), default=0) :]
    return " ".join(rest.split()).lstrip(":.,- ") or text.strip()


def _describe_error_parts(error: ErrorLine) -> Iterator[str]:
    if error.status:
        yield f"The parser reports {error.status}."
    if error.condition:
        yield f"A condition in TensorRT's code did not hold: {error.condition}."
    elif error.quoted and not error.file:
        yield f"TensorRT says: {error.quoted}."
    if error.code is not None:
        meaning = _CODES.get(error.code, "not in the documentation")
        yield f"Error code {error.code} is {meaning}."
    if error.file:
        function = f", function {error.function}" if error.function else ""
        part = f", belongs to {error.part}" if error.part else ""
        yield f"{error.file}{function}{part}. {error.about}".rstrip()
    topic = _find_topic(f"{error.condition} {error.function}".lower())
    if topic:
        yield topic


def _find_topic(name: str) -> str:
    for words, topic in _TOPICS.items():
        if any(word in name for word in words):
            return topic
    return ""


def _explain_marked_line(text: str) -> KnownError | None:
    """Return a general entry for the first line with the log prefix of a warning or error.

    None without such a line.
    """
    for line in text.encode(errors="replace").split(b"\n", _MAX_LINES)[:_MAX_LINES]:
        cleaned = log.clean_line(line)
        level, _, content = log.split_prefix(cleaned)
        message = content.decode(errors="replace").strip()
        is_marked = log.is_marked(cleaned) or _PROVIDER.match(cleaned)
        if level not in ("W", "E") or not message or not is_marked:
            continue
        if level == "E":
            severity, name, fix = ERROR, "An error", _advise_fix(ErrorLine())
        else:
            severity, name = WARNING, "A warning"
            fix = (
                "Compare the engine's layers with the prediction ('qdqtool verify'). If the layers "
                "agree, the warning needs no action."
            )
        return KnownError(
            f"unknown-{severity}",
            f"{name} of TensorRT that qdqtool does not know",
            "",
            severity,
            f"TensorRT's logger marks this line as {name.lower()}; nothing more is known.",
            fix,
            "the line's prefix",
            unknown=f"The meaning of the text. Search NVIDIA's issues for '{message[:80]}'.",
        )
    return None


def _advise_fix(error: ErrorLine) -> str:
    if error.part == _PARSER.name:
        return (
            "Check the model (onnx.checker, onnxruntime), fold constants ('polygraphy surgeon "
            "sanitize --fold-constants') and see whether this operator and opset are in "
            "onnx-tensorrt's operators.md."
        )
    if error.code == 5 or "alloc" in error.function.lower():
        return (
            "Free GPU memory, lower the workspace or the batch, and close other programs on this "
            "GPU."
        )
    if error.code == 3 or (error.code == 9 and not error.file):
        return "Change the call, option or setting that the text names."
    if error.part in ("the runtime", "CUDA and memory"):
        return (
            "Check that the engine was built with this TensorRT version, driver and GPU. If not, "
            "build the engine again on this machine."
        )
    return (
        "First try a newer TensorRT: most errors of this form are bugs of one version. Then find "
        "out whether Q/DQ is the cause: build the model without Q/DQ (or without --int8). If this "
        "build succeeds, run 'qdqtool predict' to find causes in the model, then remove Q/DQ block "
        "by block."
    )


_NO_IMPLEMENTATION = "Could not find any implementation for node"
_NUMBERS = re.compile(r"(?:_(?:clone_)?\d+){1,20}$")
_UNNAMED = re.compile(r"\(Unnamed Layer\* \d{1,9}\) \[(\w{1,40})\]")
_MAX_NAME = 4000


@dataclass(frozen=True, slots=True)
class NamedNode:
    """Node that an error text names.

    Attributes:
        name: Name as printed.
        kind: Kind of the node.
        is_quantized: Whether the name contains Q or DQ nodes.
        has_activation: Whether an activation or another elementwise node is fused into the node.
        ends: First and last node, if the node is a region; else empty.
    """

    name: str
    kind: NodeKind
    is_quantized: bool = False
    has_activation: bool = False
    ends: tuple[str, ...] = ()


def parse_missing_kernel(text: str) -> NamedNode | None:
    """Return the node for which an error text reports no implementation, else None."""
    start = text.find(_NO_IMPLEMENTATION)
    if start < 0:
        return None
    line = text[start + len(_NO_IMPLEMENTATION) :].split("\n", 1)[0][:_MAX_NAME]
    line = line.split(" due to ", 1)[0].strip().rstrip(")").rstrip(" ")
    if not line.strip(".:;,'\"{}[]() \t"):
        return None
    name = line.removesuffix(".").strip()
    if name.count("(") == name.count(")") + 1:
        name += ")"
    return parse_node_name(name)


def parse_node_name(name: str) -> NamedNode:
    """Return the node that the name of a layer describes."""
    fused = parse_layer_name(name)
    if fused.kind == "foreign":
        return NamedNode(name, NODE_KINDS["region"], ends=tuple(fused.components))
    words = [parse_operator(part) for part in fused.components or [name]]
    kinds = {kind.id for kind in map(find_node_kind, words) if kind is not None}
    kind = _choose_kind(kinds, words)
    return NamedNode(
        name,
        kind,
        is_quantized="quantizer" in kinds or "_quantizer/" in name,
        has_activation="pointwise" in kinds and kind.id != "pointwise",
    )


def _choose_kind(kinds: Set[str], words: Iterable[str]) -> NodeKind:
    """Return the kind of ``kinds`` that is first in the table.

    If ``kinds`` is empty, return the kind ``plugin`` if a word is a plugin's name, else the kind of
    all other nodes.
    """
    for kind in NODE_KINDS.values():
        if kind.id in kinds:
            return kind
    is_plugin = any(word.endswith(("_TRT", "Plugin")) for word in words)
    return NODE_KINDS["plugin"] if is_plugin else _OTHER_KIND


def parse_operator(component: str) -> str:
    """Return the operator in a node's name, such as ``Range`` for ``/model.22/Range_2``."""
    unnamed = _UNNAMED.search(component[:_MAX_NAME])
    if unnamed:
        return unnamed[1]
    last = component[-_MAX_NAME:].rsplit("/", 1)[-1].removesuffix("_quantize_scale_node")
    return _NUMBERS.sub("", last)


def find_node_kind(word: str) -> NodeKind | None:
    """Return the kind of an operator or a usual layer name such as ``conv1``; None if unknown."""
    lower = word.lower()
    kind = _KINDS_BY_WORD.get(lower)
    if kind is not None:
        return kind
    if lower.endswith(("weight", "bias", "_output_0")):
        return None
    if "quantizelinear" in lower:
        return NODE_KINDS["quantizer"]
    if "deconv" in lower or "convtranspose" in lower:
        return NODE_KINDS["deconvolution"]
    return NODE_KINDS["convolution"] if "conv" in lower else None


def adapt_to_node(entry: KnownError, text: str) -> KnownError:
    """Return the entry on a missing kernel, with cause and fix for the node in the text.

    If the text names no node, `entry` is returned unchanged.
    """
    node = parse_missing_kernel(text)
    if node is None:
        return entry
    if node.kind.id == "convolution" and node.is_quantized:
        return replace(
            entry, cause=f"{shorten_name(node.name)} is a quantized convolution. {entry.cause}"
        )
    if node.kind is _OTHER_KIND and not node.is_quantized:
        return replace(
            entry,
            cause=(
                f"{shorten_name(node.name)}: the kind of this node is not clear from its name. "
                f"{entry.cause}"
            ),
            unknown="The kind of the node is unknown; this advice is for convolutions.",
        )
    advice = node.kind if node.kind.cause else NODE_KINDS["plain"]
    ends = " to ".join(map(shorten_name, node.ends)) or "its first to its last node"
    words = advice.cause.format(name=shorten_name(node.name), kind=node.kind.what, ends=ends)
    return replace(
        entry,
        title=f"No kernel for {node.kind.what}",
        cause=words,
        fix=advice.fix,
        source=advice.source,
        codes=(),
        unknown=advice.unknown,
    )


def shorten_name(name: str) -> str:
    """Replace the middle of a name by ``...`` if it has more than 90 characters."""
    return name if len(name) <= 90 else f"{name[:40]}...{name[-40:]}"


def _read_entries() -> Iterator[KnownError]:
    """Yield the entries of the table.

    If an entry has the field ``like``, it inherits missing fields from the entry with this id.
    """
    entries = read_sections(Path(__file__).with_name("errors.toml"))["error"]
    by_id = {fields.get("id"): fields for fields in entries}
    for name, fields in by_id.items():
        defaults = by_id[fields["like"]] if "like" in fields else {}
        stated = {key: value for key, value in fields.items() if key != "like"}
        yield make_entry(KnownError, {**defaults, **stated}, name or "error")


KNOWN_ERRORS = tuple(_read_entries())
"""All entries, in the order in which they are matched: specific texts before general texts."""

_COMPILED = [
    (re.compile(entry.pattern, re.IGNORECASE | re.DOTALL), entry) for entry in KNOWN_ERRORS
]
_MAX_MESSAGE = 4000


def lookup(text: str) -> KnownError | None:
    """Return the entry for a warning or error of TensorRT, adapted to the node in the text.

    If no entry matches, but the text has the form of a TensorRT error, an entry that describes this
    form is returned. None for other texts. Only the first 4,000 characters of the text are read.
    """
    head = text[:_MAX_MESSAGE]
    for pattern, entry in _COMPILED:
        if pattern.search(head):
            return adapt_to_node(entry, head) if entry.id == "no-implementation" else entry
    return explain_unlisted_error(head)


def is_listed(error: KnownError) -> bool:
    """Return whether the table has an entry for an error, and not only the form of its text."""
    return bool(error.pattern)


_SKIPPED_TACTIC = next(entry for entry in KNOWN_ERRORS if entry.id == "tactic-skipped")


def explain_messages(facts: Json) -> Json:
    """Add id, severity, cause and fix of each message to the facts of a build, in place.

    `facts` is the result of :func:`qdqtool.buildlog.summary.summarize`. If a message has no entry,
    the added fields are None. The fix does not advise an option that the command has.
    """
    options = (facts["command"] or "").split()
    for message in facts["messages"]:
        entry = _SKIPPED_TACTIC if message["level"] == "note" else lookup(message["text"])
        message["known"] = entry.id if entry else None
        message |= {name: getattr(entry, name, None) for name in ("severity", "cause", "fix")}
        if entry and entry.option in options:
            message["fix"] = entry.fix_with_option
    return facts
