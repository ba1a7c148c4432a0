import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdqtool import predict
from qdqtool.commands.cli import run
from tools.growth import families as growth

SCRIPT = """
import json, sys
from qdqtool.commands.cli import run
for words in json.load(sys.stdin):
    print(run(words), flush=True)
"""


def test_outputs_do_not_depend_on_the_hash_seed(
    current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = growth.Net()
    last = net.conv("x")
    for i in range(3):
        half = net.add("Split", net.conv(last), outputs=2, axis=1)
        joined = net.add("Concat", net.pair(half, 0.25), net.pair(f"{half}.1", 0.5 + i), axis=1)
        last = net.add("Relu", net.add("Add", last, net.conv(joined)))
        last = net.add("Conv", last, "w")
    (current_folder / "m.onnx").write_bytes(net.done(last).SerializeToString())
    code = predict(current_folder / "m.onnx").findings[0].code
    commands = [
        [code if w == "CODE" else w for w in words]
        for words in (
            ("predict", "m.onnx", "--format", "json"),
            ("fix", "m.onnx", "-o", "out.onnx", "--format", "json"),
            (
                "extract",
                "m.onnx",
                "--finding",
                "CODE",
                "--minimize",
                "--limit",
                "8",
                "-o",
                "out-part.onnx",
            ),
            ("report", "m.onnx", "-o", "out.html", "--format", "json"),
        )
    ]

    def read_outputs() -> list[bytes]:
        outs = sorted(current_folder.glob("out*"))
        assert len(outs) == 3
        data = [out.read_bytes() for out in outs]
        for out in outs:
            out.unlink()
        return data

    for words in commands:
        print(run(words))
    here, files = capsys.readouterr(), read_outputs()
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True,
    )
    assert (process.stdout, process.stderr) == (here.out, here.err)
    assert read_outputs() == files
