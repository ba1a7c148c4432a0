import pickle

from qdqtool.util.notes import Note
from tests.notes import note_codes


def test_note_keeps_code_and_values() -> None:
    note = Note("c.npz: resumed after 3 images", code="resumed", cache="c.npz", images=3)
    copy = pickle.loads(pickle.dumps(note))
    assert (type(copy), copy, copy.code) == (Note, "c.npz: resumed after 3 images", "resumed")
    assert copy.values == {"cache": "c.npz", "images": 3}


def test_note_codes_are_empty_for_plain_strings() -> None:
    assert note_codes([Note("a", code="resumed"), Note("b"), "a user's text"]) == [
        "resumed",
        "",
        "",
    ]
