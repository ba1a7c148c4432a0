"""A wrong type in the Python API ends in QdqtoolError with the parameter's name; what was right stays right."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.fixing.api import fix
from qdqtool.parameters import fits
from tests.trt.builder import Graph

FUNCTIONS = {
    **{n: getattr(qdqtool, n) for n in ("insert", "predict", "verify", "compare", "extract", "report", "tune")},
    "fix": fix,
}
WRONG: tuple[Any, ...] = (
    object(), 5, 2.5, True, None, "no such thing", b"\x00\x01", [], [object()], {}, {1: 2}, (1, "a"), {3}, 1j, int,
    np.zeros((2, 2)), np.float32(1), Path("no such file"), lambda: 0, float("nan"), [[1]], [None], "", -1,
)
CASES = [(f, p) for f, function in FUNCTIONS.items() for p in inspect.signature(function).parameters
         if p not in ("say", "mapper")]


def model() -> Any:
    g = Graph()
    return g.model(g.relu(g.conv(g.input(1, 8, 8, 8), "c0"), "r0"))


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_no_wrong_type_comes_from_inside(
    name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = FUNCTIONS[name]
    needed = {p: v for p, v in (("model", model()), ("source", model()), ("a", model()), ("b", model()),
                                ("data", "no such folder"), ("builds", "no such log"))
              if p in inspect.signature(function).parameters}
    for value in WRONG:
        given = {**needed, parameter: value}
        builds = [given.pop("builds")] if "builds" in given and (name == "verify" or parameter == "builds") else []
        given.pop("builds", None)
        first = [given.pop(p) for p in ("model", "source", "a") if p in given]
        message = ""
        try:
            function(*first, *builds, **given)
        except QdqtoolError as error:
            message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize(("name", "parameter", "value"), [
    ("predict", "model", 5), ("predict", "target", 8.5), ("predict", "assume", [1]), ("verify", "builds", None),
    ("compare", "b", 1), ("extract", "hops", "2"), ("extract", "check", ["ls"]), ("report", "calib_cache", 3),
    ("tune", "keep", "0.9"), ("tune", "exclude", "conv"), ("insert", "percentile", "high"), ("insert", "size", 320),
    ("insert", "calib_cache", 4), ("fix", "only", "BIAS-DQ"), ("fix", "source", []),
])
def test_the_parameter_is_named(name: str, parameter: str, value: object) -> None:
    given: dict[str, Any] = {"data": "images"} if name in ("tune", "insert") else {}
    given = {**given, "a": model()} if name == "compare" else given
    first = [value] if parameter in ("model", "source") else [] if name == "compare" else [model()]
    if parameter == "builds":
        first.append(value)
    elif parameter not in ("model", "source"):
        given[parameter] = value
    with pytest.raises(QdqtoolError, match=f"^`{parameter}=.*: is .*; give "):
        FUNCTIONS[name](*first, **given)


def test_what_is_right() -> None:
    assert fits(np.int64(3), int) and fits(np.float32(3), float) and fits(3, float) and fits(np.int8(3), float)
    assert fits([320, 320], tuple[int, int]) and fits(np.array([320, 320]), tuple[int, int])
    assert not fits(True, int) and not fits([1], tuple[int, int]) and not fits("ab", tuple[str, str])
    assert qdqtool.predict(model(), advice=np.bool_(False)).summary()["convolutions"] == 1  # type: ignore[arg-type]
