import ml_dtypes
import numpy as np
import onnx
import pytest

from qdqtool.ir.float8 import (
    E4M3_MAX,
    e4m3_tensor,
    encode_e4m3,
    round_to_e4m3,
)

CODES = np.arange(256, dtype=np.uint8)
NUMBERS = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FINITE = np.isfinite(NUMBERS)


def test_numbers_encode_to_their_codes() -> None:
    assert NUMBERS[FINITE].max() == E4M3_MAX
    np.testing.assert_array_equal(encode_e4m3(NUMBERS[FINITE]), CODES[FINITE])


def test_values_round_as_ml_dtypes_rounds() -> None:
    rng, numbers = np.random.default_rng(0), np.sort(NUMBERS[FINITE])
    middles = (numbers[:-1] + numbers[1:]) / 2
    random = rng.standard_normal(100_000) * np.exp2(rng.uniform(-14, 9, 100_000))
    values = np.clip(np.concatenate([random, middles]), -448, 448).astype(np.float32)
    expected = values.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(round_to_e4m3(values), expected.astype(np.float32))
    np.testing.assert_array_equal(encode_e4m3(values), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(449, 448), (1e30, 448), (np.inf, 448), (-np.inf, -448), (2**-10, 0), (-0.0, -0.0)],
)
def test_values_saturate_and_vanish(value: float, expected: float) -> None:
    rounded = round_to_e4m3(np.float32([value]))
    assert rounded[0] == expected and np.signbit(rounded[0]) == np.signbit(expected)


def test_nan_remains_nan() -> None:
    assert encode_e4m3(np.float32([np.nan])) == 0x7F


def test_tensor_is_read_by_onnx() -> None:
    tensor = e4m3_tensor("t", CODES.reshape(16, 16))
    onnx.checker.check_tensor(tensor)
    array = np.asarray(onnx.numpy_helper.to_array(tensor)).astype(np.float32)
    np.testing.assert_array_equal(array, NUMBERS.reshape(16, 16))
