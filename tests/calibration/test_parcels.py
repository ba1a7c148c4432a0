"""Packed texts come out as they went in."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import pytest

from calibration.parcels import Parcel, Paths, Texts

PIECES = [b"", b"a", b"\0" * 300, bytes(range(256)), b"", b"x" * 70_000]


@pytest.mark.parametrize("pieces", [[], [b""], [b"", b""], [b"a"], PIECES])
def test_pieces(pieces: list[bytes]) -> None:
    there = pickle.loads(pickle.dumps(Parcel(pieces)))
    assert isinstance(there, Parcel) and list(there) == pieces and len(there) == len(pieces)
    assert there[1:3] == pieces[1:3]


def test_each_piece_follows_its_length_and_all_are_packed() -> None:
    """As two versions that share a cluster have to agree on it."""
    _, (data,) = Parcel([b"ab", b""]).__reduce__()
    assert zlib.decompress(data) == b"\0\0\0\2ab\0\0\0\0"
    _, (data,) = Parcel([b"picture"] * 1000).__reduce__()
    assert len(data) < 1000


def test_texts_and_paths() -> None:
    texts = pickle.loads(pickle.dumps(Texts(["a", "é", "\udcff"])))
    assert (list(texts), texts[-1], texts[:2], len(texts)) == (["a", "é", "\udcff"], "\udcff", ["a", "é"], 3)
    paths = pickle.loads(pickle.dumps(Paths([Path("a"), Path("/b/../c")])))
    assert (list(paths), paths[1:], len(paths)) == ([Path.cwd() / "a", Path("/c")], [Path("/c")], 2)
