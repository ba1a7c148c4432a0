import functools
import json
import re
from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.comparison.result import ChangeKind
from qdqtool.comparison.text import summarize_comparison
from qdqtool.formats.build_text import render_comparison
from tests.insertion.nets import wide_samples
from tests.insertion.test_fp8 import three_convolutions
from tests.notes import note_codes


@functools.cache
def quantized(precision: str, scale: float = 1.0) -> onnx.ModelProto:
    options = {"head": "none", "high_precision": "fp32", "method": "max", "predict": False}
    return qdqtool.insert(
        three_convolutions(), wide_samples(4) * scale, precision=precision, **options
    ).model


def test_format_change_is_no_loss() -> None:
    comparison = qdqtool.compare(quantized("int8"), quantized("fp8"))
    assert [
        (s.int8, s.int8_to_int8, s.fp8, s.fp8_to_fp8) for s in (comparison.a, comparison.b)
    ] == [(3, 2, 0, 0), (0, 0, 2, 0)]
    assert [n.name for n in comparison.where(ChangeKind.FORMAT)] == ["a", "b"]
    assert [n.name for n in comparison.where(ChangeKind.LOST_INT8)] == ["d"]
    assert re.search(
        r"2 convolutions in FP8 instead of INT8.*^In FP8, but with float output \(1\).*"
        r"^FP8 instead of INT8 \(1, and 1 listed above\)",
        str(render_comparison(comparison)),
        re.DOTALL | re.MULTILINE,
    )


def test_equal_ranges_are_equal_scales() -> None:
    """Scales of FP8 are 127 over 448 times those of INT8 for the same range."""
    assert not qdqtool.compare(quantized("int8"), quantized("fp8")).where(ChangeKind.SCALE)
    wider = qdqtool.compare(quantized("int8"), quantized("fp8", 2.0)).where(ChangeKind.SCALE)
    assert {round(n.factor or 0.0, 3) for n in wider if n.name == "a"} == {2.0}


def test_gained_fp8_is_named_in_summary_and_nodes() -> None:
    comparison = qdqtool.compare(three_convolutions(), quantized("fp8"))
    assert [(n.name, n.why) for n in comparison.where(ChangeKind.GAINED_INT8)] == [
        ("a", "gained FP8"),
        ("b", "gained FP8"),
    ]
    text = str(render_comparison(comparison))
    assert text.startswith("B against A: 2 convolutions gained FP8") and "INT8" not in text
    assert summarize_comparison(
        qdqtool.compare(three_convolutions(), quantized("int8"))
    ).startswith("3 convolutions gained INT8")


def test_fp8_that_becomes_int8_is_a_change_back() -> None:
    summary = qdqtool.compare(quantized("fp8"), quantized("int8")).summary()
    assert (summary["format"], summary["gained_int8"], summary["lost_int8"]) == (2, 1, 0)


def test_rounding_of_scales_to_fp16_is_no_change() -> None:
    """FP8 files have FP16 scales, so their ranges differ from those of INT8 by up to .1 %."""
    options = {"head": "none", "method": "max", "predict": False, "precision": "fp8"}
    comparison = qdqtool.compare(
        quantized("int8"), qdqtool.insert(three_convolutions(), wide_samples(4), **options).model
    )
    assert comparison.where(ChangeKind.SCALE) == comparison.where(ChangeKind.WEIGHTS_SCALE) == []


@pytest.mark.parametrize("is_quantized", [True, False])
def test_agreement_names_the_models_a_and_b_and_notes_a_quantized_a(is_quantized: bool) -> None:
    answer = qdqtool.compare(
        quantized("int8") if is_quantized else three_convolutions(),
        quantized("fp8"),
        data=wide_samples(4),
    ).as_json()
    assert ("reference-quantized" in note_codes(answer["notes"])) == is_quantized
    assert re.search(r"of B's .* of A's$", answer["agreement"]["sentence"])


def edge(name: str, layout: str) -> dict[str, object]:
    layout = f"Row major linear {layout} format"
    return {"Name": name, "Dimensions": [1, 32, 8, 8], "Format/Datatype": layout}


@pytest.mark.parametrize("model_first", [True, False])
def test_text_of_model_and_build_names_fp8(tmp_path: Path, model_first: bool) -> None:
    """The model predicts FP16 output of `a` (its consumer is float) and of `b` (the output)."""
    formats = {"a": ("FP8", "FP8"), "d": ("FP16", "FP16"), "b": ("FP8", "FP16")}
    layers = [
        {
            "Name": name,
            "LayerType": "CaskConvolution",
            "ParameterType": "Convolution",
            "Inputs": [edge(f"{name}.in", before)],
            "Outputs": [edge(f"{name}.out", after)],
        }
        for name, (before, after) in formats.items()
    ]
    build = tmp_path / "build.json"
    build.write_text(json.dumps({"Layers": layers, "Bindings": ["x", "b.out"]}))
    sides = (quantized("fp8"), build) if model_first else (build, quantized("fp8"))
    text = summarize_comparison(qdqtool.compare(*sides, target="trt10.13-strongly-typed"))
    assert "2 of 2 convolutions that the model quantizes run in FP8" in text
    assert "1 convolution with FP8 output where float is predicted" in text and "INT8" not in text
