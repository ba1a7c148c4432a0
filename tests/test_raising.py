"""Which error a test means is asked by its class, by who raised it and by the values in it, not by its words."""

import re
from pathlib import Path

import pytest

from qdqtool.errors import ModelError
from qdqtool.trt.targets import target_of_version
from tests.raising import raises

TESTS = Path(__file__).parent
MOST = 3  # words; more of them are a sentence

_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"|' + r"'((?:[^'\\\n]|\\.)*)'")
_VALUES = re.compile(r"'[^']*'|`[^`]*`|\{[^}]*\}|\\\w")


def sentences(source: str) -> list[int]:
    """Lines with a ``match=`` of more words than MOST, what stands in quotes or braces apart.

    Read as text: to parse all tests takes a second. Strings are those of the line, or of the next one.
    """
    found = []
    for given in re.finditer(r"\bmatch=(.*)(?:(?<=match=\()\n(.*))?", source):
        texts = _LITERALS.findall(given[1]) or _LITERALS.findall(given[2] or "")
        text = _VALUES.sub(" ", " ".join(one or other for one, other in texts))
        if len(re.findall(r"[A-Za-z]{2,}", text)) > MOST:
            found.append(source.count("\n", 0, given.start()) + 1)
    return found


def test_no_test_matches_a_sentence_of_an_error() -> None:
    found = {str(path): sentences(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines and path != __file__}


def test_what_is_a_sentence() -> None:
    kept = ["r'one of three'", "f'{name}: 3'", "re.escape(told)", "\"'the very first one'\"", "r'\\d \\w+ \\.onnx x'"]
    for words in (*kept, "'the model is damaged'", "f'{name} is no such model'", "re.escape('a file of its own')"):
        assert bool(sentences(f"pytest.raises(E, match={words})")) is (words not in kept), words


def test_what_is_asked_of_an_error() -> None:
    def refused(told: str, kind: type[Exception] = ModelError) -> None:
        with raises(kind, told):
            target_of_version("7.2")

    refused("target_of_version 7.2", Exception)
    for told in ("target_of_version 7.3", "target_named 7.2"):
        with pytest.raises(AssertionError):
            refused(told, Exception)
    with pytest.raises(Exception, match="7"):
        refused("target_of_version 7.2")
