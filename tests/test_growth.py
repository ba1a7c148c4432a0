"""Cost grows with the input: four times the nodes take at most about four times the time."""

import gc
import time

import pytest

import qdqtool
from qdqtool.fixing.api import fix
from tests.growth import FAMILIES

# 4^1.3, as much again for a busy machine, and what is too short to be measured.
RATIO, LEAST = 12.0, 0.03
QUICK = ("C2f", "If")  # the others have names and code in common with these

SOME = ("convolutions", "residual", "C2f", "Split and Concat", "fan-out", "wide Concat")


def _families(names):
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def _seconds(work, model) -> float:
    gc.collect()
    begin = time.process_time()
    work(model)
    return time.process_time() - begin


def _grows_with_the_input(work, family: str, size: int) -> None:
    work(FAMILIES["Relu"](1))
    small, large = FAMILIES[family](size), FAMILIES[family](4 * size)
    before = max(min(_seconds(work, small) for _ in range(2)), LEAST)
    assert min(_seconds(work, large) for _ in range(2)) < RATIO * before


@pytest.mark.parametrize("family", _families(FAMILIES))
def test_predict(family):
    _grows_with_the_input(lambda model: qdqtool.predict(model, target="trt8.5").as_json(), family, 300)


@pytest.mark.parametrize("family", _families(SOME))
def test_fix(family):
    _grows_with_the_input(lambda model: fix(model, target="trt8.5").as_json(), family, 150)


@pytest.mark.parametrize("family", _families(SOME))
def test_report(family, tmp_path):
    def work(model):
        qdqtool.report(model, target="trt8.5").save(tmp_path / "page.html")

    _grows_with_the_input(work, family, 100)
