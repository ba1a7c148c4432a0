"""Each option of quantizing stated once: the dataclasses here make the command's options, the signatures and the docs.

A field's metadata holds what ``--help`` and the docstring say of it. :func:`takes` gives a function keyword parameters
for all fields of some of these classes; :mod:`qdqtool.commands.inputs` makes click's options of them.

What the presets of a head leave float is here as well.
"""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from qdqtool.base.parameters import require
from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_coordinates, find_head
from qdqtool.model.operators import LayerKind, of

if TYPE_CHECKING:
    from calibration import Preprocess


_Result = TypeVar("_Result")
_WIDTH = 112  # of a parameter's text in a docstring


def option(
    default: Any, doc: str, brief: str = "", *, choices: Sequence[str] = (), flag: str = "", metavar: str = "",
    least: int | None = None, path: bool = False, alone: float | None = None,
) -> Any:
    """A field that is an option.

    Args:
        default: Its default.
        doc: What a docstring says of it.
        brief: What ``--help`` says; without it no option of the command is made of the field.
        choices: The values that it can have.
        flag: The command's flag that turns off what is on by default.
        metavar: What stands for the value in ``--help``.
        least: The least value of an integer.
        path: Whether it is a file's name.
        alone: The value of the option given without one.
    """
    return field(default=default, metadata={
        "doc": doc, "brief": brief, "choices": tuple(choices), "flag": flag, "metavar": metavar, "least": least,
        "path": path, "alone": alone,
    })  # fmt: skip


class _Checked:
    def __post_init__(self) -> None:
        """Raises QdqtoolError where a field is of another type, or none of its choices."""
        for entry in fields(self):  # type: ignore[arg-type]
            value, choices = getattr(self, entry.name), entry.metadata["choices"]
            require(entry.name, value, entry.type, type(self).__module__)
            if choices and value not in choices and value != entry.default:
                raise QdqtoolError(f"`{entry.name}={value!r}`: choose one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class Ranges(_Checked):
    """How the range of an activation is chosen."""

    method: str = option(
        "focus", "``focus``, ``mse``, ``percentile``, ``entropy`` or ``max``: how an activation's range is chosen.",
        "How an activation's range is chosen; focus is mse where objects are.",
        choices=("focus", "mse", "percentile", "entropy", "max"))
    method_for: Sequence[tuple[str, str]] = option(
        (), "Pairs of a regular expression on tensor names and the method for those tensors.",
        "Another method for some tensors.", metavar="REGEX=METHOD")
    percentile: float = option(
        99.99, "For ``percentile``, in percent of the absolute values.", "For the method percentile.")
    max_images: int = option(
        512, "Use at most so many samples, spread evenly.", "Spread over the whole set.", least=1)


@dataclass(frozen=True, kw_only=True)
class Images(_Checked):
    """How images become the network's inputs."""

    preprocess: Preprocess | None = option(
        None, "How images become inputs; default: letterbox, RGB, divided by 255.")
    size: tuple[int, int] | None = option(
        None, "Height and width in pixels where the model leaves them open; by default its ``imgsz`` metadata.")


@dataclass(frozen=True, kw_only=True)
class Workers(_Checked):
    """Who runs the network."""

    cluster: object = option(
        None, "Who calibrates and measures: the address of a Dask scheduler, ``local:N`` or a ``distributed.Client``, "
        "see :func:`calibration.collect`; None for this process. The result is the same.")
    mixed_cpus: bool = option(
        False, "Whether to permit workers whose results may differ in the last bits.",
        "Permit workers whose results may differ in the last bits.")


@dataclass(frozen=True, kw_only=True)
class Kept(_Checked):
    """Where the statistics are kept."""

    calib_cache: str | os.PathLike[str] | None = option(
        None, "File to keep statistics in, so that another run needs no inference.",
        "Keep statistics there; resume and reuse them.", metavar="FILE", path=True)
    overwrite_cache: bool = option(
        False, "Whether a cache made for another model or from other data is replaced instead of refused.",
        "Replace a cache of another model or of other images.")


@dataclass(frozen=True, kw_only=True)
class Placing(_Checked):
    """What is quantized, and how weights are stored."""

    head: str = option(
        "box", "``box`` leaves DFL and box outputs of a YOLOv8-style head float, and what makes boxes, reference "
        "points and sampling offsets of a DETR; ``float`` every last convolution and such scores; ``none`` nothing.",
        "Float in a head: DFL and box outputs (a DETR's sampling offsets too); scores as well; nothing.",
        choices=("box", "float", "none"))
    residual: str = option(
        "auto", "``auto``, ``skip``, ``both`` or ``none``: which inputs of a residual Add are quantized.",
        "Inputs of a residual Add to quantize.", choices=("auto", "skip", "both", "none"))
    attention: str = option(
        "float", "``float`` leaves the products of attention (queries with keys, Softmax with values) float, ``int8`` "
        "quantizes their inputs, the Softmax's result with its fixed range 0 to 1. Users measured INT8 attention to be "
        "slower: 800 us for 200 on an Orin with 8.6 (NVIDIA/TensorRT issue 3243), 111 ms for 43 of a UNet of Stable "
        "Diffusion on an A10 (2905). TensorRT-RTX 1.7 makes one kernel of each attention of ViT-B/16 and Swin-T in "
        "either type, and several of those of YOLO11.",
        "INT8 attention: slower where users measured it (TensorRT issues 3243, 2905), so measure.",
        choices=("float", "int8"))
    unify: bool = option(
        True, "Whether tensors tied by Concat, Split, Slice, MaxPool, Resize and the like share one scale.",
        "Let tensors tied by Concat and the like have scales of their own.", flag="no_unify")
    exclude: Sequence[str] = option(
        (), "Regular expressions (``re.search``) on names of nodes to leave float.", "Leave these nodes float.",
        metavar="REGEX")
    include: Sequence[str] = option(
        (), "The same for nodes to quantize although a preset would leave them float.",
        "Quantize these although a preset would not.", metavar="REGEX")
    exclude_op: Sequence[str] = option(
        (), "Operator types to leave float.", "Leave these operator types float.", metavar="OP")
    weights: str = option(
        "float", "``float`` keeps float weights with Q and DQ; ``int8`` stores int8 with DQ alone.",
        "Store weights as float with Q and DQ, or as int8 with DQ alone.", choices=("float", "int8"))


@dataclass(frozen=True, kw_only=True)
class Remainder(_Checked):
    """What the Q/DQ model computes in where it is not quantized."""

    high_precision: str | None = option(
        None, "``fp32`` leaves the float remainder as it is, ``fp16`` turns it into FP16 (but for tensors whose values "
        "near its largest, and inputs and outputs). By default what the target needs: ``fp16`` where it computes in "
        "the types of the file (TensorRT 11, TensorRT-RTX), else ``fp32``.",
        "Type of what stays float. [default: fp16 where the file's types decide (trt11, rtx1.7), else fp32]",
        choices=("fp32", "fp16"))


@dataclass(frozen=True, kw_only=True)
class Output(Remainder):
    """What the Q/DQ model is like around its quantizers."""

    input_type: str = option(
        "float", "``float`` leaves the network's inputs as they are; ``int8`` and ``uint8`` see "
        ":mod:`qdqtool.insertion.inputs`.",
        "Type of the network's input: int8 takes the first Q's result, uint8 takes pixels.",
        choices=("float", "int8", "uint8"))
    smooth: float | None = option(
        None, "SmoothQuant before the calibration, for networks with outlier channels (ACT-OUTLIER): moves scales of "
        "what Linears read into their weights, and their inverse into the LayerNormalization, Linear or Mul that makes "
        "it, the same in float; 0 to 1, how much of it, mostly .5. None does nothing.",
        "SmoothQuant: move outlier channels of what Linears read into their weights; 0.5 where no ALPHA is given.",
        metavar="ALPHA", alone=0.5)


def choices_of(group: type, name: str) -> tuple[str, ...]:
    """The values that a field can have."""
    found: tuple[str, ...] = next(f.metadata["choices"] for f in fields(group) if f.name == name)
    return found


def takes(**groups: type) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Gives a function a keyword parameter for each field of the classes that its own parameters of these names hold.

    The line ``{options}`` in its docstring becomes what the fields say.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        own = inspect.signature(function)
        stated = [f for group in groups.values() for f in fields(group)]

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> _Result:
            for name, group in groups.items():
                given = {f.name: keywords.pop(f.name) for f in fields(group) if f.name in keywords}
                keywords[name] = group(**given)
            return function(*args, **keywords)

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [p for p in own.parameters.values() if p.name not in groups]
        parameters += [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in stated]
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        text = "\n".join(
            textwrap.indent(textwrap.fill(f"{f.name}: {f.metadata['doc']}", _WIDTH, subsequent_indent="    "), " " * 8)
            for f in stated
        )
        call.__doc__ = (function.__doc__ or "").replace("        {options}", text)
        return call

    return decorate


HEADS = choices_of(Placing, "head")
_DETECTOR = 2  # last convolutions that make a network without a DFL a detector


def float_nodes(model: Model, choice: str) -> dict[int, str]:
    """Nodes that the head preset leaves float, with the reason; ``choice`` is one of :data:`HEADS`."""
    if choice == "none":
        return {}
    head = find_head(model)
    result = dict.fromkeys(head.boxes, "box output of a YOLOv8-style head (`head='none'` quantizes it)")
    result.update(dict.fromkeys(head.dfl, "DFL: expected value over the box bins (`head='none'` quantizes it)"))
    places = find_coordinates(model, head.finals)
    result.update(dict.fromkeys(places.makers, "makes boxes or sampling points (`head='none'` quantizes it)"))
    result.update(dict.fromkeys(places.mlps, "MLP of a box output (`head='none'` quantizes it)"))
    result.update(dict.fromkeys(places.readers, "reads reference points (`head='none'` quantizes it)"))
    if choice == "box" and not head.dfl:
        ends = [i for i in sorted(head.finals) if of(model.nodes[i]).kind == LayerKind.CONVOLUTION]
        if len(ends) >= _DETECTOR:
            result.update(dict.fromkeys(ends, "last convolution of a detection head (`head='none'` quantizes it)"))
    if choice == "float":
        for index in sorted((head.finals | places.scores) - result.keys()):
            selects = index in places.scores - head.finals
            what = "scores by which queries are selected" if selects else "last convolution before an output"
            result[index] = f"{what} (`head='float'`)"
    return result
