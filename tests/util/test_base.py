import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.util.text import drop_repeated_sentences, format_reason


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
    assert format_reason(error, **options) == reason


VALUES = ("lint", "conv", "tensor", "relu", "Relu")


class DerivedReason(InputNotDequantized):
    """Another class with the same fields."""


def test_reason_compares_by_class_and_fields() -> None:
    reason = InputNotDequantized(*VALUES)
    copied = pickle.loads(pickle.dumps(reason))
    assert reason == copied == copy.deepcopy(reason) and hash(reason) == hash(copied)
    assert reason != replace(reason, node="other") and reason != DerivedReason(*VALUES)
    assert repr(reason).startswith("InputNotDequantized(pass_name='lint', node='conv'")


def test_hash_of_pickled_reason_is_computed_anew() -> None:
    # Hashes of texts differ between processes.
    script = (
        "import pickle, sys; reason, other = pickle.load(sys.stdin.buffer), pickle.load(sys.stdin.buffer);"
        "sys.exit(hash(reason) != hash(other))"
    )
    reason, other = (InputNotDequantized(*VALUES) for _ in range(2))
    hash(reason)
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    data = pickle.dumps(reason) + pickle.dumps(other)
    subprocess.run([sys.executable, "-c", script], input=data, env=environment, check=True)


def test_repeated_sentences_are_dropped() -> None:
    texts = ['a has 1. It says: "No." Change it.', 'b has 1. It says: "No." Change it.', "c."]
    assert drop_repeated_sentences(texts) == [texts[0], "b has 1.", "c."]
