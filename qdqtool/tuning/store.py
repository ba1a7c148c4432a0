"""What was measured, kept in a file so that a tuning that was stopped goes on where it was."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

from qdqtool import budgets
from qdqtool.errors import DataError
from qdqtool.files import check_output, open_input
from qdqtool.jsontext import parse_json
from qdqtool.outputs import atomic_write
from qdqtool.packed import BLOCK, HEAD, kind_of, unpack
from qdqtool.tuning.measure import Row
from qdqtool.types import TOOL_VERSION, Json

SCHEMA = "qdqtool/tuning-state/1"
SAVE_SECONDS = 10.0
SWEEP, WHOLE = "sweep", "whole"


class Store:
    """Rows by kind of measurement, candidate and sample.

    Args:
        path: The file; None keeps nothing.
        identity: Of what was measured: model, images, settings. Another's file is refused.

    Raises:
        DataError: The file is damaged, or of another tuning.
        QdqtoolError: It could not be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Json) -> None:
        self.path = None if path is None else Path(path)
        self.identity = {**identity, "tool": TOOL_VERSION}
        self.rows: dict[str, dict[str, dict[int, Row | None]]] = {SWEEP: {}, WHOLE: {}}
        self.resumed = 0
        self._saved = time.monotonic()
        self._changed = False
        if self.path is not None:
            check_output(self.path)
            if self.path.exists():
                self._read(self.path)

    def known(self, kind: str, candidate: str) -> dict[int, Row | None]:
        return self.rows[kind].get(candidate, {})

    def add(self, kind: str, rows: dict[str, dict[int, Row | None]]) -> None:
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
            "schema": SCHEMA, **self.identity,
            "rows": {
                kind: {c: {str(n): None if r is None else r.as_json() for n, r in sorted(found.items())}
                       for c, found in sorted(by.items())}
                for kind, by in self.rows.items()
            },
        }  # fmt: skip
        with atomic_write(self.path, at_once=True) as file:
            file.write(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 1, mtime=0))
        self._saved = time.monotonic()
        self._changed = False

    def _read(self, path: Path) -> None:
        what = f"{path}: is no file of an earlier `qdqtool tune`"
        remedy = "give another name with `state`, or remove it"
        try:
            data = parse_json(_unpacked(path))
        except (ValueError, RecursionError):
            raise DataError(f"{what}, or damaged; {remedy}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise DataError(f"{what}; {remedy}")
        for name, value in self.identity.items():
            if data.get(name) != value:
                raise DataError(f"{path}: was measured with another {_WORDS.get(name, name)}; {remedy}")
        try:
            for kind in self.rows:
                for candidate, found in data["rows"][kind].items():
                    self.rows[kind][candidate] = {int(n): _row(r) for n, r in found.items()}
                    self.resumed += len(found)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(f"{path}: is damaged; {remedy}") from None


_WORDS = {"model": "model", "images": "set of images",
          "settings": "setting (target, method, metric or its source, head ...)",
          "tool": "version of qdqtool"}  # fmt: skip


def _unpacked(path: Path) -> bytes:
    with open_input(path, pipes=False, error=DataError, note=False) as file:
        head = file.read(HEAD)
        if not kind_of(head):
            raise DataError(f"{path}: is no file of an earlier `qdqtool tune`; give another name with `state`")
        blocks = unpack(head, lambda: file.read(BLOCK), str(path), budgets.TUNING_STATE, whole=True, error=DataError)
        return b"".join(blocks)


def _row(data: Any) -> Row | None:
    if data is None:
        return None
    error, evidence = data
    if not isinstance(error, float | int):
        raise ValueError(error)
    return Row(float(error), evidence)
