from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calibration.dataset import InputSpec
from calibration.images import open_data
from qdqtool.errors import DataError

SPEC = InputSpec("images", (1, 3, 4, 4))
TWO = [SPEC, InputSpec("size", (1, 2), "int64")]
RNG = np.random.default_rng(0)
STACK = RNG.random((7, 3, 4, 4), np.float32)
SIZES = np.arange(14).reshape(7, 2)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_npz_of_stacked_arrays(tmp_path: Path, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)(tmp_path / "c.npz", images=STACK, size=SIZES, unused=np.zeros(3))
    data = open_data(tmp_path / "c.npz", TWO)
    assert len(data) == 7
    for _ in range(2):
        for index, sample in enumerate(data):
            assert (sample["images"] == STACK[index : index + 1]).all()
            assert (sample["size"] == SIZES[index : index + 1]).all() and sample["size"].dtype == np.int64


def test_an_npy_is_read_row_by_row_with_other_types(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK.astype(">f8"))
    samples = list(open_data(tmp_path / "c.npy", [SPEC], max_images=3))
    assert [s["images"].dtype for s in samples] == [np.float32] * 3
    for sample, index in zip(samples, (0, 3, 6), strict=True):
        assert (sample["images"][0] == STACK[index]).all()


def test_one_array_of_another_name_feeds_the_only_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", data=STACK)
    assert len(list(open_data(tmp_path / "c.npz", [SPEC]))) == 7


def test_a_folder_with_one_npz_for_each_sample(tmp_path: Path) -> None:
    for index in range(3):
        np.savez(tmp_path / f"{index}.npz", images=STACK[index], size=SIZES[index : index + 1])
    samples = list(open_data(tmp_path, TWO))
    assert [s["images"].shape for s in samples] == [(1, 3, 4, 4)] * 3
    assert (samples[2]["size"] == SIZES[2:3]).all()


def test_stacks_of_batches(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK[:6].reshape(3, 2, 3, 4, 4))
    samples = list(open_data(tmp_path / "c.npy", [InputSpec("images", (2, 3, 4, 4))]))
    assert len(samples) == 3 and (samples[1]["images"] == STACK[2:4]).all()


def test_rows_are_joined_to_a_fixed_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK)
    samples = list(open_data(tmp_path / "c.npy", [InputSpec("images", (4, 3, 4, 4))]))
    assert [len(s["images"]) for s in samples] == [4, 4]
    assert (samples[1]["images"][:3] == STACK[4:]).all() and (samples[1]["images"][3] == STACK[4]).all()


def test_arrays_in_memory() -> None:
    assert len(open_data({"images": STACK}, [SPEC])) == 7
    assert len(list(open_data(STACK, [SPEC], max_images=2))) == 2
    listed = open_data([{"images": row} for row in STACK], [SPEC])
    assert [s["images"].shape for s in listed] == [(1, 3, 4, 4)] * 7
    assert listed.fingerprint and listed.fingerprint != open_data([{"images": STACK[0]}], [SPEC]).fingerprint
    once = open_data(({"images": row} for row in STACK), [SPEC], max_images=5)
    assert once.fingerprint == ""
    with pytest.raises(TypeError):
        len(once)
    assert len(list(once)) == 5
    with pytest.raises(DataError, match="used up"):
        list(once)


class Reader:
    """Something that can be gone through again but has no length."""

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        return iter([{"images": row} for row in STACK])


def test_an_iterable_without_length_can_be_used_again() -> None:
    data = open_data(Reader(), [SPEC])
    assert len(list(data)) == 7 and len(list(data)) == 7


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    def file(name: str, **arrays: npt.NDArray[Any]) -> Path:
        np.savez(tmp_path / name, allow_pickle=True, **arrays)
        return tmp_path / name

    objects = np.array([{"a": 1}, None], dtype=object)
    np.save(tmp_path / "objects.npy", objects)
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "text.npz").write_text("no zip")
    whole = file("whole.npz", images=STACK).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "short.npy", STACK)
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:600])
    np.save(tmp_path / "fortran.npy", np.asfortranarray(STACK))
    cases = [
        (file("names.npz", pictures=STACK, size=SIZES), TWO, "no array for the model's input 'images'"),
        (file("shape.npz", images=STACK[:, :, :2]), [SPEC], r"\[3, 2, 4\]|\[1, 3, 2, 4\]"),
        (file("lengths.npz", images=STACK, size=SIZES[:3]), TWO, "different numbers of samples"),
        (file("none.npz", images=STACK[:0]), [SPEC], "no samples"),
        (file("objects.npz", images=objects), [SPEC], "Python objects"),
        (file("floats.npz", images=STACK, size=SIZES + 0.5), TWO, "holds float64"),
        (tmp_path / "objects.npy", [SPEC], "Python objects"),
        (tmp_path / "cut.npy", [SPEC], "not a numpy array"),
        (tmp_path / "text.npz", [SPEC], "not an npz"),
        (tmp_path / "half.npz", [SPEC], "not an npz"),
        (tmp_path / "fortran.npy", [SPEC], "Fortran"),
        (tmp_path / "whole.npz", TWO, "no array for the model's input 'size'"),
    ]
    for path, specs, expected in cases:
        with pytest.raises(DataError, match=expected) as caught:
            open_data(path, specs)
        assert "\n" not in str(caught.value) and path.name in str(caught.value)
    with pytest.raises(DataError, match="cut off"):
        list(open_data(tmp_path / "short.npy", [SPEC]))
    with pytest.raises(DataError, match="give a dict"):
        list(open_data([STACK[0]], [SPEC]))
    with pytest.raises(DataError, match="3 rows"):
        list(open_data([{"images": STACK[:3]}], [InputSpec("images", (2, 3, 4, 4))]))


def test_a_negative_dimension_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "c.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (-5, 3, 4, 4)})
        file.write(bytes(1000))
    with pytest.raises(DataError, match=r"declares the shape \[-5, 3, 4, 4\]"):
        open_data(tmp_path / "c.npy", [SPEC])


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_value_beyond_the_input_type_becomes_an_infinity(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK.astype(np.float64) * 1e300)
    assert np.isinf(next(iter(open_data(tmp_path / "c.npy", [SPEC])))["images"]).all()


def test_an_array_larger_than_memory_allows_is_not_read_whole(tmp_path: Path) -> None:
    shape = (2000, 3, 160, 160)  # 614 MB, sparse on disk
    path = tmp_path / "large.npy"
    header = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.float32)) | {"shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * int(np.prod(shape)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    samples = sum(1 for _ in open_data(path, [InputSpec("x", (1, 3, 160, 160))], max_images=300))
    assert samples == 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes
