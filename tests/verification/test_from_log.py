"""verify --from-log: what depends on scales, which no log prints, is unknown and never agreement."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.base.notes import Remark
from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.agreement import Difference
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, Listing
from qdqtool.errors import BuilderError, BuildLogError, QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.qdq import quantizers, read_params
from qdqtool.prediction import predict
from qdqtool.trt.targets import RTX
from qdqtool.types import Event
from qdqtool.verification import api
from qdqtool.verification.build_model import BuiltModel
from qdqtool.verification.lines import Verification, agreement, is_copy_line
from tests.buildlog.evidence import build_file
from tests.buildlog.samples import build_of
from tests.raising import raises
from tests.trt.builder import Graph
from tests.trt.evidence import graph as published
from tests.verification.synthetic import log_of
from tests.verification.transcribed import layers_of, outcomes


def proto(case: str) -> onnx.ModelProto:
    return published(case).proto


@pytest.mark.parametrize("case", ["yolo-resnet18-orin-trt8502", "resnet18-qat-rtx2000-trt8510"])
def test_scales_are_all_equal_or_all_different(case: str) -> None:
    model = proto(case)
    before = model.SerializeToString(deterministic=True)
    for same in (True, False):
        index = Model(api._with_scales(model, same))
        first: dict[str, float] = {}
        for node in quantizers(index):
            params = read_params(index, node)
            assert params.scale is not None
            assert np.all(params.scale == params.scale[0])
            first[node.input(1)] = float(params.scale[0])
        assert len(set(first.values())) == (1 if same else len(first))
        assert min(first.values()) == 1 / 64 and max(first.values()) < 1 / 32
    assert model.SerializeToString(deterministic=True) == before


def test_stems_and_torn_sections() -> None:
    """ResNet-18 with a quantized skip: MaxPool is read by two Qs, INT8 reaches the stem only if they are equal."""
    model = proto("resnet18-qat-rtx2000-trt8510")
    equal, different = (
        predict(Model(api._with_scales(model, same)), advice=False) for same in (True, False)
    )
    assert equal.convolution("Conv_9").output == "INT8"
    assert different.convolution("Conv_9").output == "FLOAT"
    assert "Conv_9" in api._differing(equal, different)
    assert "Conv_22" not in api._differing(equal, different)
    lines = build_file("resnet18-qat-rtx2000-trt8510").read_text().splitlines()
    start = next(i for i, x in enumerate(lines) if "Parsing node: Conv_53" in x)
    with raises(BuildLogError, "_check_whole beginning"):
        api.verify_from_log(build_of(lines[start:]))
    hole = [i for i, x in enumerate(lines) if "[TRT] Parsing node: " in x][100:110]
    with pytest.raises(BuildLogError, match="no node makes"):
        api.verify_from_log(build_of(lines[: hole[0]] + lines[hole[-1] :]))


@pytest.mark.parametrize(
    ("case", "total", "unknown"),
    [
        ("yolo-resnet18-orin-trt8502", 43, 2),
        ("resnet18-qat-rtx2000-trt8510", 21, 8),
    ],
)
def test_the_recorded_logs(case: str, total: int, unknown: int) -> None:
    result = api.verify_from_log(build_file(case))
    counts = result.convolutions
    assert (counts.total, counts.unknown, counts.agree) == (total, unknown, total - unknown)
    assert result.trace.agree == result.trace.built == result.trace.predicted
    assert (
        result.mismatches,
        api.exit_code(result),
        api.exit_code(result, allow_partial=True),
    ) == ([], 2, 0)


def test_a_log_that_contradicts_itself_is_a_mismatch_though_scales_are_unknown() -> None:
    lines = build_file("yolo-resnet18-orin-trt8502").read_text().splitlines()
    at = next(
        i
        for i, x in enumerate(lines)
        if x.startswith("Layer(") and ": /backbone/maxpool/MaxPool," in x
    )
    before, arrow, after = lines[at].rpartition(" -> ")
    assert "(Float[" in after
    lines[at] = before + arrow + after.replace("(Float[", "(Int8[")
    result = api.verify_from_log(build_of(lines))
    assert api.exit_code(result) == 1
    assert any(m.differs == Difference.TWO_TYPES and at + 1 in m.values for m in result.mismatches)


@pytest.mark.parametrize("nodes", [True, False])
def test_scales_of_constants_and_of_initializers(nodes: bool) -> None:
    """However a graph stores them, and the weights' with as many as they have channels; nothing else is touched."""
    g = Graph(constant_nodes=nodes)
    model = g.model(
        g.conv(g.pair(g.input(1, 8, 4, 4), "in", 0.3), "c", 8, 1, scale=None, bias=True)
    )
    for same in (True, False):
        index = Model(api._with_scales(model, same))
        found = [read_params(index, q).scale for q in quantizers(index)]
        assert [None if s is None else s.size for s in found] == [
            None if s is None else s.size
            for s in (read_params(Model(model), q).scale for q in quantizers(Model(model)))
        ]
        firsts = {float(s[0]) for s in found if s is not None}
        assert (
            len(firsts) == (1 if same else len({q.input(1) for q in quantizers(index)}))
            and min(firsts) == 1 / 64
        )
        assert np.array_equal(index.constant("c.bias"), Model(model).constant("c.bias"))


SM: list[Any] = []


def answers(monkeypatch: pytest.MonkeyPatch, result: BuildResult) -> None:
    def build(model: object, builder: str, *_: object, sm: Any = None, **__: object) -> BuildResult:
        SM.append(sm)
        return result

    for home in ("qdqtool.builders.build", "qdqtool.verification.build_model.build_model"):
        with contextlib.suppress(ImportError, AttributeError):
            monkeypatch.setattr(home, build)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "m.onnx"


def written(path: Path, zero: int) -> Path:
    """One quantized convolution; TensorRT-RTX refuses a zero point that is not 0."""
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "p", zero=zero)
    onnx.save(g.model(g.conv(x, "c", 16, scale=None)), path)
    return path


def test_time_that_ran_out_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, BuildResult("tensorrt-rtx", "timeout", message="stopped after 5 s"))
    with raises(BuilderError, "verify_with_builder 5"):
        api.verify_with_builder(written(model, 0), "tensorrt-rtx")


def test_refusals_that_were_and_were_not_predicted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no layers to compare then: nothing agrees, and nothing is unknown."""
    answers(
        monkeypatch,
        BuildResult("tensorrt-rtx", "refused", "1.7.1", message="no asymmetric quantization"),
    )
    result = api.verify_with_builder(written(model, 3), "tensorrt-rtx")
    assert result.notes == [
        Remark.BUILT_ALIKE(status="refused", message="no asymmetric quantization")
    ]
    counts = result.convolutions
    assert (result.mismatches, counts.agree, counts.unknown, result.build.status) == (
        [],
        0,
        0,
        "refused",
    )
    answers(monkeypatch, BuildResult("tensorrt-rtx", "refused", "1.7.1", message="because"))
    result = api.verify_with_builder(written(model, 0), "tensorrt-rtx")
    assert [(str(m.kind), m.built["status"], m.differs, m.values) for m in result.mismatches] == [
        ("build", "refused", Difference.STATUS, ("built", "refused: because"))
    ]
    assert api.exit_code(result) == 1
    answers(monkeypatch, BuildResult("tensorrt-rtx", "crashed", "1.7.1"))
    result = api.verify_with_builder(written(model, 0), "tensorrt-rtx")
    assert result.mismatches[0].values == ("built", "crashed")


def test_a_classic_build_is_verified_as_a_log_of_its_version(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """trtexec and TensorRT tell of layers and passes, for the target that their version chooses; RTX of nodes.

    Only what runs TensorRT-RTX speaks of its licence.
    """
    proto = onnx.load(written(model, 0))
    log = build_of(log_of(predict(proto, "trt8.5")))
    answers(monkeypatch, BuildResult("trtexec", "built", "8.5.2", build=log))
    result = api.verify_with_builder(model, "trtexec")
    assert (result.prediction is not None and result.prediction.target, result.mismatches) == (
        "trt8.5",
        [],
    )
    assert result.convolutions.agree == result.convolutions.total == 1
    assert result.trace.built == result.trace.predicted > 0
    assert "licence" not in capsys.readouterr().err
    answers(monkeypatch, BuiltModel("tensorrt-rtx", "built", "1.7.1", build=log))
    result = api.verify_with_builder(model, "tensorrt-rtx")
    assert result.prediction is not None and result.prediction.target == RTX.name
    assert "licence" in capsys.readouterr().err
    assert result.complete, "every convolution of a build made here was looked at"
    assert (result.convolutions.total, result.convolutions.agree, result.convolutions.unknown) == (
        1,
        0,
        1,
    )


@pytest.mark.parametrize(
    ("text", "given"), [(None, None), ("86", [86]), ("sm89", [89]), ("SM120", [120])]
)
def test_compute_capability(
    model: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, given: Any
) -> None:
    answers(monkeypatch, BuildResult("tensorrt-rtx", "refused"))
    api.verify_with_builder(written(model, 3), "tensorrt-rtx", sm=text)
    assert SM[-1] == given
    predicted = api.verify_with_builder(written(model, 0), "tensorrt-rtx", sm="sm75").prediction
    assert predicted is not None and [c.is_int8 for c in predicted.convolutions] == [False]
    with raises(QdqtoolError, "verify_with_builder ampere"):
        api.verify_with_builder(model, "tensorrt-rtx", sm="ampere")


# Two builds of one network: a raw 8.6.0 log with its layer JSON, and a transcribed 8.5.2 log with its tables.

RAW, TRANSCRIBED = "bevfusion-camera-rtx3080ti-trt8600", "bevfusion-camera-orin-trt8502"
CONSTANTS = "ConstQDQInitializersFusion"


@pytest.fixture(scope="module")
def raw() -> Build:
    return read_build(build_file(RAW), build_file(RAW, "layer_info.json"))


def test_raw_logs(raw: Build) -> None:
    assert (raw.tensorrt, raw.device, raw.complete, raw.missing) == (
        "8.6.0",
        "NVIDIA GeForce RTX 3080 Ti",
        True,
        [],
    )
    assert raw.lines.unexplained == 0
    assert (raw.milestone("Original"), raw.milestone("After Myelin optimization")) == (860, 504)
    assert (len(raw.parse.nodes), len(raw.layers), len(raw.trace)) == (
        443,
        78,
        1513,
    )  # counted with grep
    assert sum(e.pass_name != CONSTANTS for e in raw.trace) == 868
    assert sum(layer.type == "NoOp" for layer in raw.layers) == 2
    assert sum(map(is_copy_line, raw.trace)) == 11
    assert [e.object for e in raw.trace if e.kind == "Replacing slice"] == ["1446 to 1451"]
    assert any(r.target == "Half(557568,2816,88,1)" for r in raw.reformats)  # long-strided
    # All files at once; the rules were made from this build, too
    result = api.verify(
        build_file(RAW, "model_bevfusion.onnx.gz"),
        build_file(RAW),
        build_file(RAW, "layer_info.json"),
    )
    assert api.exit_code(result) == 0 and result.copies.in_order == 11
    assert_as_predicted(result)


def assert_as_predicted(result: Verification) -> None:
    assert result.mismatches == []
    assert result.convolutions.agree == result.convolutions.total == 63
    assert (result.conversions.predicted, result.conversions.built) == (2, 2)
    assert result.layers.agree == result.layers.total == 76
    assert result.copies.agree == result.copies.built == result.copies.predicted == 11


@pytest.mark.parametrize(
    ("words", "change", "differs"),
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
def test_a_changed_copy_line_is_a_mismatch(
    words: str, change: Callable[[str], str | None], differs: Difference, model_bevfusion: Model
) -> None:
    lines = build_file(RAW).read_text().split("\n")  # metadata holds other line separators
    at = next(i for i, line in enumerate(lines) if words in line)
    made = change(lines[at])
    lines[at : at + 1] = [] if made is None else [made]
    result = api.verify(model_bevfusion, build_of(lines))
    assert api.exit_code(result) == 1 and {m.kind for m in result.mismatches} == {"copy"}
    assert (result.mismatches[0].differs, result.mismatches[0].line) == (
        differs,
        None if made is None else at + 1,
    )


@pytest.fixture(scope="module")
def model_bevfusion() -> Model:
    return load(build_file(RAW, "model_bevfusion.onnx.gz"))


def test_transcribed_builds(raw: Build, model_bevfusion: Model) -> None:
    source = load(build_file(TRANSCRIBED, "model_bevfusion.onnx.gz"))
    build = read_build(build_file(TRANSCRIBED, "lines.txt"))
    prediction = predict(source, "trt8.5")
    assert (build.milestone("Original"), build.milestone("After Myelin optimization")) == (860, 504)
    layers = layers_of(build_file(TRANSCRIBED, "layers.tsv"))
    build = replace(build, layers=layers, listing=Listing.LAYER_JSON, gaps=[])
    folded = tuple(
        e for e in prediction.trace if e.pass_name == CONSTANTS
    )  # counted in it, not written out
    result = api.compare(source, prediction, build, unsure_events=folded)
    assert_as_predicted(result)
    assert result.trace.agree == result.trace.built == result.trace.predicted
    # Two transcriptions of one log agree, so that neither was bent to fit
    table = outcomes(build_file(TRANSCRIBED, "outcomes.json"))
    layers = layers_of(build_file(TRANSCRIBED, "layers.tsv"))
    assert sorted(layer.name for layer in layers if layer.is_qdq) == sorted(table["conversions"])
    listed = {
        part: layer for layer in layers if layer.is_convolution for part in layer.fused().components
    }
    assert len(table["convolutions"]) == 63
    for name, row in table["convolutions"].items():
        assert [str(t.precision) for t in listed[name].inputs] == row["inputs"], name
        assert str(listed[name].output_precision) == row["output"], name

    # All but the folding of constants, whose order is that of the parser's tables
    def others(events: list[Event]) -> list[Event]:
        return [e for e in events if e.pass_name != CONSTANTS]

    found = agreement(
        others(predict(model_bevfusion, "trt8.6").trace), others([e.event for e in raw.trace])
    )
    assert (found.predicted, found.built) == (868, 868)
    assert (
        found.agree is not None and found.agree >= 866
    )  # two lines name an unnamed layer by its number
    assert found.in_order is not None and found.in_order >= 0.95 * 868
