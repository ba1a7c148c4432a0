"""Options of an insertion: calibration, placement, and changes of the rest of the network."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from qdqtool.errors import QdqtoolError
from qdqtool.util.checks import check_choice, check_not_text
from qdqtool.util.text import brief_repr

if TYPE_CHECKING:
    from calibration.options import DaskCluster, ImageFunction, Preprocess

RangeMethod: TypeAlias = Literal["focus", "mse", "percentile", "entropy", "max"]
"""Method that chooses the range of an activation."""
HeadChoice: TypeAlias = Literal["box", "float", "none"]
"""Layers of a detection head that remain float."""
ResidualChoice: TypeAlias = Literal["auto", "skip", "both", "none"]
"""Inputs of a residual Add that are quantized."""
AttentionChoice: TypeAlias = Literal["auto", "float", "int8", "fp8"]
"""Type of the products of attention."""
WeightForm: TypeAlias = Literal["float", "int8", "fp8"]
"""Type of the stored weights."""
HighPrecision: TypeAlias = Literal["fp32", "fp16"]
"""Type of the layers without Q/DQ."""
InputType: TypeAlias = Literal["float", "int8", "uint8"]
"""Type of the network's inputs."""

METHODS: tuple[str, ...] = get_args(RangeMethod)
HEADS: tuple[str, ...] = get_args(HeadChoice)
RESIDUALS: tuple[str, ...] = get_args(ResidualChoice)
PRECISIONS = ("int8", "fp8", "auto")


@dataclass(frozen=True)
class RangeOptions:
    """Options for the ranges of activations.

    Attributes:
        method: One of :data:`METHODS`.
        method_for: Pairs of a regular expression and a method. The method applies to tensors whose
            name matches.
        percentile: Percentile of the absolute values, in percent, for the method ``percentile``.
        max_images: Maximum number of samples, spread evenly over the data.
    """

    method: RangeMethod = "focus"
    method_for: Sequence[tuple[str, RangeMethod]] = ()
    percentile: float = 99.99
    max_images: int = 512

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        object.__setattr__(self, "percentile", float(self.percentile))
        methods = {self.method, *(method for _, method in self.method_for)}
        if self.percentile != RangeOptions.percentile and "percentile" not in methods:
            raise QdqtoolError(
                f"`percentile={self.percentile:g}` has no effect with the method {self.method}. "
                "Give `method='percentile'` as well",
                code="option-without-effect",
                parameter="percentile",
            )
        object.__setattr__(self, "max_images", operator.index(self.max_images))

    def without_methods(self, unused: Collection[tuple[str, str]]) -> RangeOptions:
        """Return the options without entries of `method_for`, and with a percentile only if used.

        Args:
            unused: Entries to remove.
        """
        kept = [entry for entry in self.method_for if entry not in unused]
        has_percentile = "percentile" in {self.method, *(method for _, method in kept)}
        percentile = self.percentile if has_percentile else RangeOptions.percentile
        return replace(self, method_for=kept, percentile=percentile)


@dataclass(frozen=True)
class ImageOptions:
    """Options for the conversion of images into the network's inputs.

    Attributes:
        preprocess: A Preprocess, the name of a preset, or a function. None: the preprocessing in
            the model's metadata, else YOLO's.
        size: Height and width in pixels if they are dynamic in the model. None: the model's
            ``imgsz`` metadata.
    """

    preprocess: Preprocess | str | ImageFunction | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            try:
                height, width = self.size
            except (TypeError, ValueError):
                raise QdqtoolError(
                    f"`size` is {brief_repr(self.size)}; give height and width in pixels, such as "
                    "`(640, 640)`",
                    code="wrong-type",
                    parameter="size",
                ) from None
            object.__setattr__(self, "size", (operator.index(height), operator.index(width)))


@dataclass(frozen=True)
class CacheOptions:
    """File that keeps the statistics of a calibration.

    Attributes:
        calib_cache: The file; None if the statistics are not kept.
        overwrite_cache: Whether to replace a cache of another model or of other data. If not, such
            a cache is an error.
    """

    calib_cache: str | os.PathLike[str] | None = None
    overwrite_cache: bool = False

    def __post_init__(self) -> None:
        if self.overwrite_cache and self.calib_cache is None:
            raise QdqtoolError(
                "`overwrite_cache` has no effect without `calib_cache`; give `calib_cache` as well",
                code="option-without-effect",
                parameter="overwrite_cache",
            )


@dataclass(frozen=True)
class ClusterOptions:
    """Workers that run the network for the calibration.

    Attributes:
        cluster: Address of a Dask scheduler, ``local:N``, or a Dask client. None: the network runs
            in this process.
        mixed_cpus: Whether the workers may have different CPUs, whose results differ in the last
            bits.
    """

    cluster: DaskCluster | None = None
    mixed_cpus: bool = False


@dataclass(frozen=True)
class PlacementOptions:
    """Options for the tensors to quantize, and for the storage of weights.

    Attributes:
        head: Layers of a detection head that remain float, one of :data:`HEADS`.
        residual: Inputs of a residual Add that are quantized, one of :data:`RESIDUALS`.
        attention: Type of the products of attention, one of :data:`AttentionChoice`.
        unify: Whether tensors share one scale if Concat, MaxPool or similar operators connect them.
        exclude: Regular expressions on names of nodes that remain float.
        include: Regular expressions on names of nodes to quantize even if `head` or `attention`
            leaves them float.
        exclude_op: Operator types that remain float.
        weights: ``float`` stores float weights with Q and DQ. ``int8`` and ``fp8`` store quantized
            weights with DQ only.
        precision: Format of quantized tensors, one of :data:`PRECISIONS`.
        tuned: Like `include`, for nodes that ``tune`` chose. Their names are in the metadata of the
            result.
    """

    head: HeadChoice = "box"
    residual: ResidualChoice = "auto"
    attention: AttentionChoice = "auto"
    unify: bool = True
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude_op: Sequence[str] = ()
    weights: WeightForm = "float"
    precision: str = "int8"
    tuned: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        check_choice("residual", self.residual, RESIDUALS)
        check_choice("attention", self.attention, get_args(AttentionChoice))
        check_choice("weights", self.weights, get_args(WeightForm))
        check_choice("precision", self.precision, PRECISIONS)
        for parameter, neutral in (("attention", ("auto", "float")), ("weights", ("float",))):
            form = getattr(self, parameter)
            if form not in (*neutral, self.precision):
                raise QdqtoolError(
                    f"`{parameter}={form!r}` does not fit `precision={self.precision!r}`. Use the "
                    "same format for both",
                    code="option-conflict",
                    parameter=parameter,
                )
        for parameter in ("exclude", "include", "exclude_op", "tuned"):
            check_not_text(parameter, getattr(self, parameter))


@dataclass(frozen=True)
class NetworkOptions:
    """Changes of the network in addition to its Q/DQ pairs.

    Attributes:
        high_precision: Type of the layers without Q/DQ, ``fp32`` or ``fp16``. None: ``fp16`` if the
            target computes in the types of the file, else ``fp32``.
        smooth: Strength of SmoothQuant from 0 to 1. None: no SmoothQuant.
        input_type: Type of the network's inputs, ``float``, ``int8`` or ``uint8``.
    """

    high_precision: HighPrecision | None = None
    smooth: float | None = None
    input_type: InputType = "float"

    def __post_init__(self) -> None:
        if self.high_precision is not None:
            check_choice("high_precision", self.high_precision, get_args(HighPrecision))
        if self.smooth is not None:
            object.__setattr__(self, "smooth", float(self.smooth))
        check_choice("input_type", self.input_type, get_args(InputType))


@dataclass(frozen=True)
class InsertOptions:
    """All options of an insertion except the target.

    Attributes:
        ranges: Options for the ranges of activations.
        images: Options for the conversion of images into inputs.
        cache: File that keeps the statistics.
        placement: Options for the tensors to quantize.
        network: Changes of the network in addition to the pairs.
        cluster: Workers that run the network for the calibration.
        calib_table: Table of ranges from TensorRT or another tool, to be used instead of
            calibration data.
        losses: Number of images on which the output error is measured. None: the default number.
            0: no measurement.
        predict: Whether to predict what TensorRT will do with the Q/DQ model.
        progress: Whether to draw a progress bar.
    """

    ranges: RangeOptions = field(default_factory=RangeOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    calib_table: str | os.PathLike[str] | None = None
    losses: int | None = 0
    predict: bool = True
    progress: bool = False

    def __post_init__(self) -> None:
        if self.losses is not None:
            object.__setattr__(self, "losses", operator.index(self.losses))
