"""The simulator against published builds: every convolution, every conversion, the pass lines and the layer names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from qdqtool.types import ConvOutcome, Precision
from tests.trt.evidence import CASES, WITH_TRACE, built_trace, prediction, truth

# Names of these depend on how the parser numbers the layers of a post-processing tail; no Q/DQ pass is among them.
NAME_ONLY = ("ConstShuffleFusion", "ShuffleShuffleFusion", "ShuffleErasure")


def said(conv: ConvOutcome) -> tuple[Any, ...]:
    taken = sorted(n for n in conv.fused if "Add" in n or "MaxPool" in n)
    return tuple(map(width, conv.inputs)), width(conv.output), taken


def width(precision: Precision | str) -> str:
    return "FLOAT" if Precision(precision).is_float else str(precision)


def test_there_are_seven_builds() -> None:
    assert len(CASES) == 7
    assert sum(len(truth(c)["convolutions"]) for c in CASES) == 228


@pytest.mark.parametrize("case", CASES)
def test_convolutions(case: str) -> None:
    predicted = {c.name: c for c in prediction(case).convolutions}
    built = {c["name"]: c for c in truth(case)["convolutions"]}
    assert predicted.keys() == built.keys()
    for name, row in built.items():
        taken = sorted(n for n in row["fused"] if "Add" in n or "MaxPool" in n)
        assert said(predicted[name]) == (tuple(map(width, row["inputs"])), width(row["output"]), taken), name
        assert set(row["fused"]) <= set(predicted[name].fused), name


@pytest.mark.parametrize("case", CASES)
def test_conversions(case: str) -> None:
    assert sorted(prediction(case).conversion_nodes) == sorted(
        n.removesuffix("_quantize_scale_node") for n in truth(case)["conversions"]
    )


@pytest.mark.parametrize("case", CASES)
def test_convolution_layer_names(case: str) -> None:
    predicted = {c.name: c.layer for c in prediction(case).convolutions}
    for row in truth(case)["convolutions"]:
        if row["name"].startswith("Gemm") and case not in WITH_TRACE:
            continue  # named with numbers of unnamed layers, which these builds (8.4 or 8.5) count differently
        assert predicted[row["name"]] == row["layer"]


@pytest.mark.parametrize("case", WITH_TRACE)
def test_every_layer_name(case: str) -> None:
    predicted, built = {layer.name for layer in prediction(case).layers}, set(truth(case)["layers"])
    # NonMaxSuppression keeps a number that the parser gave it; it is the one name that may differ.
    assert len(predicted & built) >= 0.95 * len(built)
    assert {n for n in built ^ predicted if "NonMaxSuppression" not in n} == set()


@pytest.mark.parametrize("case", WITH_TRACE)
def test_trace(case: str) -> None:
    built = Counter(e for e in built_trace(case) if e.pass_name not in NAME_ONLY)
    predicted = Counter(e for e in prediction(case).trace if e.pass_name not in NAME_ONLY)
    assert built - predicted == Counter()
    assert predicted - built == Counter()


@pytest.mark.parametrize("case", WITH_TRACE)
def test_trace_of_every_pass(case: str) -> None:
    built, predicted = Counter(built_trace(case)), Counter(prediction(case).trace)
    common = (built & predicted).total()
    assert common >= 0.97 * built.total()
    assert common >= 0.97 * predicted.total()
