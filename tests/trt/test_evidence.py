"""The simulator against published builds: every convolution, every conversion, the pass lines and the layer names."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qdqtool.trt import pipeline
from qdqtool.trt.targets import BUILDS
from qdqtool.types import ConvOutcome, Event, Evidence, Precision
from qdqtool.verification.lines import in_order
from tests.trt.evidence import CASES, WITH_TRACE, built_trace, prediction, truth

# Names of these depend on how the parser numbers the layers of a post-processing tail; no Q/DQ pass is among them.
WITH_TAIL = "yolo-resnet18-orin-trt8502"
NAME_ONLY = ("ConstShuffleFusion", "ShuffleShuffleFusion", "ShuffleErasure")


def said(conv: ConvOutcome) -> tuple[Any, ...]:
    taken = sorted(n for n in conv.fused if "Add" in n or "MaxPool" in n)
    return tuple(map(width, conv.inputs)), width(conv.output), taken


def width(precision: Precision | str) -> str:
    return "FLOAT" if Precision(precision).is_float else str(precision)


def test_builds_and_cases_are_described() -> None:
    assert len(CASES) == 9
    assert sum(len(truth(c)["convolutions"]) for c in CASES) == 354
    named = {n for case in pipeline.cases().values() for n in case.build_names()}
    assert named <= BUILDS.keys()
    assert set(CASES) == {b.name for b in BUILDS.values() if b.graph}
    for kind in pipeline.passes():
        names = [c.name for c in kind.cases]
        assert len(names) == len(set(names)), kind


@pytest.mark.parametrize("case", CASES)
def test_convolutions_and_conversions(case: str) -> None:
    predicted = {c.name: c for c in prediction(case).convolutions}
    built = {c["name"]: c for c in truth(case)["convolutions"]}
    assert predicted.keys() == built.keys()
    for name, row in built.items():
        taken = sorted(n for n in row["fused"] if "Add" in n or "MaxPool" in n)
        assert said(predicted[name]) == (
            tuple(map(width, row["inputs"])),
            width(row["output"]),
            taken,
        ), name
        assert set(row["fused"]) <= set(predicted[name].fused), name
    assert sorted(prediction(case).conversion_nodes) == sorted(
        n.removesuffix("_quantize_scale_node") for n in truth(case)["conversions"]
    )
    predicted = {c.name: c.layer for c in prediction(case).convolutions}
    for row in truth(case)["convolutions"]:
        if row["name"].startswith("Gemm") and case not in WITH_TRACE:
            continue  # named with numbers of unnamed layers, which these builds (8.4 or 8.5) count differently
        assert predicted[row["name"]] == row["layer"]


@pytest.mark.parametrize("case", WITH_TRACE)
def test_layers_and_traces(case: str) -> None:
    predicted, built = {layer.name for layer in prediction(case).layers}, set(truth(case)["layers"])
    # NonMaxSuppression keeps a number that the parser gave it; it is the one name that may differ.
    assert len(predicted & built) >= 0.95 * len(built)
    assert {n for n in built ^ predicted if "NonMaxSuppression" not in n} == set()
    built, predicted = map(Counter, compared(case, NAME_ONLY if case == WITH_TAIL else ()))
    assert built - predicted == Counter()
    assert predicted - built == Counter()
    built, predicted = map(Counter, compared(case))
    common = (built & predicted).total()
    assert common >= 0.97 * built.total()
    assert common >= 0.97 * predicted.total()
    built, predicted = compared(case, ("ConstQDQInitializersFusion",))
    common = in_order(built, predicted)
    assert common is not None and common >= ORDER[case] * len(built)


# How many Q and DQ there are is in the list of passes of bevfusion-camera-orin-trt8502, their lines are not.
COUNTED_ONLY = {"bevfusion-camera-orin-trt8502": ("ConstQDQInitializersFusion",)}
ORDER = {  # the share of a log's lines that come out in its order, by longest common subsequence
    "bevfusion-camera-orin-trt8502": 0.95,
    "bevfusion-camera-rtx3080ti-trt8600": 0.95,
    "resnet18-qat-rtx2000-trt8510": 0.94,
    "yolo-resnet18-orin-trt8502": 0.9,
}


def compared(case: str, but: tuple[str, ...] = ()) -> tuple[list[Event], list[Event]]:
    left_out = (*COUNTED_ONLY.get(case, ()), *but)
    return (
        [e for e in built_trace(case) if e.pass_name not in left_out],
        [e for e in prediction(case).trace if e.pass_name not in left_out],
    )


@pytest.mark.parametrize("case", [c for c in WITH_TRACE if c.startswith("bevfusion")])
def test_number_of_layers(case: str) -> None:
    assert prediction(case).counts == {"Original": 860, "After Myelin optimization": 504}


def test_folded_constants_of_the_transcribed_log() -> None:
    """292 Q and DQ, and 353 constants that go with them (README of the build)."""
    trace = prediction("bevfusion-camera-orin-trt8502").trace
    folded = Counter(e.kind for e in trace if e.pass_name == "ConstQDQInitializersFusion")
    assert folded == {"Running": 292, "Removing": 353}


@pytest.mark.parametrize("case", [c for c in CASES if "types" in truth(c)])
def test_types_of_every_layer(case: str) -> None:
    predicted = {layer.name: layer for layer in prediction(case).layers}
    for name, (inputs, output) in truth(case)["types"].items():
        if name not in predicted:
            # Names with the parser's numbers, and those of TensorRT 8.0 for what stays of a Q.
            assert any(
                part in name
                for part in ("NonMaxSuppression", "(Unnamed Layer* ", "_quantize_scale_node")
            )
            continue
        layer = predicted[name]
        assert [width(t.precision) for t in layer.inputs][: len(inputs)] == list(
            map(width, inputs)
        ), name
        assert width(layer.outputs[0].precision) == width(output), name


ROOT = Path(__file__).parents[2]
LOGS = Path(os.environ.get("QDQTOOL_SHARED", ROOT.parent / "shared")) / "evidence"
BY_LINE = [
    (name, build)
    for name, case in pipeline.cases().items()
    for build in case.builds
    if ":" in build
]
# What the lines of rules say that are logged without their pass's name.
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


@pytest.mark.parametrize("name", pipeline.cases())
def test_case_says_what_it_rests_on(name: str) -> None:
    case = pipeline.cases()[name]
    assert case.says.endswith(".")
    if case.evidence == Evidence.SEEN:
        assert case.builds
    else:
        assert case.source and not case.builds
    if case.evidence == Evidence.ASSUMED:
        assert not case.source.endswith(".")


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published logs are not available")
@pytest.mark.parametrize(("name", "build"), BY_LINE)
def test_the_line_says_so(name: str, build: str) -> None:
    folder, _, number = build.partition(":")
    source = next(p for p in (LOGS / folder / "log.txt", LOGS / folder / "lines.txt") if p.exists())
    line = source.read_text(errors="replace").splitlines()[int(number) - 1]
    owner = name.partition("/")[0]
    assert re.search(WORDS.get(owner, owner.replace("MyelinOptimization", "Myelin")), line), line
