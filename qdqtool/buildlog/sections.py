"""The parts of a log that are not timing: each line goes to the handler of its first word, or of the open block."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from qdqtool.buildlog import layers, lines
from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.summary import set_build_status
from qdqtool.buildlog.types import (
    AddedReformat,
    Build,
    BuiltLayer,
    Gap,
    GapKind,
    ListingSource,
    LogEvent,
    Milestone,
    ParseSection,
    Section,
)
from qdqtool.trt.trace import TraceReader
from qdqtool.util.notes import Remark

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
_OPENS = {
    "Bindings:": "bindings",
    "I/O Tensors:": "io",
    "SYMBOLIC CHECKS": "dump",
    "Output Tensors:": "values",
    "Input Tensors:": "values",
}  # line to the block that it opens
UNSTAMPED = (
    "bindings",
    "io",
    "metadata",
)  # blocks whose lines have no stamp, and that end with an empty one
_MAX_RECORDS = 300_000
_MAX_CHARACTERS = 24 << 20  # of everything kept: bounds the memory a hostile log can take


class SectionReader:
    """Keeps what the lines say in a Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.parse = lines.ParseReader(build.parse)
        self.trace = TraceReader()
        self.block = ""
        self._records = 0
        self._characters = 0
        self._full = False
        self._messages = lines.MessageCollector(build, self._keep)
        self._lines_listing: list[BuiltLayer] = []
        self._listed: set[int] = set()
        self._info_listing: list[BuiltLayer] = []
        self._by_word: dict[str, Callable[[str, int], bool]] = {
            "&&&&": self._read_banner,
            "===": self._read_heading,
            "QDQ": self._read_optimizer_heading,
            "TensorRT": self._read_version,
            "Name:": self._read_info_layer,
            "Layer:": lambda text, _line: lines.read_memory(build.memory, text),
            "Engine": self._read_engine,
            "Layers:": self._begin_layers,
            "Layer": lambda text, _line: text.startswith(("Layer Information:", "Layer-wise")),
            "Formats": self._read_seconds,
            "Adding": self._read_added_reformat,
            "Number": self._read_targets,
            "Original:": self._read_milestone,
            "After": self._read_milestone,
            "----------": lambda _text, _line: True,
            **{
                start.split(" ", 1)[0]: functools.partial(self._open_block, block, start)
                for start, block in _OPENS.items()
            },
        }

    def read(self, level: str, text: str, line: int) -> None:
        """Takes one message; ``level`` is V, I, W, E or an empty string for a line without a prefix."""
        if not text.strip():
            self.build.lines.blank += 1
            if level or self.block in UNSTAMPED:
                self.block = ""
            return
        if level in ("W", "E"):
            self._messages.add(level, text, line)
        elif not (
            self._read_message(level, text, line)
            # Polygraphy indents what belongs to a step of its own.
            or (level and text[:1] == " " and self._read_message(level, text.lstrip(), line))
            or (not level and self._messages.continue_message(text, line))
        ):
            self.build.lines.unexplained += 1
        if level not in ("", "W", "E"):
            self._messages.end()

    def _read_message(self, level: str, text: str, line: int) -> bool:
        if self.block and self._read_in_block(level, text, line):
            return True
        if level == "I" and lines.is_profile_head(
            text
        ):  # an excerpt without the heading of its block
            self.block = "profile"
            return lines.read_profile_row(self.build, text)
        if text.startswith("Layer("):
            if self._full:  # nothing more is kept
                return layers.is_engine_line(text)
            layer = layers.parse_engine_line(text, line)
            again = (
                hash(text) in self._listed
            )  # an excerpt that quotes a line twice; TensorRT's listings never do
            if layer is not None and not again and self._keep(text):
                self._listed.add(hash(text))
                self._lines_listing.append(layer)
            return layer is not None
        word = text.split(" ", 1)[0]
        handler = self._by_word.get(word)
        if handler is None or not handler(text, line):
            if word not in lines.PARSER_WORDS and (said := self.trace.read(text)) is not None:
                if self._keep(text):
                    self.build.trace.append(
                        LogEvent(said.pass_name, said.kind, said.subject, said.object, line=line)
                    )
                return True
            if self.build.milestones and text.startswith(
                _PARSE_BEGINS
            ):  # after an optimizer run: another network
                self._begin_again(parse=True)
            if self.parse.read(text, line, self._keep):
                return True
            if not (self._read_other(text, line) or lines.is_chatter(text)):
                return False
        self.build.lines.marked += not level and lines.is_unmistakable(text)
        return True

    def _read_other(self, text: str, line: int) -> bool:
        """Lines that are known by more than their first word."""
        build = self.build
        if text.startswith("[") and (match := _PLACED.match(text)):
            if self._keep(text):
                build.placement.append(
                    ("GPU" if match[1] == "Gpu" else "DLA", match[2] or "", match[3])
                )
            return True
        if lines.read_memory(build.memory, text) or lines.read_metric(build.performance, text):
            return True
        if _OPTION.match(text):  # an excerpt without the heading of its block
            key, _, value = text.partition(":")
            build.options.setdefault("Build", {}).setdefault(key, value.strip())
            return True
        if self._read_seconds(text, line):
            return True
        # A row of the profile in an excerpt without its heading: indented, a name and at least three numbers.
        is_excerpt = text.startswith("   ") and not build.layers and not build.milestones
        return is_excerpt and lines.read_profile_row(build, text)

    def _read_in_block(self, level: str, text: str, line: int) -> bool:
        """Whether the line belongs to the block that is open; a line that does not closes the block."""
        block, build = self.block, self.build
        if block == "profile":
            return not text.startswith("===") and lines.read_profile_row(build, text)
        unstamped, settings = block in UNSTAMPED, block in ("device", "trace", *build.options)
        if text.startswith("&&&&"):  # torn
            self.block = ""
            return False
        if (unstamped and level) or (settings and level != "I"):
            return False
        inside, stripped = False, text.strip()
        if unstamped:
            bare = block == "io" and " " not in stripped and not stripped.endswith(":")
            name = (
                text
                if block == "bindings"
                else stripped.removeprefix("Name: ").split(", IOMode: ")[0]
            )
            if block == "bindings" or bare or (block == "io" and stripped.startswith("Name: ")):
                if len(build.bindings) < 10_000 and self._keep(text):
                    build.bindings.append(name)
            inside = block == "bindings" or text.startswith(" ") or bare
        elif block == "dump":
            inside = (
                not level or text[:1] in " \t" or text.split(" ", 1)[0].replace("_", "").isupper()
            )
        elif block == "values":
            named = len(text) < 200 and text.endswith(")") and ": (" in text
            inside = named or _NUMBERS.issuperset(text[:4000])
        elif block == "explanations":
            inside = ": the " in text
        elif block in build.options:
            key, separator, value = text.partition(":")
            inside = bool(separator) and not text.startswith("=== ")
            if inside and len(build.options[block]) < 200 and self._keep(text):
                build.options[block][key.strip()] = value.strip()
        elif block == "device":
            if text.startswith("==="):
                return False
            key, separator, value = text.partition(": ")
            inside = bool(separator) or text.startswith("Available")
            if separator and len(build.gpu) < 100:
                build.gpu[key] = value.strip()
                build.device = value.strip() if key == "Selected Device" else build.device
        else:
            inside = block == "trace" and text.startswith(("Trace averages", "Average on"))
        self.block = block if inside else ""
        return inside

    def _open_block(self, block: str, start: str, text: str, _line: int) -> bool:
        if opens := text.startswith(start):
            self.block = block
        return opens

    def _read_banner(self, text: str, _line: int) -> bool:
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
        build.is_rtx = build.is_rtx or "RTX" in f"{match[2]} {match[3]}".upper()
        if match[4] and build.tensorrt is None:
            build.tensorrt = parse_version_digits(match[4])
        if match[5] and not build.command and self._keep(match[5]):
            build.command = match[5].strip()
            for flag in _FLAG.finditer(build.command[:100_000]):
                build.flags[flag[1]] = (flag[2] or "").strip("\"'")
        return True

    def _read_milestone(self, text: str, line: int) -> bool:
        match = _MILESTONE.fullmatch(text)
        if match is None:
            return False
        self.trace.reset()
        if match[1] == "Original" and any(m.name == "Original" for m in self.build.milestones):
            self._begin_again()
        if self._keep(match[1]):
            self.build.milestones.append(Milestone(match[1], int(match[2]), line))
        return True

    def _read_targets(self, text: str, _line: int) -> bool:
        """Only TensorRT for RTX builds for a list of GPU generations."""
        known = text.startswith("Number of target compute capabilities")
        self.build.is_rtx = self.build.is_rtx or known
        return known

    def _read_heading(self, text: str, _line: int) -> bool:
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
            blocks = {"Device Information": "device", "Trace details": "trace"}
            self.block = (
                "explanations" if title.startswith("Explanations") else blocks.get(title, "")
            )
        return True

    def _read_optimizer_heading(self, text: str, line: int) -> bool:
        if not text.startswith(("QDQ graph optimizer", "QDQ optimization pass")):
            return False
        self.trace.reset()
        if self._keep(text):
            self.build.headings.append((text, line))
        return True

    def _read_version(self, text: str, _line: int) -> bool:
        match = re.match(r"TensorRT version: \s*(\d{1,3}(?:\.\d{1,4}){1,4})(?: |\s*$)", text)
        self.build.tensorrt = match[1] if match else self.build.tensorrt
        return text.startswith("TensorRT version: ")

    def _begin_again(self, parse: bool = False) -> None:
        """Another build in this file, ``parse`` of another network: the last one counts."""
        self.build.begin_again()
        if parse:
            self.build.parse = ParseSection()
            self.parse = lines.ParseReader(self.build.parse)
        self._lines_listing, self._info_listing = [], []
        self._listed.clear()

    def _read_engine(self, text: str, line: int) -> bool:
        if text.startswith("Engine Layer Information:"):
            self._lines_listing = []
            self._listed.clear()
            self.trace.reset()
            return True
        if text.startswith("Engine Metadata"):
            self.block = "metadata"
            return True
        return self._read_seconds(text, line)

    def _begin_layers(self, _text: str, _line: int) -> bool:
        self._info_listing = []
        return True

    def _read_info_layer(self, text: str, line: int) -> bool:
        if self._full:
            return layers.is_info_line(text)
        layer = layers.parse_info_line(text, line)
        if layer is not None and self._keep(text):
            self._info_listing.append(layer)
        return layer is not None

    def _read_seconds(self, text: str, _line: int) -> bool:
        match = _SECONDS.match(text) if " sec" in text and len(self.build.seconds) < 100 else None
        value = lines.parse_number(match[2]) if match else None
        if match is not None and value is not None:
            self.build.seconds[match[1]] = value
        return value is not None

    def _read_added_reformat(self, text: str, line: int) -> bool:
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
            self.build.notes.append(Remark.TOO_LONG(records=_MAX_RECORDS))
            self.build.gaps.append(Gap(Section.ALL, GapKind.BEYOND_RECORDS, _MAX_RECORDS))
        return False

    def finish(self) -> None:
        """Puts the listings in place and judges what is missing."""
        build = self.build
        if self._info_listing and len(self._info_listing) >= len(self._lines_listing):
            build.layers, build.listing = self._info_listing, ListingSource.LAYER_INFO
            build.second_layers = self._lines_listing
        elif self._lines_listing:
            build.layers, build.listing = self._lines_listing, ListingSource.ENGINE_LINES
            build.second_layers = self._info_listing
        if (
            not build.trace
            and not build.parse.nodes
            and build.listing == ListingSource.LAYER_INFO
            and not build.milestones
        ):
            build.source = (
                BuildSource.LAYER_INFO if build.source == BuildSource.LOG else build.source
            )
        set_build_status(build)


def parse_version_digits(digits: str) -> str:
    """``8502`` is 8.5.2, ``8510`` 8.5.10, ``101303`` 10.13.3 (the way trtexec prints NV_TENSORRT_VERSION)."""
    number = int(digits)
    if number >= 100_000:
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    text = str(number)
    return f"{text[0]}.{text[1:2] or 0}.{int(text[2:] or 0)}"
