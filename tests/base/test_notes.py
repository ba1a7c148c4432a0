"""Notes: their words are those of their remark with its values, and stay with it wherever a note goes."""

import pickle
import re
from pathlib import Path

import pytest

from qdqtool.base.notes import Note, Remark, remarks

HOME = Path(__file__).parents[2]


def test_words_are_made_of_values() -> None:
    note = Remark.WEIGHTS_COPIED(count=1)
    assert note == "1 weight tensor was copied for nodes that shared one"
    assert (
        Remark.WEIGHTS_COPIED(count=2) == "2 weight tensors were copied for nodes that shared one"
    )
    assert Remark.FEW_IMAGES(images=1, enough=100) == (
        "only 1 calibration image; 100 or more give steadier ranges"
    )
    assert Remark.UNTYPED_TIMES(files=["a", "b{c}"]).startswith("a and b{c}: times of layers")
    assert Remark.SLOWED(watts=70.0, clock=1590.4, least=1200.6) == (
        "70 W may not keep 1590 MHz under load: the upper end is for 1201 MHz; `clock` is better"
    )
    kept = [("a", 65504.0), ("b", 7e4)]
    assert Remark.STAY_FP32(count=2, kept=kept).endswith(
        "nears FP16's 65504: a (6.55e+04), b (7e+04)"
    )
    names = [f"n{i}" for i in range(6)]
    assert Remark.NOT_SHOWN(missing=names) == (
        "with these hops the part does not show n0, n1, n2, n3 and 2 more; give more, or no `hops`"
    )
    changed = [(name, "INT8", "INT8", "INT8", "FLOAT") for name in names[:4]]
    assert Remark.PREDICTED_OTHERWISE(convolutions=changed).endswith(
        "n1 (INT8 to INT8, here INT8 to FLOAT), n2 (INT8 to INT8, here INT8 to FLOAT) and 1 more"
    )
    assert Remark.CHECKED_DIFFERENCES(builder="b", differences=[("INT8", "FP16"), ("x", "y")]) == (
        "b: built, but predicted INT8, built FP16, predicted x, built y"
    )
    with pytest.raises(KeyError):
        Remark.WEIGHTS_COPIED()


def test_a_note_keeps_what_it_says() -> None:
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


def test_each_remark_is_made_and_no_two_say_the_same() -> None:
    sources = "\n".join(
        p.read_text(encoding="utf-8")
        for package in ("qdqtool", "calibration")
        for p in (HOME / package).rglob("*.py")
    )
    made = set(re.findall(r"\bRemark\.([A-Z0-9_]+)", sources))
    assert made == {remark.name for remark in Remark} == set(Remark.__members__), (
        "an alias has another's words"
    )
