"""The same input gives the same bytes whatever order Python's sets have."""

import json
import os
import subprocess
import sys
from pathlib import Path

from qdqtool import predict
from tests import growth

COMMANDS = (
    ("predict", "m.onnx", "--format", "json"),
    ("fix", "m.onnx", "-o", "out.onnx", "--format", "json"),
    ("extract", "m.onnx", "--finding", "CODE", "--minimize", "--limit", "8", "-o", "out-part.onnx"),
    ("report", "m.onnx", "-o", "out.html"),
)


SCRIPT = """
import json, sys
from qdqtool.commands.cli import run
for words in json.load(sys.stdin):
    print(run(words), flush=True)
"""


def test_the_seed_changes_nothing(tmp_path: Path) -> None:
    net = growth.Net()
    last = net.conv("x")
    for i in range(3):
        half = net.add("Split", net.conv(last), outputs=2, axis=1)
        joined = net.add("Concat", net.pair(half, 0.25), net.pair(f"{half}.1", 0.5 + i), axis=1)
        last = net.add("Relu", net.add("Add", last, net.conv(joined)))
        last = net.add("Conv", last, "w")
    (tmp_path / "m.onnx").write_bytes(net.done(last).SerializeToString())
    code = predict(tmp_path / "m.onnx").findings[0].code
    commands = json.dumps([[code if w == "CODE" else w for w in words] for words in COMMANDS]).encode()
    seen = set()
    for seed in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", SCRIPT], input=commands, cwd=tmp_path, capture_output=True,
                              env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
                              check=True)
        outs = sorted(tmp_path.glob("out*"))
        assert len(outs) == 3
        seen.add((done.stdout, done.stderr, *(out.read_bytes() for out in outs)))
        for out in outs:
            out.unlink()
    assert len(seen) == 1
