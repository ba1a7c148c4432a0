"""The process that runs models: what its limit of time counts, and what becomes of one that ends."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from qdqtool.fixing import sandbox
from qdqtool.fixing.sandbox import RunError, Sandbox, TooMuch
from tests.trt.builder import Graph

REAL = sandbox.WORKER.read_text("utf-8")
X = np.ones((1, 4, 8, 8), np.float32)


def relu() -> bytes:
    g = Graph()
    return bytes(g.model(g.relu(g.input(1, 4, 8, 8), "r")).SerializeToString())


def slow_to_start(folder: Path, seconds: float) -> Path:
    worker = folder / "worker.py"
    begin = 'if __name__ == "__main__":\n'
    worker.write_text(REAL.replace(begin, f"{begin}    import time\n\n    time.sleep({seconds})\n"), "utf-8")
    return worker


def test_starting_it_is_none_of_a_models_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 3.0))
    box = Sandbox()
    began = time.monotonic()
    found = box.run(relu(), {"x": X}, 2.5, 2**31)
    box.close()
    assert time.monotonic() - began > 3.0
    assert np.array_equal(found["r:0"], X)


def test_one_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORKER", tmp_path / "missing.py")
    with pytest.raises(RunError, match="a process for onnxruntime does not start"):
        Sandbox().run(relu(), {"x": X}, 60, 2**31)
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 60))
    monkeypatch.setattr(sandbox, "_STARTS_WITHIN", 0.2)
    with pytest.raises(RunError, match="a process for onnxruntime does not start"):
        Sandbox().run(relu(), {"x": X}, 60, 2**31)


def test_a_model_that_takes_too_long_ends_it_and_the_next_run_starts_another() -> None:
    g = Graph()
    x = g.input(1, 64, 160, 160)
    for i in range(40):
        x = g.conv(x, f"c{i}", 64, weights="float", scale=None)
    box = Sandbox()
    with pytest.raises(TooMuch, match=r"did not end within 0 s"):
        box.run(g.model(x).SerializeToString(), {"x": np.ones((1, 64, 160, 160), np.float32)}, 0.05, 2**31)
    assert np.array_equal(box.run(relu(), {"x": X}, 60, 2**31)["r:0"], X)
    box.close()
