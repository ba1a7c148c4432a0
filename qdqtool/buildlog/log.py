"""Streaming reader of build logs.

Most lines of a verbose log are timing lines of the autotuner. One regular expression recognizes
these lines in the raw bytes. Only the other lines are decoded, and read by the module ``sections``.
The prefixes that containers write are removed first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TypeVar

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.lines import parse_number
from qdqtool.buildlog.sections import UNSTAMPED, SectionReader
from qdqtool.buildlog.types import Build, TunedLayer

K = TypeVar("K", str, tuple[str, str])

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
# Letters of levels: TensorRT's, D of TensorRT-LLM, and the verbose levels X, S and U of polygraphy.
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
_MAX_PREFIX = 200  # maximum number of bytes of a container's prefix
_SAMPLE = 2000  # lines that are examined to detect the prefix
_MIN_SHARE = 0.8  # minimum share of the sampled lines with the prefix


class LogPrefixStripper:
    """Remover of the prefix that a container, CI service or journal writes before each line.

    The form of a prefix is its text with placeholders for words and numbers. A prefix is removed if
    its form is the most frequent before TensorRT's own prefix, and at least 80 % of the sampled
    lines begin with this form.
    """

    def __init__(self) -> None:
        self._form: re.Pattern[bytes] | None = None
        self._decided = False

    def strip(self, lines: list[bytes]) -> list[bytes]:
        """Return lines without the prefix, whose form the first TensorRT lines determine."""
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
                line = _move_level(prefix[0], line[prefix.end() :])
            stripped.append(line)
        return stripped

    def _detect_prefix(self, lines: list[bytes]) -> None:
        forms: Counter[bytes] = Counter()
        for line in lines:
            start = _TENSORRT_START.search(line, 0, 2 * _MAX_PREFIX)
            if start is None:
                continue
            head = line[: start.start()]
            if len(head) <= _MAX_PREFIX and not is_marked(head):
                forms[_build_prefix_pattern(head)] += 1
        if not forms:
            return
        self._decided = True
        pattern, count = forms.most_common(1)[0]
        if not pattern or count < 2:
            return
        form = re.compile(pattern)
        if sum(form.match(line) is not None for line in lines) >= _MIN_SHARE * len(lines):
            self._form = form


def _move_level(prefix: bytes, text: bytes) -> bytes:
    """Return a text with the severity level of the prefix, unless the text has a level."""
    level, head = _LEVEL_WORD.search(prefix), _PREFIX.match(text)
    if level is None or not text or (head is not None and head.lastgroup is not None):
        return text
    message = text if head is None else text[head.end() :]
    return b"[%s] %s" % (_LETTERS[level[0]].encode(), message)


def _build_prefix_pattern(head: bytes) -> bytes:
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


def parse_stamp(stamp: bytes) -> datetime | None:
    """Parse ``[MM/DD/YYYY-HH:MM:SS]``; return None if invalid."""
    try:
        return datetime.strptime(stamp.decode(), "[%m/%d/%Y-%H:%M:%S]")
    except ValueError:
        return None


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
# First bytes of timing lines. Only lines with _AFTER_ANY_WORD may begin with other bytes.
_TIMING_STARTS = frozenset(b"%c" % sign for sign in b"\x1b[VTF-*=>ASBODI0123456789")
_AFTER_ANY_WORD = b" has no valid tactics for"
_SET_TACTIC = b" Set Tactic Name: "
# TensorRT 8.6 and later print
# NAME (RUNNER[0x8]) profiling completed in 0.04 seconds. Fastest Tactic: 0x1 ...
_COMPLETED = b" profiling completed in "
# TensorRT 10 prints
# NAME [formats] got cached result: RUNNER, tactic 0x1, 0.0064 ms
_CACHED = b" got cached result: "
_REFUSAL = re.compile(
    rb"Skipping (?P<skipped>\w{1,80}): No valid tactics(?: for (?P<layer>.{0,4000}))?"
    rb"|\b(?P<runner>\w{1,80}) has no valid tactics"
)
_DUE_TO = b" due to "
_OPTIMIZER_REFORMAT = "Optimizer Reformat("
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
        self._tuned = TunedLayer("")  # placeholder before the first layer is timed
        self._stamp = b""
        self._now: datetime | None = None
        self._timing_readers: dict[str, Callable[[bytes, int], None]] = {
            "tactic": self._count_tactic,
            "fastest": self._read_fastest,
            "runner": self._begin_tuned_layer,
            "reformat": self._count_reformat,
            "format": self._count_format,
            "cost": self._read_costed_layer,
            "chose": self._read_chosen_runner,
            "skip": self._read_skipped_tactic,
            "other": self._count_other_line,
        }

    def feed(self, lines: Iterable[bytes]) -> None:
        """Read the next lines, given without line ends."""
        counts = self.build.lines
        for line in lines:
            counts.total += 1
            match = _TIMING.match(line)
            if match is not None:
                counts.timing += 1
                if match.lastgroup == "tactic":  # most lines of a log; they are only counted
                    self.build.tactics.timed += 1
                    self._tuned.tactics += 1
                else:
                    self._read_timing(line, match)
            elif len(line) < 3 and not line.strip():
                counts.blank += 1
                if self.sections.block in UNSTAMPED:
                    self.sections.block = ""
            elif _SET_TACTIC in line:
                counts.timing += 1
            elif _COMPLETED in line or _CACHED in line:
                counts.timing += 1
                self._read_tactic_result(split_prefix(clean_line(line))[2])
            else:
                self._read_line(line, counts.total)

    def finish(self) -> Build:
        """Complete the build after the last line, and return the build."""
        self._switch_layer(TunedLayer(""), b"")
        self.sections.finish()
        return self.build

    def _read_timing(self, line: bytes, match: re.Match[bytes]) -> None:
        self.build.lines.timing += 1
        kind, end = match.lastgroup, match.end()
        if b"\x1b" in line:
            line = clean_line(line)
            cleaned = _TIMING.match(line)
            end = cleaned.end() if cleaned else 0
        if kind is not None and kind in self._timing_readers:
            self._timing_readers[kind](line, end)

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
        if not is_whole and (message[:1] in _TIMING_STARTS or _AFTER_ANY_WORD in message):
            # The message may be a timing line with a prefix that the expression for whole lines
            # does not match.
            match = _TIMING.match(message)
            if match is not None:
                self._read_timing(message, match)
                return
        text = message.decode("utf-8", "replace")
        if level or not text.startswith(" "):
            text = text.rstrip()
        self.sections.read(level, text, number)

    def _read_tactic_result(self, message: bytes) -> None:
        tactics = self.build.tactics
        head, cached, rest = message.rpartition(_CACHED)
        if cached:
            tactics.cached += 1
            pieces = rest.split(b", ")
            name = _decode(_cut_at_last(head, b" [")[:_MAX_NAME])
            tuned = self._add_tuned_layer(tactics.layers, name)
            tuned.runner = _decode(pieces[0])[:80]
            _update_best(tuned, pieces[-1].removesuffix(b" ms"))
            return
        name = _decode(_cut_at_last(message[: message.rfind(_COMPLETED)][:_MAX_NAME], b" ("))
        layer = tactics.layers.get(name) or tactics.reformats.get(name)
        tuned = layer or self._add_tuned_layer(tactics.layers, name)
        _update_best(tuned, message[message.rfind(b" ") + 1 :])

    def _add_tuned_layer(self, table: dict[str, TunedLayer], name: str) -> TunedLayer:
        tuned = table.get(name) or TunedLayer(name)
        if name not in table and self.sections.keep(name):
            table[name] = tuned
        return tuned

    def _count_tactic(self, _line: bytes, _end: int) -> None:
        self.build.tactics.timed += 1
        self._tuned.tactics += 1

    def _count_reformat(self, _line: bytes, _end: int) -> None:
        self.build.tactics.reformat_timings += 1

    def _count_format(self, _line: bytes, _end: int) -> None:
        self.build.tactics.combinations += 1

    def _count_other_line(self, line: bytes, _end: int) -> None:
        self.build.lines.marked += is_marked(line)

    def _read_fastest(self, line: bytes, _end: int) -> None:
        _update_best(self._tuned, line[line.rfind(b" ") + 1 :])

    def _read_chosen_runner(self, line: bytes, end: int) -> None:
        runner = _decode(line[end:].split(b" ", 1)[0])[:80]
        self._increment(self.build.tactics.runners, runner)
        self._tuned.runner = runner

    def _read_costed_layer(self, line: bytes, end: int) -> None:
        # The line is "=============== Computing costs for NAME". Before 8.6, the name is missing.
        before, _, rest = line[end : end + _MAX_NAME].partition(b"costs for ")
        name = _decode(rest).strip()
        if before or not name:
            self.build.lines.marked += 1
        elif self.sections.keep(name):
            self.build.tactics.costed.add(name)

    def _read_skipped_tactic(self, line: bytes, _end: int) -> None:
        """Count a skipped tactic by reason, or a runner without valid tactics by layer.

        A line without a layer name is about the layer that is being timed.
        """
        tactics = self.build.tactics
        tactics.skipped += 1
        _, is_skipped_tactic, reason = line[:700].partition(_DUE_TO)
        if is_skipped_tactic:
            self._increment(tactics.reasons, _decode(reason[:300]).strip())
        elif match := _REFUSAL.search(line, 0, _MAX_NAME + 200):
            layer = _decode(match["layer"] or b"").strip() or self._tuned.name
            self._increment(tactics.refused, (_decode(match["skipped"] or match["runner"]), layer))

    def _increment(self, counter: Counter[K], key: K) -> None:
        if key in counter or self.sections.keep(str(key)):
            counter[key] += 1

    def _begin_tuned_layer(self, line: bytes, end: int) -> None:
        name = _decode(_cut_at_last(line[end : end + _MAX_NAME].rstrip(b"\r -"), b" ("))
        table = self.build.tactics.layers
        if name.startswith(_OPTIMIZER_REFORMAT):
            name = name.removeprefix(_OPTIMIZER_REFORMAT).removesuffix(")")
            table = self.build.tactics.reformats
        self._switch_layer(self._add_tuned_layer(table, name), line)

    def _switch_layer(self, tuned: TunedLayer, line: bytes) -> None:
        """Set the layer whose timing begins, and add the elapsed seconds to the layer before it."""
        stamp = line[:21]
        if stamp != self._stamp and line[:1] == b"[":
            now = parse_stamp(stamp)
            if now is not None and self._now is not None:
                self._tuned.seconds += max(0.0, (now - self._now).total_seconds())
            self._now, self._stamp = now, stamp
        self._tuned = tuned


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _cut_at_last(text: bytes, sign: bytes) -> bytes:
    return text.rpartition(sign)[0] or text


def _update_best(tuned: TunedLayer, text: bytes) -> None:
    time = parse_number(text)
    if time is not None and (tuned.best_ms is None or time < tuned.best_ms):
        tuned.best_ms = time
