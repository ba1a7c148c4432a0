"""What a whole file of tests verifies is read and predicted once."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.verification import api
from tests.trt.evidence import HOME


@pytest.fixture(scope="module")
def published_once() -> Iterator[None]:
    """``verify`` reads the published model that it was given last once, and predicts it once for a target."""
    read, told = functools.lru_cache(1)(load), functools.lru_cache(2)(predict)

    def loaded(source: Any) -> Any:
        return (
            read(source)
            if isinstance(source, Path) and source.is_relative_to(HOME)
            else load(source)
        )

    def predicted(model: Any, target: Any, **options: Any) -> Any:
        return predict(model, target, **options) if options else told(model, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load", loaded)
        patch.setattr(api, "predict", predicted)
        yield
