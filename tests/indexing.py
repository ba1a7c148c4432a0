from typing import Any

import pytest

from qdqtool.ir.graph import Model


def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []
    initialize = Model.__init__

    def record(model: Model, *arguments: Any, **options: Any) -> None:
        initialize(model, *arguments, **options)
        paths.append(model.path)

    monkeypatch.setattr(Model, "__init__", record)
    return paths
