"""Reading a build: the whole log, its spellings, its damage."""

import dataclasses
import functools
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.base import budgets, packed
from qdqtool.buildlog import layers, lines, log
from qdqtool.buildlog.log import LogReader
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, Tactics
from qdqtool.errors import BuildLogError
from qdqtool.trt import trace
from qdqtool.types import Event, Precision
from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.raising import raises
from tests.slow import slow_after

read = samples.build_of
LOG = samples.trtexec_log()
CASES = [
    "resnet18-qat-rtx2000-trt8510",
    "centerpoint-a100-trt823-fp16",
    "bevfusion-camera-rtx3080ti-trt8600",
    "yolo-resnet18-orin-trt8502",
    "yolov8-orin-trt8412-excerpts",
    "centernet-resnet34-qat-trt80",
    "mobilenet-fpn-implicit-int8",
]


def facts(build: Build) -> tuple[object, ...]:
    """What a build says apart from where it came from."""
    for node in build.parse.nodes:
        node.line = 0
    return (
        build.tensorrt,
        build.device,
        [e.event for e in build.trace],
        [(m.what, m.layers) for m in build.milestones],
        [(x.name, x.type, x.tactic, x.inputs, x.outputs) for x in build.layers],
        build.profile,
        build.performance,
        build.parse,
        build.tactics.timed,
        build.missing,
        build.complete,
        build.options,
    )


def test_headers_and_parse_sections() -> None:
    build = read(LOG)
    assert (build.source, build.tensorrt, build.device) == ("trtexec-log", "8.5.2", "Orin")
    assert build.gpu == {"Selected Device": "Orin", "SMs": "4"}
    assert build.flags == {"onnx": "net_qdq.onnx", "int8": "", "verbose": "", "dumpProfile": ""}
    assert build.precision_flags == {"fp32", "int8"}
    assert build.options["Build"] == {"Precision": "FP32+INT8", "Sparsity": "Disabled"}
    assert build.options["Model"]["Model"] == "net_qdq.onnx"
    assert (build.passed, build.complete, build.missing) == (True, True, [])
    parse = build.parse
    assert [(n.name, n.op) for n in parse.nodes][-2:] == [("conv", "Conv"), ("relu", "Relu")]
    assert [t and (t.name, t.shape, t.dtype) for t in parse.nodes[4].inputs] == [
        ("dq0_out", (1, 3, 8, 8), "FLOAT"),
        ("wdq_out", (16, 3, 3, 3), "FLOAT"),
        None,
    ]
    assert (parse.initializers, parse.outputs, parse.layers) == (["w", "s"], ["out"], {"q0": "q0"})
    assert [(t.name, t.shape, t.dtype) for t in parse.inputs] == [("images", (1, 3, 8, 8), "FLOAT")]
    lines = LOG.splitlines()
    assert [e.event for e in build.trace[:2]] == [
        Event("ConstQDQInitializersFusion", "Running", "q0"),
        Event("ConstQDQInitializersFusion", "Removing", "s"),
    ]
    assert all(event.subject in lines[event.line - 1] for event in build.trace)
    assert [m.layers for m in build.milestones] == [9, 9, 3, 2, 3]
    assert build.milestone("After tensor merging") == 3
    q, conv, out = build.layers
    assert (q.kind, conv.kind, out.kind) == ("conversion", "convolution", "reformat")
    assert (q.is_qdq, out.is_qdq, conv.tactic) == (True, False, "0x0000000000000012")
    assert (q.input_precision, q.output_precision) == (Precision.FP32, Precision.INT8)
    assert (q.outputs[0].shape, q.outputs[0].vector) == ((1, 3, 8, 8), 4)
    assert lines[conv.line - 1].startswith("Layer(CaskConvolution)")
    assert ([x.name for x in build.conversions], len(build.layout_reformats)) == (["q0"], 1)


def test_tuning_memory_profile_performance() -> None:
    build = read(LOG)
    assert (build.tactics.timed, build.tactics.chosen) == (3, {"CaskConvolution": 1})
    tuned = build.tactics.layers["w + wq + conv"]
    assert (tuned.tactics, tuned.best_ms, tuned.seconds, tuned.runner) == (
        2,
        0.25,
        1.0,
        "CaskConvolution",
    )
    assert build.tactics.reformats["<in> -> y"].best_ms == 0.125
    assert (build.memory.activation, build.memory.host_persistent) == (4096, 512)
    assert (build.memory.device_persistent, build.memory.scratch) == (256, 128)
    assert build.profile == {"q0": 0.0125, "w + wq + conv + relu": 0.05}
    assert (build.iterations, build.profile_total_ms) == (781, 0.0625)
    assert build.profile_rows[1].median_ms == 0.0499
    assert build.performance["Throughput"] == {"value": 424.281}
    assert build.performance["Latency"]["percentile(99%)"] == 4.25
    assert build.performance["Total Host Walltime"] == {"value": 3.5}
    assert build.seconds["Engine generation"] == 5.5
    assert [(r.tensor, r.source, r.target) for r in build.reformats] == [
        ("out", "Float(16,1:4)", "Float(16,1)")
    ]
    assert [m.text for m in build.warnings] == [
        "Calibrator won't be used in explicit precision mode."
    ]
    assert build.lines.unexplained == 0


def _python(text: str) -> str:
    return re.sub(r"(\[[^\]]+\]) \[([VIW])\] \[TRT\] ", r"\1 [TRT] [\2] ", text)


def _bare(text: str) -> str:
    return re.sub(r"(?m)^\[\d[^\]]+\] ", "", text)


def _coloured(text: str) -> str:
    return re.sub(r"(?m)^(\[.*)$", "\x1b[33m\\1\x1b[0m", text)


SPELLINGS = {
    "windows": lambda t: t.replace("\n", "\r\n"),
    "python": _python,
    "coloured": _coloured,
    "utf16": lambda t: b"\xff\xfe" + t.encode("utf-16-le"),
    "utf16-be": lambda t: b"\xfe\xff" + t.encode("utf-16-be"),
    "utf8-bom": lambda t: b"\xef\xbb\xbf" + t.encode(),
    "gzip": lambda t: gzip.compress(t.encode()),
    "xz": lambda t: lzma.compress(t.encode()),
    "no last line end": lambda t: t.rstrip("\n"),
    "invalid bytes between": lambda t: t.encode().replace(b"\n", b"\n\xff\xfe\x80\x00 noise\n", 1),
    "other program's words in front": lambda t: t.replace(
        "[10/31/2025-17:53:30] [V] [TRT] Original",
        "download: 41%[10/31/2025-17:53:30] [V] [TRT] Original",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_reads_the_same(spelling: str) -> None:
    assert facts(read(SPELLINGS[spelling](LOG))) == facts(read(LOG))


CARRIERS = {  # what stands before line i
    "kubernetes": lambda i: f"2026-01-02T03:04:05.{i:09d}Z {'stderr' if i % 3 else 'stdout'} F ",
    "kubectl": lambda i: "[pod/trt-7d9f-x2/builder] ",
    "kubectl with times": lambda i: f"[pod/trt-7d9f-x2/builder] 2026-01-02T03:04:05.{i:06d}Z ",
    "compose": lambda i: "trt-build-1  | ",
    "compose in colour": lambda i: "\x1b[36mtrt-build-1  |\x1b[0m ",
    "GitHub": lambda i: f"2026-01-02T03:04:05.{i:07d}Z ",
    "GitHub in colour": lambda i: f"2026-01-02T03:04:05.{i:07d}Z \x1b[36;1m",
    "gh": lambda i: f"build (jammy)\tRun trtexec\t2026-01-02T03:04:05.{i:07d}Z ",
    "GitLab": lambda i: f"2026-01-02T03:04:05.{i:06d}Z 01O ",
    "journal": lambda i: f"Jan 02 03:04:{i % 60:02d} my-host trtexec[1234]: ",
    "logging": lambda i: f"2026-01-02 03:04:05,{i % 1000:03d} - INFO - ",
    "quoted": lambda i: "> ",
}


@functools.cache
def _facts_of(text: str) -> tuple[object, ...]:
    return facts(read(text))


def _carried(text: str, carrier: str) -> str:
    return "".join(f"{CARRIERS[carrier](i)}{line}\n" for i, line in enumerate(text.splitlines()))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_a_container_or_service_puts_before_each_line_is_no_part_of_it(carrier: str) -> None:
    for spelled in (LOG, _python(LOG), _bare(LOG), _coloured(LOG)):
        assert facts(read(_carried(spelled, carrier))) == _facts_of(spelled)


@pytest.mark.parametrize("carrier", ["GitHub", "GitHub in colour"])
def test_a_carrier_is_found_behind_more_lines_of_other_steps_than_are_looked_at_at_once(
    carrier: str,
) -> None:
    words = "".join(
        f"Get:{i} http://archive.example jammy/main amd64 package-{i}\n" for i in range(2500)
    )
    assert facts(read(_carried(words + LOG, carrier))) == _facts_of(LOG)


@pytest.mark.parametrize("longest", [90, 200, 16_384])
def test_a_line_that_a_container_runtime_cut_is_read_whole(longest: int) -> None:
    text = ""
    for number, line in enumerate(LOG.splitlines()):
        stamp = f"2026-01-02T03:04:05.{number:09d}Z"
        pieces = [line[at : at + longest] for at in range(0, len(line), longest)]
        text += "".join(f"{stamp} stdout P {piece}\n" for piece in pieces[:-1])
        text += f"{stamp} stderr F\n" * (len(pieces) > 1)  # another stream between them
        text += f"{stamp} stdout F {pieces[-1]}\n"
    assert facts(read(text)) == facts(read(LOG))


@pytest.mark.parametrize("case", slow_after(1, CASES))
def test_recorded_builds_read_the_same_behind_a_carrier(case: str) -> None:
    text = build_file(case).read_text(errors="replace")
    wanted = facts(read(text))
    for carrier in ("kubernetes", "compose in colour", "journal"):
        assert facts(read(_carried(text, carrier))) == wanted


def test_logs_without_stamps_failures_and_missing_files(tmp_path: Path) -> None:
    build = read(_bare(LOG))
    assert facts(build) == facts(read(LOG)) and build.tactics.layers["w + wq + conv"].seconds == 0
    text = (
        LOG.splitlines()[0]
        + "\n"
        + samples.stamped(
            "E", "2: [ltWrapper.cpp] Could not find any implementation for node w + conv."
        )
        + "\n and more about it\n"
    )
    build = read(text + samples.BANNER.format("FAILED") + "\n")
    assert build.passed is False
    assert [(m.line, m.text.split("\n")[1]) for m in build.errors] == [(2, " and more about it")]
    with pytest.raises(BuildLogError, match="no such file"):
        read_build(tmp_path / "none.log")
    with pytest.raises(BuildLogError, match="is a folder"):
        read_build(tmp_path)


@pytest.mark.parametrize(
    "prefix",
    [
        "[TensorRT] VERBOSE: ",
        "[V] ",
        "[V] [TRT] ",
        "[TRT] [V] ",
        "TensorRT VERBOSE ",
        "[2022-12-30 12:38:57 VERBOSE] ",
        "  [V] ",
        "[V]     ",
    ],
)
def test_other_frontends(prefix: str) -> None:
    text = "".join(
        f"{prefix}{line}\n"
        for line in (
            "Original: 5 layers",
            "Running: EltReluFusion on Add_1",
            "EltReluFusion: Fusing Add_1 with Relu_2",
            "Graph construction and optimization completed in 1.5 seconds.",
            "Engine Layer Information:",
            "Layer(PoolingTiled): Pool_1, Tactic: 7405838, a[Float(6,28,28)] -> b[Float(6,14,14)]",
        )
    )
    build = read(text)
    assert build.source == "log"
    assert [e.event for e in build.trace] == [
        Event("EltReluFusion", "Running", "Add_1"),
        Event("EltReluFusion", "Fusing", "Add_1", "Relu_2"),
    ]
    assert build.layers[0].outputs[0].shape == (6, 14, 14)


def test_logs_that_are_cut_or_mixed() -> None:
    text = LOG.replace(
        "Original: 9 layers\n", "Original: 9 layers" + samples.stamped("V", "Removing x") + "\n"
    )
    build = read(text)
    assert build.milestone("Original") == 9
    assert "x" in [e.subject for e in build.trace]
    assert read(LOG[: LOG.index("Layer(CaskConvolution)") + 30]).layers[0].name == "q0"
    packed = gzip.compress(LOG.encode() * 50)
    assert read(packed[: len(packed) // 2]).tensorrt == "8.5.2"
    build = read(LOG + LOG.replace("w + wq + conv + relu, Tactic", "w + wq + conv + relu2, Tactic"))
    assert [e.event for e in build.trace] == [e.event for e in read(LOG).trace]
    assert [x.name for x in build.layers][1] == "w + wq + conv + relu2"


def test_cut_at_the_end() -> None:
    lines = LOG.splitlines(keepends=True)
    middle = next(i for i, line in enumerate(lines) if "Running: QuantizeDoubleInputNodes" in line)
    build = read("".join(lines[:middle]))
    told = ["optimizer passes (cut off)", "engine listing", "end of the log"]
    assert (build.missing, build.complete) == (told, False)
    inside = next(i for i, line in enumerate(lines) if line.startswith("Layer(CaskConvolution)"))
    build = read("".join(lines[: inside + 1]))
    told = ["engine listing (cut off: 2 of 3 layers)", "end of the log"]
    assert (build.missing, build.complete) == (told, False)
    parsing = next(i for i, line in enumerate(lines) if "Parsing node: relu" in line)
    assert read("".join(lines[:parsing])).missing[0] == "parse section (cut off after node 5)"
    late = next(i for i, line in enumerate(lines) if "ConstWeightsQuantizeFusion: Fusing" in line)
    build = read("".join(lines[late:]))
    told = ["parse section", "optimizer passes (the beginning)"]
    assert (build.missing, build.complete, len(build.layers)) == (told, False, 3)


def test_profile_with_the_name_last() -> None:
    text = "".join(
        samples.stamped("I", line) + "\n"
        for line in (
            "=== Profile (1434 iterations ) ===",
            "   Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer",
            "     486.12       0.3390       0.3389      21.0   {ForeignNode[771 + (Unnamed Layer* 1) [Shuffle]...gather]}",
            "      84.73       0.0591       0.0594       3.7   Conv_237 + Relu_238",
            "    1707.30       5.8873       5.8619     100.0   Total",
        )
    )
    build = read(text)
    assert build.profile == {
        "{ForeignNode[771 + (Unnamed Layer* 1) [Shuffle]...gather]}": 0.339,
        "Conv_237 + Relu_238": 0.0591,
    }
    assert build.profile_total_ms == 5.8873


INFO = (
    "Name: w + wq + conv + relu, LayerType: CaskConvolution, Inputs: [ { Name: q0_out, Location: Device, Dimensions: "
    "[1,3,8,8], Format/Datatype: Four wide channel vectorized row major Int8 format }], Outputs: [ { Name: out, "
    "Location: Device, Dimensions: [1,16,4,4], Format/Datatype: Row major linear FP32 }], ParameterType: Convolution, "
    'Kernel: [3,3], Stride: [2,2], Groups: 1, Weights: {"Type": "Int8", "Count": 432}, Activation: RELU, '
    "TacticName: sm80, TacticValue: 0x12"
)


def test_dumped_layer_information_adds_attributes_to_the_listing() -> None:
    lines = LOG.splitlines()
    detailed = "\n".join(
        [
            *lines[:-1],
            samples.stamped("I", "Layer Information:"),
            samples.stamped("V", "Layers:"),
            INFO.replace("w + wq + conv + relu,", "q0,"),
            INFO,
            INFO.replace("w + wq", "x"),
            "",
            "Bindings:",
            "images",
            "out",
            lines[-1],
        ]
    )
    build = read(detailed)
    assert build.listing == "layer-info"
    conv = next(layer for layer in build.layers if layer.name == "w + wq + conv + relu")
    assert (conv.extras["Kernel"], conv.extras["Weights"]) == (
        [3, 3],
        {"Type": "Int8", "Count": 432},
    )
    assert detailed.splitlines()[conv.line - 1] == INFO
    again = next(layer for layer in build.second_layers if layer.name == conv.name)
    assert detailed.splitlines()[again.line - 1].startswith("Layer(CaskConvolution)")
    assert (conv.inputs[0].vector, build.bindings, build.passed) == (4, ["images", "out"], True)


@pytest.mark.parametrize(
    "listed",
    ["q0_out\nout", " Name: q0_out, IOMode: Input\n Name: out, IOMode: Output", " q0_out\n out"],
)
def test_inputs_and_outputs_as_11_lists_them(listed: str) -> None:
    build = read(
        f"Layers:\n{INFO}\n\nI/O Tensors:\n{listed}\n\n{samples.STAMP.format(0)} [I] End of it"
    )
    assert (build.source, build.bindings) == ("layer-info", ["q0_out", "out"])


def test_files_of_one_build_are_merged(tmp_path: Path) -> None:
    log, profile = tmp_path / "build.log", tmp_path / "profile.json"
    log.write_text(LOG)
    profile.write_text(
        json.dumps(
            [{"count": 2}, {"name": "q0", "timeMs": 1.0, "averageMs": 0.5, "percentage": 100}]
        )
    )
    build = read_build(profile, log)
    assert (build.source, build.complete, build.profile) == ("trtexec-log", True, {"q0": 0.5})
    assert len(build.trace) == len(read(LOG).trace) and build.files == [str(profile), str(log)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "_read empty"),
        (b"  \n\n", "_read empty"),
        (b"hello\nworld\n", "_check_is_log line"),
        (b"\x00\x01\x02binary\x00", "_check_is_log binary"),
        (b"\x1f\x8bnot gzip at all", "unpack -3"),
        (b'{"a": 1}', "read_json 'Layers'"),
        (b'[{"Na', "_load column"),
        (b"[[[[", "_load column"),
        (b'{"Layers": 5}', "_layers 'Layers'"),
        (b'{"Layers": [5]}', "_layers 0"),
    ],
)
def test_what_is_no_build_is_refused_in_one_line(content: bytes, told: str) -> None:
    with raises(BuildLogError, told) as caught:
        read(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "lines"), [(10_000, 10**6), (10**6, 50)])
def test_what_comes_from_a_pipe_without_end_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, lines: int
) -> None:
    """A file of the same content may be longer."""
    monkeypatch.setattr(budgets, "PIPED_LOG", size)
    monkeypatch.setattr(budgets, "PIPED_LINES", lines)
    text = b"[TRT] Trace of TensorRT version: 8.5.2\n" + b"[TRT] x\n" * 5000
    (tmp_path / "log").write_bytes(text)
    assert read_build(str(tmp_path / "log")).lines.total == 5001
    with subprocess.Popen(["yes", "[TRT] x"], stdout=subprocess.PIPE) as endless:
        with raises(BuildLogError, "_counted"):
            read_build(endless.stdout)
        endless.kill()


def test_a_packed_log_unpacks_to_some_times_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same text may be longer in a file that is not packed; a little is always allowed."""
    text = b"[TRT] Trace of TensorRT version: 8.5.2\n" + b"[TRT] x\n" * 5000
    (tmp_path / "log.gz").write_bytes(gzip.compress(text))
    monkeypatch.setattr(budgets, "UNPACKED_LOG_TIMES", 10)
    assert read_build(str(tmp_path / "log.gz")).lines.total == 5001
    monkeypatch.setattr(budgets, "UNPACKED_SMALL_LOG", 1000)
    with raises(BuildLogError, "unpack log.gz"):
        read_build(str(tmp_path / "log.gz"))
    monkeypatch.setattr(budgets, "UNPACKED_LOG_TIMES", 1000)
    assert read_build(str(tmp_path / "log.gz")).lines.total == 5001


def test_a_decompressor_is_given_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left behind each member is copied: 8 MB of empty ones took 9 s."""
    given: list[int] = []

    class Seen(packed._Gzip):
        def decompress(self, data: bytes, most: int) -> bytes:
            given.append(len(data))
            return super().decompress(data, most)

    monkeypatch.setattr(packed, "_Gzip", Seen)
    data = gzip.compress(b"a") * 10_000
    rest = iter([data[packed.HEAD :]])
    found = packed.unpack(data[: packed.HEAD], lambda: next(rest, b""), "f", 1 << 20, whole=True)
    assert b"".join(found) == b"a" * 10_000
    assert max(given) <= packed._PIECE + packed.HEAD


def test_a_stream_that_does_not_wait_is_waited_for() -> None:
    """Any process that shares standard input can say so of it; what has not come yet is no end."""
    with subprocess.Popen(
        ["sh", "-c", "sleep .1; echo '[TRT] x'; sleep .1; echo '[TRT] x'"], stdout=subprocess.PIPE
    ) as slow:
        assert slow.stdout is not None
        os.set_blocking(slow.stdout.fileno(), False)
        assert read_build(slow.stdout).lines.total == 2


def calls_of(data: bytes) -> int:
    """Python's calls while a log is read."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        read_build(io.BytesIO(data))
    finally:
        sys.setprofile(None)
    return calls


def test_no_line_costs_much() -> None:
    """A million of the same one is read in seconds: one that begins the next build took a hundred calls."""
    for line in dict.fromkeys(LOG.splitlines()):
        few, more = (calls_of(b"[TRT] x\n" + f"{line}\n".encode() * times) for times in (10, 40))
        assert more - few <= 30 * 45, (line, (more - few) / 30)


_PLAIN = "[V] Removing "
_LONG = ("[V] Skipping tactic ", "[I] Latency: min = ", "[V] Setting x has no valid tactics for ")


def seconds_of(line: str) -> float:
    """The least of three times that 100 KB of a line take, in seconds of the processor."""
    data, found = b"[TRT] x\n" + f"{line}\n".encode() * (100_000 // len(line)), []
    for _ in range(3):
        start = time.process_time()
        read_build(io.BytesIO(data))
        found.append(time.process_time() - start)
    return min(found)


def test_no_long_word_costs_much() -> None:
    """A word of two thousand letters was searched from each of them for what stands behind it."""
    plain = seconds_of(_PLAIN + "A" * 2000)
    for line in _LONG:
        assert seconds_of(line + "A" * 2000) < 10 * plain + 1e-3, line


@given(
    st.lists(
        st.sampled_from(
            [
                " = ",
                "1.5",
                "a",
                "min",
                "%()",
                " ",
                "ms",
                "inf",
                "-nan",
                "b" * 40,
                "=",
                "é",
                "+",
                ",",
            ]
        )
    )
)
def test_figures_of_a_line_are_what_an_expression_finds(pieces: list[str]) -> None:
    text, part = "".join(pieces), r"([\w()%.]{1,30}) = ([\d.e+-]{1,20}|-?nan|inf) ?(?:ms)?"
    assert list(lines._named_values(text)) == re.findall(part, text)


@given(
    st.lists(
        st.sampled_from(
            [
                " has no valid tactics",
                "Skipping ",
                ": No valid tactics",
                " for ",
                "a",
                "Conv",
                "b" * 90,
                " ",
                "-",
                "_",
            ]
        )
    )
)
def test_who_has_no_tactic_is_what_an_expression_finds(pieces: list[str]) -> None:
    reader, line = LogReader(), "".join(pieces).encode()
    reader._refused(line)
    named = rb"Skipping (\w{1,80}): No valid tactics(?: for (.{0,4000}))?|(\w{1,80}) has no valid tactics"
    found = re.search(named, line)
    wanted = (
        {}
        if found is None
        else {((found[1] or found[3]).decode(), (found[2] or b"").decode().strip()): 1}
    )
    assert dict(reader.build.tactics.refused) == wanted


def test_what_is_not_asked_of_a_line_is_not_in_it() -> None:
    """Shortcuts: how lines of the autotuner begin, and the words of the parser, which the optimizer has not."""
    told = [
        "Tactic: 0x1 Time: 1",
        "Fastest Tactic: 0x1",
        "-" * 15 + " Timing Runner: a",
        "Average on 10 runs",
        "Block size 5",
        "=" * 15 + " Computing costs for a",
        ">" * 15 + " Chose Runner Type: a",
        "*" * 15 + " Autotuning Reformat: a",
        "Skipping a: No valid tactics",
        "Iteration: 5",
        "12 tactics ",
        "Setting workspace to 5",
        "Optimizer Reformat",
        "Deleting timing cache",
        "VERBOSE: Tactic: 0",
        "Splitting A",
        "conv has no valid tactics for x",
    ]
    for line in map(str.encode, told):
        assert log._TIMING.match(line) and (
            line[:1] in log._BEGIN_TIMING or log._TO_NONE in line
        ), line
    for wording in trace.FORMATS.values():
        assert wording.before.partition(" ")[0] not in lines.PARSERS


@pytest.mark.parametrize(
    "text",
    [
        "Layer(a): b",
        "Layer(a): b, Tactic: 0x1, ",
        "Layer(): ",
        "Layer(a",
        "Layer(a):",
        "Name: a, LayerType: b",
        "Name: a",
        "Name: , LayerType: ",
        "Name: a, LayerType: b, Inputs: [ { Name: x",
        "Name: a , LayerType:b",
    ],
)
def test_a_listing_that_is_no_more_kept_is_known_as_one_that_is(text: str) -> None:
    parse, known = (
        (layers.parse_engine_line, layers.is_engine_line)
        if text.startswith("Layer")
        else (layers.parse_info_line, layers.is_info_line)
    )
    assert known(text) is (parse(text) is not None)


def test_nothing_that_was_tuned_before_is_kept() -> None:
    tactics = Tactics()
    for known in dataclasses.fields(tactics):
        kept = getattr(tactics, known.name)
        value = (
            5 if isinstance(kept, int) else {"a"} if isinstance(kept, set) else type(kept)({"a": 1})
        )
        setattr(tactics, known.name, value)
        assert value != kept
    tactics.clear()
    assert tactics == Tactics()
