"""Packed statistics against merging and against counting everything in one go."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
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
