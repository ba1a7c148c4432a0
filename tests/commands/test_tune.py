"""``qdqtool tune`` as a user meets it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.commands.conftest import Cli
from tests.insertion.nets import check, images
from tests.tuning.conftest import predicted_once
from tests.tuning.nets import branchy


@pytest.fixture(scope="module", autouse=True)
def each_placement_is_predicted_once() -> Iterator[None]:
    with predicted_once():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and 16 samples; the current one."""
    onnx.save(branchy(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.concatenate([d["x"] for d in images(16, 16, 16)]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_text_json_and_files(folder: Path, cli: Cli) -> None:
    args = [
        "tune",
        "m.onnx",
        "--calib",
        "x.npy",
        "--keep",
        "0.979",
        "--gpu",
        "T4",
        "--clock",
        "300",
    ]
    text = cli(*args, "--result", "t.json")
    assert "choices to measure on 4 images" in cli.err and "minute" in cli.err
    assert text.startswith("goal met (target 0.979): 0.9")
    assert "4 held-out images" in " ".join(text.split())
    assert "Front: each is the most accurate at its price" in text and "\n* " in text
    assert "wrote m_qdq.onnx" in text and "m_qdq.onnx.tuning" in text
    assert not [row for row in text.splitlines() if len(row) > 80 and ".tuning" not in row]
    check(onnx.load("m_qdq.onnx"))
    kept = json.loads(Path("t.json").read_text())
    told = cli.json(*args, "-o", "m_qdq.onnx")
    assert told["schema"] == "qdqtool/tuning/1" and told["output"] == "m_qdq.onnx"
    assert (
        told["effort"]["runs"] == 0 and told["effort"]["resumed"] > 50
    )  # everything was measured before
    for name in ("front", "others", "sites", "chosen", "goal", "metric", "images"):
        assert told[name] == kept[name]


def test_goals(folder: Path, cli: Cli) -> None:
    text = cli("tune", "m.onnx", "--calib", "x.npy", "--keep", "1", "--no-state", "--all", code=1)
    assert text.startswith("goal NOT met (target 1.000); this is the best that was found: 0.9")
    assert "costs as much as leaving a0/Mul.out float" in " ".join(text.split())
    assert Path("m_qdq.onnx").exists() and not list(folder.glob("*.tuning"))
    text = cli("tune", "m.onnx", "--calib", "x.npy", "--keep", "0.9", "--no-state")
    assert "Nothing has to stay float" in text and "no single site was measured" in text
    source = "def loud(reference, outputs, image):\n    print('called')\n    return 1.0\n"
    (folder / "loud_metric.py").write_text("print('imported')\n" + source)
    told = cli.json(
        "tune", "m.onnx", "--calib", "x.npy", "--metric", "loud_metric:loud", "--no-state"
    )
    assert told["metric"]["name"] == "loud_metric:loud"
    assert "imported" in cli.err and "called" in cli.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--keep", "2"], "--keep 2: is a part of the float model's metric"),
        (["--budget-ms", "3"], "need --gpu"),
        (
            ["--budget-ms", "3", "--gpu", "T4", "--keep", "0.9"],
            "--keep and --budget-ms exclude each other",
        ),
        (["--gpu", "Jetson Nano"], "--gpu Jetson Nano: Jetson Nano has no INT8"),
        (["--metric", "f"], "--metric f: is not package.module:function"),
        (
            ["--metric", "json:dumps", "--keep", "0.9"],
            "--metric json:dumps: raised TypeError on x.npy[",
        ),
        (["--time-limit", "soon"], "'soon' is no time above 0"),
        (
            ["--eval", "one.npy"],
            "--eval: 1 image is too few to choose on one half and judge on the other; give 2",
        ),
        (["--eval", "missing"], "missing: no such file or folder"),
        (["--state", "x.npy"], "is one of the files read"),
        (["-o", "m.onnx"], "is one of the files read"),
        (["-o", "a", "--state", "a"], "is the output of -o as well"),
        (
            ["--state", "junk"],
            "junk: is no file of an earlier `qdqtool tune`; give another name with --state",
        ),
        (["--exclude", "nothing"], "--exclude 'nothing': matches no node"),
        (["--exclude-op", "Conv"], "nothing to quantize"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, cli: Cli, args: list[str], message: str) -> None:
    Path("junk").write_bytes(b"junk")
    np.save("one.npy", np.load("x.npy")[:1])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert cli("tune", "m.onnx", "--calib", "x.npy", *args, code=2) == ""
    last = cli.err.splitlines()[-1]
    assert last.startswith("qdqtool: ") and message in last and "Traceback" not in cli.err
    assert before == {
        p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith(".tuning")
    }


def test_models_that_cannot_be_tuned(folder: Path, cli: Cli) -> None:
    cli("insert", "m.onnx", "--calib", "x.npy", "--no-predict", "--losses", "0")
    assert "is quantized already" in cli.refused(
        "tune", "m_qdq.onnx", "--calib", "x.npy", "-o", "out.onnx"
    )
    assert "--calib" in cli.refused("tune", "m.onnx", "-o", "out.onnx")
    assert not Path("out.onnx").exists()
