"""Each option stated once: a class for each concern, of which options, signatures and documentation are made.

A field's metadata holds what ``--help`` and the docstring say of it. :func:`takes` gives a function parameters for all
fields of some of these classes; :mod:`qdqtool.commands.inputs` makes click's options of them. What the package
``calibration`` takes is here, because it knows nothing above; the other concerns are in :mod:`qdqtool.options`.
"""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from qdqtool.base.checks import check_choice
from qdqtool.base.records import record
from qdqtool.base.text import brief_repr
from qdqtool.errors import DataError

_Result = TypeVar("_Result")
_Class = TypeVar("_Class")
_WIDTH = 112  # of a parameter's text in a docstring


def option(
    default: Any,
    doc: str = "",
    brief: str = "",
    *,
    choices: Sequence[str] = (),
    name: str = "",
    off: bool = False,
    metavar: str = "",
    least: float | None = None,
    most: float | None = None,
    kind: str = "",
    alone: float | None = None,
    needed: bool = False,
    commanded: Any = ...,
) -> Any:
    """A field that is an option.

    Args:
        default: Its default.
        doc: What a docstring says of it.
        brief: What ``--help`` says; without it no option of the command is made of the field.
        choices: The values that it can have.
        name: What the command's option is called, where that is not the field's name.
        off: Whether that option turns off what is on by default.
        metavar: What stands for the value in ``--help``.
        least: The least value of a number.
        most: The greatest.
        kind: How the command reads the option's text, where its type is not that of the default: one of ``TYPES`` of
            :mod:`qdqtool.commands.inputs`.
        alone: The value of the option given without one.
        needed: Whether the command wants it.
        commanded: The command's own default, where it is another one.
    """
    return Option(
        default,
        {
            "doc": doc,
            "brief": brief,
            "choices": tuple(choices),
            "name": name,
            "off": off,
            "metavar": metavar,
            "least": least,
            "most": most,
            "kind": kind,
            "alone": alone,
            "needed": needed,
            "commanded": commanded,
        },
    )


class Option:
    """A field of a concern.

    Attributes:
        default: Its default.
        metadata: What :func:`option` was told, by name.
        name: The field's name.
        type: Its annotation.
        module: Where that stands.
    """

    __slots__ = ("default", "metadata", "module", "name", "type")
    name: str
    type: str
    module: str

    def __init__(self, default: Any, metadata: Mapping[str, Any]) -> None:
        self.default, self.metadata = default, metadata


@dataclass_transform(frozen_default=True, kw_only_default=True)
def concern(kind: type[_Class]) -> type[_Class]:
    """Makes a class with options a record of them, without compiling methods as a dataclass does.

    Its objects refuse a value of another type than annotated, or that is none of the choices.
    """
    own = []
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        given: Option = vars(kind)[name]
        given.name, given.type, given.module = name, annotation, kind.__module__
        setattr(kind, name, given.default)
        own.append(given)
    known = {o.name: o for o in (*getattr(kind, "_options", ()), *own)}
    kind._options = tuple(known.values())  # type: ignore[attr-defined]
    record(kind)
    assign = vars(kind)["__init__"]

    def init(self: Any, **values: Any) -> None:
        assign(self, **values)
        for entry in self._options:
            value, choices = getattr(self, entry.name), entry.metadata["choices"]
            if choices and value is not entry.default:
                for one in value if entry.default == () else (value,):
                    check_choice(entry.name, one, choices)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def options_of(group: type) -> tuple[Option, ...]:
    """The options of a concern, or of :class:`Preprocess`."""
    found: tuple[Option, ...] = vars(group).get("_options") or tuple(
        f.metadata["option"] for f in fields(group)
    )
    return found


def _stated(given: Option) -> Any:
    """The same as a field of a dataclass."""
    return field(default=given.default, metadata={"option": given})


def option_of(group: type, name: str) -> Option:
    """The option of that name."""
    return next(f for f in options_of(group) if f.name == name)


def choices_of(group: type, name: str) -> tuple[str, ...]:
    """The values that a field can have."""
    found: tuple[str, ...] = option_of(group, name).metadata["choices"]
    return found


def as_in(group: type, name: str, default: Any = ..., **changes: Any) -> Any:
    """A field that is the option of another concern, but for what is given; see :func:`option`."""
    known = option_of(group, name)
    return Option(known.default if default is ... else default, {**known.metadata, **changes})


def takes(**groups: type) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Gives a function a parameter for each field of the classes that its own parameters of these names hold.

    The parameters are keywords; those of a class whose own parameter may be given by its place take that place. An
    object of the class may be given instead of them. The line ``{options}`` in the docstring becomes what the fields
    say.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        own = inspect.signature(function)
        parameters: list[inspect.Parameter] = []
        keywords_of_groups: list[inspect.Parameter] = []  # behind those of the function itself
        for parameter in own.parameters.values():
            group = groups.get(parameter.name)
            if group is None:
                parameters.append(parameter)
                continue
            made = [
                inspect.Parameter(f.name, parameter.kind, default=f.default, annotation=f.type)
                for f in options_of(group)
            ]
            (keywords_of_groups if parameter.kind is parameter.KEYWORD_ONLY else parameters).extend(
                made
            )
        signature = own.replace(parameters=[*parameters, *keywords_of_groups])

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> _Result:
            given = {
                n: keywords.pop(n)
                for n, group in groups.items()
                if isinstance(keywords.get(n), group)
            }
            values = signature.bind(*args, **keywords).arguments
            for name, group in groups.items():
                of_group = {
                    f.name: values.pop(f.name) for f in options_of(group) if f.name in values
                }
                given.setdefault(name, group(**of_group))
            values.update(given)
            bound = inspect.BoundArguments(
                own, OrderedDict((n, values[n]) for n in own.parameters if n in values)
            )
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        text = "\n".join(
            textwrap.indent(
                textwrap.fill(f"{f.name}: {f.metadata['doc']}", _WIDTH, subsequent_indent="    "),
                " " * 8,
            )
            for group in groups.values()
            for f in options_of(group)
        )
        call.__doc__ = (function.__doc__ or "").replace("        {options}", text)
        return call

    return decorate


def _plain(number: float) -> float:
    """Return a number of numpy as Python's; an integer stays one."""
    return number if isinstance(number, int) else float(number)


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a network input; the defaults are those of Ultralytics YOLO.

    ``value = (pixel * scale - mean) / std`` for each channel, in the order the network takes them.

    Attributes:
        resize: ``letterbox`` keeps the aspect ratio and pads both sides evenly; ``stretch`` does not.
        bgr: Channel order blue, green, red instead of red, green, blue.
        scale: Factor for the 0 to 255 pixel values.
        mean: Subtracted after scaling, for each channel.
        std: Divided by after that.
        fill: Grey level of the padding, 0 to 255.
    """

    resize: str = _stated(
        option(
            "letterbox",
            brief="How a picture gets the network's size.",
            choices=("letterbox", "stretch"),
        )
    )
    bgr: bool = _stated(option(False, brief="Channels in the order blue, green, red."))
    scale: float = _stated(
        option(
            1.0 / 255.0,
            brief="Factor for pixel values. [default: 1/255; 1 for an integer input]",
            kind="float",
        )
    )
    mean: tuple[float, float, float] = _stated(
        option(
            (0.0, 0.0, 0.0),
            brief="Subtracted after --scale; by channel, after --bgr.",
            metavar="M[,M,M]",
            kind="channels",
        )
    )
    std: tuple[float, float, float] = _stated(
        option(
            (1.0, 1.0, 1.0), brief="Divided by after --mean.", metavar="S[,S,S]", kind="channels"
        )
    )
    fill: int = _stated(option(114))

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(_plain, getattr(self, name))))
        if not len(self.mean) == len(self.std) == 3:
            raise DataError(
                "mean and std take three numbers, one for each channel", code="wrong-length"
            )
        object.__setattr__(self, "scale", _plain(self.scale))
        if self.resize not in ("letterbox", "stretch"):
            raise DataError(
                f"resize is '{self.resize}'; use letterbox or stretch",
                code="unknown-choice",
                parameter="resize",
            )
        if not all(s > 0 for s in self.std):
            raise DataError(
                f"std is {self.std}; every channel's must be above 0",
                code="out-of-range",
                parameter="std",
            )
        if not 0 <= self.fill <= 255:
            raise DataError(
                f"fill is {brief_repr(self.fill)}; it is a grey level from 0 to 255",
                code="out-of-range",
                parameter="fill",
            )


for _field in fields(Preprocess):
    _field.metadata["option"].name, _field.metadata["option"].type = _field.name, str(_field.type)


# What calibration takes --------------------------------------------------------------------------------------------


@concern
class Images:
    """How images become the network's inputs."""

    preprocess: Preprocess | None = option(
        None, "How images become inputs; default: letterbox, RGB, divided by 255."
    )
    size: tuple[int, int] | None = option(
        None,
        "Height and width in pixels where the model leaves them open; by default its ``imgsz`` metadata.",
        "Image size in pixels where the model leaves it open.",
        metavar="H[xW]",
        kind="size",
    )


@concern
class Ranges:
    """How the range of an activation is chosen."""

    method: str = option(
        "focus",
        "``focus``, ``mse``, ``percentile``, ``entropy`` or ``max``: how an activation's range is chosen.",
        "How an activation's range is chosen; focus is mse where objects are.",
        choices=("focus", "mse", "percentile", "entropy", "max"),
    )
    method_for: Sequence[tuple[str, str]] = option(
        (),
        "Pairs of a regular expression on tensor names and the method for those tensors.",
        "Another method for some tensors.",
        metavar="REGEX=METHOD",
        kind="pair",
    )
    percentile: float = option(
        99.99,
        "For ``percentile``, in percent of the absolute values.",
        "For the method percentile.",
    )
    max_images: int = option(
        512, "Use at most so many samples, spread evenly.", "Spread over the whole set.", least=1
    )


@concern
class Samples:
    """Which samples of some data are taken, and how they become inputs."""

    preprocess: Preprocess = as_in(
        Images,
        "preprocess",
        Preprocess(),
        doc="How pictures become inputs; arrays are taken as they are.",
    )
    max_images: int = as_in(Ranges, "max_images")
    size: tuple[int, int] | None = as_in(
        Images, "size", doc="Height and width in pixels where the model leaves them open."
    )


@concern
class Workers:
    """Who runs the network."""

    cluster: object = option(
        None,
        "Who calibrates and measures: the address of a Dask scheduler, ``local:N`` for N processes of this "
        "machine, or a ``distributed.Client``; None for this process. The result is the same, bit for bit.",
        "Calibrate and measure on the workers of this Dask scheduler; local:N starts N processes here.",
        metavar="ADDRESS",
    )
    mixed_cpus: bool = option(
        False,
        "Whether to permit workers whose results may differ in the last bits.",
        "Permit workers whose results may differ in the last bits.",
    )


@concern
class Kept:
    """Where the statistics are kept."""

    calib_cache: str | os.PathLike[str] | None = option(
        None,
        "File to keep statistics in, so that another run needs no inference.",
        "Keep statistics there; resume and reuse them.",
        metavar="FILE",
        kind="path",
    )
    overwrite_cache: bool = option(
        False,
        "Whether a cache made for another model or from other data is replaced instead of refused.",
        "Replace a cache of another model or of other images.",
    )


@concern
class Collected(Samples):
    """What statistics are made of, and where they are kept."""

    size: tuple[int, int] | None = as_in(Images, "size")
    cache: str | os.PathLike[str] | None = as_in(
        Kept,
        "calib_cache",
        doc="A file that keeps the statistics: saved every few seconds and at the end, resumed "
        "after an interruption, and reused when model, data and tensors are the same. ``notes`` of the result says "
        "what was done.",
    )
    overwrite_cache: bool = as_in(Kept, "overwrite_cache")
