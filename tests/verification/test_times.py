"""The estimated time held against a build that was profiled or timed: figures by hand from the same estimate."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from qdqtool.agreement import BuildFacts
from qdqtool.buildlog.records import ProfileRow
from qdqtool.buildlog.types import Build, BuildSource
from qdqtool.errors import QdqtoolError
from qdqtool.graph import Model
from qdqtool.prediction import predict
from qdqtool.render.verify_text import render_verification, verdict
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import chosen
from qdqtool.timing.physics import constants
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification.api import exit_code
from qdqtool.verification.times import compare_times, not_compared, plain_in
from qdqtool.verified import Verification
from tests.trt.builder import Graph

GPU, TARGET = "RTX 3060", TARGETS["trt8.6"]


def chain(length: int = 8) -> Model:
    g = Graph()
    x = g.input(1, 16, 32, 32)
    for i in range(length):
        x = g.relu(g.conv(x, f"c{i}", 16), f"r{i}")
    return Model(g.model(x))


MODEL = chain()
PREDICTED = predict(MODEL, TARGET, advice=False)
TIME = estimate(MODEL, PREDICTED, chosen(GPU, None), TARGET, plain=Precision.FP16, compare=False)
OVERHEAD = constants().overhead_us * 1e-3


def row(name: str, ms: float) -> ProfileRow:
    return ProfileRow(name, 100 * ms, ms, ms, 0.0)


def profile(*factors: float) -> list[ProfileRow]:
    """A row for each of the first layers: so many times what is estimated for it."""
    named = zip(PREDICTED.layers, TIME.layers, factors, strict=False)
    return [row(layer.name, value * factor) for layer, value, factor in named]


def compared(build: Build) -> dict[str, object]:
    found = compare_times(MODEL, PREDICTED, build, TARGET)
    assert found is not None
    return found


def test_without_times_or_gpu_there_is_nothing_to_compare() -> None:
    """Rows or a median are enough, either alone; a GPU that nobody names is needed for both."""
    timed = {"GPU Compute Time": {"median": 1.0}}
    assert compare_times(MODEL, PREDICTED, Build(device=GPU), TARGET) is None
    assert compare_times(MODEL, PREDICTED, Build(performance=timed), TARGET) is None
    assert compare_times(MODEL, PREDICTED, Build(profile_rows=profile(1.0)), TARGET) is None
    assert compare_times(MODEL, PREDICTED, Build(device=GPU, performance=timed), TARGET) is not None
    assert compare_times(MODEL, PREDICTED, Build(device=GPU, profile_rows=profile(1.0)), TARGET) is not None
    named = compare_times(MODEL, PREDICTED, Build(performance=timed), TARGET, GPU, 1500.0)
    assert named is not None and named["clock_mhz"] == 1500
    with pytest.raises(QdqtoolError, match="no such GPU"):
        compare_times(MODEL, PREDICTED, Build(performance=timed), TARGET, "no such GPU")


@pytest.mark.parametrize(("told", "measured"), [
    ({"median": 2.0, "mean": 3.0}, 2.0), ({"mean": 3.0}, 3.0), ({"percentile(99%)": 4.0}, None), ({}, None),
])  # fmt: skip
def test_what_is_taken_for_the_measured_time(told: dict[str, float], measured: float | None) -> None:
    """The median, else the mean, else the profile's rows, each less what profiling adds and none below zero."""
    rows = [row("a", OVERHEAD + 0.5), row("b", OVERHEAD + 0.25),
            row("c", OVERHEAD / 2)]  # fmt: skip
    found = compared(Build(device=GPU, performance={"GPU Compute Time": told} if told else {}, profile_rows=rows))
    assert found["built_ms"] == pytest.approx(0.75 if measured is None else measured)
    assert str(found["built_from"]).startswith("sum of the profile less" if measured is None else "GPU compute time")


@pytest.mark.parametrize(("measured", "within"), [
    (TIME.low_ms, True), (TIME.high_ms, True), (TIME.low_ms * 0.999, False), (TIME.high_ms * 1.001, False),
    (TIME.total_ms, True),
])  # fmt: skip
def test_the_range_holds_its_ends(measured: float, within: bool) -> None:
    found = compared(Build(device=GPU, performance={"GPU Compute Time": {"median": measured}}))
    assert found["within"] is within
    assert (found["predicted_ms"], found["low_ms"], found["high_ms"]) == (TIME.total_ms, TIME.low_ms, TIME.high_ms)
    assert found["layers"] == {"compared": 0, "median_error": None}
    assert found["slow"] == []


def test_layer_by_layer() -> None:
    """Layers of both sides by name; the error is relative to what was measured; rows of no time tell nothing."""
    factors = (0.5, 1.0, 2.0, 4.0)
    rows = [*profile(*factors), row("of no layer", 9.0)]
    found = compared(Build(device=GPU, profile_rows=rows))
    errors = [abs(1 / f - 1) for f in factors]
    assert found["layers"] == {"compared": 4, "median_error": pytest.approx(statistics.median(errors))}
    unmeasured = [replace(rows[0], average_ms=0.0), *rows[1:]]
    assert compared(Build(device=GPU, profile_rows=unmeasured))["layers"] == {
        "compared": 3, "median_error": pytest.approx(statistics.median(errors[1:]))}  # fmt: skip


def test_the_slowest_layers_are_named() -> None:
    """Those above one and a half times the estimate, at most five, those that lose most milliseconds first."""
    factors = (1.49, 1.0, 1.6, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0)
    found = compared(Build(device=GPU, profile_rows=profile(*factors)))
    lost = [(v * (f - 1), x.name) for x, v, f in zip(PREDICTED.layers, TIME.layers, factors, strict=False) if f > 1.5]
    assert len(lost) > 5
    told = found["slow"]
    assert isinstance(told, list)
    assert [one["name"] for one in told] == [name for _, name in sorted(lost, key=lambda p: -p[0])[:5]]
    by_name = {x.name: v for x, v in zip(PREDICTED.layers, TIME.layers, strict=False)}
    for one in told:
        assert one["predicted_ms"] == by_name[one["name"]] < one["built_ms"] / 1.5


@pytest.mark.parametrize(("flags", "plain"), [
    ((), Precision.FP16), (("int8",), Precision.FP32), (("int8", "fp16"), Precision.FP16),
    (("best",), Precision.FP16), (("bf16",), Precision.FP16), (("stronglyTyped",), Precision.FP16),
    (("fp32", "int8"), Precision.FP32),
])  # fmt: skip
def test_what_floats_the_builder_may_use(flags: tuple[str, ...], plain: Precision) -> None:
    assert plain_in(Build(precision_flags=frozenset(flags))) == plain


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_time_outside_the_range_is_said_first_and_last(factor: float) -> None:
    """In the verdict and in the last line; a time within is neither, and no time changes the exit code."""
    built = TIME.low_ms * factor if factor < 1 else TIME.high_ms * factor
    found = compared(Build(device=GPU, performance={"GPU Compute Time": {"median": built}}))
    result = Verification(BuildFacts(BuildSource.TRTEXEC_LOG, (), "8.6.1", GPU, True, ()), times=found)
    text = render_verification(result, 200).rstrip().splitlines()
    outside = f"{built:.3f} ms measured, outside the estimated {TIME.low_ms:.3f} to {TIME.high_ms:.3f}"
    assert (outside in verdict(result)) is (outside in text[-1]) is (factor != 1)
    assert text[0].startswith(verdict(result)[:40]) and exit_code(result) == 0


def test_a_build_of_a_shared_name_says_why_no_time_is_compared() -> None:
    timed = Build(device="Orin", performance={"GPU Compute Time": {"median": 1.0}})
    assert "is the name of 8 GPUs" in not_compared(timed)[0]
    assert not_compared(replace(timed, gpu={"SMs": "16", "Compute Capability": "8.7"})) == []
    assert not_compared(Build(device="Orin")) == []
