"""``qdqtool compare`` as a user runs it."""

import json
from pathlib import Path

import pytest

from qdqtool.commands.cli import run
from tests.commands.conftest import Cli
from tests.verification.comparing.networks import float_network, network
from tests.verification.comparing.test_changes import listing


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "float.onnx").write_bytes(float_network().SerializeToString())
    (tmp_path / "good.onnx").write_bytes(network().SerializeToString())
    (tmp_path / "best.pt").write_bytes(b"PK\x03\x04archive")
    (tmp_path / "bad.onnx").write_bytes(network(spoilt=[0, 2]).SerializeToString())
    return tmp_path


def test_answers(models: Path, cli: Cli) -> None:
    lines = cli(
        "compare", models / "good.onnx", models / "bad.onnx", "--target", "trt8.5"
    ).splitlines()
    assert lines[0].startswith("2 convolutions lost INT8: the Q/DQ of their weights are gone")
    assert max(map(len, lines)) <= 80
    assert any("b0.a" in line for line in lines) and any("b2.a" in line for line in lines)
    (models / "other").mkdir()
    (models / "other" / "good.onnx").write_bytes((models / "bad.onnx").read_bytes())
    named = cli("compare", models / "good.onnx", models / "other" / "good.onnx")
    assert "other/good.onnx" in named.replace("\n   ", "")
    cli(
        "compare",
        models / "good.onnx",
        models / "good.onnx",
        "--gpu",
        "T4",
        *(f"--fail-on={c}" for c in ("lost-int8", "conversions", "any", "slower")),
    )
    page = models / "page.html"
    cli("compare", models / "float.onnx", models / "good.onnx", "--report", page)
    assert "float.onnx" in page.read_text()


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
def test_fail_on(models: Path, cli: Cli, condition: str, code: int) -> None:
    cli(
        "compare",
        models / "good.onnx",
        models / "bad.onnx",
        "--target",
        "trt8.5",
        "--fail-on",
        condition,
        code=code,
    )
    assert (f"--fail-on {condition}" in cli.err) == bool(code)


@pytest.mark.parametrize(
    ("a", "b", "conditions"),
    [
        ("good.onnx", "good.json", ("scales", "slower", "any")),  # its listing has no Q
        ("good.json", "good.json", ("scales", "slower")),
        ("good.onnx", "good.onnx", ("slower",)),
        ("good.json", "cut.json", ("any", "lost-int8", "conversions", "unmatched")),
        ("good.onnx", "cut.json", ("any", "lost-int8")),
    ],
)
def test_what_cannot_be_checked_is_no_success(
    models: Path, capsys: pytest.CaptureFixture[str], a: str, b: str, conditions: tuple[str, ...]
) -> None:
    text = json.dumps(listing(), indent=1)
    (models / "good.json").write_text(text)
    (models / "cut.json").write_text(text[: text.rindex('"Name"') - 20])
    for condition in conditions:
        code = run(["compare", str(models / a), str(models / b), "--fail-on", condition])
        assert code in (1, 2) and capsys.readouterr().err.count("\n") == 1, condition
    if b != "cut.json":
        every = (
            "lost-int8",
            "lost-int8-output",
            "conversions",
            "scales",
            "unmatched",
            "slower",
            "any",
        )
        others = [f"--fail-on={c}" for c in every if c not in conditions]
        assert (
            run(["compare", str(models / a), str(models / b), *others]) == 0
            and not capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["good.onnx", "missing.onnx"], "missing.onnx"),
        (["good.onnx", "best.pt"], "PyTorch"),
        (["good.onnx", "bad.onnx", "--with-a", "bad.onnx"], "--with-a"),
        (["good.onnx", "bad.onnx", "--target", "trt5"], "trt5"),
        (["good.onnx", "bad.onnx", "--fail-on", "weather"], "weather"),
        (["good.onnx", "bad.onnx", "-o", "good.onnx"], "good.onnx"),
    ],
)
def test_bad_input_is_one_line(
    models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(models)
    before = (models / "good.onnx").read_bytes()
    assert said in cli.refused("compare", *arguments)
    assert (models / "good.onnx").read_bytes() == before
