import re
import shlex
from pathlib import Path

import onnx
import pytest

from qdqtool.builders import child
from tests.commands.conftest import Cli
from tests.insertion.nets import check


def test_demo_writes_a_model_says_what_to_do_next_and_does_it_again(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(child, "is_installed", lambda _package: False)  # what is built: test_demo_recording.py
    folder = tmp_path / "demo"
    text = cli("demo", "-o", folder, "--size", "64", "--images", "5")
    assert sorted(p.name for p in (folder / "images").iterdir()) == [f"demo-{i:03d}.png" for i in range(5)]
    model = onnx.load(folder / "yolov8n-demo_qdq.onnx")
    check(model)
    assert sum(n.op_type == "DequantizeLinear" for n in model.graph.node) == 121
    assert "60 INT8 (54 to INT8, 6 to float)" in text
    assert f"qdqtool predict {folder / 'yolov8n-demo_qdq.onnx'}" in text
    assert "qdqtool insert yolov8n.onnx --calib images/" in text
    assert f"wrote {folder / 'yolov8n-demo_report.html'}: open it in a browser" in text
    assert "of the default demo" in text and "recording of an earlier build" not in text
    assert "pip install qdqtool[rtx]" in text and max(map(len, text.splitlines())) <= 80 + len(str(tmp_path)) * 2
    steps = re.split(r"^\d\. ", text, flags=re.M)
    assert len(steps[2].splitlines()) <= 25
    command = shlex.split(text.splitlines()[-1])
    assert cli(*command[-5:]) and len(cli(*command[-5:-1]).splitlines()) <= 25
    assert '<section id="histograms">' in (folder / "yolov8n-demo_report.html").read_text()
    # A second run replaces the first, and no picture of another name.
    (folder / "images" / "demo-000.png").rename(folder / "images" / "demo-mine.png")
    cli("demo", "-o", folder, "--size", "32", "--images", "2")
    assert len(list((folder / "images").iterdir())) == 3


@pytest.mark.parametrize(
    ("args", "words"), [(["--size", "100"], "not a positive multiple of 32"), (["--target", "trt1"], "unknown target")]
)
def test_errors(tmp_path: Path, cli: Cli, args: list[str], words: str) -> None:
    assert words in cli.refused("demo", "-o", tmp_path / "d", *args)
    assert not (tmp_path / "d").exists()
