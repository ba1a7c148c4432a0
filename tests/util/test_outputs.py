import gc
import json

import pytest

from qdqtool.util import limits
from qdqtool.util.json_text import TooManyValues, parse_json


@pytest.mark.parametrize(
    "text", ["[[],[],[]]", '{"a":{"b":{}},"c":1}', "[1,2,3,4,5]", '["[","{",","]']
)
def test_json_with_too_many_values_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lists and dicts take thirty times the memory of their text. Separators in strings count as well.
    value, marks = parse_json(text), sum(text.count(mark) for mark in ",[{")
    monkeypatch.setattr(limits, "JSON_VALUES", marks)
    assert parse_json(text) == parse_json(text.encode()) == value
    monkeypatch.setattr(limits, "JSON_VALUES", marks - 1)
    for data in (text, text.encode()):
        with pytest.raises(TooManyValues):
            parse_json(data)


def test_garbage_is_not_collected_in_nested_json(monkeypatch: pytest.MonkeyPatch) -> None:
    # If garbage is collected while the stack is nearly used up, finalizers fail and Python prints errors.
    collecting: list[bool] = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda *args, **how: collecting.append(gc.isenabled()) or loads(*args, **how)
    )
    with pytest.raises(RecursionError):
        parse_json("[" * 100_000)
    assert collecting == [False] and gc.isenabled()
