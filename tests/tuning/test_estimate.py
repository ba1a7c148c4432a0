"""What is said before the work starts."""

from __future__ import annotations

import pytest

from qdqtool.tuning.estimate import Estimate


@pytest.mark.parametrize(
    ("seconds", "workers", "end"),
    [
        (3.0, 1, "at most about a minute with 1 worker"),
        (600.0, 2, "at most about 10 minutes with 2 workers"),
        (None, 2, "what an earlier run measured is taken"),
    ],
)
def test_sentence(seconds: float | None, workers: int, end: str) -> None:
    text = Estimate(choices=70, never=20, images=8, seconds=seconds, workers=workers).sentence
    begin = "70 choices to measure on 8 images (20 more cannot pay and are not measured), then combinations: "
    assert text == begin + end
