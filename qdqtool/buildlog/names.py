"""Parser of the names that TensorRT gives to fused layers.

A fused name joins the names of the absorbed nodes with `` + ``. Names of layers that are merged
side by side are joined with `` || ``. Pointwise layers are written ``PWN(a, b)`` and nest. Node
names may contain any of these signs, so joints count only outside brackets. A node name that
contains a joint outside brackets is split, and its parts match no node.

Seen in builds of TensorRT 8.0 to 10 and TensorRT-RTX 1.7. Only 8.0 to 8.2 write
``_quantize_scale_node``.
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
# Longer names are only split at their joints. Names of merged layers have a few hundred characters
# per node.
_MAX_LENGTH = 20_000


@dataclass(frozen=True, slots=True)
class FusedName:
    """Parsed name of an engine layer.

    Attributes:
        name: The whole name.
        kind: ``layer``; ``reformat-input`` or ``reformat-output`` (reformat of a layer's tensor);
            ``reformat-network`` (reformat of a network input or output); ``copy`` (copy of a
            tensor); ``foreign`` (Myelin layer, whose ``components`` are the first and the last
            node); ``myelin`` (kernel inside Myelin); ``station`` (host synchronization).
        alternatives: Components of each layer merged with ``||``, with the members of ``PWN(...)``
            as separate components. One list if nothing was merged; no list if the name contains no
            nodes.
        subject: Layer or tensor of a reformat or copy; empty for other kinds.
        index: Number of the reformatted tensor among the layer's inputs or outputs.
    """

    name: str
    kind: str
    alternatives: list[list[str]] = field(default_factory=list)
    subject: str = ""
    index: int = 0

    @property
    def components(self) -> list[str]:
        """Components of all merged layers in one list, in order."""
        return [part for group in self.alternatives for part in group]

    @property
    def bases(self) -> list[str]:
        """Components without the suffixes that TensorRT adds to copies of a node."""
        return [base_name(part) for part in self.components]

    @property
    def is_copy(self) -> bool:
        """Whether the layer only moves data: a reformat or a copy."""
        return self.is_reformat or self.kind == "copy"

    @property
    def is_reformat(self) -> bool:
        """Whether the layer is a reformat that the builder added."""
        return self.kind in ("reformat-input", "reformat-output", "reformat-network")


def base_name(component: str) -> str:
    """Remove the suffixes ``_clone_1_clone_2`` and ``_quantize_scale_node`` from a component."""
    return _strip_clones(_strip_clones(component).removesuffix(SCALE_NODE))


def _strip_clones(name: str) -> str:
    """Remove ``_clone_1_clone_2`` from the end of a name, in linear time."""
    if _CLONE not in name:
        return name
    end = len(name)
    while True:
        digits = end
        while digits > 0 and name[digits - 1].isdecimal():
            digits -= 1
        if digits == end or not name.endswith(_CLONE, 0, digits):
            return name[:end]
        end = digits - len(_CLONE)


def parse_layer_name(name: str) -> FusedName:
    """Split TensorRT's name of a layer into the nodes that the layer absorbed."""
    special = None if len(name) > _MAX_LENGTH else _parse_special_name(name)
    if special is not None:
        return special
    groups = split_outside_brackets(name, " || ")
    return FusedName(name, "layer", [_parse_components(group, 0) for group in groups])


def _parse_special_name(name: str) -> FusedName | None:
    """Parse the name of a reformat, copy, Myelin layer or synchronization; else return None."""
    if match := _FOREIGN.fullmatch(name):
        first, _, last = match[1].partition("...")
        return FusedName(name, "foreign", [list(filter(None, (first, last)))])
    if name.startswith("[trainStation") or name.endswith("[DevicetoShapeHostCopy]"):
        return FusedName(name, "station", [])
    if match := _REFORMAT.fullmatch(name):
        groups = parse_layer_name(match[3]).alternatives
        return FusedName(name, f"reformat-{match[1].lower()}", groups, match[3], int(match[2][:9]))
    if match := _NETWORK.fullmatch(name):
        return FusedName(name, "reformat-network", [], match[2])
    if name.endswith(_COPY):
        return FusedName(name, "copy", [], name[: -len(_COPY)])
    if match := _MYELIN.fullmatch(name):
        return FusedName(name, "myelin", [[] if match[1].startswith("__myl") else [match[1]]])
    return None


def _parse_components(text: str, depth: int) -> list[str]:
    components: list[str] = []
    for part in split_outside_brackets(text, " + "):
        members = _find_pointwise_members(part) if depth < _MAX_DEPTH else None
        if members is not None:
            for member in split_outside_brackets(members, ", "):
                components += _parse_components(member, depth + 1)
        elif part:
            components.append(part)
    return components


def _find_pointwise_members(part: str) -> str | None:
    """Return the text inside ``PWN(...)``; None unless the bracket closes at the end."""
    if not (part.startswith("PWN(") and part.endswith(")")):
        return None
    depths = itertools.accumulate((sign == "(") - (sign == ")") for sign in part[3:-1])
    return part[4:-1] if all(depths) else None


def split_outside_brackets(text: str, joint: str) -> list[str]:
    """Split a text at `joint` outside brackets.

    If the brackets of the text do not match (a node name may contain a single bracket), split at
    every joint.
    """
    if not _BRACKET.search(text):
        return text.split(joint)
    pieces: list[str] = []
    depth = start = 0
    for match in re.finditer(rf"[(\[{{]|([)\]}}])|{re.escape(joint)}", text):
        if match[0] == joint:
            if not depth:
                pieces.append(text[start : match.start()])
                start = match.end()
        else:
            depth += -1 if match[1] else 1
            if depth < 0:
                break
    return text.split(joint) if depth else [*pieces, text[start:]]
