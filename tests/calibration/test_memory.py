"""Arrays in memory: when they are rows of samples, and by what they are recognised again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calibration.arrays import MemorySource, rows_of
from calibration.dataset import InputSpec
from qdqtool.errors import DataError

SPEC = InputSpec("x", (1, 2))
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)
BLOCK = 65536
Shape = tuple[int | None, ...]


@pytest.mark.parametrize(
    ("inputs", "arrays", "samples"),
    [
        ({"x": (1, 2)}, {"x": (5, 2)}, 5),
        ({"x": (None, 2)}, {"x": (5, 2)}, 5),
        ({"x": (5, 2)}, {"x": (5, 2)}, 1),  # a fixed batch is one sample
        ({"x": (1, 2)}, {"x": (5, 2), "more": (3, 1)}, 5),
        ({"x": (1, 2)}, {"x": (2,)}, 1),
        ({"x": (1, 2)}, {"x": (5, 1, 2)}, 1),
        ({"x": (1, 2)}, {"other": (5, 2)}, 1),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2), "y": (5, 1)}, 5),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2), "y": (4, 1)}, 1),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2)}, 1),
        ({"x": (1, 2), "y": ()}, {"x": (5, 2), "y": ()}, 1),
        ({"x": (1, 2), "y": (3,)}, {"x": (5, 2), "y": (3,)}, 1),
        ({"x": ()}, {"x": ()}, 1),
    ],
)
def test_stacked_arrays_are_rows(
    inputs: dict[str, Shape], arrays: dict[str, tuple[int, ...]], samples: int
) -> None:
    given = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in arrays.items()}
    found = rows_of(given, [InputSpec(n, s) for n, s in inputs.items()])
    assert len(found) == samples
    if samples == 1:
        assert list(found[0]) == list(given)
        return
    assert all(list(row) == list(inputs) for row in found)
    for k, row in enumerate(found):
        for name, array in row.items():
            assert (array == given[name][k : k + 1]).all() and np.shares_memory(array, given[name])


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 17 * BLOCK, 40 * BLOCK + 12])
def test_an_array_is_its_name_type_shape_and_sixteen_blocks(size: int) -> None:
    values = (np.arange(size) * 7 % 251).astype(np.uint8)
    step = max(BLOCK, (size - BLOCK) // 15)
    blocks = [values[at : at + BLOCK].tobytes() for at in range(0, size, step)]
    found = MemorySource([{"x": values}], [SPEC]).digest(0)
    assert found == digest(f"xuint8({size},)".encode(), *blocks)


def test_digests_tell_arrays_apart_and_nothing_else() -> None:
    def of(**arrays: npt.NDArray[Any]) -> bytes:
        return MemorySource([arrays], [SPEC]).digest(0)

    assert of(a=ROWS, b=ROWS) == of(b=ROWS, a=ROWS)
    assert of(a=ROWS.T) == of(a=np.ascontiguousarray(ROWS.T))
    other = [of(a=ROWS), of(b=ROWS), of(a=ROWS[:4]), of(a=ROWS.reshape(2, 5)), of(a=ROWS.view(np.int32)), of(a=-ROWS)]
    assert len(set(other)) == 6
    assert MemorySource([ROWS], [SPEC]).digest(0) == digest(), "no sample; it is refused when it is read"
    assert MemorySource(iter([{"a": ROWS}]), [SPEC]).digest(0) == b""


def test_lists_and_what_can_be_gone_through_once() -> None:
    listed = MemorySource([{"x": r} for r in ROWS], [SPEC])
    assert (listed.count(), listed.repeatable, listed.random_access) == (5, True, True)
    for _ in range(2):
        listed.restart()
        assert listed.load(4)["x"].tolist() == [[8, 9]]
    part = listed.portion([3, 0])
    assert [part.load(k)["x"].tolist() for k in (0, 1)] == [[[6, 7]], [[0, 1]]]
    once = MemorySource(iter([{"x": ROWS[0]}]), [SPEC])
    assert (once.count(), once.repeatable, once.random_access) == (None, False, False)
    once.restart()
    assert once.load(0)["x"].tolist() == [[0, 1]]
    with pytest.raises(IndexError):
        once.load(1)
    with pytest.raises(DataError, match=r"^the calibration data was a one-time iterator and is used up; give a list$"):
        once.restart()
    with pytest.raises(DataError, match="from an iterator cannot be shared out to a cluster"):
        once.portion([0])


def test_a_sample_that_is_no_dict_is_told_with_its_number() -> None:
    with pytest.raises(DataError, match=r"^calibration sample 1 is a list; give a dict of name to array$"):
        MemorySource([{"x": ROWS[0]}, [1.0]], [SPEC]).load(1)
    with pytest.raises(DataError, match=r"^calibration sample 0: array 'x' is \[3\], the model's input 'x' takes"):
        MemorySource([{"x": np.zeros(3)}], [InputSpec("x", (1, 2, 2))]).load(0)
