from collections import Counter

import pytest

from qdqtool.buildlog.summary import (
    describe_contents,
    find_pass_lines,
    format_types,
    summarize,
    summarize_passes,
)
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    LineCounts,
    LogEvent,
    LogMessage,
    MemoryUse,
    Milestone,
    ParsedNode,
    ParseSection,
    ProfileRow,
    TacticCounts,
    TunedLayer,
)
from qdqtool.errors import BuildLogError
from qdqtool.ir.precision import Precision
from tests.errors import has

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def layer(name: str, kind: str, inputs: str = "", outputs: str = "", **more: object) -> BuiltLayer:
    sides = (
        [BuiltTensor("t", Precision(p), (1, 8)) for p in types.split()]
        for types in (inputs, outputs)
    )
    return BuiltLayer(name, kind, *sides, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ("INT8", "FP32", "INT8 -> FP32"),
        ("INT8 FP16", "INT8", "INT8, FP16 -> INT8"),
        ("", "FP32", "? -> FP32"),
        ("INT8", "", "INT8 -> ?"),
        ("INT8", "INT8 FP16", "INT8 -> INT8, FP16"),
    ],
)
def test_signature(inputs: str, outputs: str, expected: str) -> None:
    assert format_types(layer("a", "C", inputs, outputs)) == expected


def test_describe_contents_counts_each_kind_of_record() -> None:
    build = Build(
        parse=ParseSection([ParsedNode("n", "Conv")] * 2, ["w"]),
        headings=[("QDQ", 1)],
        trace=[LogEvent("P", "Running", "a")],
        milestones=[Milestone("Original", 1, 1)] * 3,
        messages=[LogMessage("W", "a", 1, 2), LogMessage("E", "b", 2, 1)],
        profile_rows=[ProfileRow("r", 1, 1, None, 1)] * 2,
    )
    build.tactics.timed, build.tactics.layers = 1, {"a": TunedLayer("a")}
    build.tactics.combinations = 2
    assert describe_contents(build) == [
        "2 nodes of the parse section",
        "1 initializer of the parse section",
        "1 optimizer line",
        "1 heading of the optimizer",
        "3 counts of layers by the optimizer",
        "1 tactic timed",
        "2 format combinations tried",
        "1 record of tuned layers and reformats",
        "2 profile rows",
        "2 warnings",
        "1 error",
    ]


def test_summarize_memory_messages_and_milestones() -> None:
    summary = summarize(
        Build(
            memory=MemoryUse(activation=5, weights=9),
            placement=[("GPU", "", "a"), ("GPU", "", "b"), ("DLA", "", "c")],
            messages=[LogMessage("E", "bad", 4, 2), LogMessage("W", "odd", 5, 1)],
            milestones=[Milestone("Original", 9, 2)],
        )
    )
    assert (summary["memory"]["activation"], summary["memory"]["weights"]) == (5, 9)
    assert summary == summary | {
        "placement": {"GPU": 2, "DLA": 1},
        "messages": [
            {"level": "error", "text": "bad", "line": 4, "count": 2},
            {"level": "warning", "text": "odd", "line": 5, "count": 1},
        ],
        "milestones": [{"what": "Original", "layers": 9, "line": 2}],
    }


def test_summarize_profile() -> None:
    rows = [ProfileRow(f"p{i}", 10.0, float(i), None, 5.0) for i in range(12)]
    profile = summarize(Build(profile_rows=rows, profile_total_ms=66.0, iterations=7))["profile"]
    assert (profile["iterations"], profile["layers"], profile["total_ms"]) == (7, 12, 66.0)
    assert [row["name"] for row in profile["slowest"]][:3] == ["p11", "p10", "p9"]


@pytest.mark.parametrize(
    ("build", "model"),
    [
        (
            Build(options={"Model": {"Model": "m.onnx"}}),
            {"file": "m.onnx", "opset": None, "producer": None, "nodes": None},
        ),
        (
            Build(
                parse=ParseSection([ParsedNode("n", "C")], onnx_file="f", opset=13, producer="p")
            ),
            {"file": "f", "opset": 13, "producer": "p", "nodes": 1},
        ),
    ],
    ids=["options", "parse section"],
)
def test_summarize_model(build: Build, model: dict[str, object]) -> None:
    assert summarize(build)["model"] == model


def test_summarize_rerun_commands() -> None:
    assert set(summarize(Build(names_only=True))["rerun"]) == {"8.2 to 10", "11"}


def test_summarize_empty_build() -> None:
    summary = summarize(Build())
    assert [summary[key] for key in ("rerun", "profile", "command", "engine")] == [
        {},
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("total", "blank", "unexplained", "marked", "expected"),
    [
        (0, 0, 0, 0, []),
        (3, 3, 0, 0, []),
        (5, 1, 3, 3, ["1 line of TensorRT without information for the summary"]),
        (5, 1, 0, 0, ["4 lines of TensorRT without information for the summary"]),
        (5, 1, 4, 2, ["2 lines of TensorRT that this version of qdqtool does not recognize"]),
    ],
)
def test_describe_contents_of_lines_without_content(
    total: int, blank: int, unexplained: int, marked: int, expected: list[str]
) -> None:
    lines = LineCounts(total=total, blank=blank, unexplained=unexplained, marked=marked)
    assert describe_contents(Build(lines=lines)) == expected


TRACE = [
    LogEvent("QDQToCopy", "Running", "q", line=3),
    LogEvent("QDQToCopy", "Swap the layer type", "q", "x", line=4),
    LogEvent("EltReluFusion", "Running", "a", line=5),
    LogEvent("QDQToCopy", "Running", "r", line=6),
]


def test_summarize_passes() -> None:
    assert summarize_passes(Build(trace=TRACE)) == [
        {"pass": "QDQToCopy", "running": 2, "events": {"Swap the layer type": 1}, "line": 3},
        {"pass": "EltReluFusion", "running": 1, "events": {}, "line": 5},
    ]


SIMILAR_NAMES = [
    *TRACE,
    LogEvent("QDQOther", "Running", "q", line=9),
    LogEvent("", "Retargeting", "a", "b", line=10),
]


@pytest.mark.parametrize(
    ("events", "name", "code", "listed"),
    [
        (SIMILAR_NAMES, "qdq", "ambiguous", "QDQOther, QDQToCopy"),
        ([], "any", "unknown-choice", "no optimizer lines"),
        (SIMILAR_NAMES, "none", "unknown-choice", "EltReluFusion, QDQOther, QDQToCopy"),
    ],
    ids=["ambiguous", "no passes", "unknown"],
)
def test_find_pass_lines_rejects_other_names(
    events: list[LogEvent], name: str, code: str, listed: str
) -> None:
    with pytest.raises(BuildLogError, check=has(code, parameter="name")) as caught:
        find_pass_lines(Build(trace=events), name)
    assert f"{name}: " in str(caught.value) and listed in str(caught.value)


@pytest.mark.parametrize(
    ("events", "name", "lines"),
    [
        *((TRACE, name, [3, 4, 6]) for name in ("QDQToCopy", "qdqtocopy", "qdq", "QDQT")),
        ([*SIMILAR_NAMES, LogEvent("QDQ", "Running", "z", line=11)], "qdq", [11]),
    ],
)
def test_find_pass_lines_by_name_or_its_start(
    events: list[LogEvent], name: str, lines: list[int]
) -> None:
    assert [line for line, _ in find_pass_lines(Build(trace=events), name)] == lines


@pytest.mark.parametrize(
    ("flags", "is_fp32"),
    [
        ("int8", True),
        ("fp32 int8", True),
        ("int8 fp16", False),
        ("int8 bf16", False),
        ("int8 best", False),
        ("int8 stronglyTyped", False),
        ("fp32", False),
        ("", False),
    ],
)
def test_summarize_float_remainder(flags: str, is_fp32: bool) -> None:
    assert (
        summarize(Build(precision_flags=frozenset(flags.split())))["float_remainder_fp32"]
        is is_fp32
    )


def test_summarize_engine_conversions_and_reformats() -> None:
    layers = [
        layer("c", "CaskConvolution", "INT8", "FP16"),
        layer("d", "CaskConvolution", "INT8", "FP16"),
        layer("e", "CaskConvolution", "FP16", "FP16"),
        BuiltLayer("odd"),
        layer("QuantizeLinear_1", "Reformat", "FP32", "INT8", line=7),
        layer("x copy", "Reformat", "INT8", "INT8"),
        layer("Slice_1", "Reformat", "INT8", "INT8"),
        layer("Reformatting CopyNode for Input Tensor 0 to c", "Reformat", "INT8", "INT8"),
    ]
    summary = summarize(Build(layers=layers, bindings=["x"]))
    assert summary["engine"] == {
        "layers": 8,
        "listing": "",
        "types": {"CaskConvolution": 3, "Reformat": 4, "unknown": 1},
        "convolutions": 3,
        "signatures": {"INT8 -> FP16": 2, "FP16 -> FP16": 1},
        "bindings": ["x"],
    }
    assert summary["conversions"] == [
        {
            "name": "QuantizeLinear_1",
            "from": "FP32",
            "to": "INT8",
            "shape": [1, 8],
            "qdq": True,
            "line": 7,
        }
    ]
    assert [(r["name"], r["qdq"], r["copy"]) for r in summary["reformats"]] == [
        ("x copy", False, True),
        ("Slice_1", False, True),
        (layers[-1].name, False, False),
    ]


def test_summarize_conversion_without_tensors() -> None:
    build = Build(layers=[BuiltLayer("QuantizeLinear_1", "Reformat")])
    (conversion,) = summarize(build)["conversions"]
    assert [conversion[key] for key in ("shape", "from", "to")] == [None, "UNKNOWN", "UNKNOWN"]


def test_summarize_tuning() -> None:
    """Layers are sorted by time, then by the number of tactics, then by name."""
    tactics = TacticCounts()
    layers = (
        ("a", 5, 1.0),
        ("b", 9, 1.0),
        ("c", 1, 4.0),
        ("e", 5, 1.0),
        *((f"z{i}", 0, 0.0) for i in range(9)),
    )
    tactics.layers = {n: TunedLayer(n, count, None, seconds) for n, count, seconds in layers}
    tactics.reformats = {
        n: TunedLayer(n, 1, ms)
        for n, ms in {"r": 0.1, "s": None, "t": 0.4, "u": 0.2, "v": 0.2}.items()
    }
    tactics.reasons, tactics.refused = Counter({"memory": 3}), Counter({("Runner", "layer"): 2})
    tuning = summarize(Build(tactics=tactics))["tuning"]
    assert [t["name"] for t in tuning["slowest"]] == ["c", "b", "a", "e", "z0", "z1", "z2", "z3"]
    assert [t["name"] for t in tuning["slowest_reformats"]] == ["t", "u", "v"]
    assert tuning == tuning | {
        "reasons": [{"reason": "memory", "count": 3}],
        "refused": [{"runner": "Runner", "layer": "layer", "count": 2}],
        "layers": 13,
    }
