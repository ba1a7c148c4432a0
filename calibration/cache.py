"""Files of a calibration: qdqtool's caches of statistics, and TensorRT's tables of scales."""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.archives import Archive
from calibration.dataset import DataQuality
from calibration.statistics import MIN_TOP, OCTAVES, TensorStatistics, histogram_bytes
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.files import atomic_write, write_text
from qdqtool.util.json_text import parse_json
from qdqtool.util.text import format_reason

FORMAT = "qdqtool/calibration/5"
_MAX_SAMPLES = 2_000_000  # limit for sample numbers, so that a damaged cache cannot fill the memory
TENSORRT_VERSION = "TRT-8502-EntropyCalibration2"

Array = npt.NDArray[Any]
_NO_CACHE = "is not a calibration cache of qdqtool"
_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)
# Type of each field of a cache's header.
_HEADER_TYPES: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "fingerprint": str,
    "images": int,
    "total": (int, type(None)),
    "looks": dict,
    "bins": int,
    "warnings": list,
    "skipped": list,
    "tensors": list,
    "focused": list,
}
# Type and number of dimensions of each array of a cache.
_ARRAY_TYPES = {
    "done": (np.int64, 2),
    "numbers": (np.int64, 2),
    "range": (np.float64, 2),
    "counts": (np.int64, 1),
    "spots": (np.int64, 2),
    "values": (np.float32, 1),
    "widths": (np.int64, 1),
    "channels": (np.float32, 2),
}


class Statistics(Mapping[str, TensorStatistics]):
    """Calibration statistics of a network's activations, by tensor name.

    Attributes:
        tensors: Statistics of each tensor.
        images: Number of images, or of samples if the data are arrays.
        fingerprint: Hash of data and preprocessing; empty if unknown.
        warnings: Warnings about the data.
        skipped: Name and reason of each file that could not be used.
        notes: Notes on the use of a cache.
        preprocessing: Conversion of images to inputs, as JSON; None for arrays and for merged or
            loaded statistics.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorStatistics],
        *,
        images: int = 0,
        fingerprint: str = "",
        warnings: Iterable[str] = (),
        skipped: Iterable[tuple[str, str]] = (),
        notes: Iterable[str] = (),
    ) -> None:
        self.tensors = dict(tensors)
        self.images = images
        self.fingerprint = fingerprint
        self.warnings = list(warnings)
        self.skipped = list(skipped)
        self.notes = list(notes)
        self.preprocessing: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> TensorStatistics:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<Statistics of {len(self.tensors)} tensors over {self.images} images>"

    def merge(self, other: Statistics) -> Statistics:
        """Return combined statistics over two data sets.

        A tensor that only one of the two contains keeps its statistics.

        Raises:
            DataError: The histograms of a tensor have different numbers of bins.
        """
        tensors = dict(self.tensors)
        for name, part in other.tensors.items():
            tensors[name] = tensors[name].merge(part) if name in tensors else part
        fingerprints = {*self.fingerprint.split("+"), *other.fingerprint.split("+")} - {""}
        return Statistics(
            tensors,
            images=self.images + other.images,
            fingerprint="+".join(sorted(fingerprints)),
            warnings=dict.fromkeys([*self.warnings, *other.warnings]),
            skipped=dict.fromkeys([*self.skipped, *other.skipped]),
            notes=dict.fromkeys([*self.notes, *other.notes]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics as npz, atomically.

        Raises:
            QdqtoolError: The file cannot be written.
        """
        save_statistics(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Statistics:
        """Read a file that :meth:`save` wrote, or a calibration cache.

        Raises:
            DataError: The file is missing or damaged.
        """
        return load_statistics(path)


# Calibration caches -------------------------------------------------------------------------------


@dataclass
class CalibrationProgress:
    """State of a finished or interrupted calibration.

    Attributes:
        model: Text that identifies the model and the :class:`calibration.focus.Focus`, but not the
            tensors.
        statistics: Statistics over the finished samples.
        done: Numbers of the finished samples.
        total: Number of all samples; None unless the calibration is finished.
        quality: Value range and numbers of unusual images of the finished samples, for warnings.
    """

    model: str
    statistics: Statistics
    done: set[int]
    total: int | None
    quality: DataQuality = field(default_factory=DataQuality)

    @property
    def is_complete(self) -> bool:
        """Whether all samples are finished."""
        return self.total is not None and len(self.done) >= self.total


def save_progress(progress: CalibrationProgress, path: str | os.PathLike[str]) -> None:
    """Write the state of a calibration as npz, atomically.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    statistics = progress.statistics
    tensors = list(statistics.values())
    focuses = {name: part.focus for name, part in statistics.items() if part.focus is not None}
    parts = [*tensors, *focuses.values()]
    header = {
        "format": FORMAT,
        "model": progress.model,
        "fingerprint": statistics.fingerprint,
        "images": statistics.images,
        "total": progress.total,
        "looks": asdict(progress.quality),
        "bins": parts[0].bins if parts else 0,
        "octaves": OCTAVES,
        "warnings": statistics.warnings,
        "skipped": [list(names) for names in statistics.skipped],
        "tensors": list(statistics),
        "focused": list(focuses),
    }
    arrays: dict[str, Array] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "done": _to_ranges(progress.done),
        **_pack_counts(parts),
        **_pack_spots(tensors),
        **_pack_channels(tensors),
    }
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_progress(path: str | os.PathLike[str]) -> CalibrationProgress:
    """Read a file that :func:`save_progress` wrote.

    Raises:
        DataError: The file is missing, damaged, from another version of qdqtool, or not a
            calibration cache.
    """
    name = os.fspath(path)
    try:
        # Recorded inputs are never overwritten. The cache is not recorded, because a command
        # updates the cache that it reads.
        with Archive(path, record=False) as archive:
            if "header" not in archive.members:
                raise DataError(_NO_CACHE, name, code="wrong-format")
            return _read_progress(archive)
    except DataError as error:
        if not os.path.isfile(path):
            raise
        if error.code in ("empty", "wrong-format"):
            reason = f"{_NO_CACHE}; give another name"
        else:
            reason = f"{error.reason.removeprefix(f'{name}: ')}; give another name or delete it"
        raise DataError(reason, name, code=error.code) from error
    except _DAMAGE_ERRORS as error:
        raise DataError(
            f"the calibration cache is damaged ({format_reason(error)}); delete it",
            name,
            code="file-damaged",
        ) from error


def _read_arrays(archive: Archive) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: archive.read(name) for name in _ARRAY_TYPES}
    for name, (dtype, rank) in _ARRAY_TYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != rank:
            raise ValueError(f"wrong type of array {name}")
    return arrays


def _read_progress(archive: Archive) -> CalibrationProgress:
    header = parse_json(archive.read("header").tobytes().decode(), infinities=True)
    if header["format"] != FORMAT or header["octaves"] != OCTAVES:
        raise DataError(
            "the calibration cache was written by another version of qdqtool; delete it",
            archive.path,
            code="wrong-version",
        )
    for name, kind in _HEADER_TYPES.items():
        if not isinstance(header[name], kind):
            raise ValueError(f"wrong type of {name}")
    arrays = _read_arrays(archive)
    names, focused, bins = header["tensors"], header["focused"], header["bins"]
    if names:
        size = histogram_bytes(len(names) + len(focused), bins)
        limits.check_size(
            size, limits.CACHE_MEMORY, f"the statistics of {len(names)} tensors take", DataError
        )
    parts = _unpack_counts([*names, *focused], bins, arrays)
    tensors = dict(zip(names, parts, strict=False))
    _unpack_spots(parts[: len(names)], arrays)
    _unpack_channels(parts[: len(names)], arrays)
    for name, part in zip(focused, parts[len(names) :], strict=True):
        tensors[name].focus = part
    statistics = Statistics(
        tensors,
        images=header["images"],
        fingerprint=header["fingerprint"],
        warnings=map(str, header["warnings"]),
        skipped=[(str(name), str(reason)) for name, reason in header["skipped"]],
    )
    quality = DataQuality(**header["looks"])
    if not all(isinstance(value, (int, float)) for value in vars(quality).values()):
        raise ValueError("wrong type in looks")
    done = _from_ranges(arrays["done"])
    return CalibrationProgress(header["model"], statistics, done, header["total"], quality)


def _to_ranges(numbers: Collection[int]) -> npt.NDArray[np.int64]:
    """Return the start and end of each run of consecutive numbers, ascending, [runs, 2].

    The end is exclusive.
    """
    ordered = np.array(sorted(numbers), np.int64)
    if not len(ordered):
        return np.zeros((0, 2), np.int64)
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return np.array([(group[0], group[-1] + 1) for group in groups], np.int64)


def _from_ranges(ranges: npt.NDArray[np.int64]) -> set[int]:
    if ranges.min(initial=0) < 0 or ranges.max(initial=0) > _MAX_SAMPLES:
        raise ValueError("impossible numbers of samples")
    numbers: set[int] = set()
    for start, end in ranges.tolist():
        numbers.update(range(start, end))
    return numbers


def _pack_counts(parts: Sequence[TensorStatistics]) -> dict[str, Array]:
    """Pack the extremes and histograms of `parts` (statistics of tensors) into three arrays.

    ``numbers`` [parts, 5] holds the count, the number of nonfinite values, the top of the
    histogram's window, and the first and the end of the used bins. ``range`` [parts, 2] holds
    minimum and maximum. ``counts`` holds the used bins of all histograms one after another.
    """
    numbers = []
    counts = [np.zeros(0, np.int64)]
    for part in parts:
        filled = np.flatnonzero(part.counter.counts)
        first, end = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
        numbers.append((part.count, part.nonfinite, part.counter.top, first, end))
        counts.append(part.counter.counts[first:end])
    ranges = [(part.minimum, part.maximum) for part in parts]
    return {
        "numbers": np.array(numbers, np.int64).reshape(-1, 5),
        "range": np.array(ranges, np.float64).reshape(-1, 2),
        "counts": np.concatenate(counts),
    }


def _unpack_counts(
    names: Sequence[str], bins: int, arrays: dict[str, Array]
) -> list[TensorStatistics]:
    parts = []
    start = 0
    rows = zip(names, arrays["numbers"].tolist(), arrays["range"].tolist(), strict=True)
    for name, (count, nonfinite, top, first, end), (low, high) in rows:
        part = TensorStatistics(bins)
        part.count, part.nonfinite, part.minimum, part.maximum = count, nonfinite, low, high
        if not MIN_TOP <= top <= 128:
            raise ValueError(f"the histogram of tensor '{name}' lies outside its window")
        part.counter.top = top
        part.counter.counts[first:end] = arrays["counts"][start : start + end - first]
        start += end - first
        is_range = not count or -math.inf < low <= high < math.inf
        if int(part.counter.counts.sum()) != count or not is_range:
            raise ValueError(f"the counts of tensor '{name}' do not add up")
        parts.append(part)
    return parts


def _pack_spots(tensors: Sequence[TensorStatistics]) -> dict[str, Array]:
    """Pack the spots (values at a few positions) of all tensors into two arrays.

    ``spots`` [images, 3] holds the tensor's number and the shape of each image's values.
    ``values`` holds the values one after another.
    """
    shapes = []
    values = [np.zeros(0, np.float32)]
    for number, part in enumerate(tensors):
        for spots in sorted(part.spots, key=bytes):
            shapes.append((number, *spots.shape))
            values.append(spots.ravel())
    return {
        "spots": np.array(shapes, np.int64).reshape(-1, 3),
        "values": np.concatenate(values),
    }


def _unpack_spots(tensors: Sequence[TensorStatistics], arrays: dict[str, Array]) -> None:
    start = 0
    for number, positions, channels in arrays["spots"].tolist():
        end = start + positions * channels
        spots = arrays["values"][start:end].reshape(positions, channels)
        tensors[number].spots.append(spots)
        start = end


def _pack_channels(tensors: Sequence[TensorStatistics]) -> dict[str, Array]:
    """Pack the channel ranges of all tensors into two arrays.

    ``widths`` [tensors] holds the number of channels, 0 for a tensor without channel ranges.
    ``channels`` [2, channels] holds the lowest and highest values.
    """
    none = np.zeros((2, 0), np.float32)
    channels = [none if part.channels is None else part.channels for part in tensors]
    return {
        "widths": np.array([ranges.shape[1] for ranges in channels], np.int64),
        "channels": np.concatenate([*channels, none], axis=1),
    }


def _unpack_channels(tensors: Sequence[TensorStatistics], arrays: dict[str, Array]) -> None:
    widths, channels = arrays["widths"], arrays["channels"]
    if len(widths) != len(tensors) or channels.shape != (2, int(widths.sum())):
        raise ValueError("wrong number of channels")
    groups = np.split(channels, np.cumsum(widths)[:-1], axis=1)
    for part, ranges in zip(tensors, groups, strict=False):
        part.channels = ranges if ranges.size else None


def save_statistics(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Write statistics as npz, atomically.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    save_progress(CalibrationProgress("", statistics, set(), None), path)


def load_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Read a file that :func:`save_statistics` wrote, or a calibration cache.

    Raises:
        DataError: The file is missing or damaged.
    """
    return load_progress(path).statistics


# TensorRT's calibration table ---------------------------------------------------------------------


def parse_tensorrt_cache(text: str, name: str) -> dict[str, float]:
    """Return the scales by tensor name in the text of TensorRT's calibration table.

    The first line is ``TRT-<version>-<calibrator>``. Each other line is
    ``<tensor>: <8 hexadecimal digits>``, the scale (amax / 127) as a big-endian IEEE 754 float
    (``IInt8Calibrator::writeCalibrationCache``).

    Args:
        text: Contents of the file.
        name: Name of the file for messages.

    Raises:
        DataError: The text is not a calibration table, or a scale is negative or not finite.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("TRT-"):
        raise DataError(
            "is not a TensorRT calibration table, because its first line does not start with "
            "'TRT-'; give a table that TensorRT's calibrator wrote",
            name,
            code="wrong-format",
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        tensor, _, digits = line.rpartition(":")  # names from TensorFlow contain colons
        try:
            (scale,) = struct.unpack("!f", bytes.fromhex(digits.strip().rjust(8, "0")))
        except (ValueError, struct.error):
            raise DataError(
                f"line {number} is not 'tensor: 8 hexadecimal digits'; write the table again",
                name,
                code="invalid-line",
            ) from None
        if not tensor or not math.isfinite(scale) or scale < 0:
            raise DataError(
                f"line {number}: scale {scale:g} of tensor '{tensor}' is not usable; calibrate "
                "again",
                name,
                code="invalid-scale",
                node=tensor,
            )
        scales[tensor.rstrip()] = scale
    return scales


def write_tensorrt_cache(
    path: str | os.PathLike[str], scales: Mapping[str, float], version: str = TENSORRT_VERSION
) -> None:
    """Write TensorRT's calibration table, atomically; see :func:`parse_tensorrt_cache`.

    Args:
        path: File to write.
        scales: amax / 127 by tensor name.
        version: First line. TensorRT uses the table only if this line names TensorRT's own version
            and calibrator.

    Raises:
        DataError: A scale is not positive and finite, or a tensor name contains a line break.
        QdqtoolError: The file cannot be written.
    """
    out = io.StringIO()
    out.write(version + "\n")
    for tensor, scale in scales.items():
        if not (math.isfinite(scale) and scale > 0) or "\n" in tensor:
            reason = f"its scale is {scale:g}; calibrate again"
            if "\n" in tensor:
                reason = "its name contains a line break; rename it in the model"
            raise DataError(
                f"tensor '{tensor}' cannot be written to a TensorRT calibration table: {reason}",
                code="invalid-scale",
                node=tensor,
            )
        out.write(f"{tensor}: {struct.pack('!f', scale).hex()}\n")
    write_text(path, out.getvalue())
