"""On the graphs behind real builds: every conversion and every float output has its cause told."""

import gzip
from collections import Counter
from pathlib import Path

import onnx
import pytest

from qdqtool.prediction import predict

DATA = Path(__file__).parent.parent / "data" / "evidence"
CASES = sorted(p.parent.name for p in DATA.glob("*/model.onnx.gz"))


def load(case):
    return onnx.ModelProto.FromString(gzip.decompress((DATA / case / "model.onnx.gz").read_bytes()))


@pytest.mark.parametrize("case", CASES)
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
