import json
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest
from google.protobuf.message import EncodeError

import qdqtool
from tests.commands.conftest import Cli
from tests.extraction.networks import SECRET, residual, secretive
from tests.trt.builder import Graph


@pytest.fixture
def folder(current_folder: Path) -> Path:
    onnx.save(residual(), current_folder / "m.onnx")
    return current_folder


def verification(name: str) -> str:
    mismatch = {
        "kind": "convolution",
        "name": name,
        "predicted": {"precision": "INT8", "layer": f"{SECRET} layer"},
        "built": {"precision": "FP16"},
        "why": f"{SECRET} differs",
        "line": 3,
    }
    other = mismatch | {"name": "elsewhere", "predicted": {}, "built": {}, "why": "", "line": None}
    return json.dumps(
        {
            "schema": "qdqtool/verification/1",
            "build": {"tensorrt": "8.5.2", "device": f"{SECRET} board"},
            "mismatches": [mismatch, other],
        }
    )


def test_extract_report_has_command_finding_and_mismatch(folder: Path, cli: Cli) -> None:
    (folder / "v.json").write_text(verification("b1.c1"))
    cli(
        *("extract", "m.onnx", "--finding", "SKIP-FLOAT", "-o", "s.onnx"),
        *("--report", "r.md", "--verification", "v.json"),
    )
    text = (folder / "r.md").read_text()
    for part in (
        "qdqtool extract model.onnx --finding SKIP-FLOAT -o extract.onnx",
        "**SKIP-FLOAT** (warning",
        "| `b1.c1` (Conv) | INT8 |",
        "| convolution | `b1.c1` | precision INT8; layer",
        "| precision FP16 |",
        "TensorRT 8.5.2",
        f"qdqtool {qdqtool.__version__}",
    ):
        assert part in text, part
    assert "elsewhere" not in text


def test_extract_report_has_the_fix_of_the_whole_model(folder: Path, cli: Cli, g: Graph) -> None:
    # The fix depends on the SiLU after the convolution, which is not in the part.
    convolution = g.conv(g.input(1, 16, 8, 8), "c", 16, weights="float")
    onnx.save(g.model(g.silu(convolution, "act")), folder / "m.onnx")
    output = cli("extract", "m.onnx", "--finding", "W-NO-DQ", "-o", "p.onnx", "--report", "r.md")
    assert "the finding W-NO-DQ (with another fix in the part)" in " ".join(output.split())
    whole, part = (
        next(f.fix for f in qdqtool.predict(path).findings if f.code == "W-NO-DQ")
        for path in ("m.onnx", "p.onnx")
    )
    assert whole in (folder / "r.md").read_text().replace("\\|", "|") and whole != part


def test_extract_report_has_options_in_notes(folder: Path, cli: Cli) -> None:
    arguments = ["--node", "b1.c1", "-o", "p.onnx", "--report", "r.md"]
    assert "up to 1 hop around" in " ".join(
        cli("extract", "m.onnx", *arguments, "--hops", "1").split()
    )
    output = cli("extract", "m.onnx", *arguments, "--hops", "0")
    assert f"Wrote p.onnx ({(folder / 'p.onnx').stat().st_size / 1024:.3g} KB)" in output
    assert "increase --hops, or leave --hops out" in (folder / "r.md").read_text()


def test_extract_private_report_has_nothing_of_the_original(folder: Path, cli: Cli) -> None:
    onnx.save(secretive(), folder / f"{SECRET}.onnx")
    (folder / "v.json").write_text(verification(f"{SECRET}/b1.c1"))
    answer = cli.json(
        *("extract", f"{SECRET}.onnx", "--node", f"{SECRET}/b1.c1"),
        *"--private -o p.onnx --report r.md --verification v.json".split(),
    )
    report = (folder / "r.md").read_text()
    assert SECRET not in report and SECRET not in json.dumps(answer)
    assert SECRET.encode() not in (folder / "p.onnx").read_bytes()
    assert "| precision INT8 | precision FP16 |" in report
    assert "At its first and last nodes, types can differ from those in the whole model" in report


def test_extract_size_above_2_gb(folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    # protobuf raises this above 2 GB.
    monkeypatch.setattr(
        "onnx.ModelProto.SerializeToString", Mock(side_effect=EncodeError("failed"))
    )
    monkeypatch.setattr("qdqtool.ir.modelfile.save", lambda *_, **__: None)
    assert "2 GB" in cli("extract", "m.onnx", "--node", "b1.c1", "-o", "s.onnx")
