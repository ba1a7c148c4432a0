"""The parts of a log that are not timing: each line goes to the handler of its first word, or of the open block."""

from __future__ import annotations

import re
from collections.abc import Callable

from qdqtool.buildlog import layers as layer_lines
from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.chatter import Messages, is_chatter, is_unmistakable
from qdqtool.buildlog.complete import judge
from qdqtool.buildlog.numbers import is_profile_head, number, read_memory, read_metric, read_profile_row
from qdqtool.buildlog.parsing import ParseReader
from qdqtool.buildlog.records import AddedReformat, Milestone, ParseSection
from qdqtool.buildlog.types import Build, BuiltLayer, Listing, LogEvent
from qdqtool.trt.trace import TraceReader

_MILESTONE = re.compile(r"(Original|After [A-Za-z -]{1,60}): (\d{1,9}) layers")
_BANNER = re.compile(
    r"&&&& (RUNNING|PASSED|FAILED|WAIVED) (\S+)(?: \[(.{0,40}?) ?v(\d{1,8})\](?: \[\w+\])?)?(?: # (.*))?"
)
_BLOCK = re.compile(r"=== (.{1,60}?) ===")
_PLACED = re.compile(r"\[(Gpu|Dla|DLA)Layer\] (?:([A-Z_]+): )?(.*)")
_ADDED = "Adding reformat layer: "
_LONG_STRIDED = " long-strided"
_SECONDS = re.compile(r"(.{3,60}?)(?: completed in| in|:) ([\d.e+-]{1,20}) sec(?:onds|\.)?\.?")
_OPTION = re.compile(
    r"(?:Max batch|Precision|Input\(s\)s? format|Output\(s\)s? format|Batch|Calibration|Sparsity): ?[\w+: ]{0,60}"
)
_NUMBERS = frozenset("0123456789.eE+- \tnaif")
_FLAG = re.compile(r"(?:^|\s)--([\w]+)(?:=((?:\"[^\"]*\"|'[^']*'|\S)*))?")
_PARSE_BEGINS = ("Input filename:", "Adding network input: ", "Parsing model")
_MAX_RECORDS = 300_000
_MAX_CHARACTERS = 24 << 20  # of everything kept: bounds the memory a hostile log can take


class Sections:
    """Keeps what the lines say in a Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.parse = ParseReader(build.parse)
        self.trace = TraceReader()
        self.block = ""
        self._records = 0
        self._characters = 0
        self._full = False
        self._messages = Messages(build, self._keep)
        self._lines_listing: list[BuiltLayer] = []
        self._listed: set[int] = set()
        self._info_listing: list[BuiltLayer] = []
        self._by_word: dict[str, Callable[[str, int], bool]] = {
            "&&&&": self._banner,
            "===": self._heading,
            "QDQ": self._optimizer_heading,
            "TensorRT": self._version,
            "Name:": self._info_layer,
            "Layer:": self._memory,
            "Bindings:": self._open("bindings"),
            "I/O": self._open("io"),
            "Engine": self._engine,
            "Layers:": self._layers_begin,
            "SYMBOLIC": self._open("dump"),
            "Layer": self._layer_information,
            "Formats": self._timed,
            "Adding": self._added,
            "Output": self._open("values"),
            "Input": self._input,
            "Number": self._targets,
            "----------": lambda _text, _line: True,
        }

    def read(self, level: str, text: str, line: int) -> None:
        """Takes one message; ``level`` is V, I, W, E or an empty string for a line without a prefix."""
        if not text.strip():
            self.build.lines.blank += 1
            if level or self.block in ("bindings", "io", "metadata"):
                self.block = ""
            return
        if level in ("W", "E"):
            self._messages.add(level, text, line)
        elif not (
            self._understood(level, text, line)
            or self._indented(level, text, line)
            or (not level and self._messages.continued(text, line))
        ):
            counts = self.build.lines
            counts.unexplained += 1
            if len(counts.samples) < 50:
                counts.samples.append((line, text[:200]))
        if level not in ("", "W", "E"):
            self._messages.end()

    def end_paragraph(self) -> None:
        """An empty line without a stamp ends the lists that are printed without stamps."""
        if self.block in ("bindings", "io", "metadata"):
            self.block = ""

    def _understood(self, level: str, text: str, line: int) -> bool:
        if self.block and self._in_block(level, text, line):
            return True
        if level == "I" and is_profile_head(text):  # an excerpt without the heading of its block
            self.block = "profile"
            return read_profile_row(self.build, text)
        if text.startswith("Layer("):
            layer = layer_lines.parse_engine_line(text, line)
            again = hash(text) in self._listed  # an excerpt that quotes a line twice; TensorRT's listings never do
            if layer is not None and not again and self._keep(text):
                self._listed.add(hash(text))
                self._lines_listing.append(layer)
            return layer is not None
        handler = self._by_word.get(text.split(" ", 1)[0])
        if handler is not None and handler(text, line):
            self.build.lines.marked += not level and is_unmistakable(text)
            return True
        event = self.trace.read(text)
        if event is not None:
            if self._keep(text):
                self.build.trace.append(LogEvent(event.pass_name, event.kind, event.subject, event.object, line=line))
            return True
        if self.build.milestones and text.startswith(_PARSE_BEGINS):  # after an optimizer run: another network
            self._begin_again(parse=True)
        if self.parse.read(text, line, self._keep):
            return True
        if not (self._by_form(text, line) or is_chatter(text)):
            return False
        self.build.lines.marked += not level and is_unmistakable(text)
        return True

    def _indented(self, level: str, text: str, line: int) -> bool:
        """Polygraphy indents what belongs to a step of its own."""
        return bool(level) and text[:1] == " " and self._understood(level, text.lstrip(), line)

    def _by_form(self, text: str, line: int) -> bool:
        """Lines that are known by more than their first word."""
        build = self.build
        match = _MILESTONE.fullmatch(text)
        if match:
            self._milestone(match[1], int(match[2]), line)
            return True
        match = _PLACED.match(text)
        if match:
            if self._keep(text):
                build.placement.append(("GPU" if match[1] == "Gpu" else "DLA", match[2] or "", match[3]))
            return True
        if read_memory(build.memory, text) or read_metric(build.performance, text):
            return True
        if _OPTION.match(text):  # an excerpt without the heading of its block
            key, _, value = text.partition(":")
            build.options.setdefault("Build", {}).setdefault(key, value.strip())
            return True
        return self._timed(text, line) or self._profile_row(text)

    def _profile_row(self, text: str) -> bool:
        """A row of the profile in an excerpt without its heading: indented, a name and at least three numbers."""
        if not text.startswith("   ") or self.build.layers or self.build.milestones:
            return False
        return read_profile_row(self.build, text)

    def _in_block(self, level: str, text: str, line: int) -> bool:
        """Whether the line belongs to the block that is open; a line that does not closes the block."""
        block = self.block
        if block == "profile":
            return text.startswith("===") is False and read_profile_row(self.build, text)
        if text.startswith("&&&&"):
            return self._close()
        if block == "bindings" and not level:
            if self._keep(text) and len(self.build.bindings) < 10_000:
                self.build.bindings.append(text)
            return True
        if block in ("io", "metadata") and not level:
            stripped = text.strip()
            named = stripped.startswith("Name: ")
            bare = " " not in stripped and not stripped.endswith(":")
            if block == "io" and (named or bare) and len(self.build.bindings) < 10_000 and self._keep(text):
                self.build.bindings.append(stripped.removeprefix("Name: ").split(", IOMode: ")[0])
            return text.startswith(" ") or (block == "io" and bare) or self._close()
        if block == "dump":
            inside = not level or text[:1] in " \t" or text.split(" ", 1)[0].replace("_", "").isupper()
            return inside or self._close()
        if block == "values":
            if len(text) < 200 and text.endswith(")") and ": (" in text:
                return True
            return _NUMBERS.issuperset(text[:4000]) or self._close()
        if block == "explanations":
            return ": the " in text or self._close()
        if block in self.build.options and level == "I":
            key, separator, value = text.partition(":")
            if separator and not text.startswith("=== "):
                table = self.build.options[block]
                if len(table) < 200 and self._keep(text):
                    table[key.strip()] = value.strip()
                return True
            return self._close()
        if block == "device" and level == "I" and not text.startswith("==="):
            key, separator, value = text.partition(": ")
            if separator and len(self.build.gpu) < 100:
                self.build.gpu[key] = value.strip()
                if key == "Selected Device":
                    self.build.device = value.strip()
            return True if separator else text.startswith("Available") or self._close()
        if block == "trace" and level == "I":
            return text.startswith(("Trace averages", "Average on")) or self._close()
        return False

    def _close(self) -> bool:
        self.block = ""
        return False

    def _open(self, block: str) -> Callable[[str, int], bool]:
        starts = {"bindings": "Bindings:", "io": "I/O Tensors:", "dump": "SYMBOLIC CHECKS", "values": "Output Tensors:"}

        def handler(text: str, _line: int) -> bool:
            if not text.startswith(starts[block]):
                return False
            self.block = block
            return True

        return handler

    def _input(self, text: str, _line: int) -> bool:
        if text.startswith("Input Tensors:"):
            self.block = "values"
            return True
        return False

    def _banner(self, text: str, _line: int) -> bool:
        match = _BANNER.match(text)
        if match is None:
            return False
        build = self.build
        build.source = BuildSource.TRTEXEC_LOG
        if match[1] in ("PASSED", "FAILED"):
            build.passed = match[1] == "PASSED"
        elif build.milestones:
            self._begin_again(parse=True)
            build.command, build.tensorrt = "", None
            build.flags.clear()
        self.block = ""
        if "RTX" in match[2].upper() or "RTX" in (match[3] or "").upper():
            build.is_rtx = True
        if match[4] and build.tensorrt is None:
            build.tensorrt = version_of(match[4])
        if match[5] and not build.command and self._keep(match[5]):
            build.command = match[5].strip()
            for flag in _FLAG.finditer(build.command[:100_000]):
                build.flags[flag[1]] = (flag[2] or "").strip("\"'")
        return True

    def _targets(self, text: str, _line: int) -> bool:
        """Only TensorRT for RTX builds for a list of GPU generations."""
        known = text.startswith("Number of target compute capabilities")
        self.build.is_rtx = self.build.is_rtx or known
        return known

    def _heading(self, text: str, _line: int) -> bool:
        match = _BLOCK.match(text)
        if match is None:
            return False
        title = match[1]
        if title.endswith(" Options"):
            self.block = title.removesuffix(" Options")
            if self.block not in self.build.options and len(self.build.options) < 20:
                self.build.options[self.block] = {}
        elif title.startswith("Profile ("):
            self.block = "profile"
            self.build.profile_rows.clear()
            digits = title[len("Profile (") :].split(" ", 1)[0]
            self.build.iterations = int(digits) if digits.isdecimal() and len(digits) < 12 else None
        else:
            self.block = {"Device Information": "device", "Trace details": "trace"}.get(title, "")
            if title.startswith("Explanations"):
                self.block = "explanations"
        return True

    def _optimizer_heading(self, text: str, line: int) -> bool:
        if not text.startswith(("QDQ graph optimizer", "QDQ optimization pass")):
            return False
        self.trace.reset()
        if self._keep(text):
            self.build.headings.append((text, line))
        return True

    def _version(self, text: str, _line: int) -> bool:
        if not text.startswith("TensorRT version: "):
            return False
        version = text[len("TensorRT version: ") :].strip().split(" ")[0]
        if re.fullmatch(r"\d{1,3}(\.\d{1,4}){1,4}", version):
            self.build.tensorrt = version
        return True

    def _begin_again(self, parse: bool = False) -> None:
        """Another build in this file, ``parse`` of another network: the last one counts."""
        self.build.begin_again()
        if parse:
            self.build.parse = ParseSection()
            self.parse = ParseReader(self.build.parse)
        self._lines_listing, self._info_listing = [], []
        self._listed.clear()

    def _milestone(self, what: str, count: int, line: int) -> None:
        build = self.build
        self.trace.reset()
        if what == "Original":
            build.builds += 1
            if any(m.what == "Original" for m in build.milestones):
                self._begin_again()
        if self._keep(what):
            build.milestones.append(Milestone(what, count, line))

    def _engine(self, text: str, line: int) -> bool:
        if text.startswith("Engine Layer Information:"):
            self._lines_listing = []
            self._listed.clear()
            self.trace.reset()
            return True
        if text.startswith("Engine Metadata"):
            self.block = "metadata"
            return True
        return self._timed(text, line)

    def _layers_begin(self, _text: str, _line: int) -> bool:
        self._info_listing = []
        return True

    def _layer_information(self, text: str, _line: int) -> bool:
        return text.startswith(("Layer Information:", "Layer-wise"))

    def _info_layer(self, text: str, line: int) -> bool:
        layer = layer_lines.parse_info_line(text, line)
        if layer is not None and self._keep(text):
            self._info_listing.append(layer)
        return layer is not None

    def _memory(self, text: str, _line: int) -> bool:
        return read_memory(self.build.memory, text)

    def _timed(self, text: str, _line: int) -> bool:
        match = _SECONDS.match(text)
        value = number(match[2]) if match else None
        if match is None or value is None or len(self.build.seconds) >= 100:
            return False
        self.build.seconds[match[1]] = value
        return True

    def _added(self, text: str, line: int) -> bool:
        """``NAME (TENSOR) from FORMAT to FORMAT``; from 8.6 on the target may be ``long-strided``."""
        if not text.startswith(_ADDED):
            return False
        edge, cut, formats = text[len(_ADDED) :].removesuffix(_LONG_STRIDED).rpartition(") from ")
        name, opened, tensor = edge.rpartition(" (")
        source, joint, target = formats.partition(" to ")
        if not (cut and opened and joint) or " " in source or " " in target:
            return False
        if self._keep(text):
            self.build.reformats.append(AddedReformat(name, tensor, source, target, line))
        return True

    def _keep(self, text: str) -> bool:
        """Whether there is room for another record of this length; says so once when there is none."""
        self._records += 1
        self._characters += len(text)
        if self._records <= _MAX_RECORDS and self._characters <= _MAX_CHARACTERS:
            return True
        if not self._full:
            self._full = True
            self.build.notes.append(
                "the log is longer than any real one: what came after the first 300,000 records "
                "was counted and not kept"
            )
            self.build.missing.append("everything beyond the first 300,000 records")
        return False

    def finish(self) -> None:
        """Puts the listings in place and judges what is missing."""
        build = self.build
        if self._info_listing and len(self._info_listing) >= len(self._lines_listing):
            build.layers, build.listing = self._info_listing, Listing.LAYER_INFO
            build.second_layers = self._lines_listing
        elif self._lines_listing:
            build.layers, build.listing = self._lines_listing, Listing.ENGINE_LINES
            build.second_layers = self._info_listing
        if not build.trace and not build.parse.nodes and build.listing == Listing.LAYER_INFO and not build.milestones:
            build.source = BuildSource.LAYER_INFO if build.source == BuildSource.LOG else build.source
        judge(build)


def version_of(digits: str) -> str:
    """``8502`` is 8.5.2, ``8510`` 8.5.10, ``101303`` 10.13.3 (the way trtexec prints NV_TENSORRT_VERSION)."""
    number = int(digits)
    if number >= 100_000:
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    text = str(number)
    return f"{text[0]}.{text[1:2] or 0}.{int(text[2:] or 0)}"
