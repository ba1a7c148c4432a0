"""JSON of unknown origin."""

import gc
import json

import pytest

from qdqtool.base import budgets
from qdqtool.base.json_text import parse_json


@pytest.mark.parametrize(
    "text", ["[[],[],[]]", '{"a":{"b":{}},"c":1}', "[1,2,3,4,5]", '["[","{",","]']
)
def test_a_json_holds_so_many_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list or a dict takes thirty times its text; marks inside of strings count, which is the safe side."""
    found = parse_json(text)
    marks = sum(text.count(mark) for mark in ",[{")
    monkeypatch.setattr(budgets, "JSON_VALUES", marks)
    assert parse_json(text) == parse_json(text.encode()) == found
    monkeypatch.setattr(budgets, "JSON_VALUES", marks - 1)
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match="values"):
            parse_json(given)


def test_nothing_is_collected_deep_in_a_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the stack is used up, what ends then can only fail, which Python prints past everything."""
    collects: list[bool] = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda *args, **how: collects.append(gc.isenabled()) or loads(*args, **how)
    )
    with pytest.raises(RecursionError):
        parse_json("[" * 100_000)
    assert collects == [False] and gc.isenabled()
