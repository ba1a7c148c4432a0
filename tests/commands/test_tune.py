import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from qdqtool.ir.graph import Model
from qdqtool.tuning.sensitivity import SensitivitySweep
from tests.calibration.nets import write_pictures
from tests.commands.conftest import Cli, next_commands
from tests.insertion.nets import check, detector, images
from tests.tuning.nets import branchy

TUNE = ("tune", "m.onnx", "--calib", "x.npy")


@pytest.fixture
def folder(current_folder: Path) -> Path:
    onnx.save(branchy(), current_folder / "m.onnx")
    np.save(current_folder / "x.npy", np.concatenate([d["x"] for d in images(16, 16, 16)]))
    (current_folder / "loud_metric.py").write_text(
        "print('imported')\n"
        "def loud(reference, outputs, image):\n"
        "    print('called')\n"
        "    return 1.0\n"
    )
    return current_folder


def test_tune_reaches_the_goal_and_resumes(folder: Path, cli: Cli) -> None:
    arguments = (*TUNE, "--keep", "0.979", "--gpu", "T4", "--clock", "300")
    text = cli(*arguments, "--result", "t.json")
    assert " 4 " in cli.err.splitlines()[0]  # images to choose on
    assert next_commands(text)[:2] == [
        "predict m_tuned.onnx --gpu T4 --clock 300".split(),
        "compare m.onnx m_tuned.onnx --calib other-images/ --gpu T4".split(),
    ]
    assert "m_tuned.onnx" in text and "m_tuned.onnx.tuning" in text and "\n* " in text
    assert not [row for row in text.splitlines() if len(row) > 80 and ".tuning" not in row]
    check(onnx.load("m_tuned.onnx"))
    first = json.loads(Path("t.json").read_text())
    again = cli.json(*arguments, "-o", "m_tuned.onnx")
    assert again["schema"] == "qdqtool/tuning/1" and again["output"] == "m_tuned.onnx"
    assert again["goal"]["reached"] and again["effort"]["runs"] == 0
    assert again["effort"]["resumed"] > 50
    same = {"front", "others", "sites", "chosen", "goal", "metric", "images"}
    assert {name: again[name] for name in same} == {name: first[name] for name in same}


def test_tune_goal_out_of_reach_exits_with_1_and_writes_the_best(folder: Path, cli: Cli) -> None:
    answer = cli.json(*TUNE, "--keep", "1", "--no-state", "--bgr", code=1)
    assert not answer["goal"]["reached"] and any("x.npy contains" in n for n in answer["notes"])
    assert Path("m_tuned.onnx").exists() and not list(folder.glob("*.tuning"))


@pytest.mark.parametrize(("goal", "warns"), [(["--budget-ms", "1000"], 0), (["--keep", "1"], 1)])
def test_tune_that_writes_the_float_model_ends_with_this_statement(
    folder: Path, cli: Cli, goal: list[str], warns: int
) -> None:
    """A float model that reaches the goal of the accuracy is not what the user wants."""
    text = cli(*TUNE, *goal, "--gpu", "T4")
    warning = (
        "warning: no measured INT8 placement faster than FP16 reaches the goal; m_tuned.onnx is"
    )
    assert cli.err.count(warning) == warns
    *_, last = " ".join(text.split()).split("Delete the files when done. ")
    assert last.startswith(
        "Wrote the float model unchanged to m_tuned.onnx: no layer is quantized ("
    )


def test_tune_interrupted_tells_how_to_go_on(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SensitivitySweep, "measure", Mock(side_effect=KeyboardInterrupt))
    cli(*TUNE, "--keep", "0.999", code=130)
    assert (
        "m_tuned.onnx.tuning" in cli.err.splitlines()[-1] and Path("m_tuned.onnx.tuning").exists()
    )
    cli(*TUNE, "--keep", "0.999", "--no-state", "-o", "other.onnx", code=130)
    assert "goes on" not in cli.err.splitlines()[-1] and not Path("other.onnx").exists()


def test_tune_output_of_a_metric_goes_to_stderr(folder: Path, cli: Cli) -> None:
    answer = cli.json(*TUNE, "--metric", "loud_metric:loud", "--no-state")
    assert answer["metric"]["name"] == "loud_metric:loud"
    assert "imported" in cli.err and "called" in cli.err


def test_tune_command_for_pixels_writes_the_same_placement(folder: Path, cli: Cli) -> None:
    onnx.save(detector(), "m.onnx")
    write_pictures(folder / "photos", 4, 64, 64)
    tune = "tune m.onnx --calib photos --metric loud_metric:loud -o t.onnx".split()
    ranges = "--method mse --method-for images=max --no-unify".split()
    (command,) = (c for c in next_commands(cli(*tune, *ranges)) if c[0] == "insert")
    assert {*ranges, "--tuned"} <= {*command}  # the head is INT8
    cli(*command[:-4], "-o", "float.onnx")
    cli(*command)
    assert onnx.load("float.onnx").graph == onnx.load("t.onnx").graph
    assert Model(onnx.load("t_uint8.onnx")).elem_type("images") == onnx.TensorProto.UINT8
    heads = [
        finding["severity"]
        for path in ("t.onnx", "t_uint8.onnx")
        for finding in cli.json("predict", path)["findings"]
        if finding["code"] == "HEAD-QUANT"
    ]
    assert heads == 2 * command.count("--tuned") * ["info"]
