"""TensorRT's fused layer names, taken apart.

A fused name joins what it absorbed with `` + ``; layers merged side by side are joined with `` || ``; pointwise
layers are written ``PWN(a, b)`` and nest. Node names may hold any of these signs themselves, so joints count only
outside brackets, and a set of known names, where given, wins over the signs.

Seen in builds of TensorRT 8.0 to 10 and TensorRT-RTX 1.7; ``_quantize_scale_node`` is 8.0 to 8.2.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

_REFORMATTING = "Reformatting CopyNode for "
_REFORMAT = re.compile(_REFORMATTING + r"(Input|Output) Tensor (\d+) to (.*)", re.DOTALL)
_NETWORK = re.compile(_REFORMATTING + r"Network (Input|Output) (.*)", re.DOTALL)
_COPY = " copy"
_FOREIGN = re.compile(r"\{ForeignNode\[(.*)\]\}", re.DOTALL)
_MYELIN = re.compile(r"(.*)_myl(?:n?\d*)_(?:\d+)", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")
_CLONE = "_clone_"
SCALE_NODE = "_quantize_scale_node"
_MAX_DEPTH = 60
_MAX_LENGTH = (
    20_000  # a longer name is damage: the longest merges seen have some hundred characters a node
)


class NameSet(frozenset[str]):
    """Names of nodes, initializers and parser layers that a fused name may hold, joints in them or not."""

    def names_with(self, joint: str) -> tuple[str, ...]:
        """Those that hold a joint: few or none, looked for once, not for each layer."""
        found: tuple[str, ...] | None = self.__dict__.get(joint)
        if found is None:
            found = self.__dict__[joint] = tuple(name for name in self if joint in name)
        return found


NO_NAMES = NameSet()


@dataclass(frozen=True, slots=True)
class FusedName:
    """A layer name taken apart.

    Attributes:
        name: The whole name.
        kind: ``layer``; ``reformat-input``, ``reformat-output`` (of the layer ``of``, tensor number ``index``);
            ``reformat-network`` (of the network's input or output ``of``); ``copy`` (of the tensor ``of``);
            ``foreign`` (Myelin, ``components`` are the first and the last node); ``myelin`` (a kernel inside Myelin);
            ``station`` (host synchronisation).
        alternatives: For each layer merged with ``||`` its components, pointwise members expanded; one list otherwise.
        of: See ``kind``.
        index: See ``kind``.
    """

    name: str
    kind: str
    alternatives: list[list[str]] = field(default_factory=list)
    of: str = ""
    index: int = 0

    @property
    def components(self) -> list[str]:
        """Everything the layer absorbed, in order, over all alternatives."""
        return [part for group in self.alternatives for part in group]

    @property
    def bases(self) -> list[str]:
        """The components without the suffixes that TensorRT adds to copies of a node."""
        return [base_name(part) for part in self.components]

    @property
    def is_copy(self) -> bool:
        """Whether the layer only moves data: a reformat or a copy."""
        return self.kind in ("reformat-input", "reformat-output", "reformat-network", "copy")


def is_copy(name: str) -> bool:
    """Whether a layer of this name only moves data; most names need not be taken apart for that."""
    return (name.endswith(_COPY) or name.startswith(_REFORMATTING)) and parse_layer_name(
        name
    ).is_copy


def base_name(component: str) -> str:
    """The ONNX name behind a component: without ``_clone_1_clone_2`` and ``_quantize_scale_node``."""
    stripped = component[: _find_clone_suffix(component)] if _CLONE in component else component
    stripped = stripped.removesuffix(SCALE_NODE)
    return stripped[: _find_clone_suffix(stripped)] if _CLONE in stripped else stripped


def _find_clone_suffix(name: str) -> int:
    """Where the ``_clone_1_clone_2`` at the end of a name begins; its length where it has none. Reads from the end."""
    end = len(name)
    while True:
        digits = end
        while digits > 0 and name[digits - 1].isdecimal():
            digits -= 1
        if digits == end or not name.endswith(_CLONE, 0, digits):
            return end
        end = digits - len(_CLONE)


def parse_layer_name(name: str, known: NameSet = NO_NAMES) -> FusedName:
    """Takes TensorRT's name of a layer apart.

    A stretch of it that is one of the ``known`` names of nodes, initializers and parser layers is kept whole.
    """
    if name in known or len(name) > _MAX_LENGTH:
        return FusedName(name, "layer", [[name]])
    reformats = name.startswith(_REFORMATTING)  # few do
    if reformats and (match := _REFORMAT.fullmatch(name)):
        inner = parse_layer_name(match[3], known)
        return FusedName(
            name, f"reformat-{match[1].lower()}", inner.alternatives, match[3], int(match[2][:9])
        )
    if reformats and (match := _NETWORK.fullmatch(name)):
        return FusedName(name, "reformat-network", [], match[2])
    if name.startswith("{") and (match := _FOREIGN.fullmatch(name)):
        first, _, last = match[1].partition("...")
        return FusedName(name, "foreign", [[part for part in (first, last) if part]])
    if name.startswith("[trainStation") or name.endswith("[DevicetoShapeHostCopy]"):
        return FusedName(name, "station", [])
    if name.endswith(_COPY):
        return FusedName(name, "copy", [], name[: -len(_COPY)])
    if "_myl" in name and (match := _MYELIN.fullmatch(name)):
        return FusedName(name, "myelin", [[] if match[1].startswith("__myl") else [match[1]]])
    return FusedName(
        name,
        "layer",
        [
            _parse_components(group, known, 0)
            for group in split_outside_brackets(name, " || ", known)
        ],
    )


def _parse_components(text: str, known: NameSet, depth: int) -> list[str]:
    result: list[str] = []
    for part in split_outside_brackets(text, " + ", known):
        inner = _pointwise_members(part) if part not in known and depth < _MAX_DEPTH else None
        if inner is not None:
            for member in split_outside_brackets(inner, ", ", known):
                result.extend(_parse_components(member, known, depth + 1))
        elif part:
            result.append(part)
    return result


def _pointwise_members(part: str) -> str | None:
    """What is inside ``PWN(...)`` when the bracket closes at the very end."""
    if not (part.startswith("PWN(") and part.endswith(")")):
        return None
    depths = itertools.accumulate((sign == "(") - (sign == ")") for sign in part[3:-1])
    return part[4:-1] if all(depths) else None


def split_outside_brackets(text: str, joint: str, known: NameSet = NO_NAMES) -> list[str]:
    """Splits at ``joint`` outside brackets, keeping stretches that are known names whole.

    Where the brackets of the text do not close (a node name holds a lone one), every joint counts.
    """
    if joint not in text:
        return [text]
    pieces = _split(text, joint)
    if not known or (len(pieces) == 1 and text in known):
        return pieces
    # Where a known name holds the joint, cutting at every joint could break it.
    holding = known.names_with(joint)
    if not any(name in text for name in holding):
        return pieces
    return _join_names(
        text.split(joint), known, joint, max(name.count(joint) + 1 for name in holding)
    )


def _split(text: str, joint: str) -> list[str]:
    if not _BRACKET.search(text):  # as of most
        return text.split(joint)
    pieces: list[str] = []
    depth = start = 0
    for found in re.finditer(rf"[(\[{{]|([)\]}}])|{re.escape(joint)}", text):
        if found[0] == joint:
            if not depth:
                pieces.append(text[start : found.start()])
                start = found.end()
        else:
            depth += -1 if found[1] else 1
            if depth < 0:
                break
    return text.split(joint) if depth else [*pieces, text[start:]]


def _join_names(tokens: list[str], known: NameSet, joint: str, longest: int) -> list[str]:
    """Glues neighbouring tokens: to the longest known name, of at most so many tokens, else until brackets close."""
    result: list[str] = []
    at = 0
    while at < len(tokens):
        for width in range(min(longest, len(tokens) - at), 1, -1):
            glued = joint.join(tokens[at : at + width])
            if glued in known:
                result.append(glued)
                at += width
                break
        else:
            width = 1
            glued = tokens[at]
            while glued not in known and _has_open_bracket(glued) and at + width < len(tokens):
                glued += joint + tokens[at + width]
                width += 1
            result.append(glued if not _has_open_bracket(glued) or width == 1 else tokens[at])
            at += width if not _has_open_bracket(glued) or width == 1 else 1
    return result


def _has_open_bracket(text: str) -> bool:
    return text.count("(") > text.count(")") or text.count("[") > text.count("]")
