import contextlib
from typing import Any

import pytest

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.build_status import find_missing_layer_gap, set_build_status
from qdqtool.buildlog.read import merge_build
from qdqtool.buildlog.summary import rerun_commands
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    GapKind,
    ListingSource,
    LogEvent,
    LogMessage,
    MemoryUse,
    Milestone,
    ParsedNode,
    ParsedTensor,
    ParseSection,
    ProfileRow,
    Section,
)
from qdqtool.errors import BuildLogError
from qdqtool.ir.precision import Precision
from tests.errors import has

INT8, FP32 = Precision.INT8, Precision.FP32
TENSOR = ParsedTensor("x", (1,), "FLOAT")


def layer(
    name: str, inputs: str = "", outputs: str = "", kind: str = "CaskConvolution", **more: Any
) -> BuiltLayer:
    return BuiltLayer(
        name,
        kind,
        *([BuiltTensor(t, INT8) for t in side.split()] for side in (inputs, outputs)),
        **more,
    )


def parsed(inputs: bool = True, outputs: bool = True) -> ParseSection:
    return ParseSection(
        [ParsedNode("n", "Conv")], inputs=[TENSOR] * inputs, outputs=["y"] * outputs
    )


def milestones(*named: tuple[str, int]) -> list[Milestone]:
    return [Milestone(name, count, i) for i, (name, count) in enumerate(named)]


WHOLE = {
    "parse": parsed(),
    "milestones": milestones(("Original", 5), ("After reformat layers", 2)),
    "layers": [layer("a", "x", "t"), layer("b", "t", "y")],
    "listing": ListingSource.ENGINE_LINES,
}
PARSE, PASSES, LISTING = Section.PARSE, Section.PASSES, Section.LISTING
ENGINE = Gap(LISTING)
CUT, CUT_PARSE = Gap(PASSES, GapKind.CUT), Gap(PARSE, GapKind.CUT)
CUT_PROFILE = Gap(Section.PROFILE, GapKind.CUT_FILE, name="p.json")
CUT_LISTING = Gap(LISTING, GapKind.CUT_FILE, name="l.json")
BEYOND = Gap(Section.ALL, GapKind.BEYOND_RECORDS, 300_000)


def with_status(source: BuildSource = BuildSource.LOG, **changes: Any) -> Build:
    build = Build(source=source, **{**WHOLE, **changes})
    set_build_status(build)
    return build


@pytest.mark.parametrize(
    ("changes", "gaps", "complete"),
    [
        ({}, [], True),
        ({"parse": ParseSection()}, [Gap(PARSE)], True),  # logs of the Python API may lack it
        ({"parse": parsed(inputs=False)}, [CUT_PARSE], True),
        ({"parse": parsed(outputs=False)}, [CUT_PARSE], True),
        (
            {"parse": parsed(outputs=False), "milestones": [], "layers": [], "trace": []},
            [CUT_PARSE, Gap(PASSES), ENGINE],
            False,
        ),
        ({"milestones": [], "trace": []}, [Gap(PASSES)], True),
        ({"layers": []}, [CUT, ENGINE], False),
        ({"layers": [], "seconds": {"Graph construction and optimization": 1.0}}, [ENGINE], False),
        (
            {"layers": [], "seconds": {"Graph optimization time": 1.0}},
            [ENGINE],
            False,
        ),  # as TensorRT 10 prints it
        ({"layers": [], "seconds": {"Engine generation": 1.0}}, [CUT, ENGINE], False),
        (
            {"layers": [], "placement": [("GPU", "CONVOLUTION", "a")]},
            [ENGINE],
            False,
        ),  # printed after the passes
        (
            {"milestones": milestones(("After reformat layers", 2))},
            [CUT],
            False,
        ),
        ({"layers": WHOLE["layers"][:1]}, [Gap(LISTING, GapKind.FEWER_LAYERS, 1, 2)], False),  # type: ignore[index]
        (
            {"milestones": milestones(("Original", 5), ("After tensor merging", 3))},
            [Gap(LISTING, GapKind.FEWER_LAYERS, 2, 3)],
            False,
        ),  # the last count if there is none after the reformats
        (
            {
                "milestones": milestones(
                    ("Original", 5), ("After reformat layers", 2), ("After x", 9)
                )
            },
            [],
            True,
        ),
        (
            {"milestones": milestones(("Original", 5), ("After reformat layers", 1))},
            [],
            True,
        ),  # more than counted
        ({"layers": [BuiltLayer("a"), BuiltLayer("b")]}, [Gap(LISTING, GapKind.NAMES_ONLY)], False),
        (
            {"gaps": [BEYOND]},
            [BEYOND],
            False,
        ),
        ({"gaps": [CUT_PROFILE]}, [CUT_PROFILE], True),
        (
            {"gaps": [CUT_LISTING], "layers": WHOLE["layers"][:1]},  # type: ignore[index]
            [CUT_LISTING],
            False,
        ),  # reported once
        ({"gaps": [CUT]}, [], True),
        # Only trtexec prints an end. A build without it is complete.
        ({"source": BuildSource.TRTEXEC_LOG, "command": "trtexec"}, [Gap(Section.END)], True),
        ({"source": BuildSource.TRTEXEC_LOG, "command": "trtexec", "passed": False}, [], True),
        ({"source": BuildSource.TRTEXEC_LOG}, [], True),
        ({"source": BuildSource.LOG, "command": "trtexec"}, [], True),
        # A layer JSON alone is complete.
        (
            {
                "source": BuildSource.LAYER_JSON,
                "parse": ParseSection(),
                "milestones": [],
                "listing": ListingSource.LAYER_JSON,
            },
            [],
            True,
        ),
    ],
)
def test_gaps_of_a_build(changes: dict[str, Any], gaps: list[Gap], complete: bool) -> None:
    build = with_status(**changes)
    assert (build.gaps, build.complete) == (gaps, complete)


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (Gap(PARSE), "parse section"),
        (CUT_PARSE, "parse section (cut off)"),
        (Gap(LISTING, GapKind.FEWER_LAYERS, 2, 3), "engine listing (cut off: 2 of 3 layers)"),
        (CUT_PROFILE, "profile (cut off: the end of p.json)"),
        (BEYOND, "everything beyond the first 300,000 records"),
        (
            Gap(LISTING, GapKind.UNWRITTEN, name="{c}", tensor="u"),
            "engine listing (a layer is missing: {c} reads u, which has no producer)",
        ),
    ],
)
def test_gap_text(gap: Gap, text: str) -> None:
    assert (str(gap), Build(gaps=[gap]).missing) == (text, [text])


def test_rerun_commands_of_an_unknown_version() -> None:
    commands = rerun_commands(Build(command="trtexec --onnx=a.onnx --int8"))
    assert list(commands) == ["8.2 to 10", "11"]
    old, new = commands.values()
    assert old.startswith("trtexec --onnx=a.onnx --int8 --verbose")
    assert new.startswith("trtexec --onnx=a.onnx --verbose") and "--int8" not in new
    assert "--separateProfileRun" in old and "--separateProfileRun" not in new


def test_merge_rejects_different_versions() -> None:
    with pytest.raises(
        BuildLogError, match=r"^a and b .* 8\.5\.2 .* 8\.6\.1", check=has("different-versions")
    ):
        merge_build(Build(tensorrt="8.5.2", files=["a"]), Build(tensorrt="8.6.1", files=["b"]))
    assert merged(Build(tensorrt="8.5.2"), Build()).tensorrt == "8.5.2"


HOLE = [layer("a", "x", "t"), layer("c", "u", "y")]


@pytest.mark.parametrize(
    ("layers", "bindings", "inputs", "changes", "hole"),
    [
        (HOLE, ["x", "y"], [], {}, Gap(LISTING, GapKind.UNWRITTEN, name="c", tensor="u")),
        (HOLE, [], ["x"], {}, Gap(LISTING, GapKind.UNWRITTEN, name="c", tensor="u")),
        (HOLE, [], [], {}, None),  # the inputs of the network are unknown
        (HOLE, ["x", "y", "u"], [], {}, None),
        (HOLE, ["x"], ["u"], {}, None),
        (HOLE, ["x", "y"], [], {"names_only": True}, None),
        (
            [layer("a", "x w", "t", constants=[BuiltTensor("w", INT8)])],
            ["x"],
            [],
            {},
            None,
        ),  # weights
        (
            [layer("a", "x", "t")],
            ["x", "z"],
            [],
            {"listing": ListingSource.LAYER_JSON},
            Gap(LISTING, GapKind.IDLE_BINDING, tensor="z"),
        ),
        (
            [layer("a", "x", "t")],
            ["x", "z"],
            [],
            {"listing": ListingSource.LAYER_INFO},
            None,
        ),  # other programs print text there
        ([layer("a", "x", "t")], ["x", "t"], [], {"listing": ListingSource.LAYER_JSON}, None),
    ],
)
def test_listing_hole(
    layers: list[BuiltLayer],
    bindings: list[str],
    inputs: list[str],
    changes: dict[str, Any],
    hole: Gap | None,
) -> None:
    """A tensor without producer is a hole, unless it is a weight or an input.

    Nothing is a hole in a log that counts its layers.
    """
    assert (
        find_missing_layer_gap(Build(layers=layers, bindings=bindings, **changes), inputs) == hole
    )
    counted = Build(
        source=BuildSource.LOG,
        layers=layers,
        bindings=bindings,
        milestones=milestones(("After reformat layers", 2)),
    )
    assert find_missing_layer_gap(counted, inputs) is None


def test_build_status_marks_q_and_dq_with_other_names() -> None:
    """The optimizer or the parse section names them. A listed origin is kept."""
    layers = [
        *(layer(name, kind="Reformat") for name in ("first", "second_clone_1", "third")),
        layer("first", kind="Reformat", origin="REFORMAT"),
    ]
    nodes = [
        ParsedNode("second", "QuantizeLinear"),
        ParsedNode("third", "Conv"),
        ParsedNode("", "QuantizeLinear"),
    ]
    build = with_status(
        layers=layers,
        trace=[LogEvent("QDQToCopy", "Running", "first"), LogEvent("P", "Running", "third")],
        parse=ParseSection(nodes, inputs=[TENSOR], outputs=["y"]),
    )
    assert [x.origin for x in build.layers] == ["QDQ", "QDQ", "", "REFORMAT"]


@pytest.mark.parametrize(
    ("named", "flags", "command", "expected"),
    [
        ("FP32+INT8", "", "", "fp32 int8"),
        ("FP32+FP16+INT8", "int8 fp16", "trtexec", "fp32 fp16 int8"),
        ("", "int8", "trtexec", "fp32 int8"),
        ("", "int8", "", "int8"),
        ("", "", "trtexec", ""),
        ("Strongly Typed", "stronglyTyped", "trtexec", "stronglyTyped"),
        ("Strongly Typed", "", "", "stronglyTyped"),
        ("", "verbose best", "trtexec", "fp32 best"),
        ("FP32+UNHEARD", "", "", "fp32"),
        ("", "bf16", "t", "fp32 bf16"),
    ],
)
def test_precision_flags(named: str, flags: str, command: str, expected: str) -> None:
    options = {"Build": {"Precision": named}} if named else {}
    assert with_status(
        options=options, flags=dict.fromkeys(flags.split(), ""), command=command
    ).precision_flags == set(expected.split())


def spelled(vector: int = 1, layout: str = "", **more: Any) -> BuiltLayer:
    return BuiltLayer("a", "C", [BuiltTensor("t", INT8, vector=vector, format=layout)], [], **more)


@pytest.mark.parametrize(
    ("layers", "listing", "hint"),
    [
        ([layer("QuantizeLinear_2_quantize_scale_node")], ListingSource.ENGINE_LINES, "8.0"),
        ([spelled(extras={"StrideOrder": "x"})], ListingSource.LAYER_JSON, "11"),
        ([spelled(layout="(NHWC) Channel major format")], ListingSource.LAYER_INFO, "11"),
        ([spelled(onnx_names=["n"])], ListingSource.LAYER_JSON, "8.6"),
        ([spelled(extras={"StreamId": 0})], ListingSource.LAYER_INFO, "8.6"),
        (
            [BuiltLayer("__myl_CastMul_myl0_1", "kgen", onnx_names=["n"])],
            ListingSource.LAYER_JSON,
            "10",
        ),
        ([spelled(vector=32)], ListingSource.ENGINE_LINES, "8.5"),
        ([spelled(vector=32)], ListingSource.LAYER_JSON, "8.4"),
        ([spelled(tactic="0x1")], ListingSource.ENGINE_LINES, "8.4"),
        ([spelled(tactic="12")], ListingSource.ENGINE_LINES, "8.2"),
        ([spelled(tactic="0x1"), spelled(tactic="-5")], ListingSource.ENGINE_LINES, "8.2"),
        ([spelled(tactic="0x1"), spelled()], ListingSource.ENGINE_LINES, "8.4"),
        ([], ListingSource.ENGINE_LINES, None),
        ([], ListingSource.NONE, None),
        ([], ListingSource.LAYER_JSON, None),
    ],
)
def test_version_hint(layers: list[BuiltLayer], listing: ListingSource, hint: str | None) -> None:
    assert with_status(layers=layers, listing=listing).version_hint == hint
    assert with_status(layers=layers, listing=listing, tensorrt="9.1.0").version_hint == "9.1.0"


# Building again


@pytest.mark.parametrize(
    ("version", "command", "start", "int8", "listed", "separate"),
    [
        (
            "8.5.2",
            "trtexec --onnx=a.onnx --int8 --verbose --saveEngine=e",
            "trtexec --onnx=a.onnx --int8 ",
            True,
            True,
            True,
        ),
        ("8.5.2", "", "trtexec --onnx=model.onnx --int8 --fp16 ", True, True, True),
        (
            "10.3.0",
            "trtexec --onnx=a.onnx --exportProfile=p",
            "trtexec --onnx=a.onnx --verbose ",
            False,
            True,
            True,
        ),
        ("11.1.0", "", "trtexec --onnx=model.onnx --verbose ", False, True, False),
        ("8.0.3", "", "trtexec --onnx=model.onnx --int8 --fp16 --verbose ", True, False, False),
    ],
)
def test_rerun_commands_of_a_known_version(
    version: str, command: str, start: str, int8: bool, listed: bool, separate: bool
) -> None:
    """The user's options are kept unless they are added anyway or would write another engine."""
    ((name, rerun),) = rerun_commands(Build(tensorrt=version, command=command)).items()
    assert name == version and rerun.startswith(start) and rerun.endswith("> build.log 2>&1")
    options = (
        "--int8",
        "--exportLayerInfo=layers.json",
        "--separateProfileRun",
        "--nvtxMode=verbose",
    )
    assert [option in rerun for option in options] == [int8, listed, separate, not listed]
    assert "saveEngine" not in rerun
    assert rerun.count("--verbose") == 1 and rerun.count("--exportProfile") <= 1


# Several files


def merged(first: Build, second: Build) -> Build:
    merge_build(first, second)
    return first


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [
        (BuildSource.PROFILE_JSON, BuildSource.TRTEXEC_LOG, BuildSource.TRTEXEC_LOG),
        (BuildSource.LAYER_JSON, BuildSource.LOG, BuildSource.LOG),
        (BuildSource.LAYER_INFO, BuildSource.LOG, BuildSource.LOG),
        (BuildSource.LOG, BuildSource.LAYER_JSON, BuildSource.LOG),
        (BuildSource.PROFILE_JSON, BuildSource.LAYER_JSON, BuildSource.LAYER_JSON),
        (BuildSource.LAYER_JSON, BuildSource.PROFILE_JSON, BuildSource.LAYER_JSON),
        (BuildSource.LAYER_INFO, BuildSource.LAYER_JSON, BuildSource.LAYER_INFO),
        (BuildSource.LOG, BuildSource.TRTEXEC_LOG, BuildSource.LOG),
    ],
)
def test_merge_source(first: BuildSource, second: BuildSource, source: BuildSource) -> None:
    assert merged(Build(source=first), Build(source=second)).source == source


def test_merge_takes_missing_fields_of_the_second_build() -> None:
    """Notes, files and line counts of both are kept."""
    first = Build(files=["a"], device="A", parse=parsed(), notes=["n"], is_rtx=False)
    second = Build(
        files=["b"],
        device="B",
        tensorrt="8.5.2",
        command="c",
        profile_rows=[ProfileRow("p", 1, 1, None, 1)],
        profile_total_ms=1.0,
        iterations=7,
        performance={"Latency": {"mean": 1.0}},
        is_rtx=True,
        memory=MemoryUse(activation=5),
        notes=["m"],
        gaps=[BEYOND, Gap(Section.END)],
    )
    first.lines.total, second.lines.total, second.lines.timing = 5, 7, 2
    build = merged(first, second)
    assert (build.files, build.device, build.tensorrt, build.command) == (
        ["a", "b"],
        "A",
        "8.5.2",
        "c",
    )
    assert (build.iterations, build.profile_total_ms, len(build.profile_rows)) == (7, 1.0, 1)
    assert (build.memory.activation, build.performance, build.is_rtx) == (
        5,
        {"Latency": {"mean": 1.0}},
        True,
    )
    assert (build.lines.total, build.lines.timing, build.notes) == (12, 2, ["n", "m"])
    assert build.parse == parsed() and BEYOND in build.gaps


def test_merge_keeps_fields_of_the_first_build() -> None:
    build = merged(
        Build(
            profile_rows=[ProfileRow("q", 2, 2, None, 1)],
            iterations=9,
            memory=MemoryUse(activation=1),
        ),
        Build(
            profile_rows=[ProfileRow("p", 1, 1, None, 1)],
            iterations=7,
            memory=MemoryUse(activation=2),
        ),
    )
    assert (build.iterations, build.profile_rows[0].name, build.memory.activation) == (9, "q", 1)


@pytest.mark.parametrize(
    ("first", "second", "richer"),
    [
        ([BuiltLayer("a")], [layer("a", "x", "y")], 1),
        ([layer("a", "x", "y")], [BuiltLayer("a")], 0),
        (
            [layer("a", "x", "y")],
            [layer("a", "x", "y", extras={"ParameterType": "Convolution"})],
            1,
        ),
        ([layer("a", "x", "y")], [layer("a", "x", "y", onnx_names=["n"])], 1),
        ([layer("a", "x", "y")], [layer("a", "x", "y"), layer("b", "y", "z")], 1),
        ([layer("a", "x", "y")], [layer("a", "x", "z")], 0),  # equal: the first
    ],
)
def test_merge_keeps_the_richer_listing(
    first: list[BuiltLayer], second: list[BuiltLayer], richer: int
) -> None:
    both = (first, second)
    for x in both[1 - richer]:
        x.line = 40
    build = merged(
        Build(layers=first, listing=ListingSource.ENGINE_LINES),
        Build(layers=second, listing=ListingSource.LAYER_JSON),
    )
    assert build.layers is both[richer] and build.second_layers == both[1 - richer]
    assert build.listing == (ListingSource.ENGINE_LINES, ListingSource.LAYER_JSON)[richer]
    assert build.layers[0].line == 40


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("a b c", "a b c", True),
        ("a b c d", "a b x y", True),
        ("a b c d", "a x y z", False),
        ("a b c", "a x y", False),
        ("a b", "x y", True),  # too few to decide
        ("a b c", "a b", True),
        ("a b c d e f", "a b x", True),
        ("a b c d e f", "a x y", False),
        ("", "a b c", True),
    ],
)
def test_merge_rejects_builds_with_few_common_names(first: str, second: str, same: bool) -> None:
    def build(names: str, file: str) -> Build:
        return Build(layers=[layer(n) for n in names.split()], files=[file])

    for other in (
        build(second, "g"),
        Build(profile_rows=[ProfileRow(n, 1, 1, None, 1) for n in second.split()], files=["p"]),
    ):
        with (
            contextlib.nullcontext()
            if same
            else pytest.raises(BuildLogError, check=has("different-builds"))
        ):
            merge_build(build(first, "f"), other)


# Skipped tactics ------------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False, None])
def test_errors_of_skipped_tactics_are_notes_if_the_build_passed(passed: bool | None) -> None:
    # RT-DETR on 10.16.2 prints eight such errors and passes.
    skipped = "Error Code: 9: Skipping tactic 0x0 due to exception"
    build = Build(messages=[LogMessage("E", skipped, 1, 8), LogMessage("E", "bad", 2, 1)])
    build.passed = passed
    set_build_status(build)
    assert [m.text for m in build.skipped_tactics] == [skipped] * bool(passed)
    assert [m.text for m in build.errors] == (["bad"] if passed else [skipped, "bad"])
