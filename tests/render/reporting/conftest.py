"""Networks and pages that several tests look at."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.insertion.api import insert
from tests.insertion.nets import Net
from tests.render.reporting.browser import Page, browser, missing


class Made:
    """A small network: the float model, the quantized one, and the cache that its ranges come from."""

    def __init__(self, folder: Path) -> None:
        net = Net(16, 16)
        first = net.conv("first", "x")
        act = net.op("Relu", "act", first)
        second = net.conv("second", act)
        joined = net.op("Concat", "join", act, second, axis=1)
        third = net.conv("third", joined, cin=32)
        net.output(net.op("Sigmoid", "end", third))
        self.folder = folder
        self.float = folder / "float.onnx"
        self.cache = folder / "cache.npz"
        self.model = folder / "model_qdq.onnx"
        onnx.save(net.model(), self.float)
        data = folder / "data.npz"
        np.savez(data, x=np.random.default_rng(1).normal(size=(8, 16, 16, 16)).astype(np.float32))
        insert(self.float, data, calib_cache=self.cache).save(self.model)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("reporting"))


@pytest.fixture(scope="session")
def started() -> Iterator[Page]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with browser() as page:
        yield page


@pytest.fixture
def chromium(started: Page) -> Iterator[Page]:
    """A browser of the usual width, in which no page complains."""
    yield started
    started.size(1280)
    assert started.errors() == []
