import json
from pathlib import Path

import pytest

from qdqtool.cli import run
from tests import contract
from tests.render.reporting.conftest import Made
from tests.render.reporting.test_collect import result
from tests.tables import cases


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    contract.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def test_reports(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], seeds: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(result()))
    out = tmp_path / "r.html"
    assert run(["report", str(made.model), "--float", str(made.float), "--calib-cache", str(made.cache), "--gpu", "T4",
                "--tuning", str(tmp_path / "t.json"), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[0].startswith("3 convolutions: 3 INT8")
    assert f"wrote {out} (" in said.out
    text = out.read_text()
    for part in ("network", "findings", "convolutions", "layers", "scales", "time", "histograms", "weights", "tuning"):
        assert f'<section id="{part}">' in text
    for log, words in (("agrees.log", "✓ agrees"), ("differs.log", "✗ differs")):
        out = tmp_path / f"{log}.html"
        assert run(["report", str(contract.MODEL), str(seeds / log), "-o", str(out)]) == 0
        assert words in out.read_text() and '<section id="verification">' in out.read_text()
    assert capsys.readouterr().err == ""
    out = tmp_path / "r.html"
    assert run(["report", str(made.model), str(made.float), "--format", "json", "-o", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "qdqtool/report/1" and told["before"] == str(made.float)
    assert told["bytes"] == out.stat().st_size
    assert run(["report", str(seeds / "residual.onnx"), "--calib-cache", str(made.cache), "-o",
                str(tmp_path / "r.html")]) == 2
    assert "it is the cache of another model" in capsys.readouterr().err


def test_the_default_name(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(made.model)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["model_qdq_report.html"]


@pytest.mark.parametrize(*cases("commands/report-bad-input-is-one-line"))
def test_bad_input_is_one_line(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    (tmp_path / "garbage.log").write_text("hello\n" * 20)
    known = {"m": made.model, "f": made.float, "garbage": tmp_path / "garbage.log"}
    out = [] if "-o" in args else ["-o", str(tmp_path / "r.html")]
    assert run(["report", *(a.format(**known) for a in args), *out]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["garbage.log"]
