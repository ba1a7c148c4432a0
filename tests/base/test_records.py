"""Records: a frozen dataclass's behaviour, compared with one."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from qdqtool.base.records import contents, record, replaced


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


@pytest.mark.parametrize(("args", "named"), [
    (("a",), {}), (("a", 1, (2,)), {}), ((), {"last": (1,), "name": "b"}), (("a", 4), {"last": ()}),
])  # fmt: skip
def test_a_record_holds_what_a_dataclass_holds(args: tuple[object, ...], named: dict[str, object]) -> None:
    ours, known = Part(*args, **named), Known(*args, **named)  # type: ignore[arg-type]
    assert contents(ours) == dataclasses.astuple(known)
    assert repr(ours) == repr(known).replace("test_records.", "").replace("Known", "Part")
    assert ours == Part(*args, **named) and hash(ours) == hash(Part(*args, **named))  # type: ignore[arg-type]
    assert ours != Base(ours.name, ours.size) and ours != replaced(ours, size=99)
    assert replaced(ours, size=99) == Part(ours.name, 99, ours.last)
    assert pickle.loads(pickle.dumps(ours)) == ours == copy.deepcopy(ours)


@pytest.mark.parametrize(("args", "named"), [
    ((), {}), (("a", 1, (), 2), {}), (("a",), {"name": "b"}), (("a",), {"other": 1}), (("a",), {"reason": "x"}),
])  # fmt: skip
def test_what_a_dataclass_refuses_a_record_refuses(args: tuple[object, ...], named: dict[str, object]) -> None:
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
