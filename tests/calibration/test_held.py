"""Samples that have to be what another process saw."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from calibration.dataset import InputSpec
from calibration.held import Held, shared
from calibration.images import open_data
from qdqtool.errors import ClusterError
from tests.calibration.nets import write_pictures

SPEC = InputSpec("images", (1, 3, 16, 16))


def test_the_same_samples_under_the_same_numbers(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, 5)
    here = open_data(tmp_path, [InputSpec("images", (2, 3, 16, 16))], max_images=3)
    there = pickle.loads(pickle.dumps(shared(here)))
    assert (len(there), there.batch, list(there.indices)) == (2, 2, [0, 1, 2])
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one["images"], other["images"])
    held = there.source
    assert isinstance(held, Held) and (held.count(), held.is_images, held.single_rows) == (3, True, True)
    assert [held.name(k) for k in range(3)] == ["picture000.png", "picture002.png", "picture004.png"]
    assert held.settings() == here.source.settings() and held.digest(1) == here.source.digest(2)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ClusterError) as caught:
        held.load(1)
    assert str(caught.value) == "picture002.png is another file there; let all machines see the same files"
    paths[2].unlink()
    with pytest.raises(ClusterError) as caught:
        held.load(1)
    assert str(caught.value) == "picture002.png cannot be read there; let all machines see the same files"


def test_no_samples_are_none() -> None:
    assert list(shared(open_data([], [SPEC]))) == []
