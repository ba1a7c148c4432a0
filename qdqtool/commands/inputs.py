"""Options of the commands, made of the classes that state them, and what their texts mean.

What no function takes is stated here: where an answer goes and what of it is shown, which other files are read and
written, and what makes an exit code of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from qdqtool.base.file_types import model_stem
from qdqtool.base.options import (
    Images,
    Option,
    Preprocess,
    Workers,
    as_in,
    concern,
    option,
    option_of,
    options_of,
)
from qdqtool.base.records import replaced
from qdqtool.commands.usage import UsageError
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.options import BUILDERS, On

if TYPE_CHECKING:
    from qdqtool.trt.targets import Target

_Decorator = Callable[[Callable[..., int]], Callable[..., int]]


@concern
class Typed(On):
    """The target of a command for models."""

    strongly_typed: bool = option(
        False,
        brief="For a strongly typed network of TensorRT 10 (trtexec --stronglyTyped), as all are from 11 on.",
    )

    def chosen(self) -> Target:
        """The target that was named, strongly typed where that was asked for.

        Raises:
            QdqtoolError: There is none of that name, or it has no strongly typed networks.
        """
        from qdqtool.trt import targets

        chosen = targets.target_named(self.target)
        return targets.strongly_typed(chosen) if self.strongly_typed else chosen


@concern
class Answer:
    """The form of a command's answer."""

    form: str = option(
        "text", choices=("text", "json"), name="format", brief="Format of the answer."
    )

    def give(self, data: Callable[[], Any], text: Callable[[int], str]) -> None:
        """Prints or writes the answer: ``data`` makes it as JSON, ``text`` for a width in columns.

        Raises:
            QdqtoolError: The file cannot be written, or stdout is closed.
        """
        from qdqtool.render.output import emit, terminal_width, to_json

        to = getattr(self, "output", None)
        emit(to_json(data()) if self.form == "json" else text(100 if to else terminal_width()), to)


@concern
class Written(Answer):
    """The same of an answer that may go to a file."""

    output: str | None = option(
        None, brief="Write the answer to a file.", name="output", kind="path"
    )


@concern
class Shown:
    """What of an answer a text shows; of ``--all`` each command says what that is."""

    everything: bool = option(False, name="all")
    trace: bool = option(False, brief="Print the lines that TensorRT's optimizer would log.")
    layers: bool = option(False, brief="List the engine's layers.")
    listing: bool = option(False, brief="List every finding code.", name="list")
    sources: bool = option(
        False, brief="Show where each figure comes from, and how well it is proven."
    )
    pass_name: str | None = option(
        None, brief="Print the lines of one optimizer pass.", name="pass", metavar="NAME"
    )
    sort: str | None = option(
        None,
        brief="Order of the layers; ms where timed.",
        choices=("order", "ms", "macs", "bytes", "intensity", "name", "type"),
    )


@concern
class Files:
    """Files that are written beside the answer, or are not."""

    result: str | None = option(
        None, brief="Write the JSON as well, for qdqtool report.", metavar="FILE", kind="path"
    )
    no_state: bool = option(False, brief="Keep nothing.")
    write_table: str | None = option(
        None, brief="Write a TensorRT calibration table as well.", metavar="FILE", kind="path"
    )
    to_onnx: str | None = option(
        None,
        brief="Write the ONNX graph that the parse section states (no weights).",
        metavar="FILE",
        kind="path",
    )
    dot: str | None = option(None, brief="Write the engine as a Graphviz file.", kind="path")
    svg: str | None = option(
        None, brief="Write the engine as an SVG (needs qdqtool[draw]).", kind="path"
    )
    issue: str | None = option(
        None, brief="Write what an issue needs, in Markdown.", name="report", kind="path"
    )
    page: str | None = option(
        None,
        brief="Write the report of two models as well: before and after.",
        name="report",
        metavar="HTML",
        kind="file",
    )


@concern
class Further:
    """Files that are read beside the first, or without it."""

    more_a: tuple[str, ...] = option(
        (),
        brief="Another file of the build A, such as its profile.",
        name="with-a",
        metavar="FILE",
        kind="path",
    )
    more_b: tuple[str, ...] = option(
        (), brief="Another file of the build B.", name="with-b", metavar="FILE", kind="path"
    )
    profile: str | None = option(
        None, brief="Profile JSON (--exportProfile) of the same engine.", kind="path"
    )
    other: tuple[str, ...] = option(
        (),
        brief="A second engine, its profile with another --compare: what 'qdqtool compare' shows of them.",
        name="compare",
        metavar="FILE",
        kind="path",
    )
    verification: str | None = option(
        None, brief="JSON of 'qdqtool verify' for the report: expected and seen.", kind="path"
    )
    from_log: bool = option(
        False, brief="No model available: rebuild the graph from the log itself."
    )


@concern
class Gates:
    """What the exit code depends on."""

    require_gain: float | None = option(
        None,
        brief="Exit 1 unless INT8 is at least X times as fast as float, by the low end of the range (with "
        "--gpu).",
        metavar="X",
        kind="float",
        least=0.01,
        most=100,
    )
    required: tuple[str, ...] = option(
        (), brief="These convolutions must be INT8.", name="require", metavar="REGEX"
    )
    fail_on: tuple[str, ...] = option(
        (), brief="Exit 1 on such a finding.", metavar="CODE|error|warning"
    )
    allow_partial: bool = option(
        False, brief="Exit 0 when nothing contradicts, even if the build is partial."
    )


@concern
class Data:
    """What functions take as ``data``."""

    calib: str | None = option(
        None,
        brief="Folder of images, text file of paths, npz or npy.",
        metavar="IMAGES",
        kind="path",
    )


@concern
class Needed(Data):
    """The same of a command that does nothing without."""

    calib: str = as_in(Data, "calib", needed=True)


@concern
class Made:
    """Where a Q/DQ model goes."""

    output: str | None = option(
        None, brief="The Q/DQ model. [default: MODEL_qdq.onnx]", kind="path"
    )

    def beside(self, model: str) -> str:
        """That place, by default ``model_qdq.onnx`` beside ``model.onnx``."""
        return self.output or str(Path(model).with_name(f"{model_stem(model)}_qdq.onnx"))


@concern
class Place:
    """Where a model goes that is made of a Q/DQ model; it has to be said."""

    output: str = as_in(Made, "output", brief="Where to write the fixed model.", needed=True)


@concern
class Page:
    """Where the report goes."""

    output: str | None = as_in(
        Made,
        "output",
        brief="The page.  [default: <MODEL>_report.html, here]",
        metavar="HTML",
        kind="file",
    )


class Command(click.Command):
    """A command whose help ends with its examples (``qdqtool/knowledge/examples.toml``)."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from qdqtool.knowledge.tables import table

        with formatter.section("Examples"):
            for example in table("examples")[str(self.name)]:
                formatter.write(f"  # {example['says']}\n  {example['run']}\n")


class _Optional(click.types.FloatParamType):
    """A number that may be left out where the next word is an option; another next word is taken for it."""

    def fail(
        self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None
    ) -> NoReturn:
        super().fail(
            f"{message} Give the option a number, or put it behind the other arguments.", param, ctx
        )


def check_workers(where: Workers) -> None:
    """Raises UsageError for what is said of the workers of no cluster."""
    if where.mixed_cpus and where.cluster is None:
        raise UsageError(
            "--mixed-cpus is about the workers of --cluster, which is not given",
            code="option-without-effect",
            parameter="mixed_cpus",
        )


# What texts mean ----------------------------------------------------------------------------------------------------


def _pair(text: str) -> tuple[str, str]:
    """Pattern and method of a --method-for."""
    pattern, equals, method = text.rpartition("=")
    if not equals or not pattern or not method:
        raise ValueError(f"'{text}' is not REGEX=METHOD")
    return pattern, method


def _size(text: str) -> tuple[int, int]:
    """Height and width of a --size."""
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 65536 for p in parts):
        raise ValueError(f"'{text}' is neither a number nor HEIGHTxWIDTH")
    return int(parts[0]), int(parts[-1])


def _channels(text: str) -> tuple[float, float, float]:
    """A number for each channel."""
    try:
        values = [float(v) for v in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise ValueError(f"'{text}' is neither a number nor three with commas between")
    return (
        (values[0], values[0], values[0]) if len(values) == 1 else (values[0], values[1], values[2])
    )


def _seconds(text: str) -> float:
    """Seconds of a --time-limit."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise ValueError(
            f"'{text}' is no time above 0 and below 30 years, such as 600, 10m or 1.5h"
        )
    return value


def _assumed(texts: tuple[str, ...]) -> dict[str, str]:
    """``name=value`` of each --assume.

    Raises:
        QdqtoolError: One has another form, or a name is given twice with different values.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise QdqtoolError(
                f"--assume {text[:60]}: write name=value, such as silu-add=fused",
                code="wrong-format",
                parameter="assume",
            )
        if found.setdefault(name.strip().lower(), value.strip().lower()) != value.strip().lower():
            raise QdqtoolError(
                f"--assume {name.strip()} is given twice with different values",
                code="option-conflict",
                parameter="assume",
            )
    return found


def _capabilities(texts: tuple[str, ...]) -> list[int]:
    """The number of each --sm."""
    found = []
    for text in texts:
        digits = text.upper().removeprefix("SM").replace(".", "")
        if not digits.isdecimal():
            raise BuilderError(
                f"--sm {text}: give a compute capability such as 86",
                code="wrong-format",
                parameter="sm",
            )
        found.append(int(digits))
    return found


def _shapes(texts: tuple[str, ...]) -> dict[str, list[list[int]]]:
    """The input of each --shapes, and its minimum, preferred and maximum shape."""
    found = {}
    for text in texts:
        name, _, rest = text.rpartition(":")
        try:
            shapes = [[int(d) for d in part.split("x")] for part in rest.split(",")]
        except ValueError:
            shapes = []
        if not name or len(shapes) not in (1, 3) or len({len(s) for s in shapes}) != 1:
            raise BuilderError(
                f"--shapes {text}: give INPUT:1x3x640x640, or three shapes (minimum, preferred, maximum)",
                code="wrong-format",
                parameter="shapes",
            )
        found[name] = shapes * 3 if len(shapes) == 1 else shapes
    return found


def _arrays(path: str) -> Any:
    from qdqtool.base.archives import read_arrays

    return read_arrays(path)


class _Text(click.types.StringParamType):
    """A text that means something; ``read`` raises ValueError where it does not."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TYPES: dict[str, Any] = {
    "int": click.INT,
    "float": click.FLOAT,
    "path": click.Path(),
    "file": click.Path(dir_okay=False),
    "text": click.STRING,
    "builder": click.Choice(BUILDERS),
    "arrays": click.Path(),
    "pair": _Text(_pair),
    "size": _Text(_size),
    "channels": _Text(_channels),
    "seconds": _Text(_seconds),
}
# Read when all options are known.
_WHOLE: dict[str, Callable[[Any], Any]] = {"arrays": _arrays}
_SEVERAL: dict[str, Callable[[Any], Any]] = {
    "assume": _assumed,
    "capabilities": _capabilities,
    "shapes": _shapes,
}
_AS_STATED = (
    "",
    "path",
    "builder",
)  # kinds of options whose default is shown; of others the help says it


# Classes as options -------------------------------------------------------------------------------------------------


def made_of(parameter: str, group: type, *names: str, **briefs: str) -> _Decorator:
    """Gives a command the options that the fields of a class make, and calls it with an object of the class.

    ``names`` are the fields in the order of ``--help``, by default all that have a text for it; ``briefs`` are other
    such texts.
    """
    taken = [option_of(group, n) for n in names] or [
        f for f in options_of(group) if f.metadata["brief"] or f.name in briefs
    ]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(**given: Any) -> int:
            values = {}
            for entry in taken:
                known, value = entry.metadata, given.pop(entry.name)
                if value is not None and value != ():
                    read = _WHOLE.get(known["kind"]) or _SEVERAL.get(known["kind"])
                    values[entry.name] = (
                        not value if known["off"] else read(value) if read is not None else value
                    )
                elif known["commanded"] is None:
                    values[entry.name] = None
            return function(**given, **{parameter: group(**values)})

        for entry in reversed(taken):
            _option(entry, briefs.get(entry.name) or entry.metadata["brief"] or None)(call)
        return call

    return decorate


def _option(entry: Option, brief: str | None) -> Any:
    known = entry.metadata
    names = [f"--{(known['name'] or entry.name).replace('_', '-')}", entry.name]
    if entry.name == "output":
        names.insert(0, "-o")
    if isinstance(entry.default, bool):
        return click.option(*names, is_flag=True, help=brief)
    more: dict[str, Any] = {
        "help": brief,
        "metavar": known["metavar"] or None,
        "required": known["needed"],
    }
    kind, default = known["kind"], entry.default
    more["type"] = TYPES.get(kind, click.FLOAT if isinstance(default, float) else None)
    if known["choices"]:
        more["type"] = click.Choice(list(known["choices"]))
    elif known["least"] is not None:
        number = click.FloatRange if kind == "float" else click.IntRange
        more["type"] = number(known["least"], known["most"])
    elif known["alone"] is not None:
        more.update(
            type=_Optional(),
            is_flag=False,
            flag_value=known["alone"],
            metavar=f"[{known['metavar']}]",
        )
    if default == () or kind in _SEVERAL or known["needed"]:
        return click.option(*names, multiple=not known["needed"], **more)
    if known["commanded"] is not ...:
        default = known["commanded"]
    shown = default if kind in _AS_STATED else None
    return click.option(*names, default=shown, show_default=shown is not None, **more)


def images(function: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of :class:`Images` and of its :class:`Preprocess`, and the former as ``images``."""

    @functools.wraps(function)
    def call(preprocess: Preprocess, images: Images, **given: Any) -> int:
        return function(**given, images=replaced(images, preprocess=preprocess))

    return made_of("preprocess", Preprocess)(made_of("images", Images)(call))
