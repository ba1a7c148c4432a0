"""The float type of an engine in messages."""

import pytest

from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from tests.findings.test_causes import residual


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("c writes float (8x8): a reads it as float.", "", "c writes FP16 (8x8): a reads it as FP16."),
        ("Keep the consumers of it float (`exclude`).", "", "Keep the consumers of it in FP16 (`exclude`)."),
        ("It has quantized and float consumers", "", "It has quantized and FP16 consumers"),
        ("It is left float.", "", "It is left in FP16."),
        ("leaving a/Mul.out float costs no more", "", "leaving a/Mul.out in FP16 costs no more"),
        ("/float/Conv runs in float: float is a name", "", "/float/Conv runs in FP16: float is a name"),
        ("Quantize it again from the float model.", "", "Quantize it again from the float model."),
        ("Use it in float models, or as float weights", "", "Use it in float models, or as float weights"),
        ("Store the bias as float", "BIAS-DQ", "Store the bias as float"),
    ],
)  # fmt: skip
def test_float_type_in_messages(text: str, code: str, expected: str) -> None:
    assert name_floats(text, code, Precision.FP16) == expected
    assert name_floats(text, code, None) == text


@pytest.mark.parametrize("half", [True, False])
def test_float_type_of_a_prediction(half: bool) -> None:
    prediction = predict(residual("float"))
    assert find_float_type(prediction, half=half) == (Precision.FP16 if half else Precision.FP32)
    first, second, *_ = prediction.convolutions
    first.output, second.output = Precision.FP16, Precision.FP32
    assert find_float_type(prediction, half=half) is None
