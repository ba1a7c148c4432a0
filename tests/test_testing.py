import re

import onnx
import pytest

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.prediction import predict
from qdqtool.testing import assert_int8
from tests.raising import raises
from tests.trt.builder import Graph


def _network(quantized: tuple[bool, ...], skip: bool = False) -> onnx.ModelProto:
    """Conv and Relu in a row, "conv0", "conv1", ...; those quantized have Q/DQ on input and weights."""
    g = Graph()
    x = g.input(1, 16, 8, 8)
    for i, wanted in enumerate(quantized):
        y = g.conv(
            x,
            f"conv{i}",
            16,
            scale=0.1 if wanted else None,
            weights="tensor" if wanted else "float",
        )
        x = g.relu(g.add(y, x, f"add{i}") if skip else y, f"relu{i}")
    return g.model(x)


def test_what_may_be_float() -> None:
    prediction = assert_int8(
        _network((True, True, True)), "trt8.5", require="conv", max_conversions=1
    )
    assert [c.is_int8 for c in prediction.convolutions] == [True, True, True]
    model = _network((True, False, True))
    assert_int8(model, "trt8.5", allow_float="conv1")
    assert_int8(model, "trt8.5", allow_float=["1$"])
    assert_int8(model, "trt8.5", require="conv[02]")
    with pytest.raises(AssertionError, match="conv1"):
        assert_int8(model, "trt8.5", require=["conv0", "conv1"], allow_float=["conv1"])
    with pytest.raises(AssertionError) as caught:
        assert_int8(_network((False,) * 20))
    message = str(caught.value)
    assert message.count("not INT8\n") == 8
    assert "and 12 more" in message


def test_requirements() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_int8(_network((True, False, True)), "trt8.5")
    message = str(caught.value)
    assert re.search(r"2 of 3 convolutions INT8 .* 3 required", message)
    assert "conv1 (Conv)" in message and "FLOAT" in message
    assert "conv0 (Conv)" not in message and "conv2 (Conv)" not in message
    assert message.count("cause: ") >= 1 and message.count("fix: ") == message.count("cause: ")
    model = _network((True, True, True), skip=True)
    with pytest.raises(AssertionError) as caught:
        assert_int8(model, "trt8.5", max_conversions=1)
    message = str(caught.value)
    stay = predict(model, "trt8.5").conversions
    assert stay is not None and f"{stay} conversions stay, 1 allowed: " in message
    assert "cause: SKIP-FLOAT" in message
    assert_int8(model, "trt8.5", max_conversions=stay)


@pytest.mark.parametrize("option", ["require", "allow_float"])
def test_a_pattern_that_matches_nothing_is_an_error(option: str) -> None:
    with raises(QdqtoolError, f"_matching {option} no_such c"):
        assert_int8(_network((True,)), **{option: ["conv0", "no_such"]})  # type: ignore[arg-type]
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        assert_int8(_network((True,)), **{option: "("})  # type: ignore[arg-type]


def test_what_cannot_be_required(g: Graph, tmp_path: object) -> None:
    with pytest.raises(AssertionError, match="has no Conv"):
        assert_int8(g.model(g.relu(g.input(1), "relu")))
    assert_int8(_network((True, True)), "rtx1.7", require="conv")
    with pytest.raises(QdqtoolError, match="max_conversions"):
        assert_int8(_network((True, True)), "rtx1.7", max_conversions=1)
    with pytest.raises(ModelError, match="no such file") as caught:
        assert_int8(f"{tmp_path}/none.onnx")
    assert "\n" not in str(caught.value)
