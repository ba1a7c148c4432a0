"""Cost grows with the input: four times the nodes take at most about four times the time."""

import gc
import time

import pytest

import qdqtool
from tests.growth import FAMILIES

# 4^1.3, as much again for a busy machine, and what is too short to be measured.
RATIO, LEAST = 12.0, 0.03


def _seconds(work, model) -> float:
    gc.collect()
    begin = time.process_time()
    work(model)
    return time.process_time() - begin


@pytest.mark.parametrize("family", FAMILIES)
def test_predict(family):
    def work(model):
        qdqtool.predict(model, target="trt8.5").as_json()

    work(FAMILIES[family](1))
    small, large = FAMILIES[family](300), FAMILIES[family](1200)
    before = max(min(_seconds(work, small) for _ in range(2)), LEAST)
    assert min(_seconds(work, large) for _ in range(2)) < RATIO * before
