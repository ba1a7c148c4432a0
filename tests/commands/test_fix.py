import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.demo.images import write_images
from qdqtool.fixing.runner import draw_random_inputs
from qdqtool.ir.graph import Model
from qdqtool.util import limits
from qdqtool.util.text import format_ms
from tests.commands.conftest import Cli, next_commands
from tests.findings.test_causes import residual
from tests.fixing.test_effects import concats
from tests.insertion.nets import detector
from tests.trt.builder import Graph
from tools.fuzz.fp8 import convert_to_fp8


@pytest.fixture
def folder(current_folder: Path) -> Path:
    onnx.save(residual("float"), current_folder / "m.onnx")
    return current_folder


def test_fix_keeps_metadata_and_names(folder: Path, cli: Cli) -> None:
    model = onnx.load("m.onnx")
    model.metadata_props.add(key="names", value="{0: 'cat'}")
    onnx.save(model, "m.onnx")
    cli("fix", "m.onnx", "-o", "fixed.onnx")
    fixed = onnx.load("fixed.onnx")
    assert fixed.metadata_props[0].value == "{0: 'cat'}"
    assert [o.name for o in fixed.graph.output] == [o.name for o in model.graph.output]
    assert {n.name for n in model.graph.node} <= {n.name for n in fixed.graph.node}


@pytest.mark.parametrize("form", ["text", "json"])
def test_fix_names_parameters_as_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, form: str
) -> None:
    monkeypatch.setattr(limits, "SESSION_WORK", 1)
    text = cli("fix", "m.onnx", "-o", "f.onnx", "--format", form)
    assert "--effort" in text and "`" not in text


@pytest.fixture
def detector_folder(folder: Path, cli: Cli) -> Path:
    (folder / "images").mkdir()
    write_images(folder / "images", 2, 64)
    onnx.save(detector(), folder / "float.onnx")
    cli(*"insert float.onnx --calib images -o d.onnx --head none --losses 0 --method max".split())
    return folder


def count_places(text: str, pattern: str) -> int:
    return int((re.findall(pattern, text, re.MULTILINE) or ["0"])[0])


@pytest.mark.parametrize("name", ["m.onnx", "d.onnx"])
def test_fix_changes_the_places_that_predict_marks(
    detector_folder: Path, cli: Cli, name: str
) -> None:
    marked = count_places(cli("predict", name), r"^\[\*\] (\d+) place")
    fixed = count_places(cli("fix", name, "-o", "f.onnx"), r"^Fixed (\d+) place")
    assert marked == fixed == (name == "m.onnx") and "[*]" not in cli("predict", "f.onnx")


def test_common_scales_are_counted_and_fixed_with_a_warning(folder: Path, cli: Cli) -> None:
    onnx.save(model := concats(6, {0}), "c.onnx")
    text = " ".join(cli("predict", "c.onnx").split())
    assert "(6 places, 5 of them fixable) first: n37 (Concat):" in text  # the one at n14 is not
    np.savez("in.npz", **draw_random_inputs(Model(model)))
    text = cli("fix", "c.onnx", "-o", "f.onnx", "--inputs", "in.npz")
    assert "warning: an output error grew." in text and "grew  " in text
    assert not re.search("% ->|warning:", cli("fix", "c.onnx", "-o", "f.onnx"))


def test_fix_on_request_is_marked_with_its_command(detector_folder: Path, cli: Cli) -> None:
    text = cli("predict", "d.onnx", "--gpu", "L4")
    assert re.search(r"^warning HEAD-QUANT \[\+\]", text, re.MULTILINE)
    command = next(words for words in next_commands(text) if "HEAD-QUANT" in words)
    insert = next(words for words in next_commands(text) if words[0] == "insert")
    assert insert == ["insert", "FLOAT.onnx", "--calib", "images/", "--gpu", "L4"]
    requested = [f for f in cli.json("predict", "d.onnx")["findings"] if f["on_request"]]
    assert len(requested) == count_places(text, r"^\[\+\] (\d+) place")
    fix = cli(*command)
    assert len(requested) == count_places(fix, r"^Fixed (\d+) place")
    assert "HEAD-QUANT hardly changes these errors" in " ".join(fix.split())
    before, after = (
        cli.json("predict", name, "--gpu", "L4")["time"]
        for name in ("d.onnx", command[command.index("-o") + 1])
    )
    cost_ms = after["total_ms"] - before["total_ms"]
    assert [-t["saves_ms"] for t in before["accuracy_fixes"]] == pytest.approx([cost_ms], rel=0.02)
    several = cli("predict", "d.onnx", "--gpu", "L4", "--gpu", "T4")
    for shown in (text, several):
        assert "INT8 by qdqtool insert is slower because insert" in " ".join(shown.split())
    cli("report", "d.onnx", "--gpu", "L4", "-o", "d.html")
    text = " ".join((text + Path("d.html").read_text()).split())
    assert text.count(f"costs {format_ms(cost_ms)} and can gain accuracy (estimated)") == 2


def test_predict_proposes_fp16_only_if_it_saves_time(folder: Path, cli: Cli, g: Graph) -> None:
    """fix has no GPU and changes FP32 layers, unless the command names the other codes."""
    y = g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "inner", 0.05)
    y = g.op("Mul", [y, g.op("Sigmoid", y, "s")], "m")
    for i in range(4):
        y = g.relu(g.conv(y, f"c{i}", 16), f"r{i}")
    onnx.save(g.model(g.conv(y, "last", 16, scale=None, weights="float")), "m.onnx")
    command = ("predict", "m.onnx", "--target", "11", "--gpu", "T4")
    findings = cli.json(*command)["findings"]
    assert ("FLOAT-FP32", "info", False) in {
        (f["code"], f["severity"], f["automatic"]) for f in findings
    }
    words = next(words for words in next_commands(cli(*command)) if words[0] == "fix")
    assert words[-2:] == ["--calib", "images/"]
    assert {change["code"] for change in cli.json(*words[:-2])["applied"]} == {"SILU-INNER-Q"}


@pytest.mark.parametrize("target", [[], ["--target", "trt10"], ["--target", "10.3", "--gpu", "T4"]])
def test_next_commands_repeat_the_options(
    folder: Path, cli: Cli, g: Graph, target: list[str]
) -> None:
    repeated, images = [] if target == ["--target", "trt10"] else target, ["--calib", "in.npz"]
    np.savez(folder / "in.npz", x=np.ones((2, 16, 16, 16), np.float32))
    onnx.save(
        g.model(g.conv(g.input(1, 16, 16, 16), "c", scale=None, weights="float")), "float.onnx"
    )
    commands = [
        command
        for line in ("predict m.onnx", "predict float.onnx", "fix m.onnx -o f.onnx")
        for command in next_commands(cli(*line.split(), *target, *images))
    ]
    fix = next(words for words in commands if words[0] == "fix")
    assert fix[-len(repeated + images) :] == repeated + images
    compare = ["compare", "FLOAT.onnx", "f.onnx", "--calib", "other-images/", *repeated]
    assert compare in commands and any(
        {*words} >= {"predict", *repeated, *images} for words in commands
    )
    insert = ["insert", "float.onnx", *images]
    assert any(words[:4] == insert and {*words} >= {*repeated} for words in commands)


def test_fix_command_names_the_gpu_of_its_estimate(folder: Path, cli: Cli) -> None:
    text = cli("predict", "m.onnx", "--gpu", "T4", "--gpu", "L4", "--size", "16")
    words = next(words for words in next_commands(text) if words[0] == "fix")
    time = cli.json(*words[:-2])["time"]
    assert f"({format_ms(time['total_ms'])} instead of " in text
    assert words[-6:] == ["--gpu", time["gpu"], "--size", "16x16", "--calib", "images/"]
    assert f"estimated for {time['gpu']})" in " ".join(text.split())


def test_fix_without_images_judges_no_accuracy(folder: Path, cli: Cli) -> None:
    text = cli("fix", "m.onnx", "-o", "f.onnx")
    assert "not measured" in text and "--calib" in text and not re.search("%|warning:", text)
    np.savez(folder / "in.npz", x=np.ones((1, 16, 16, 16), np.float32))
    text = cli("fix", "m.onnx", "-o", "f.onnx", "--inputs", "in.npz")
    row, error = text.partition("% ->")[0].splitlines()[-2:]
    assert error.index(error.strip()) > row.index(row.strip()) and "percent of" in text


def test_refused_fix_states_the_time_that_it_would_save(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["m.onnx", "-o", "f.onnx", "--gpu", "T4"]
    after_ms = cli.json("fix", *options)["time"]["total_ms"]
    monkeypatch.setattr("qdqtool.fixing.judge.is_growth_permitted", lambda *_, **__: False)
    refused = cli.json("fix", *options)
    assert {change["code"] for change in refused["refused"]} == {"SKIP-FLOAT"}
    (saving,) = refused["time"]["fixes"]
    assert saving["saves_ms"] == pytest.approx(refused["time"]["total_ms"] - after_ms, abs=2e-3)
    text = " ".join(cli("fix", *options).split())
    saved = f"({len(refused['refused'])}), would save up to {format_ms(saving['saves_ms'])}"
    assert f"SKIP-FLOAT {saved}: the error of" in text
    slow = f"; could be faster: {len(refused['refused'])} SKIP-FLOAT place"
    assert slow in text and "reason above" in text
    without_gpu = " ".join(cli("fix", *options[:3]).split())
    assert slow in without_gpu and "would save" not in without_gpu


def test_fix_for_a_gpu_without_fp8_fails_without_times(folder: Path, cli: Cli) -> None:
    onnx.save(convert_to_fp8(onnx.load("m.onnx")), "m.onnx")
    command = ("fix", "m.onnx", "-o", "f.onnx", "--gpu", "T4")
    fixed, text = cli.json(*command, code=1), cli(*command, code=1)
    assert all(fixed[side]["findings"]["FP8-GPU"] == 1 for side in ("before", "after"))
    assert fixed["applied"] and fixed["time_before_ms"] is fixed["time"]["total_ms"] is None
    assert "T4: TensorRT will reject" in text and not re.search(r"\d ms", text)
    for option in command[-2:], ("--target", "8.6"):
        text = cli("predict", "m.onnx", *option)
        assert [words[0] for words in next_commands(text)] == ["insert"] and "[*]" not in text


@pytest.mark.parametrize(("offset", "is_rounded"), [(0, True), (0.3, False)])
def test_fix_lists_rounded_constants_as_left(
    g: Graph, folder: Path, cli: Cli, offset: float, is_rounded: bool
) -> None:
    """Anchors of 0.5, 1.5, ... lose their exact values with the steps 1.004."""
    x = g.relu(g.conv(g.input(1, 16, 1, 128), "c", 1), "r")
    anchors = np.arange(128).reshape(1, 1, 1, 128) * 1.004 + offset
    onnx.save(g.model(g.add(x, g.pair(g.const("grid", anchors), "gdq", 1.004), "sum")), "m.onnx")
    text = " ".join(cli("fix", "m.onnx", "-o", "f.onnx").partition("Left\n")[2].split())
    assert ("1 constant was rounded" in text) == ("'grid' in steps of 1.004." in text) == is_rounded


def test_fix_marks_codes_without_an_automatic_fix(g: Graph, folder: Path, cli: Cli) -> None:
    x = g.op("ReduceMean", g.conv(g.input(1, 16, 8, 8), "c0", 16), "mean", axes=[2, 3], keepdims=0)
    y = g.add(g.conv("x", "c1", 16), g.conv("x", "c2", 16), "sum")
    onnx.save(g.model(g.gemm(x, "fc", 16), g.conv(y, "c3", 16)), "m.onnx")
    text = cli("fix", "m.onnx", "-o", "f.onnx")
    assert "  POOL-FLOAT (1): no automatic fix\n" in text
    assert "SKIP-FLOAT (1): no automatic fix. sum: " in text
    (change,) = cli.json("fix", "m.onnx", "-o", "f.onnx", "--only", "SKIP-FLOAT")["refused"]
    assert "the fix needs an Add with a float input" in change["why_not"]
