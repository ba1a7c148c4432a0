from __future__ import annotations

from pathlib import Path

import pytest

from qdqtool.builders.licence import tell_once


def test_said_once_for_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert tell_once()
    assert "NVIDIA's licence" in capsys.readouterr().err
    assert not tell_once()
    assert capsys.readouterr().err == ""


def test_said_each_time_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    assert tell_once()
    assert tell_once()


def test_a_home_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user whose home folder is another one's: asking for the mark is refused, not answered with no."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refused)
    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    assert tell_once()
