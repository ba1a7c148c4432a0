"""Records and texts of exceptions."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from qdqtool.buildlog.names import base_name
from qdqtool.util.records import field_values, record, replace_fields
from qdqtool.util.text import drop_repeated_sentences, reason_of

# A record behaves as a frozen dataclass.


@record
class Base:
    reason: ClassVar[str] = "base"
    name: str
    size: int = 3


@record
class Part(Base):
    reason: ClassVar[str] = "part"
    last: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reference:
    name: str
    size: int = 3
    last: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("a",), {}),
        (("a", 1, (2,)), {}),
        ((), {"last": (1,), "name": "b"}),
        (("a", 4), {"last": ()}),
    ],
)
def test_record_equals_dataclass(args: tuple[object, ...], named: dict[str, object]) -> None:
    part, reference = Part(*args, **named), Reference(*args, **named)  # type: ignore[arg-type]
    assert field_values(part) == dataclasses.astuple(reference)
    assert repr(part) == repr(reference).replace("Reference", "Part")
    assert part == Part(*args, **named) and hash(part) == hash(Part(*args, **named))  # type: ignore[arg-type]
    assert part != Base(part.name, part.size) and part != replace_fields(part, size=99)
    assert replace_fields(part, size=99) == Part(part.name, 99, part.last)
    assert pickle.loads(pickle.dumps(part)) == part == copy.deepcopy(part)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {}),
        (("a", 1, (), 2), {}),
        (("a",), {"name": "b"}),
        (("a",), {"other": 1}),
        (("a",), {"reason": "x"}),
    ],
)
def test_record_rejects_arguments_like_dataclass(
    args: tuple[object, ...], named: dict[str, object]
) -> None:
    for kind in (Reference, Part):
        with pytest.raises(TypeError):
            kind(*args, **named)  # type: ignore[call-arg]


def test_record_cannot_be_changed() -> None:
    part = Part("a")
    with pytest.raises(AttributeError):
        part.name = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del part.size
    assert field_values(part) == ("a", 3, ())


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("a_clone_1_clone_20", "a"),
        ("a_clone_1b", "a_clone_1b"),
        ("_clone_", "_clone_"),
        ("a_clone_1_quantize_scale_node_clone_2", "a"),
    ],
)
def test_base_name_has_no_suffixes_of_clones(name: str, base: str) -> None:
    assert base_name(name) == base


@pytest.mark.parametrize(
    ("error", "options", "reason"),
    [
        (ValueError("a\n b"), {}, "a b"),
        (ValueError(), {}, "ValueError"),
        (ValueError("x" * 300), {}, "x" * 200),
        (ValueError("xyz"), {"length": 2}, "xy"),
        (ValueError("\n first\nsecond"), {"first_line": True}, "first"),
        (ValueError(" \n"), {"first_line": True}, "ValueError"),
    ],
)
def test_reason_of_is_one_short_line(error: Exception, options: Any, reason: str) -> None:
    assert reason_of(error, **options) == reason


def test_hash_of_pickled_record_is_computed_anew() -> None:
    # Hashes of texts differ between processes.
    script = (
        "import pickle, sys; from tests.util.test_base import Part;"
        "part = pickle.load(sys.stdin.buffer); sys.exit(hash(part) != hash(Part('a', last=(1, 2))))"
    )
    part = Part("a", last=(1, 2))
    hash(part)
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    data = pickle.dumps(part)
    subprocess.run([sys.executable, "-c", script], input=data, env=environment, check=True)


def test_repeated_sentences_are_dropped() -> None:
    texts = ['a has 1. It says: "No." Change it.', 'b has 1. It says: "No." Change it.', "c."]
    assert drop_repeated_sentences(texts) == [texts[0], "b has 1.", "c."]
