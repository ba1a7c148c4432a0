import re

import pytest

from qdqtool.comparison.api import compare
from qdqtool.findings.codes import CODES
from qdqtool.formats.build_text import render_comparison
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import Style
from qdqtool.formats.verdicts import (
    describe_confidence,
    describe_ratio,
    describe_rejection,
    name_float_type,
    overall_verdict,
    ratio_style,
    verdict,
)
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Severity
from qdqtool.timing.gpus import choose_gpu
from qdqtool.timing.results import SpeedGain, TimeEstimate
from tests.comparison.networks import network
from tests.findings.test_causes import residual
from tests.insertion.nets import detector
from tests.sources import ROOT
from tests.trt.builder import Graph


def gain_of(low: float, value: float, high: float) -> SpeedGain:
    return SpeedGain(low, value, high, Precision.FP16, right=95, pairs=97)


@pytest.mark.parametrize(
    ("gain", "text", "style"),
    [
        (gain_of(1.3, 1.7, 2.2), "1.7x faster than FP16 (80 % range 1.3x to 2.2x)", Style.GOOD),
        (gain_of(0.29, 0.37, 0.49), "2.7x slower than FP16 (80 % range 2.0x to 3.4x)", Style.BAD),
        (
            gain_of(0.9, 1.2, 1.6),
            "about 1.2x faster than FP16, but not certainly (80 % range 0.9x to 1.6x)",
            Style.UNCLEAR,
        ),
        (
            gain_of(0.6, 0.8, 1.1),
            "about 1.2x slower than FP16, but not certainly (80 % range 0.6x to 1.1x its speed)",
            Style.UNCLEAR,
        ),
        (
            gain_of(1.01, 1.03, 1.2),
            "3 % faster than FP16 (80 % range 1 % to 20 % faster)",
            Style.GOOD,
        ),
        (
            gain_of(0.9, 0.952, 0.99),
            "5 % slower than FP16 (80 % range 1 % to 11 % slower)",
            Style.BAD,
        ),
        (
            gain_of(1.01, 1.097, 1.2),
            "10 % faster than FP16 (80 % range 1 % to 20 % faster)",
            Style.GOOD,
        ),
        (
            gain_of(0.8, 1.01, 1.3),
            "about as fast as FP16 (80 % range 0.8x to 1.3x)",
            Style.UNCLEAR,
        ),
    ],
)
def test_ratio_is_that_of_the_larger_time(gain: SpeedGain, text: str, style: Style) -> None:
    assert (describe_ratio(gain), ratio_style(gain)) == (text, style)


@pytest.mark.parametrize(
    ("low", "expected"), [(0.998, "0.998x"), (0.97, "0.97x"), (1.0004, "1.000x"), (0.9, "0.9x")]
)
def test_bound_near_one_has_digits_that_differ_from_one(low: float, expected: str) -> None:
    assert f"80 % range {expected} to 1.4x" in describe_ratio(gain_of(low, 1.2, 1.4))


def test_only_errors_can_build_with_wrong_results() -> None:
    builds = {code for code, entry in CODES.items() if entry.builds}
    assert builds and all(CODES[code].severity == Severity.ERROR for code in builds)
    assert not any(CODES[code].error for code in builds)  # TensorRT has no message for them


def test_rejected_model_is_red_and_names_the_code(g: Graph) -> None:
    x = g.dq(g.q(g.input(1, 16, 8, 8), "q", zero=3), "dq", zero=3)
    prediction = predict(g.model(g.conv(x, "c", 16, scale=None)))
    assert "ZP-NONZERO" in describe_rejection(prediction)
    assert verdict(prediction) == describe_rejection(prediction)
    assert overall_verdict(prediction, None).style == Style.BAD


def test_verdict_of_a_good_model_is_green(g: Graph) -> None:
    prediction = predict(g.model(g.conv(g.conv(g.input(1, 16, 8, 8), "a", 16), "b", 16)))
    assert describe_rejection(prediction) == ""
    assert overall_verdict(prediction, None).style == Style.GOOD
    assert verdict(prediction).startswith("all 2 convolutions in INT8")


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((0,), "1 convolution in INT8 (with FP16 output)"),
        ((0, 0), "all 2 convolutions in INT8 (all with FP16 output)"),
        ((0, 1), "all 2 convolutions in INT8 (1 of them with FP16 output)"),
    ],
)
def test_verdict_counts_float_outputs(outputs: tuple[int, ...], expected: str, g: Graph) -> None:
    """Convolutions side by side; the result of some has Q/DQ."""
    x = g.input(1, 16, 8, 8)
    convs = [g.conv(x, f"c{i}", 16) for i in range(len(outputs))]
    ends = [g.pair(c, f"{c}.pair") if n else c for c, n in zip(convs, outputs, strict=True)]
    assert verdict(predict(g.model(*ends))).partition(";")[0] == expected


@pytest.mark.parametrize(
    ("target", "half", "expected"),
    [
        ("trt10", True, Precision.FP16),
        ("trt10", False, Precision.FP32),
        ("trt11", True, Precision.FP32),  # the types of the file decide
    ],
)
def test_float_type_is_that_of_the_build(target: str, half: bool, expected: Precision) -> None:
    prediction = predict(detector(), target)
    assert name_float_type(prediction, half=half) == expected
    assert str(expected) in verdict(prediction, half=half)


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("9", "by the rules of TensorRT 8.6"),
        ("8.2", "by the rules of TensorRT 8.0"),
        ("10.3", "by the rules of TensorRT 10"),
        ("8.5.2", None),
        ("trt8.6", None),
    ],
)
def test_confidence_names_the_version_whose_rules_apply(
    g: Graph, target: str, origin: str | None
) -> None:
    prediction = predict(g.model(g.conv(g.conv(g.input(1, 16, 8, 8), "a", 16), "b", 16)), target)
    text = describe_confidence(prediction)
    assert text.endswith(origin) if origin else "by the rules" not in text


@pytest.mark.parametrize(
    ("has_convolution", "layers"),
    [(True, "1 convolution in FP16"), (False, "no convolution or matrix product")],
)
def test_verdict_of_quantized_models_without_quantized_layers(
    g: Graph, has_convolution: bool, layers: str
) -> None:
    x = g.input(1, 16, 8, 8)
    x = g.conv(x, "c", 16, scale=None, weights="float") if has_convolution else x
    prediction = predict(g.model(g.relu(g.pair(x, "p", 0.1), "r")))
    assert overall_verdict(prediction, None).text == f"No layer is INT8 or FP8: {layers}."
    assert layers in verdict(prediction) and "none of" not in verdict(prediction)


def test_float_type_is_that_of_float_layers_and_not_of_outputs() -> None:
    """On TensorRT-RTX, convolutions with a scale per channel write FP32 in FP16 models."""
    g = Graph(opset=19, half=True)
    x = g.input(1, 16, 8, 8)
    for name in ("a", "b"):
        x = g.conv(x, name, 16)
    prediction = predict(g.model(g.conv(x, "c", 16, scale=None, weights="float")), "rtx1.7")
    first, _, last = prediction.convolutions
    assert (first.output, last.precision) == (Precision.FP32, Precision.FP16)
    assert name_float_type(prediction) == Precision.FP16


@pytest.mark.parametrize("attention", [True, False])
def test_confidence_states_products_that_it_does_not_count(attention: bool, g: Graph) -> None:
    """All results and the float products of two activations are the layers of the rows above."""
    x = g.pair(g.input(1, 4, 8, 16), "in")
    y = g.op("MatMul", [x, g.weights("w", (16, 16), "qdq", axis=1)], "project")
    if attention:
        y = g.op("MatMul", [y, g.input(1, 4, 16, 8, name="keys")], "scores")
    prediction = predict(g.model(y), "trt10")
    assert prediction.summary()["matrix_products"] == len(prediction.convolutions) + attention
    assert ("1 product of two activations" in describe_confidence(prediction)) == attention


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
        ("keep these float (insert --head float).", "", "keep these in FP16 (insert --head float)."),
        ("run in float. It is in float.onnx, float16", "", "run in FP16. It is in float.onnx, float16"),
    ],
)  # fmt: skip
def test_float_type_in_messages(text: str, code: str, expected: str) -> None:
    assert [name_floats(text, code, t) for t in (Precision.FP16, None)] == [expected, text]


def test_float_type_replaces_no_option_of_a_command() -> None:
    texts = (ROOT / "tests/snapshots/findings.txt").read_text()
    before, after = (
        re.findall(r"--[a-z][a-z-]*(?:[ =][^\s,;()]+)?", text)
        for text in (texts, name_floats(texts, "", Precision.FP16))
    )
    assert before == after and "--head float" in {option.rstrip(".") for option in before}


def test_float_type_is_unknown_if_layers_have_several_types() -> None:
    prediction = predict(residual("float"))
    prediction.convolutions[0].output = Precision.FP16  # the builder chooses the other types
    assert find_float_type(prediction) is None
    assert find_float_type(prediction, outputs=False) == "FP16"
    for convolution, precision in zip(prediction.convolutions, ("FP16", "FP32"), strict=False):
        convolution.precision = Precision(precision)
    assert find_float_type(prediction, outputs=False) is None


@pytest.mark.parametrize(
    ("fp32_layers", "float_type"),
    [((0,), "FP16"), ((2,), "FP32"), ((2, 2), "FP32"), ((0, 2), "FP16 or FP32")],
)
def test_float_type_is_that_of_the_estimates(fp32_layers: tuple[int, ...], float_type: str) -> None:
    times = [TimeEstimate(choose_gpu("L4"), 1.0, fp32_layers=count) for count in fp32_layers]
    prediction = predict(residual("float"))
    assert f"(3 of them with {float_type} output)" in verdict(prediction, times=times)
    assert find_float_type(prediction, times=times) == (None if any(fp32_layers) else "FP16")


@pytest.mark.parametrize(
    ("gpu", "float_type"),
    [(None, "FP16"), ("T4", "FP32"), ("GTX 1080", "FP32")],
)
def test_float_type_of_a_comparison(gpu: str | None, float_type: str) -> None:
    result = compare(network(), network(residual=False), gpu=gpu, target="8.6")
    assert f"4 convolutions now with {float_type} output" in str(render_comparison(result))
