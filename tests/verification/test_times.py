import statistics
from dataclasses import replace
from typing import Any

import pytest

from qdqtool import Precision, Verification
from qdqtool.buildlog.agreement import (
    BuildFacts,
    ConvolutionCounts,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.types import Build, BuildSource, ProfileRow
from qdqtool.errors import QdqtoolError
from qdqtool.formats.build_text import render_verification, verdict
from qdqtool.formats.output import as_options
from qdqtool.ir.graph import Model
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import choose_gpu
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.physics import load_constants
from qdqtool.trt.targets import TARGETS
from qdqtool.util.notes import Note
from qdqtool.verification.api import (
    compare_under_assumptions,
    count_disagreements,
    exit_code,
    verify,
)
from qdqtool.verification.times import (
    compare_times,
    explain_missing_estimate,
    find_measured_time,
    float_layer_precision,
)
from tests.buildlog.samples import build_of
from tests.errors import has
from tests.notes import note, note_codes
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
TIME = estimate_time(
    MODEL, PREDICTED, choose_gpu(GPU, None), TARGET, float_type=Precision.FP16, compare=False
)
OVERHEAD = load_constants().overhead_us * 1e-3


def row(name: str, ms: float) -> ProfileRow:
    return ProfileRow(name, 100 * ms, ms, ms, 0.0)


def profile(*factors: float) -> list[ProfileRow]:
    named = zip(PREDICTED.layers, TIME.layers, factors, strict=False)
    return [row(layer.name, value * factor) for layer, value, factor in named]


def compared(build: Build) -> dict[str, object]:
    return compare_times(MODEL, PREDICTED, build, TARGET, GpuOptions())


def timed(median: float, **fields: Any) -> Build:
    return Build(performance={"GPU Compute Time": {"median": median}}, **fields)


@pytest.mark.parametrize(
    ("build", "is_compared"),
    [
        (Build(device=GPU), False),
        (timed(1.0), False),
        (Build(profile_rows=profile(1.0)), False),
        (timed(1.0, device=GPU), True),
        (Build(device=GPU, profile_rows=profile(1.0)), True),
    ],
    ids=["no time", "no GPU", "no GPU, profile", "time", "profile"],
)
def test_compare_times_needs_a_gpu_and_a_time(build: Build, is_compared: bool) -> None:
    assert (compare_times(MODEL, PREDICTED, build, TARGET, GpuOptions()) is not None) is is_compared


def test_compare_times_on_another_gpu() -> None:
    assert (
        compare_times(MODEL, PREDICTED, timed(1.0), TARGET, GpuOptions(GPU, 1500.0))["clock_mhz"]
        == 1500
    )


def test_compare_times_rejects_unknown_gpus() -> None:
    with pytest.raises(
        QdqtoolError, match="'no GPU'", check=has("unknown-choice", parameter="gpu")
    ):
        compare_times(MODEL, PREDICTED, timed(1.0), TARGET, GpuOptions("no GPU"))


@pytest.mark.parametrize(
    ("figures", "measured", "source"),
    [
        ({"median": 2.0, "mean": 3.0}, 2.0, "median GPU compute time"),
        ({"mean": 3.0}, 3.0, "mean GPU compute time"),
        ({"percentile(99%)": 4.0}, None, "sum of the layers' median times in the profile minus"),
        ({}, None, "sum of the layers' median times in the profile minus"),
    ],
)
def test_measured_time(figures: dict[str, float], measured: float | None, source: str) -> None:
    rows = [row("a", OVERHEAD + 0.5), row("b", OVERHEAD + 0.25), row("c", OVERHEAD / 2)]
    times = compared(
        Build(
            device=GPU,
            performance={"GPU Compute Time": figures} if figures else {},
            profile_rows=rows,
        )
    )
    assert times["built_ms"] == pytest.approx(0.75 if measured is None else measured)
    assert str(times["built_from"]).startswith(source)


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
def test_range_includes_its_ends(measured: float, within: bool) -> None:
    times = compared(timed(measured, device=GPU))
    assert times == times | {
        "predicted_ms": TIME.total_ms,
        "low_ms": TIME.low_ms,
        "high_ms": TIME.high_ms,
        "within": within,
        "slow": [],
        "layers": {"compared": 0, "median_error": None},
    }


@pytest.mark.parametrize("unmeasured", [0, 1])
def test_median_error_of_layers(unmeasured: int) -> None:
    """Errors are relative to the measured time.

    Rows without a time or without a layer are ignored.
    """
    factors = (0.5, 1.0, 2.0, 4.0)
    rows = [*profile(*factors), row("of no layer", 9.0)]
    rows[:unmeasured] = [replace(r, average_ms=0.0, median_ms=None) for r in rows[:unmeasured]]
    median = statistics.median([abs(1 / f - 1) for f in factors[unmeasured:]])
    assert compared(Build(device=GPU, profile_rows=rows))["layers"] == {
        "compared": 4 - unmeasured,
        "median_error": pytest.approx(median),
    }


def test_five_slow_layers_that_lose_most_time() -> None:
    factors = (1.49, 1.0, 1.6, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0)
    slow = compared(Build(device=GPU, profile_rows=profile(*factors)))["slow"]
    losses = {
        x.name: v * (f - 1)
        for x, v, f in zip(PREDICTED.layers, TIME.layers, factors, strict=False)
        if f > 1.5
    }
    assert len(losses) > 5 and isinstance(slow, list)
    assert [s["name"] for s in slow] == sorted(losses, key=lambda name: -losses[name])[:5]
    estimates = {x.name: v for x, v in zip(PREDICTED.layers, TIME.layers, strict=False)}
    assert all(s["predicted_ms"] == estimates[s["name"]] < s["built_ms"] / 1.5 for s in slow)


def test_medians_of_the_profile_are_used() -> None:
    """One slow execution changes the average but not the median."""
    usual = profile(1.0, 1.0)
    rows = [replace(r, average_ms=9.0 * r.average_ms, median_ms=r.average_ms) for r in usual]
    assert [r.ms for r in rows] == [r.average_ms for r in usual]
    before, after = (compared(Build(device=GPU, profile_rows=p)) for p in (usual, rows))
    assert after == before
    assert find_measured_time(Build(profile_rows=rows))[0] == pytest.approx(sum(r.ms for r in rows))


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
def test_float_precision_of_flags(flags: tuple[str, ...], plain: Precision) -> None:
    assert float_layer_precision(Build(precision_flags=frozenset(flags))) == plain


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_time_outside_the_range_is_in_the_first_line(factor: float) -> None:
    built = TIME.low_ms * factor if factor < 1 else TIME.high_ms * factor
    facts = BuildFacts(BuildSource.TRTEXEC_LOG, (), "8.6.1", GPU, True, ())
    result = Verification(facts, times=compared(timed(built, device=GPU)))
    first = render_verification(result, 300).lines[0]
    outside = (
        f"{built:.3f} ms measured, outside the estimated {TIME.low_ms:.3f} to {TIME.high_ms:.3f}"
    )
    assert (outside in verdict(result)) is (factor != 1)
    assert first.startswith("PASS: ") and (outside in first) is (factor != 1)
    assert exit_code(result) == 0


def test_verify_states_its_result_once_and_names_layers_with_other_names() -> None:
    facts = BuildFacts(BuildSource.LAYER_JSON, (), "8.4.0", None, True, ())
    layers = LayerCounts(34, 32, ("fc [307]", "squeeze [307]"), {"Constant": 9, "Reformat": 4})
    page = render_verification(Verification(facts, layers=layers), 100)
    assert page.lines[0].startswith("PASS: ") and "2 of 34 engine layers" in page.lines[0]
    text = str(page)
    assert text.count("PASS") == 1 and "32 of 34" in text
    assert "13 further layers" in text and "9 Constant, 4 Reformat" in text
    assert all(name in text for name in layers.unmatched)


@pytest.mark.parametrize(("allow_partial", "outcome"), [(False, "INCOMPLETE"), (True, "PASS")])
def test_verify_of_layer_names_states_that_no_types_were_compared(
    allow_partial: bool, outcome: str
) -> None:
    facts = Build(names_only=True).facts
    result = Verification(facts, ConvolutionCounts(43, 0, 43), LayerCounts(76, 67, ("a",) * 9))
    page = render_verification(result, 300, allow_partial=allow_partial)
    assert page.lines[0] == (
        f"{outcome}: TensorRT (unknown version) has no data types to compare: the build lists "
        "names of layers only; 9 of 76 engine layers have another name"
    )
    assert "67 of 76 have the predicted name\n" in str(page)
    assert exit_code(result, allow_partial) == (0 if allow_partial else 2)


@pytest.mark.parametrize(
    ("require_shapes", "line"),
    [
        (
            False,
            "PASS by names: TensorRT 8.4.0 built what was predicted; the build lists no shapes",
        ),
        (True, "INCOMPLETE: TensorRT 8.4.0 agrees, but lists no shapes to compare"),
    ],
)
def test_verify_without_shapes_passes_by_names_alone(require_shapes: bool, line: str) -> None:
    facts = BuildFacts(BuildSource.LAYER_JSON, (), "8.4.0", None, True, ())
    result = Verification(facts, notes=[Note("the build lists no shapes", code="no-shapes")])
    assert render_verification(result, 300, require_shapes=require_shapes).lines[0] == line
    assert exit_code(result, require_shapes=require_shapes) == (2 if require_shapes else 0)


def test_verify_notes_begin_with_the_version() -> None:
    lines = LINES["apart"][2:-1]  # without the lines that contain the version
    index = next(i for i, x in enumerate(lines) if "fusing" in x)
    build = build_of([*lines[:index], *[lines[index]] * 60, *lines[index:]])
    first, second, third = verify(SKIP, build).notes
    assert first.code == "no-version"
    assert second.code == "more-mismatches" and third.values["name"] == "silu-add"


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (timed(1.0, device="Orin"), [("no-estimate", 1.0)]),
        (timed(1.0, device="Orin", gpu={"SMs": "16", "Compute Capability": "8.7"}), []),
        (Build(device="Orin"), []),
        (Build(profile_rows=[row("a", 0.25)]), [("no-estimate", 0.25)]),
    ],
    ids=["ambiguous GPU", "GPU", "no time", "profile"],
)
def test_explain_missing_estimate(build: Build, expected: list[tuple[str, float]]) -> None:
    assert [(n.code, n.values["ms"]) for n in explain_missing_estimate(build)] == expected


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"gpu": {"Compute Capability": "8.7", "SMs": "16"}}, "contradicted", "--gpu"),
        ({"gpu": {"Compute Capability": "8.6", "SMs": "28"}}, "", ""),
        ({"gpu": {"Compute Capability": "8.6", "SMs": "84"}}, "contradicted", "--gpu"),
        ({"gpu": {"SMs": "28", "Compute Clock Rate": "1.5 GHz"}}, "other-clock", "--clock 1500"),
        ({"gpu": {"SMs": "28", "Compute Clock Rate": "1.777 GHz"}}, "", ""),
        (
            {"options": {"Inference": {"CUDA Graph": "Enabled"}}},
            "cuda-graph",
            f"without a CUDA graph: {TIME.total_ms:.3f} ms",
        ),
        ({"options": {"Inference": {"CUDA Graph": "Disabled"}}}, "", ""),
        ({"precision_flags": frozenset({"int8"})}, "no-fp16", "--no-fp16"),
        ({"precision_flags": frozenset({"int8", "fp16"})}, "", ""),
        ({}, "", ""),
    ],
)
def test_compare_times_notes_conditions_that_predict_does_not_assume(
    fields: dict[str, Any], code: str, text: str
) -> None:
    build = timed(1.0, device="Orin", **fields)
    times = compare_times(MODEL, PREDICTED, build, TARGET, GpuOptions("RTX 3060"))
    codes = {"contradicted", "other-clock", "cuda-graph", "no-fp16"}
    assert codes & {*note_codes(times["notes"])} == {code} - {""}
    assert text in as_options("".join(times["notes"]))


OTHER_TARGET = TARGETS["trt8.5"]


def skip_connection() -> Model:
    """Return a convolution, SiLU and an Add with a quantized skip input.

    TensorRT 8.5 is assumed not to fuse the Add.
    """
    g = Graph()
    x = g.pair(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r0"), "skip")
    return Model(
        g.model(g.conv(g.add(g.silu(g.conv(x, "c1", 16, scale=None), "s"), x, "sum"), "end", 16))
    )


SKIP = skip_connection()
LINES = {
    value: log_of(predict(SKIP, OTHER_TARGET, assume={"silu-add": value}))
    for value in ("apart", "fused")
}


def compare_skip(build: Build) -> Verification:
    return compare_under_assumptions(SKIP, predict(SKIP, OTHER_TARGET), build, OTHER_TARGET)


def test_compare_under_assumptions_without_assumptions(g: Graph) -> None:
    model = Model(g.model(g.conv(g.input(1, 16, 8, 8), "c", 16)))
    prediction = predict(model, OTHER_TARGET)
    result = compare_under_assumptions(
        model, prediction, build_of(log_of(prediction)), OTHER_TARGET
    )
    assert result.prediction is prediction and not result.notes and not result.mismatches


@pytest.mark.parametrize(
    ("value", "assumed", "output", "why"),
    [
        ("apart", {}, Precision.FLOAT, predict(SKIP, OTHER_TARGET).assumptions[0].why),
        ("fused", {"assumed": "apart"}, Precision.INT8, note("shown-by-build")),
    ],
)
def test_build_shows_the_value(
    value: str, assumed: dict[str, str], output: Precision, why: object
) -> None:
    # 8.5 is assumed not to fuse the Add. The result contains the prediction of the value.
    result = compare_skip(build_of(LINES[value]))
    expected = note("shown-by-build", name="silu-add", value=value, target="trt8.5", **assumed)
    assert (result.mismatches, result.notes) == ([], [expected])
    assert result.prediction.convolution("c1").output == output
    (assumption,) = result.prediction.assumptions
    assert (assumption.value, assumption.why) == (value, why)


def test_build_without_passes_shows_neither_value() -> None:
    result = compare_skip(replace(build_of(LINES["fused"]), layers=[], trace=[], headings=[]))
    assert result.notes == [note("not-shown-by-build", name="silu-add", value="apart")]
    assert result.prediction.convolution("c1").output == Precision.FLOAT


@pytest.mark.parametrize("value", ["apart", "fused"])
def test_build_with_a_mismatch_shows_the_nearest_value(value: str) -> None:
    lines = [
        x.replace("Float", "Int8") if x.startswith("Layer(") and " + end" in x else x
        for x in LINES[value]
    ]
    assert lines != LINES[value]
    result = compare_skip(build_of(lines))
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == ["end"]
    note = result.notes[0]
    assert note.code == "nearest-to-build"
    assert (note.values["name"], note.values["value"]) == ("silu-add", value)


@pytest.mark.parametrize(
    ("trace", "layers", "kinds", "wrong"),
    [
        (TraceCounts(), LayerCounts(), "", (0, 0)),
        (TraceCounts(9), LayerCounts(), "", (0, 0)),  # no pass lines in the build
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
def test_count_errors(
    trace: TraceCounts, layers: LayerCounts, kinds: str, wrong: tuple[int, int]
) -> None:
    """Wrong convolutions, and the sum of wrong lines, layers and mismatches."""
    names = {"c": MismatchKind.CONVOLUTION, "l": MismatchKind.LAYER}
    mismatches = [Mismatch(names[k], "n", {}, {}, Difference.ABSENT) for k in kinds]
    result = Verification(Build().facts, trace=trace, layers=layers, mismatches=mismatches)
    assert count_disagreements(result) == wrong
