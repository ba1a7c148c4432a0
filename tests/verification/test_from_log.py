"""Verify a log without its model.

Results that depend on scales, which logs do not contain, are unknown.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_graphsurgeon
import pytest

from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.agreement import ConvolutionCounts, Difference
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, ListingSource
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.qdq import quantizers, read_params
from qdqtool.prediction import predict
from qdqtool.trt.targets import RTX
from qdqtool.verification import api
from qdqtool.verification.log_comparison import count_agreement
from qdqtool.verification.result import Verification
from tests.buildlog.evidence import build_file
from tests.buildlog.samples import build_of
from tests.errors import has
from tests.notes import note
from tests.trt.builder import Graph
from tests.trt.evidence import graph as published
from tests.verification.synthetic import log_of
from tests.verification.transcribed import layers_of


@pytest.mark.parametrize(("equal", "output"), [(True, "INT8"), (False, "FLOAT")])
def test_output_of_the_stem_depends_on_scales(equal: bool, output: str) -> None:
    """Two Qs consume the MaxPool of this ResNet-18.

    INT8 reaches the stem only if their scales are equal.
    """
    model = published("resnet18-qat-rtx2000-trt8510").proto
    assert (
        predict(Model(api.copy_with_artificial_scales(model, equal)), advice=False)
        .convolution("Conv_9")
        .output
        == output
    )


@pytest.mark.parametrize(
    ("case", "total", "unknown", "unknown_name", "known_name"),
    [
        ("resnet18-qat-rtx2000-trt8510", 21, 8, "Conv_9", "Conv_22"),
        pytest.param(
            "yolo-resnet18-orin-trt8502",
            43,
            2,
            "/neck/detect1/conv5/conv/Conv",
            "/backbone/conv1/Conv",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_verify_from_log_of_recorded_logs(
    case: str, total: int, unknown: int, unknown_name: str, known_name: str
) -> None:
    result = api.verify_from_log(build_file(case))
    counts = result.convolutions
    assert (counts.total, counts.unknown, counts.agree) == (total, unknown, total - unknown)
    assert unknown_name in counts.unknown_names and known_name not in counts.unknown_names
    assert result.trace.agree == result.trace.built == result.trace.predicted
    assert (result.mismatches, api.exit_code(result)) == ([], 2)
    assert api.exit_code(result, allow_partial=True) == 0


def test_verify_from_log_finds_a_log_that_contradicts_itself() -> None:
    lines = build_file("yolo-resnet18-orin-trt8502").read_text().splitlines()
    index = next(
        i
        for i, x in enumerate(lines)
        if x.startswith("Layer(") and ": /backbone/maxpool/MaxPool," in x
    )
    before, arrow, after = lines[index].rpartition(" -> ")
    assert "(Float[" in after
    lines[index] = before + arrow + after.replace("(Float[", "(Int8[")
    result = api.verify_from_log(build_of(lines))
    assert api.exit_code(result) == 1
    assert any(
        m.differs == Difference.TWO_TYPES and index + 1 in m.values for m in result.mismatches
    )


@pytest.mark.parametrize("constant_nodes", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_copy_with_scales_keeps_sizes_and_other_constants(
    constant_nodes: bool, equal: bool
) -> None:
    g = Graph(constant_nodes=constant_nodes)
    x = g.pair(g.input(1, 8, 4, 4), "in", 0.3)
    before = Model(g.model(g.conv(x, "c", 8, 1, scale=None, bias=True)))
    bytes_before = before.proto.SerializeToString(deterministic=True)
    after = Model(api.copy_with_artificial_scales(before.proto, equal))
    assert before.proto.SerializeToString(deterministic=True) == bytes_before
    old, new = ([read_params(m, q).scale for q in quantizers(m)] for m in (before, after))
    assert [s is not None and s.size for s in new] == [s is not None and s.size for s in old]
    values = {float(s[0]) for s in new if s is not None}
    assert len(values) == (1 if equal else len({q.input(1) for q in quantizers(after)}))
    assert min(values) == 1 / 64
    assert np.array_equal(after.constant("c.bias"), before.constant("c.bias"))


# Builds on this machine. A mock replaces the builder.


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    builder = Mock()
    monkeypatch.setattr("qdqtool.builders.build", builder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return builder


def save_model(folder: Path, zero_point: int = 0) -> Path:
    """Save one quantized convolution. TensorRT-RTX rejects a zero point other than 0."""
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "p", zero=zero_point)
    onnx.save(g.model(g.conv(x, "c", 16, scale=None)), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_model(tmp_path)


def test_verify_with_builder_timeout(builder: Mock, path: Path) -> None:
    builder.return_value = BuildResult("tensorrt-rtx", "timeout", message="stopped after 5 s")
    with pytest.raises(BuilderError, match="5 s", check=has("timeout", path=str(path))):
        api.verify_with_builder(path, "tensorrt-rtx")


def test_verify_with_builder_predicted_rejection(builder: Mock, tmp_path: Path) -> None:
    builder.return_value = BuildResult("tensorrt-rtx", "refused", "1.7.1", message="asymmetric")
    model = onnx_graphsurgeon.import_onnx(onnx.load(save_model(tmp_path, zero_point=3)))
    result = api.verify_with_builder(model, "tensorrt-rtx")
    assert result.notes == [note("built-alike", status="refused", message="asymmetric")]
    counts = (result.convolutions.agree, result.convolutions.unknown)
    assert (result.mismatches, result.build.status, counts) == ([], "refused", (0, 0))


@pytest.mark.parametrize(
    ("status", "message", "text"),
    [("refused", "because", "refused: because"), ("crashed", "", "crashed")],
)
def test_verify_with_builder_other_status_than_predicted(
    builder: Mock, tmp_path: Path, status: str, message: str, text: str
) -> None:
    builder.return_value = BuildResult("tensorrt-rtx", status, "1.7.1", message=message)
    result = api.verify_with_builder(save_model(tmp_path), "tensorrt-rtx")
    assert [(str(m.kind), m.built["status"], m.differs, m.values) for m in result.mismatches] == [
        ("build", status, Difference.STATUS, ("built", text))
    ]
    assert api.exit_code(result) == 1


def test_verify_with_trtexec_compares_layers_and_passes(
    builder: Mock, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    builder.return_value = BuildResult(
        "trtexec", "built", "8.5.2", build=build_of(log_of(predict(path, "trt8.5")))
    )
    result = api.verify_with_builder(path, "trtexec")
    assert (result.prediction.target, result.mismatches) == ("trt8.5", [])
    assert result.convolutions.agree == result.convolutions.total == 1
    assert result.trace.built == result.trace.predicted > 0
    assert "license" not in capsys.readouterr().err


def test_verify_with_tensorrt_rtx_compares_nodes(
    builder: Mock, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    model = load(path)
    builder.return_value = BuildResult(
        "tensorrt-rtx",
        "built",
        "1.7.1",
        model=model,
        names={node.index: "" for node in model.nodes},
        build=Build(),
    )
    result = api.verify_with_builder(path, "tensorrt-rtx")
    assert result.prediction.target == RTX.name and "license" in capsys.readouterr().err
    assert (result.convolutions, result.complete) == (ConvolutionCounts(1, 0, 1, ("c",)), False)


@pytest.mark.parametrize(
    ("text", "sm"), [(None, None), ("86", [86]), ("sm89", [89]), ("SM120", [120]), ("sm75", [75])]
)
def test_verify_with_builder_compute_capability(
    builder: Mock, tmp_path: Path, text: str | None, sm: list[int] | None
) -> None:
    """The builder and the prediction have the compute capability. 7.5 has no INT8."""
    builder.return_value = BuildResult("tensorrt-rtx", "refused")
    result = api.verify_with_builder(save_model(tmp_path), "tensorrt-rtx", sm=text)
    assert builder.call_args.kwargs["sm"] == sm and result.prediction is not None
    assert [c.is_int8 for c in result.prediction.convolutions] == [sm != [75]]


def test_verify_with_builder_rejects_other_text(tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, match="ampere", check=has("wrong-format", parameter="sm")):
        api.verify_with_builder(save_model(tmp_path), "trtexec", sm="ampere")


# Two builds of one network: an 8.6.0 log with its layer JSON, and a transcribed 8.5.2 log with its tables.

RAW, TRANSCRIBED = "bevfusion-camera-rtx3080ti-trt8600", "bevfusion-camera-orin-trt8502"
CONSTANTS = "ConstQDQInitializersFusion"


@pytest.fixture(scope="module")
def raw() -> Build:
    return read_build(build_file(RAW), build_file(RAW, "layer_info.json"))


def test_read_build_of_the_raw_log(raw: Build) -> None:
    assert (raw.tensorrt, raw.device) == ("8.6.0", "NVIDIA GeForce RTX 3080 Ti")
    assert (raw.complete, raw.missing, raw.lines.unexplained) == (True, [], 0)
    assert (raw.milestone("Original"), raw.milestone("After Myelin optimization")) == (860, 504)
    assert (len(raw.parse.nodes), len(raw.layers), len(raw.trace)) == (
        443,
        78,
        1513,
    )  # counted with grep
    assert sum(e.pass_name != CONSTANTS for e in raw.trace) == 868
    assert sum(layer.type == "NoOp" for layer in raw.layers) == 2
    assert [e.object for e in raw.trace if e.kind == "Replacing slice"] == ["1446 to 1451"]
    assert any(r.target == "Half(557568,2816,88,1)" for r in raw.reformats)  # long-strided


def test_verify_the_raw_log(raw: Build, model_bevfusion: Model) -> None:
    """This is one of the builds that the rules were derived from."""
    result = api.verify(model_bevfusion, raw)
    assert api.exit_code(result) == 0 and result.copies.in_order == 11
    assert_as_predicted(result)


def assert_as_predicted(result: Verification) -> None:
    assert result.mismatches == []
    assert result.convolutions.agree == result.convolutions.total == 63
    assert (result.conversions.predicted, result.conversions.built) == (2, 2)
    assert result.layers.agree == result.layers.total == 76
    assert result.copies.agree == result.copies.built == result.copies.predicted == 11


@pytest.mark.parametrize(
    ("text", "change", "differs"),
    [
        ("Generating copy for Concat_712_1253", lambda _: None, Difference.NOT_LOGGED),
        (
            "Replacing slice Slice_851",
            lambda line: line.replace("1446", "1447"),
            Difference.FIRST_LINE,
        ),
        ("Eliminating concatenation", lambda line: f"{line}_x", Difference.FIRST_LINE),
    ],
)
def test_verify_finds_a_changed_copy_line(
    text: str, change: Callable[[str], str | None], differs: Difference, model_bevfusion: Model
) -> None:
    lines = build_file(RAW).read_text().split("\n")  # metadata contains other line separators
    index = next(i for i, line in enumerate(lines) if text in line)
    line = change(lines[index])
    lines[index : index + 1] = [] if line is None else [line]
    result = api.verify(model_bevfusion, build_of(lines))
    assert api.exit_code(result) == 1 and {m.kind for m in result.mismatches} == {"copy"}
    first = result.mismatches[0]
    assert (first.differs, first.line) == (differs, None if line is None else index + 1)


@pytest.fixture(scope="module")
def model_bevfusion() -> Model:
    return load(build_file(RAW, "model.onnx.gz"))


def test_compare_the_transcribed_build() -> None:
    model = load(build_file(TRANSCRIBED, "model.onnx.gz"))
    build = read_build(build_file(TRANSCRIBED, "lines.txt"))
    prediction = predict(model, "trt8.5")
    assert (build.milestone("Original"), build.milestone("After Myelin optimization")) == (860, 504)
    build = replace(
        build,
        layers=layers_of(build_file(TRANSCRIBED, "layers.tsv")),
        listing=ListingSource.LAYER_JSON,
        gaps=[],
    )
    # The transcription counts these lines but does not contain them.
    result = api.compare_with_build(
        model,
        prediction,
        build,
        uncertain_events=tuple(e for e in prediction.trace if e.pass_name == CONSTANTS),
    )
    assert_as_predicted(result)
    assert result.trace.agree == result.trace.built == result.trace.predicted


def test_lines_of_the_raw_log_are_predicted_in_order(raw: Build, model_bevfusion: Model) -> None:
    """The order of constant folding, which is that of the parser's tables, is not compared."""
    predicted, printed = (
        [e for e in events if e.pass_name != CONSTANTS]
        for events in (predict(model_bevfusion, "trt8.6").trace, [e.event for e in raw.trace])
    )
    counts = count_agreement(predicted, printed)
    assert (counts.predicted, counts.built) == (868, 868)
    # Two lines number an unnamed layer.
    assert counts.agree >= 866 and counts.in_order >= 0.95 * 868
