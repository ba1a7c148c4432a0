"""Everything that may be given as calibration data, one of each, and lists of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.dataset import InputSpec
from calibration.images import DEFAULT_MAX_IMAGES, open_data
from qdqtool import budgets
from qdqtool.errors import DataError
from tests.calibration.nets import write_pictures

SPEC = InputSpec("images", (1, 3, 16, 16))
ROW = np.zeros((1, 3, 16, 16), np.float32)


def refusal(source: object, inputs: list[InputSpec] | None = None, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_data(source, [SPEC] if inputs is None else inputs, **options)
    return str(caught.value)


def test_512_images_unless_told() -> None:
    assert DEFAULT_MAX_IMAGES == 512
    rows = [{"images": ROW}] * 600
    assert [len(open_data(rows, [SPEC])), len(open_data(rows, [SPEC], max_images=1))] == [512, 1]
    for count in (0, -1):
        told = f"the number of calibration images is {count}; it must be at least 1"
        assert refusal(rows, max_images=count) == told
    assert refusal(rows, []) == "the model has no inputs to calibrate with"
    assert refusal(3.5) == "calibration data of type float is not understood; give a folder of images"


def test_names_of_files_decide(tmp_path: Path) -> None:
    (picture,) = write_pictures(tmp_path / "pictures", 1, suffix=".PNG")
    np.save(tmp_path / "a.npy", ROW)
    np.savez(tmp_path / "b.NPZ", images=ROW)
    (tmp_path / "b.NPZ.npz").rename(tmp_path / "b.NPZ")
    for name in ("l.txt", "l.LST", "l.list"):
        (tmp_path / name).write_text(str(picture))
    for name in ("a.npy", "b.NPZ", "l.txt", "l.LST", "l.list", "pictures"):
        path = tmp_path / name
        assert [len(list(open_data(p, [SPEC]))) for p in (path, str(path), f"file://{path}")] == [1, 1, 1], name
    assert len(list(open_data(picture, [SPEC]))) == 1
    (tmp_path / "c.csv").write_text("")
    told = "not a folder, a list of images (.txt), an image, .npz or .npy"
    assert refusal(tmp_path / "c.csv") == f"{tmp_path / 'c.csv'}: {told}"
    assert refusal(tmp_path / "no.png") == f"{tmp_path / 'no.png'}: no such file or folder"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == (
        f"{tmp_path / 'empty'}: no images (bmp, jpeg, jpg, png, webp) and no npz or npy files in this folder")
    np.save(tmp_path / "pictures" / "z.npy", ROW)
    assert len(open_data(tmp_path / "pictures", [SPEC])) == 1, "pictures before arrays"


def test_paths_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the list first, else from the current folder; missing ones are told where they would be beside it."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder, names in ((beside, ("both.png", "one.png")), (here, ("both.png", "two.png"))):
        (path,) = write_pictures(folder, 1)
        for name in names:
            (folder / name).write_bytes(path.read_bytes())
    monkeypatch.chdir(here)
    listing = beside / "list.txt"
    listing.write_text("# one a line\n\n  both.png  \none.png\ntwo.png\nthree.png\n#x\n")
    source: Any = open_data(listing, [SPEC]).source
    assert source.paths == [beside / "both.png", beside / "one.png", Path("two.png"), beside / "three.png"]
    listing.write_text("# nothing\n \n")
    assert refusal(listing) == f"{listing}: lists no images"
    listing.write_bytes(b"a.png\n\nb\0.png\n")
    assert refusal(listing) == f"{listing}: line 3: no file name can hold a NUL"
    listing.write_bytes(b"\xff\n")
    assert refusal(listing).startswith(f"{listing}: cannot be read as a list of images: 'utf-8'")
    monkeypatch.setattr(budgets, "LIST_FILE", 8)
    listing.write_text("both.png")
    assert len(open_data(listing, [SPEC])) == 1
    listing.write_text("both.png\n")
    assert "the limit is 8 bytes" in refusal(listing)
