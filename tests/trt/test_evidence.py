import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from qdqtool.ir.precision import Precision
from qdqtool.trt import pipeline
from qdqtool.trt.targets import BUILDS
from qdqtool.trt.trace import Event
from qdqtool.verification.log_comparison import longest_common_subsequence
from tests.trt.evidence import CASES, WITH_TRACE, built_trace, prediction, truth

# Build whose layer names depend on the parser's numbers in post-processing. No Q/DQ pass names them.
WITH_TAIL = "yolo-resnet18-orin-trt8502"
NAME_ONLY = ("ConstShuffleFusion", "ShuffleShuffleFusion", "ShuffleErasure")


Outcome = tuple[tuple[str, ...], str, list[str]]


def outcome(inputs: Iterable[str], output: str, fused: Iterable[str]) -> Outcome:
    nodes = sorted(n for n in fused if "Add" in n or "MaxPool" in n)
    return tuple(map(width, inputs)), width(output), nodes


def width(precision: Precision | str) -> str:
    """Return the precision. A float has the width that the builder chose."""
    return "FLOAT" if Precision(precision).is_float else str(precision)


def test_evidence_has_354_convolutions_of_9_builds() -> None:
    assert (len(CASES), sum(len(truth(c)["convolutions"]) for c in CASES)) == (9, 354)
    assert set(CASES) == {b.name for b in BUILDS.values() if b.graph}


def test_builds_of_cases_are_described() -> None:
    assert {
        name for case in pipeline.cases().values() for name in case.build_names()
    } <= BUILDS.keys()


def test_case_names_are_unique_in_their_pass() -> None:
    for pass_type in pipeline.passes():
        names = [case.name for case in pass_type.cases]
        assert len(names) == len(set(names)), pass_type


@pytest.mark.parametrize("case", CASES)
def test_convolutions_match_build(case: str) -> None:
    predicted = {c.name: c for c in prediction(case).convolutions}
    built = {c["name"]: c for c in truth(case)["convolutions"]}
    assert predicted.keys() == built.keys()
    for name, row in built.items():
        conv = predicted[name]
        assert outcome(conv.inputs, conv.output, conv.fused) == outcome(
            row["inputs"], row["output"], row["fused"]
        ), name
        assert set(row["fused"]) <= set(conv.fused), name


@pytest.mark.parametrize("case", CASES)
def test_conversions_match_build(case: str) -> None:
    built = [n.removesuffix("_quantize_scale_node") for n in truth(case)["conversions"]]
    assert sorted(prediction(case).conversion_nodes) == sorted(built)


@pytest.mark.parametrize("case", CASES)
def test_layer_names_of_convolutions_match_build(case: str) -> None:
    predicted = {c.name: c.layer for c in prediction(case).convolutions}
    for row in truth(case)["convolutions"]:
        # The name of a Gemm has numbers of unnamed layers, which 8.4 and 8.5 count differently.
        if not row["name"].startswith("Gemm") or case in WITH_TRACE:
            assert predicted[row["name"]] == row["layer"]


@pytest.mark.parametrize("case", WITH_TRACE)
def test_layer_names_match_build(case: str) -> None:
    predicted, built = {layer.name for layer in prediction(case).layers}, set(truth(case)["layers"])
    # The name of a NonMaxSuppression has a number of the parser.
    assert len(predicted & built) >= 0.95 * len(built)
    assert {n for n in built ^ predicted if "NonMaxSuppression" not in n} == set()


@pytest.mark.parametrize("case", WITH_TRACE)
def test_trace_has_lines_of_log(case: str) -> None:
    built, predicted = map(Counter, traces(case, NAME_ONLY if case == WITH_TAIL else ()))
    assert (built - predicted, predicted - built) == (Counter(), Counter())


@pytest.mark.parametrize("case", WITH_TRACE)
def test_trace_has_97_percent_of_all_lines(case: str) -> None:
    built, predicted = map(Counter, traces(case))
    assert (built & predicted).total() >= 0.97 * max(built.total(), predicted.total())


@pytest.mark.parametrize("case", WITH_TRACE)
def test_trace_has_order_of_log(case: str) -> None:
    built, predicted = traces(case, ("ConstQDQInitializersFusion",))
    assert longest_common_subsequence(built, predicted) >= ORDER[case] * len(built)


# The log of bevfusion-camera-orin-trt8502 counts these lines but does not have them.
COUNTED_ONLY = {"bevfusion-camera-orin-trt8502": ("ConstQDQInitializersFusion",)}
ORDER = {  # least share of the lines that are in the order of the log (longest common subsequence)
    "bevfusion-camera-orin-trt8502": 0.95,
    "bevfusion-camera-rtx3080ti-trt8600": 0.95,
    "resnet18-qat-rtx2000-trt8510": 0.94,
    "yolo-resnet18-orin-trt8502": 0.9,
}


def traces(case: str, without: tuple[str, ...] = ()) -> tuple[list[Event], list[Event]]:
    excluded = (*COUNTED_ONLY.get(case, ()), *without)
    return (
        [e for e in built_trace(case) if e.pass_name not in excluded],
        [e for e in prediction(case).trace if e.pass_name not in excluded],
    )


@pytest.mark.parametrize("case", [c for c in WITH_TRACE if c.startswith("bevfusion")])
def test_number_of_layers_matches_log(case: str) -> None:
    assert prediction(case).counts == {"Original": 860, "After Myelin optimization": 504}


def test_folded_constants_match_transcribed_log() -> None:
    # 292 Q and DQ, and 353 constants that go with them (README of the build).
    trace = prediction("bevfusion-camera-orin-trt8502").trace
    assert Counter(e.kind for e in trace if e.pass_name == "ConstQDQInitializersFusion") == {
        "Running": 292,
        "Removing": 353,
    }


@pytest.mark.parametrize("case", [c for c in CASES if "types" in truth(c)])
def test_types_of_layers_match_build(case: str) -> None:
    predicted = {layer.name: layer for layer in prediction(case).layers}
    for name, (inputs, output) in truth(case)["types"].items():
        if name not in predicted:
            # Names with numbers of the parser, and those of TensorRT 8.0 for remaining conversions.
            assert re.search(r"NonMaxSuppression|\(Unnamed Layer\* |_quantize_scale_node", name)
            continue
        layer = predicted[name]
        assert [width(t.precision) for t in layer.inputs][: len(inputs)] == list(
            map(width, inputs)
        ), name
        assert width(layer.outputs[0].precision) == width(output), name


ROOT = Path(__file__).parents[2]
LOGS = Path(os.environ.get("QDQTOOL_SHARED", ROOT.parent / "shared")) / "evidence"
# Text of the lines that do not name their pass.
WORDS = {
    "MergeLayers": "Merging layers",
    "SliceRemoval": "slice",
    "ConcatRemoval": "concatenation|Retargeting|Generating",
    "Shuffle": "VanillaSwapWithPreceedingDQ",
    "Concat": "SplitQAcrossPrecedingFanIn",
    "Conv": "QuantizeDoubleInputNodes",
    "Gemm": "MatMulToConvTransform",
    "Relu": "Relu",
    "LeakyRelu": "LeakyRelu",
    "Reshape": "Reshape",
    "Flatten": "Flatten",
    "Slice": "Slice",
    "MaxPool": "MaxPool",
    "Resize": "Resize",
    "Upsample": "Resize",
}


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published logs are not available")
@pytest.mark.parametrize(
    ("name", "build"),
    [
        (name, build)
        for name, case in pipeline.cases().items()
        for build in case.builds
        if ":" in build
    ],
)
def test_line_of_case_is_in_log(name: str, build: str) -> None:
    folder, _, number = build.partition(":")
    source = next(p for p in (LOGS / folder / "log.txt", LOGS / folder / "lines.txt") if p.exists())
    line = source.read_text(errors="replace").splitlines()[int(number) - 1]
    owner = name.partition("/")[0]
    assert re.search(WORDS.get(owner, owner.replace("MyelinOptimization", "Myelin")), line), line
