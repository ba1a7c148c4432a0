"""Any line that TensorRT writes is known as its own; prose is not; and no line or file takes long."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from typing import Any

import pytest

from qdqtool.buildlog.names import base_name, clone_suffix
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.summary import summarize, what_was_read
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from qdqtool.trt import trace
from qdqtool.types import Precision
from tests.buildlog import samples
from tests.buildlog.evidence import build_file, folder

# As TensorRT 7 to 10, trtexec and programs that log for it print them; names and numbers are made up.
LINES = {
    "[07/12/2024-00:08:34] [V] [TRT] Skipping CaskConvolution: No valid tactics for /m.0/conv/Conv": "passed over",
    "[TRT] [V] CublasConvolution has no valid tactics for this config, skipping": "passed over",
    "[2022-12-30 12:38:57 VERBOSE] Skipping CaskConvolution: No valid tactics for Conv_9": "passed over",
    "[TRT] [W] Skipping tactic 3 due to insufficient memory on requested size of 123": "passed over",
    "Skipping tactic 0x0 due to exception Assertion numScales == mGlobRefs.scale.count() failed.": "passed over",
    "[V] [TRT] =============== Computing costs for /m.0/conv/Conv + PWN(x)": "1 layer whose costs",
    "[11/11/2024-10:00:00] [V] [TRT] =============== Computing costs for ": "1 line of TensorRT",
    "[TensorRT] VERBOSE: --------------- Timing Runner: Conv_142 (CaskConvolution)": "tuned",
    "--------------- Timing Runner: Conv_1 (CaskConvolution[0x80000009])": "tuned",
    "TensorRT VERBOSE *************** Autotuning format combination: Half(1) -> Half(2) ***************": "format",
    "[TensorRT] VERBOSE: Tactic: 1002 time 0.059008": "1 tactic timed",
    "[TRT]    Tactic: 0x1 Time: 0.1": "1 tactic timed",
    "DEBUG: [Torch-TensorRT TensorRT Conversion Context] - Tactic: 0x1 Time: 0.2": "1 tactic timed",
    "2023-06-01 12:00:00.1 [V:onnxruntime:, x.h:75 log] [2023-06-01 04:00:00 VERBOSE] Tactic: 0x1 Time: 0.1": "tactic",
    "Tactic: 61 skipped. Scratch requested: 1145307136, available: 1048576": "1 tactic timed",
    "Conv_1 (CaskConvolution[0x80000009]) profiling completed in 0.04 seconds. Fastest Tactic: 0x Time: 0.04": "tuned",
    "w + /c/Conv [Int8(6400:32) -> Int8(64:32)] got cached result: CaskConvolution, tactic 0x1, 0.0064 ms": "cache",
    ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x1": "1 kernel chosen",
    "[V] [TRT] Running: VanillaSwapWithFollowingQ on Resize_1": "1 optimizer line",
    "Swapping a with b": "1 optimizer line",
    "Generating copy for a to b because input is not movable.": "1 optimizer line",
    "Replacing slice Slice_1 with copy from 1 to 2": "1 optimizer line",
    "-----------SqueezePushDown kSQUEEZE_FORK case: a --> b --> c": "1 optimizer line",
    "QDQ graph optimizer backward pass": "1 heading",
    "After concat removal: 29 layers": "1 count of layers",
    "Adding reformat layer: Reformatted Input Tensor 0 to Conv_1 (x) from Float(1) to Half(1) long-strided": "reformat",
    "[10/02/2023-10:00:00] [I]                        Layer   Time (ms)   Avg. Time (ms)   Time %": "1 line",
    "[03/24/2023-12:57:45] [I]          Conv_0 + Relu_1       12.34           0.0123      1.2": "1 profile row",
    "[05/08/2024-14:05:14] [I]       16.15       0.0077       0.0075       0.5   Reformatting x": "1 profile row",
    "[I] Throughput: 424.281 qps": "1 line of the performance summary",
    "WARNING: [TRT]: Missing scale and zero-point for tensor a, expect fall back": "1 warning",
    "ERROR: [TRT]: 10: Could not find any implementation for node /0/model.22/Range.": "1 error",
    "INFO: [TRT]: Local timing cache in use.": "1 line of TensorRT",
    "[MemUsageChange] Init CUDA: CPU +277, GPU +0, now: CPU 279, GPU 234 (MiB)": "1 line of TensorRT",
    "Engine built in 5.2 sec.": "1 line of TensorRT",
    "Layer(CaskConvolution): a, Tactic: 0x1, x[Int8(1,2)] -> y[Int8(1,2)]": "1 engine layer",
    "[11/21/2026-12:00:00] [V] [TRT] A line that nobody has seen yet": "1 line that TensorRT wrote",
}


def read(text: str) -> Build:
    return read_build(io.BytesIO(text.encode()))


@pytest.mark.parametrize(("line", "said"), LINES.items())
def test_a_line_alone_is_read(line: str, said: str) -> None:
    build = read(line + "\n")
    assert said in "; ".join(what_was_read(build))
    assert json.loads(json.dumps(summarize(build)))["read"]
    assert build.lines.unexplained == (1 if "nobody has seen" in line else 0)


@pytest.mark.parametrize("text", [
    "nothing of TensorRT\n", "Using the tool I measured things\n", "I ran 5 km in 20 seconds.\n",
    "Detected a bird\nWrote a letter\n", "Layer cake   1.5   2.5   3.5\n", "{}\n" * 20,
])
def test_prose_is_refused(text: str) -> None:
    with pytest.raises(BuildLogError):
        read(text)


def test_what_an_excerpt_of_the_autotuner_tells() -> None:
    build = read(
        "[V] [TRT] --------------- Timing Runner: c (CaskConvolution[0x80000009])\n"
        "[V] [TRT] CaskConvolution has no valid tactics for this config, skipping\n"
        "[V] [TRT] Skipping CudnnConvolution: No valid tactics for d\n"
        "[V] [TRT] Skipping tactic 0x1 due to Myelin error: no\n"
        "[V] [TRT] e (CaskConvolution[0x9]) profiling completed in 0.5 seconds. Fastest Tactic: 0x1 Time: 0.25\n"
        "[V] [TRT] f [Int8(1) -> Int8(1)] got cached result: CaskGemm, tactic 0x1, 0.125 ms\n"
    )
    assert dict(build.tactics.refused) == {("CaskConvolution", "c"): 1, ("CudnnConvolution", "d"): 1}
    assert dict(build.tactics.reasons) == {"Myelin error: no": 1}
    assert build.tactics.layers["e"].best_ms == 0.25
    assert (build.tactics.layers["f"].best_ms, build.tactics.layers["f"].runner) == (0.125, "CaskGemm")


def test_blank_lines_cost_nothing_and_end_lists() -> None:
    started = time.process_time()
    build = read("\n" * 3_000_000 + "[V] [TRT] Bindings:\na\n\nb\n" + "\n" * 3_000_000)
    assert time.process_time() - started < 5
    assert build.bindings == ["a"]
    assert (build.lines.total, build.lines.blank) == (6_000_004, 6_000_001)


def test_a_file_of_junk_is_not_read_to_its_end() -> None:
    started = time.process_time()
    build = read("[V] [TRT] Running: A on b\n" + "xy\n" * 1_000_000)
    assert time.process_time() - started < 15
    assert any("was not read" in note for note in build.notes)
    assert any(m.startswith("everything beyond line") for m in build.missing)


LONG = [
    "\x1b]" * 300_000, "Adding reformat layer: " + " (a) from " * 60_000,
    "Adding network input: " + " with dtype: a, dimensions: (" * 30_000, "Swapping " + "( with " * 100_000,
    "Running: X on " + "_clone_1" * 100_000 + "x", "Swap the layer type of " + " from " * 100_000,
    "Layer(a): b, Tactic: 0x1, " + " (A[" * 100_000, "a" * 500_000 + " got cached result: ", " [" * 300_000,
    "Skipping " + "a" * 500_000, "Skipping tactic " + " due to " * 100_000,
    "Error " + "Assertion " * 50_000, "x (y) profiling completed in " * 30_000,
]


@pytest.mark.parametrize("line", LONG, ids=range(len(LONG)))
def test_no_line_takes_long(line: str) -> None:
    started = time.process_time()
    build = read(f"[V] [TRT] Running: A on b\n[V] [TRT] {line}\n{line}\n")
    summarize(build)
    for event in build.trace:
        base_name(event.subject)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(("name", "base", "suffix"), [
    ("Q_1_clone_0", "Q_1", "_clone_0"), ("Q_1_clone_0_clone_12", "Q_1", "_clone_0_clone_12"),
    ("Q_clone_", "Q_clone_", ""),
    ("a_clone_1x", "a_clone_1x", ""), ("_clone_1", "", "_clone_1"), ("Q_quantize_scale_node_clone_1", "Q", "_clone_1"),
])
def test_copies_of_a_node(name: str, base: str, suffix: str) -> None:
    assert (base_name(name), clone_suffix(name)) == (base, suffix)


LOG = samples.trtexec_log()


def layer(name: str, source: str, target: str) -> dict[str, Any]:
    def edge(tensor: str) -> list[dict[str, Any]]:
        return [{"Name": tensor, "Dimensions": [1, 8, 4, 4], "Format/Datatype": "Row major Int8 format"}]

    return {"Name": name, "LayerType": "CaskConvolution", "Inputs": edge(source), "Outputs": edge(target)}


LAYERS = [layer("a", "x", "t"), layer("b", "t", "u"), layer("c", "u", "y")]


def reading(layers: list[dict[str, Any]]) -> Build:
    return read_build(io.BytesIO(json.dumps({"Layers": layers, "Bindings": ["x", "y"]}).encode()))


def test_a_chain_from_input_to_output_is_whole() -> None:
    assert reading(LAYERS).complete


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0, "b reads t, which none writes"), (1, "c reads u, which none writes"), (2, "none reads or writes the binding")],
)
def test_a_layer_that_is_missing_is_noticed(lost: int, said: str) -> None:
    build = reading([*LAYERS[:lost], *LAYERS[lost + 1 :]])
    assert not build.complete
    assert any(said in m for m in build.missing)


def test_a_listing_without_bindings_is_not_judged() -> None:
    assert read_build(io.BytesIO(json.dumps({"Layers": LAYERS[1:]}).encode())).complete


def test_a_layer_json_cut_off_is_not_complete() -> None:
    whole = json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]}, indent=1)
    build = read_build(io.BytesIO(whole[: whole.index('"c"')].encode()))
    assert [x.name for x in build.layers] == ["a", "b"]
    assert not build.complete
    assert any(m.startswith("engine listing (cut off: the end of") for m in build.missing)


def test_a_cut_profile_does_not_spoil_the_listing() -> None:
    rows = [f'{{ "name" : "{n}", "timeMs" : 1, "averageMs" : 0.3, "percentage" : 33 }}' for n in "abc"]
    profile = "[\n" + "\n, ".join(rows)
    build = read_build(io.BytesIO(json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]}).encode()),
                       io.BytesIO(profile.encode()))
    assert list(build.profile) == ["a", "b", "c"]
    assert build.complete
    assert any(m.startswith("profile (cut off") for m in build.missing)


def test_of_two_builds_in_one_file_the_last_one_counts() -> None:
    first = read_build(io.BytesIO(LOG.encode()))
    second = read_build(io.BytesIO((LOG + LOG).encode()))
    assert (first.builds, second.builds) == (1, 2)
    assert len(second.parse.nodes) == len(first.parse.nodes)
    assert [x.name for x in second.layers] == [x.name for x in first.layers]
    assert second.tactics.timed == first.tactics.timed
    assert second.complete


def test_the_listing_of_an_earlier_build_is_not_taken_for_the_last_one() -> None:
    cut = LOG[: LOG.index("Engine Layer Information")]
    build = read_build(io.BytesIO((LOG + cut).encode()))
    assert build.layers == []
    assert "engine listing" in build.missing
    assert not build.complete


def test_a_description_of_the_device_is_no_listing() -> None:
    with pytest.raises(BuildLogError, match="a layer listing"):
        read_build(io.BytesIO(json.dumps([{"Name": "NVIDIA A100", "ComputeCapability": [8, 0]}]).encode()))


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
