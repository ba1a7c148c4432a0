"""Asks for measurements, keeps them, and puts them together in an order that does not depend on who made them.

They are kept in a file too, so that a tuning that was stopped goes on where it was.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import operator
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from calibration.arrays import Preprocess, open_data
from calibration.dataset import Dataset, SubsetSource, spread_indices
from calibration.session import input_specs, metadata_size
from qdqtool.errors import DataError
from qdqtool.insertion.options import ImageOptions, RangeOptions
from qdqtool.tuning.configuration import Recipe
from qdqtool.tuning.measure import REVISION, Job, Mapper, Result, Row, Rows, Task
from qdqtool.tuning.metrics import LARGEST, Evidence, resampled
from qdqtool.tuning.options import SearchBudget
from qdqtool.types import TOOL_VERSION, Json
from qdqtool.util import limits
from qdqtool.util.compression import HEAD, find_magic, unpack
from qdqtool.util.files import check_output, open_input, same_file
from qdqtool.util.json_text import parse_json
from qdqtool.util.outputs import atomic_write
from qdqtool.util.progress import track
from qdqtool.util.said import Parameter, said

if TYPE_CHECKING:
    from qdqtool.ir.graph import Model

SCHEMA = "qdqtool/tuning-state/1"
SAVE_SECONDS = 10.0
SWEEP, WHOLE = "sweep", "whole"


class Store:
    """Rows by kind of measurement, candidate and sample, in a file (None: in none).

    ``identity`` is that of what was measured: model, images, settings. Another's file is refused. ``ranged_on`` is how
    many samples the ranges were made from; 0 for all.

    Raises:
        DataError: The file is damaged, or of another tuning.
        QdqtoolError: It could not be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Json) -> None:
        self.path = None if path is None else Path(path)
        self.identity = {**identity, "tool": TOOL_VERSION, "measurement": REVISION}
        self.rows: dict[str, dict[str, Rows]] = {SWEEP: {}, WHOLE: {}}
        self.resumed = self.ranged_on = 0
        self._saved = time.monotonic()
        self._changed = False
        if self.path is not None:
            check_output(self.path)
            if self.path.exists():
                self._read(self.path)

    def known(self, kind: str, candidate: str) -> Rows:
        return self.rows[kind].get(candidate, {})

    def add(self, kind: str, rows: dict[str, Rows]) -> None:
        """Takes rows in, and writes the file when the last time was long ago."""
        for candidate, found in rows.items():
            self.rows[kind].setdefault(candidate, {}).update(found)
        self._changed = True
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        if self.path is None or not self._changed:
            return
        data = {
            "schema": SCHEMA,
            **self.identity,
            "ranged_on": self.ranged_on,
            "rows": {
                kind: {
                    c: {
                        str(n): None if r is None else r.as_json() for n, r in sorted(found.items())
                    }
                    for c, found in sorted(by.items())
                }
                for kind, by in self.rows.items()
            },
        }
        with atomic_write(self.path) as file:
            file.write(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 1, mtime=0))
        self._saved = time.monotonic()
        self._changed = False

    def _read(self, path: Path) -> None:
        what = "is no file of an earlier `qdqtool tune`"
        remedy = "give another name with {`state`}, or remove it"
        with open_input(path, error=DataError, record=False) as file:
            head = file.read(HEAD)
            if not find_magic(head):
                raise DataError(
                    said(what + "; give another name with {`state`}"),
                    str(path),
                    code="wrong-format",
                    parameter="state",
                )
            limit = limits.TUNING_STATE
            blocks = unpack(head, file.read, str(path), limit, whole=True, error=DataError)
            try:
                data = parse_json(b"".join(blocks))
            except (ValueError, RecursionError):
                raise DataError(
                    said(what + ", or damaged; " + remedy),
                    str(path),
                    code="wrong-format",
                    parameter="state",
                ) from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise DataError(
                said(what + "; " + remedy), str(path), code="wrong-format", parameter="state"
            )
        for name, value in self.identity.items():
            if data.get(name) != value:
                code, word = _IDENTITY[name]
                other = said("was measured with another {name}; " + remedy, name=word)
                raise DataError(other, str(path), code=code, parameter="state")
        try:
            self.ranged_on = operator.index(data.get("ranged_on", 0))
            for kind in self.rows:
                for candidate, found in data["rows"][kind].items():
                    self.rows[kind][candidate] = {int(n): _row(r) for n, r in found.items()}
                    self.resumed += len(found)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(
                said("is damaged; " + remedy), str(path), code="file-damaged", parameter="state"
            ) from None


# Code of the error and words for it where a value of the identity differs.
_IDENTITY = {
    "model": ("different-models", "model"),
    "images": ("different-images", "set of images"),
    "settings": (
        "different-settings",
        "setting (target, method, metric or its source, head ...)",
    ),
    "tool": ("wrong-version", "version of qdqtool"),
    "measurement": ("different-methods", "way of measuring (of another commit)"),
}


def _row(data: Any) -> Row | None:
    if data is None:
        return None
    error, evidence = data
    if not isinstance(error, float | int) or any(
        abs(v) > LARGEST for v in data if isinstance(v, float | int)
    ):
        raise ValueError(data)
    return Row(float(error), evidence)


# Measurements --------------------------------------------------------------------------------------------------------

RESAMPLES = 300


class OutOfTime(Exception):
    """The time limit was reached; what was measured so far is kept."""


@dataclass
class Measurements:
    """All measurements of a tuning."""

    job: Job  # what is measured
    sets: Sets  # on which samples
    mapper: Mapper  # who measures
    store: Store  # where it is kept
    workers: int  # how many tasks run at the same time
    deadline: float | None = None  # of ``time.monotonic()``; None without a limit
    progress: bool = False  # whether to draw a bar
    runs: int = 0  # candidates times samples measured in this process
    _values: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)
    _resampled: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.float64]] = field(
        default_factory=dict
    )

    # Sweeps: one site at a time --------------------------------------------------------------------------------

    def sweep(
        self,
        recipes: Sequence[Recipe],
        what: str,
        until: float | None = None,
        images: Sequence[int] | None = None,
    ) -> bool:
        """Measures the error of each recipe on the samples for single sites, or on other ``images``.

        It stops at ``until`` where that is in front of the deadline, and returns whether all was measured before.
        """
        images = tuple(self.sets.swept_on if images is None else images)
        tasks = self._tasks(SWEEP, recipes, images)
        try:
            self._run(SWEEP, tasks, what, until)
        except OutOfTime:
            return False
        return True

    def errors(
        self, recipe: Recipe, images: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """Errors of a recipe on the samples for single sites, or on other ``images``; NaN for what was not measured."""
        return self._errors(
            {**self.store.known(WHOLE, recipe.key), **self.store.known(SWEEP, recipe.key)}, images
        )

    def swept(self, recipe: Recipe, images: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
        """The same of what sweeps alone measured, which does not depend on what else is known."""
        return self._errors(self.store.known(SWEEP, recipe.key), images)

    def _errors(self, rows: Rows, images: Sequence[int] | None) -> npt.NDArray[np.float64]:
        found = [rows.get(n) for n in (self.sets.swept_on if images is None else images)]
        return np.asarray([math.nan if r is None else r.error for r in found], np.float64)

    # Whole runs: the metric ------------------------------------------------------------------------------------

    def whole(self, recipes: Iterable[Recipe], samples: Sequence[int], what: str) -> None:
        """Measures the metric of recipes.

        Raises:
            OutOfTime: The time limit came first.
        """
        self._run(WHOLE, self._tasks(WHOLE, recipes, samples), what)

    def evidence(self, recipe: Recipe, samples: Sequence[int]) -> list[Evidence]:
        """What the metric saw, in the order of the samples; broken samples left out."""
        rows = self.store.known(WHOLE, recipe.key)
        return [row.evidence for n in samples if (row := rows.get(n)) is not None]

    def value(self, recipe: Recipe, samples: Sequence[int]) -> float:
        """The metric's value.

        Raises:
            DataError: No sample could be read, or the kept file is damaged.
        """
        key = (recipe.key, tuple(samples))
        if key not in self._values:
            self._values[key] = self._asked(self.evidence(recipe, samples))
        return self._values[key]

    def _asked(self, evidence: list[Evidence]) -> float:
        if not evidence:
            raise DataError("none of the images to measure on could be read", code="no-images")
        try:
            value = float(self.job.metric.value(evidence))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            if self.store.resumed:
                raise DataError(
                    "is damaged; remove it",
                    str(self.store.path),
                    code="file-damaged",
                    parameter="state",
                ) from error
            raise
        if math.isnan(value):
            raise DataError(
                said(
                    "the float model finds nothing on these images, so that there is nothing to agree "
                    "with; give images that show what it was made for, or your own {`metric`}"
                ),
                code="nothing-detected",
                parameter="data",
            )
        return value

    def resampled(self, recipe: Recipe, samples: Sequence[int]) -> npt.NDArray[np.float64]:
        """Values over resamples of the samples, the same resamples for every recipe."""
        key = (recipe.key, tuple(samples))
        if key not in self._resampled:
            self._resampled[key] = resampled(
                self.job.metric, self.evidence(recipe, samples), RESAMPLES
            )
        return self._resampled[key]

    # Running ---------------------------------------------------------------------------------------------------

    def _tasks(self, kind: str, recipes: Iterable[Recipe], samples: Sequence[int]) -> list[Task]:
        """What is not known yet, a task for each sample."""
        unique = {r.key: r for r in recipes}
        known = {key: self.store.known(kind, key) for key in unique}
        left = ((n, tuple(r for key, r in unique.items() if n not in known[key])) for n in samples)
        return [
            Task(f"{kind} {n}", (n,), candidates, kind == WHOLE)
            for n, candidates in left
            if candidates
        ]

    def _run(self, kind: str, tasks: Sequence[Task], what: str, until: float | None = None) -> None:
        if not tasks:
            return
        end = min((t for t in (self.deadline, until) if t is not None), default=math.inf)
        steps = self._measured(kind, self.mapper(self.job, tasks), end)
        total = sum(len(t.candidates) * len(t.images) for t in tasks)
        try:
            for _ in track(steps, what, total) if self.progress else steps:
                pass
        finally:
            self.store.save()

    def _measured(self, kind: str, results: Iterator[Result], end: float) -> Iterator[None]:
        """Keeps results as they come; one step for each sample."""
        try:
            for result in results:
                rows = sum(map(len, result.rows.values()))
                self.store.add(kind, result.rows)
                self.runs += rows
                yield from itertools.repeat(None, rows)
                if time.monotonic() > end:
                    raise OutOfTime
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def require_time(self) -> None:
        """Looks whether there is time left.

        Raises:
            OutOfTime: There is none.
        """
        if self.is_late:
            raise OutOfTime


# Three sets of samples -----------------------------------------------------------------------------------------------


_BLOCKS = 4
_FEWEST = 4


@dataclass
class Sets:
    """The samples of a tuning."""

    calibration: Dataset  # to make ranges from
    measured: Dataset  # all others; numbers count in it
    chosen_on: tuple[int, ...]  # numbers of those that choices are made on
    judged_on: tuple[
        int, ...
    ]  # numbers of those that the result is judged on, and nothing is chosen by
    swept_on: tuple[int, ...]  # numbers of those to choose on that single sites are measured on

    @property
    def fingerprint(self) -> str:
        """Identifies the measured samples, as far as they can be identified."""
        samples = self.measured.fingerprint + self.calibration.fingerprint
        return hashlib.sha256(f"{samples} {self.chosen_on} {self.judged_on}".encode()).hexdigest()[
            :20
        ]


def open_sets(
    model: Model,
    data: object,
    evaluation: object = None,
    images: ImageOptions | None = None,
    *,
    max_images: int = RangeOptions.max_images,
    chosen_on: int = SearchBudget.chosen_on,
    judged_on: int = SearchBudget.judged_on,
    swept_on: int | None = None,
) -> Sets:
    """Divides the data.

    With evaluation data the ranges are made from all of the calibration data, choices on one half of the evaluation
    data and the judgement on the other. Without, up to a quarter of the calibration data goes to each of both. Always
    in blocks: pictures that lie side by side (of one video, one document) fall on one side.

    Raises:
        DataError: There is nothing usable, too little, or it can be read once only.
    """
    chosen_on, judged_on = (min(n, limits.TUNING_SAMPLES) for n in (chosen_on, judged_on))
    images = images or ImageOptions()
    whole = _open(model, data, images, max_images, "data")
    assert whole.indices is not None
    if evaluation is None:
        if len(whole.indices) < _FEWEST * whole.batch:
            raise DataError(
                said(
                    "{`data`}: {images} too few to calibrate, choose and judge with; give {least} or "
                    "more, or others to judge on with {`evaluation`}",
                    images=_images(len(whole.indices)),
                    least=_FEWEST * whole.batch,
                ),
                code="too-few-images",
                parameter="data",
            )
        rest, chosen, judged = _three(whole.indices, whole.batch, chosen_on, judged_on)
        return _divided(whole, _part(whole, rest), chosen, judged, swept_on)
    paths = [d for d in (data, evaluation) if isinstance(d, str | os.PathLike)]
    if len(paths) == 2 and same_file(*paths):
        raise DataError(
            said(
                "{`evaluation`} {path}: is what {`data`} names, so that nothing would be left to judge "
                "on; leave it out, and a part is held out",
                path=os.fspath(paths[1]),
            ),
            code="option-conflict",
            parameter="evaluation",
        )
    other = _open(model, evaluation, images, max(max_images, chosen_on + judged_on), "evaluation")
    assert other.indices is not None
    if len(other.indices) < 2 * other.batch:
        raise DataError(
            said(
                "{`evaluation`}: {images} too few to choose on one half and judge on the other; give "
                "{least} or more",
                images=_images(len(other.indices)),
                least=2 * other.batch,
            ),
            code="too-few-images",
            parameter="evaluation",
        )
    return _divided(
        other, whole, *_halves(other.indices, other.batch, chosen_on, judged_on), swept_on
    )


def _images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count} images are"


def _open(model: Model, data: object, images: ImageOptions, limit: int, what: str) -> Dataset:
    if data is None:
        raise DataError(
            said("{data}: no images; give a folder of images", data=Parameter(what)),
            code="missing-argument",
            parameter=what,
        )
    if isinstance(data, Iterator):
        raise DataError(
            said(
                "{data}: an iterator can be gone through once only; give a list",
                data=Parameter(what),
            ),
            code="read-once",
            parameter=what,
        )
    dataset = open_data(
        data,
        input_specs(model),
        images.preprocess or Preprocess(),
        limit,
        images.size or metadata_size(model),
    )
    if dataset.indices is None:
        raise DataError(
            said("{data}: its length is not known; give a folder or a list", data=Parameter(what)),
            code="read-once",
            parameter=what,
        )
    return dataset


def _part(whole: Dataset, indices: Sequence[int]) -> Dataset:
    return Dataset(SubsetSource(whole.source, indices), whole.inputs, max(1, len(indices)))


def _divided(
    whole: Dataset, calibration: Dataset, chosen: list[int], judged: list[int], swept_on: int | None
) -> Sets:
    """The sets with numbers of samples, of whole batches, for indices."""
    chosen, judged = (
        items[: len(items) // whole.batch * whole.batch] for items in (chosen, judged)
    )
    first, all_ = len(chosen) // whole.batch, (len(chosen) + len(judged)) // whole.batch
    swept = tuple(spread_indices(first, min(swept_on or first, first)))
    return Sets(
        calibration,
        _part(whole, chosen + judged),
        tuple(range(first)),
        tuple(range(first, all_)),
        swept,
    )


def _blocks(items: Sequence[int]) -> list[list[int]]:
    count = min(_BLOCKS, max(1, len(items) // _FEWEST))
    bounds = [len(items) * k // count for k in range(count + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


def _share(wanted: int, blocks: int, k: int) -> int:
    return wanted * (k + 1) // blocks - wanted * k // blocks


def _three(
    items: Sequence[int], batch: int, chosen_on: int, judged_on: int
) -> tuple[list[int], list[int], list[int]]:
    """What is left for ranges, and what is chosen and judged on; of each block the end."""
    quarter = len(items) // _FEWEST // batch * batch
    chosen_on, judged_on = (max(batch, min(n * batch, quarter)) for n in (chosen_on, judged_on))
    blocks = _blocks(items)
    rest, chosen, judged = [], [], []
    for k, block in enumerate(blocks):
        c, j = _share(chosen_on, len(blocks), k), _share(judged_on, len(blocks), k)
        keep = max(0, len(block) - c - j)
        rest += block[:keep]
        chosen += block[keep : keep + c]
        judged += block[keep + c : keep + c + j]
    return rest, chosen, judged


def _halves(
    items: Sequence[int], batch: int, chosen_on: int, judged_on: int
) -> tuple[list[int], list[int]]:
    chosen: list[int] = []
    judged: list[int] = []
    blocks = _blocks(items)
    for k, block in enumerate(blocks):
        middle = (len(block) + 1) // 2
        for part, into, wanted in (
            (block[:middle], chosen, chosen_on),
            (block[middle:], judged, judged_on),
        ):
            share = max(1, _share(wanted * batch, len(blocks), k))
            into += [part[i] for i in spread_indices(len(part), share)] if part else []
    return chosen, judged
