"""Options of commands that read images and write a Q/DQ model, and what their texts mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from calibration.images import Preprocess
    from qdqtool.trt.targets import Target

TARGETS = "trt8.0, trt8.4, trt8.5, trt8.6, trt10, trt11, rtx1.7, or a TensorRT version such as 10.3"
strongly_typed = click.option(
    "--strongly-typed", is_flag=True, help="For a strongly typed network of TensorRT 10 (trtexec --stronglyTyped), as "
                                           "all are from 11 on."
)
_PREPROCESSING = (
    click.option("--resize", type=click.Choice(["letterbox", "stretch"]), default="letterbox", show_default=True),
    click.option("--size", default=None, metavar="H[xW]", help="Image size in pixels where the model leaves it open."),
    click.option("--bgr", is_flag=True, help="Channels in the order blue, green, red."),
    click.option("--scale", type=float, default=None,
                 help="Factor for pixel values. [default: 1/255; 1 for an integer input]"),
    click.option("--mean", default=None, metavar="M[,M,M]", help="Subtracted after --scale; by channel, after --bgr."),
    click.option("--std", default=None, metavar="S[,S,S]", help="Divided by after --mean."),
)
_Decorator = Callable[[Callable[..., int]], Callable[..., int]]


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


def made_of(group: type, **shown: str) -> _Decorator:
    """The options that fields of a class of :mod:`qdqtool.insertion.options` make; ``shown`` replaces a help text."""
    return _all(tuple(_option(f, shown.get(f.name, f.metadata["brief"])) for f in fields(group) if f.metadata["brief"]
                      or f.name in shown))  # fmt: skip


def _option(entry: Field[Any], brief: str) -> Any:
    known = entry.metadata
    flag = known["flag"] or entry.name
    spelled = f"--{flag.replace('_', '-')}"
    more: dict[str, Any] = {"help": brief, "metavar": known["metavar"] or None}
    if isinstance(entry.default, bool):
        return click.option(spelled, flag, is_flag=True, help=brief)
    if entry.default == ():
        return click.option(spelled, multiple=True, **more)
    if known["choices"]:
        more["type"] = click.Choice(list(known["choices"]))
    elif known["path"]:
        more["type"] = click.Path()
    elif known["least"] is not None:
        more["type"] = click.IntRange(known["least"])
    elif known["alone"] is not None:
        more.update(type=_Optional(), is_flag=False, flag_value=known["alone"], metavar=f"[{known['metavar']}]")
    elif isinstance(entry.default, float):
        more["type"] = float
    return click.option(spelled, default=entry.default, show_default=entry.default is not None, **more)


def given_to(group: type, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a class of :mod:`qdqtool.insertion.options` from what click read."""
    found: dict[str, Any] = {}
    for entry in fields(group):
        flag = entry.metadata["flag"]
        if flag in given:
            found[entry.name] = not given[flag]
        elif entry.name == "method_for" and entry.name in given:
            found[entry.name] = [method_of(text) for text in given[entry.name]]
        elif entry.name in given:
            found[entry.name] = given[entry.name]
    return found


def _all(options: tuple[Any, ...]) -> _Decorator:
    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


preprocessing = _all(_PREPROCESSING)


def images_of(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of :class:`qdqtool.insertion.options.Images` from the options of :data:`preprocessing`."""
    return {"size": size_of(given["size"]),
            "preprocess": preprocess_of(*(given[n] for n in ("resize", "bgr", "scale", "mean", "std")))}  # fmt: skip


def preprocess_of(resize: str, bgr: bool, scale: float | None, mean: str | None, std: str | None) -> Preprocess:
    """What the options of :data:`preprocessing` say.

    Raises:
        click.BadParameter: A text is no number or three.
    """
    means, stds = _channels(mean, "--mean"), _channels(std, "--std")
    from calibration.images import Preprocess

    return Preprocess(resize=resize, bgr=bgr, scale=1.0 / 255.0 if scale is None else scale,
                      mean=means or (0.0, 0.0, 0.0), std=stds or (1.0, 1.0, 1.0))  # fmt: skip


def default_output(model: str) -> str:
    """``model_qdq.onnx`` beside ``model.onnx``."""
    name = Path(model).name
    for ending in (".gz", ".onnx"):
        name = name.removesuffix(ending)
    return str(Path(model).with_name(f"{name}_qdq.onnx"))


def method_of(text: str) -> tuple[str, str]:
    """Pattern and method of a --method-for.

    Raises:
        click.BadParameter: It is not REGEX=METHOD.
    """
    pattern, equals, method = text.rpartition("=")
    if not equals or not pattern or not method:
        raise click.BadParameter(f"'{text}' is not REGEX=METHOD", param_hint="--method-for")
    return pattern, method


def size_of(text: str | None) -> tuple[int, int] | None:
    """Height and width of a --size.

    Raises:
        click.BadParameter: It is neither a number nor HEIGHTxWIDTH.
    """
    if text is None:
        return None
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 65536 for p in parts):
        raise click.BadParameter(f"'{text}' is neither a number nor HEIGHTxWIDTH", param_hint="--size")
    return int(parts[0]), int(parts[-1])


def _channels(text: str | None, option: str) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        values = [float(v) for v in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise click.BadParameter(f"'{text}' is neither a number nor three with commas between", param_hint=option)
    return (values[0], values[0], values[0]) if len(values) == 1 else (values[0], values[1], values[2])


def target_of(target: str | None, strongly: bool) -> Target:
    """The target that was named, or the default one, strongly typed where that was asked for.

    Raises:
        QdqtoolError: There is none of that name, or it has no strongly typed networks.
    """
    from qdqtool.trt import targets

    chosen = targets.target_named(target or targets.DEFAULT_TARGET)
    return targets.strongly_typed(chosen) if strongly else chosen
