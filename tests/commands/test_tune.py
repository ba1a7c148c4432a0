"""``qdqtool tune`` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.cli import run
from tests.commands.test_insert import line
from tests.insertion.nets import check, images
from tests.tables import cases
from tests.tuning.nets import branchy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and 16 samples; the current one."""
    onnx.save(branchy(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.concatenate([d["x"] for d in images(16, 16, 16)]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_text_json_and_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["tune", "m.onnx", "--calib", "x.npy", "--keep", "0.979", "--gpu", "T4", "--clock", "300",
            "--result", "t.json"]
    assert run(args) == 0
    captured = capsys.readouterr()
    assert "choices to measure on 4 images" in captured.err and "minute" in captured.err
    text = captured.out
    assert text.startswith("goal met (target 0.979): 0.9")
    assert "4 held-out images" in " ".join(text.split())
    assert "Front: each is the most accurate at its price" in text and "\n* " in text
    assert "wrote m_qdq.onnx" in text and "m_qdq.onnx.tuning" in text
    wide = [row for row in text.splitlines() if len(row) > 80 and ".tuning" not in row]
    assert not wide
    check(onnx.load("m_qdq.onnx"))
    kept = json.loads(Path("t.json").read_text())
    assert run([*args[:-2], "--format", "json", "-o", "m_qdq.onnx"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "qdqtool/tuning/1" and told["output"] == "m_qdq.onnx"
    assert told["effort"]["runs"] == 0 and told["effort"]["resumed"] > 50  # everything was measured before
    for name in ("front", "others", "sites", "chosen", "goal", "metric", "images"):
        assert told[name] == kept[name]


def test_goals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "m.onnx", "--calib", "x.npy", "--keep", "1", "--no-state", "--all"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("goal NOT met (target 1.000); this is the best that was found: 0.9")
    assert "costs as much as leaving a0/Mul.out float" in " ".join(text.split())
    assert Path("m_qdq.onnx").exists() and not list(folder.glob("*.tuning"))
    assert run(["tune", "m.onnx", "--calib", "x.npy", "--keep", "0.9", "--no-state"]) == 0
    text = capsys.readouterr().out
    assert "Nothing has to stay float" in text and "no single site was measured" in text
    source = "def loud(reference, outputs, image):\n    print('called')\n    return 1.0\n"
    (folder / "loud_metric.py").write_text("print('imported')\n" + source)
    args = ["tune", "m.onnx", "--calib", "x.npy", "--metric", "loud_metric:loud", "--no-state", "--format", "json"]
    assert run(args) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["metric"]["name"] == "loud_metric:loud"
    assert "imported" in captured.err and "called" in captured.err


@pytest.mark.parametrize(*cases("commands/tune-wrong-input-is-one-line"))
def test_wrong_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    Path("junk").write_bytes(b"junk")
    np.save("one.npy", np.load("x.npy")[:1])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert run(["tune", "m.onnx", "--calib", "x.npy", *args]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert captured.out == "" and last.startswith("qdqtool: ") and message in last, captured.err
    assert "Traceback" not in captured.err
    after = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith(".tuning")}
    assert after == before


def test_models_that_cannot_be_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["insert", "m.onnx", "--calib", "x.npy", "--no-predict", "--losses", "0"]) == 0
    capsys.readouterr()
    assert run(["tune", "m_qdq.onnx", "--calib", "x.npy", "-o", "out.onnx"]) == 2
    assert "is quantized already" in line(capsys)
    assert run(["tune", "m.onnx", "-o", "out.onnx"]) == 2
    assert "--calib" in line(capsys)
    assert not Path("out.onnx").exists()
