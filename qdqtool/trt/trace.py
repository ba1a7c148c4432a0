"""Lines of TensorRT's optimizer log, and the :class:`Event` of each.

A line is the text after ``[V] [TRT] ``. Some lines name their pass (``ConstEltFusion: Fusing A with
B``), some belong to the pass of the last ``Running: ...`` line (``Removing A``), some to none
(``Merging layers:``).

A line joins two names with a word (``with``, ``into``, ``to``, ...), and a name may contain this
word as well. One of the two names is nearly always the layer that the pass is running on. A
:class:`TraceReader` remembers this layer and splits the line exactly. Without the layer,
:func:`parse` splits at the first joining word at which the brackets of both sides close. Then a
name that contains the joining word outside brackets is split wrongly. Line ends inside names are
not supported: TensorRT prints them as line ends.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from qdqtool.util.json_text import Json

RUNNING = "Running"
REMOVING = "Removing"
SWAPPING = "Swapping"
FUSING = "Fusing"
FUSING_INTO = "fusing"
ELIMINATING = "Eliminating"
SWAP_TYPE = "Swap the layer type"
CONVERT_TYPE = "Convert layer type"
MERGING = "Merging layers"
ELIMINATING_SLICE = "Eliminating slice"
ELIMINATING_CONCAT = "Eliminating concatenation"
REPLACING_SLICE = "Replacing slice"
RETARGETING = "Retargeting"
SQUEEZE = "SqueezePushDown kSQUEEZE_JOIN"
SQUEEZE_FORK = "SqueezePushDown kSQUEEZE_FORK"
COPY_STRIDING = "Generating copy because input does not support striding"
COPY_STOMPING = "Generating copy because of stomping hazard"
COPY_UNMOVABLE = "Generating copy because input is not movable"

NO_PASS = ""


# Not frozen: a frozen instance takes four times as long to create, and there are many.
@dataclass(unsafe_hash=True, slots=True)
class Event:
    """One line of TensorRT's optimizer log.

    Attributes:
        pass_name: The pass, named as in TensorRT's log (``HorizontalMergeQNodes``).
        kind: ``Running``, ``Removing``, ``Swapping``, ``Eliminating``, ``Fusing``, ...
            (``qdqtool.trt.trace`` lists them with their text).
        subject: First layer or tensor in the line.
        object: Second layer or tensor, or an empty string.
        case: Case of the pass that explains a simulated line, ``<pass>/<case>``.
    """

    pass_name: str
    kind: str
    subject: str
    object: str = ""
    case: str = field(default="", compare=False)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "pass": self.pass_name,
            "event": self.kind,
            "subject": self.subject,
            "object": self.object,
            "case": self.case,
        }


class LineFormat(NamedTuple):
    """Wording of one kind of log line.

    Attributes:
        before: Text before the subject; ``{pass}`` in it is the pass's name.
        between: Text between subject and object; empty if the line has no object.
        after: Text after the object.
        scope: ``printed`` if the line names its pass, ``running`` if it belongs to the pass of the
            last Running line, ``none`` if it belongs to no pass.
    """

    before: str
    between: str
    after: str
    scope: str


FORMATS: dict[str, LineFormat] = {
    RUNNING: LineFormat("Running: {pass}", " on ", "", "printed"),
    REMOVING: LineFormat("Removing ", "", "", "running"),
    SWAPPING: LineFormat("Swapping ", " with ", "", "running"),
    FUSING: LineFormat("{pass}: Fusing ", " with ", "", "printed"),
    FUSING_INTO: LineFormat("{pass}: fusing ", " into ", "", "printed"),
    ELIMINATING: LineFormat("Eliminating ", " which duplicates (Q) ", "", "running"),
    SWAP_TYPE: LineFormat("Swap the layer type of ", " from ", "", "running"),
    CONVERT_TYPE: LineFormat("Convert layer type of ", " from ", "", "running"),
    SQUEEZE: LineFormat("-----------SqueezePushDown kSQUEEZE_JOIN case: ", " --> ", "", "running"),
    SQUEEZE_FORK: LineFormat(
        "-----------SqueezePushDown kSQUEEZE_FORK case: ", " --> ", "", "running"
    ),
    MERGING: LineFormat("Merging layers: ", "", "", "none"),
    ELIMINATING_SLICE: LineFormat("Eliminating slice ", " by retargeting ", "", "none"),
    ELIMINATING_CONCAT: LineFormat("Eliminating concatenation ", "", "", "none"),
    REPLACING_SLICE: LineFormat("Replacing slice ", " with copy from ", "", "none"),
    RETARGETING: LineFormat("Retargeting ", " to ", "", "none"),
    COPY_STRIDING: LineFormat(
        "Generating copy for ", " to ", " because input does not support striding.", "none"
    ),
    COPY_STOMPING: LineFormat(
        "Generating copy for ", " to ", " because of stomping hazard.", "none"
    ),
    COPY_UNMOVABLE: LineFormat(
        "Generating copy for ", " to ", " because input is not movable.", "none"
    ),
}
"""Wording of every kind of event. Only ``Running`` may have an empty subject (TensorRT 8.2)."""

_PASS = re.compile(r"([A-Za-z_]\w*): ([Ff]using) ")
_RUNNING = re.compile(r"Running: ([A-Za-z_]\w*)(?: on (.*))?", re.DOTALL)
_TYPE = re.compile(r"(.*) from (\S+ to \S+)", re.DOTALL)

# Line formats by the first word of their text, longer texts first.
_BY_WORD: dict[str, list[tuple[str, LineFormat]]] = {}
for _kind, _format in sorted(FORMATS.items(), key=lambda pair: -len(pair[1].before)):
    if _format.scope != "printed":
        _BY_WORD.setdefault(_format.before.split(" ", 1)[0], []).append((_kind, _format))


def render(event: Event) -> str:
    """Return TensorRT's line for an event, without the ``[V] [TRT] `` before it.

    Raises:
        KeyError: The event's kind has no wording in FORMATS.
    """
    wording = FORMATS[event.kind]
    before = wording.before.replace("{pass}", event.pass_name, 1)
    if event.kind == RUNNING:
        return f"{before} on {event.subject}" if event.subject else before
    second = f"{wording.between}{event.object}" if wording.between else ""
    return f"{before}{event.subject}{second}{wording.after}"


def parse(line: str, running: str = NO_PASS, layer: str = "") -> Event | None:
    """Parse a log line of TensorRT's optimizer; None for lines of another form.

    Args:
        line: Text after ``[V] [TRT] ``, without the line end.
        running: Pass that the last ``Running`` line named.
        layer: Layer that the pass is running on, which shows where a line joins two names.
    """
    if line.startswith("Running: "):
        match = _RUNNING.fullmatch(line)
        return Event(match[1], RUNNING, match[2] or "") if match else None
    if "using " in line and (match := _PASS.match(line)):
        kind = match[2]
        pair = _split_at_joint(line[match.end() :], FORMATS[kind].between, layer)
        return Event(match[1], kind, *pair) if pair else None
    for kind, wording in _BY_WORD.get(line.split(" ", 1)[0], ()):
        if line.startswith(wording.before) and line.endswith(wording.after):
            rest = line[len(wording.before) : len(line) - len(wording.after)]
            owner = running if wording.scope == "running" else NO_PASS
            if not wording.between:
                return Event(owner, kind, rest) if rest else None
            if kind in (SWAP_TYPE, CONVERT_TYPE):  # types are single words after the last ' from '
                typed = _TYPE.fullmatch(rest)
                return Event(owner, kind, typed[1], typed[2]) if typed else None
            pair = _split_at_joint(rest, wording.between, layer)
            if pair is not None:
                return Event(owner, kind, *pair)
    return None


def _split_at_joint(text: str, joint: str, layer: str) -> tuple[str, str] | None:
    """Split ``A<joint>B`` into A and B; None if the text does not contain ``joint``.

    ``layer`` is the likely name of A or B; empty if unknown.
    """
    if layer:
        if text.endswith(joint + layer):
            return text[: len(text) - len(joint) - len(layer)], layer
        if text.startswith(layer + joint):
            return layer, text[len(layer) + len(joint) :]
    first = text.find(joint)
    if first < 0:
        return None
    position = first if text.find(joint, first + 1) < 0 else _find_joint(text, joint, first)
    return text[:position], text[position + len(joint) :]


def _find_joint(text: str, joint: str, first: int) -> int:
    """Return the position of the first joint at which the brackets of both sides close.

    If the brackets close at no joint, return ``first``, the position of the first joint. The
    brackets are counted from joint to joint, so that the cost is linear in the line's length.
    """
    signs = "()[]"
    total = {sign: text.count(sign) for sign in signs}
    if total["("] != total[")"] or total["["] != total["]"]:
        return first  # if the whole text has an open bracket, one side has it too
    counts = dict.fromkeys(signs, 0)
    position, previous = first, 0
    while position >= 0:
        for sign in signs:
            counts[sign] += text.count(sign, previous, position)
        previous = position
        if counts["("] == counts[")"] and counts["["] == counts["]"]:
            return position
        position = text.find(joint, position + 1)
    return first


class TraceReader:
    """Parser of optimizer lines that remembers the running pass and its layer.

    Attributes:
        running: Pass that the last ``Running`` line named; empty before the first one.
        layer: Layer that the last ``Running`` line named.
    """

    def __init__(self) -> None:
        self.running = NO_PASS
        self.layer = ""

    def read(self, line: str) -> Event | None:
        """Parse the next line; None if the line is not from the optimizer."""
        event = parse(line, self.running, self.layer)
        if event is not None and event.kind == RUNNING:
            self.running, self.layer = event.pass_name, event.subject
        return event

    def reset(self) -> None:
        """Forget the running pass and its layer. Call this when a new build stage begins."""
        self.running, self.layer = NO_PASS, ""
