import gzip
import io
import json
import lzma
import operator
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qdqtool.buildlog.lines import PARSER_WORDS
from qdqtool.buildlog.log import split_prefix
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, ParsedTensor, TunedLayer
from qdqtool.errors import BuildLogError
from qdqtool.ir.precision import Precision
from qdqtool.trt import trace
from qdqtool.trt.trace import Event
from qdqtool.util import compression, limits
from tests.buildlog import samples
from tests.buildlog.calls import count_calls
from tests.buildlog.evidence import build_file
from tests.errors import has
from tests.growth_factor import LINEAR, growth_factor
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
    for node in build.parse.nodes:
        node.line = 0
    return (
        build.tensorrt,
        build.device,
        [e.event for e in build.trace],
        [(m.name, m.layers) for m in build.milestones],
        [(x.name, x.type, x.tactic, x.inputs, x.outputs) for x in build.layers],
        build.profile,
        build.performance,
        build.parse,
        build.tactics.timed,
        build.missing,
        build.complete,
        build.options,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "trtexec-log"),
        ("tensorrt", "8.5.2"),
        ("device", "Orin"),
        ("gpu", {"Selected Device": "Orin", "SMs": "4"}),
        ("flags", {"onnx": "net_qdq.onnx", "int8": "", "verbose": "", "dumpProfile": ""}),
        ("precision_flags", {"fp32", "int8"}),
        ("passed", True),
        ("complete", True),
        ("missing", []),
        ("parse.initializers", ["w", "s"]),
        ("parse.inputs", [ParsedTensor("images", (1, 3, 8, 8), "FLOAT")]),
        ("parse.outputs", ["out"]),
        ("parse.layers", {"q0": "q0"}),
        ("tactics.timed", 3),
        ("tactics.runners", {"CaskConvolution": 1}),
        ("memory.activation", 4096),
        ("memory.host_persistent", 512),
        ("memory.device_persistent", 256),
        ("memory.scratch", 128),
        ("profile", {"q0": 0.0125, "w + wq + conv + relu": 0.05}),
        ("iterations", 781),
        ("profile_total_ms", 0.0625),
        ("lines.unexplained", 0),
    ],
)
def test_read_build_fields(field: str, value: object) -> None:
    assert operator.attrgetter(field)(read(LOG)) == value


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("options", "Build", {"Precision": "FP32+INT8", "Sparsity": "Disabled"}),
        ("performance", "Throughput", {"value": 424.281}),
        ("performance", "Total Host Walltime", {"value": 3.5}),
        ("seconds", "Engine generation", 5.5),
    ],
)
def test_read_build_tables(table: str, key: str, value: object) -> None:
    assert getattr(read(LOG), table)[key] == value


def test_read_build_nodes_of_the_parse_section() -> None:
    nodes = read(LOG).parse.nodes
    assert [(n.name, n.op) for n in nodes][-2:] == [("conv", "Conv"), ("relu", "Relu")]
    assert nodes[4].inputs == [
        ParsedTensor("dq0_out", (1, 3, 8, 8), "FLOAT"),
        ParsedTensor("wdq_out", (16, 3, 3, 3), "FLOAT"),
        None,
    ]


def test_read_build_passes_and_milestones() -> None:
    build, lines = read(LOG), LOG.splitlines()
    assert [e.event for e in build.trace[:2]] == [
        Event("ConstQDQInitializersFusion", "Running", "q0"),
        Event("ConstQDQInitializersFusion", "Removing", "s"),
    ]
    assert all(event.subject in lines[event.line - 1] for event in build.trace)
    assert [m.layers for m in build.milestones] == [9, 9, 3, 2, 3]
    assert build.milestone("After tensor merging") == 3


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", ["conversion", "convolution", "reformat"]),
        ("is_qdq", [True, False, False]),
        ("input_precision", [Precision.FP32, Precision.INT8, Precision.FP32]),
        ("output_precision", [Precision.INT8, Precision.FP32, Precision.FP32]),
    ],
)
def test_read_build_layers(field: str, values: list[object]) -> None:
    assert [getattr(layer, field) for layer in read(LOG).layers] == values


def test_read_build_layer_details() -> None:
    build = read(LOG)
    q, conv, _ = build.layers
    assert (q.outputs[0].shape, q.outputs[0].vector) == ((1, 3, 8, 8), 4)
    assert LOG.splitlines()[conv.line - 1].startswith("Layer(CaskConvolution)")
    assert conv.tactic == "0x0000000000000012"
    assert ([x.name for x in build.conversions], len(build.layout_reformats)) == (["q0"], 1)


def test_read_build_tuned_layers_and_messages() -> None:
    build, name = read(LOG), "w + wq + conv"
    assert build.tactics.layers[name] == TunedLayer(name, 2, 0.25, 1.0, "CaskConvolution")
    assert build.tactics.reformats["<in> -> y"].best_ms == 0.125
    assert build.profile_rows[1].median_ms == 0.0499
    assert build.performance["Latency"]["percentile(99%)"] == 4.25
    assert [(r.tensor, r.source, r.target) for r in build.reformats] == [
        ("out", "Float(16,1:4)", "Float(16,1)")
    ]
    assert [m.text for m in build.warnings] == [
        "Calibrator won't be used in explicit precision mode."
    ]


SPELLINGS = {
    "windows": lambda t: t.replace("\n", "\r\n"),
    "python": lambda t: re.sub(r"(\[[^\]]+\]) \[([VIW])\] \[TRT\] ", r"\1 [TRT] [\2] ", t),
    "no stamps": lambda t: re.sub(r"(?m)^\[\d[^\]]+\] ", "", t),
    "colored": lambda t: re.sub(r"(?m)^(\[.*)$", "\x1b[33m\\1\x1b[0m", t),
    "utf16": lambda t: b"\xff\xfe" + t.encode("utf-16-le"),
    "utf16-be": lambda t: b"\xfe\xff" + t.encode("utf-16-be"),
    "utf8-bom": lambda t: b"\xef\xbb\xbf" + t.encode(),
    "gzip": lambda t: gzip.compress(t.encode()),
    "xz": lambda t: lzma.compress(t.encode()),
    "after zeros of a truncated file": lambda t: bytes(5000) + b"\n" + t.encode(),
    "after the header of a Docker stream": lambda t: b"\1\0\0\0\0\0\0O" + t.encode(),
    "no last line end": lambda t: t.rstrip("\n"),
    "invalid bytes between": lambda t: t.encode().replace(b"\n", b"\n\xff\xfe\x80\x00 noise\n", 1),
    "text of another program before a line": lambda t: t.replace(
        "[10/31/2025-17:53:30] [V] [TRT] Original",
        "download: 41%[10/31/2025-17:53:30] [V] [TRT] Original",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_does_not_change_the_contents(spelling: str) -> None:
    assert facts(read(SPELLINGS[spelling](LOG))) == facts(read(LOG))


CARRIERS = {  # prefix of line i
    "kubernetes": lambda i: f"2026-01-02T03:04:05.{i:09d}Z {'stderr' if i % 3 else 'stdout'} F ",
    "kubectl": lambda i: "[pod/trt-7d9f-x2/builder] ",
    "kubectl with times": lambda i: f"[pod/trt-7d9f-x2/builder] 2026-01-02T03:04:05.{i:06d}Z ",
    "compose": lambda i: "trt-build-1  | ",
    "compose in color": lambda i: "\x1b[36mtrt-build-1  |\x1b[0m ",
    "GitHub": lambda i: f"2026-01-02T03:04:05.{i:07d}Z ",
    "GitHub in color": lambda i: f"2026-01-02T03:04:05.{i:07d}Z \x1b[36;1m",
    "gh": lambda i: f"build (jammy)\tRun trtexec\t2026-01-02T03:04:05.{i:07d}Z ",
    "GitLab": lambda i: f"2026-01-02T03:04:05.{i:06d}Z 01O ",
    "journal": lambda i: f"Jan 02 03:04:{i % 60:02d} my-host trtexec[1234]: ",
    "logging": lambda i: f"2026-01-02 03:04:05,{i % 1000:03d} - INFO - ",
    "quoted": lambda i: "> ",
}


def with_carrier(text: str, carrier: str) -> str:
    return "".join(f"{CARRIERS[carrier](i)}{line}\n" for i, line in enumerate(text.splitlines()))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_prefix_of_a_carrier_is_ignored(carrier: str) -> None:
    for spelled in (LOG, *(SPELLINGS[name](LOG) for name in ("python", "no stamps", "colored"))):
        assert facts(read(with_carrier(spelled, carrier))) == facts(read(spelled))


@pytest.mark.parametrize("carrier", ["GitHub", "GitHub in color"])
def test_carrier_is_recognized_after_many_lines_of_other_steps(carrier: str) -> None:
    other_steps = "".join(
        f"Get:{i} http://archive.example jammy/main amd64 package-{i}\n" for i in range(2500)
    )
    assert facts(read(with_carrier(other_steps + LOG, carrier))) == facts(read(LOG))


@pytest.mark.parametrize("case", slow_after(1, CASES))
def test_prefix_of_a_carrier_is_ignored_in_recorded_builds(case: str) -> None:
    text = build_file(case).read_text(errors="replace")
    expected = facts(read(text))
    for carrier in ("kubernetes", "compose in color", "journal"):
        assert facts(read(with_carrier(text, carrier))) == expected


def test_log_without_stamps_has_no_seconds_of_tuning() -> None:
    assert read(SPELLINGS["no stamps"](LOG)).tactics.layers["w + wq + conv"].seconds == 0


def test_errors_of_a_failed_build() -> None:
    error = "2: [ltWrapper.cpp] Could not find any implementation for node w + conv."
    build = read(
        [
            LOG.splitlines()[0],
            samples.stamped("E", error),
            " and more about it",
            samples.BANNER.format("FAILED"),
        ]
    )
    assert build.passed is False
    assert [(m.line, m.text) for m in build.errors] == [(2, f"{error}\n and more about it")]


def test_read_build_rejects_missing_files_and_folders(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.log", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(BuildLogError, match=f"{path}: {reason}"):
            read_build(path)


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
def test_prefix_of_another_logger(prefix: str) -> None:
    build = read(
        "".join(
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
    )
    assert (build.source, build.layers[0].outputs[0].shape) == ("log", (6, 14, 14))
    assert [e.event for e in build.trace] == [
        Event("EltReluFusion", "Running", "Add_1"),
        Event("EltReluFusion", "Fusing", "Add_1", "Relu_2"),
    ]


def assert_equal_contents(build: Build, expected: Build) -> None:
    assert build.tensorrt == expected.tensorrt
    assert [e.event for e in build.trace] == [e.event for e in expected.trace]
    assert [x.name for x in build.layers] == [x.name for x in expected.layers]


@pytest.mark.parametrize(
    ("form", "verbose"),
    [("[TRT-LLM] [{level}] {text}", "D"), ("[TRT-LLM] [RANK 0] [{level}] {text}", "V")],
)
def test_log_of_tensorrt_llm(form: str, verbose: str) -> None:
    """Some versions call the verbose level D, and all versions mix their lines with TensorRT's."""
    lines = []
    for number, line in enumerate(LOG.splitlines()):
        level, stamp, message = (
            part.decode() if isinstance(part, bytes) else part
            for part in split_prefix(line.encode())
        )
        text = form.format(level={"V": verbose}.get(level, level), text=message)
        lines.append(f"{stamp} {text}".strip() if level and number % 3 else line)
    assert_equal_contents(read("\n".join(lines)), read(LOG))


@pytest.mark.parametrize(
    "form",
    [
        "{level}:torch_tensorrt [TensorRT Conversion Context]:{text}",
        "2026-01-02 10:11:12,345 - torch_tensorrt [TensorRT Conversion Context] - {level} - {text}",
        "[{level}|10:11:12] torch_tensorrt [TensorRT Conversion Context]: {text}",
        "{level}: [Torch-TensorRT TorchScript Conversion Context] - {text}",
        "2026-01-02 10:11:12,345 - {level} - {text}",
        "{level}:root:{text}",
    ],
)
def test_log_of_torch_tensorrt(form: str) -> None:
    """Lines without a level, as of a message of several lines, stay as they are."""
    levels, lines = {"V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR"}, []
    for line in [*LOG.splitlines(), samples.stamped("W", "a warning")]:
        level, _, message = split_prefix(line.encode())
        text = message.decode()
        lines.append(form.format(level=levels[level], text=text) if level else text)
    build, expected = read("\n".join(lines)), read(f"{LOG}{samples.stamped('W', 'a warning')}\n")
    assert_equal_contents(build, expected)
    assert [(m.level, m.text) for m in build.messages] == [
        (m.level, m.text) for m in expected.messages
    ]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line, level: {
            "log": f"{line}\n",
            "stream": "stderr",
            "time": "2026-01-02T10:11:12Z",
        },
        lambda line, level: {"level": level, "message": split_prefix(line.encode())[2].decode()},
        lambda line, level: {"levelname": level, "msg": split_prefix(line.encode())[2].decode()},
    ],
    ids=["Docker", "message", "msg"],
)
def test_log_with_a_json_object_per_line(wrap: Callable[[str, str], dict[str, str]]) -> None:
    levels = {"V": "debug", "I": "INFO", "W": "WARNING", "E": "ERROR", "": "info"}
    lines = [wrap(line, levels[split_prefix(line.encode())[0]]) for line in LOG.splitlines()]
    assert_equal_contents(read("\n".join(map(json.dumps, lines))), read(LOG))


def test_stamped_line_inside_another_line() -> None:
    first, second = "Original: 9 layers", samples.stamped("V", "Removing x")
    build = read(LOG.replace(f"{first}\n", f"{first}{second}\n"))
    assert build.milestone("Original") == 9 and "x" in [e.subject for e in build.trace]


def test_text_or_gzip_cut_in_the_middle() -> None:
    assert read(LOG[: LOG.index("Layer(CaskConvolution)") + 30]).layers[0].name == "q0"
    data = gzip.compress(LOG.encode() * 50)
    assert read(data[: len(data) // 2]).tensorrt == "8.5.2"


def test_last_of_two_builds_in_one_log_counts() -> None:
    build = read(LOG + LOG.replace("w + wq + conv + relu, Tactic", "w + wq + conv + relu2, Tactic"))
    assert [e.event for e in build.trace] == [e.event for e in read(LOG).trace]
    assert [x.name for x in build.layers][1] == "w + wq + conv + relu2"


@pytest.mark.parametrize(
    ("line", "is_end_kept", "missing", "layers"),
    [
        (
            "Running: QuantizeDoubleInputNodes",
            False,
            ["optimizer passes (cut off)", "engine listing", "end of the log"],
            0,
        ),
        (
            "Layer(Reformat): Reformatting",
            False,
            ["engine listing (cut off: 2 of 3 layers)", "end of the log"],
            2,
        ),
        (
            "Parsing node: relu",
            False,
            ["parse section (cut off)", "optimizer passes", "engine listing", "end of the log"],
            0,
        ),
        (
            "ConstWeightsQuantizeFusion: Fusing",
            True,
            ["parse section", "optimizer passes (cut off)"],
            3,
        ),
    ],
)
def test_log_that_is_cut_before_a_line(
    line: str, is_end_kept: bool, missing: list[str], layers: int
) -> None:
    cut = LOG[: LOG.index(line)].rindex("\n") + 1
    build = read(LOG[cut:] if is_end_kept else LOG[:cut])
    assert (build.missing, build.complete, len(build.layers)) == (missing, False, layers)


def test_profile_with_the_name_last() -> None:
    build = read(
        "".join(
            samples.stamped("I", line) + "\n"
            for line in (
                "=== Profile (1434 iterations ) ===",
                "   Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer",
                "     486.12       0.3390       0.3389      21.0   {ForeignNode[771 + (Unnamed Layer* 1) [Shuffle]...gather]}",
                "      84.73       0.0591       0.0594       3.7   Conv_237 + Relu_238",
                "    1707.30       5.8873       5.8619     100.0   Total",
            )
        )
    )
    assert (build.profile_total_ms, build.profile) == (
        5.8873,
        {
            "{ForeignNode[771 + (Unnamed Layer* 1) [Shuffle]...gather]}": 0.339,
            "Conv_237 + Relu_238": 0.0591,
        },
    )


INFO = (
    "Name: w + wq + conv + relu, LayerType: CaskConvolution, Inputs: [ { Name: q0_out, Location: Device, Dimensions: "
    "[1,3,8,8], Format/Datatype: Four wide channel vectorized row major Int8 format }], Outputs: [ { Name: out, "
    "Location: Device, Dimensions: [1,16,4,4], Format/Datatype: Row major linear FP32 }], ParameterType: Convolution, "
    'Kernel: [3,3], Stride: [2,2], Groups: 1, Weights: {"Type": "Int8", "Count": 432}, Activation: RELU, '
    "TacticName: sm80, TacticValue: 0x12"
)


def test_layer_information_adds_attributes_to_the_listing() -> None:
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
    conv = next(layer for layer in build.layers if layer.name == "w + wq + conv + relu")
    assert (conv.inputs[0].vector, conv.extras["Kernel"]) == (4, [3, 3])
    assert conv.extras["Weights"] == {"Type": "Int8", "Count": 432}
    assert detailed.splitlines()[conv.line - 1] == INFO
    again = next(layer for layer in build.second_layers if layer.name == conv.name)
    assert detailed.splitlines()[again.line - 1].startswith("Layer(CaskConvolution)")
    assert (build.listing, build.bindings, build.passed) == ("layer-info", ["images", "out"], True)


@pytest.mark.parametrize(
    "listed",
    ["q0_out\nout", " Name: q0_out, IOMode: Input\n Name: out, IOMode: Output", " q0_out\n out"],
)
def test_bindings_in_the_spellings_of_tensorrt_11(listed: str) -> None:
    build = read(
        f"Layers:\n{INFO}\n\nI/O Tensors:\n{listed}\n\n{samples.STAMP.format(0)} [I] End of it"
    )
    assert (build.source, build.bindings) == ("layer-info", ["q0_out", "out"])


def test_read_build_merges_files_of_one_build(tmp_path: Path) -> None:
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
    ("content", "code", "detail"),
    [
        (b"", "empty", ""),
        (b"  \n\n", "empty", ""),
        (b"hello\nworld\n", "wrong-format", "line"),
        (b"nothing of TensorRT\n", "wrong-format", ""),
        (b"Using the tool I measured things\n", "wrong-format", ""),
        (b"I ran 5 km in 20 seconds.\n", "wrong-format", ""),
        (b"Detected a bird\nWrote a letter\n", "wrong-format", ""),
        (b"Layer cake   1.5   2.5   3.5\n", "wrong-format", ""),
        (b'[{"Name": "NVIDIA A100", "ComputeCapability": [8, 0]}]', "wrong-format", ""),  # GPUs
        (b"{}\n" * 20, "file-damaged", ""),
        (b"\x00\x01\x02binary\x00", "binary-file", "binary"),
        pytest.param(b"\x08\x12".ljust(1 << 22, b"\0"), "binary-file", "binary", id="large"),
        (b'{"a": 1}', "no-layer-list", "'Layers'"),
        (b'[{"Na', "file-damaged", "column"),
        (b"[[[[", "file-damaged", "column"),
        (b"\x1f\x8bnot gzip at all", "file-damaged", ""),
        (b'{"Layers": 5}', "wrong-type", "'Layers'"),
        (b'{"Layers": [5]}', "wrong-layer", "layer 0"),
    ],
)
def test_read_build_rejects_other_content(content: bytes, code: str, detail: str) -> None:
    """A large binary file is not read to the end."""
    stream = io.BytesIO(content)
    with pytest.raises(BuildLogError, check=has(code, path="stream")) as caught:
        read_build(stream)
    assert detail in str(caught.value) and "\n" not in str(caught.value)
    assert stream.tell() <= 1 << 21


@pytest.mark.parametrize(("size", "lines"), [(10_000, 10**6), (10**6, 50)], ids=["size", "lines"])
def test_pipe_without_end_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, lines: int
) -> None:
    """The limit does not apply to files."""
    monkeypatch.setattr(limits, "PIPED_LOG", size)
    monkeypatch.setattr(limits, "PIPED_LINES", lines)
    (tmp_path / "log").write_bytes(
        b"[TRT] Trace of TensorRT version: 8.5.2\n" + b"[TRT] x\n" * 5000
    )
    assert read_build(str(tmp_path / "log")).lines.total == 5001
    with subprocess.Popen(["yes", "[TRT] x"], stdout=subprocess.PIPE) as endless:
        with pytest.raises(BuildLogError, check=has("file-too-large")):
            read_build(endless.stdout)
        endless.kill()


def test_packed_log_unpacks_to_a_multiple_of_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small unpacked size is always allowed."""
    path, text = (
        tmp_path / "log.gz",
        b"[TRT] Trace of TensorRT version: 8.5.2\n" + b"[TRT] x\n" * 5000,
    )
    path.write_bytes(gzip.compress(text))
    monkeypatch.setattr(limits, "UNPACKED_LOG_RATIO", 10)
    assert read_build(path).lines.total == 5001
    monkeypatch.setattr(limits, "UNPACKED", 1000)
    with pytest.raises(BuildLogError, match=str(path)):
        read_build(path)
    monkeypatch.setattr(limits, "UNPACKED_LOG_RATIO", 1000)
    assert read_build(path).lines.total == 5001


def test_unpack_many_members_in_linear_time() -> None:
    """zlib copies the data after each member: 8 MB of members took 9 s if passed at once."""

    def unpack(members: int) -> None:
        file = io.BytesIO(gzip.compress(b"a") * members)
        head = file.read(compression.HEAD)
        blocks = compression.unpack_blocks(head, file.read, "f", 1 << 20, whole=True)
        assert b"".join(blocks) == b"a" * members

    assert growth_factor(unpack, LINEAR) <= LINEAR


class LatePipe(io.FileIO):
    """Non-blocking pipe. Its next line arrives only after a read that returned nothing."""

    def __init__(self, *lines: bytes) -> None:
        source, self.target = os.pipe2(os.O_NONBLOCK)
        super().__init__(source)
        self.lines = list(lines)

    def read(self, size: int | None = -1) -> bytes:
        if (data := super().read(size)) is None:
            os.write(self.target, self.lines.pop(0)) if self.lines else os.close(self.target)
        return data


def test_read_build_waits_for_a_stream_that_does_not_block() -> None:
    """A process that shares standard input can make it non-blocking."""
    with LatePipe(b"[TRT] x\n", b"[TRT] x\n") as stream:
        assert read_build(stream).lines.total == 2


def test_each_line_takes_few_calls() -> None:
    """An earlier reader made a hundred calls for the line that begins the next build."""
    for line in dict.fromkeys(LOG.splitlines()):
        few, many = (count_calls(read, ["[TRT] x", *[line] * n]) for n in (10, 40))
        assert many - few <= 30 * 45, (line, (many - few) / 30)


@pytest.mark.parametrize(
    "line",
    [
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
    ],
)
def test_line_of_the_autotuner_inside_another_line_is_counted(line: str) -> None:
    build = read(samples.stamped("V", "Removing x") + samples.stamped("V", line))
    assert (build.lines.timing, len(build.trace)) == (1, 1)


def test_no_optimizer_line_begins_like_a_line_of_the_parser() -> None:
    """Only lines that begin with one of these words are passed to the parser's reader."""
    assert PARSER_WORDS.isdisjoint(w.before.partition(" ")[0] for w in trace.FORMATS.values())
