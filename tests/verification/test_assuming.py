"""Where an outcome rests on a choice by timing, a build settles it: what fits best is kept, and said."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from qdqtool.agreement import LayerCounts, Mismatch, MismatchKind, TraceCounts
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build
from qdqtool.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification.api import _wrong, compare_assuming, verify
from qdqtool.verified import Verification
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of

TARGET = TARGETS["trt8.5"]


def skip_connection() -> Model:
    """Convolution, SiLU and an Add with a quantized skip: one layer, or the Add apart (which 8.5 is taken to make)."""
    g = Graph()
    x = g.pair(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r0"), "skip")
    y = g.add(g.silu(g.conv(x, "c1", 16, scale=None), "s"), x, "sum")
    return Model(g.model(g.conv(y, "end", 16)))


MODEL = skip_connection()
PREDICTED = predict(MODEL, TARGET)
LINES = {value: log_of(predict(MODEL, TARGET, assume={"silu-add": value})) for value in ("apart", "fused")}


def settled(lines: list[str]) -> Verification:
    build = read_build(io.BytesIO("\n".join(lines).encode()))
    return compare_assuming(MODEL, predict(MODEL, TARGET), build, TARGET)


def test_the_default_is_right() -> None:
    result = settled(LINES["apart"])
    assert result.mismatches == []
    assert result.notes == ["silu-add: the build shows apart, as is assumed for trt8.5"]
    assert result.prediction is not None and result.prediction.summary() == PREDICTED.summary()
    assert result.prediction.assumptions[0].why == PREDICTED.assumptions[0].why


def test_the_other_one_is_right() -> None:
    """The prediction that is handed on is the one that the build shows, and says so."""
    result = settled(LINES["fused"])
    assert result.mismatches == []
    assert result.notes == ["silu-add: the build shows fused; apart is what trt8.5 assumes"]
    assert result.prediction is not None
    assert result.prediction.convolution("c1").output == Precision.INT8 != PREDICTED.convolution("c1").output
    (told,) = result.prediction.assumptions
    assert (told.value, told.why) == ("fused", "shown by the build")


@pytest.mark.parametrize("value", ["apart", "fused"])
def test_what_fits_nowhere_goes_to_the_nearest(value: str) -> None:
    """One layer besides is otherwise than predicted: the build still shows which of the two it is."""
    at = next(i for i, x in enumerate(LINES[value]) if x.startswith("Layer(") and " + end" in x)
    changed = [x.replace("Float", "Int8") if i == at else x for i, x in enumerate(LINES[value])]
    result = settled(changed)
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == ["end"]
    assert f"silu-add: the build shows {value}, the nearest, though it does not fit everywhere" in result.notes[0]


def test_a_build_that_does_not_tell() -> None:
    """A log that ends before the passes fits both alike; the default is kept."""
    build = replace(read_build(io.BytesIO("\n".join(LINES["fused"]).encode())), layers=[], trace=[], headings=[])
    result = compare_assuming(MODEL, predict(MODEL, TARGET), build, TARGET)
    assert result.notes == ["silu-add: the build does not tell which of apart, fused it is; compared with apart"]
    assert result.prediction is not None and result.prediction.convolution("c1").output == Precision.FLOAT


def test_nothing_is_compared_twice_without_an_assumption() -> None:
    g = Graph()
    model = Model(g.model(g.conv(g.input(1, 16, 8, 8), "c", 16)))
    predicted = predict(model, TARGET)
    build = read_build(io.BytesIO("\n".join(log_of(predicted)).encode()))
    result = compare_assuming(model, predicted, build, TARGET)
    assert result.prediction is predicted and result.notes == [] and result.mismatches == []


@pytest.mark.parametrize(("trace", "layers", "kinds", "wrong"), [
    (TraceCounts(), LayerCounts(), "", (0, 0)),
    (TraceCounts(9), LayerCounts(), "", (0, 0)),  # no pass lines in the build: nothing of them is wrong
    (TraceCounts(9, 0, 0), LayerCounts(), "", (0, 0)),
    (TraceCounts(9, 7, 6), LayerCounts(), "", (0, 3)),  # the longer side counts
    (TraceCounts(7, 9, 6), LayerCounts(), "", (0, 3)),
    (TraceCounts(None, 2, None), LayerCounts(), "", (0, 2)),
    (TraceCounts(), LayerCounts(5, 3), "", (0, 2)),
    (TraceCounts(), LayerCounts(5), "", (0, 5)),
    (TraceCounts(), LayerCounts(), "cl", (1, 2)),
    (TraceCounts(4, 4, 3), LayerCounts(5, 4), "ccl", (2, 5)),
])  # fmt: skip
def test_how_wrong_a_comparison_is(
    trace: TraceCounts, layers: LayerCounts, kinds: str, wrong: tuple[int, int]
) -> None:
    """Convolutions come first, then lines, layers and mismatches together."""
    names = {"c": MismatchKind.CONVOLUTION, "l": MismatchKind.LAYER}
    found = Verification(Build().facts, trace=trace, layers=layers,
                         mismatches=[Mismatch(names[k], "n", {}, {}, "") for k in kinds])  # fmt: skip
    assert _wrong(found) == wrong


def test_notes_stand_in_the_order_of_what_they_are_about() -> None:
    """Which version was taken comes first; no note of the comparison is lost for it."""
    lines = LINES["apart"][2:-1]  # without those that tell the version
    at = next(i for i, x in enumerate(lines) if "fusing" in x)
    build = read_build(io.BytesIO("\n".join([*lines[:at], *[lines[at]] * 60, *lines[at:]]).encode()))
    first, second, third = verify(MODEL, build).notes
    assert "does not state its version" in first and "more mismatches" in second and "silu-add" in third
