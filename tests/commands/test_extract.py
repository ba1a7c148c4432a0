"""``qdqtool extract``."""

import json
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import EncodeError

import qdqtool
from tests.commands.conftest import Cli
from tests.extraction.networks import SECRET, residual, secretive


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.onnx"
    onnx.save(residual(), path)
    return str(path)


def test_a_small_model_a_line_and_a_report(model: str, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "s.onnx"
    said = " ".join(cli("extract", model, "--finding", "SKIP-FLOAT", "-o", out).split())
    small = onnx.load(out)
    count = len(residual().graph.node)
    assert said.startswith(
        f"kept {len(small.graph.node)} of {count} nodes: what SKIP-FLOAT at b1.sum depends on"
    )
    assert (
        "the same as in the whole: the finding SKIP-FLOAT with the same fix, the prediction of b1.c1"
        in said
    )
    cli("predict", out, "--fail-on", "SKIP-FLOAT", code=1)
    data = cli.json("extract", model, "--node", "b1.c1", "-o", tmp_path / "s.onnx")
    assert data["schema"] == "qdqtool/extraction/1" and data["nodes"] < data["nodes_of_whole"]
    assert [c["name"] for c in data["convolutions"]] == ["b1.c1"]
    assert data["inputs"] == [v.name for v in onnx.load(tmp_path / "s.onnx").graph.input]
    (tmp_path / "v.json").write_text(json.dumps(verification("b1.c1")))
    report = tmp_path / "r.md"
    cli(
        "extract",
        model,
        "--finding",
        "SKIP-FLOAT",
        "-o",
        out,
        "--report",
        report,
        "--verification",
        tmp_path / "v.json",
    )
    text = report.read_text()
    assert "qdqtool extract model.onnx --finding SKIP-FLOAT -o extract.onnx" in text
    assert "**SKIP-FLOAT** (warning" in text and "| `b1.c1` (Conv) | INT8 |" in text
    assert (
        "| convolution | `b1.c1` | precision INT8; layer" in text and "| precision FP16 |" in text
    )
    assert (
        "elsewhere" not in text
        and "TensorRT 8.5.2" in text
        and f"qdqtool {qdqtool.__version__}" in text
    )


def verification(name: str) -> dict[str, object]:
    return {
        "schema": "qdqtool/verification/1",
        "build": {"tensorrt": "8.5.2", "device": f"{SECRET} board"},
        "mismatches": [
            {
                "kind": "convolution",
                "name": name,
                "predicted": {"precision": "INT8", "layer": f"{SECRET} layer"},
                "built": {"precision": "FP16"},
                "why": f"{SECRET} differs",
                "line": 3,
            },
            {
                "kind": "convolution",
                "name": "elsewhere",
                "predicted": {},
                "built": {},
                "why": "",
                "line": None,
            },
        ],
    }


def test_a_private_report_holds_nothing_of_the_original(tmp_path: Path, cli: Cli) -> None:
    path, out, report = tmp_path / f"{SECRET}.onnx", tmp_path / "p.onnx", tmp_path / "r.md"
    onnx.save(secretive(), path)
    (tmp_path / "v.json").write_text(json.dumps(verification(f"{SECRET}/b1.c1")))
    shown = cli.json(
        "extract",
        path,
        "--node",
        f"{SECRET}/b1.c1",
        "--private",
        "-o",
        out,
        "--report",
        report,
        "--verification",
        tmp_path / "v.json",
    )
    assert SECRET not in report.read_text() and SECRET.encode() not in out.read_bytes()
    assert SECRET not in json.dumps(
        {k: v for k, v in shown.items() if k not in ("output", "report")}
    )
    assert "| precision INT8 | precision FP16 |" in report.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--finding", "SKIP-FLOAT", "-o", "{m}"], "is one of the files read; choose another name"),
        (
            ["--finding", "SKIP-FLOAT", "-o", "{d}/s.onnx", "--report", "{m}"],
            "is one of the files read",
        ),
        (
            ["--finding", "SKIP-FLOAT", "-o", "{d}/s.onnx", "--report", "{d}/s.onnx"],
            "is the output of -o as well; choose another",
        ),
        (["--finding", "SKIP-FLOAT", "-o", "{d}/none/s.onnx"], "does not exist; create it first"),
        (["--finding", "SKIP-FLOAT", "-o", "{d}"], "is a folder"),
        (
            ["--finding", "SKIP-FLOAT", "-o", "{d}/s.onnx", "--verification", "{m}"],
            "is for --report",
        ),
        (
            [
                "--finding",
                "SKIP-FLOAT",
                "-o",
                "{d}/s.onnx",
                "--report",
                "{d}/r",
                "--verification",
                "{m}",
            ],
            "be read as JSON",
        ),
        (
            [
                "--finding",
                "SKIP-FLOAT",
                "-o",
                "{d}/s.onnx",
                "--report",
                "{d}/r",
                "--verification",
                "{d}/j",
            ],
            "is not what",
        ),
        (["--node", "b1.c1"], "Missing option"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    model: str, tmp_path: Path, cli: Cli, arguments: list[str], said: str
) -> None:
    (tmp_path / "j").write_text("{}")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert said in cli.refused(
        "extract", model, *(a.format(m=model, d=tmp_path) for a in arguments)
    )
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_part_above_2_gb_is_told_as_such(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr("onnx.ModelProto.SerializeToString", _too_large)
    monkeypatch.setattr("qdqtool.model.modelfile.byte_size", lambda proto: 2**31)
    monkeypatch.setattr("qdqtool.model.modelfile._save_external", lambda proto, path: None)
    assert "(over 2 GB)" in cli("extract", model, "--node", "b1.c1", "-o", tmp_path / "s.onnx")


def _too_large(*_: object, **__: object) -> bytes:
    raise EncodeError("Failed to serialize proto")
