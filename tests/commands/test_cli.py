from pathlib import Path

import onnx
import pytest

from tests.calibration.nets import conv_net
from tests.commands.conftest import Cli
from tests.insertion.nets import detector


@pytest.mark.parametrize(
    ("word", "hint"),
    [("quantize", "'insert'"), ("version", "'--version'"), ("perdict", "'predict'")],
)
def test_unknown_command_suggests_one(cli: Cli, word: str, hint: str) -> None:
    assert hint in cli.refuse(word)


def test_errors_have_one_hint(cli: Cli, tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "m.onnx")
    for wrong in (("--fail-on", "BOGUS"), ("--sort",)):
        assert cli.refuse("predict", tmp_path / "m.onnx", *wrong).count("see 'qdqtool") == 1


def test_text_without_images_is_described_as_a_list(cli: Cli, tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    (notes := tmp_path / "notes.txt").write_text("hello\n")
    line = cli.refuse("insert", tmp_path / "m.onnx", "--calib", notes)
    assert str(notes) in line and "hello" in line and "list of image paths" in line


def test_unknown_option_names_the_commands_that_have_it(cli: Cli) -> None:
    line = cli.refuse("fix", "model.onnx", "--require-gain", "1.1")
    assert "'--require-gain'" in line and "predict" in line and "--bgr" not in line
    assert "--only" in cli.refuse("fix", "model.onnx", "--onli", "T4")
    assert "use 'qdqtool compare --calib'" in cli.refuse("report", "model.onnx", "--calib", "x")
    for command, is_advised in (("compare", True), ("report", True), ("gpus", False)):
        line = cli.refuse(command, "model.onnx", "--strongly-typed")
        assert ("Use '--target trt10-strongly-typed'" in line) is is_advised


@pytest.mark.parametrize("name", ["orin nano", "Orin"])
def test_gpus_lists_all_that_share_a_name(cli: Cli, name: str) -> None:
    names = {gpu["name"] for gpu in cli.json("gpus", name)["gpus"]}
    assert {f"Jetson Orin Nano {size}" for size in ("4GB", "8GB", "8GB Super")} <= names
    assert all(name.lower() in found.lower() for found in names)
