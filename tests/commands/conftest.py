"""The command line as tests call it."""

import json
from typing import Any

import pytest

from qdqtool.commands.cli import run


class Cli:
    """Runs the command line in this process; ``err`` is what the last call printed on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *words: object, code: int = 0) -> str:
        """What it prints on stdout; ``code`` is what it has to exit with."""
        self._capsys.readouterr()
        assert run([str(word) for word in words]) == code
        out, self.err = self._capsys.readouterr()
        return out

    def json(self, *words: object, code: int = 0) -> Any:
        """The answer as JSON."""
        return json.loads(self(*words, "--format", "json", code=code))

    def refused(self, *words: object, code: int = 2) -> str:
        """The one line that it prints of an error, and no traceback."""
        assert self(*words, code=code) == ""
        lines = [
            line for line in self.err.splitlines() if line
        ]  # click ends the ^C of a terminal with an empty line
        assert len(lines) == 1 and lines[0].startswith("qdqtool: "), self.err
        return lines[0]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
