import json
from pathlib import Path

import pytest

from tests import contract
from tests.commands.conftest import Cli
from tests.render.reporting.conftest import Made
from tests.render.reporting.test_collect import result


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    contract.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def test_reports(made: Made, tmp_path: Path, cli: Cli, seeds: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(result()))
    out = tmp_path / "r.html"
    said = cli(
        "report",
        made.model,
        "--float",
        made.float,
        "--calib-cache",
        made.cache,
        "--gpu",
        "T4",
        "--tuning",
        tmp_path / "t.json",
        "-o",
        out,
    )
    assert (
        cli.err == ""
        and said.splitlines()[0].startswith("3 convolutions: 3 INT8")
        and f"wrote {out} (" in said
    )
    text = out.read_text()
    for part in (
        "network",
        "findings",
        "convolutions",
        "layers",
        "scales",
        "time",
        "histograms",
        "weights",
        "tuning",
    ):
        assert f'<section id="{part}">' in text
    for log, words in (("agrees.log", "✓ agrees"), ("differs.log", "✗ differs")):
        out = tmp_path / f"{log}.html"
        cli("report", seeds / "whole.onnx", seeds / log, "-o", out)
        assert words in out.read_text() and '<section id="verification">' in out.read_text()
        assert cli.err == ""
    out = tmp_path / "r.html"
    told = cli.json("report", made.model, made.float, "-o", out)
    assert told["schema"] == "qdqtool/report/1" and told["before"] == str(made.float)
    assert told["bytes"] == out.stat().st_size
    error = cli.refused(
        "report", seeds / "residual.onnx", "--calib-cache", made.cache, "-o", tmp_path / "r.html"
    )
    assert "it is the cache of another model" in error


def test_the_default_name(
    cli: Cli, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("report", made.model)
    assert [p.name for p in tmp_path.iterdir()] == ["model_qdq_report.html"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{m}", "{f}", "--float", "{f}"], "two models at most"),
        (["{m}", "--clock", "1000"], "--clock needs --gpu"),
        (["{m}", "--calib-cache", "{m}"], "is not a calibration cache"),
        (["{m}", "--tuning", "{m}"], "is not JSON"),
        (["{m}", "{garbage}"], "no line of TensorRT is in it"),
        (["{m}", "-o", "{m}"], "is one of the files read"),
        (["{m}", "-o", "no/such/folder/r.html"], "does not exist"),
        (["{m}", "--assume", "silu"], "write name=value"),
    ],
)
def test_bad_input_is_one_line(
    made: Made, tmp_path: Path, cli: Cli, args: list[str], words: str
) -> None:
    (tmp_path / "garbage.log").write_text("hello\n" * 20)
    known = {"m": made.model, "f": made.float, "garbage": tmp_path / "garbage.log"}
    out = [] if "-o" in args else ["-o", str(tmp_path / "r.html")]
    assert words in cli.refused("report", *(a.format(**known) for a in args), *out)
    assert [p.name for p in tmp_path.iterdir()] == ["garbage.log"]
