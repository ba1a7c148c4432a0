"""The table of codes is complete, and says for every target where it comes from."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.explain import codes
from qdqtool.explain.codes import ALL_TARGETS
from qdqtool.explain.errors import KNOWN
from qdqtool.explain.ways import WAYS, way_named
from qdqtool.fixing.api import FIXABLE
from qdqtool.prediction import predict
from qdqtool.types import Severity
from tests.explain.test_causes import residual
from tests.trt.evidence import QUICK_FIRST


@pytest.mark.parametrize("entry", codes.CODES.values(), ids=lambda c: c.code)
def test_every_entry_is_whole(entry):
    for text in (entry.title, entry.cause, entry.tensorrt, entry.log, entry.fix):
        assert text and "  " not in text
    assert entry.holds
    named = [t for h in entry.holds for t in h.targets]
    assert len(named) == len(set(named)), "a target has two entries"
    assert set(named) <= set(ALL_TARGETS)
    assert all(h.source for h in entry.holds)


def test_automatic_codes_are_those_that_fix_knows():
    """ADD-ACT and PAD-SPLIT are tried, and kept only where the simulation sees a gain: nothing is promised."""
    assert {c.code for c in codes.CODES.values() if c.automatic} == set(FIXABLE) - {"ADD-ACT", "PAD-SPLIT"}


def test_known_errors_name_codes_that_exist():
    for known in KNOWN:
        for code in known.codes:
            assert code in codes.CODES, (known.id, code)


@pytest.mark.parametrize(("typed", "code"), [("skip-float", "SKIP-FLOAT"), ("SKIP_FLOAT", "SKIP-FLOAT"),
                                             (" zp nonzero ", "ZP-NONZERO")])
def test_codes_are_found_however_they_are_typed(typed, code):
    found = codes.find(typed)
    assert found is not None and found.code == code


def test_similar_codes():
    assert codes.similar("SKIP-FLAOT")[0] == "SKIP-FLOAT"
    assert "CONCAT-SCALE" in codes.similar("concat")
    assert codes.similar("%%%") == []


def test_severity_by_target():
    entry = codes.get("WEIGHT-PREQUANT")
    assert entry.severity_on("trt8.4") == Severity.ERROR
    assert entry.severity_on("trt8.5") == Severity.WARNING
    assert entry.on("trt10") is None


def test_error_text_by_target():
    entry = codes.get("ZP-NONZERO")
    assert "zeroPt must be all zeros" in entry.error_text("trt8.5")
    assert "kENABLE_UINT8" in entry.error_text("trt11")
    assert "kENABLE_UINT8" in entry.error_text("rtx1.7")


DATA = Path(__file__).parent.parent / "data" / "evidence"


def load(case):
    return onnx.ModelProto.FromString(gzip.decompress((DATA / case / "model.onnx.gz").read_bytes()))


@pytest.mark.parametrize("case", QUICK_FIRST)
def test_everything_is_explained(case):
    prediction = predict(load(case), "trt8.5")
    for conv in prediction.convolutions:
        assert conv.int8_in_int8_out or conv.findings, conv.name
    told = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert told == set(prediction.conversion_nodes)
    for finding in prediction.findings:
        assert finding.message and finding.fix
        assert "reason not known" not in finding.message


def test_float_residuals_of_the_85_log():
    """The log has eight Adds fused with a float residual, a MaxPool with two readers, three unfolded norms."""
    prediction = predict(load("yolo-resnet18-orin-trt8502"), "trt8.5")
    found = Counter(f.code for f in prediction.findings)
    assert found["SKIP-FLOAT"] == 8 and found["POOL-MIXED"] == 1 and found["BN-UNFOLDED"] == 3
    pool = next(f for f in prediction.findings if f.code == "POOL-MIXED")
    assert pool.node == "/backbone/maxpool/MaxPool" and pool.convolutions == ["/backbone/conv1/Conv"]
    assert found["CONVERSION"] == 11 and found["INPUT-CONVERSION"] == 1


def test_last_block_of_the_residual_engine():
    """Its residual DQ stays as a layer of its own, and the last convolution reads and writes float."""
    prediction = predict(load("resnet18-a100-qat-residual"), "trt8.5")
    found = next(f for f in prediction.findings if f.code == "ADD-OUT-FLOAT")
    assert found.node == "Add_292" and found.convolutions == ["Conv_284"] and "DequantizeLinear_291" in found.message


@pytest.mark.parametrize("case", ["resnet18-qat-rtx2000-trt8510", "resnet18-a100-qat-residual-qgap"])
def test_well_placed_models_have_no_warning(case):
    prediction = predict(load(case), "trt8.5")
    assert not [f for f in prediction.findings if f.severity != "info"]


WORDS = {
    "trtexec": "--int8 --fp16", "python": "BuilderFlag.FP16", "onnxruntime": "trt_fp16_enable",
    "torch-tensorrt": "enabled_precisions", "deepstream": "network-mode=1",
}


@pytest.mark.parametrize("way", WORDS)
def test_the_flag_finding_speaks_the_words_of_the_way(way: str) -> None:
    prediction = qdqtool.predict(residual("own"), way=way)
    (flag,) = (f for f in prediction.findings if f.code == "FLAG-FP16")
    assert WORDS[way] in flag.fix
    assert all(WORDS[other] not in flag.fix for other in WORDS if other not in (way, "trtexec"))


def test_strongly_typed_targets_have_no_precision_flags() -> None:
    assert set(WORDS) == set(WAYS)
    for way in WAYS.values():
        assert "--int8" not in way.flags("trt11").partition(":")[0]
        assert way.source and way.log
    assert "FLAG-FP16" not in qdqtool.predict(residual("own"), "trt11", way="python").findings_by_code()


def test_onnxruntime_is_told_to_give_no_calibration_table() -> None:
    assert "trt_int8_calibration_table_name" in WAYS["onnxruntime"].care


def test_unknown_ways() -> None:
    with pytest.raises(QdqtoolError, match="did you mean onnxruntime"):
        way_named("onnxruntim")
    assert way_named("ORT").name == "onnxruntime"


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "m.onnx")
    onnx.save(residual("own"), model)
    assert run(["predict", model, "--for", "onnxruntime", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["for"]["way"] == "onnxruntime"
    assert run(["predict", model, "--for", "deepstream"]) == 0
    assert "To build it with DeepStream" in capsys.readouterr().out
    assert run(["explain", "FLAG-FP16", "--for", "python"]) == 0
    assert "trt.Logger.VERBOSE" in capsys.readouterr().out
    assert run(["explain", "--for", "torch-tensorrt"]) == 0
    assert capsys.readouterr().out.startswith("With Torch-TensorRT")
    assert run(["predict", model, "--for", "make"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1


def test_a_way_that_resembles_none_is_told_with_those_there_are() -> None:
    with pytest.raises(QdqtoolError, match=r"^unknown way to build 'qqqq'; choose one of trtexec, python, "):
        way_named("qqqq")
