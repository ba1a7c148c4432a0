"""Every recorded build reads with next to nothing left unexplained, and says what is known of it."""

from __future__ import annotations

from collections import Counter

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.trt import trace
from qdqtool.types import Precision
from tests.buildlog.evidence import build_file, folder

I8, F32, F16 = Precision.INT8, Precision.FP32, Precision.FP16
# (inputs, output) of the convolutions, counted by hand in the recorded listings.
CONVOLUTIONS = {
    ("yolo-resnet18-orin-trt8502", "log.txt"): {((I8,), I8): 28, ((I8, F32), F32): 8, ((I8,), F32): 7},
    ("resnet18-qat-rtx2000-trt8510", "log.txt"): {((I8,), I8): 12, ((I8, I8), I8): 8, ((I8,), F32): 1},
    ("centernet-resnet34-qat-trt80", "log.txt"): {((I8,), I8): 29, ((I8, I8), I8): 16, ((I8,), F32): 3},
    ("resnet18-a100-qat", "graph.json"): {((I8,), I8): 8, ((I8, F16), F16): 8, ((I8,), F16): 3, ((I8,), F32): 2},
    ("resnet18-a100-qat-residual", "graph.json"):
        {((I8,), I8): 12, ((I8, I8), I8): 7, ((I8, F32), F32): 1, ((I8,), F32): 1},
    ("resnet18-a100-qat-residual-qgap", "graph.json"): {((I8,), I8): 12, ((I8, I8), I8): 8, ((I8,), F32): 1},
    ("mobilenetv2-titanrtx-qat-residual", "graph.json"):
        {((I8,), I8): 41, ((I8, I8), I8): 10, ((I8,), F16): 1, ((I8,), F32): 1},
}


def test_nothing_is_left_unexplained() -> None:
    shares = {}
    for path in sorted(folder().glob("*/log.txt")):
        counts = read_build(path).lines
        shares[path.parent.name] = counts.unexplained_share
        assert counts.total > 0
    assert len(shares) >= 6
    assert max(shares.values()) <= 0.01, shares


def test_every_recorded_file_is_read() -> None:
    for path in [*sorted(folder().glob("*/graph.json")), *sorted(folder().glob("*/profile.json"))]:
        build = read_build(path)
        assert build.layers or build.profile_rows, path
        assert all(t.precision != Precision.UNKNOWN for x in build.layers for t in (*x.inputs, *x.outputs)), path


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_precisions_of_the_convolutions(case: tuple[str, str]) -> None:
    build = read_build(build_file(*case))
    found = Counter(
        (tuple(t.precision for t in x.inputs), x.output_precision) for x in build.layers if x.is_convolution
    )
    assert found == CONVOLUTIONS[case]
    assert build.complete


@pytest.mark.parametrize(("case", "version", "trace", "conversions", "reformats"), [
    ("yolo-resnet18-orin-trt8502", "8.5.2", 1117, 12, 6), ("resnet18-qat-rtx2000-trt8510", "8.5.10", 623, 1, 0),
])
def test_complete_logs(case: str, version: str, trace: int, conversions: int, reformats: int) -> None:
    path = build_file(case)
    build = read_build(path)
    text = path.read_text(errors="replace")
    assert (build.tensorrt, build.missing) == (version, [])
    words = ("Running: ", "Removing ", "Swapping ", ": Fusing ", ": fusing ", "Eliminating ", "Swap the layer type",
             "Convert layer type", "SqueezePushDown", "Merging layers", "Retargeting ", "Generating copy")
    # Each optimizer line counts once, under the first word in it that is one of these.
    assert len(build.trace) == trace == sum(
        any(word in line for word in words) and "] Timing Runner" not in line for line in text.splitlines()
        if "[TRT] " in line
    )
    assert len([x for x in build.layers if x.is_qdq]) == text.count("Running: QDQToCopy") == conversions
    assert len(build.layout_reformats) == reformats


def test_files_of_one_build_fit_together() -> None:
    for case in ("resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"):
        build = read_build(build_file(case, "graph.json"), build_file(case, "profile.json"))
        assert set(build.profile) == {x.name for x in build.layers}


def test_names_only_listing() -> None:
    build = read_build(build_file("yolo-resnet18-orin-trt8502", "layer_info.json"))
    assert build.names_only
    assert not build.complete
    whole = read_build(
        build_file("yolo-resnet18-orin-trt8502", "layer_info.json"), build_file("yolo-resnet18-orin-trt8502")
    )
    assert whole.complete
    assert whole.layers[1].input_precision == Precision.FP32


@pytest.mark.parametrize("case", ["yolo-resnet18-orin-trt8502", "resnet18-qat-rtx2000-trt8510",
                                  "centerpoint-a100-trt823-fp16", "yolov8-orin-trt8412-excerpts"])
def test_every_optimizer_line_is_rendered_as_it_was_printed(case: str) -> None:
    path = build_file(case)
    lines = path.read_text(errors="replace").splitlines()
    build = read_build(path)
    assert len(build.trace) > 100
    for event in build.trace:
        assert lines[event.line - 1].endswith(f"[TRT] {trace.render(event.event)}")
