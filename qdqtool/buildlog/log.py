"""Streaming reader of build logs.

Most lines of a verbose log are timing lines of the autotuner, which one regular expression on the
raw bytes recognizes. Only the other lines are decoded, and read by ``sections``.

Prefixes of loggers and containers are removed first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.lines import parse_number
from qdqtool.buildlog.sections import UNSTAMPED, SectionReader
from qdqtool.buildlog.types import Build, Gap, GapKind, Section, TunedLayer
from qdqtool.util import limits
from qdqtool.util.notes import Note

_LEVEL = rb"(?:VERBOSE|GRAPH|DEBUG|INFO|WARNING|INTERNAL_ERROR|ERROR|CRITICAL)"
# Names that Torch-TensorRT prints before TensorRT's messages. Its dynamo front end uses Python's
# logging with a format that users choose; its TorchScript front end prints from C++.
_TORCH = (
    rb"(?:torch_tensorrt ?\[[^\]]{0,60}\]"
    rb"|\[(?:TRT|TensorRT-LLM|Torch-TensorRT[^\]]{0,60}"
    rb"|TRTorch[^\]]{0,60}|TensorRT Conversion Context)\])"
)
# Separators between the fields of a logging format.
_JOINT = rb"(?::[\w.<>]{1,60}:\d{1,6} {1,4}(?:- )?| [-|] |: | :|:|[-|] |\] ?\[| \(|\] [-|] |\)? )"
# Letters of levels: TensorRT's, D of TensorRT-LLM, and X, S and U of polygraphy, which are verbose.
_LETTER = rb"[VIWEFDXSU]"
# TensorRT-LLM writes its rank after its name.
_TRT = rb"\[TRT(?:-LLM)?\](?: \[RANK \d{1,5}\])?"
_STAMP = rb"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]"
_BY_TENSORRT = (
    rb"(?:"
    rb"(?P<stamp>" + _STAMP + rb") (?:" + _TRT + rb" ?\[(?P<python>" + _LETTER + rb")\]"
    rb"|\[(?P<level>" + _LETTER + rb")\](?: \[TRT\])?)"
    rb"|\[(?P<bare>" + _LETTER + rb")\](?: \[TRT\])?"
    rb"|" + _TRT + rb" ?\[(?P<trt>" + _LETTER + rb")\]"
    rb"|(?:\[TensorRT\] |TensorRT |\[TRT(?:-LLM)?\] )"
    rb"(?P<word>VERBOSE|INFO|WARNING|ERROR|INTERNAL_ERROR):?"
    rb"|\[(?:TRT|TensorRT)(?:-LLM)?\] ?\[(?P<llm>" + _LEVEL + rb")\]"
    rb"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?P<ort>VERBOSE|INFO|WARNING|ERROR)\]"
    rb"|\[?(?P<stream>" + _LEVEL + rb") {0,8}\]?(?:" + _JOINT + rb")?" + _TORCH + _JOINT + rb"?"
    rb"|" + _TORCH + _JOINT + rb"\[?(?P<after>" + _LEVEL + rb") {0,8}\]?" + _JOINT + rb"?"
    rb"|torch_tensorrt ?\[[^\]]{0,60}\]" + _JOINT + rb"|\[TRT(?:-LLM)?\] {1,20}"
    rb") ?"
)
_LETTERS = {
    **{letter.encode(): letter for letter in "VIWE"},
    **dict.fromkeys((b"D", b"X", b"S", b"U", b"VERBOSE", b"DEBUG", b"GRAPH"), "V"),
    b"INFO": "I",
    b"WARNING": "W",
    **dict.fromkeys((b"F", b"ERROR", b"INTERNAL_ERROR", b"CRITICAL"), "E"),
}
_PREFIX = re.compile(rb"\s*" + _BY_TENSORRT)
_SECOND = re.compile(
    _STAMP + rb" \[(?:" + _LETTER + rb"|TRT(?:-LLM)?)\]"
    rb"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:VERBOSE|INFO|WARNING|ERROR)\]"
    rb"|(?:\[?" + _LEVEL + rb" {0,8}\]?(?:" + _JOINT + rb")?)?torch_tensorrt ?\["
    rb"|\[?" + _LEVEL + rb"\]?:? {0,8}\[(?:Torch-TensorRT|TRTorch)"
)
_LEVEL_WORD = re.compile(rb"\b" + _LEVEL + rb"\b")
_COLOR = re.compile(rb"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\))")


def clean_line(line: bytes) -> bytes:
    """Remove color codes and the trailing carriage return from a line."""
    line = line.removesuffix(b"\r")
    return _COLOR.sub(b"", line) if b"\x1b" in line else line


def split_prefix(line: bytes) -> tuple[str, bytes, bytes]:
    """Split a clean line into level, timestamp and message.

    The level is V, I, W, E or an empty string. Text of another program that is before the timestamp
    is dropped.
    """
    match = _PREFIX.match(line)
    if match is None:
        inner = _SECOND.search(line, 0, 400)
        match = _PREFIX.match(line, inner.start()) if inner else None
        if match is None:
            return "", b"", line
    level = match[match.lastgroup] if match.lastgroup else b"V"
    if match.lastgroup is None and (word := _LEVEL_WORD.search(line, 0, match.start())):
        level = word[0]
    return _LETTERS[level], match["stamp"] or b"", line[match.end() :]


_TENSORRT_START = re.compile(  # beginning of a TensorRT line, with or without TensorRT's prefix
    rb"(?:^|(?<=[\s|:>\]]))(?:"
    + _BY_TENSORRT
    + rb"|&&&& |Layer\(|Name: |Running: |Swapping |Removing |Eliminating |"
    rb"Parsing node: |Searching for input: |QDQ graph |\[GpuLayer\] )"
)
_PIECES = re.compile(rb"(\w+)|(\s+)|([^\w\s]+)")
_MAX_PREFIX = 200  # maximum bytes of a container's prefix
_SAMPLE = 2000  # lines that are examined to detect the prefix
_MIN_SHARE = 0.8  # minimum share of the sampled lines with the prefix
# Kubernetes cuts lines at 16 kB: P marks a part of a line, and F the end of a line.
_PIECE = re.compile(rb" (stdout|stderr) ([PF]) (\s*)$")


class LogPrefixStripper:
    """Remover of the prefixes of containers, CI services and journals: time, service, pod.

    The form of a prefix is its text with placeholders for words and numbers. A prefix is removed if
    its form is the commonest before TensorRT's own prefix, and most lines of the log begin with
    this form.
    """

    def __init__(self) -> None:
        self._form: re.Pattern[bytes] | None = None
        self._decided = False
        # Collected parts of an unfinished line, by stream.
        self._incomplete: dict[bytes, bytes] = {}

    def strip(self, lines: list[bytes]) -> list[bytes]:
        """Return lines without the prefix. The first TensorRT lines determine its form."""
        for start in range(0, len(lines), _SAMPLE):
            if self._decided:
                break
            sample = lines[start : start + _SAMPLE]
            self._detect_prefix([clean_line(line) for line in sample if line.strip()])
        if self._form is None:
            return lines
        stripped = []
        for line in map(clean_line, lines):
            prefix = self._form.match(line)
            if prefix is not None:
                text = self._join_pieces(prefix[0], line[prefix.end() :])
                line = _add_level(prefix[0], text)
            stripped.append(line)
        return stripped

    def _join_pieces(self, prefix: bytes, text: bytes) -> bytes:
        """Return the complete line that a text ends, or an empty line if more parts follow."""
        piece = _PIECE.search(prefix)
        if piece is None:
            return text
        stream = piece[1]
        text = self._incomplete.pop(stream, b"") + piece[3] + text
        if piece[2] == b"F":
            return text
        self._incomplete[stream] = text[: limits.LOG_LINE]
        return b""

    def _detect_prefix(self, lines: list[bytes]) -> None:
        forms: Counter[bytes] = Counter()
        for line in lines:
            start = _TENSORRT_START.search(line, 0, 2 * _MAX_PREFIX)
            if start is None:
                continue
            head = line[: start.start()]
            if len(head) <= _MAX_PREFIX and not is_marked(head):
                forms[_prefix_pattern(head)] += 1
        if not forms:
            return
        self._decided = True
        pattern, count = forms.most_common(1)[0]
        if not pattern or count < 2:
            return
        form = re.compile(pattern)
        if sum(form.match(line) is not None for line in lines) >= _MIN_SHARE * len(lines):
            self._form = form


def _add_level(prefix: bytes, text: bytes) -> bytes:
    """Return a text with the severity level of the prefix, unless it has a level itself."""
    level, own = _LEVEL_WORD.search(prefix), _PREFIX.match(text)
    if level is None or not text or (own is not None and own.lastgroup is not None):
        return text
    message = text if own is None else text[own.end() :]
    return b"[%s] %s" % (_LETTERS[level[0]].encode(), message)


def _prefix_pattern(head: bytes) -> bytes:
    """Return a pattern for prefixes that differ only in words and numbers.

    Empty for a prefix of spaces.
    """
    if not head.strip():
        return b""
    pattern = b""
    for word, space, signs in _PIECES.findall(head):
        if word:
            pattern += rb"\w+"
        else:
            pattern += rb"\s+" if space else re.escape(signs)
    return pattern


def is_marked(line: bytes) -> bool:
    """Return whether a line names TensorRT or onnxruntime in its first 160 bytes."""
    head = line[:160]
    return b"[TRT" in head or b"TensorRT" in head or b":onnxruntime" in head


def parse_stamp(stamp: bytes) -> int | None:
    """Convert ``[MM/DD/YYYY-HH:MM:SS]`` to seconds since the month began; None if invalid."""
    parts = (stamp[4:6], stamp[12:14], stamp[15:17], stamp[18:20])
    try:
        day, hours, minutes, seconds = map(int, parts)
    except ValueError:
        return None
    return ((day * 24 + hours) * 60 + minutes) * 60 + seconds


_TIMING = re.compile(
    rb"(?:\x1b\[[0-9;]{0,9}m|\[[^\]]{1,40}+\] ){0,5}+"
    rb"(?:VERBOSE: (?:\[TRT\]: )?|TensorRT VERBOSE:? )?+"
    rb"(?:(?P<tactic>Tactic(?: Name)?: |Tactic -?\d)|(?P<fastest>Fastest Tactic: )"
    rb"|(?P<runner>-{13,15} Timing Runner: )|(?P<reformat>\*{15} Autotuning Reformat: )"
    rb"|(?P<format>\*{15} Autotuning )|(?P<cost>={15} Computing )"
    rb"|(?P<chose>>{13,15} Chose Runner Type: )|(?P<average>Average on \d)"
    rb"|(?P<skip>(?:\w+ has no valid tactics for|Skipping \w+: No valid tactics|Skipping tactic))"
    rb"|(?P<other>Setting workspace to |Block size \d|Fast skip Tactic|Optimizer Reformat|"
    rb"Deleting timing cache|Skipped printing|Iteration:|\d+ tactics? |Splitting [A-Z]))"
)
# First bytes of timing lines, except timing lines that may begin with any word.
_TIMING_STARTS = frozenset(b"%c" % sign for sign in b"\x1b[VTF-*=>ASBODI0123456789")
_AFTER_ANY_WORD = b" has no valid tactics for"
_SET_TACTIC = b" Set Tactic Name: "
# TensorRT 8.6 and later print
# NAME (RUNNER[0x8]) profiling completed in 0.04 seconds. Fastest Tactic: 0x1 ...
_COMPLETED = b" profiling completed in "
# TensorRT 10 prints
# NAME [formats] got cached result: RUNNER, tactic 0x1, 0.0064 ms
_CACHED = b" got cached result: "
_SKIPPING = re.compile(rb"Skipping (\w{1,80}): No valid tactics(?: for (.{0,4000}))?")
_NO_TACTICS = b" has no valid tactics"
_DUE_TO = b" due to "
_OPTIMIZER_REFORMAT = "Optimizer Reformat("
_WORD = re.compile(rb"\w{1,80}")
_MAX_RUNNERS = 500
_MAX_REFUSED = 300
_MAX_REASONS = 100
_MAX_UNEXPLAINED = 100_000
_MAX_TUNED = 50_000
_MAX_NAME = 4000
_MAX_INNER_LINES = 8  # maximum number of other threads' messages inside one line


class LogReader:
    """Reader of a log, line by line.

    Attributes:
        build: Build that is read. :meth:`finish` completes it.
    """

    def __init__(self) -> None:
        self.build = Build(source=BuildSource.LOG)
        self.sections = SectionReader(self.build)
        self._tuned: TunedLayer | None = None
        self._stamp = b""
        self._now: int | None = None
        self._stopped = False
        self._timing_readers: dict[str, Callable[[bytes, int], None]] = {
            "fastest": self._read_fastest,
            "runner": self._start_runner,
            "chose": self._read_choice,
            "skip": self._read_refusal,
            "cost": self._read_cost,
        }

    def feed(self, lines: Iterable[bytes]) -> None:
        """Read the next lines, given without line ends."""
        if self._stopped:
            return
        counts, sections, match_timing = self.build.lines, self.sections, _TIMING.match
        number, blank = counts.total, 0
        for line in lines:
            number += 1
            if len(line) < 3 and not line.strip():
                blank += 1
                if sections.block in UNSTAMPED:
                    sections.block = ""
                continue
            match = match_timing(line)
            if match is not None and match.lastgroup == "tactic":
                # Most lines are tactic lines, so they are counted here without further parsing.
                counts.timing += 1
                self.build.tactics.timed += 1
                if self._tuned is not None:
                    self._tuned.tactics += 1
                continue
            self._feed_line(line, number, match)
            if counts.unexplained > _MAX_UNEXPLAINED:
                # So many unknown lines mean that the file is not a TensorRT log.
                self._stopped = True
                gap = Gap(Section.ALL, GapKind.BEYOND_LINE, number)
                self.build.gaps.append(gap)
                self.build.notes.append(
                    Note(
                        f"{gap} was not read, because the {_MAX_UNEXPLAINED:,} lines before this "
                        "part were not recognized; give only the log of the build",
                        code="not-understood",
                    )
                )
                break
        counts.total = number
        counts.blank += blank

    def finish(self) -> Build:
        """Complete the build after the last line, and return the build."""
        self._switch_layer(None, b"")
        self.sections.finish()
        return self.build

    def _feed_line(self, line: bytes, number: int, match: re.Match[bytes] | None) -> None:
        counts = self.build.lines
        if match is not None:
            counts.timing += 1
            kind, end = match.lastgroup or "", match.end()
            if b"\x1b" in line:
                line = clean_line(line)
                cleaned = _TIMING.match(line)
                end = cleaned.end() if cleaned else 0
            self._read_timing(kind, line, end)
        elif _SET_TACTIC in line:
            counts.timing += 1
        elif _COMPLETED in line or _CACHED in line:
            counts.timing += 1
            self._read_result(split_prefix(clean_line(line))[2])
        else:
            self._read_line(line, number)

    def _read_line(self, line: bytes, number: int) -> None:
        """Read a line, and any messages of other threads in the middle of the line."""
        original, line = line, clean_line(line)
        for _ in range(_MAX_INNER_LINES):
            level, _stamp, message = split_prefix(line)
            if level and is_marked(line):
                self.build.lines.marked += 1
            inner = _SECOND.search(message) if b"[" in message else None
            rest = message[inner.start() :] if inner else b""
            message = message[: inner.start()] if inner else message
            self._read_message(level, message, number, is_whole=message is original)
            if not rest:
                return
            line = rest

    def _read_message(self, level: str, message: bytes, number: int, is_whole: bool) -> None:
        match = None
        if not is_whole and (message[:1] in _TIMING_STARTS or _AFTER_ANY_WORD in message):
            match = _TIMING.match(message)
        if match is not None:
            # The message is a timing line with a prefix that the expression for whole lines does
            # not match.
            self.build.lines.timing += 1
            self._read_timing(match.lastgroup or "", message, match.end())
            return
        text = message.decode("utf-8", "replace")
        if level or not text.startswith(" "):
            text = text.rstrip()
        self.sections.read(level, text, number)

    def _read_result(self, message: bytes) -> None:
        tactics = self.build.tactics
        head, cached, rest = message.rpartition(_CACHED)
        if cached:
            tactics.cached += 1
            pieces = rest.split(b", ")
            name = _decode(_strip_last(head, b" [")[:_MAX_NAME])
            tuned = self._add_tuned_layer(tactics.layers, name)
            tuned.runner = _decode(pieces[0])[:80]
            _update_best(tuned, pieces[-1].removesuffix(b" ms"))
            return
        name = _decode(_strip_last(message[: message.rfind(_COMPLETED)][:_MAX_NAME], b" ("))
        layer = tactics.layers.get(name) or tactics.reformats.get(name)
        tuned = layer or self._add_tuned_layer(tactics.layers, name)
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
        elif kind == "reformat":
            tactics.reformat_timings += 1
        elif kind == "format":
            tactics.combinations += 1
        elif kind == "other":
            self.build.lines.marked += is_marked(line)
        elif kind in self._timing_readers:
            self._timing_readers[kind](line, end)

    def _read_fastest(self, line: bytes, _end: int) -> None:
        if self._tuned is not None:
            _update_best(self._tuned, line[line.rfind(b" ") + 1 :])

    def _read_choice(self, line: bytes, end: int) -> None:
        runners = self.build.tactics.runners
        runner = _decode(line[end:].split(b" ", 1)[0])[:80]
        if runner in runners or len(runners) < _MAX_RUNNERS:
            runners[runner] += 1
        if self._tuned is not None:
            self._tuned.runner = runner

    def _read_cost(self, line: bytes, end: int) -> None:
        # The line is "=============== Computing costs for NAME". Before 8.6, the name is missing.
        before, _, rest = line[end : end + _MAX_NAME].partition(b"costs for ")
        name = _decode(rest).strip()
        costed = self.build.tactics.costed
        if not before and name and len(costed) < _MAX_TUNED:
            costed.add(name)
        else:
            self.build.lines.marked += 1

    def _read_refusal(self, line: bytes, _end: int) -> None:
        """Count a skipped tactic by reason, or a missing tactic by runner and layer.

        A line without a layer name is about the layer that is being timed.
        """
        tactics = self.build.tactics
        tactics.skipped += 1
        cut = line.find(_DUE_TO, 0, 400)
        if cut >= 0:
            reason = _decode(line[cut + len(_DUE_TO) :][:300]).strip()
            if reason in tactics.reasons or len(tactics.reasons) < _MAX_REASONS:
                tactics.reasons[reason] += 1
        elif len(tactics.refused) < _MAX_REFUSED:
            refusal = _find_refusal(line)
            if refusal is not None:
                runner, layer = refusal
                tactics.refused[runner, layer or (self._tuned.name if self._tuned else "")] += 1

    def _start_runner(self, line: bytes, end: int) -> None:
        name = _decode(_strip_last(line[end : end + _MAX_NAME].rstrip(b"\r -"), b" ("))
        table = self.build.tactics.layers
        if name.startswith(_OPTIMIZER_REFORMAT):
            name = name.removeprefix(_OPTIMIZER_REFORMAT).removesuffix(")")
            table = self.build.tactics.reformats
        self._switch_layer(self._add_tuned_layer(table, name), line)

    def _switch_layer(self, tuned: TunedLayer | None, line: bytes) -> None:
        """Start timing another layer; add the elapsed seconds to the layer timed so far."""
        stamp = line[:21]
        if stamp != self._stamp and line[:1] == b"[":
            now = parse_stamp(stamp)
            if now is not None and self._now is not None and self._tuned is not None:
                seconds = now - self._now
                if 0 <= seconds < 86400:
                    self._tuned.seconds += seconds
            self._now, self._stamp = now, stamp
        self._tuned = tuned


def _find_refusal(line: bytes) -> tuple[str, str] | None:
    """Return runner and layer of a line about missing tactics; None for any other line.

    The layer is empty if the line names none.
    """
    limit = _MAX_NAME + 200
    skipping = _SKIPPING.search(line, 0, limit)
    word, position = None, line.find(_NO_TACTICS, 0, limit)
    while position >= 0:
        # Search the word before the phrase backwards, in limited time.
        word = _WORD.match(line[max(0, position - 80) : position][::-1])
        if word is not None:
            break
        position = line.find(_NO_TACTICS, position + 1, limit)
    if skipping is not None and (word is None or skipping.start() < position):
        return _decode(skipping[1]), _decode(skipping[2] or b"").strip()
    return None if word is None else (_decode(word[0][::-1]), "")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _strip_last(text: bytes, sign: bytes) -> bytes:
    """Return the text before the last occurrence of a sign, or else the whole text."""
    return text.rpartition(sign)[0] or text


def _update_best(tuned: TunedLayer, text: bytes) -> None:
    time = parse_number(text)
    if time is not None and (tuned.best_ms is None or time < tuned.best_ms):
        tuned.best_ms = time
