"""Statistics on disk, the cache of an interrupted or repeated calibration, and TensorRT's own calibration table."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from calibration.dataset import DataQuality
from calibration.statistics import (
    CHANNELS,
    MIN_TOP,
    OCTAVES,
    POSITIONS,
    MagnitudeCounter,
    TensorStatistics,
    histogram_bytes,
)
from qdqtool.errors import DataError
from qdqtool.util import limits
from qdqtool.util.archives import Archive
from qdqtool.util.files import read_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.outputs import atomic_write, write_text
from qdqtool.util.text import reason_of

FORMAT = "qdqtool/calibration/5"
_MOST_SAMPLES = 2_000_000  # that a cache may say were done
TENSORRT_VERSION = "TRT-8502-EntropyCalibration2"

_T = TypeVar("_T")
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)


class Statistics(Mapping[str, TensorStatistics]):
    """Statistics by tensor name.

    Attributes:
        tensors: The statistics.
        images: Samples (images) that went in.
        fingerprint: Which data and preprocessing they come from; empty when that is not known.
        warnings: What looks wrong with the data, with numbers.
        skipped: Files that could not be used, and why.
        notes: What was done with the cache.
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

    def __getitem__(self, name: str) -> TensorStatistics:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<Statistics of {len(self.tensors)} tensors over {self.images} images>"

    def merge(self, other: Statistics) -> Statistics:
        """Statistics over the data of both, as if collected in one pass; tensors of either are kept.

        Raises:
            DataError: They were collected with different numbers of bins.
        """
        tensors = dict(self.tensors)
        for name, part in other.tensors.items():
            tensors[name] = tensors[name].merge(part) if name in tensors else part
        parts = sorted(
            {
                *filter(None, self.fingerprint.split("+")),
                *filter(None, other.fingerprint.split("+")),
            }
        )
        return Statistics(
            tensors,
            images=self.images + other.images,
            fingerprint="+".join(parts),
            warnings=list(dict.fromkeys([*self.warnings, *other.warnings])),
            skipped=list(dict.fromkeys([*self.skipped, *other.skipped])),
            notes=list(dict.fromkeys([*self.notes, *other.notes])),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as npz, atomically.

        Raises:
            QdqtoolError: The file cannot be written.
        """
        save_statistics(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Statistics:
        """Reads what :meth:`save` wrote, or a cache.

        Raises:
            DataError: The file is missing or damaged.
        """
        return load_statistics(path)


@dataclass
class Progress:
    """How far a calibration has come.

    Attributes:
        model: Identifies the model, without the tensors wanted of it, and by which tensors positions were found.
        statistics: Over the samples done.
        done: Numbers of the samples done.
        total: Samples there are; None where that was not known.
        looks: What was noticed about the samples done.
    """

    model: str
    statistics: Statistics
    done: set[int]
    total: int | None
    quality: DataQuality = field(default_factory=DataQuality)

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.done) >= self.total


def save_progress(progress: Progress, path: str | os.PathLike[str]) -> None:
    """Writes the state of a calibration atomically, as npz.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    statistics = progress.statistics
    names = list(statistics)
    focused = [n for n in names if statistics[n].focus is not None]
    parts = [
        *(statistics[n] for n in names),
        *(f for n in focused if (f := statistics[n].focus) is not None),
    ]
    bins = parts[0].bins if parts else 0
    spans = [_span(p.counter.counts) for p in parts]
    channels = [
        np.zeros((2, 0), np.float32) if (c := statistics[n].channels) is None else c for n in names
    ]
    spots = [
        (k, s) for k, name in enumerate(names) for s in sorted(statistics[name].spots, key=bytes)
    ]
    header = {
        "format": FORMAT,
        "model": progress.model,
        "fingerprint": statistics.fingerprint,
        "images": statistics.images,
        "total": progress.total,
        "looks": asdict(progress.quality),
        "bins": bins,
        "octaves": OCTAVES,
        "warnings": statistics.warnings,
        "skipped": [list(s) for s in statistics.skipped],
        "tensors": names,
        "focused": focused,
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "done": _ranges_of(progress.done),
        "numbers": np.array(
            [(p.count, p.nonfinite, p.counter.top, *s) for p, s in zip(parts, spans, strict=True)],
            np.int64,
        ).reshape(len(parts), 5),
        "range": np.array([(p.minimum, p.maximum) for p in parts], np.float64).reshape(
            len(parts), 2
        ),
        "counts": np.concatenate(
            [p.counter.counts[a:b] for p, (a, b) in zip(parts, spans, strict=True)]
            or [np.zeros(0, np.int64)]
        ),
        "spots": np.array([(k, *s.shape) for k, s in spots], np.int64).reshape(len(spots), 3),
        "values": np.concatenate([s.ravel() for _, s in spots] or [np.zeros(0, np.float32)]),
        "widths": np.array([c.shape[1] for c in channels], np.int64),
        "channels": np.concatenate([*channels, np.zeros((2, 0), np.float32)], axis=1),
    }
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _span(counts: npt.NDArray[np.int64]) -> tuple[int, int]:
    """First filled bin, and the one after the last."""
    filled = np.flatnonzero(counts)
    return (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)


class _Unfit(DataError):
    """A file that is no cache of ours; its words say what to do."""


def load_progress(path: str | os.PathLike[str]) -> Progress:
    """Reads what :func:`save_progress` wrote.

    Raises:
        DataError: The file is missing, damaged, or something else.
    """
    name = os.fspath(path)
    try:
        # Not noted as read: a cache is the one file that a command reads and replaces.
        with Archive(path, record=False) as archive:
            if "header" not in archive.members:
                raise _Unfit(
                    "is not a calibration cache; give another name or delete it",
                    name,
                    code="wrong-format",
                )
            limits.check_size(
                archive.members["header"].file_size,
                limits.CACHE_HEADER,
                f"{name}: its header takes",
                DataError,
            )
            return _parse(archive, name)
    except DataError as error:
        if isinstance(error.__cause__, zipfile.BadZipFile):
            raise DataError(
                "is not a calibration cache, or is cut off; give another name or delete it",
                name,
                code="wrong-format",
            ) from error
        if isinstance(error, _Unfit) or not os.path.isfile(path):
            raise
        reason = error.reason.removeprefix(f"{name}: ")
        raise DataError(
            f"{reason}; give another name or delete it",
            name,
            code=error.code or "file-damaged",
        ) from error
    except _DAMAGED as error:
        raise DataError(
            f"the calibration cache is damaged ({reason_of(error)}); delete it",
            name,
            code="file-damaged",
        ) from error


def _parse(archive: Archive, path: str) -> Progress:
    header = parse_json(archive.read("header").tobytes().decode(), infinities=True)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    if header["format"] != FORMAT or header["octaves"] != OCTAVES:
        raise _Unfit(
            "the calibration cache was written by another version of qdqtool; delete it",
            path,
            code="wrong-version",
        )
    plain, focused = _of(header["tensors"], list), _of(header["focused"], list)
    names = [*plain, *focused]
    bins = _of(header["bins"], int)
    numbers, ranges, counts = (archive.read(n) for n in ("numbers", "range", "counts"))
    done = archive.read("done")
    if (
        counts.dtype != np.int64
        or numbers.dtype != np.int64
        or done.dtype != np.int64
        or ranges.dtype != np.float64
        or counts.ndim != 1
        or done.shape[1:] != (2,)
        or numbers.shape != (len(names), 5)
        or ranges.shape != (len(names), 2)
    ):
        raise ValueError("its arrays do not fit together")
    if len(counts) and counts.min() < 0:
        raise ValueError("negative counts")
    if names:
        limits.check_size(
            histogram_bytes(len(names), bins),
            limits.CACHE_MEMORY,
            f"{path}: the statistics of {len(names)} tensors take",
            DataError,
        )
    tensors: list[TensorStatistics] = []
    at = 0
    for name, (count, nonfinite, top, first, last), (low, high) in zip(
        names, numbers.tolist(), ranges.tolist(), strict=True
    ):
        part = TensorStatistics(bins)
        part.count, part.nonfinite, part.minimum, part.maximum = count, nonfinite, low, high
        part.counter = _counter(part.counter, top, first, counts[at : at + last - first])
        at += last - first
        in_order = not count or -math.inf < low <= high < math.inf
        if int(part.counter.counts.sum()) != count or nonfinite < 0 or not in_order:
            raise ValueError(f"the counts of tensor '{name}' do not add up")
        tensors.append(part)
    by_name = {_of(name, str): part for name, part in zip(plain, tensors, strict=False)}
    for name, part in zip(focused, tensors[len(plain) :], strict=True):
        by_name[_of(name, str)].focus = part
    _spots(tensors[: len(plain)], archive.read("spots"), archive.read("values"))
    _channels(tensors[: len(plain)], archive.read("widths"), archive.read("channels"))
    statistics = Statistics(
        by_name,
        images=_of(header["images"], int),
        fingerprint=_of(header["fingerprint"], str),
        warnings=[_of(w, str) for w in _of(header["warnings"], list)],
        skipped=[(_of(a, str), _of(b, str)) for a, b in _of(header["skipped"], list)],
    )
    total = header["total"]
    total = None if total is None else _of(total, int)
    finished = _numbers_in(done)
    return Progress(
        _of(header["model"], str), statistics, finished, total, _looks(_of(header["looks"], dict))
    )


def _ranges_of(numbers: Collection[int]) -> npt.NDArray[np.int64]:
    """The first number and the one past the last of each stretch without a gap, [n, 2], ascending."""
    ordered = np.array(sorted(numbers), np.int64)
    stretches = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1) if len(ordered) else []
    return np.array([(s[0], s[-1] + 1) for s in stretches], np.int64).reshape(-1, 2)


def _numbers_in(ranges: npt.NDArray[np.int64]) -> set[int]:
    """The numbers in stretches as :func:`_ranges_of` makes them.

    Raises:
        ValueError: They are not ascending, touch each other, are empty, or hold more than any calibration does.
    """
    before = -1
    for start, end in ranges.tolist():
        if start <= before or end <= start:
            raise ValueError("its ranges are not in order")
        before = end
    if before > _MOST_SAMPLES:
        raise ValueError(f"it counts {before} samples")
    return {number for start, end in ranges.tolist() for number in range(start, end)}


def _of(value: Any, kind: type[_T]) -> _T:
    """A value of the header, of the type that it must have.

    Raises:
        ValueError: It is of another one.
    """
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{json.dumps(value)[:40]} is no {kind.__name__}")
    return value


def _looks(values: dict[str, Any]) -> DataQuality:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or (
            name not in ("low", "high") and not isinstance(value, int)
        ):
            raise ValueError(f"'{name}' of its header is no number")
    return DataQuality(**values)


def _spots(
    tensors: list[TensorStatistics], shapes: npt.NDArray[Any], values: npt.NDArray[Any]
) -> None:
    """Gives each tensor what was kept of it: see :mod:`calibration.statistics`."""
    if (
        shapes.dtype != np.int64
        or shapes.shape[1:] != (3,)
        or values.dtype != np.float32
        or values.ndim != 1
    ):
        raise ValueError("its arrays do not fit together")
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite")
    at = 0
    for k, positions, channels in shapes.tolist():
        if not (0 <= k < len(tensors) and 1 < positions <= POSITIONS and 0 < channels <= CHANNELS):
            raise ValueError("positions of no tensor")
        tensors[k].spots.append(values[at : at + positions * channels].reshape(positions, channels))
        at += positions * channels
    if at != len(values):
        raise ValueError("its arrays do not fit together")


def _channels(
    tensors: list[TensorStatistics], widths: npt.NDArray[Any], ranges: npt.NDArray[Any]
) -> None:
    """Gives each tensor the ranges of its channels: so many for each, of no tensor none."""
    if widths.dtype != np.int64 or widths.shape != (len(tensors),) or ranges.dtype != np.float32:
        raise ValueError("its arrays do not fit together")
    if (widths < 0).any() or ranges.shape != (2, int(widths.sum())):
        raise ValueError("its arrays do not fit together")
    if not (np.isfinite(ranges).all() and (ranges[0] <= ranges[1]).all()):
        raise ValueError("channels without a range")
    for part, own in zip(tensors, np.split(ranges, np.cumsum(widths)[:-1], axis=1), strict=False):
        part.channels = own if own.size else None


def _counter(
    counter: MagnitudeCounter, top: int, first: int, counts: npt.NDArray[np.int64]
) -> MagnitudeCounter:
    if not MIN_TOP <= top <= 128 or first < 0 or first + len(counts) > len(counter.counts):
        raise ValueError("a histogram lies outside its window")
    counter.top = top
    counter.counts[first : first + len(counts)] = counts
    return counter


def save_statistics(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Writes statistics as npz, atomically."""
    save_progress(Progress("", statistics, set(), None), path)


def load_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Reads statistics, from a cache as well.

    Raises:
        DataError: The file is missing or damaged.
    """
    return load_progress(path).statistics


def read_tensorrt_cache(path: str | os.PathLike[str]) -> dict[str, float]:
    """Reads TensorRT's calibration table.

    The first line is ``TRT-<version>-<calibrator>``; each other one is ``<tensor>: <8 hexadecimal digits>``, the
    scale (amax / 127) as a big-endian IEEE 754 float (``IInt8Calibrator::writeCalibrationCache``).

    Returns:
        Scale by tensor name, in units of the tensor per integer step.

    Raises:
        DataError: The file is missing or not such a table.
    """
    try:
        lines = read_input(path, limits.LIST_FILE, error=DataError).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            "cannot be read as a TensorRT calibration table: not text",
            os.fspath(path),
            code="wrong-encoding",
        ) from error
    if not lines or not lines[0].startswith("TRT-"):
        raise DataError(
            "is not a TensorRT calibration table (its first line should start with 'TRT-')",
            os.fspath(path),
            code="wrong-format",
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        name, _, value = line.rpartition(
            ":"
        )  # tensor names may hold colons themselves (TensorFlow's do)
        try:
            (scale,) = struct.unpack("!f", bytes.fromhex(value.strip().rjust(8, "0")))
        except (ValueError, struct.error):
            raise DataError(
                f"line {number} is not 'tensor: 8 hexadecimal digits'",
                os.fspath(path),
                code="invalid-line",
            ) from None
        if not name or not math.isfinite(scale) or scale < 0:
            raise DataError(
                f"line {number}: scale {scale:g} of tensor '{name}' is not usable",
                os.fspath(path),
                code="invalid-scale",
                node=name,
            )
        scales[name.rstrip()] = scale
    return scales


def write_tensorrt_cache(
    path: str | os.PathLike[str], scales: Mapping[str, float], version: str = TENSORRT_VERSION
) -> None:
    """Writes TensorRT's calibration table, atomically; see :func:`read_tensorrt_cache`.

    Args:
        path: The file.
        scales: amax / 127 by tensor name.
        version: First line; TensorRT takes the table only when this matches its own version and calibrator.

    Raises:
        DataError: A scale is not positive and finite, or a name cannot be in the table.
        QdqtoolError: The file cannot be written.
    """
    out = io.StringIO()
    out.write(version + "\n")
    for name, scale in scales.items():
        if not (math.isfinite(scale) and scale > 0) or "\n" in name:
            raise DataError(
                f"tensor '{name}': scale {scale:g} cannot be written to a TensorRT calibration table",
                code="invalid-scale",
                node=name,
            )
        out.write(f"{name}: {struct.pack('!f', scale).hex()}\n")
    write_text(path, out.getvalue())
