"""The same input gives the same bytes whatever order Python's sets have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import growth

COMMANDS = {
    "predict": ("predict", "m.onnx", "--format", "json"),
    "fix": ("fix", "m.onnx", "-o", "out", "--format", "json"),
    "extract": ("extract", "m.onnx", "--finding", "CODE", "--minimize", "--limit", "40", "-o", "out"),
    "report": ("report", "m.onnx", "-o", "out"),
    "report json": ("report", "m.onnx", "-o", "out", "--format", "json"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_seed_changes_nothing(name: str, tmp_path: Path) -> None:
    net = growth.Net()
    last = net.conv("x")
    for i in range(3):
        half = net.add("Split", net.conv(last), outputs=2, axis=1)
        joined = net.add("Concat", net.pair(half, 0.25), net.pair(f"{half}.1", 0.5 + i), axis=1)
        last = net.add("Relu", net.add("Add", last, net.conv(joined)))
        last = net.add("Conv", last, "w")
    (tmp_path / "m.onnx").write_bytes(net.done(last).SerializeToString())
    from qdqtool import predict

    code = predict(tmp_path / "m.onnx").findings[0].code
    seen = set()
    for seed in ("0", "1", "2"):
        words = [code if w == "CODE" else w for w in COMMANDS[name]]
        done = subprocess.run([sys.executable, "-m", "qdqtool", *words], cwd=tmp_path, capture_output=True, check=False,
                              env={**os.environ, "PYTHONHASHSEED": seed,
                                   "PYTHONPATH": str(Path(__file__).parents[1])})
        assert done.returncode in (0, 1), done.stderr.decode()
        out = tmp_path / "out"
        seen.add((done.stdout, done.stderr, out.read_bytes() if out.exists() else b""))
        out.unlink(missing_ok=True)
    assert len(seen) == 1
