import json
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from qdqtool.util.text import format_ms
from tests.commands.conftest import Cli, next_commands
from tests.comparison.networks import float_network, network, with_dynamic_size
from tests.comparison.test_changes import listing

CONDITIONS = (
    "lost-int8",
    "lost-int8-output",
    "conversions",
    "scales",
    "unmatched",
    "slower",
    "any",
)


@pytest.fixture
def models(current_folder: Path) -> Path:
    (current_folder / "float.onnx").write_bytes(float_network().SerializeToString())
    (current_folder / "good.onnx").write_bytes(network().SerializeToString())
    (current_folder / "bad.onnx").write_bytes(network(spoilt=[0, 2]).SerializeToString())
    text = json.dumps(listing(), indent=1)
    (current_folder / "good.json").write_text(text)
    (current_folder / "cut.json").write_text(text[: text.rindex('"Name"') - 20])
    return current_folder


@pytest.mark.parametrize(
    "command",
    ["compare good.onnx bad.onnx", "insert float.onnx --calib images.npy --losses 0"],
    ids=["compare", "insert"],
)
@pytest.mark.usefixtures("models")
def test_borrowed_rules_are_named(cli: Cli, command: str) -> None:
    np.save("images.npy", np.ones((1, 4, 16, 16), np.float32))
    named, covered = (
        " ".join(cli(*command.split(), "--target", target).split()) for target in ("10.3", "10")
    )
    assert "those of trt10: TensorRT 10.3 has no rules of its own" in named
    assert "may differ (the rules are based on 3 of them)" in named  # of builds.tsv
    assert not re.search(r"TensorRT 10(?!\.3)", named) and "rules of its own" not in covered


def test_compare_text_shows_folders_of_files_of_one_name(models: Path, cli: Cli) -> None:
    (models / "other").mkdir()
    (models / "other" / "good.onnx").write_bytes((models / "bad.onnx").read_bytes())
    assert "other/good.onnx" in cli("compare", "good.onnx", "other/good.onnx")


def test_compare_report_shows_both_models(models: Path, cli: Cli) -> None:
    cli("compare", "float.onnx", "good.onnx", "--report", "page.html")
    page = (models / "page.html").read_text()
    assert "float.onnx" in page and "good.onnx" in page


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("lost-int8", 1),
        ("conversions", 1),
        ("any", 1),
        ("scales", 0),
        ("unmatched", 0),
        ("slower", 2),
    ],
)
def test_compare_fail_on(models: Path, cli: Cli, condition: str, code: int) -> None:
    arguments = ("--target", "trt8.5", "--fail-on", condition)
    cli("compare", "good.onnx", "bad.onnx", *arguments, code=code)
    assert (f"--fail-on {condition}" in cli.err) == bool(code)


@pytest.mark.parametrize(
    ("b", "arguments", "expected"),
    [
        (network(100, spoilt=[0]), ("--gpu=T4", "--fail-on=slower"), "1 % slower on Tesla T4"),
        (
            with_dynamic_size(network(100)),
            ("--fail-on=any",),
            "input x has the shape 1x4x-1x-1 instead of 1x4x16x16",
        ),
    ],
    ids=["slower", "other input"],
)
def test_compare_fails_if_its_summary_names_the_change(
    current_folder: Path, cli: Cli, b: ModelProto, arguments: tuple[str, ...], expected: str
) -> None:
    for name, model in (("a.onnx", network(100)), ("b.onnx", b)):
        (current_folder / name).write_bytes(model.SerializeToString())
    assert expected in " ".join(cli("compare", "a.onnx", "b.onnx", *arguments, code=1).split())


UNKNOWN = [
    ("good.onnx", "good.json", ("scales", "slower", "any")),  # a layer listing has no Q
    ("good.json", "good.json", ("scales", "slower")),
    ("good.onnx", "good.onnx", ("slower",)),
    ("good.json", "cut.json", ("any", "lost-int8", "conversions", "unmatched")),
    ("good.onnx", "cut.json", ("any", "lost-int8")),
]


@pytest.mark.parametrize(("a", "b", "conditions"), UNKNOWN)
def test_compare_unknown_condition_is_not_a_pass(
    models: Path, cli: Cli, a: str, b: str, conditions: tuple[str, ...]
) -> None:
    for condition in conditions:
        code, _ = cli.run("compare", a, b, "--fail-on", condition)
        assert code in (1, 2) and cli.err.count("\n") == 1, condition


@pytest.mark.parametrize(
    ("a", "b", "conditions"), [*UNKNOWN[:3], ("good.onnx", "good.onnx --gpu T4", ())]
)
def test_compare_known_conditions_are_a_pass(
    models: Path, cli: Cli, a: str, b: str, conditions: tuple[str, ...]
) -> None:
    cli("compare", a, *b.split(), *(f"--fail-on={c}" for c in CONDITIONS if c not in conditions))
    assert not cli.err


@pytest.mark.parametrize(("least", "code"), [(0.0, 0), (1.0, 1)])
def test_compare_min_agreement(models: Path, cli: Cli, least: float, code: int) -> None:
    np.save("images.npy", np.random.default_rng(0).random((2, 4, 16, 16), np.float32))
    arguments = ("compare", "float.onnx", "good.onnx", "--calib", "images.npy")
    agreement = cli.json(*arguments, "--min-agreement", least, code=code)["agreement"]
    assert agreement["images"] == 2 and 0.0 < agreement["value"] < 1.0 and bool(cli.err) == code
    text, value = " ".join(cli(*arguments).split()), r"-?\d\.\d+"
    assert re.match(rf"B against A: agreement {value} \({value} to {value}\) on 2 images; ", text)
    assert "Output agreement of B with A: " in text


@pytest.mark.parametrize("second", [("--gpu", "T4"), ("--gpu=T4",)])
def test_second_gpu(models: Path, cli: Cli, second: tuple[str, ...]) -> None:
    gpus, compare = ("--gpu", "L4", *second), ("compare", "float.onnx", "good.onnx")
    message = cli.refuse("report", "good.onnx", *gpus)
    assert "report takes a single GPU" in message and " --gpu L4 --gpu T4" in message
    times, compared = (cli.json(*w, *gpus)["times"] for w in (("predict", "good.onnx"), compare))
    assert [time["gpu"] for time in (*times, *compared)] == ["L4", "Tesla T4"] * 2
    assert compared[1]["ms"] == cli.json(*compare, *second)["summary"]["ms"] != compared[0]["ms"]
    text = cli(*compare, *gpus)
    assert "\n  Tesla T4 " in text and next_commands(text)[1][-4:] == "--gpu L4 --gpu T4".split()


def test_power_mode_counts_in_every_command(models: Path, cli: Cli) -> None:
    np.save("images.npy", np.random.default_rng(0).random((2, 4, 16, 16), np.float32))
    texts = [
        cli(*line.split(), "--gpu=orin-nx", "--power=15W")
        for line in (
            "insert float.onnx --calib images.npy -o q.onnx",
            "compare float.onnx q.onnx",
            "fix q.onnx -o f.onnx",
            "report q.onnx -o q.html",
            "predict float.onnx",
        )
    ]
    time = cli.json("predict", "q.onnx", "--gpu=orin-nx", "--power=15W")["time"]
    assert time["clock_mhz"] == 612 and all(
        format_ms(time["total_ms"], unit=False) in text
        for text in (*texts[:3], Path("q.html").read_text("utf-8"))
    )
    assert all(
        "15W" in words for text in texts for words in next_commands(text) if "--gpu" in words
    )


@pytest.mark.parametrize(
    "command", ["compare float.onnx good.onnx --gpu L4", "fix good.onnx -o f.onnx"]
)
def test_gpu_that_a_name_could_also_mean_is_noted(models: Path, cli: Cli, command: str) -> None:
    assert "could also mean Jetson Orin Nano 4GB" in "".join(
        cli.json(*command.split(), "--gpu", "Orin Nano")["notes"]
    )


def test_compare_min_agreement_that_is_unknown(models: Path, cli: Cli) -> None:
    """Without variation in the outputs, the agreement is unknown."""
    np.save("images.npy", np.full((1, 4, 16, 16), 0.0, np.float32))
    options = ("--calib", "images.npy", "--min-agreement", "0.5")
    assert (
        cli.json("compare", "float.onnx", "good.onnx", *options, code=2)["agreement"]["value"]
        is None
    )
