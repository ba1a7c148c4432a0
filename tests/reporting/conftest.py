from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.quantization.api import insert
from tests.insertion.nets import Net
from tests.reporting.browser import Page, browser, missing


class NetworkFiles:
    def __init__(self, folder: Path) -> None:
        net = Net(16, 16)
        act = net.op("Relu", "act", net.conv("first", "x"))
        joined = net.op("Concat", "join", act, net.conv("second", act), axis=1)
        net.output(net.op("Sigmoid", "end", net.conv("third", joined, cin=32)))
        self.float, self.cache = folder / "float.onnx", folder / "cache.npz"
        self.model = folder / "model_qdq.onnx"
        onnx.save(net.model(), self.float)
        self.data = folder / "data.npz"
        np.savez(self.data, x=np.random.default_rng(1).random((8, 16, 16, 16), np.float32) - 0.5)
        insert(self.float, self.data, calib_cache=self.cache).save(self.model)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> NetworkFiles:
    return NetworkFiles(tmp_path_factory.mktemp("reporting"))


@pytest.fixture(scope="session")
def browser_page() -> Iterator[Page]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with browser() as page:
        yield page


@pytest.fixture
def chromium(browser_page: Page) -> Iterator[Page]:
    yield browser_page
    browser_page.size(1280)
    assert browser_page.errors() == []
