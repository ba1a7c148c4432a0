"""The rules of verify that need no whole build: which target, which model, which flags, and when it ends with what."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.agreement import BuildFacts, BuildSource, ConvolutionCounts, Mismatch, MismatchKind
from qdqtool.buildlog.records import ParseSection
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, LogEvent
from qdqtool.errors import BuildLogError, QdqtoolError, VersionError
from qdqtool.model.graph import Model
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification.api import build_of, check_same_model, choose_target, exit_code, flag_notes
from qdqtool.verification.result import Verification
from tests.trt.builder import Graph

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def layer(name: str, kind: str = "CaskConvolution", inputs: str = "", outputs: str = "", **more: object) -> BuiltLayer:
    """A layer whose tensors are given by their types, such as ``INT8 FP32``."""
    def tensors(side: str, types: str) -> list[BuiltTensor]:
        return [BuiltTensor(f"{name}.{side}{i}", Precision(t)) for i, t in enumerate(types.split())]

    return BuiltLayer(name, kind, tensors("in", inputs), tensors("out", outputs), **more)  # type: ignore[arg-type]


def model(count: int) -> Model:
    g = Graph()
    x = g.input(1, 8, 4, 4)
    return Model(g.model(*(g.conv(x, f"c{i}", 8, 1) for i in range(count))))


@pytest.mark.parametrize(("build", "target", "chosen", "told"), [
    (Build(tensorrt="8.5.2"), None, "trt8.5", ""),
    (Build(tensorrt="8.5.2"), "trt10", "trt10", ""),  # the user's word comes first
    (Build(tensorrt="10.3.0"), None, "trt10", ""),
    (Build(tensorrt="8.4.1", version_hint="10.0"), None, "trt8.4", ""),
    (Build(version_hint="8.6"), None, "trt10", "its spelling is that of 8.6 and of 10"),
    (Build(version_hint="10.0"), None, "trt10", "its spelling is that of 10.0, taken as trt10"),
    (Build(), None, "trt10", "the build does not state its version; predicted for trt10"),
    (Build(is_rtx=True), None, "rtx1.7", ""),
    (Build(is_rtx=True, tensorrt="1.7.1"), None, "rtx1.7", ""),
])  # fmt: skip
def test_the_target_is_the_builds_version(build: Build, target: str | None, chosen: str, told: str) -> None:
    found, notes = choose_target(build, target)
    assert found is TARGETS[chosen]
    assert [told in n for n in notes] == ([True] if told else [])


def test_a_version_before_qdq_is_refused() -> None:
    with pytest.raises(VersionError, match=r"older than 8\.0"):
        choose_target(Build(tensorrt="7.2.1"), None)
    with pytest.raises(QdqtoolError, match="unknown target"):
        choose_target(Build(tensorrt="8.5.2"), "trt7")


def test_one_build_or_files_of_one() -> None:
    build = Build(tensorrt="8.5.2")
    assert build_of((build,)) is build
    with pytest.raises(BuildLogError, match="no build given"):
        build_of(())


def named(count: int) -> list[BuiltLayer]:
    return [layer(f"c{i}") for i in range(count)] + [layer("other", "PointWiseV2")]


@pytest.mark.parametrize(("total", "found", "same"), [
    (5, 1, True), (6, 1, False), (10, 2, True), (11, 2, False), (4, 0, False), (1, 1, True),
])  # fmt: skip
def test_a_fifth_of_the_names_makes_it_the_same_model(total: int, found: int, same: bool) -> None:
    build = Build(layers=named(found), files=["b.log"])
    if same:
        check_same_model(model(total), build)
        return
    with pytest.raises(BuildLogError, match=f"b.log: names {found} of the model's {total} convolutions; it is a build"):
        check_same_model(model(total), build)


@pytest.mark.parametrize(("build", "allowed"), [
    (Build(layers=[layer("a", "Myelin"), layer("b", "Myelin")]), True),
    (Build(layers=[layer("a", "Myelin"), layer("b")]), False),
    (Build(layers=[layer("b")]), False),
    (Build(layers=[layer("a", "Myelin")], trace=[LogEvent("QDQToCopy", "Running", "q")]), False),
    (Build(trace=[LogEvent("QDQToCopy", "Running", "q")]), False),
])  # fmt: skip
def test_an_engine_that_is_all_myelin_names_nothing(build: Build, allowed: bool) -> None:
    """Its blocks have no names of nodes; a layer or a pass line besides would have."""
    if allowed:
        check_same_model(model(3), build)
        return
    with pytest.raises(BuildLogError, match="build: names 0 of the model's 3 convolutions; it is a build of another"):
        check_same_model(model(3), build)


def test_a_build_that_says_nothing() -> None:
    with pytest.raises(BuildLogError, match="holds no engine layers and no optimizer lines"):
        check_same_model(model(1), Build(parse=ParseSection()))


@pytest.mark.parametrize(("flags", "layers", "told"), [
    ("int8", [layer("a", inputs="FP32", outputs="FP32")], True),
    ("int8", [layer("a", inputs="INT8", outputs="FP32")], True),
    ("int8", [layer("a", inputs="INT8", outputs="INT8")], False),  # no float remainder
    ("int8", [layer("a", inputs="FP16", outputs="FP32")], False),
    ("", [layer("a", inputs="FP32", outputs="FP32")], False),  # not told what it may use
    ("int8 fp16", [layer("a", inputs="FP32", outputs="FP32")], False),
    ("best", [layer("a", inputs="FP32", outputs="FP32")], False),
    ("stronglyTyped", [layer("a", inputs="FP32", outputs="FP32")], False),
    ("int8 bf16", [layer("a", inputs="FP32", outputs="FP32")], False),
    ("int8", [layer("a", "PointWiseV2", inputs="FP32", outputs="FP32")], False),  # no convolution
    ("int8", [layer("a", inputs="INT8 FP32", outputs="INT8")], True),  # a residual
    ("int8", [layer("a", inputs="INT8 INT8 FP32", outputs="INT8 FP32")], False),  # weights, a second result
])  # fmt: skip
def test_fp32_is_a_matter_of_flags(flags: str, layers: list[BuiltLayer], told: bool) -> None:
    found = flag_notes(Build(precision_flags=frozenset(flags.split()), layers=layers))
    assert bool(found) is told and all("--fp16 was not given" in note for note in found)


@pytest.mark.parametrize(("complete", "unknown", "mismatch", "partial", "code"), [
    (True, 0, False, False, 0), (True, 0, True, False, 1), (False, 0, False, False, 2), (True, 1, False, False, 2),
    (False, 3, False, True, 0), (False, 3, True, True, 1), (True, 2, False, True, 0),
])  # fmt: skip
def test_exit_codes(complete: bool, unknown: int, mismatch: bool, partial: bool, code: int) -> None:
    """1 says no whatever is missing; 2 says that the build leaves something open, unless that is allowed."""
    wrong = [Mismatch(MismatchKind.CONVOLUTION, "c", {}, {}, "")] if mismatch else []
    found = Verification(BuildFacts(BuildSource.LOG, complete=complete),
                         ConvolutionCounts(5, 5 - unknown, unknown), mismatches=wrong)  # fmt: skip
    assert exit_code(found, partial) == code


