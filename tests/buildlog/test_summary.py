"""One page of facts about a build: what was read, passes, the engine, tuning, memory, profile."""

from collections import Counter

import pytest

from qdqtool.buildlog.summary import (
    SLOWEST,
    lines_of_pass,
    passes,
    signature,
    summarize,
    what_was_read,
)
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    LogEvent,
    Memory,
    Message,
    Milestone,
    ParsedNode,
    ParseSection,
    ProfileRow,
    TunedLayer,
)
from qdqtool.errors import BuildLogError
from qdqtool.types import Precision
from tests.raising import raises

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def layer(name: str, kind: str, inputs: str = "", outputs: str = "", **more: object) -> BuiltLayer:
    sides = (
        [BuiltTensor("t", Precision(p), (1, 8)) for p in types.split()]
        for types in (inputs, outputs)
    )
    return BuiltLayer(name, kind, *sides, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ("INT8", "FP32", "INT8 -> FP32"),
        ("INT8 FP16", "INT8", "INT8, FP16 -> INT8"),
        ("", "FP32", "? -> FP32"),
        ("INT8", "", "INT8 -> ?"),
        ("INT8", "INT8 FP16", "INT8 -> INT8, FP16"),
    ],
)
def test_what_goes_in_and_comes_out(inputs: str, outputs: str, told: str) -> None:
    assert signature(layer("a", "C", inputs, outputs)) == told


def test_what_was_read_and_the_rest_of_the_page() -> None:
    """Each kind of record once, in the singular or the plural; nothing of what is not there."""
    build = Build(
        parse=ParseSection([ParsedNode("n", "Conv")] * 2, ["w"]),
        headings=[("QDQ", 1)],
        trace=[LogEvent("P", "Running", "a")],
        milestones=[Milestone("Original", 1, 1)] * 3,
        messages=[Message("W", "a", 1, 2), Message("E", "b", 2, 1)],
        profile_rows=[ProfileRow("r", 1, 1, None, 1)] * 2,
    )
    build.tactics.timed, build.tactics.layers = 1, {"a": TunedLayer("a")}
    assert what_was_read(build) == [
        "2 nodes of the parse section",
        "1 initializer of the parse section",
        "1 optimizer line",
        "1 heading of the optimizer",
        "3 counts of layers by the optimizer",
        "1 tactic timed",
        "1 layer or reformat tuned",
        "2 profile rows",
        "2 warnings",
        "1 error",
    ]
    rows = [ProfileRow(f"p{i}", 10.0, float(i), None, 5.0) for i in range(12)]
    build = Build(
        profile_rows=rows,
        profile_total_ms=66.0,
        iterations=7,
        memory=Memory(activation=5, weights=9),
        placement=[("GPU", "", "a"), ("GPU", "", "b"), ("DLA", "", "c")],
        names_only=True,
        notes=["n"],
        messages=[Message("E", "bad", 4, 2), Message("W", "odd", 5, 1)],
        options={"Model": {"Model": "m.onnx"}},
        milestones=[Milestone("Original", 9, 2)],
    )
    told = summarize(build)
    assert (told["memory"]["activation"], told["memory"]["weights"], told["placement"]) == (
        5,
        9,
        {"GPU": 2, "DLA": 1},
    )
    assert told["messages"] == [
        {"level": "error", "text": "bad", "line": 4, "count": 2},
        {"level": "warning", "text": "odd", "line": 5, "count": 1},
    ]
    assert told["model"] == {"file": "m.onnx", "opset": None, "producer": None, "nodes": None}
    assert told["milestones"] == [{"what": "Original", "layers": 9, "line": 2}]
    assert (
        told["profile"]["iterations"],
        told["profile"]["layers"],
        told["profile"]["total_ms"],
    ) == (7, 12, 66.0)
    assert [r["name"] for r in told["profile"]["slowest"]][:3] == ["p11", "p10", "p9"]
    assert set(told["rerun"]) == {"8.2 to 10", "11"} and summarize(Build())["rerun"] == {}
    parsed = summarize(
        Build(
            parse=ParseSection([ParsedNode("n", "C")], onnx_file="f.onnx", opset=13, producer="p")
        )
    )
    assert parsed["model"] == {"file": "f.onnx", "opset": 13, "producer": "p", "nodes": 1}
    assert summarize(Build())["profile"] is None and summarize(Build())["command"] is None


@pytest.mark.parametrize(
    ("total", "blank", "unexplained", "marked", "told"),
    [
        (0, 0, 0, 0, []),
        (3, 3, 0, 0, []),
        (5, 1, 3, 3, ["1 line of TensorRT with nothing to keep"]),
        (5, 1, 0, 0, ["4 lines of TensorRT with nothing to keep"]),
        (5, 1, 4, 2, ["2 lines that TensorRT wrote and that this version does not know"]),
    ],
)
def test_lines_that_hold_nothing(
    total: int, blank: int, unexplained: int, marked: int, told: list[str]
) -> None:
    build = Build()
    lines = build.lines
    lines.total, lines.blank, lines.unexplained, lines.marked = total, blank, unexplained, marked
    assert what_was_read(build) == told


TRACE = [
    LogEvent("QDQToCopy", "Running", "q", line=3),
    LogEvent("QDQToCopy", "Swap the layer type", "q", "x", line=4),
    LogEvent("EltReluFusion", "Running", "a", line=5),
    LogEvent("QDQToCopy", "Running", "r", line=6),
]


def test_passes() -> None:
    assert passes(Build(trace=TRACE)) == [
        {"pass": "QDQToCopy", "running": 2, "events": {"Swap the layer type": 1}, "line": 3},
        {"pass": "EltReluFusion", "running": 1, "events": {}, "line": 5},
    ]
    more = [
        *TRACE,
        LogEvent("QDQOther", "Running", "q", line=9),
        LogEvent("", "Retargeting", "a", "b", line=10),
    ]
    for given, name, known in (
        (more, "qdq", "QDQOther, QDQToCopy"),
        ([], "any", "none:"),
        (more, "none", "EltReluFusion, QDQOther, QDQToCopy"),
    ):
        with raises(BuildLogError, f"lines_of_pass {name}: {known}"):
            lines_of_pass(Build(trace=given), name)
    whole = Build(trace=[*more, LogEvent("QDQ", "Running", "z", line=11)])
    assert [line for line, _ in lines_of_pass(whole, "qdq")] == [11]


@pytest.mark.parametrize("name", ["QDQToCopy", "qdqtocopy", "qdq", "QDQT"])
def test_a_pass_by_its_name_or_how_it_begins(name: str) -> None:
    assert [line for line, _ in lines_of_pass(Build(trace=TRACE), name)] == [3, 4, 6]


@pytest.mark.parametrize(
    ("flags", "remainder"),
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
def test_whether_the_float_remainder_is_fp32(flags: str, remainder: bool) -> None:
    assert (
        summarize(Build(precision_flags=frozenset(flags.split())))["float_remainder_fp32"]
        is remainder
    )


def test_engines_and_tuning() -> None:
    """Types and signatures by how often they are; conversions and reformats with shape and place."""
    layers = [
        layer("c", "CaskConvolution", "INT8", "FP16"),
        layer("d", "CaskConvolution", "INT8", "FP16"),
        layer("e", "CaskConvolution", "FP16", "FP16"),
        BuiltLayer("odd"),
        layer("QuantizeLinear_1", "Reformat", "FP32", "INT8", line=7),
        layer("x copy", "Reformat", "INT8", "INT8"),
    ]
    told = summarize(Build(layers=layers, bindings=["x"]))
    assert told["engine"] == {
        "layers": 6,
        "listing": "",
        "types": {"CaskConvolution": 3, "Reformat": 2, "unknown": 1},
        "convolutions": 3,
        "signatures": {"INT8 -> FP16": 2, "FP16 -> FP16": 1},
        "bindings": ["x"],
    }
    assert told["conversions"] == [
        {
            "name": "QuantizeLinear_1",
            "from": "FP32",
            "to": "INT8",
            "shape": [1, 8],
            "qdq": True,
            "line": 7,
        }
    ]
    assert [r["name"] for r in told["reformats"]] == ["x copy"] and told["reformats"][0][
        "qdq"
    ] is False
    assert summarize(Build())["engine"] is None
    bare = summarize(Build(layers=[BuiltLayer("QuantizeLinear_1", "Reformat")]))["conversions"][0]
    assert (bare["shape"], bare["from"], bare["to"]) == (None, "UNKNOWN", "UNKNOWN")
    # The slowest layers first, by time, then by tactics, then by name; reformats that were timed
    build = Build()
    tactics = build.tactics
    some = (
        ("a", 5, 1.0),
        ("b", 9, 1.0),
        ("c", 1, 4.0),
        ("e", 5, 1.0),
        *((f"z{i}", 0, 0.0) for i in range(9)),
    )
    tactics.layers = {n: TunedLayer(n, count, None, seconds) for n, count, seconds in some}
    timed = {"r": 0.1, "s": None, "t": 0.4, "u": 0.2, "v": 0.2}
    tactics.reformats = {n: TunedLayer(n, 1, ms) for n, ms in timed.items()}
    tactics.reasons, tactics.refused = Counter({"memory": 3}), Counter({("Runner", "layer"): 2})
    told = summarize(build)["tuning"]
    assert [t["name"] for t in told["slowest"]] == [
        "c",
        "b",
        "a",
        "e",
        "z0",
        "z1",
        "z2",
        "z3",
    ] and SLOWEST == 8
    assert [t["name"] for t in told["slowest_reformats"]] == ["t", "u", "v"]
    assert told["reasons"] == [{"reason": "memory", "count": 3}]
    assert told["refused"] == [{"runner": "Runner", "layer": "layer", "count": 2}]
    assert told["layers"] == 13
