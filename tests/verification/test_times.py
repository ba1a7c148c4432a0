"""The estimated time held against a build that was profiled or timed: figures by hand from the same estimate."""

import statistics
from dataclasses import replace

import pytest

from qdqtool.base.notes import Remark, remarks
from qdqtool.buildlog.agreement import (
    BuildFacts,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.types import Build, BuildSource, ProfileRow
from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.render.build_text import render_verification, verdict
from qdqtool.render.output import as_options
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import chosen
from qdqtool.timing.physics import constants
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification.api import _wrong, compare_assuming, exit_code, verify
from qdqtool.verification.lines import Verification
from qdqtool.verification.times import compare_times, measured_time, not_compared, plain_in
from tests.buildlog.samples import build_of
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of

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


def test_nothing_to_compare(g: Graph) -> None:
    """Rows or a median are enough, either alone; a GPU that nobody names is needed for both."""
    timed = {"GPU Compute Time": {"median": 1.0}}
    for build, enough in (
        (Build(device=GPU), False),
        (Build(performance=timed), False),
        (Build(profile_rows=profile(1.0)), False),
        (Build(device=GPU, performance=timed), True),
        (Build(device=GPU, profile_rows=profile(1.0)), True),
    ):
        assert (compare_times(MODEL, PREDICTED, build, TARGET) is not None) is enough
    named = compare_times(MODEL, PREDICTED, Build(performance=timed), TARGET, GPU, 1500.0)
    assert named is not None and named["clock_mhz"] == 1500
    with pytest.raises(QdqtoolError, match="no such GPU"):
        compare_times(MODEL, PREDICTED, Build(performance=timed), TARGET, "no such GPU")
    model = Model(g.model(g.conv(g.input(1, 16, 8, 8), "c", 16)))
    predicted = predict(model, OTHER_TARGET)
    build = build_of(log_of(predicted))
    result = compare_assuming(model, predicted, build, OTHER_TARGET)
    assert result.prediction is predicted and result.notes == [] and result.mismatches == []


@pytest.mark.parametrize(
    ("told", "measured"),
    [
        ({"median": 2.0, "mean": 3.0}, 2.0),
        ({"mean": 3.0}, 3.0),
        ({"percentile(99%)": 4.0}, None),
        ({}, None),
    ],
)
def test_what_is_taken_for_the_measured_time(
    told: dict[str, float], measured: float | None
) -> None:
    """The median, else the mean, else the profile's rows, each less what profiling adds and none below zero."""
    rows = [row("a", OVERHEAD + 0.5), row("b", OVERHEAD + 0.25), row("c", OVERHEAD / 2)]
    found = compared(
        Build(device=GPU, performance={"GPU Compute Time": told} if told else {}, profile_rows=rows)
    )
    assert found["built_ms"] == pytest.approx(0.75 if measured is None else measured)
    assert str(found["built_from"]).startswith(
        "sum of the profile less" if measured is None else "GPU compute time"
    )


@pytest.mark.parametrize(
    ("measured", "within"),
    [
        (TIME.low_ms, True),
        (TIME.high_ms, True),
        (TIME.low_ms * 0.999, False),
        (TIME.high_ms * 1.001, False),
        (TIME.total_ms, True),
    ],
)
def test_the_range_holds_its_ends(measured: float, within: bool) -> None:
    found = compared(Build(device=GPU, performance={"GPU Compute Time": {"median": measured}}))
    assert (found["predicted_ms"], found["low_ms"], found["high_ms"]) == (
        TIME.total_ms,
        TIME.low_ms,
        TIME.high_ms,
    )
    assert (found["within"], found["layers"], found["slow"]) == (
        within,
        {"compared": 0, "median_error": None},
        [],
    )


def test_what_is_compared_layer_by_layer() -> None:
    """Layers of both sides by name; the error is relative to what was measured; rows of no time tell nothing."""
    factors = (0.5, 1.0, 2.0, 4.0)
    rows = [*profile(*factors), row("of no layer", 9.0)]
    found = compared(Build(device=GPU, profile_rows=rows))
    errors = [abs(1 / f - 1) for f in factors]
    assert found["layers"] == {
        "compared": 4,
        "median_error": pytest.approx(statistics.median(errors)),
    }
    unmeasured = [replace(rows[0], average_ms=0.0, median_ms=None), *rows[1:]]
    assert compared(Build(device=GPU, profile_rows=unmeasured))["layers"] == {
        "compared": 3,
        "median_error": pytest.approx(statistics.median(errors[1:])),
    }
    # Those above one and a half times the estimate, at most five, those that lose most milliseconds first
    factors = (1.49, 1.0, 1.6, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0)
    found = compared(Build(device=GPU, profile_rows=profile(*factors)))
    lost = [
        (v * (f - 1), x.name)
        for x, v, f in zip(PREDICTED.layers, TIME.layers, factors, strict=False)
        if f > 1.5
    ]
    assert len(lost) > 5
    told = found["slow"]
    assert isinstance(told, list)
    assert [one["name"] for one in told] == [
        name for _, name in sorted(lost, key=lambda p: -p[0])[:5]
    ]
    by_name = {x.name: v for x, v in zip(PREDICTED.layers, TIME.layers, strict=False)}
    for one in told:
        assert one["predicted_ms"] == by_name[one["name"]] < one["built_ms"] / 1.5
    # One slow execution moves the average of a row alone
    rows = [
        replace(r, average_ms=9.0 * r.average_ms, median_ms=r.average_ms) for r in profile(1.0, 1.0)
    ]
    assert [r.ms for r in rows] == [r.average_ms for r in profile(1.0, 1.0)]
    assert compared(Build(device=GPU, profile_rows=rows)) == compared(
        Build(device=GPU, profile_rows=profile(1.0, 1.0))
    )
    assert measured_time(Build(profile_rows=rows))[0] == pytest.approx(sum(r.ms for r in rows))


@pytest.mark.parametrize(
    ("flags", "plain"),
    [
        ((), Precision.FP16),
        (("int8",), Precision.FP32),
        (("int8", "fp16"), Precision.FP16),
        (("best",), Precision.FP16),
        (("bf16",), Precision.FP16),
        (("stronglyTyped",), Precision.FP16),
        (("fp32", "int8"), Precision.FP32),
    ],
)
def test_what_floats_the_builder_may_use(flags: tuple[str, ...], plain: Precision) -> None:
    assert plain_in(Build(precision_flags=frozenset(flags))) == plain


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_time_outside_the_range_is_said_first_and_last(factor: float) -> None:
    """In the verdict and in the last line; a time within is neither, and no time changes the exit code."""
    built = TIME.low_ms * factor if factor < 1 else TIME.high_ms * factor
    found = compared(Build(device=GPU, performance={"GPU Compute Time": {"median": built}}))
    result = Verification(
        BuildFacts(BuildSource.TRTEXEC_LOG, (), "8.6.1", GPU, True, ()), times=found
    )
    text = render_verification(result, 200).rstrip().splitlines()
    outside = (
        f"{built:.3f} ms measured, outside the estimated {TIME.low_ms:.3f} to {TIME.high_ms:.3f}"
    )
    assert (outside in verdict(result)) is (outside in text[-1]) is (factor != 1)
    assert text[0].startswith(verdict(result)[:40]) and exit_code(result) == 0


def test_notes_and_nothing_to_compare() -> None:
    """Which version was taken comes first; no note of the comparison is lost for it."""
    lines = LINES["apart"][2:-1]  # without those that tell the version
    at = next(i for i, x in enumerate(lines) if "fusing" in x)
    build = build_of([*lines[:at], *[lines[at]] * 60, *lines[at:]])
    first, second, third = verify(SKIP, build).notes
    assert first.remark in (Remark.NO_VERSION, Remark.AMBIGUOUS_VERSION, Remark.VERSION_OF_SPELLING)
    assert second.remark is Remark.MORE_MISMATCHES and third.values["name"] == "silu-add"
    timed = Build(device="Orin", performance={"GPU Compute Time": {"median": 1.0}})
    assert remarks(not_compared(timed)) == [Remark.NO_ESTIMATE]
    assert not_compared(replace(timed, gpu={"SMs": "16", "Compute Capability": "8.7"})) == []
    assert not_compared(Build(device="Orin")) == []
    assert not_compared(Build(profile_rows=[row("a", 0.25)]))[0].values["ms"] == 0.25


@pytest.mark.parametrize(
    ("facts", "contradicts"),
    [
        ({"Compute Capability": "8.7", "SMs": "16"}, True),
        ({"Compute Capability": "8.6", "SMs": "28"}, False),
        ({"Compute Capability": "8.6", "SMs": "84"}, True),
        ({}, False),
    ],
)
def test_a_log_of_another_device_is_said(facts: dict[str, str], contradicts: bool) -> None:
    timed = Build(device="Orin", gpu=facts, performance={"GPU Compute Time": {"median": 1.0}})
    found = compare_times(MODEL, PREDICTED, timed, TARGET, "RTX 3060")
    assert found is not None and (Remark.CONTRADICTED in remarks(found["notes"])) is contradicts
    assert not contradicts or "--gpu" in as_options(found["notes"][0])  # what to do


OTHER_TARGET = TARGETS["trt8.5"]


def skip_connection() -> Model:
    """Convolution, SiLU and an Add with a quantized skip: one layer, or the Add apart (which 8.5 is taken to make)."""
    g = Graph()
    x = g.pair(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r0"), "skip")
    y = g.add(g.silu(g.conv(x, "c1", 16, scale=None), "s"), x, "sum")
    return Model(g.model(g.conv(y, "end", 16)))


SKIP = skip_connection()
OF_SKIP = predict(SKIP, OTHER_TARGET)
LINES = {
    value: log_of(predict(SKIP, OTHER_TARGET, assume={"silu-add": value}))
    for value in ("apart", "fused")
}


def settled(build: Build) -> Verification:
    return compare_assuming(SKIP, predict(SKIP, OTHER_TARGET), build, OTHER_TARGET)


def test_which_of_two_outcomes_a_build_shows() -> None:
    result = settled(build_of(LINES["apart"]))
    assert (result.mismatches, result.notes) == (
        [],
        [Remark.SHOWN_AS_ASSUMED(name="silu-add", value="apart", target="trt8.5")],
    )
    assert result.prediction is not None and result.prediction.summary() == OF_SKIP.summary()
    assert result.prediction.assumptions[0].why == OF_SKIP.assumptions[0].why
    # The prediction that is handed on is the one that the build shows, and says so
    result = settled(build_of(LINES["fused"]))
    assert (result.mismatches, result.notes) == (
        [],
        [Remark.SHOWN_OTHERWISE(name="silu-add", value="fused", assumed="apart", target="trt8.5")],
    )
    assert result.prediction is not None
    assert (
        result.prediction.convolution("c1").output
        == Precision.INT8
        != OF_SKIP.convolution("c1").output
    )
    (told,) = result.prediction.assumptions
    assert (told.value, told.why) == ("fused", Remark.SHOWN_BY_BUILD())
    # A log that ends before the passes fits both alike; the default is kept
    result = settled(replace(build_of(LINES["fused"]), layers=[], trace=[], headings=[]))
    assert result.notes == [
        Remark.NOT_SHOWN_BY_BUILD(name="silu-add", values=["apart", "fused"], value="apart")
    ]
    assert (
        result.prediction is not None
        and result.prediction.convolution("c1").output == Precision.FLOAT
    )


@pytest.mark.parametrize("value", ["apart", "fused"])
def test_what_fits_nowhere_goes_to_the_nearest(value: str) -> None:
    """One layer besides is otherwise than predicted: the build still shows which of the two it is."""
    at = next(i for i, x in enumerate(LINES[value]) if x.startswith("Layer(") and " + end" in x)
    changed = [x.replace("Float", "Int8") if i == at else x for i, x in enumerate(LINES[value])]
    result = settled(build_of(changed))
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == ["end"]
    note = result.notes[0]
    assert note.remark in (Remark.NEAREST_AS_ASSUMED, Remark.NEAREST_OTHERWISE)
    assert (note.values["name"], note.values["value"]) == ("silu-add", value)


@pytest.mark.parametrize(
    ("trace", "layers", "kinds", "wrong"),
    [
        (TraceCounts(), LayerCounts(), "", (0, 0)),
        (
            TraceCounts(9),
            LayerCounts(),
            "",
            (0, 0),
        ),  # no pass lines in the build: nothing of them is wrong
        (TraceCounts(9, 0, 0), LayerCounts(), "", (0, 0)),
        (TraceCounts(9, 7, 6), LayerCounts(), "", (0, 3)),  # the longer side counts
        (TraceCounts(7, 9, 6), LayerCounts(), "", (0, 3)),
        (TraceCounts(None, 2, None), LayerCounts(), "", (0, 2)),
        (TraceCounts(), LayerCounts(5, 3), "", (0, 2)),
        (TraceCounts(), LayerCounts(5), "", (0, 5)),
        (TraceCounts(), LayerCounts(), "cl", (1, 2)),
        (TraceCounts(4, 4, 3), LayerCounts(5, 4), "ccl", (2, 5)),
    ],
)
def test_how_wrong_a_comparison_is(
    trace: TraceCounts, layers: LayerCounts, kinds: str, wrong: tuple[int, int]
) -> None:
    """Convolutions come first, then lines, layers and mismatches together."""
    names = {"c": MismatchKind.CONVOLUTION, "l": MismatchKind.LAYER}
    found = Verification(
        Build().facts,
        trace=trace,
        layers=layers,
        mismatches=[Mismatch(names[k], "n", {}, {}, Difference.GONE) for k in kinds],
    )
    assert _wrong(found) == wrong
