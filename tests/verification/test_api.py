"""verify on logs written from predictions and changed in one place, and on the recorded builds."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.cli import run
from qdqtool.errors import BuildLogError
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.verification import api
from qdqtool.verification.api import exit_code, verify
from tests.buildlog.evidence import build_file
from tests.trt.evidence import HOME, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = HOME / CASE / "model.onnx.gz"


def written(folder: Path, lines: list[str]) -> str:
    path = folder / "build.log"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return log_of(prediction(CASE))


def place(lines: list[str], text: str) -> int:
    return next(i for i, line in enumerate(lines) if text in line)


def test_a_build_as_predicted(tmp_path: Path, lines: list[str]) -> None:
    result = verify(MODEL, written(tmp_path, lines))
    assert result.convolutions.agree == result.convolutions.total == 21
    assert result.trace.predicted == result.trace.built == result.trace.agree == 607
    assert result.conversions.as_json() == {"predicted": 1, "built": 1}
    assert result.mismatches == []
    assert result.prediction is not None
    assert result.prediction.target == "trt8.5"
    assert exit_code(result) == 0


@pytest.mark.parametrize("conv", ["Conv_9", "Conv_34", "Gemm_311"])
def test_one_output_changed_in_the_engine(tmp_path: Path, lines: list[str], conv: str) -> None:
    at = next(i for i, x in enumerate(lines) if x.startswith("Layer(C") and f" {conv} +" in x.replace(",", " +"))
    before, arrow, after = lines[at].rpartition(" -> ")
    swapped = after.replace("Int8", "Float") if "Int8" in after else after.replace("Float", "Int8")
    changed = [*lines[:at], before + arrow + swapped, *lines[at + 1 :]]
    result = verify(MODEL, written(tmp_path, changed))
    assert exit_code(result) == 1
    assert conv in {m.name for m in result.mismatches if m.kind == "convolution"}
    assert result.mismatches[0].line == at + 1


def test_a_residual_changed_in_the_engine(tmp_path: Path, lines: list[str]) -> None:
    at = next(i for i, x in enumerate(lines) if x.startswith("Layer(") and "Conv_34 + Add_42" in x)
    first, _, rest = lines[at].partition(" (Int8")
    second, _, last = rest.partition(" (Int8")
    changed = [*lines[:at], f"{first} (Int8{second} (Float{last}", *lines[at + 1 :]]
    result = verify(MODEL, written(tmp_path, changed))
    assert exit_code(result) == 1
    assert "residual" in next(m.why for m in result.mismatches if m.name == "Conv_34")


def test_a_list_of_files_is_one_build_and_a_model_is_none(tmp_path: Path, lines: list[str]) -> None:
    log = written(tmp_path, lines)
    assert verify(MODEL, [log]).convolutions == verify(MODEL, log).convolutions
    for none in ((), ([],)):
        with pytest.raises(BuildLogError, match="no build given"):
            verify(MODEL, *none)
    with pytest.raises(BuildLogError, match="an ONNX model, not a build"):
        verify(MODEL, MODEL)


def test_a_build_of_another_export_is_refused() -> None:
    """Half a dozen names of each are in the other as well, for other convolutions."""
    with pytest.raises(BuildLogError, match="another export"):
        verify(build_file("resnet18-a100-qat", "model.onnx.gz"), build_file(CASE, "log.txt"))


def test_one_pass_line_removed(tmp_path: Path, lines: list[str]) -> None:
    at = place(lines, "QuantizeDoubleInputNodes: fusing QuantizeLinear_27 into Conv_22")
    result = verify(MODEL, written(tmp_path, [*lines[:at], *lines[at + 1 :]]))
    assert exit_code(result) == 1
    trace = [m for m in result.mismatches if m.kind == "trace"]
    assert [m.name for m in trace] == ["QuantizeDoubleInputNodes: fusing QuantizeLinear_27 into Conv_22"]
    assert trace[0].why == "predicted, not logged"
    assert result.trace.built == 606


def test_one_pass_line_too_many_names_its_line(tmp_path: Path, lines: list[str]) -> None:
    at = place(lines, "Running: QDQToCopy on QuantizeLinear_2")
    extra = [lines[at].replace("QuantizeLinear_2", "QuantizeLinear_15")]
    result = verify(MODEL, written(tmp_path, [*lines[:at], *extra, *lines[at:]]))
    trace = [m for m in result.mismatches if m.kind == "trace"]
    assert trace[0].line == at + 1
    assert trace[0].why.startswith("first line at which")


def test_half_a_log_is_partial(tmp_path: Path, lines: list[str]) -> None:
    end = place(lines, "ConstWeightsFusion on conv1.weight")
    path = written(tmp_path, lines[:end])
    result = verify(MODEL, path)
    assert result.mismatches == []
    assert not result.complete
    assert any("engine listing" in m for m in result.build.missing)
    assert exit_code(result) == 2
    assert exit_code(result, allow_partial=True) == 0
    assert result.convolutions.unknown < result.convolutions.total


def test_what_pass_lines_alone_tell(tmp_path: Path, lines: list[str]) -> None:
    end = place(lines, "Engine Layer Information")
    result = verify(MODEL, written(tmp_path, lines[:end]))
    assert result.convolutions.agree == 21
    assert result.conversions.built == 1
    assert exit_code(result) == 2


def test_names_only_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"Layers": [layer.name for layer in prediction(CASE).layers], "Bindings": ["a"]}))
    result = verify(MODEL, path)
    assert result.convolutions.agree == 0
    assert result.convolutions.unknown == 21
    assert exit_code(result) == 2


def test_a_log_of_another_model_is_refused_with_the_counts(tmp_path: Path) -> None:
    other = written(tmp_path, log_of(prediction("yolo-resnet18-orin-trt8502")))
    with pytest.raises(BuildLogError, match="names 0 of the model's 21 convolutions"):
        verify(MODEL, other)


def test_flags_are_not_placement(tmp_path: Path) -> None:
    path = written(tmp_path, log_of(prediction(CASE), flags="--int8"))
    result = verify(MODEL, path)
    assert result.mismatches == []
    assert any("--fp16" in note for note in result.notes)


def test_command_line(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lines)
    assert run(["verify", str(MODEL), path, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "qdqtool/verification/1"
    assert data["build"]["tensorrt"] == "8.5.2"
    assert data["convolutions"]["agree"] == 21
    assert run(["verify", str(MODEL)]) == 2
    assert "give MODEL and at least one BUILD" in capsys.readouterr().err
    assert run(["verify", str(MODEL), str(tmp_path / "none.log")]) == 2
    assert "none.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "convolutions", "pass_lines"),
    [("yolo-resnet18-orin-trt8502", 43, 1011), ("resnet18-qat-rtx2000-trt8510", 21, 607)],
)
def test_the_recorded_logs(case: str, convolutions: int, pass_lines: int) -> None:
    result = verify(HOME / case / "model.onnx.gz", build_file(case))
    assert result.convolutions.agree == convolutions
    counts = {"predicted": pass_lines, "built": pass_lines, "agree": pass_lines}
    assert counts.items() <= result.trace.as_json().items()
    assert exit_code(result) == 0


@pytest.mark.parametrize(
    ("case", "files", "convolutions"),
    [
        ("resnet18-a100-qat", ["graph.json", "profile.json"], 21),
        ("resnet18-a100-qat-residual", ["graph.json"], 21),
        ("resnet18-a100-qat-residual-qgap", ["graph.json"], 21),
        ("mobilenetv2-titanrtx-qat-residual", ["graph.json"], 53),
        ("centernet-resnet34-qat-trt80", ["log.txt"], 48),
    ],
)
def test_the_recorded_listings(case: str, files: list[str], convolutions: int) -> None:
    result = verify(HOME / case / "model.onnx.gz", *(build_file(case, f) for f in files))
    assert result.convolutions.agree == convolutions
    assert result.mismatches == []
    assert exit_code(result) == 0


def swapped(text: str, words: tuple[str, str]) -> str:
    return words[1] if text == words[0] else words[0]


@pytest.mark.parametrize("case", ["resnet18-qat-rtx2000-trt8510", "yolo-resnet18-orin-trt8502"])
def test_no_change_of_a_precision_in_a_recorded_log_goes_unnoticed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of layer, input and output, in the engine lines and, where printed, in the layer information."""
    model = load(HOME / case / "model.onnx.gz")
    predicted = predict(model, TARGETS["trt8.5"])
    monkeypatch.setattr(api, "predict", lambda _model, _target: predicted)
    raw = build_file(case).read_bytes().splitlines()
    lines = [line.decode() for line in raw if b"Tactic: 0x" not in line or line.startswith(b"Layer(")]
    places = [
        (i, match)
        for i, line in enumerate(lines)
        if line.startswith(("Layer(", "Name: "))
        for match in re.finditer(r"(?<= \()(?:Int8|Float)(?=\[)|(?<= )(?:Int8|FP32)(?= format| \})", line)
    ]
    assert len(places) > 70
    for i, match in places[:: max(1, len(places) // 30)]:
        words = ("Int8", "Float") if lines[i].startswith("Layer(") else ("Int8", "FP32")
        changed = lines[i][: match.start()] + swapped(match[0], words) + lines[i][match.end() :]
        result = verify(model, read_build(io.BytesIO("\n".join([*lines[:i], changed, *lines[i + 1 :]]).encode())))
        assert exit_code(result) == 1, changed
        assert any(m.line == i + 1 or f"line {i + 1}" in m.why for m in result.mismatches), changed


@pytest.mark.parametrize("case", ["resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"])
def test_no_change_of_a_layer_json_goes_unnoticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(HOME / case / "model.onnx.gz")
    predicted = predict(model, TARGETS["trt8.4"])
    monkeypatch.setattr(api, "predict", lambda _model, _target: predicted)
    data = json.loads(build_file(case, "graph.json").read_text())
    edges = [t for layer in data["Layers"] for side in ("Inputs", "Outputs") for t in layer[side]]
    for edge in [edges[-1], *edges[::4]]:  # the last one is the network's output, which the model names otherwise
        before = edge["Format/Datatype"]
        edge["Format/Datatype"] = "Row major linear FP32" if "Int8" in before else "Row major Int8 format"
        assert exit_code(verify(model, read_build(io.BytesIO(json.dumps(data).encode())))) == 1, edge
        edge["Format/Datatype"] = before
    for lost in range(0, len(data["Layers"]), 5):
        rest = data | {"Layers": [*data["Layers"][:lost], *data["Layers"][lost + 1 :]]}
        assert exit_code(verify(model, read_build(io.BytesIO(json.dumps(rest).encode())))) == 2
    half = json.dumps(data, indent=1)
    result = verify(model, read_build(io.BytesIO(half[: len(half) // 2].encode())))
    assert result.mismatches == []
    assert exit_code(result) == 2


def test_a_log_that_ends_in_the_parse_section_is_not_called_another_model(tmp_path: Path) -> None:
    names = [node.name for node in load(MODEL).nodes if node.op == "Conv"][:2]
    path = written(tmp_path, [f"[V] [TRT] Parsing node: {name} [Conv]" for name in names])
    with pytest.raises(BuildLogError, match="ends in its parse section: cut off too early"):
        verify(MODEL, path)
