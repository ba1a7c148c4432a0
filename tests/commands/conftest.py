import json
import re
import shlex
from typing import Any

import click
import pytest

from qdqtool.commands.cli import cli as group, run


class Cli:
    """Run the command line in this process.

    Attributes:
        err: Text of the last call on stderr.
        error: Error that ended the last call; None without an error.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self.err = capsys, ""
        self.error: BaseException | None = None
        main = group.main

        def main_with_error(*args: Any, **options: Any) -> Any:
            try:
                return main(*args, **options)
            except BaseException as error:
                self.error = error
                raise

        monkeypatch.setattr(group, "main", main_with_error)

    def run(self, *words: object) -> tuple[int, str]:
        self.error = None
        self._capsys.readouterr()
        code = run([str(word) for word in words])
        out, self.err = self._capsys.readouterr()
        return code, out

    def __call__(self, *words: object, code: int = 0) -> str:
        actual, out = self.run(*words)
        assert actual == code, self.err
        return out

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "--format", "json", code=code))

    def refuse(self, *words: object, code: int = 2, cause: str | None = None) -> str:
        """Run a command that fails; return the only line on stderr.

        Args:
            *words: Arguments of the command line.
            code: Expected exit code.
            cause: Expected :attr:`cause`.
        """
        assert self(*words, code=code) == ""
        # click ends the ^C of a terminal with an empty line
        lines = [line for line in self.err.splitlines() if line]
        assert len(lines) == 1 and lines[0].startswith("qdqtool: "), self.err
        assert cause in (None, self.cause)
        return lines[0]

    @property
    def cause(self) -> str:
        """Code and parameter of the last error.

        For errors of click, class and option.
        """
        error = self.error
        if isinstance(error, click.BadParameter):
            name = error.param.name if error.param is not None else error.param_hint
            return f"{type(error).__name__} {name}"
        return f"{getattr(error, 'code', '')} {getattr(error, 'parameter', '')}"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


def next_commands(text: str) -> list[list[str]]:
    """Return the arguments of the qdqtool commands that a text suggests."""
    return [
        shlex.split(line[line.index("qdqtool ") :])[1:]
        for line in text.replace("\\\n", " ").splitlines()
        if re.match(r"(  |\w+: +)qdqtool ", line)
    ]
