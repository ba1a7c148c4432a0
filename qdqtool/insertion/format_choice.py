"""Choice of INT8, FP8 or FP16 by measured output errors and estimated times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqtool.insertion.number_formats import FP8, INT8, MIN_GAIN, NumberFormat, is_worthwhile
from qdqtool.insertion.output_errors import SMALL_ERROR, round_error
from qdqtool.insertion.scales import GroupScale
from qdqtool.util.json_text import Json
from qdqtool.util.text import format_count, format_ms

if TYPE_CHECKING:
    from calibration.statistics import TensorStatistics

FORMAT_SAMPLES = 8  # number of samples on which the output errors of both formats are measured
# A format with at least this output error loses too much accuracy. Of four trained networks, those
# with an error below 13 % kept 87 to 98 % of their results, those with an error above 19 % kept
# 62 and 77 % (docs/fp8.md).
LARGE_ERROR = 0.16
FLOAT = "fp16"  # value of `FormatChoice.precision` for the float network
_MIN_RATIO = 1.15  # two output errors count as equal if their ratio is smaller


@dataclass(frozen=True)
class FormatFit:
    """Signal to noise ratios of one activation in INT8 and FP8, from calibration statistics.

    Attributes:
        tensor: Name of the activation.
        spread: Ratio of the largest to the root mean square magnitude.
        int8_db: Signal to quantization noise ratio in INT8, in decibels, with the range that the
            calibration method chose.
        fp8_db: Signal to quantization noise ratio in FP8, in decibels, with the largest magnitude
            as range.
    """

    tensor: str
    spread: float
    int8_db: float
    fp8_db: float

    @property
    def is_fp8_better(self) -> bool:
        """Whether FP8 is more precise than INT8 for the activation."""
        return self.fp8_db > self.int8_db

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "tensor": self.tensor,
            "spread": round(self.spread, 2),
            "int8_db": round(self.int8_db, 1),
            "fp8_db": round(self.fp8_db, 1),
        }


def compare_precision(
    int8_scales: Sequence[GroupScale], statistics: Mapping[str, TensorStatistics]
) -> list[FormatFit]:
    """Compare the precision of each activation in INT8 and FP8.

    The result lacks groups whose largest value does not depend on the data, and activations without
    quantization error.

    Args:
        int8_scales: INT8 scales of the groups of activations.
        statistics: Statistics of the tensors in `sources` of the groups.
    """
    fits = []
    for scale in int8_scales:
        if scale.group.largest is not None:
            continue
        largest = max(statistics[t].absmax for t in scale.group.sources)
        for tensor in scale.group.sources:
            fit = _measure_fit(tensor, statistics[tensor], scale.scale, largest)
            if fit is not None:
                fits.append(fit)
    return fits


def _measure_fit(
    tensor: str, part: TensorStatistics, int8_scale: float, largest: float
) -> FormatFit | None:
    from calibration.methods import fp8_error, squared_error

    if part.absmax <= 0.0:
        return None
    # A tiny range clips all values to almost 0, so its error is the mean square of the tensor.
    ranges = np.array([int8_scale * INT8.largest, part.absmax * 1e-6])
    int8, power = (float(error) for error in squared_error(part, ranges))
    fp8 = fp8_error(part, largest)
    if not min(int8, fp8, power) > 0.0:
        return None
    spread = part.absmax / math.sqrt(power)
    return FormatFit(tensor, spread, *(10 * math.log10(power / error) for error in (int8, fp8)))


@dataclass(frozen=True)
class FormatChoice:
    """Choice of INT8, FP8 or FP16.

    Attributes:
        precision: The chosen format: ``int8``, ``fp8``, or ``fp16`` for the float network.
        reason: Text with the reason for the choice.
        errors: Output error of each format against the float model, as a fraction of the outputs'
            standard deviation; empty if not measured.
        samples: Number of images on which the errors were measured.
        ms: Estimated milliseconds of each format and of FP16; empty if unknown.
        gpu: Name of the GPU; empty if none was given.
        at_objects: Whether the errors are those at the positions of objects.
    """

    precision: str
    reason: str
    errors: Mapping[str, float]
    samples: int
    ms: Mapping[str, float]
    gpu: str
    at_objects: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the float network was chosen."""
        return self.precision == FLOAT

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "precision": self.precision,
            "reason": self.reason,
            "errors": {
                name: round(error, 5) if math.isfinite(error) else None
                for name, error in self.errors.items()
            },
            "samples": self.samples,
            "ms": {name: float(f"{ms:.4g}") for name, ms in self.ms.items()},
            "gpu": self.gpu,
        }


def choose_number_format(
    errors: npt.NDArray[np.float64],
    ms: Mapping[str, float],
    gpu: str,
    formats: Sequence[NumberFormat] = (INT8, FP8),
    images: int | None = None,
) -> FormatChoice:
    """Choose a format by measured errors and estimated times.

    A format is unsuitable if its mean error is at least 16 % or not finite, or if it is known to be
    not more than 2 % faster than FP16. If no format is suitable, FP16 is chosen.

    A larger margin would reject INT8 in builds where INT8 is faster. Five measured pairs of builds
    have an estimated gain of 1.02 to 1.10. INT8 was faster in four of them, by factors of 1.02 to
    1.35 (docs/timing.md).

    If two formats are suitable, their errors count as different if the larger error is more than
    1.15 times the smaller one (geometric mean), and the mean logarithm of the ratio is more than
    two standard errors from 0. If the errors count as equal, the faster format is chosen. If they
    differ, the more accurate format is chosen, unless the error of the faster format is below 10 %.
    INT8 counts as the faster format unless FP8 is more than 2 % faster.

    Args:
        errors: Output errors of shape [samples, formats].
        ms: Estimated milliseconds of the formats and of ``fp16``; empty if unknown.
        gpu: Name of the GPU; empty if none was given.
        formats: The measured formats, in the order of the columns of `errors`; INT8 first.
        images: Number of images in the samples. None: one in each sample.
    """
    images = len(errors) if images is None else images
    means = dict(zip((f.name for f in formats), errors.mean(axis=0).tolist(), strict=True))
    percent = " and ".join(f"{_format_error(e)} in {n.upper()}" for n, e in means.items())
    measured = f"output error {percent} on {format_count(images, 'image')}"
    obstacles = {name: _describe_obstacle(error, name, ms) for name, error in means.items()}
    suitable = [name for name, obstacle in obstacles.items() if not obstacle]
    if len(suitable) > 1:
        precision, remark = _choose_suitable_format(errors, means, ms)
        measured = ", ".join(filter(None, (measured, remark)))
    else:
        precision = suitable[0] if suitable else FLOAT
    times = _describe_times(ms, gpu) if ms else ""
    if len(suitable) > 1 and not ms:
        advice = f"times on {gpu} are unknown" if gpu else "set `gpu` to compare their times"
        times = f"INT8 is assumed to be as fast as FP8 ({advice})"
    obstacle = " and ".join(filter(None, obstacles.values()))
    reason = "; ".join(filter(None, (obstacle, measured, times)))
    if precision == FLOAT:
        reason = f"the float model is the best choice: {reason}"
    return FormatChoice(precision, reason, means, images, ms, gpu)


def _describe_obstacle(error: float, name: str, ms: Mapping[str, float]) -> str:
    title = name.upper()
    if not error < LARGE_ERROR:
        return f"{title} loses too much accuracy"
    if not ms:
        return ""
    if is_worthwhile(ms[FLOAT] / ms[name]):
        return ""
    if ms[name] > ms[FLOAT]:
        return f"{title} is slower than FP16"
    return f"{title} is not more than {100 * (MIN_GAIN - 1):.0f} % faster than FP16"


def _choose_suitable_format(
    errors: npt.NDArray[np.float64], means: Mapping[str, float], ms: Mapping[str, float]
) -> tuple[str, str]:
    """Choose between two suitable formats.

    Returns:
        The name of the format, and a remark on the errors, which may be empty.
    """
    faster = FP8 if ms and is_worthwhile(ms[INT8.name] / ms[FP8.name]) else INT8
    more_accurate = _find_more_accurate(errors)
    if more_accurate is None:
        return faster.name, "no clear difference"
    if more_accurate != faster.name and round_error(means[faster.name]) < SMALL_ERROR:
        return faster.name, "both small"
    return more_accurate, ""


def _format_error(error: float) -> str:
    return f"{error:.1%}" if math.isfinite(error) else "not finite"


def _describe_times(ms: Mapping[str, float], gpu: str) -> str:
    times = [f"{format_ms(value)} in {name.upper()}" for name, value in ms.items()]
    return f"estimated {', '.join(times[:-1])} and {times[-1]} on {gpu}"


def _find_more_accurate(errors: npt.NDArray[np.float64]) -> str | None:
    """Return the format with the smaller error; None if the difference is not clear."""
    tiny = np.finfo(np.float64).tiny
    ratios = np.log(np.maximum(errors[:, 0], tiny) / np.maximum(errors[:, 1], tiny))
    mean = float(ratios.mean())
    spread = float(ratios.std(ddof=1)) if len(ratios) > 1 else math.inf
    if abs(mean) <= max(2.0 * spread / math.sqrt(len(ratios)), math.log(_MIN_RATIO)):
        return None
    return FP8.name if mean > 0 else INT8.name
