"""Store of measurements in a file, with which an interrupted tuning can continue."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

from qdqtool.accuracy.metrics import LARGEST
from qdqtool.errors import DataError
from qdqtool.tuning.measure import REVISION, Measurement, SampleMeasurements, TaskResult
from qdqtool.tuning.planner import Configuration, PlacementCost
from qdqtool.util import limits
from qdqtool.util.compression import HEAD, find_magic, unpack_blocks
from qdqtool.util.files import atomic_write, check_output, open_input
from qdqtool.util.json_text import Json, parse_json
from qdqtool.version import TOOL_VERSION

SCHEMA = "qdqtool/tuning-state/1"
SAVE_SECONDS = 10.0

# Code and text of the error if an entry of the identity differs.
_IDENTITY = {
    "model": ("different-models", "model"),
    "images": ("different-images", "set of images"),
    "settings": (
        "different-settings",
        "setting (target, method, metric or its source, head ...)",
    ),
    "tool": ("wrong-version", "version of qdqtool"),
    "measurement": ("different-methods", "version of the measuring code"),
}
_NO_STATE = "is not a file of an earlier `qdqtool tune`"
_REMEDY = "give another name with `state`, or remove the file"


class MeasurementStore:
    """Measurements by candidate and sample.

    Attributes:
        path: File of the measurements; None keeps them in memory.
        identity: Identity of the measured model, images and settings.
        rows: Measurements by key of the candidate's recipe and number of the sample.
        resumed: Number of measurements that were read from the file.
        placements: Name and configuration of the measured placements, by key of the recipe.
        samples: Numbers of the samples that the last run used: samples of the search, and held-out
            samples. Both are empty before the first run.
        seconds_per_run: Seconds of one run on one sample; 0 if unknown.
        calibrated_on: Number of samples from which the last run collected ranges; 0 if unknown.
        costs: Predicted costs by key of a recipe, for each GPU and type of the float layers.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Json) -> None:
        """Create a store, and read its file if the file exists.

        Args:
            path: File of the measurements; None keeps them in memory only.
            identity: Hashes of the model, the images and the settings.

        Raises:
            DataError: The file is damaged, or belongs to another model, images or settings.
            QdqtoolError: The file cannot be written.
        """
        self.path = None if path is None else Path(path)
        self.identity = {**identity, "tool": TOOL_VERSION, "measurement": REVISION}
        self.rows: TaskResult = {}
        self.resumed = 0
        self.placements: dict[str, tuple[str, Configuration]] = {}
        self.samples: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.seconds_per_run = 0.0
        self.calibrated_on = 0
        self.costs: dict[str, dict[str, PlacementCost]] = {}
        self._saved = time.monotonic()
        self._changed = False
        self._saved_costs = 0
        if self.path is not None:
            check_output(self.path)
            if self.path.exists():
                self._read(self.path)

    @property
    def ranges_cache(self) -> Path | None:
        """File of the statistics from which the ranges come; None keeps them in memory."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.ranges")

    def measurements(self, candidate: str) -> SampleMeasurements:
        """Return the measurements of a candidate by number of the sample."""
        return self.rows.get(candidate, {})

    def add(self, result: TaskResult) -> None:
        """Add measurements; write the file if the last write was more than 10 seconds ago."""
        for candidate, measurements in result.items():
            self.rows.setdefault(candidate, {}).update(measurements)
        self._changed = True
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def add_placement(self, candidate: str, name: str, configuration: Configuration) -> None:
        """Add a measured placement; a known placement keeps its name."""
        if candidate not in self.placements:
            self.placements[candidate] = (name, configuration)
            self._changed = True

    def record_samples(
        self, chosen_on: tuple[int, ...], judged_on: tuple[int, ...], seconds_per_run: float
    ) -> None:
        """Record the samples on which a run measures its placements, and the time per run.

        A time of 0 (unknown) leaves the recorded time unchanged.
        """
        effort = ((chosen_on, judged_on), seconds_per_run or self.seconds_per_run)
        if effort != (self.samples, self.seconds_per_run):
            self.samples, self.seconds_per_run = effort
            self._changed = True

    def select_costs(self, conditions: str) -> dict[str, PlacementCost]:
        """Return the costs that were predicted under some conditions, to read and to extend.

        Args:
            conditions: Hash of the GPU and of the types of the float layers.
        """
        return self.costs.setdefault(conditions, {})

    @property
    def can_continue(self) -> bool:
        """Whether the file has measurements or costs, from which a later run continues."""
        return self.path is not None and bool(self.rows or self._count_costs())

    def _count_costs(self) -> int:
        return sum(map(len, self.costs.values()))

    def save(self, *, costs_alone: bool = False) -> None:
        """Write the file if there are new measurements or costs.

        Args:
            costs_alone: Whether to write the file also if there are costs but no measurements.
        """
        count = self._count_costs()
        has_new_costs = count > self._saved_costs and (costs_alone or bool(self.rows))
        if self.path is None or not (self._changed or has_new_costs):
            return
        rows: Json = {}
        for candidate, measurements in sorted(self.rows.items()):
            rows[candidate] = {
                str(number): None if row is None else [row.error, row.evidence]
                for number, row in sorted(measurements.items())
            }
        placements = {
            candidate: {"name": name, **configuration.as_json()}
            for candidate, (name, configuration) in sorted(self.placements.items())
        }
        state = {
            "schema": SCHEMA,
            **self.identity,
            "rows": rows,
            "placements": placements,
            "samples": self.samples,
            "seconds_per_run": self.seconds_per_run,
            "calibrated_on": self.calibrated_on,
            "costs": {
                conditions: {recipe: astuple(cost) for recipe, cost in sorted(costs.items())}
                for conditions, costs in sorted(self.costs.items())
            },
        }
        with atomic_write(self.path) as file:
            text = json.dumps(state, separators=(",", ":"))
            file.write(gzip.compress(text.encode(), 1, mtime=0))
        self._saved = time.monotonic()
        self._changed = False
        self._saved_costs = count

    def _read(self, path: Path) -> None:
        state = _read_state(path)
        for name, expected in self.identity.items():
            if state.get(name) != expected:
                code, word = _IDENTITY[name]
                raise _state_error(path, f"was measured with another {word}; {_REMEDY}", code)
        try:
            for candidate, rows in state["rows"].items():
                self.rows[candidate] = {int(n): _parse_measurement(r) for n, r in rows.items()}
                self.resumed += len(rows)
            for candidate, fields in state.get("placements", {}).items():
                self.placements[candidate] = str(fields["name"]), Configuration.from_json(fields)
            chosen_on, judged_on = state.get("samples", ((), ()))
            self.samples = tuple(map(int, chosen_on)), tuple(map(int, judged_on))
            self.seconds_per_run = float(state.get("seconds_per_run", 0.0))
            self.calibrated_on = int(state.get("calibrated_on", 0))
            for conditions, costs in state.get("costs", {}).items():
                self.costs[conditions] = {key: _parse_cost(row) for key, row in costs.items()}
            self._saved_costs = self._count_costs()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _state_error(path, f"is damaged; {_REMEDY}", "file-damaged") from None


def _read_state(path: Path) -> Json:
    with open_input(path, error=DataError, record=False) as file:
        head = file.read(HEAD)
        if not find_magic(head):
            raise _state_error(path, f"{_NO_STATE}; give another name with `state`")
        limit = limits.TUNING_STATE
        blocks = unpack_blocks(head, file.read, str(path), limit, whole=True, error=DataError)
        try:
            state = parse_json(b"".join(blocks))
        except (ValueError, RecursionError):
            state = None
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise _state_error(path, f"{_NO_STATE}, or is damaged; {_REMEDY}")
    return state


def _state_error(path: Path, reason: str, code: str = "wrong-format") -> DataError:
    return DataError(reason, str(path), code=code, parameter="state")


def _parse_measurement(row: Any) -> Measurement | None:
    if row is None:
        return None
    error, evidence = row
    numbers = [n for n in row if isinstance(n, float | int)]
    if not isinstance(error, float | int) or any(abs(n) > LARGEST for n in numbers):
        raise ValueError(row)
    return Measurement(float(error), evidence)


def _parse_cost(row: Any) -> PlacementCost:
    convolutions, int8, conversions, ms = row
    counts = (int(convolutions), int(int8), int(conversions))
    return PlacementCost(*counts, None if ms is None else float(ms))
