"""The streaming reader of build logs: lines in, a :class:`~qdqtool.buildlog.types.Build` out.

Most of a verbose log is the autotuner's timing lines. One regular expression on the raw bytes removes them; only
the rest is decoded and looked at, by the handlers of ``sections``.

Prefixes of loggers and containers are taken off first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.lines import parse_number
from qdqtool.buildlog.sections import UNSTAMPED, SectionReader
from qdqtool.buildlog.types import Build, Gap, GapKind, Section, TunedLayer
from qdqtool.util import limits
from qdqtool.util.notes import Remark

_STAMP = rb"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]"
_BY_TENSORRT = (
    rb"(?:"
    rb"(?P<stamp>"
    + _STAMP
    + rb") \[(?:TRT\] \[(?P<python>[VIWEF])\]|(?P<level>[VIWEF])\](?: \[TRT\])?)"
    rb"|\[(?P<bare>[VIWEF])\](?: \[TRT\])?"
    rb"|\[TRT\] \[(?P<trt>[VIWEF])\]"
    rb"|(?:\[TensorRT\] |TensorRT |\[TRT\] )(?P<word>VERBOSE|INFO|WARNING|ERROR|INTERNAL_ERROR):?"
    rb"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?P<ort>VERBOSE|INFO|WARNING|ERROR)\]"
    rb"|(?P<stream>VERBOSE|DEBUG|INFO|WARNING|ERROR): \[(?:TRT|Torch-TensorRT[^\]]{0,60})\](?: -|:)?"
    rb"|\[TRT\] {1,20}"
    rb") ?"
)
_LETTERS = {
    b"F": "E",
    b"INTERNAL_ERROR": "E",
    b"DEBUG": "V",
}  # of levels that are not the word's first
_PREFIX = re.compile(rb"\s*" + _BY_TENSORRT)
_SECOND = re.compile(
    _STAMP
    + rb" \[(?:[VIWEF]|TRT)\]|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:VERBOSE|INFO|WARNING|ERROR)\]"
)
_COLOUR = re.compile(rb"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\))")


def clean_line(line: bytes) -> bytes:
    """The line without colour codes and its trailing carriage return."""
    if line.endswith(b"\r"):
        line = line[:-1]
    return _COLOUR.sub(b"", line) if b"\x1b" in line else line


def split_prefix(line: bytes) -> tuple[str, bytes, bytes]:
    """Level (``V I W E`` or an empty string), timestamp (or empty) and message of a clean line.

    Text of another program that was printed before the stamp on the same line is dropped.
    """
    match = _PREFIX.match(line)
    if match is None:
        inner = _SECOND.search(line, 0, 400)
        match = _PREFIX.match(line, inner.start()) if inner else None
        if match is None:
            return "", b"", line
    level = match[match.lastgroup] if match.lastgroup else b"V"
    return _LETTERS.get(level) or chr(level[0]), match["stamp"] or b"", line[match.end() :]


_BEGINS = re.compile(  # of what TensorRT writes: its prefix, or a line that it prints without one
    rb"(?:^|(?<=[\s|:>\]]))(?:"
    + _BY_TENSORRT
    + rb"|&&&& |Layer\(|Name: |Running: |Swapping |Removing |Eliminating |"
    rb"Parsing node: |Searching for input: |QDQ graph |\[GpuLayer\] )"
)
_PIECES = re.compile(rb"(\w+)|(\s+)|([^\w\s]+)")
_LONGEST = 200  # bytes of a carrier's prefix
_SAMPLE = 2000  # lines
_SHARE = 0.8  # of the lines, that have it
_PIECE = re.compile(rb" (stdout|stderr) ([PF]) (\s*)$")  # Kubernetes' runtimes cut lines at 16 kB


class LogPrefixStripper:
    """What stands before each line of a log as a container, CI service or journal kept it: timestamp, service, pod.

    It is known by its form, words and numbers aside: what most lines of TensorRT have in front of TensorRT's own words,
    and most lines at all begin with.
    """

    def __init__(self) -> None:
        self._form: re.Pattern[bytes] | None = None
        self._decided = False
        self._begun: dict[bytes, bytes] = {}  # lines whose last piece is still to come, by stream

    def strip(self, lines: list[bytes]) -> list[bytes]:
        """The lines without it. It is looked for until lines of TensorRT come."""
        for at in range(0, len(lines), _SAMPLE):
            if self._decided:
                break
            self._detect_prefix(
                [clean_line(line) for line in lines[at : at + _SAMPLE] if line.strip()]
            )
        form = self._form
        if form is None:
            return lines
        return [
            self._join_pieces(found[0], line[found.end() :])
            if (found := form.match(line))
            else line
            for line in map(clean_line, lines)
        ]

    def _join_pieces(self, prefix: bytes, text: bytes) -> bytes:
        """The text, behind the pieces of its line that came before; empty while more is to come."""
        piece = _PIECE.search(prefix)
        if piece is None:
            return text
        text = self._begun.pop(piece[1], b"") + piece[3] + text
        if piece[2] == b"F":
            return text
        self._begun[piece[1]] = text[: limits.LOG_LINE]
        return b""

    def _detect_prefix(self, lines: list[bytes]) -> None:
        heads = (
            line[: m.start()] for line in lines if (m := _BEGINS.search(line, 0, 2 * _LONGEST))
        )
        forms = Counter(
            _prefix_pattern(head) for head in heads if len(head) <= _LONGEST and not is_marked(head)
        )
        if not forms:
            return
        self._decided = True
        form, count = forms.most_common(1)[0]
        found = re.compile(form)
        if (
            form
            and count > 1
            and sum(found.match(line) is not None for line in lines) >= _SHARE * len(lines)
        ):
            self._form = found


def _prefix_pattern(head: bytes) -> bytes:
    """A prefix as an expression: any word or number for a word or number; empty for blanks alone."""
    pieces: Iterable[re.Match[bytes]] = _PIECES.finditer(head) if head.strip() else ()
    return b"".join(rb"\w+" if p[1] else rb"\s+" if p[2] else re.escape(p[3]) for p in pieces)


def is_marked(line: bytes) -> bool:
    """Whether the beginning of a line says that TensorRT, or a tool that logs for it, wrote it."""
    head = line[:160]
    return b"[TRT]" in head or b"TensorRT" in head or b":onnxruntime" in head


def parse_stamp(stamp: bytes) -> int | None:
    """Seconds since some midnight of a ``[MM/DD/YYYY-HH:MM:SS]`` stamp; days count as 86 400 s within a month."""
    try:
        day, hours, minutes, seconds = (
            int(stamp[4:6]),
            int(stamp[12:14]),
            int(stamp[15:17]),
            int(stamp[18:20]),
        )
    except ValueError:
        return None
    return ((day * 24 + hours) * 60 + minutes) * 60 + seconds


_TIMING = re.compile(
    rb"(?:\x1b\[[0-9;]{0,9}m|\[[^\]]{1,40}+\] ){0,5}+(?:VERBOSE: (?:\[TRT\]: )?|TensorRT VERBOSE:? )?+"
    rb"(?:(?P<tactic>Tactic(?: Name)?: |Tactic -?\d)|(?P<fastest>Fastest Tactic: )|(?P<runner>-{13,15} Timing Runner: )"
    rb"|(?P<reformat>\*{15} Autotuning Reformat: )|(?P<format>\*{15} Autotuning )|(?P<cost>={15} Computing )"
    rb"|(?P<chose>>{13,15} Chose Runner Type: )|(?P<average>Average on \d)"
    rb"|(?P<skip>(?:\w+ has no valid tactics for|Skipping \w+: No valid tactics|Skipping tactic))"
    rb"|(?P<other>Setting workspace to |Block size \d|Fast skip Tactic|Optimizer Reformat|Deleting timing cache|"
    rb"Skipped printing|Iteration:|\d+ tactics? |Splitting [A-Z]))"
)
_BEGIN_TIMING = frozenset(
    b"%c" % sign for sign in b"\x1b[VTF-*=>ASBODI0123456789"
)  # but for one form:
_TO_NONE = b" has no valid tactics for"  # behind any word
_SET_TACTIC = b" Set Tactic Name: "
_COMPLETED = (
    b" profiling completed in "  # 8.6 and later: NAME (RUNNER[0x8]) profiling completed in ...
)
_CACHED = (
    b" got cached result: "  # 10: NAME [formats] got cached result: RUNNER, tactic 0x1, 0.0064 ms
)
_SKIPPING = re.compile(rb"Skipping (\w{1,80}): No valid tactics(?: for (.{0,4000}))?")
_WITHOUT = b" has no valid tactics"
_WORD = re.compile(rb"\w{1,80}")
_MAX_REFUSED = 300
_MAX_REASONS = 100
_MAX_UNEXPLAINED = 100_000
_MAX_TUNED = 50_000
_MAX_NAME = 4000


class LogReader:
    """Reads a log line by line.

    Attributes:
        build: What is known so far; :meth:`finish` completes it.
    """

    def __init__(self) -> None:
        self.build = Build(source=BuildSource.LOG)
        self.sections = SectionReader(self.build)
        self._tuned: TunedLayer | None = None
        self._stamp = b""
        self._now: int | None = None
        self._stopped = False

    def feed(self, lines: Iterable[bytes]) -> None:
        """Takes the next lines, without their line ends."""
        counts, sections, timing = self.build.lines, self.sections, _TIMING.match
        tactics, number, blank = self.build.tactics, counts.total, 0
        if self._stopped:
            return
        for line in lines:
            number += 1
            if not line or (len(line) < 3 and not line.strip()):
                blank += 1
                if sections.block in UNSTAMPED:  # the list ends
                    sections.block = ""
                continue
            match = timing(line)
            if match is not None:
                counts.timing += 1
                kind = match.lastgroup
                if kind == "tactic":  # most lines, so at once
                    tactics.timed += 1
                    if self._tuned is not None:
                        self._tuned.tactics += 1
                else:
                    if b"\x1b" in line:
                        line = clean_line(line)
                        match = timing(line)
                    self._read_timing(kind or "", line, match.end() if match else 0)
            elif _SET_TACTIC in line:
                counts.timing += 1
            elif _COMPLETED in line or _CACHED in line:
                counts.timing += 1
                self._read_result(split_prefix(clean_line(line))[2])
            else:
                counts.total = number
                self._read_line(line, number)
                if (
                    counts.unexplained > _MAX_UNEXPLAINED
                ):  # no log has so many that TensorRT does not write
                    self._stopped = True
                    gap = Gap(Section.ALL, GapKind.BEYOND_LINE, number)
                    self.build.gaps.append(gap)
                    self.build.notes.append(Remark.NOT_UNDERSTOOD(gap=gap, lines=_MAX_UNEXPLAINED))
                    break
        counts.total = number
        counts.blank += blank

    def finish(self) -> Build:
        """Ends the log: closes what is open."""
        self._switch_layer(None, b"")
        self.sections.finish()
        return self.build

    def _read_line(self, line: bytes, number: int) -> None:
        asked, line = line, clean_line(line)
        for _ in range(
            8
        ):  # a stamped line that another thread printed into this one is read on its own
            level, _stamp, message = split_prefix(line)
            if level and is_marked(line):
                self.build.lines.marked += 1
            inner = _SECOND.search(message) if b"[" in message else None
            rest = message[inner.start() :] if inner else b""
            message = message[: inner.start()] if inner else message
            match = None
            if message is not asked and (message[:1] in _BEGIN_TIMING or _TO_NONE in message):
                match = _TIMING.match(message)
            if (
                match is not None
            ):  # behind a stamp that the expression for whole lines does not know
                self.build.lines.timing += 1
                self._read_timing(match.lastgroup or "", message, match.end())
            else:
                text = message.decode("utf-8", "replace")
                self.sections.read(
                    level, text.rstrip() if level or not text.startswith(" ") else text, number
                )
            if not rest:
                return
            line = rest

    def _read_result(self, message: bytes) -> None:
        """``NAME (RUNNER[..]) profiling completed in 0.04 seconds. Fastest Tactic: 0x1 Time: 0.01``, or cached."""
        tactics = self.build.tactics
        head, cached, rest = message.rpartition(_CACHED)
        if cached:
            tactics.cached += 1
            pieces = rest.split(b", ")
            tuned = self._add_tuned_layer(
                tactics.layers, _decode(_strip_last(head, b" [")[:_MAX_NAME])
            )
            tuned.runner = _decode(pieces[0])[:80]
            _update_best(tuned, pieces[-1].removesuffix(b" ms"))
        else:
            name = _decode(_strip_last(message[: message.rfind(_COMPLETED)][:_MAX_NAME], b" ("))
            tuned = (
                tactics.layers.get(name)
                or tactics.reformats.get(name)
                or self._add_tuned_layer(tactics.layers, name)
            )
            _update_best(tuned, message[message.rfind(b" ") + 1 :])

    def _add_tuned_layer(self, table: dict[str, TunedLayer], name: str) -> TunedLayer:
        tuned = table.get(name) or TunedLayer(name)
        if len(table) < _MAX_TUNED:
            table[name] = tuned
        return tuned

    def _read_timing(self, kind: str, line: bytes, end: int) -> None:
        tactics = self.build.tactics
        if kind == "tactic":
            tactics.timed += 1
            if self._tuned is not None:
                self._tuned.tactics += 1
        elif kind == "fastest":
            if self._tuned is not None:
                _update_best(self._tuned, line[line.rfind(b" ") + 1 :])
        elif kind == "runner":
            self._start_runner(line, end)
        elif kind == "reformat":
            tactics.reformat_timings += 1
        elif kind == "format":
            tactics.combinations += 1
        elif kind == "chose":
            runner = _decode(line[end:].split(b" ", 1)[0])[:80]
            if runner in tactics.chosen or len(tactics.chosen) < 500:
                tactics.chosen[runner] += 1
            if self._tuned is not None:
                self._tuned.runner = runner
        elif kind == "skip":
            tactics.skipped += 1
            self._read_refusal(line)
        elif (
            kind == "cost"
        ):  # "=============== Computing costs for NAME" (the name is missing before 8.6)
            told, _, rest = line[end : end + _MAX_NAME].partition(b"costs for ")
            name = _decode(rest).strip()
            if not told and name and len(tactics.costed) < _MAX_TUNED:
                tactics.costed.add(name)
            else:
                self.build.lines.marked += 1
        elif kind == "other" and is_marked(line):
            self.build.lines.marked += 1

    def _read_refusal(self, line: bytes) -> None:
        """Which runner has no tactic for which layer; a line that names no layer refers to the one being timed."""
        refused, reasons = self.build.tactics.refused, self.build.tactics.reasons
        cut = line.find(b" due to ", 0, 400)
        if cut >= 0:
            reason = _decode(line[cut + len(b" due to ") :][:300]).strip()
            if reason in reasons or len(reasons) < _MAX_REASONS:
                reasons[reason] += 1
            return
        if len(refused) >= _MAX_REFUSED:
            return
        end = _MAX_NAME + 200
        new, layer, old, at = _SKIPPING.search(line, 0, end), b"", None, line.find(_WITHOUT, 0, end)
        while at >= 0 and old is None:  # the word in front of that, which is read from its end
            old = _WORD.match(line[max(0, at - 80) : at][::-1])
            at = at if old is not None else line.find(_WITHOUT, at + 1, end)
        if new is not None and (old is None or new.start() < at):
            runner, layer = new[1], new[2] or b""
        elif old is not None:
            runner = old[0][::-1]
        else:
            return
        told = _decode(layer).strip()
        refused[_decode(runner), told or (self._tuned.name if self._tuned else "")] += 1

    def _start_runner(self, line: bytes, end: int) -> None:
        name = _decode(_strip_last(line[end : end + _MAX_NAME].rstrip(b"\r -"), b" ("))
        table = self.build.tactics.layers
        if name.startswith("Optimizer Reformat("):
            name, table = (
                name[len("Optimizer Reformat(") :].removesuffix(")"),
                self.build.tactics.reformats,
            )
        self._switch_layer(self._add_tuned_layer(table, name), line)

    def _switch_layer(self, tuned: TunedLayer | None, line: bytes) -> None:
        """Books the time since the last switch on the layer that was being tuned."""
        stamp = line[:21]
        if stamp != self._stamp and line[:1] == b"[":
            now = parse_stamp(stamp)
            if (
                now is not None
                and self._now is not None
                and self._tuned is not None
                and 0 <= now - self._now < 86400
            ):
                self._tuned.seconds += now - self._now
            self._now, self._stamp = now, stamp
        self._tuned = tuned


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _strip_last(text: bytes, sign: bytes) -> bytes:
    """What stands before the last such sign; all where there is none, or nothing before it."""
    return text.rpartition(sign)[0] or text


def _update_best(tuned: TunedLayer, text: bytes) -> None:
    time = parse_number(text)
    if time is not None and (tuned.best_ms is None or time < tuned.best_ms):
        tuned.best_ms = time
