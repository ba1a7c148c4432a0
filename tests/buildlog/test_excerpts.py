"""Any line that TensorRT writes is known as its own; prose is not; and no line or file takes long."""

from __future__ import annotations

import io
import json
import time

import pytest

from qdqtool.buildlog.names import base_name, clone_suffix
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.summary import summarize, what_was_read
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError

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
