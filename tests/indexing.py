"""Which functions index a whole graph."""

import sys
from collections import Counter

import pytest

from qdqtool.ir.graph import Model


def indexed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The functions that do so from now on, by name, and how often."""
    found: Counter[str] = Counter()
    read = Model._read

    def counted(model: Model) -> None:
        frame = sys._getframe(2)  # behind Model() or read_again
        found[frame.f_code.co_name] += 1
        read(model)

    monkeypatch.setattr(Model, "_read", counted)
    return found
