"""Fusions on which reports differ.

Both outcomes are shown, and one is counted. The user or a build decides which one.
"""

from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.ir.modelfile import load
from qdqtool.trt import pipeline
from qdqtool.trt.outcome import apply_assumptions, simulate_without_alternatives
from qdqtool.trt.targets import target_named
from tests.findings.test_causes import residual
from tests.notes import note_codes
from tests.verification.synthetic import log_of

OPEN = residual("own", activation=True)  # conv -> SiLU -> Add whose other input has Q/DQ


def c2(prediction: qdqtool.Prediction) -> tuple[qdqtool.Precision, bool]:
    conv = prediction.convolution("c2")
    return conv.output, "sum" in conv.fused


@pytest.mark.parametrize(
    ("target", "default"),
    [("trt8.0", "apart"), ("trt8.5", "apart"), ("trt10", "apart"), ("trt11", "fused")],
)
def test_predict_json_has_both_outcomes(target: str, default: str) -> None:
    prediction = qdqtool.predict(OPEN, target)
    (assumption,) = prediction.as_json()["assumptions"]
    other = {"apart": "fused", "fused": "apart"}[default]
    assert (assumption["name"], assumption["value"], set(assumption["alternatives"])) == (
        "silu-add",
        default,
        {other},
    )
    counts = {default: prediction.summary(), other: assumption["alternatives"][other]}
    # By hand: c0 and c1 write INT8 either way; c2 does if the Add is inside it. Then two conversions less: the skip's
    # DQ and the Q behind the Add; the network's input stays.
    assert {v: (c["int8"], c["int8_to_int8"], c["conversions"]) for v, c in counts.items()} == {
        "apart": (4, 2, 3),
        "fused": (4, 3, 1),
    }
    assert assumption["places"] == ["sum"] and assumption["why"] and not assumption["given"]


def test_predict_assume_chooses_the_outcome() -> None:
    fused = qdqtool.predict(OPEN, assume={"silu-add": "fused"})
    apart = qdqtool.predict(OPEN, "trt11", assume={"silu-add": "apart"})
    assert [c2(fused), c2(apart)] == [
        (qdqtool.Precision.INT8, True),
        (qdqtool.Precision.FP32, False),
    ]
    assert fused.assumptions[0].given and list(fused.assumptions[0].alternatives) == ["apart"]
    assert "ADD-ACT" in apart.findings_by_code() and "ADD-ACT" not in fused.findings_by_code()


@pytest.mark.parametrize(
    ("model", "count"),
    [(residual("own"), 1), (OPEN, 2)],
    ids=["nothing open", "one fusion open"],
)
def test_predict_simulates_each_outcome_once(
    monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, count: int
) -> None:
    simulate = Mock(wraps=pipeline.run)
    monkeypatch.setattr(pipeline, "run", simulate)
    qdqtool.predict(model)
    assert simulate.call_count == count


@pytest.mark.parametrize(
    "proto",
    [
        residual("own"),
        residual("float", activation=True),
        residual("own", conv_side=True, activation=True),
        residual("float"),
    ],
    ids=["no activation", "float skip", "both sides quantized", "neither"],
)
def test_predict_without_open_fusion_assumes_nothing(proto: onnx.ModelProto) -> None:
    assert qdqtool.predict(proto).assumptions == []


@pytest.mark.parametrize(
    ("assume", "target", "value"),
    [
        ({"silu-add": "perhaps"}, "trt8.5", "perhaps"),
        ({"relu-add": "fused"}, "trt8.5", "relu-add"),
        ({"silu-add": "fused"}, "rtx1.7", "rtx1.7"),
    ],
)
def test_predict_wrong_assumption_is_refused(
    assume: dict[str, str], target: str, value: str
) -> None:
    with pytest.raises(QdqtoolError, match=value):
        qdqtool.predict(OPEN, target, assume=assume)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "predict m.onnx",
            ["1 to 2 of them", "1 to 3 remain at run time", "--assume silu-add=fused"],
        ),
        # 1 to 2 of the 4 layers have float output, so 2 to 3 have INT8 output.
        ("compare m.onnx m.onnx", ["4 in INT8 (2 to 3 with INT8 output), 1 to 3 Q/DQ layers"]),
        (
            "predict m.onnx --assume silu-add=fused",
            ["all 4 in INT8 (1 of them with FP16 output) Q/DQ layers 1 remains"],
        ),
    ],
)
def test_text_has_the_range_of_both_outcomes(
    current_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, parts: list[str]
) -> None:
    onnx.save(OPEN, current_folder / "m.onnx")
    assert run(arguments.split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("built", ["fused", "apart"])
def test_verify_takes_the_outcome_of_the_build(built: str, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("\n".join(log_of(qdqtool.predict(OPEN, "trt8.5", assume={"silu-add": built}))))
    result = qdqtool.verify(OPEN, log)
    assert result.mismatches == [] and result.prediction is not None
    assert result.prediction.assumptions[0].value == built
    shown = [n for n in result.notes if n.code == "shown-by-build"]
    assert [(n.values["name"], n.values["value"]) for n in shown] == [("silu-add", built)]


def test_verify_assumption_hides_no_mismatch(tmp_path: Path) -> None:
    lines = log_of(qdqtool.predict(OPEN, assume={"silu-add": "fused"}))
    broken = [
        line.replace("Int8", "Half") if "c1.weight" in line and "Layer(" in line else line
        for line in lines
    ]
    assert broken != lines
    log = tmp_path / "build.log"
    log.write_text("\n".join(broken))
    result = qdqtool.verify(OPEN, log)
    assert any("c1" in m.name for m in result.mismatches)
    assert "nearest-to-build" in note_codes(result.notes)


def test_assumption_changes_nothing_if_both_inputs_are_quantized() -> None:
    model = load(residual("own", conv_side=True, activation=True))
    fused, apart = (
        simulate_without_alternatives(
            model, apply_assumptions(target_named("trt8.5"), {"silu-add": value})
        ).summary()
        for value in ("fused", "apart")
    )
    assert fused == apart
