from typing import Any

import pytest

from qdqtool.buildlog.layers import as_int_list
from qdqtool.buildlog.lines import ParseReader, parse_number, read_memory, read_metric
from qdqtool.buildlog.log import split_prefix
from qdqtool.buildlog.sections import parse_version_digits
from qdqtool.buildlog.types import (
    MAX_DIMENSION,
    Build,
    BuiltTensor,
    MemoryUse,
    ParsedNode,
    ParsedTensor,
    ParseSection,
    TacticCounts,
)
from qdqtool.ir.precision import Precision
from tests.buildlog.samples import build_of, stamped


def read(*lines: str) -> Build:
    return build_of(list(lines))


def verbose(*lines: str) -> Build:
    return read(*(stamped("V", line) for line in ("TensorRT version: 8.5.2", *lines)))


def parse(*lines: str) -> ParseSection:
    section = ParseSection()
    reader = ParseReader(section, lambda _: True)
    for i, line in enumerate(lines):
        assert reader.read(line, i + 1), line
    return section


# Parse section


@pytest.mark.parametrize(
    ("line", "details"),
    [
        (
            "Using kernel: (3, 3), strides: (2, 2), prepadding: (1, 1), postpadding: (0, 0), dilations: (1, 1), numOutputs: 16",
            {
                "kernel": [3, 3],
                "strides": [2, 2],
                "prepadding": [1, 1],
                "postpadding": [0, 0],
                "dilations": [1, 1],
                "numOutputs": 16,
            },
        ),
        ("Using Gather axis: -1", {"axis": -1}),
        ("Using Gather axis: 2", {"axis": 2}),
        ("Resize mode: nearest", {"mode": "nearest"}),
        ("Pre-padding: (0, 1)", {"prepadding": [0, 1]}),
        ("Transformation mode: asymmetric", {"coordinate_transformation_mode": "asymmetric"}),
    ],
)
def test_details_are_added_to_the_node_that_is_parsed(line: str, details: dict[str, Any]) -> None:
    section = parse(
        "Parsing node: a [Conv]", "Parsing node: b [Conv]", line, "Parsing node: c [Conv]"
    )
    assert [n.details for n in section.nodes] == [{}, details, {}] and parse(line).nodes == []


@pytest.mark.parametrize(
    ("text", "opset"), [("13", 13), ("99999", 99999), ("100000", 0), ("1x", 0), ("", 0)]
)
def test_opset(text: str, opset: int) -> None:
    assert parse(f"Opset version:    {text}").opset == opset


@pytest.mark.parametrize(("version", "producer"), [(" 2.1", "pytorch 2.1"), ("", "pytorch")])
def test_file_and_producer(version: str, producer: str) -> None:
    section = parse(
        "Input filename:   my net.onnx",
        "Producer name: pytorch",
        f"Producer version:{version}",
        "Doc string:",
        "Model version: 0",
    )
    assert (section.onnx_file, section.producer) == ("my net.onnx", producer)


def test_tensors_of_another_node_start_a_node() -> None:
    section = parse(
        "a [Relu] outputs: [y -> (1)[FLOAT]], ",
        "Parsing node: b [Relu]",
        "c [Neg] inputs: [y -> (1)[FLOAT]], ",
    )
    assert [(n.name, n.op, len(n.inputs), len(n.outputs)) for n in section.nodes] == [
        ("a", "Relu", 0, 1),
        ("b", "Relu", 0, 0),
        ("c", "Neg", 1, 0),
    ]


def test_nothing_is_kept_if_there_is_no_room() -> None:
    section = ParseSection()
    reader = ParseReader(section, lambda _: False)
    for line in (
        "Parsing node: a [Conv]",
        "Importing initializer: w",
        "Registering layer: a for ONNX node: a",
        "Adding network input: x with dtype: int8, dimensions: (1)",
        "Marking y as output: y",
        "b [Relu] inputs: [x -> (1)[FLOAT]], ",
    ):
        assert reader.read(line, 1), line
    assert section == ParseSection()


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("1, 3, 8", (1, 3, 8)),
        ("", ()),
        ("-1, 3", (None, 3)),
        (f"{MAX_DIMENSION}, 1", (None, 1)),
        (f"{MAX_DIMENSION - 1}", (MAX_DIMENSION - 1,)),
        ("9" * 30, (None,)),
        ("1" + "0" * 17, (None,)),
        ("a, 2", (None, 2)),
    ],
)
def test_shapes(dims: str, shape: tuple[int | None, ...]) -> None:
    (node,) = parse(f"n [Relu] inputs: [x -> ({dims})[FLOAT]], ").nodes
    assert node.inputs == [ParsedTensor("x", shape, "FLOAT")]


def test_tensors_of_a_node() -> None:
    (node,) = parse(
        "Parsing node: my [node] [Conv]",
        "my [node] [Conv] inputs: [a -> (1)[FLOAT]], [optional input, not set], [b], "
        "[c -> d -> ()[INT8]], ",
        "my [node] [Conv] outputs: [ -> (1)[FLOAT]], []",
    ).nodes
    assert (node.name, node.op, node.line, node.outputs) == ("my [node]", "Conv", 1, [None, None])
    assert node.inputs == [
        ParsedTensor("a", (1,), "FLOAT"),
        None,
        ParsedTensor("b", None, ""),
        ParsedTensor("c -> d", (), "INT8"),
    ]


def test_tensors_of_a_node_without_name() -> None:
    section = parse(
        "Parsing node:  [Relu]",
        " [Relu] inputs: [x -> (1)[FLOAT]], ",
        " [Relu] outputs: [y -> (1)[FLOAT]], ",
    )
    x, y = (ParsedTensor(name, (1,), "FLOAT") for name in "xy")
    assert section.nodes == [ParsedNode("", "Relu", [x], [y], 1)]


@pytest.mark.parametrize(
    ("line", "tensor"),
    [
        (
            "Adding network input: x with dtype: float32, dimensions: (1, 3, -1)",
            ParsedTensor("x", (1, 3, None), "FLOAT"),
        ),
        (
            "Adding network input: a with b with dtype: half, dimensions: ()",
            ParsedTensor("a with b", (), "FLOAT16"),
        ),
        (
            "Adding network input: x with dtype: odd, dimensions: (2)",
            ParsedTensor("x", (2,), "ODD"),
        ),
        ("Adding network input: x with dtype: float32, dimensions: (1", None),
        ("Adding network input: x", None),
        ("Adding network input: x with dtype: not one word, dimensions: (1)", None),
        ("some [other line] inputs: nothing", None),
    ],
)
def test_network_inputs(line: str, tensor: ParsedTensor | None) -> None:
    section = ParseSection()
    assert ParseReader(section, lambda _: True).read(line, 1) is (tensor is not None)
    assert section.inputs == ([] if tensor is None else [tensor])


# Tuning

RUNNER = "--------------- Timing Runner: {} (CaskConvolution)"


def tuned(*lines: str) -> TacticCounts:
    return verbose(*lines).tactics


def test_best_time_of_a_layer_over_its_formats() -> None:
    a, b, fastest = RUNNER.format("a"), RUNNER.format("b"), "Fastest Tactic: 0x1 Time: {}".format
    tactics = tuned(
        a, fastest(0.5), a, fastest(0.25), a, fastest(0.4), fastest("none"), b, fastest(0.75)
    )
    assert {n: t.best_ms for n, t in tactics.layers.items()} == {"a": 0.25, "b": 0.75}


def test_tuning_seconds_of_a_layer() -> None:
    lines = (
        (0, "TensorRT version: 8.5.2"),
        (1, RUNNER.format("a")),
        (4, RUNNER.format("b")),
        (4, "Tactic: 0x1 Time: 1"),
        (9, RUNNER.format("a")),
    )
    damaged = stamped("V", RUNNER.format("a")).replace("10/31", "xx/yy")
    tactics = read(*(stamped("V", text, second) for second, text in lines), damaged).tactics
    assert {n: t.seconds for n, t in tactics.layers.items()} == {"a": 3.0, "b": 5.0}


def test_refused_and_skipped_tactics() -> None:
    """A line without layer is about the layer that is being timed."""
    tactics = tuned(
        RUNNER.format("a"),
        "CaskConvolution has no valid tactics for this config, skipping.",
        "Skipping CaskGemm: No valid tactics for b + c",
        "Skipping tactic 0x1 due to insufficient memory",
        "Skipping tactic 0x2 due to insufficient memory",
    )
    assert tactics.refused == {("CaskConvolution", "a"): 1, ("CaskGemm", "b + c"): 1}
    assert (tactics.reasons, tactics.skipped) == ({"insufficient memory": 2}, 4)


def test_results_of_tensorrt_8_6_and_later() -> None:
    """Each result names its layer, whether it was timed or came from the timing cache."""
    tactics = tuned(
        RUNNER.format("Optimizer Reformat(x -> y)"),
        "x -> y (Reformat[0x8]) profiling completed in 0.1 seconds. Fastest Tactic: 0x1 Time: 0.125",
        "a + b (CaskConvolution[0x8]) profiling completed in 0.1 seconds. Fastest Tactic: 0x1 Time: 0.5",
        "a + b (CaskConvolution[0x9]) profiling completed in 0.1 seconds. Fastest Tactic: 0x1 Time: 0.7",
        "c [Int8(1) -> Half(1)] got cached result: CaskConvolution, tactic 0x1, 0.25 ms",
        "d got cached result: Reformat, tactic 0x1, 0.5 ms",
    )
    assert {n: t.best_ms for n, t in tactics.layers.items()} == {"a + b": 0.5, "c": 0.25, "d": 0.5}
    assert {n: t.best_ms for n, t in tactics.reformats.items()} == {"x -> y": 0.125}
    assert (tactics.cached, tactics.layers["c"].runner) == (2, "CaskConvolution")


@pytest.mark.parametrize(
    ("line", "costed"),
    [
        ("=============== Computing costs for a + b", {"a + b"}),
        ("=============== Computing costs for ", set()),
        ("=============== Computing reformatting costs", set()),
    ],
)
def test_layers_with_computed_costs(line: str, costed: set[str]) -> None:
    assert tuned(line).costed == costed


# Blocks


def informed(*lines: str) -> Build:
    return read(*(stamped("I", line) for line in lines))


DEVICE = "=== Device Information ==="


def test_blocks_of_options_and_device() -> None:
    build = informed(
        "=== Build Options ===",
        "Precision: FP32+INT8",
        DEVICE,
        "Selected Device: Orin",
        "SMs: 4",
        "Available Devices: ",
        "  Device 0: x",
        "=== System ===",
        "Clock: late",
    )
    assert build.options["Build"] == {"Precision": "FP32+INT8"}
    assert build.gpu["SMs"] == "4" and build.device == "Orin" and "Clock" not in build.gpu


def test_block_ends_at_a_verbose_line() -> None:
    lines = stamped("I", DEVICE), stamped("I", "SMs: 4"), stamped("V", "Compute Capability: 9")
    assert read(*lines).gpu == {"SMs": "4"}


def test_graph_of_tensorrt_rtx_is_recognized() -> None:
    graph = ("SYMBOLIC CHECKS", "GRAPH NODES", "CONSTANT w_8", "    Output 0", "        64\t64")
    build = verbose(*graph, "Original: 3 layers")
    assert (build.lines.unexplained, build.milestone("Original")) == (0, 3)


def test_banner_flags() -> None:
    command = 'trtexec --onnx="my net.onnx" --int8 --shapes=x:1x3 -v'
    build = read(f"&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # {command}")
    assert build.flags == {"onnx": "my net.onnx", "int8": "", "shapes": "x:1x3"}


@pytest.mark.parametrize(
    ("lines", "is_rtx", "passed"),
    [
        (["&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec"], False, None),
        (["&&&& RUNNING TensorRT_RTX.tensorrt_rtx [TensorRT-RTX v10401] # a"], True, None),
        (["&&&& FAILED TensorRT.trtexec # trtexec --onnx=a.onnx"], False, False),
        ([stamped("V", "Number of target compute capabilities: 1")], True, None),
        ([stamped("V", "Number of aux streams is 0")], False, None),
    ],
)
def test_banner_or_compute_capabilities_tell_rtx(
    lines: list[str], is_rtx: bool, passed: bool | None
) -> None:
    build = read(*lines, stamped("V", "Original: 3 layers"))
    assert (build.is_rtx, build.passed) == (is_rtx, passed)


@pytest.mark.parametrize(
    ("title", "iterations"),
    [
        ("Profile (781 iterations )", 781),
        ("Profile (x iterations )", None),
        ("Profile (99999999999 iterations )", 99999999999),
        ("Profile (999999999999 iterations )", None),
    ],
)
def test_profile_iterations(title: str, iterations: int | None) -> None:
    assert informed("TensorRT version: 8.5.2", f"=== {title} ===").iterations == iterations


def test_last_of_two_profiles_counts() -> None:
    head, row = (
        "   Layer   Time (ms)   Avg. Time (ms)   Time %",
        "      a       {}.00           0.5     20.0",
    )
    build = informed(
        "=== Profile (2 iterations ) ===",
        head,
        row.format(10),
        "",
        "=== Profile (3 iterations ) ===",
        head,
        row.format(20),
        row.format(30).replace(" a ", " b "),
    )
    assert [(r.name, r.total_ms, r.median_ms) for r in build.profile_rows] == [
        ("a", 20.0, None),
        ("b", 30.0, None),
    ]


def test_layer_that_is_listed_twice_counts_once() -> None:
    line = "Layer(Reformat): q, Tactic: 0x0, a (Float[1,8]) -> b (Int8[1,8])"
    other = line.replace("q,", "r,")
    assert [x.name for x in verbose(line, line, other, "Layer(broken", line).layers] == ["q", "r"]
    again = verbose("Engine Layer Information:", line, "Engine Layer Information:", line, other)
    assert [x.name for x in again.layers] == ["q", "r"]


INFO = "Name: a, LayerType: C, Inputs: [], Outputs: []"


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        ((INFO,), "layer-info"),
        ((INFO, stamped("V", "Parsing node: a [Conv]")), "log"),
        ((INFO, stamped("V", "Running: QDQToCopy on q")), "log"),
        ((INFO, stamped("V", "Original: 3 layers")), "log"),
        (("Layer(C): a, Tactic: 0x1, x (Int8[1]) -> y (Int8[1])",), "log"),
    ],
)
def test_source_of_layer_information(lines: tuple[str, ...], source: str) -> None:
    assert read(*lines).source == source


@pytest.mark.parametrize(
    ("digits", "version"),
    [
        ("8502", "8.5.2"),
        ("8510", "8.5.10"),
        ("100000", "10.0.0"),
        ("99999", "9.9.999"),
        ("101303", "10.13.3"),
        ("110104", "11.1.4"),
        ("8", "8.0.0"),
        ("85", "8.5.0"),
    ],
)
def test_version_of_banner_digits(digits: str, version: str) -> None:
    assert parse_version_digits(digits) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("8.5.2", "8.5.2"),
        ("8.5.2 (more)", "8.5.2"),
        ("10.13.3.9", "10.13.3.9"),
        ("8", None),
        ("words", None),
        ("8.x", None),
    ],
)
def test_printed_version(text: str, version: str | None) -> None:
    assert (
        read(stamped("I", f"TensorRT version: {text}"), stamped("V", "Original: 3 layers")).tensorrt
        == version
    )


@pytest.mark.parametrize(
    ("text", "reformat"),
    [
        ("n (t) from Float(1) to Int8(1)", ("n", "t", "Float(1)", "Int8(1)")),
        ("a (b) (t) from Float(1) to Int8(1) long-strided", ("a (b)", "t", "Float(1)", "Int8(1)")),
        ("n (t) from Float (1) to Int8(1)", None),
        ("n (t) from Float(1)", None),
        ("n t from Float(1) to Int8(1)", None),
        ("n (t) from Float(1) to Int8 (1)", None),
    ],
)
def test_added_reformats(text: str, reformat: tuple[str, ...] | None) -> None:
    reformats = verbose(f"Adding reformat layer: {text}").reformats
    expected = [] if reformat is None else [reformat]
    assert [(r.name, r.tensor, r.source, r.target) for r in reformats] == expected


# Messages


def test_messages_are_counted_and_continued() -> None:
    build = read(
        stamped("W", "one"),
        stamped("W", "two"),
        " and more",
        stamped("W", "one"),
        stamped("V", "Original: 3 layers"),
        " belongs to nothing",
        "RuntimeError: it failed",
    )
    assert [(m.level, m.text, m.line, m.count) for m in build.messages] == [
        ("W", "one", 1, 2),
        ("W", "two\n and more", 2, 1),
        ("E", "RuntimeError: it failed", 7, 1),
    ]


@pytest.mark.parametrize(
    ("lines", "lengths"),
    [
        ([stamped("E", "x" * 1500), *(["y" * 700] * 5)], [1500, 500]),
        ([stamped("E", "z" * 5000)], [2000]),
    ],
    ids=["continued", "one line"],
)
def test_length_of_messages_is_limited(lines: list[str], lengths: list[int]) -> None:
    (error,) = read(*lines).errors
    assert [len(line) for line in error.text.split("\n")] == lengths


# Numbers, prefixes, shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", 1.5),
        ("-2e3", -2000.0),
        ("0", 0.0),
        *((x, None) for x in ("nan", "inf", "-inf", "x", "")),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert parse_number(text) == value == parse_number(text.encode())


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("Total Host Persistent Memory: 512 bytes", "host_persistent", 512),
        ("Total Scratch Memory: 7", "scratch", 7),
        ("Max Scratch Memory: 9 bytes", "scratch", 9),
        ("Total Weights Memory: 11 bytes", "weights", 11),
        ("Loaded engine size: 6 MiB", "engine_mib", 6),
        (
            "[MemUsageStats] Peak memory usage of TRT CPU/GPU memory allocators: CPU 3 MiB, GPU 4 MiB",
            "peak_gpu_mib",
            4,
        ),
        ("Layer: a b Host Persistent: 1 Device Persistent: 2 Scratch Memory: 3", "scratch", None),
        (
            "Layer: a Host Persistent: 1 bytes Device Persistent: 2 bytes Scratch Memory: 3 bytes",
            "scratch",
            None,
        ),
        ("Layer: a has no memory", "", None),
        ("Total of nothing: 5", "", None),
    ],
)
def test_memory(line: str, field: str, value: object) -> None:
    memory = MemoryUse()
    assert read_memory(memory, line) is bool(field)
    assert not field or getattr(memory, field) == value


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("Throughput: 424.281 qps", {"Throughput": {"value": 424.281}}),
        ("Throughput: nan qps", {}),
        (
            "Latency: min = 1 ms, max = 3 ms, mean = -nan ms, percentile(99%) = 2.5 ms",
            {"Latency": {"min": 1.0, "max": 3.0, "percentile(99%)": 2.5}},
        ),
        (
            "GPU Compute Time: min = 1 ms, median = 2 ms",
            {"GPU Compute Time": {"min": 1.0, "median": 2.0}},
        ),
        ("Latency: 5", {}),
    ],
)
def test_performance_summary(line: str, values: dict[str, dict[str, float]]) -> None:
    performance: dict[str, dict[str, float]] = {}
    assert read_metric(performance, line) is bool(values) and performance == values


TORCH_TENSORRT = "torch_tensorrt [TensorRT Conversion Context]"  # a logger of Python


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("[10/31/2023-17:53:35] [W] [TRT] a", "W", "a"),
        ("[11/04/2022-10:11:12] [TRT] [E] b", "E", "b"),
        ("[TensorRT] INTERNAL_ERROR: c", "E", "c"),
        ("[F] [TRT] d", "E", "d"),
        ("DEBUG: [Torch-TensorRT] - e", "V", "e"),
        ("DEBUG: [TRTorch Conversion Context] - e", "V", "e"),
        ("GRAPH: [Torch-TensorRT TorchScript Conversion Context] - e", "V", "e"),
        (f"WARNING:{TORCH_TENSORRT}:e", "W", "e"),
        (f"INFO: {TORCH_TENSORRT}: e", "I", "e"),
        (f"DEBUG:{TORCH_TENSORRT}:--------------- e", "V", "--------------- e"),
        (f"2026-01-02 10:11:12,345 - {TORCH_TENSORRT} - ERROR - e", "E", "e"),
        (f"[2026-01-02 10:11:12] [CRITICAL] {TORCH_TENSORRT}: e", "E", "e"),
        (f"{TORCH_TENSORRT} [INFO] e", "I", "e"),
        (f"WARNING  {TORCH_TENSORRT}:_TRTInterpreter.py:123 e", "W", "e"),
        (f"[WARNING|10:11:12] {TORCH_TENSORRT}: e", "W", "e"),
        (f"{TORCH_TENSORRT}: e", "V", "e"),
        (f"[2026-01-02 10:11:12,345][{TORCH_TENSORRT}][INFO] - e", "I", "e"),
        (f"2026-01-02T10:11:12.1Z worker-0 {TORCH_TENSORRT} ERROR | e", "E", "e"),
        (f"2026-01-02 10:11:12.123 | INFO     | {TORCH_TENSORRT}:log:55 - e", "I", "e"),
        (f"WARNING ({TORCH_TENSORRT}) e", "W", "e"),
        ("INFO:torch_tensorrt.dynamo._compiler:e", "", "INFO:torch_tensorrt.dynamo._compiler:e"),
        ("[11/20/2024-09:12:43] [TRT-LLM] [I] e", "I", "e"),
        ("[11/20/2024-09:12:43] [TRT-LLM] [RANK 1] [D] e", "V", "e"),
        ("[TensorRT-LLM][ERROR] e", "E", "e"),
        ("[11/20/2024-09:12:43] [D] e", "V", "e"),
        ("[X] e", "V", "e"),
        ("[2022-12-30 12:38:57 WARNING] f", "W", "f"),
        ("[TRT]    g", "V", "g"),
        ("plain", "", "plain"),
        ("41%[10/31/2023-17:53:35] [I] h", "I", "h"),
    ],
)
def test_prefixes(line: str, level: str, message: str) -> None:
    assert split_prefix(line.encode())[::2] == (level, message.encode())


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [
        *((value, None, value) for value in ([1, 2], [2], [-5], [1] * 64)),
        *((x, None, None) for x in ([], "12", [True], [1.0], [1] * 65, [MAX_DIMENSION], None)),
        ([1], 2, None),
        ([2], 2, [2]),
    ],
)
def test_int_list(value: Any, least: int | None, expected: list[int] | None) -> None:
    assert as_int_list(value, least=least) == expected


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((2, 3), 6),
        ((), 1),
        (None, None),
        ((2, None), None),
        ((1 << 25, 1 << 24), 1 << 49),
        ((1 << 25, 1 << 25), None),
        ((0, 5), 0),
    ],
)
def test_elements_of_a_tensor(shape: tuple[int | None, ...] | None, elements: int | None) -> None:
    assert BuiltTensor("t", Precision.INT8, shape).elements == elements
