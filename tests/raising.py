"""Errors asked for by what raised them and with which values, so that rewording one changes no test."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

_OURS = tuple(str(Path(__file__).parents[1] / package) for package in ("qdqtool", "calibration"))


@contextlib.contextmanager
def raises(
    kind: type[Exception] | tuple[type[Exception], ...], told: str
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error of a class, as ``pytest.raises``.

    Args:
        kind: The class.
        told: The function that raises it (or ``one|another``), and what it names, with spaces between: nodes, files,
            numbers, options; of a function that refuses several things the one that this is about.
    """
    function, *values = told.split()
    with pytest.raises(kind) as caught:
        yield caught
    assert raised_by(caught.tb) in function.split("|"), caught.value
    assert not [v for v in values if v not in str(caught.value)], (caught.value, values)


def raised_by(tb: TracebackType | None) -> str:
    """The innermost of our functions that an error came through, with its class."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(tb)]
    return next(
        (code.co_qualname for code in reversed(frames) if code.co_filename.startswith(_OURS)), ""
    )
