"""Notes: texts made of a remark and its values, which stay with them."""

import pickle
import re
from pathlib import Path

import pytest

from qdqtool.util.notes import Note, Remark, remarks

HOME = Path(__file__).parents[2]


CHANGED = [(f"n{i}", "INT8", "INT8", "INT8", "FLOAT") for i in range(4)]


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (Remark.WEIGHTS_COPIED(count=1), "1 weight tensor was copied"),
        (Remark.WEIGHTS_COPIED(count=2), "2 weight tensors were copied"),
        (Remark.FEW_IMAGES(images=1, enough=100), "only 1 calibration image; 100 or more"),
        (Remark.UNTYPED_TIMES(files=["a", "b{c}"]), "a and b{c}: layer times without"),
        (
            Remark.STAY_FP32(count=2, kept=[("a", 65504.0), ("b", 7e4)]),
            "a (6.55e+04), b (7e+04)",
        ),
        (Remark.NOT_SHOWN(missing=[f"n{i}" for i in range(6)]), "n0, n1, n2, n3 and 2 more"),
        (
            Remark.PREDICTED_OTHERWISE(convolutions=CHANGED),
            "n2 (INT8 to INT8, here INT8 to FLOAT) and 1 more",
        ),
        (
            Remark.CHECKED_DIFFERENCES(builder="b", differences=[("INT8", "FP16"), ("x", "y")]),
            "predicted INT8, built FP16, predicted x, built y",
        ),
    ],
)
def test_note_formats_values(note: Note, text: str) -> None:
    assert text in note


def test_note_without_its_values_is_an_error() -> None:
    with pytest.raises(KeyError):
        Remark.WEIGHTS_COPIED()


def test_note_keeps_remark_and_values() -> None:
    note = pickle.loads(pickle.dumps(Remark.RESUMED(cache="c.npz", images=3)))
    assert (type(note), note.remark, note.values) == (
        Note,
        Remark.RESUMED,
        {"cache": "c.npz", "images": 3},
    )
    hidden = note.renamed(lambda text: text.replace("c.npz", "file"))
    assert hidden == "file: resumed after 3 images" and hidden.values == {
        "cache": "file",
        "images": 3,
    }
    assert hidden.remark is Remark.RESUMED
    assert remarks([note, "a user's own"]) == [Remark.RESUMED, None]


def test_each_remark_is_used_and_unique() -> None:
    sources = "\n".join(
        p.read_text(encoding="utf-8")
        for package in ("qdqtool", "calibration")
        for p in (HOME / package).rglob("*.py")
    )
    used = set(re.findall(r"\bRemark\.([A-Z0-9_]+)", sources))
    assert used == {remark.name for remark in Remark}
    assert len(Remark) == len(Remark.__members__), "two remarks have the same words"
