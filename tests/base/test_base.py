"""Records."""

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from qdqtool.base.records import contents, record, replaced
from qdqtool.base.text import reason_of
from qdqtool.buildlog.names import base_name

# Records: a frozen dataclass's behaviour, compared with one.


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
class Known:
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
def test_a_record_holds_what_a_dataclass_holds(
    args: tuple[object, ...], named: dict[str, object]
) -> None:
    ours, known = Part(*args, **named), Known(*args, **named)  # type: ignore[arg-type]
    assert contents(ours) == dataclasses.astuple(known)
    assert repr(ours) == repr(known).replace("test_records.", "").replace("Known", "Part")
    assert ours == Part(*args, **named) and hash(ours) == hash(Part(*args, **named))  # type: ignore[arg-type]
    assert ours != Base(ours.name, ours.size) and ours != replaced(ours, size=99)
    assert replaced(ours, size=99) == Part(ours.name, 99, ours.last)
    assert pickle.loads(pickle.dumps(ours)) == ours == copy.deepcopy(ours)


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
def test_what_a_dataclass_refuses_a_record_refuses(
    args: tuple[object, ...], named: dict[str, object]
) -> None:
    for kind in (Known, Part):
        with pytest.raises(TypeError):
            kind(*args, **named)  # type: ignore[call-arg]


def test_a_record_cannot_be_changed() -> None:
    made = Part("a")
    with pytest.raises(AttributeError):
        made.name = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del made.size
    assert contents(made) == ("a", 3, ())


def test_suffixes_and_exceptions() -> None:
    assert base_name("a_clone_1_clone_20") == "a"
    assert (base_name("a_clone_1b"), base_name("_clone_")) == ("a_clone_1b", "_clone_")
    assert base_name("a_clone_1_quantize_scale_node_clone_2") == "a"
    assert reason_of(ValueError("a\n b")) == "a b" and reason_of(ValueError()) == "ValueError"
    assert reason_of(ValueError("x" * 300)) == "x" * 200 and reason_of(ValueError("xyz"), 2) == "xy"
    assert reason_of(ValueError("\n first\nsecond"), first_line=True) == "first"
    assert reason_of(ValueError(" \n"), first_line=True) == "ValueError"


def test_a_copy_of_a_record_works_out_its_own_hash():
    """In another process texts have others."""
    part = Part("a", last=(1, 2))
    assert hash(part) == hash(Part("a", last=(1, 2))) and "_hash" in vars(part)
    for again in (copy.copy(part), pickle.loads(pickle.dumps(part))):
        assert again == part and "_hash" not in vars(again)
