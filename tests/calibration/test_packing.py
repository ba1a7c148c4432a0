"""Packed statistics against merging and against counting everything in one go."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.packing import absorb, pack
from calibration.statistics import TensorStatistics

BINS = 64
ARRAYS = st.lists(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=12), min_size=1, max_size=6
)


def state(part: TensorStatistics | None) -> Any:
    if part is None:
        return None
    counter = part.counter
    return (part.count, part.nonfinite, part.minimum, part.maximum, counter.top, counter.counts.tolist(),
            state(part.focus))


@settings(deadline=None, max_examples=150)
@given(ARRAYS, st.randoms(use_true_random=False), st.booleans())
def test_any_partition_in_any_order_is_the_whole(lists: list[list[float]], random: Any, focused: bool) -> None:
    arrays = [np.array(values, np.float32) for values in lists]
    whole = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    packets = []
    for array in arrays:
        parts = {"t": TensorStatistics.of(array, BINS), "u": TensorStatistics.of(array[::2] * 0.5, BINS)}
        whole["t"].add(array)
        whole["u"].add(array[::2] * 0.5)
        if focused and len(array) % 2:
            parts["u"].add_focus([array[:1] * 0.5])
            whole["u"].add_focus([array[:1] * 0.5])
        packets.append(pickle.loads(pickle.dumps(pack(parts, ["t", "u"]))))
    random.shuffle(packets)
    found = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    for packet in packets:
        absorb(found, ["t", "u"], packet)
    assert {n: state(p) for n, p in found.items()} == {n: state(p) for n, p in whole.items()}


def test_counts_take_no_more_bytes_than_they_need() -> None:
    part = TensorStatistics(BINS)
    part.add(np.full(300, 1.0, np.float32))
    part.add(np.full(200, 0.75, np.float32))
    packed = pack({"t": part}, ["t"])
    assert packed["numbers"][0].tolist()[-1] == 2  # 300 does not fit one byte
    filled = np.flatnonzero(part.counter.counts[1:])
    assert len(packed["counts"]) == 2 * (int(filled[-1]) - int(filled[0]) + 1)


@pytest.mark.parametrize(("count", "width"), [(1, 1), (255, 1), (256, 2), (65535, 2), (65536, 4)])
def test_counts_take_the_fewest_bytes(count: int, width: int) -> None:
    part = TensorStatistics.of(np.append(np.full(count, 0.75), [0.5, np.nan, 0.0]), 64)
    packed = pack({"t": part}, ["t"])
    assert packed["numbers"].tolist() == [[count + 2, 1, 0, 1, 1 + 19 * 32, width]]
    assert packed["lengths"] == [width * (16 + 1)] and len(packed["counts"]) == width * 17
    assert packed["range"].tolist() == [[0.0, 0.75]] and packed["focused"] == [] and packed["spots"] == []
    found = {"t": TensorStatistics(64)}
    for _ in range(2):
        absorb(found, ["t"], packed)
    assert np.array_equal(found["t"].counter.counts, 2 * part.counter.counts) and found["t"].nonfinite == 2


@pytest.mark.parametrize(("count", "width"), [((1 << 32) - 1, 4), (1 << 32, 8), (1 << 40, 8)])
def test_counts_of_billions(count: int, width: int) -> None:
    part = TensorStatistics(64)
    part.count = part.counter.counts[7] = count
    packed = pack({"t": part}, ["t"])
    assert packed["numbers"][0].tolist()[3:] == [0, 7, width] and packed["lengths"] == [width]
    found = {"t": TensorStatistics(64)}
    absorb(found, ["t"], packed)
    assert found["t"].counter.counts[7] == count == found["t"].count


def test_nothing_counted_and_what_is_looked_at() -> None:
    empty, looked = TensorStatistics(64), TensorStatistics.of(np.array([0.5, -0.25]), 64)
    looked.add_focus([np.array([0.5])])
    looked.spots = [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), np.float32)]
    tensors = {"a": empty, "b": looked, "c": looked.copy()}
    packed = pack(tensors, ["c", "a", "b"])
    assert packed["focused"] == [0, 2] and packed["lengths"][1] == 0
    assert packed["numbers"][1].tolist() == [0, 0, empty.counter.top, 0, 1, 1]
    assert packed["spots"] == [(0, 3, 2), (0, 1, 2), (2, 3, 2), (2, 1, 2)]
    found = {n: TensorStatistics(64) for n in tensors}
    absorb(found, ["c", "a", "b"], packed)
    assert found["a"].focus is None and found["a"].count == 0
    for name in "bc":
        part, kept = found[name], found[name].focus
        assert (part.count, part.minimum, part.maximum) == (2, -0.25, 0.5)
        assert kept is not None and (kept.count, kept.bins, kept.minimum) == (1, 64, 0.5)
        assert [s.tolist() for s in part.spots] == [s.tolist() for s in looked.spots]
