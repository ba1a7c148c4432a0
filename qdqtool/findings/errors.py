"""What TensorRT's warnings and errors mean for a Q/DQ model: text, cause, fix.

The texts are in ``qdqtool/findings/errors.toml``: wording and causes from NVIDIA's issue threads, from the sources of
onnx-tensorrt and trtexec, and from TensorRT's documentation. A text is matched by a fragment that is the same in every
version; names and numbers in it may differ. An error that is not in the table is described by
its form, and a missing kernel by the kind of its node (``error_forms.toml``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qdqtool.buildlog import log
from qdqtool.buildlog.names import parse_layer_name
from qdqtool.types import Json
from qdqtool.util.records import record, replace_fields
from qdqtool.util.tables import make_entry, read_sections

HARMLESS, WARNING, ERROR = "harmless", "warning", "error"


@record
class KnownError:
    """A message that is known.

    Attributes:
        id: Stable short name.
        title: What it is, in a few words.
        pattern: Regular expression, searched without regard to case; short and free of nested repetition.
        severity: ``error``, ``warning`` or ``harmless``.
        cause: Why TensorRT says it, in one sentence or two.
        fix: What to do.
        source: Where cause and fix come from.
        versions: TensorRT versions that say it, where that is known.
        codes: Finding codes of ``qdqtool predict`` that report it before the build.
        fixed: For a bug: in which version NVIDIA says that it is fixed, and where it says so.
        unknown: What is not known of it.
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
_SAID = re.compile(r"Error Code:? \d{1,2}: [A-Z][\w ]{2,40}? \((.{1,300}?)\)?\s{0,4}(?:$|\n)")
_STATUS = re.compile(
    r"\b(INVALID_(?:NODE|GRAPH|VALUE)|UNSUPPORTED_(?:NODE|GRAPH|NODE_ATTR|NODE_INPUT|NODE_DATATYPE|NODE_DYNAMIC)"
    r"|MODEL_DESERIALIZE_FAILED): (.{1,300})"
)  # what the parser's functions return
_PROVIDER = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:WARNING|ERROR)\]"
)  # onnxruntime's stamp, alone
_LINES = 50  # of an excerpt, in which a marked line is looked for
_OLD_ASSERTION = re.compile(r"Assertion Error in \w{1,80}: \d{1,9} \((.{1,300})\)")  # to TensorRT 7
_MAX_TEXT = 20_000


@record
class _Code:
    """What ``Error Code N`` means."""

    number: int
    meaning: str


@record
class _Part:
    """A part of TensorRT.

    Attributes:
        files: How its source files begin, with spaces between.
        name: The part.
        about: What errors of that part are about.
    """

    files: str
    name: str
    about: str


@record
class NodeKind:
    """What a node does, as far as its name says, and what is known where it has no kernel.

    Attributes:
        id: ``convolution``, ``other`` ...
        what: In words.
        operators: Operators and layer types of that kind, with spaces between.
        cause: Why it has none: with ``{name}``, ``{kind}`` and ``{ends}`` (of a region).
        fix: What to do.
        source: Where cause and fix come from.
        unknown: What is not known of it.
    """

    id: str
    what: str
    operators: str = ""
    cause: str = ""
    fix: str = ""
    source: str = ""
    unknown: str = ""


_FORMS = read_sections(Path(__file__).with_name("error_forms.toml"))
_CODES = {
    c.number: c.meaning for c in (make_entry(_Code, given, "code") for given in _FORMS["code"])
}
_PARTS = tuple(make_entry(_Part, given, "part") for given in _FORMS["part"])
_PARSER = _PARTS[0]
KINDS = {
    k.id: k
    for k in (make_entry(NodeKind, given, given.get("id", "node")) for given in _FORMS["node"])
}
_OTHER = KINDS["other"]
_BY_WORD = {word: kind for kind in KINDS.values() for word in kind.operators.lower().split()}


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
        said: What stands in parentheses behind ``Error Code N``.
    """

    file: str = ""
    function: str = ""
    line: int | None = None
    code: int | None = None
    condition: str = ""
    part: str = ""
    about: str = ""
    status: str = ""
    said: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the text has the form of an error at all."""
        return bool(
            self.condition or self.code is not None or self.status or (self.file and self.function)
        )


def parse_error(text: str) -> ErrorLine:
    """Takes an error text apart."""
    text = text[:_MAX_TEXT]
    place, path, named = _PLACE.search(text), _PATH.search(text), _FUNCTION.search(text)
    file, line = (path[1], int(path[2] or path[3])) if path else ("", None)
    function = named[named.lastindex or 0] if named else ""
    if place:
        file, function, line = place[1], place[2].rsplit("::", 1)[-1], int(place[3])
    code = _CODE.search(text) or _BARE_CODE.search(text)
    number = int(code[code.lastindex or 0]) if code else None
    assertion = _OLD_ASSERTION.search(text) or _ASSERTION.search(text)
    condition = assertion[1].strip().rstrip(".") if assertion else ""
    status = _STATUS.search(text)
    lower = file.lower()
    part, about = next(
        ((p.name, p.about) for p in _PARTS if lower.startswith(tuple(p.files.split()))), ("", "")
    )
    if not part and (status or function.startswith("import")):
        part, about = _PARSER.name, _PARSER.about
    refused = f"{status[1]}: {status[2].strip().rstrip('.')}" if status else ""
    said = _SAID.search(text)
    return ErrorLine(
        file,
        function,
        line,
        number,
        condition,
        part,
        about,
        refused,
        said[1].strip().rstrip(".") if said else "",
    )


_ABOUT = {  # by words of a condition or a function, the first that fits
    ("scale",): "It is about scales: their number, or that there is one at all.",
    ("axis", "dims", "shape"): "It is about shapes or axes.",
    ("memory", "alloc"): "It is about memory.",
}


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
    elif found.said and not found.file:
        parts.append(f"TensorRT says: {found.said}.")
    if found.code is not None:
        parts.append(
            f"Error code {found.code} is {_CODES.get(found.code, 'none that the documentation names')}."
        )
    if found.file:
        inside = f", function {found.function}" if found.function else ""
        owner = f", belongs to {found.part}" if found.part else ""
        parts.append(f"{found.file}{inside}{owner}. {found.about}".rstrip())
    said = f"{found.condition} {found.function}".lower()
    parts += [about for words, about in _ABOUT.items() if any(word in said for word in words)][:1]
    first = (
        "Read the lines above: they name the node. "
        if found.part in ("", "the builder")
        else "The lines above name the node or layer. "
    )
    return KnownError(
        "unknown-error",
        f"An error of {found.part or 'TensorRT'} that is not in our table",
        "",
        ERROR,
        " ".join(parts),
        first + _steps(found),
        "the form of the text; error codes: TensorRT's API documentation",
        unknown="Its cause. Nothing about these words is in our table; search NVIDIA's issues for "
        f"'{(found.condition or found.said or found.status or found.function or found.file)[:80]}'.",
    )


def _marked(text: str) -> KnownError | None:
    """A line that only its prefix shows to be a warning or an error of TensorRT: nothing else is known of it."""
    for line in text.encode(errors="replace").split(b"\n", _LINES)[:_LINES]:
        cleaned = log.clean_line(line)
        level, _, message = log.split_prefix(cleaned)
        said = message.decode(errors="replace").strip()
        if (
            level not in ("W", "E")
            or not said
            or not (log.is_marked(cleaned) or _PROVIDER.match(cleaned))
        ):
            continue
        severity, name, fix = (
            (ERROR, "An error", _steps(ErrorLine()))
            if level == "E"
            else (
                WARNING,
                "A warning",
                "Compare the engine's layers with the prediction ('qdqtool verify'): a warning that "
                "changes nothing there can stay.",
            )
        )
        return KnownError(
            f"unknown-{severity}",
            f"{name} of TensorRT that is not in our table",
            "",
            severity,
            f"TensorRT's logger marks this line as {name.lower()}; nothing more is known.",
            fix,
            "the line's prefix",
            unknown=f"What it means. Search NVIDIA's issues for '{said[:80]}'.",
        )
    return None


def _steps(found: ErrorLine) -> str:
    if found.part == _PARSER.name:
        return (
            "Check the model (onnx.checker, onnxruntime), fold constants ('polygraphy surgeon sanitize "
            "--fold-constants') and see whether this operator and opset are in onnx-tensorrt's operators.md."
        )
    if found.code == 5 or "alloc" in found.function.lower():
        return "Free GPU memory, lower the workspace or the batch, and close other programs on this GPU."
    if found.code == 3 or (found.code == 9 and not found.file):
        return "Change the call, option or setting that the text names."
    if found.part in ("the runtime", "CUDA and memory"):
        return "Check that engine, TensorRT, driver and GPU belong together; build the engine again on this machine."
    return (
        "Find out whether Q/DQ is the cause: build the model without Q/DQ (or without --int8). If that works, run "
        "'qdqtool predict' for what it knows before a build, then leave the Q/DQ of one block after another out. "
        "Try a newer TensorRT before anything longer: most texts of this form are bugs of one version."
    )


_NO_IMPLEMENTATION = "Could not find any implementation for node"
_NUMBERS = re.compile(r"(?:_(?:clone_)?\d+){1,20}$")
_UNNAMED = re.compile(r"\(Unnamed Layer\* \d{1,9}\) \[(\w{1,40})\]")
_MAX_NAME = 4000


@dataclass(frozen=True, slots=True)
class NamedNode:
    """The node that an error names.

    Attributes:
        name: As printed.
        kind: What it does.
        quantized: Whether Q or DQ nodes are a part of it.
        activation: Whether an activation or another elementwise node is fused into it.
        ends: For a region, its first and last node.
    """

    name: str
    kind: NodeKind
    quantized: bool = False
    activation: bool = False
    ends: tuple[str, ...] = ()


def named_node(text: str) -> NamedNode | None:
    """The node behind ``Could not find any implementation for node``; None where the text names none."""
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
    return node_of(name)


def node_of(name: str) -> NamedNode:
    """What a (fused) layer name says of its node."""
    fused = parse_layer_name(name)
    if fused.kind == "foreign":
        return NamedNode(name, KINDS["region"], ends=tuple(fused.components))
    words = [operator_of(part) for part in fused.components] or [operator_of(name)]
    kinds = {kind.id for kind in map(kind_of, words) if kind is not None}
    quantized = "quantizer" in kinds or "_quantizer/" in name
    kind = next((k for k in KINDS.values() if k.id in kinds), _OTHER)
    if kind is _OTHER and any(word.endswith(("_TRT", "Plugin")) for word in words):
        kind = KINDS["plugin"]
    return NamedNode(name, kind, quantized, "pointwise" in kinds and kind.id != "pointwise")


def operator_of(component: str) -> str:
    """The operator in a node's name: ``/model.22/Range_2`` is a Range, ``Conv_224`` a Conv."""
    unnamed = _UNNAMED.search(component[:_MAX_NAME])
    if unnamed:
        return unnamed[1]
    last = component[-_MAX_NAME:].rsplit("/", 1)[-1].removesuffix("_quantize_scale_node")
    return _NUMBERS.sub("", last)


def kind_of(word: str) -> NodeKind | None:
    """The kind of an operator or of a word that people name layers with (``002_convolutional``, ``conv1``)."""
    lower = word.lower()
    found = _BY_WORD.get(lower)
    if found is not None:
        return found
    if lower.endswith(("weight", "bias", "_output_0")):
        return None
    if "quantizelinear" in lower:
        return KINDS["quantizer"]
    if "deconv" in lower or "convtranspose" in lower:
        return KINDS["deconvolution"]
    return KINDS["convolution"] if "conv" in lower else None


def for_node(entry: KnownError, text: str) -> KnownError:
    """The entry about a missing kernel, made for the node that the text names."""
    node = named_node(text)
    if node is None:
        return entry
    if node.kind.id == "convolution" and node.quantized:
        return replace_fields(
            entry, cause=f"{short(node.name)} is a quantized convolution. {entry.cause}"
        )
    if node.kind is _OTHER and not node.quantized:
        return replace_fields(
            entry,
            cause=f"{short(node.name)}: its name does not say what it is. {entry.cause}",
            unknown="What kind of node it is; the advice is the one for convolutions.",
        )
    advice = node.kind if node.kind.cause else KINDS["plain"]
    ends = " to ".join(map(short, node.ends)) or "its first to its last node"
    words = advice.cause.format(name=short(node.name), kind=node.kind.what, ends=ends)
    return replace_fields(
        entry,
        title=f"No kernel for {node.kind.what}",
        cause=words,
        fix=advice.fix,
        source=advice.source,
        codes=(),
        unknown=advice.unknown,
    )


def short(name: str) -> str:
    """A name that fits into a sentence."""
    return name if len(name) <= 90 else f"{name[:40]}...{name[-40:]}"


def _known() -> Iterator[KnownError]:
    """The entries; one that is ``like`` another has its own words and all that it does not say of the other's."""
    named = {
        given.get("id"): given
        for given in read_sections(Path(__file__).with_name("errors.toml"))["error"]
    }
    for name, given in named.items():
        other = named[given["like"]] if "like" in given else {}
        yield make_entry(
            KnownError,
            {**other, **{k: v for k, v in given.items() if k != "like"}},
            name or "error",
        )


KNOWN = tuple(_known())
"""Every known text, the ones that say most before those that are consequences of others."""

_COMPILED = [(re.compile(known.pattern, re.IGNORECASE | re.DOTALL), known) for known in KNOWN]
_MAX_MESSAGE = 4000


def lookup(text: str) -> KnownError | None:
    """The entry for a warning or error of TensorRT, made for the node that it names.

    Where the words are in no entry and the text has the form of an error of TensorRT: what the form says, and that the
    cause is not known. None for any other text. Only the first 4,000 characters are looked at.
    """
    head = text[:_MAX_MESSAGE]
    found = next((known for pattern, known in _COMPILED if pattern.search(head)), None)
    if found is None:
        return from_shape(head)
    return for_node(found, head) if found.id == "no-implementation" else found


def annotate(facts: Json) -> Json:
    """Adds what is known of each message to the facts of a build (:func:`qdqtool.buildlog.summary.summarize`)."""
    for message in facts["messages"]:
        known = lookup(message["text"])
        message["known"] = known.id if known else None
        message |= {name: getattr(known, name, None) for name in ("severity", "cause", "fix")}
    return facts
