"""Where reports differ on a fusion: both outcomes are told, one is counted, the user or a build settles it."""

from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.trt.outcome import settled
from qdqtool.types import Precision, Prediction
from tests.explain.test_causes import residual
from tests.raising import raises
from tests.verification.synthetic import log_of

OPEN = residual("own", activation=True)  # conv -> SiLU -> Add whose other input has Q/DQ


def c2(prediction: Prediction) -> tuple[Precision, bool]:
    found = prediction.convolution("c2")
    return found.output, "sum" in found.fused


@pytest.mark.parametrize(
    ("target", "default"),
    [("trt8.0", "apart"), ("trt8.5", "apart"), ("trt10", "apart"), ("trt11", "fused")],
)
def test_both_outcomes_are_told(target: str, default: str) -> None:
    prediction = qdqtool.predict(OPEN, target)
    (told,) = prediction.as_json()["assumptions"]
    other = {"apart": "fused", "fused": "apart"}[default]
    assert (told["name"], told["value"], set(told["alternatives"])) == (
        "silu-add",
        default,
        {other},
    )
    counts = {default: prediction.summary(), other: told["alternatives"][other]}
    # By hand: c0 and c1 write INT8 either way; c2 does if the Add is inside it. Then two conversions less: the skip's
    # DQ and the Q behind the Add; the network's input stays.
    assert {v: (c["int8"], c["int8_to_int8"], c["conversions"]) for v, c in counts.items()} == {
        "apart": (4, 2, 3),
        "fused": (4, 3, 1),
    }
    assert told["places"] == ["sum"] and told["why"] and not told["given"]


def test_the_choice_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = qdqtool.predict(OPEN, assume={"silu-add": "fused"})
    apart = qdqtool.predict(OPEN, "trt11", assume={"silu-add": "apart"})
    assert c2(fused) == (Precision.INT8, True)
    assert c2(apart) == (Precision.FP32, False)
    assert fused.assumptions[0].given and list(fused.assumptions[0].alternatives) == ["apart"]
    assert "ADD-ACT" in apart.findings_by_code() and "ADD-ACT" not in fused.findings_by_code()
    from qdqtool.trt import outcome

    runs: list[int] = []
    once = outcome._once
    monkeypatch.setattr(outcome, "_once", lambda *a: runs.append(1) or once(*a))
    qdqtool.predict(residual("own"))
    assert len(runs) == 1
    qdqtool.predict(OPEN)
    assert len(runs) == 3


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
def test_nothing_is_assumed_where_nothing_depends_on_it(proto: onnx.ModelProto) -> None:
    assert qdqtool.predict(proto).assumptions == []


@pytest.mark.parametrize(
    ("assume", "target", "said"),
    [
        ({"silu-add": "perhaps"}, "trt8.5", "assumed_target perhaps"),
        ({"relu-add": "fused"}, "trt8.5", "assumed_target relu-add"),
        ({"silu-add": "fused"}, "rtx1.7", "assumed_target rtx1.7"),
    ],
)
def test_bad_choices(assume: dict[str, str], target: str, said: str) -> None:
    with raises(QdqtoolError, said):
        qdqtool.predict(OPEN, target, assume=assume)


def test_text_has_a_range_and_says_what_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "m.onnx")
    onnx.save(OPEN, model)
    assert run(["predict", model]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert f"{first} {second.strip()}" == (
        "4 convolutions: 4 INT8 (2 to 3 to INT8, 1 to 2 to float), 0 float; 1 to 3 conversions, depending on "
        "Conv + activation + Add"
    )
    assert "silu-add: reports differ" in rest[0] and "--assume silu-add=fused" in " ".join(
        " ".join(rest).split()
    )
    assert run(["predict", model, "--assume", "silu-add=fused"]) == 0
    chosen = capsys.readouterr().out
    assert chosen.startswith(
        "4 convolutions: 4 INT8 (3 to INT8, 1 to float), 0 float; 1 conversion\n"
    )
    for bad in ("silu-add", "silu-add=x", "x=fused"):
        assert run(["predict", model, "--assume", bad]) == 2
        told = capsys.readouterr()
        assert told.out == "" and len(told.err.splitlines()) == 1


@pytest.mark.parametrize("built", ["fused", "apart"])
def test_verify_takes_what_the_build_shows(built: str, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("\n".join(log_of(qdqtool.predict(OPEN, "trt8.5", assume={"silu-add": built}))))
    result = qdqtool.verify(OPEN, log)
    assert result.mismatches == [] and result.prediction is not None
    assert result.prediction.assumptions[0].value == built
    shown = [
        n for n in result.notes if n.remark in (Remark.SHOWN_AS_ASSUMED, Remark.SHOWN_OTHERWISE)
    ]
    assert [(n.values["name"], n.values["value"]) for n in shown] == [("silu-add", built)]


def test_verify_settles_what_is_assumed(tmp_path: Path) -> None:
    """Other faults stay mismatches: the choice hides none of them."""
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
    assert {Remark.NEAREST_AS_ASSUMED, Remark.NEAREST_OTHERWISE} & set(remarks(result.notes))
    # Both inputs of such an Add quantized: the outcome is the same either way
    from qdqtool.model.modelfile import load
    from qdqtool.trt.outcome import assumed_target
    from qdqtool.trt.targets import target_named

    both = load(residual("own", conv_side=True, activation=True))
    target = target_named("trt8.5")
    seen = [
        settled(both, assumed_target(target, {"silu-add": v})).summary() for v in ("fused", "apart")
    ]
    assert seen[0] == seen[1]
