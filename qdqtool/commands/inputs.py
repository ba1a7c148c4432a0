"""Options of the commands, made of the dataclasses that state them, and what their texts mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from qdqtool.base.files import stem
from qdqtool.base.options import Images, Option, Preprocess, concern, option, options_of
from qdqtool.base.records import replaced
from qdqtool.errors import QdqtoolError
from qdqtool.options import BUILDERS, On, Workers

if TYPE_CHECKING:
    from qdqtool.trt.targets import Target

_Decorator = Callable[[Callable[..., int]], Callable[..., int]]


@concern
class Typed(On):
    """The target of a command for models."""

    strongly_typed: bool = option(
        False, brief="For a strongly typed network of TensorRT 10 (trtexec --stronglyTyped), as all are from 11 on.")

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

    form: str = option("text", choices=("text", "json"), name="format", brief="Format of the answer.")

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

    output: str | None = option(None, brief="Write the answer to a file.", name="output", kind="path")


class Command(click.Command):
    """A command whose help ends with its examples (``qdqtool/knowledge/examples.toml``)."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from qdqtool.knowledge.tables import table

        with formatter.section("Examples"):
            for example in table("examples")[str(self.name)]:
                formatter.write(f"  # {example['says']}\n  {example['run']}\n")


class _Optional(click.types.FloatParamType):
    """A number that may be left out where the next word is an option; another next word is taken for it."""

    def fail(self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None) -> NoReturn:
        super().fail(f"{message} Give the option a number, or put it behind the other arguments.", param, ctx)


def default_output(model: str) -> str:
    """``model_qdq.onnx`` beside ``model.onnx``."""
    return str(Path(model).with_name(f"{stem(model)}_qdq.onnx"))


def check_workers(where: Workers) -> None:
    """Raises UsageError for what is said of the workers of no cluster."""
    if where.mixed_cpus and where.cluster is None:
        raise click.UsageError("--mixed-cpus is about the workers of --cluster, which is not given")


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
    return (values[0], values[0], values[0]) if len(values) == 1 else (values[0], values[1], values[2])


def _seconds(text: str) -> float:
    """Seconds of a --time-limit."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise ValueError(f"'{text}' is no time above 0, such as 600, 10m or 1.5h")
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
            raise QdqtoolError(f"--assume {text[:60]}: write name=value, such as silu-add=fused")
        if found.setdefault(name.strip().lower(), value.strip().lower()) != value.strip().lower():
            raise QdqtoolError(f"--assume {name.strip()} is given twice with different values")
    return found


def _arrays(path: str) -> Any:
    from qdqtool.base.packed import read_arrays

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
    "int": click.INT, "float": click.FLOAT, "path": click.Path(), "file": click.Path(dir_okay=False),
    "text": click.STRING, "assume": click.STRING, "arrays": click.Path(), "pair": _Text(_pair), "size": _Text(_size),
    "channels": _Text(_channels), "seconds": _Text(_seconds),
}
_WHOLE: dict[str, Callable[[Any], Any]] = {"assume": _assumed, "arrays": _arrays}  # read when all options are known


# Classes as options -------------------------------------------------------------------------------------------------


def made_of(parameter: str, group: type, **briefs: str) -> _Decorator:
    """Gives a command the options that the fields of a class make, and calls it with an object of the class.

    ``briefs`` are other texts for ``--help``.
    """
    taken = [f for f in options_of(group) if f.metadata["brief"]]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(**given: Any) -> int:
            values = {}
            for entry in taken:
                known, value = entry.metadata, given.pop(entry.name)
                if value is not None and value != ():
                    read = _WHOLE.get(known["kind"])
                    values[entry.name] = not value if known["off"] else read(value) if read is not None else value
                elif known["commanded"] is None:
                    values[entry.name] = None
            return function(**given, **{parameter: group(**values)})

        for entry in reversed(taken):
            _option(entry, briefs.get(entry.name) or entry.metadata["brief"])(call)
        return call

    return decorate


def _option(entry: Option, brief: str) -> Any:
    known = entry.metadata
    names = [f"--{(known['name'] or entry.name).replace('_', '-')}", entry.name]
    if entry.name == "output":
        names.insert(0, "-o")
    if isinstance(entry.default, bool):
        return click.option(*names, is_flag=True, help=brief)
    more: dict[str, Any] = {"help": brief, "metavar": known["metavar"] or None, "required": known["needed"]}
    kind, default = known["kind"], entry.default
    more["type"] = TYPES[kind] if kind else click.FLOAT if isinstance(default, float) else None
    if default == () or kind == "assume":
        return click.option(*names, multiple=True, **more)
    if known["choices"]:
        more["type"] = click.Choice(list(known["choices"]))
    elif known["least"] is not None:
        number = click.FloatRange if kind == "float" else click.IntRange
        more["type"] = number(known["least"], known["most"])
    elif known["alone"] is not None:
        more.update(type=_Optional(), is_flag=False, flag_value=known["alone"], metavar=f"[{known['metavar']}]")
    if known["commanded"] is not ...:
        default = known["commanded"]
    shown = None if kind else default  # what a text means is not shown; its help says the default
    return click.option(*names, default=shown, show_default=shown is not None, **more)


def calib(brief: str = "Folder of images, text file of paths, npz or npy.", *, needed: bool = False) -> _Decorator:
    """The option of the images, which functions take as ``data``."""
    return click.option("--calib", type=click.Path(), required=needed, metavar="IMAGES", help=brief)


def builder(brief: str, default: str | None = None) -> _Decorator:
    """The option of who builds."""
    return click.option("--builder", type=click.Choice(BUILDERS), default=default, show_default=True, help=brief)


def capability(*, multiple: bool = False) -> _Decorator:
    """The option of the GPU that TensorRT-RTX builds for: one, or several."""
    return click.option("--sm", multiple=multiple, metavar="CC", help="Compute capability to build for (tensorrt-rtx), "
                        f"such as 86{'; may be repeated' * multiple}.")


def images(function: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of :class:`Images` and of its :class:`Preprocess`, and the former as ``images``."""

    @functools.wraps(function)
    def call(preprocess: Preprocess, images: Images, **given: Any) -> int:
        return function(**given, images=replaced(images, preprocess=preprocess))

    return made_of("preprocess", Preprocess)(made_of("images", Images)(call))
