import re
from pathlib import Path

import onnx
import pytest

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.testing import assert_int8
from tests.errors import has
from tests.trt.builder import Graph
from tools.fuzz.fp8 import convert_to_fp8


def network(*quantized: bool) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 16, 8, 8)
    for i, has_qdq in enumerate(quantized):
        y = g.conv(
            x,
            f"conv{i}",
            16,
            scale=0.1 if has_qdq else None,
            weights="tensor" if has_qdq else "float",
        )
        x = g.relu(y, f"relu{i}")
    return g.model(x)


def test_assert_int8_allows_float_by_pattern() -> None:
    model = network(True, False, True)
    prediction = assert_int8(model, "trt8.5", allow_float="conv1", max_conversions=3)
    assert [c.is_int8 for c in prediction.convolutions] == [True, False, True]
    assert_int8(model, "trt8.5", allow_float=["1$"])
    assert_int8(model, "trt8.5", require="conv[02]")
    with pytest.raises(AssertionError, match="conv1"):
        assert_int8(model, "trt8.5", require=["conv0", "conv1"], allow_float=["conv1"])


def test_assert_int8_message_shows_the_first_failures() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_int8(network(*[False] * 20))
    names = set(re.findall(r"conv\d+", str(caught.value)))
    assert names == {f"conv{i}" for i in range(8)} and "12" in str(caught.value)


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_assert_int8_message_names_convolution_cause_and_fix(precision: str) -> None:
    model = network(True, False, True)
    with pytest.raises(AssertionError, match=r"conv1 \(Conv\)") as caught:
        assert_int8(convert_to_fp8(model) if precision == "FP8" else model, "trt10")
    message = str(caught.value)
    assert f"2 of 3 convolutions in {precision} " in message and f", not {precision}" in message
    assert "conv0 (Conv)" not in message and "conv2 (Conv)" not in message
    assert message.count("cause: ") >= 1 and message.count("fix: ") == message.count("cause: ")


def test_assert_int8_limits_conversions(g: Graph) -> None:
    """The note on the activation before the Add explains the conversions, others do not."""
    x = g.pair(g.conv(g.input(1, 16, 8, 8), "c0", 16), "p", 0.1)
    y = g.conv(g.add(g.silu(g.conv(x, "c1", 16, scale=None), "s"), x, "sum"), "c2", 16)
    model = g.model(g.conv(g.relu(y, "r"), "c3", 16, scale=None, weights="float"))
    with pytest.raises(AssertionError, match="3 conversions remain") as caught:
        assert_int8(model, "trt8.5", allow_float="c3", max_conversions=2)
    assert_int8(model, "trt8.5", allow_float="c3", max_conversions=3)
    assert re.findall(r"cause: (\S+ at \S+):", str(caught.value)) == ["ADD-ACT at sum"]


@pytest.mark.parametrize("option", ["require", "allow_float"])
@pytest.mark.parametrize("pattern", ["no_such", "("])
def test_assert_int8_wrong_pattern_is_an_error(option: str, pattern: str) -> None:
    with pytest.raises(QdqtoolError, check=has(None, pattern, option)):
        assert_int8(network(True), **{option: ["conv0", pattern]})  # type: ignore[arg-type]


def test_assert_int8_model_without_convolutions_fails(g: Graph) -> None:
    with pytest.raises(AssertionError, match="Conv"):
        assert_int8(g.model(g.relu(g.input(1), "relu")))


def test_assert_int8_rtx_has_no_conversions_to_limit() -> None:
    assert_int8(network(True, True), "rtx1.7", require="conv")
    with pytest.raises(QdqtoolError, match="max_conversions"):
        assert_int8(network(True, True), "rtx1.7", max_conversions=1)


def test_assert_int8_rejected_model_fails(g: Graph) -> None:
    # The convolution would be INT8, but TensorRT has no zero points other than 0.
    pattern = (
        r"1 of 1 convolutions in INT8 .*\n\* TensorRT will reject this model.*"
        r"\n +cause: ZP-NONZERO at y\.Q.*\n +fix: .*$"
    )
    with pytest.raises(AssertionError, match=pattern):
        assert_int8(g.model(g.pair(g.conv(g.input(1, 16, 8, 8), "conv"), "y", zero=3)), "trt8.5")


def test_assert_int8_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx"):
        assert_int8(tmp_path / "none.onnx")
