import json
from collections import Counter

import pytest

from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.summary import describe_contents, summarize
from qdqtool.buildlog.types import Section
from qdqtool.ir.precision import Precision
from qdqtool.trt import trace
from tests.buildlog import samples
from tests.buildlog.evidence import build_file, folder
from tests.growth_factor import LINEAR, growth_factor
from tests.tables import rows

read, LOG = samples.build_of, samples.trtexec_log()


# Printed by TensorRT 7 to 10, by trtexec and by programs that log for it. Names and numbers are invented.
@pytest.mark.parametrize(("contents", "line"), rows("logs/lines.tsv"))
def test_read_build_single_line(line: str, contents: str) -> None:
    build = read(line + "\n")
    assert contents in "; ".join(describe_contents(build))
    assert json.loads(json.dumps(summarize(build)))["read"]
    assert build.lines.unexplained == (1 if "nobody has seen" in line else 0)


def test_blank_lines_are_counted() -> None:
    build = read("\n" * 50_000 + "[V] [TRT] Bindings:\na\n\nb\n" + "\n" * 50_000)
    assert (build.bindings, build.lines.total, build.lines.blank) == (["a"], 100_004, 100_001)


@pytest.mark.parametrize("line", ["\n", "xy\n"], ids=["blank", "unknown"])
def test_lines_without_content_are_read_in_linear_time(line: str) -> None:
    factor = growth_factor(
        lambda count: read(line * count + "[V] [TRT] Running: A on b\n" + line * count),
        LINEAR,
        longest=1 << 14,
    )
    assert factor <= LINEAR


@pytest.mark.parametrize(
    ("start", "part", "end"),
    [  # start, repeated part, end
        ("", "\x1b]", ""),
        ("Adding reformat layer: ", " (a) from ", ""),
        ("Adding network input: ", " with dtype: a, dimensions: (", ""),
        ("Swapping ", "( with ", ""),
        ("Running: X on ", "_clone_1", "x"),
        ("Swap the layer type of ", " from ", ""),
        ("Layer(a): b, Tactic: 0x1, ", " (A[", ""),
        ("", "a", " got cached result: "),
        ("", " [", ""),
        ("Skipping ", "a", ""),
        ("Skipping tactic ", " due to ", ""),
        ("Error ", "Assertion ", ""),
        ("", "x (y) profiling completed in ", ""),
    ],
)
def test_long_line_is_read_in_linear_time(start: str, part: str, end: str) -> None:
    def read_line(length: int) -> None:
        line = f"{start}{part * (length // len(part))}{end}"
        build = read(f"[V] [TRT] Running: A on b\n[V] [TRT] {line}\n{line}\n")
        summarize(build)
        for event in build.trace:
            base_name(event.subject)

    assert growth_factor(read_line, LINEAR, longest=1 << 18) <= LINEAR


def test_listing_of_an_earlier_build_in_the_log_does_not_count() -> None:
    build = read(LOG + LOG[: LOG.index("Engine Layer Information")])
    assert (build.layers, build.has_gap(Section.LISTING), build.complete) == ([], True, False)


I8, F32, F16 = Precision.INT8, Precision.FP32, Precision.FP16
# (inputs, output) of the convolutions, counted by hand in the recorded listings.
CONVOLUTIONS = {
    ("yolo-resnet18-orin-trt8502", "log.txt"): {
        ((I8,), I8): 28,
        ((I8, F32), F32): 8,
        ((I8,), F32): 7,
    },
    ("resnet18-qat-rtx2000-trt8510", "log.txt"): {
        ((I8,), I8): 12,
        ((I8, I8), I8): 8,
        ((I8,), F32): 1,
    },
    ("centernet-resnet34-qat-trt80", "log.txt"): {
        ((I8,), I8): 29,
        ((I8, I8), I8): 16,
        ((I8,), F32): 3,
    },
    ("resnet18-a100-qat", "graph.json"): {
        ((I8,), I8): 8,
        ((I8, F16), F16): 8,
        ((I8,), F16): 3,
        ((I8,), F32): 2,
    },
    ("resnet18-a100-qat-residual", "graph.json"): {
        ((I8,), I8): 12,
        ((I8, I8), I8): 7,
        ((I8, F32), F32): 1,
        ((I8,), F32): 1,
    },
    ("resnet18-a100-qat-residual-qgap", "graph.json"): {
        ((I8,), I8): 12,
        ((I8, I8), I8): 8,
        ((I8,), F32): 1,
    },
    ("mobilenetv2-titanrtx-qat-residual", "graph.json"): {
        ((I8,), I8): 41,
        ((I8, I8), I8): 10,
        ((I8,), F16): 1,
        ((I8,), F32): 1,
    },
}


def test_recorded_logs_are_understood() -> None:
    counts = {
        path.parent.name: read_build(path).lines for path in sorted(folder().glob("*/log.txt"))
    }
    shares = {
        case: c.unexplained / (c.total - c.timing - c.blank or 1) for case, c in counts.items()
    }
    assert len(shares) >= 6 and max(shares.values()) <= 0.01, shares
    assert all(c.total > 0 for c in counts.values())


def test_recorded_listings_and_profiles_have_layers_and_types() -> None:
    for path in [*sorted(folder().glob("*/graph.json")), *sorted(folder().glob("*/profile.json"))]:
        build = read_build(path)
        assert build.layers or build.profile_rows, path
        assert all(
            t.precision != Precision.UNKNOWN for x in build.layers for t in (*x.inputs, *x.outputs)
        ), path


@pytest.mark.parametrize("case", ["resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"])
def test_recorded_profile_times_every_layer(case: str) -> None:
    build = read_build(build_file(case, "graph.json"), build_file(case, "profile.json"))
    assert set(build.profile) == {x.name for x in build.layers}


def test_recorded_log_adds_types_to_layer_names() -> None:
    names = build_file("yolo-resnet18-orin-trt8502", "layer_info.json")
    build, whole = read_build(names), read_build(names, build_file("yolo-resnet18-orin-trt8502"))
    assert (build.names_only, build.complete) == (True, False)
    assert whole.complete and whole.layers[1].input_precision == Precision.FP32


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_recorded_convolutions_have_their_precisions(case: tuple[str, str]) -> None:
    build = read_build(build_file(*case))
    assert build.complete and CONVOLUTIONS[case] == Counter(
        (tuple(t.precision for t in x.inputs), x.output_precision)
        for x in build.layers
        if x.is_convolution
    )


@pytest.mark.parametrize(
    ("case", "version", "trace", "conversions", "reformats"),
    [
        ("yolo-resnet18-orin-trt8502", "8.5.2", 1117, 12, 6),
        ("resnet18-qat-rtx2000-trt8510", "8.5.10", 623, 1, 0),
    ],
)
def test_recorded_log_is_complete(
    case: str, version: str, trace: int, conversions: int, reformats: int
) -> None:
    path = build_file(case)
    build, text = read_build(path), path.read_text(errors="replace")
    assert (build.tensorrt, build.missing) == (version, [])
    words = (
        "Running: ",
        "Removing ",
        "Swapping ",
        ": Fusing ",
        ": fusing ",
        "Eliminating ",
        "Swap the layer type",
        "Convert layer type",
        "SqueezePushDown",
        "Merging layers",
        "Retargeting ",
        "Generating copy",
    )
    # Each optimizer line counts once, under the first word in it that is one of these.
    assert (
        len(build.trace)
        == trace
        == sum(
            any(word in line for word in words) and "] Timing Runner" not in line
            for line in text.splitlines()
            if "[TRT] " in line
        )
    )
    assert (
        len([x for x in build.layers if x.is_qdq])
        == text.count("Running: QDQToCopy")
        == conversions
    )
    assert len(build.layout_reformats) == reformats


@pytest.mark.parametrize(
    "case",
    [
        "yolo-resnet18-orin-trt8502",
        "resnet18-qat-rtx2000-trt8510",
        "centerpoint-a100-trt823-fp16",
        "yolov8-orin-trt8412-excerpts",
    ],
)
def test_render_returns_the_optimizer_line_as_printed(case: str) -> None:
    path = build_file(case)
    lines, build = path.read_text(errors="replace").splitlines(), read_build(path)
    assert len(build.trace) > 100
    for event in build.trace:
        assert lines[event.line - 1].endswith(f"[TRT] {trace.render(event.event)}")
