"""Reader of all log lines except timing lines.

The first word of a line, or the block that is open, decides which method reads the line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from qdqtool.buildlog import layers, lines
from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.build_status import set_build_status
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
from qdqtool.util import limits
from qdqtool.util.notes import Note

_MILESTONE = re.compile(r"(Original|After [A-Za-z -]{1,60}): (\d{1,9}) layers")
_BANNER = re.compile(
    r"&&&& (RUNNING|PASSED|FAILED|WAIVED) (\S+)"
    r"(?: \[(.{0,40}?) ?v(\d{1,8})\](?: \[\w+\])?)?(?: # (.*))?"
)
_BLOCK = re.compile(r"=== (.{1,60}?) ===")
_PLACED = re.compile(r"\[(Gpu|Dla|DLA)Layer\] (?:([A-Z_]+): )?(.*)")
_ADDED = "Adding reformat layer: "
_LONG_STRIDED = " long-strided"
_SECONDS = re.compile(r"(.{3,60}?)(?: completed in| in|:) ([\d.e+-]{1,20}) sec(?:onds|\.)?\.?")
_OPTION = re.compile(
    r"(?:Max batch|Precision|Input\(s\)s? format|Output\(s\)s? format|Batch|Calibration|Sparsity)"
    r": ?[\w+: ]{0,60}"
)
_VERSION = re.compile(r"TensorRT version: \s*(\d{1,3}(?:\.\d{1,4}){1,4})(?: |\s*$)")
# The value is matched possessively: memory for backtracking would grow with its length.
_FLAG = re.compile(r"(?:^|\s)--([\w]+)(?:=((?:\"[^\"]*\"|'[^']*'|\S)*+))?")
_PARSE_BEGINS = ("Input filename:", "Adding network input: ", "Parsing model")
_BLOCK_STARTS = {  # beginning of a line: name of the block that the line opens
    "Bindings:": "bindings",
    "I/O Tensors:": "io",
    "SYMBOLIC CHECKS": "dump",
}
_BLOCK_TITLES = {"Device Information": "device", "Trace details": "trace"}
UNSTAMPED = ("bindings", "io", "metadata")  # blocks without timestamps; an empty line ends them


class SectionReader:
    """Reader that stores the contents of log lines in a Build.

    Attributes:
        build: Build to fill.
        block: Name of the open block of lines; empty outside of blocks.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.parse = lines.ParseReader(build.parse, self.keep)
        self.trace = TraceReader()
        self.block = ""
        self._profile = lines.ProfileReader(build, self.keep)
        self._records = 0
        self._characters = 0
        self._messages = lines.MessageCollector(build, self.keep)
        self._lines_listing: list[BuiltLayer] = []
        self._line_hashes: set[int] = set()
        self._info_listing: list[BuiltLayer] = []
        self._block_readers: dict[str, Callable[[str, str], bool]] = {
            "bindings": self._read_binding,
            "io": self._read_tensor_name,
            "dump": self._read_dump_line,
            "metadata": lambda _level, text: text.startswith(" "),
            "explanations": lambda _level, text: ": the " in text,
            "trace": self._read_trace_details,
            "device": self._read_device,
        }
        self._word_readers: dict[str, Callable[[str, int], bool]] = {
            "&&&&": self._read_banner,
            "===": self._read_heading,
            "QDQ": self._read_optimizer_heading,
            "TensorRT": self._read_version,
            "Name:": self._read_info_layer,
            "Layer:": lambda text, _line: lines.read_memory(build.memory, text),
            "Engine": self._read_engine,
            "Layers:": self._begin_layers,
            "Layer": lambda text, _line: text.startswith(("Layer Information:", "Layer-wise")),
            "Formats": self._read_duration,
            "Adding": self._read_added_reformat,
            "Number": self._read_targets,
            "Original:": self._read_milestone,
            "After": self._read_milestone,
            "----------": lambda _text, _line: True,
        }
        for start, block in _BLOCK_STARTS.items():
            reader = functools.partial(self._open_block, block, start)
            self._word_readers[start.split(" ", 1)[0]] = reader

    def read(self, level: str, text: str, line: int) -> None:
        """Read one log message; messages that no reader recognizes are only counted.

        Args:
            level: V, I, W, E, or an empty string for a line without a prefix.
            text: Message without its prefix.
            line: Line number.
        """
        if not text.strip():
            self.build.lines.blank += 1
            if level or self.block in UNSTAMPED:
                self.block = ""
            return
        if level in ("W", "E"):
            self._messages.add(level, text, line)
        elif not (
            self._read_message(level, text, line)
            # Polygraphy indents messages.
            or (level and text[:1] == " " and self._read_message(level, text.lstrip(), line))
            or (not level and self._messages.continue_message(text, line))
        ):
            self.build.lines.unexplained += 1
        if level not in ("", "W", "E"):
            self._messages.end()

    def _read_message(self, level: str, text: str, line: int) -> bool:
        if self.block and self._read_in_block(level, text):
            return True
        if level == "I" and lines.is_profile_header(text):
            # The log is an excerpt that lacks the heading of the profile.
            self.block = "profile"
            return self._profile.read(text)
        if text.startswith("Layer("):
            return self._read_engine_line(text, line)
        word = text.split(" ", 1)[0]
        reader = self._word_readers.get(word)
        if reader is None or not reader(text, line):
            if self._read_network_line(word, text, line):
                return True
            if not self._read_other_line(text, line):
                return False
        if not level and lines.is_tensorrt_only(text):
            self.build.lines.marked += 1
        return True

    def _read_network_line(self, word: str, text: str, line: int) -> bool:
        if word not in lines.PARSER_WORDS and self._read_event(text, line):
            return True
        if self.build.milestones and text.startswith(_PARSE_BEGINS):
            # The parser runs again after the optimizer, so the log contains another network.
            self._start_next_build(parse=True)
        return self.parse.read(text, line)

    def _read_engine_line(self, text: str, line: int) -> bool:
        layer = layers.parse_engine_line(text, line)
        if layer is None:
            return False
        # TensorRT prints each line once, but an excerpt may quote a line twice.
        if hash(text) not in self._line_hashes and self.keep(text):
            self._line_hashes.add(hash(text))
            self._lines_listing.append(layer)
        return True

    def _read_event(self, text: str, line: int) -> bool:
        event = self.trace.read(text)
        if event is None:
            return False
        if self.keep(text):
            self.build.trace.append(
                LogEvent(event.pass_name, event.kind, event.subject, event.object, line=line)
            )
        return True

    def _read_other_line(self, text: str, line: int) -> bool:
        build = self.build
        if self._read_placement(text):
            return True
        if lines.read_memory(build.memory, text) or lines.read_metric(build.performance, text):
            return True
        if _OPTION.match(text):
            # The log is an excerpt that lacks the heading of the options.
            key, _, value = text.partition(":")
            build.options.setdefault("Build", {}).setdefault(key, value.strip())
            return True
        return self._read_duration(text, line) or lines.is_uninformative(text)

    def _read_placement(self, text: str) -> bool:
        match = _PLACED.match(text) if text.startswith("[") else None
        if match is not None and self.keep(text):
            device = "GPU" if match[1] == "Gpu" else "DLA"
            self.build.placement.append((device, match[2] or "", match[3]))
        return match is not None

    def _read_in_block(self, level: str, text: str) -> bool:
        """Read a line of the open block; return False if the line does not belong to the block.

        Most blocks end at their first foreign line.
        """
        block = self.block
        if block in ("profile", "device") and text.startswith("==="):
            return False
        if block == "profile":
            return self._profile.read(text)
        if text.startswith("&&&&"):
            self.block = ""
            return False
        if block in UNSTAMPED and level:
            return False
        if (block in ("device", "trace") or block in self.build.options) and level != "I":
            return False
        is_inside = self._block_readers.get(block, self._read_option)(level, text)
        if not is_inside:
            self.block = ""
        return is_inside

    def _read_binding(self, _level: str, text: str) -> bool:
        self._add_binding(text, text)
        return True

    def _read_tensor_name(self, _level: str, text: str) -> bool:
        stripped = text.strip()
        is_name = " " not in stripped and not stripped.endswith(":")
        if is_name or stripped.startswith("Name: "):
            self._add_binding(stripped.removeprefix("Name: ").split(", IOMode: ")[0], text)
        return is_name or text.startswith(" ")

    def _add_binding(self, name: str, text: str) -> None:
        if self.keep(text):
            self.build.bindings.append(name)

    def _read_dump_line(self, level: str, text: str) -> bool:
        # TensorRT-RTX prints the nodes of its graph, such as "CONSTANT w", each with its shape.
        word = text.split(" ", 1)[0].replace("_", "")
        return not level or text[:1] in " \t" or word.isupper()

    def _read_trace_details(self, _level: str, text: str) -> bool:
        return text.startswith(("Trace averages", "Average on"))

    def _read_device(self, _level: str, text: str) -> bool:
        build = self.build
        key, separator, value = text.partition(": ")
        if separator and self.keep(text):
            build.gpu[key] = value.strip()
            if key == "Selected Device":
                build.device = value.strip()
        return bool(separator) or text.startswith("Available")

    def _read_option(self, _level: str, text: str) -> bool:
        options = self.build.options.get(self.block)
        key, separator, value = text.partition(":")
        if options is None or not separator or text.startswith("=== "):
            return False
        if self.keep(text):
            options[key.strip()] = value.strip()
        return True

    def _open_block(self, block: str, start: str, text: str, _line: int) -> bool:
        if not text.startswith(start):
            return False
        self.block = block
        return True

    def _read_banner(self, text: str, _line: int) -> bool:
        match = _BANNER.match(text)
        if match is None:
            return False
        build = self.build
        build.source = BuildSource.TRTEXEC_LOG
        if match[1] in ("PASSED", "FAILED"):
            build.passed = match[1] == "PASSED"
        elif build.milestones:
            self._start_next_build(parse=True)
            build.command, build.tensorrt = "", None
            build.flags.clear()
        self.block = ""
        build.is_rtx |= "RTX" in f"{match[2]} {match[3]}".upper()
        if match[4] and build.tensorrt is None:
            build.tensorrt = parse_version_digits(match[4])
        if match[5] and not build.command and self.keep(match[5]):
            build.command = match[5].strip()
            for flag, value in _FLAG.findall(build.command[:100_000]):
                build.flags[flag] = value.strip("\"'")
        return True

    def _read_milestone(self, text: str, line: int) -> bool:
        match = _MILESTONE.fullmatch(text)
        if match is None:
            return False
        self.trace.reset()
        if match[1] == "Original" and any(m.name == "Original" for m in self.build.milestones):
            self._start_next_build()
        if self.keep(match[1]):
            self.build.milestones.append(Milestone(match[1], int(match[2]), line))
        return True

    def _read_targets(self, text: str, _line: int) -> bool:
        # Only TensorRT for RTX prints this line, because it can build for several GPU generations.
        has_targets = text.startswith("Number of target compute capabilities")
        self.build.is_rtx |= has_targets
        return has_targets

    def _read_heading(self, text: str, _line: int) -> bool:
        match = _BLOCK.match(text)
        if match is None:
            return False
        title = match[1]
        if title.endswith(" Options"):
            self.block = title.removesuffix(" Options")
            self.build.options.setdefault(self.block, {})
        elif title.startswith("Profile ("):
            self.block = "profile"
            self.build.profile_rows.clear()
            digits = title[len("Profile (") :].split(" ", 1)[0]
            self.build.iterations = int(digits) if digits.isdecimal() and len(digits) < 12 else None
        elif title.startswith("Explanations"):
            self.block = "explanations"
        else:
            self.block = _BLOCK_TITLES.get(title, "")
        return True

    def _read_optimizer_heading(self, text: str, line: int) -> bool:
        if not text.startswith(("QDQ graph optimizer", "QDQ optimization pass")):
            return False
        self.trace.reset()
        if self.keep(text):
            self.build.headings.append((text, line))
        return True

    def _read_version(self, text: str, _line: int) -> bool:
        match = _VERSION.match(text)
        if match is not None:
            self.build.tensorrt = match[1]
        return text.startswith("TensorRT version: ")

    def _start_next_build(self, parse: bool = False) -> None:
        """Drop the previous build of the log, because only the last build counts.

        Args:
            parse: Whether to drop the parse section as well, because the next build is of another
                network.
        """
        self.build.clear_results()
        if parse:
            self.build.parse = ParseSection()
            self.parse = lines.ParseReader(self.build.parse, self.keep)
        self._lines_listing, self._info_listing = [], []
        self._line_hashes.clear()

    def _read_engine(self, text: str, line: int) -> bool:
        if text.startswith("Engine Layer Information:"):
            self._lines_listing = []
            self._line_hashes.clear()
            self.trace.reset()
            return True
        if text.startswith("Engine Metadata"):
            self.block = "metadata"
            return True
        return self._read_duration(text, line)

    def _begin_layers(self, _text: str, _line: int) -> bool:
        self._info_listing = []
        return True

    def _read_info_layer(self, text: str, line: int) -> bool:
        layer = layers.parse_info_line(text, line)
        if layer is not None and self.keep(text):
            self._info_listing.append(layer)
        return layer is not None

    def _read_duration(self, text: str, _line: int) -> bool:
        match = _SECONDS.match(text) if " sec" in text else None
        value = lines.parse_number(match[2]) if match else None
        if match is None or value is None:
            return False
        if self.keep(text):
            self.build.seconds[match[1]] = value
        return True

    def _read_added_reformat(self, text: str, line: int) -> bool:
        # The line is NAME (TENSOR) from FORMAT to FORMAT. From 8.6 on, the target may be
        # long-strided.
        if not text.startswith(_ADDED):
            return False
        edge, cut, formats = text[len(_ADDED) :].removesuffix(_LONG_STRIDED).rpartition(") from ")
        name, opened, tensor = edge.rpartition(" (")
        source, joint, target = formats.partition(" to ")
        if not (cut and opened and joint) or " " in source or " " in target:
            return False
        if self.keep(text):
            self.build.reformats.append(AddedReformat(name, tensor, source, target, line))
        return True

    def keep(self, text: str) -> bool:
        """Count a record and its characters, and return whether the limits allow storing it.

        The first record beyond the limit adds a note and a gap to the build.
        """
        self._records += 1
        self._characters += len(text)
        if self._records <= limits.LOG_RECORDS and self._characters <= limits.LOG_TEXT:
            return True
        gap = Gap(Section.ALL, GapKind.BEYOND_RECORDS, limits.LOG_RECORDS)
        if gap not in self.build.gaps:
            self.build.gaps.append(gap)
            self.build.notes.append(
                Note(
                    f"the log is too long: only its first {limits.LOG_RECORDS:,} records were "
                    "read. Give the log of a single build",
                    code="too-long",
                    records=limits.LOG_RECORDS,
                )
            )
        return False

    def finish(self) -> None:
        """Choose the main listing and set the status of the build, after the last line."""
        build = self.build
        if self._info_listing and len(self._info_listing) >= len(self._lines_listing):
            build.layers, build.listing = self._info_listing, ListingSource.LAYER_INFO
            build.second_layers = self._lines_listing
        elif self._lines_listing:
            build.layers, build.listing = self._lines_listing, ListingSource.ENGINE_LINES
            build.second_layers = self._info_listing
        is_log = build.trace or build.parse.nodes or build.milestones
        if build.listing == ListingSource.LAYER_INFO and not is_log:
            if build.source == BuildSource.LOG:
                build.source = BuildSource.LAYER_INFO
        set_build_status(build)


def parse_version_digits(digits: str) -> str:
    """Parse the digits of NV_TENSORRT_VERSION that trtexec prints.

    ``8502`` is 8.5.2, ``8510`` is 8.5.10, ``101303`` is 10.13.3.
    """
    number = int(digits)
    if number >= 100_000:
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    text = str(number)
    return f"{text[0]}.{text[1:2] or 0}.{int(text[2:] or 0)}"
