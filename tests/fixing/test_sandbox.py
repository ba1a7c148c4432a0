"""The process that runs models: limits of time and memory, and its end."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from qdqtool.fixing import sandbox
from qdqtool.fixing.sandbox import RunError, RunTimeoutError, Sandbox
from qdqtool.util import limits
from tests.trt.builder import Graph

SOURCE = sandbox.WORKER.read_text("utf-8")
X = np.ones((1, 4, 8, 8), np.float32)


def relu() -> bytes:
    g = Graph()
    return bytes(g.model(g.relu(g.input(1, 4, 8, 8), "r")).SerializeToString())


def slow_to_start(folder: Path, seconds: float) -> Path:
    worker = folder / "worker.py"
    begin = 'if __name__ == "__main__":\n'
    worker.write_text(
        SOURCE.replace(begin, f"{begin}    import time\n\n    time.sleep({seconds})\n"), "utf-8"
    )
    return worker


def test_sandbox_start_is_not_part_of_run_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 3.0))
    box = Sandbox()
    outputs = box.run(relu(), {"x": X}, 2.5, 2**31)
    box.close()
    assert np.array_equal(outputs["r:0"], X)


def test_sandbox_retries_after_fragmented_memory(tmp_path, monkeypatch) -> None:
    start = "        try:\n            arrays = _read_arrays("
    assert start in SOURCE
    full = "        runs = globals()['runs'] = globals().get('runs', -1) + 1\n        try:\n"
    full += (
        "            if runs: raise RuntimeError('bfc_arena.cc:359 Failed to allocate memory')\n"
    )
    full += "            arrays = _read_arrays("
    worker = tmp_path / "worker.py"
    worker.write_text(SOURCE.replace(start, full), "utf-8")
    monkeypatch.setattr(sandbox, "WORKER", worker)
    box = Sandbox()
    for _ in range(3):
        assert np.array_equal(box.run(relu(), {"x": X}, 60, 2**31)["r:0"], X)
    box.close()


def test_sandbox_worker_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WORKER", tmp_path / "missing.py")
    with pytest.raises(RunError) as caught:
        Sandbox().run(relu(), {"x": X}, 60, 2**31)
    assert caught.value.code == "worker-not-started"
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 60))
    monkeypatch.setattr(limits, "SESSION_STUCK", 0.2)
    with pytest.raises(RunError) as caught:
        Sandbox().run(relu(), {"x": X}, 60, 2**31)
    assert caught.value.code == "worker-not-started"


def test_sandbox_limits_processor_time(g: Graph) -> None:
    """A worker that was stopped gives the same. After one that was ended, another starts."""
    x = g.input(1, 64, 160, 160)
    for i in range(40):
        x = g.conv(x, f"c{i}", 64, weights="float", scale=None)
    long, inputs = g.model(x).SerializeToString(), {"x": np.ones((1, 64, 160, 160), np.float32)}
    box = Sandbox()
    process = box.start()
    seconds = 0.3
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(2 * seconds, process.send_signal, [signal.SIGCONT])
    timer.start()
    assert np.array_equal(box.run(relu(), {"x": X}, seconds, 2**31)["r:0"], X)
    assert box.start() is process
    with pytest.raises(RunTimeoutError) as caught:
        box.run(long, inputs, 0.05, 2**31)
    assert (caught.value.code, caught.value.parameter) == ("cpu-time-limit", "effort")
    assert process.returncode == -signal.SIGPROF
    assert np.array_equal(box.run(relu(), {"x": X}, 60, 2**31)["r:0"], X)
    box.close()


def test_sandbox_limits_clock_time_of_stuck_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SESSION_STUCK", 0.2)
    command = [sys.executable, "-ISc", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    box = Sandbox()
    monkeypatch.setattr(box, "start", lambda: process)
    with pytest.raises(RunTimeoutError) as caught:
        box.run(relu(), {"x": X}, 0.01, 2**31)
    assert caught.value.code == "wall-clock-limit"
    for stream in (process.stdin, process.stdout):
        stream.close()
