"""A YOLOv8-like detector of onnxruntime's quantize_static: nothing is INT8 before fixing."""

import numpy as np
import onnx
import pytest

from qdqtool.fixing.api import fix
from tests.insertion.nets import detector
from tests.slow import slow_after

quantization = pytest.importorskip("onnxruntime.quantization")


class Images(quantization.CalibrationDataReader):
    def __init__(self):
        images = [
            np.random.default_rng(i).random((1, 3, 64, 64)).astype(np.float32) for i in range(1)
        ]
        self.items = iter([{"images": image} for image in images])

    def get_next(self):
        return next(self.items, None)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ort")
    onnx.save(detector(), folder / "float.onnx")
    quantization.quantize_static(
        str(folder / "float.onnx"),
        str(folder / "qdq.onnx"),
        Images(),
        quant_format=quantization.QuantFormat.QDQ,
    )
    return onnx.load(folder / "qdq.onnx")


@pytest.mark.parametrize("target", slow_after(1, ["trt8.5", "trt10"]))
def test_fix_of_onnxruntime_defaults(quantized, target):
    fixed = fix(quantized, target)
    before, after = fixed.before.summary(), fixed.after.summary()
    assert before["int8"] == 0 and before["conversions"] > 60
    assert any(f.severity == "error" for f in fixed.before.findings)
    assert after["int8"] == after["convolutions"] == 31
    assert after["conversions"] < 5
    assert not any(f.severity == "error" for f in fixed.after.findings)
    assert not {"SILU-INNER-Q", "CONCAT-SCALE", "BIAS-DQ"} & {f.code for f in fixed.after.findings}
    assert fixed.noise_after <= 2.5 * fixed.noise_before
    onnx.checker.check_model(fixed.proto, full_check=True)
