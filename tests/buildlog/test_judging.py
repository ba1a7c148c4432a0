"""What a build lacks, which version wrote it, how to build it again, and how several files become one build."""

from typing import Any

import pytest

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.read import merge
from qdqtool.buildlog.summary import judge, listing_hole, rerun_commands
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    Lack,
    Listing,
    LogEvent,
    Memory,
    Milestone,
    ParsedNode,
    ParsedTensor,
    ParseSection,
    ProfileRow,
    Section,
)
from qdqtool.errors import BuildLogError
from qdqtool.types import Precision
from tests.raising import raises

INT8, FP32 = Precision.INT8, Precision.FP32
TENSOR = ParsedTensor("x", (1,), "FLOAT")


def layer(
    name: str, inputs: str = "", outputs: str = "", kind: str = "CaskConvolution", **more: Any
) -> BuiltLayer:
    """``inputs`` and ``outputs`` are names of tensors."""
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
    return [Milestone(what, count, i) for i, (what, count) in enumerate(named)]


WHOLE = {
    "parse": parsed(),
    "milestones": milestones(("Original", 5), ("After reformat layers", 2)),
    "layers": [layer("a", "x", "t"), layer("b", "t", "y")],
    "listing": Listing.ENGINE_LINES,
}
PARSE, PASSES, LISTING = Section.PARSE, Section.PASSES, Section.LISTING
ENGINE = Gap(LISTING)
CUT = Gap(PASSES, Lack.CUT)
CUT_PROFILE = Gap(Section.PROFILE, Lack.CUT_FILE, name="p.json")
CUT_LISTING = Gap(LISTING, Lack.CUT_FILE, name="l.json")
BEYOND = Gap(Section.ALL, Lack.BEYOND_LINE, 3)


def judged(source: BuildSource = BuildSource.LOG, **changes: Any) -> Build:
    build = Build(source=source, **{**WHOLE, **changes})
    judge(build)
    return build


@pytest.mark.parametrize(
    ("changes", "gaps", "complete"),
    [
        ({}, [], True),
        ({"parse": ParseSection()}, [Gap(PARSE)], True),  # Python's logs may not have it
        ({"parse": parsed(inputs=False)}, [Gap(PARSE, Lack.BEGINNING)], True),
        ({"parse": parsed(outputs=False)}, [Gap(PARSE, Lack.LAST)], True),
        (
            {"parse": parsed(outputs=False), "milestones": [], "layers": [], "trace": []},
            [Gap(PARSE, Lack.CUT_AFTER_NODE, 1), Gap(PASSES), ENGINE],
            False,
        ),
        ({"milestones": [], "trace": []}, [Gap(PASSES)], True),
        ({"layers": []}, [CUT, ENGINE], False),
        ({"layers": [], "seconds": {"Graph construction and optimization": 1.0}}, [ENGINE], False),
        (
            {"layers": [], "seconds": {"Graph optimization time": 1.0}},
            [ENGINE],
            False,
        ),  # TensorRT 10's words
        ({"layers": [], "seconds": {"Engine generation": 1.0}}, [CUT, ENGINE], False),
        (
            {"layers": [], "placement": [("GPU", "CONVOLUTION", "a")]},
            [ENGINE],
            False,
        ),  # it went on behind the passes
        (
            {"milestones": milestones(("After reformat layers", 2))},
            [Gap(PASSES, Lack.BEGINNING)],
            False,
        ),
        ({"layers": WHOLE["layers"][:1]}, [Gap(LISTING, Lack.FEWER_LAYERS, 1, 2)], False),  # type: ignore[index]
        (
            {"milestones": milestones(("Original", 5), ("After tensor merging", 3))},
            [Gap(LISTING, Lack.FEWER_LAYERS, 2, 3)],
            False,
        ),  # the last count where none is behind the reformats
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
        ({"layers": [BuiltLayer("a"), BuiltLayer("b")]}, [Gap(LISTING, Lack.NAMES_ONLY)], False),
        (
            {"gaps": [Gap(Section.ALL, Lack.BEYOND_LINE, 9)]},
            [Gap(Section.ALL, Lack.BEYOND_LINE, 9)],
            False,
        ),
        ({"gaps": [CUT_PROFILE]}, [CUT_PROFILE], True),
        (
            {"gaps": [CUT_LISTING], "layers": WHOLE["layers"][:1]},  # type: ignore[index]
            [CUT_LISTING],
            False,
        ),  # told once
        ({"gaps": [CUT]}, [], True),
    ],
)
def test_what_a_log_lacks(changes: dict[str, Any], gaps: list[Gap], complete: bool) -> None:
    build = judged(**changes)
    assert (build.gaps, build.complete) == (gaps, complete)


@pytest.mark.parametrize(
    ("source", "command", "passed", "told"),
    [
        (BuildSource.TRTEXEC_LOG, "trtexec", None, True),
        (BuildSource.TRTEXEC_LOG, "trtexec", False, False),
        (BuildSource.TRTEXEC_LOG, "", None, False),
        (BuildSource.LOG, "trtexec", None, False),
    ],
)
def test_the_end_of_a_log(
    source: BuildSource, command: str, passed: bool | None, told: bool
) -> None:
    """Only trtexec prints one; a build is complete without it."""
    build = judged(source, command=command, passed=passed)
    assert build.lacks(Section.END) is told and build.complete


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (Gap(PARSE), "parse section"),
        (Gap(PASSES, Lack.BEGINNING), "optimizer passes (the beginning)"),
        (Gap(PARSE, Lack.CUT_AFTER_NODE, 5), "parse section (cut off after node 5)"),
        (Gap(LISTING, Lack.FEWER_LAYERS, 2, 3), "engine listing (cut off: 2 of 3 layers)"),
        (CUT_PROFILE, "profile (cut off: the end of p.json)"),
        (BEYOND, "everything beyond line 3"),
        (
            Gap(Section.ALL, Lack.BEYOND_RECORDS, 300_000),
            "everything beyond the first 300,000 records",
        ),
        (
            Gap(LISTING, Lack.UNWRITTEN, name="{c}", tensor="u"),
            "engine listing (a layer is missing: {c} reads u, which none writes)",
        ),
    ],
)
def test_the_words_of_a_gap(gap: Gap, words: str) -> None:
    assert str(gap) == words and Build(gaps=[gap]).missing == [words]


def test_commands_and_listings_alone() -> None:
    build = judged(
        BuildSource.LAYER_JSON, parse=ParseSection(), milestones=[], listing=Listing.LAYER_JSON
    )
    assert (build.gaps, build.complete) == ([], True)
    told = rerun_commands(Build(command="trtexec --onnx=a.onnx --int8"))
    assert list(told) == ["8.2 to 10", "11"]
    assert told["8.2 to 10"].startswith("trtexec --onnx=a.onnx --int8 --fp16 --verbose")
    assert told["11"].startswith("trtexec --onnx=a.onnx --verbose") and "--int8" not in told["11"]
    assert ("--separateProfileRun" in told["8.2 to 10"], "--separateProfileRun" in told["11"]) == (
        True,
        False,
    )
    with raises(BuildLogError, "_check_same 8.5.2 8.6.1"):
        merge(Build(tensorrt="8.5.2", files=["a"]), Build(tensorrt="8.6.1", files=["b"]))
    assert merged(Build(tensorrt="8.5.2"), Build()).tensorrt == "8.5.2"


HOLE = [layer("a", "x", "t"), layer("c", "u", "y")]


@pytest.mark.parametrize(
    ("layers", "bindings", "inputs", "changes", "hole"),
    [
        (HOLE, ["x", "y"], [], {}, Gap(LISTING, Lack.UNWRITTEN, name="c", tensor="u")),
        (HOLE, [], ["x"], {}, Gap(LISTING, Lack.UNWRITTEN, name="c", tensor="u")),
        (HOLE, [], [], {}, None),  # nothing tells what enters
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
            {"listing": Listing.LAYER_JSON},
            Gap(LISTING, Lack.IDLE_BINDING, tensor="z"),
        ),
        (
            [layer("a", "x", "t")],
            ["x", "z"],
            [],
            {"listing": Listing.LAYER_INFO},
            None,
        ),  # other programs print there
        ([layer("a", "x", "t")], ["x", "t"], [], {"listing": Listing.LAYER_JSON}, None),
    ],
)
def test_a_hole_in_a_listing(
    layers: list[BuiltLayer],
    bindings: list[str],
    inputs: list[str],
    changes: dict[str, Any],
    hole: Gap | None,
) -> None:
    """Every tensor that is read is written, is a weight, or enters; where a log counts its layers that decides."""
    found = listing_hole(Build(layers=layers, bindings=bindings, **changes), inputs)
    assert found == hole
    counted = Build(
        source=BuildSource.LOG,
        layers=layers,
        bindings=bindings,
        milestones=milestones(("After reformat layers", 2)),
    )
    assert listing_hole(counted, inputs) is None


def test_q_and_dq_of_the_users_own_names_are_marked() -> None:
    """By the pass that turned them into conversions, or by the parse section; what is told already stays."""
    layers = [
        *(layer(name, kind="Reformat") for name in ("first", "second_clone_1", "third")),
        layer("first", kind="Reformat", origin="REFORMAT"),
    ]
    nodes = [
        ParsedNode("second", "QuantizeLinear"),
        ParsedNode("third", "Conv"),
        ParsedNode("", "QuantizeLinear"),
    ]
    build = judged(
        layers=layers,
        trace=[LogEvent("QDQToCopy", "Running", "first"), LogEvent("P", "Running", "third")],
        parse=ParseSection(nodes, inputs=[TENSOR], outputs=["y"]),
    )
    assert [x.origin for x in build.layers] == ["QDQ", "QDQ", "", "REFORMAT"]


@pytest.mark.parametrize(
    ("named", "flags", "command", "found"),
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
def test_which_precisions_the_builder_may_use(
    named: str, flags: str, command: str, found: str
) -> None:
    """From the block of options and from the flags; FP32 is always there unless types are the network's."""
    options = {"Build": {"Precision": named}} if named else {}
    build = judged(options=options, flags=dict.fromkeys(flags.split(), ""), command=command)
    assert build.precision_flags == set(found.split())


def spelled(vector: int = 1, layout: str = "", **more: Any) -> BuiltLayer:
    return BuiltLayer("a", "C", [BuiltTensor("t", INT8, vector=vector, format=layout)], [], **more)


@pytest.mark.parametrize(
    ("layers", "listing", "hint"),
    [
        ([layer("QuantizeLinear_2_quantize_scale_node")], Listing.ENGINE_LINES, "8.0"),
        ([spelled(extras={"StrideOrder": "x"})], Listing.LAYER_JSON, "11"),
        ([spelled(layout="(NHWC) Channel major format")], Listing.LAYER_INFO, "11"),
        ([spelled(onnx_names=["n"])], Listing.LAYER_JSON, "8.6"),
        ([spelled(extras={"StreamId": 0})], Listing.LAYER_INFO, "8.6"),
        ([BuiltLayer("__myl_CastMul_myl0_1", "kgen", onnx_names=["n"])], Listing.LAYER_JSON, "10"),
        ([spelled(vector=32)], Listing.ENGINE_LINES, "8.5"),
        ([spelled(vector=32)], Listing.LAYER_JSON, "8.4"),
        ([spelled(tactic="0x1")], Listing.ENGINE_LINES, "8.4"),
        ([spelled(tactic="12")], Listing.ENGINE_LINES, "8.2"),
        ([spelled(tactic="0x1"), spelled(tactic="-5")], Listing.ENGINE_LINES, "8.2"),
        ([spelled(tactic="0x1"), spelled()], Listing.ENGINE_LINES, "8.4"),
        ([], Listing.ENGINE_LINES, None),
        ([], Listing.NONE, None),
        ([], Listing.LAYER_JSON, None),
    ],
)
def test_the_earliest_version_that_spells_so(
    layers: list[BuiltLayer], listing: Listing, hint: str | None
) -> None:
    assert judged(layers=layers, listing=listing).version_hint == hint
    assert judged(layers=layers, listing=listing, tensorrt="9.1.0").version_hint == "9.1.0"


# Building again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "command", "begins", "typed", "listed", "apart"),
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
def test_the_command_for_a_version(
    version: str, command: str, begins: str, typed: bool, listed: bool, apart: bool
) -> None:
    """The user's own words, less what is asked for anew or would write another engine."""
    ((name, told),) = rerun_commands(Build(tensorrt=version, command=command)).items()
    assert name == version and told.startswith(begins) and told.endswith("> build.log 2>&1")
    assert (
        "--int8" in told,
        "--exportLayerInfo=layers.json" in told,
        "--separateProfileRun" in told,
    ) == (typed, listed, apart)
    assert ("--nvtxMode=verbose" in told) is not listed
    assert (
        "saveEngine" not in told
        and told.count("--verbose") == 1
        and told.count("--exportProfile") <= 1
    )


# Several files --------------------------------------------------------------------------------------------------


def merged(first: Build, second: Build) -> Build:
    merge(first, second)
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
def test_the_richest_source_gives_its_name(
    first: BuildSource, second: BuildSource, source: BuildSource
) -> None:
    assert merged(Build(source=first), Build(source=second)).source == source


def test_what_either_file_knows() -> None:
    """The first file's word counts where both say something; lines, messages and notes of both stand."""
    one = Build(files=["a"], device="A", parse=parsed(), iterations=3, notes=["n"], is_rtx=False)
    two = Build(
        files=["b"],
        device="B",
        tensorrt="8.5.2",
        command="c",
        profile_rows=[ProfileRow("p", 1, 1, None, 1)],
        profile_total_ms=1.0,
        iterations=7,
        performance={"Latency": {"mean": 1.0}},
        is_rtx=True,
        memory=Memory(activation=5),
        notes=["m"],
        gaps=[BEYOND, Gap(Section.END)],
    )
    one.lines.total, two.lines.total, two.lines.timing = 5, 7, 2
    build = merged(one, two)
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
    again = merged(
        Build(
            profile_rows=[ProfileRow("q", 2, 2, None, 1)], iterations=9, memory=Memory(activation=1)
        ),
        Build(profile_rows=two.profile_rows, iterations=7, memory=Memory(activation=2)),
    )
    assert (again.iterations, again.profile_rows[0].name, again.memory.activation) == (9, "q", 1)
    build = merged(Build(layers=[layer("a", line=3)]), Build(layers=[layer("a", "x", "y", line=9)]))
    assert build.layers[0].line == 9


@pytest.mark.parametrize(
    ("first", "second", "kept"),
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
        ([layer("a", "x", "y")], [layer("a", "x", "z")], 0),  # as rich: the first
    ],
)
def test_the_richer_listing_counts_with_the_lines_of_both(
    first: list[BuiltLayer], second: list[BuiltLayer], kept: int
) -> None:
    both = (first, second)
    for x in both[1 - kept]:
        x.line = 40
    build = merged(
        Build(layers=first, listing=Listing.ENGINE_LINES),
        Build(layers=second, listing=Listing.LAYER_JSON),
    )
    assert build.layers is both[kept] and build.second_layers == both[1 - kept]
    assert build.listing == (Listing.ENGINE_LINES, Listing.LAYER_JSON)[kept]
    assert build.layers[0].line == 40


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("a b c", "a b c", True),
        ("a b c d", "a b x y", True),
        ("a b c d", "a x y z", False),
        ("a b c", "a x y", False),
        ("a b", "x y", True),  # too few to tell
        ("a b c", "a b", True),
        ("a b c d e f", "a b x", True),
        ("a b c d e f", "a x y", False),
        ("", "a b c", True),
    ],
)
def test_builds_with_few_names_in_common_are_two(first: str, second: str, same: bool) -> None:
    def build(names: str, file: str) -> Build:
        return Build(layers=[layer(n) for n in names.split()], files=[file])

    def profile(names: str) -> Build:
        return Build(
            profile_rows=[ProfileRow(n, 1, 1, None, 1) for n in names.split()], files=["p"]
        )

    for one, two in ((build(first, "f"), build(second, "g")), (build(first, "f"), profile(second))):
        if same:
            merge(one, two)
            continue
        with raises(BuildLogError, "_check_same different"):
            merge(one, two)
