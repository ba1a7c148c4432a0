"""Memory of sessions, which depends on where a process runs."""

import os
from pathlib import Path

import pytest

from qdqtool.runtime import session_memory
from qdqtool.util.limits import PROCESSES


@pytest.mark.parametrize(
    ("container_limits", "processes", "expected"),
    [
        ([], "", 96),
        ([""], "", 96),
        (["max"], "", 96),
        (["9223372036854771712"], "", 96),
        (["64"], "", 48),
        (["max", "32"], "", 24),
        (["16", "32"], "", 12),
        ([], "4", 24),
        (["64"], "3", 16),
        ([], "0", 96),
        ([], "many", 96),
    ],
)
def test_session_memory(
    container_limits: list[str],
    processes: str,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three quarters of a machine with 128 bytes, or of its container, shared by the processes.
    monkeypatch.setattr(
        os, "sysconf", {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 16}.__getitem__, raising=False
    )
    files = [tmp_path / f"{number}-of-{'-'.join(container_limits)}" for number in range(2)]
    for file, text in zip(files, container_limits, strict=False):
        file.write_text(text + "\n")
    monkeypatch.setattr(session_memory, "CONTAINER_FILES", [str(f) for f in files])
    monkeypatch.setenv(PROCESSES, processes)
    assert session_memory.session_memory_limit() == expected


def test_session_memory_of_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(session_memory, "CONTAINER_FILES", ())
    assert session_memory.session_memory_limit() == 0
