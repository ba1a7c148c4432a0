from __future__ import annotations

import contextlib
import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import cache, images, runner
from calibration.cache import (
    Statistics,
    load_progress,
    load_statistics,
    read_tensorrt_cache,
    save_statistics,
    write_tensorrt_cache,
)
from calibration.runner import collect
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import conv_net, write_pictures

NAMES = ["images", "c1", "r2"]


def same(a: Statistics, b: Statistics) -> bool:
    return a.images == b.images and all(
        (a[n].count, a[n].nonfinite, a[n].minimum, a[n].maximum, a[n].counter.top)
        == (b[n].count, b[n].nonfinite, b[n].minimum, b[n].maximum, b[n].counter.top)
        and np.array_equal(a[n].counter.counts, b[n].counter.counts)
        and sorted(map(bytes, a[n].spots)) == sorted(map(bytes, b[n].spots))
        for n in {*a, *b}
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "in", 8)
    return tmp_path / "in"


def no_session(*_: object) -> Any:
    raise AssertionError("nothing should be run")


def test_statistics_come_back_as_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    some = rng.normal(0, 1e-3, 999)
    arrays = {"x/y:0": some, "zero": np.zeros(5), "nan": np.array([np.nan, 1.0]), "none": np.zeros(0)}
    stats = Statistics(
        {n: TensorStatistics.of(a) for n, a in arrays.items()},
        images=3, fingerprint="ab", warnings=["w"], skipped=[("p.png", "cut")],
    )
    save_statistics(stats, tmp_path / "s.npz")
    back = load_statistics(tmp_path / "s.npz")
    assert same(stats, back) and list(back) == list(stats)
    assert (back.fingerprint, back.warnings, back.skipped) == ("ab", ["w"], [("p.png", "cut")])


def test_a_finished_cache_is_reused_without_running(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.npz"
    (pictures / "broken.png").write_text("no picture")
    first = collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    monkeypatch.setattr(runner, "open_session", no_session)
    again = collect(conv_net(), pictures, ["r2", "images"], cache=file, progress=False)
    assert list(again) == ["r2", "images"]
    assert np.array_equal(again["r2"].counter.counts, first["r2"].counter.counts)
    assert again.images == 8 and again.warnings == first.warnings and again.skipped == first.skipped
    assert again.notes == [f"{file}: reused, 8 images, same model and data; nothing was run"]


def test_another_model_data_or_resolution_is_not_mixed_in(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    before = file.read_bytes()
    for other, options in (
        (conv_net(seed=1), {}), (conv_net(), {"max_images": 5}), (conv_net(), {"bins": 4096})
    ):
        with pytest.raises(DataError, match="`overwrite_cache`"):
            collect(other, pictures, NAMES, cache=file, progress=False, **options)
        assert file.read_bytes() == before
    collect_again = functools.partial(collect, overwrite_cache=True)
    other_model = collect_again(conv_net(seed=1), pictures, NAMES, cache=file, progress=False)
    assert "another model" in other_model.notes[0]
    assert same(other_model, collect(conv_net(seed=1), pictures, NAMES, progress=False))
    other_data = collect_again(conv_net(seed=1), pictures, NAMES, cache=file, progress=False, max_images=5)
    assert "other data" in other_data.notes[0] and other_data.images == 5
    finer = collect_again(conv_net(seed=1), pictures, NAMES, cache=file, progress=False, max_images=5, bins=4096)
    assert "number of bins" in finer.notes[0] and finer["c1"].bins == 4096


def test_tensors_that_are_missing_are_added(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    collect(conv_net(), pictures, ["c1"], cache=file, progress=False)
    more = collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    assert more.notes == [f"{file}: reused for all but 2 tensors that it does not have"]
    assert same(more, collect(conv_net(), pictures, NAMES, progress=False))
    assert sorted(load_progress(file).statistics) == sorted(NAMES)


class Stop(BaseException):
    """As Ctrl-C: not an Exception."""


@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_an_interrupted_pass_is_resumed(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    file = tmp_path / "c.npz"
    (pictures / "a-broken.png").write_text("no picture")
    whole = collect(conv_net(), pictures, NAMES, progress=False)

    def interrupted(items: Any, *_: object, **__: object) -> Any:
        for number, item in enumerate(items, 1):
            yield item
            if number == stop_after:
                raise Stop

    loaded: list[str] = []
    real = images.open_data

    def watched(*args: Any) -> Any:
        data = real(*args)
        load = data.source.load

        def counted(index: int) -> Any:
            loaded.append(data.source.name(index))
            return load(index)

        monkeypatch.setattr(data.source, "load", counted)
        return data

    monkeypatch.setattr(runner, "open_data", watched)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "track", interrupted)
        with pytest.raises(Stop):
            collect(conv_net(), pictures, NAMES, cache=file)
    done = load_progress(file)
    assert not done.complete and len(done.done) >= min(stop_after, 1)
    before = set(loaded)
    loaded.clear()
    resumed = collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    assert resumed.notes == [f"{file}: resumed after {done.statistics.images} images"]
    assert len(loaded) + len(done.done) == 9 and len(before | set(loaded)) == 9
    assert same(resumed, whole)
    assert resumed.warnings == whole.warnings and resumed.skipped == whole.skipped
    assert load_progress(file).complete


def test_the_cache_is_saved_as_it_goes(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    real = cache.save_progress

    def counted(progress: cache.Progress, path: Path) -> None:
        real(progress, path)
        saved.append(len(load_progress(path).done))

    monkeypatch.setattr(runner, "save_progress", counted)
    monkeypatch.setattr(runner, "SAVE_SECONDS", 0.0)
    collect(conv_net(), pictures, NAMES, cache=tmp_path / "c.npz", progress=False)
    assert len(saved) > 2 and saved == sorted(saved) and saved[-1] == 8


def test_data_from_an_iterator_is_never_taken_from_the_cache(tmp_path: Path) -> None:
    def generate() -> Any:
        return ({"images": np.random.default_rng(i).random((1, 3, 16, 16), np.float32)} for i in range(3))

    for _ in range(2):
        found = collect(conv_net(), generate(), NAMES, cache=tmp_path / "c.npz", progress=False)
        assert "iterator" in found.notes[0] and found.images == 3


def test_a_damaged_cache_is_one_clear_line(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    whole = file.read_bytes()
    with np.load(file) as archive:
        arrays = dict(archive)
    changed = {
        "counts": arrays["counts"] + 1,
        "numbers": arrays["numbers"][:-1],
        "header": np.frombuffer(b"{}", np.uint8),
        "range": arrays["range"] * np.nan,
    }
    damaged: list[bytes] = [whole[: len(whole) // 2], b"", b"text", b"PK\x03\x04" + bytes(200)]
    for name, array in changed.items():
        np.savez(tmp_path / "x.npz", **(arrays | {name: array}))
        damaged.append((tmp_path / "x.npz").read_bytes())
    np.savez(tmp_path / "x.npz", images=np.zeros(3))
    damaged.append((tmp_path / "x.npz").read_bytes())
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(DataError, match="delete it") as caught:
            collect(conv_net(), pictures, NAMES, cache=file, progress=False)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
        assert file.read_bytes() == data, "left for the user to look at"


def test_bits_flipped_anywhere_never_crash(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    whole = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 150):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(flipped)
        with contextlib.suppress(DataError):
            load_progress(file)


def test_the_folder_of_the_cache_must_exist(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, match="does not exist"):
        collect(conv_net(), pictures, NAMES, cache=tmp_path / "no" / "c.npz", progress=False)
    with pytest.raises(QdqtoolError, match="is a folder"):
        collect(conv_net(), pictures, NAMES, cache=tmp_path, progress=False)


def test_tensorrt_table_round_trip(tmp_path: Path) -> None:
    scales = {"images": 1 / 127, "model/conv:0": 0.25, "(Unnamed Layer* 3) [Activation]_output": 1e-20}
    write_tensorrt_cache(tmp_path / "t.cache", scales)
    lines = (tmp_path / "t.cache").read_text().splitlines()
    assert lines[0] == "TRT-8502-EntropyCalibration2"
    assert lines[1] == "images: 3c010204"  # 1/127 as IEEE 754, big-endian
    assert lines[2] == "model/conv:0: 3e800000"
    back = read_tensorrt_cache(tmp_path / "t.cache")
    assert back == {n: struct.unpack("f", struct.pack("f", s))[0] for n, s in scales.items()}


def test_tensorrts_own_table_is_read(tmp_path: Path) -> None:
    table = tmp_path / "t.cache"
    table.write_text("TRT-8601-MinMaxCalibration\ninput: 3c000000\n\nshort: 3f80\nconv1: 3f800000\n")
    assert read_tensorrt_cache(table) == {
        "input": 0.0078125, "short": struct.unpack(">f", b"\0\0\x3f\x80")[0], "conv1": 1.0
    }


@pytest.mark.parametrize(
    "text", ["", "x: 3f800000\n", "TRT-8\nnocolon\n", "TRT-8\nx: zz\n", "TRT-8\nx: 7f800000\n", "TRT-8\nx: bf800000\n"]
)
def test_other_files_are_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.cache").write_text(text)
    with pytest.raises(DataError, match=r"t\.cache") as caught:
        read_tensorrt_cache(tmp_path / "t.cache")
    assert "\n" not in str(caught.value)


def test_scales_that_no_table_can_hold_are_refused(tmp_path: Path) -> None:
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="'x'"):
            write_tensorrt_cache(tmp_path / "t.cache", {"x": scale})
    assert not (tmp_path / "t.cache").exists()
    with pytest.raises(DataError, match=r"missing\.cache"):
        read_tensorrt_cache(tmp_path / "missing.cache")
