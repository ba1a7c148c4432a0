"""The streaming reader of build logs: lines in, a :class:`~qdqtool.buildlog.types.Build` out.

Most of a verbose log is the autotuner's timing lines. One regular expression on the raw bytes tells them from the rest;
only the rest is decoded and looked at, by the handlers of ``sections``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qdqtool import budgets
from qdqtool.buildlog import prefix
from qdqtool.buildlog.numbers import number
from qdqtool.buildlog.records import TunedLayer
from qdqtool.buildlog.sections import Sections
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError

_TIMING = re.compile(
    rb"(?:\x1b\[[0-9;]{0,9}m|\[[^\]]{1,24}\] ){0,5}(?:VERBOSE: )?"
    rb"(?:(?P<tactic>Tactic(?: Name)?: )|(?P<fastest>Fastest Tactic: )|(?P<runner>-{13,15} Timing Runner: )"
    rb"|(?P<reformat>\*{15} Autotuning Reformat: )|(?P<format>\*{15} Autotuning )|(?P<cost>={15} Computing )"
    rb"|(?P<chose>>{13,15} Chose Runner Type: )|(?P<average>Average on \d)"
    rb"|(?P<skip>(?:\w+ has no valid tactics for|Skipping \w+: No valid tactics|Skipping tactic))"
    rb"|(?P<other>Setting workspace to |Block size \d|Optimizer Reformat|Deleting timing cache|"
    rb"Skipped printing|Iteration:|\d+ tactics? |Splitting [A-Z]))"
)
_SET_TACTIC = b" Set Tactic Name: "
_MAX_TUNED = 50_000
_MAX_NAME = 4000


class LogReader:
    """Reads a log line by line.

    Attributes:
        build: What is known so far; :meth:`finish` completes it.
    """

    def __init__(self) -> None:
        self.build = Build(source="log")
        self.sections = Sections(self.build)
        self._tuned: TunedLayer | None = None
        self._blank = False  # whether the last line was: one of a run of them says all that they say
        self._stamp = b""
        self._now: int | None = None

    def feed(self, lines: Iterable[bytes]) -> None:
        """Takes the next lines, without their line ends."""
        counts = self.build.lines
        timing = _TIMING.match
        number = counts.total
        tactics = self.build.tactics
        for line in lines:
            number += 1
            if not line or line.isspace():
                if self._blank:
                    continue
                self._blank = True
            else:
                self._blank = False
            match = timing(line)
            if match is not None:
                counts.timing += 1
                kind = match.lastgroup
                if kind == "tactic":
                    tactics.timed += 1
                    if self._tuned is not None:
                        self._tuned.tactics += 1
                elif b"\x1b" in line:
                    line = prefix.clean(line)
                    match = timing(line)
                    self._timing(kind or "", line, match.end() if match else 0)
                else:
                    self._timing(kind or "", line, match.end())
            elif _SET_TACTIC in line:
                counts.timing += 1
            else:
                counts.total = number
                self._line(line, number)
        counts.total = number
        if number > budgets.LOG_LINES:
            raise BuildLogError(f"a log of more than {budgets.LOG_LINES} lines, the limit; give the build's part")

    def finish(self) -> Build:
        """Ends the log: closes what is open."""
        self._switch(None, b"")
        self.sections.finish()
        return self.build

    def _line(self, line: bytes, number: int) -> None:
        line = prefix.clean(line)
        for _ in range(8):  # a stamped line that another thread printed into this one is read on its own
            level, _stamp, message = prefix.split(line)
            message, rest = prefix.interleaved(message)
            text = message.decode("utf-8", "replace")
            self.sections.read(level, text.rstrip() if level or not text.startswith(" ") else text, number)
            if not rest:
                return
            line = rest

    def _timing(self, kind: str, line: bytes, end: int) -> None:
        tactics = self.build.tactics
        if kind == "fastest":
            if self._tuned is not None:
                time = number(line[line.rfind(b" ") + 1 :])
                best = self._tuned.best_ms
                if time is not None and (best is None or time < best):
                    self._tuned.best_ms = time
        elif kind == "runner":
            self._start_runner(line, end)
        elif kind == "reformat":
            tactics.reformat_timings += 1
        elif kind == "format":
            tactics.combinations += 1
        elif kind == "chose":
            runner = line[end:].split(b" ", 1)[0].decode("utf-8", "replace")[:80]
            if runner in tactics.chosen or len(tactics.chosen) < 500:
                tactics.chosen[runner] += 1
            if self._tuned is not None:
                self._tuned.runner = runner
        elif kind == "skip":
            tactics.skipped += 1

    def _start_runner(self, line: bytes, end: int) -> None:
        text = line[end : end + _MAX_NAME].rstrip(b"\r -")
        cut = text.rfind(b" (")
        name = (text[:cut] if cut > 0 else text).decode("utf-8", "replace")
        tactics = self.build.tactics
        table = tactics.layers
        if name.startswith("Optimizer Reformat("):
            name, table = name[len("Optimizer Reformat(") :].removesuffix(")"), tactics.reformats
        tuned = table.get(name)
        if tuned is None:
            tuned = TunedLayer(name)
            if len(table) < _MAX_TUNED:
                table[name] = tuned
        self._switch(tuned, line)

    def _switch(self, tuned: TunedLayer | None, line: bytes) -> None:
        """Books the time since the last switch on the layer that was being tuned."""
        stamp = line[:21]
        if stamp != self._stamp and line[:1] == b"[":
            now = prefix.seconds_of(stamp)
            if now is not None and self._now is not None and self._tuned is not None and 0 <= now - self._now < 86400:
                self._tuned.seconds += now - self._now
            self._now, self._stamp = now, stamp
        self._tuned = tuned
