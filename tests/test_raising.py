"""Which error a test means is asked by its class, by who raised it and by the values in it, not by its words."""

import ast
import re
from pathlib import Path

import pytest

from qdqtool.errors import ModelError
from qdqtool.trt.targets import target_of_version
from tests.raising import raises
from tests.sources import walked

TESTS = Path(__file__).parent
MOST = 3  # words; more of them are a sentence

# Files with sentences in `match=` still, and how many; only ever to be shortened.
OPEN: dict[str, int] = {
    "calibration/test_arrays.py": 2,
    "calibration/test_clustered.py": 4,
    "calibration/test_dataset.py": 2,
    "calibration/test_methods.py": 1,
    "calibration/test_pictures.py": 3,
    "calibration/test_urls.py": 1,
    "insertion/test_edges.py": 2,
    "insertion/test_scales.py": 1,
    "model/test_live.py": 1,
    "model/test_modelfile.py": 1,
    "qat/test_detector.py": 2,
    "qat/test_exporting.py": 1,
    "test_benchmarks.py": 1,
    "test_files.py": 3,
    "test_options.py": 2,
    "test_testing.py": 1,
    "timing/test_gpus.py": 2,
    "tuning/test_api.py": 1,
    "tuning/test_recipe.py": 1,
    "verification/test_api.py": 1,
    "verification/test_from_log.py": 1,
    "verification/test_lines.py": 1,
}


def sentences(source: str) -> list[int]:
    """Lines with a ``match=`` of more words than MOST, what stands in quotes apart."""
    found = []
    for node in walked(ast.parse(source)) if "match=" in source else ():
        if isinstance(node, ast.keyword) and node.arg == "match":
            parts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            text = re.sub(r"'[^']*'|`[^`]*`|\\\w", " ", " ".join(parts))
            if len(re.findall(r"[A-Za-z]{2,}", text)) > MOST:
                found.append(node.value.lineno)
    return found


def test_no_test_matches_a_sentence_of_an_error() -> None:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if lines := sentences(path.read_text(encoding="utf-8")):
            found[str(path.relative_to(TESTS))] = len(lines)
    assert found == OPEN


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
