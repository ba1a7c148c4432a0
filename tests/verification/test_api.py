import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdqtool.builders.options import BuildOptions
from qdqtool.builders.run import BuildResult
from qdqtool.buildlog.agreement import (
    BuildFacts,
    BuildSource,
    ConvolutionCounts,
    Difference,
    Mismatch,
    MismatchKind,
)
from qdqtool.buildlog.types import (
    Build,
    BuiltLayer,
    BuiltTensor,
    Gap,
    LogEvent,
    ParsedNode,
    ParseSection,
    Section,
    Shape,
)
from qdqtool.errors import BuildLogError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.timing.built_engine import find_build_gpu
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.targets import RTX, TARGETS
from qdqtool.util.notes import Note
from qdqtool.verification.api import (
    check_same_model,
    choose_target,
    choose_target_for_gpu,
    exit_code,
    has_fp32_convolutions,
    verify,
)
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.local_build import BuiltModel, ConvolutionPair, build_model
from qdqtool.verification.result import Verification, verification_from_pairs
from tests.buildlog.evidence import build_file
from tests.buildlog.samples import build_of
from tests.errors import has
from tests.notes import note, note_codes
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import HOME, model as published, prediction
from tests.verification.synthetic import log_of

CASE = "resnet18-qat-rtx2000-trt8510"
PATH = HOME / CASE / "model.onnx.gz"
MODEL = published(CASE)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return log_of(prediction(CASE))


@pytest.fixture
def log(lines: list[str], tmp_path: Path) -> Path:
    path = tmp_path / "build.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def index_of(lines: list[str], text: str, start: str = "") -> int:
    return next(i for i, line in enumerate(lines) if line.startswith(start) and text in line)


def replace_line(lines: list[str], index: int, *new: str) -> Build:
    return build_of([*lines[:index], *new, *lines[index + 1 :]])


def test_verify_agreement(log: Path) -> None:
    result = verify(PATH, log)
    assert result.convolutions.agree == result.convolutions.total == 21
    assert result.trace.predicted == result.trace.built == result.trace.agree == 607
    assert (result.conversions.as_json(), result.mismatches) == ({"predicted": 1, "built": 1}, [])
    assert (result.prediction.target, exit_code(result)) == ("trt8.5", 0)
    assert verify(MODEL, [log]).convolutions == result.convolutions


def test_verify_finds_a_changed_residual_input(lines: list[str]) -> None:
    index = index_of(lines, "Conv_34 + Add_42", "Layer(")
    before, data, rest = lines[index].partition(" (Int8")
    result = verify(
        MODEL, replace_line(lines, index, before + data + rest.replace("Int8", "Float", 1))
    )
    assert exit_code(result) == 1
    assert next(m.differs for m in result.mismatches if m.name == "Conv_34") == Difference.RESIDUAL


@pytest.mark.parametrize("conv", ["Conv_9", "Conv_34", "Gemm_311"])
def test_verify_finds_a_changed_output(lines: list[str], conv: str) -> None:
    index = index_of(lines, f" {conv} +", "Layer(C")
    before, arrow, after = lines[index].rpartition(" -> ")
    swapped = after.replace("Int8", "Float") if "Int8" in after else after.replace("Float", "Int8")
    result = verify(MODEL, replace_line(lines, index, before + arrow + swapped))
    assert exit_code(result) == 1
    assert conv in {m.name for m in result.mismatches if m.kind == "convolution"}
    assert result.mismatches[0].line == index + 1
    count = len(result.mismatches)
    assert repr(result).endswith(f", {count} mismatch{'es' if count > 1 else ''}>")


@pytest.mark.parametrize(
    ("builds", "code"),
    [((), "missing-argument"), (([],), "missing-argument"), ((PATH,), "wrong-format")],
    ids=["none", "empty list", "model"],
)
def test_verify_needs_a_build(builds: tuple[Any, ...], code: str) -> None:
    with pytest.raises(BuildLogError, check=has(code, parameter="builds")):
        verify(MODEL, *builds)


def test_verify_rejects_a_build_of_another_export() -> None:
    # The two exports share a few names, which belong to different convolutions.
    path = build_file(CASE, "log.txt")
    with pytest.raises(
        BuildLogError, check=has("different-exports", path=str(path)), match=r"names .* are used"
    ):
        verify(build_file("resnet18-a100-qat", "model.onnx.gz"), path)


def test_check_same_model_rejects_an_empty_build() -> None:
    with pytest.raises(BuildLogError, check=has("empty-build", path="build")):
        check_same_model(model(1), Build(parse=ParseSection()))


@pytest.mark.parametrize(("shape", "count"), [(None, 1), ((), 1), ((1, 8, 4, 4), 0)])
def test_verify_notes_missing_shapes(shape: Shape | None, count: int) -> None:
    assert (
        note_codes(verify(model(1), convolution_of_shape(shape)).notes).count("no-shapes") == count
    )


@pytest.mark.parametrize(
    ("version", "target", "message"),
    [("7.2.1", None, r"7\.2\.1"), ("8.5.2", "trt7", "'trt7'")],
)
def test_choose_target_rejects_unknown_targets(
    version: str, target: str | None, message: str
) -> None:
    with pytest.raises(QdqtoolError, match=message):
        choose_target(Build(tensorrt=version), target)


def test_verify_log_without_engine_layers(lines: list[str]) -> None:
    result = verify(MODEL, build_of(lines[: index_of(lines, "Engine Layer Information")]))
    assert (result.convolutions.agree, result.conversions.built, exit_code(result)) == (21, 1, 2)
    counts, missing = "21 of 21 layers (20 convolutions, 1 matrix product)", result.build.missing
    assert (
        repr(result)
        == f"<Verification: {counts} agree, 0 mismatches, incomplete: {', '.join(missing)}>"
    )
    assert str(Gap(Section.LISTING)) in missing


def test_verify_log_that_is_cut_in_the_passes(lines: list[str]) -> None:
    result = verify(MODEL, build_of(lines[: index_of(lines, "ConstWeightsFusion on conv1.weight")]))
    assert (result.mismatches, exit_code(result), exit_code(result, True)) == ([], 2, 0)
    assert str(Gap(Section.LISTING)) in result.build.missing and not result.complete
    assert result.convolutions.unknown < result.convolutions.total


def test_verify_finds_a_missing_line(lines: list[str]) -> None:
    line = "QuantizeDoubleInputNodes: fusing QuantizeLinear_27 into Conv_22"
    result = verify(MODEL, replace_line(lines, index_of(lines, line)))
    assert (exit_code(result), result.trace.built) == (1, 606)
    assert [(m.name, m.differs) for m in result.mismatches if m.kind == "trace"] == [
        (line, Difference.NOT_LOGGED)
    ]


def test_verify_finds_another_conversion(lines: list[str]) -> None:
    index = index_of(lines, ": QuantizeLinear_2,", "Layer(")
    result = verify(MODEL, replace_line(lines, index, lines[index].replace("_2,", "_15,")))
    assert [(m.kind, m.name, m.differs) for m in result.mismatches] == [
        ("conversion", "QuantizeLinear_15", Difference.REMAINS),
        ("conversion", "QuantizeLinear_2", Difference.ABSENT),
    ]


@pytest.mark.parametrize(
    ("case", "files", "convolutions", "lines"),
    [
        ("yolo-resnet18-orin-trt8502", ["log.txt"], 43, 1011),
        ("resnet18-qat-rtx2000-trt8510", ["log.txt"], 21, 607),
        ("resnet18-a100-qat", ["graph.json", "profile.json"], 21, 0),
        ("resnet18-a100-qat-residual", ["graph.json"], 21, 0),
        ("resnet18-a100-qat-residual-qgap", ["graph.json"], 21, 0),
        ("mobilenetv2-titanrtx-qat-residual", ["graph.json"], 53, 0),
        ("centernet-resnet34-qat-trt80", ["log.txt"], 48, 0),
    ],
)
def test_verify_recorded_builds(case: str, files: list[str], convolutions: int, lines: int) -> None:
    result = verify(published(case), *(build_file(case, name) for name in files))
    assert (result.convolutions.agree, exit_code(result)) == (convolutions, 0)
    assert not result.mismatches and (result.trace.agree or 0) == lines
    assert not lines or result.trace.predicted == result.trace.built == lines


@pytest.mark.parametrize(
    "case", slow_after(1, ["resnet18-qat-rtx2000-trt8510", "yolo-resnet18-orin-trt8502"])
)
def test_verify_finds_any_changed_precision_in_a_recorded_log(case: str) -> None:
    # Precisions are in the engine lines and, if it was printed, in the layer information.
    raw = build_file(case).read_bytes().splitlines()
    lines = [
        line.decode() for line in raw if b"Tactic: 0x" not in line or line.startswith(b"Layer(")
    ]
    typed = re.compile(r"(?<= \()(?:Int8|Float)(?=\[)|(?<= )(?:Int8|FP32)(?= format| \})")
    places = [
        (i, match)
        for i, line in enumerate(lines)
        if line.startswith(("Layer(", "Name: "))
        for match in typed.finditer(line)
    ]
    assert len(places) > 70
    for i, match in places[:: len(places) // 5]:
        other = (
            "Int8" if match[0] != "Int8" else "Float" if lines[i].startswith("Layer(") else "FP32"
        )
        changed = lines[i][: match.start()] + other + lines[i][match.end() :]
        result = verify(published(case), replace_line(lines, i, changed))
        assert exit_code(result) == 1, changed
        assert any(m.line == i + 1 or i + 1 in m.values for m in result.mismatches), changed


@pytest.mark.parametrize(
    "case", slow_after(1, ["resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"])
)
def test_verify_finds_any_changed_precision_in_a_layer_json(case: str) -> None:
    data = json.loads(build_file(case, "graph.json").read_text())
    edges = [t for layer in data["Layers"] for side in ("Inputs", "Outputs") for t in layer[side]]
    for edge in [edges[-1], *edges[::8]]:  # the last edge is the output of the network
        before = edge["Format/Datatype"]
        edge["Format/Datatype"] = (
            "Row major linear FP32" if "Int8" in before else "Row major Int8 format"
        )
        assert exit_code(verify(published(case), build_of(data), target="trt8.4")) == 1, edge
        edge["Format/Datatype"] = before


@pytest.mark.parametrize(
    "case", slow_after(1, ["resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"])
)
def test_verify_finds_missing_layers_in_a_layer_json(case: str) -> None:
    text = build_file(case, "graph.json").read_text()
    data = json.loads(text)
    for i in range(0, len(data["Layers"]), 10):
        rest = data | {"Layers": [*data["Layers"][:i], *data["Layers"][i + 1 :]]}
        assert exit_code(verify(published(case), build_of(rest), target="trt8.4")) == 2
    result = verify(published(case), build_of(text[: len(text) // 2]), target="trt8.4")
    assert (result.mismatches, exit_code(result)) == ([], 2)


# Target, model, flags and exit code. These need no whole build.

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def layer(
    name: str, kind: str = "CaskConvolution", inputs: str = "", outputs: str = "", **more: object
) -> BuiltLayer:
    def tensors(side: str, types: str) -> list[BuiltTensor]:
        return [BuiltTensor(f"{name}.{side}{i}", Precision(t)) for i, t in enumerate(types.split())]

    return BuiltLayer(name, kind, tensors("in", inputs), tensors("out", outputs), **more)  # type: ignore[arg-type]


def convolution_of_shape(shape: Shape | None) -> Build:
    return Build(layers=[BuiltLayer("c0", "Convolution", outputs=[BuiltTensor("y", FP32, shape)])])


def model(count: int) -> Model:
    g = Graph()
    x = g.input(1, 8, 4, 4)
    return Model(g.model(*(g.conv(x, f"c{i}", 8, 1) for i in range(count))))


@pytest.mark.parametrize(
    ("build", "target", "expected", "note"),
    [
        (Build(tensorrt="8.5.2"), None, "trt8.5", None),
        (  # the argument comes first
            Build(tensorrt="8.5.2"),
            "trt10",
            "trt10",
            note("other-version", version="8.5.2", target="trt10"),
        ),
        (Build(tensorrt="8.5.2"), "trt8.5", "trt8.5", None),
        (Build(tensorrt="10.3.0"), "10", "trt10", None),
        (
            Build(tensorrt="1.7.1", is_rtx=True),
            "trt10",
            "trt10",
            note("other-version", version="1.7.1", target="trt10"),
        ),
        (Build(tensorrt="10.3.0"), None, "trt10", None),
        (Build(tensorrt="8.4.1", version_hint="10.0"), None, "trt8.4", None),
        (
            Build(version_hint="8.6"),
            None,
            "trt10",
            note("no-version", version="8.6", target="trt10"),
        ),
        (
            Build(version_hint="10.0"),
            None,
            "trt10",
            note("no-version", version="10.0", target="trt10"),
        ),
        (Build(), None, "trt10", note("no-version", target="trt10")),
        (Build(is_rtx=True), None, RTX.name, None),
        (Build(is_rtx=True, tensorrt="1.7.1"), None, RTX.name, None),
    ],
)
def test_choose_target(build: Build, target: str | None, expected: str, note: Note | None) -> None:
    assert choose_target(build, target) == (TARGETS[expected], [note] if note else [])


@pytest.mark.parametrize(
    ("version", "target", "differs"),
    [
        ("8.5.10", "8.5.2", False),  # versions of equal rules
        ("8.6.1", "9", True),
        ("9.3.0", "9", False),
        ("10.3.0", "10.3", False),
        ("10.3.0", "10.14", True),  # merges differ
        ("10.3.0", "trt10-strongly-typed", False),
        ("7.2.3", "8.5", True),
    ],
)
def test_note_of_other_version_compares_what_the_target_names(
    version: str, target: str, differs: bool
) -> None:
    _, notes = choose_target(Build(tensorrt=version), target)
    assert note_codes(notes) == ["other-version"] * differs


def named(count: int) -> Build:
    return Build(
        layers=[*(layer(f"c{i}") for i in range(count)), layer("other", "PointWiseV2")],
        files=["b.log"],
    )


@pytest.mark.parametrize(
    ("build", "total"),
    [
        (named(1), 5),
        (named(2), 10),
        (named(1), 1),
        (Build(layers=[layer("a", "Myelin"), layer("b", "Myelin")]), 3),
    ],
    ids=["a fifth", "a fifth of ten", "all", "Myelin blocks"],
)
def test_check_same_model_accepts_a_fifth_of_the_names_and_myelin(build: Build, total: int) -> None:
    # The names of Myelin blocks contain no names of nodes.
    check_same_model(model(total), build)


EVENT = LogEvent("QDQToCopy", "Running", "q")


@pytest.mark.parametrize(
    ("build", "total", "message"),
    [
        (named(1), 6, " 1 of the 6 "),
        (named(2), 11, " 2 of the 11 "),
        (named(0), 4, " none of the 4 "),
        (Build(layers=[layer("a", "Myelin"), layer("b")]), 3, " none of the 3 "),
        (Build(layers=[layer("b")]), 3, " none of the 3 "),
        (Build(layers=[layer("a", "Myelin")], trace=[EVENT]), 3, " none of the 3 "),
        (Build(trace=[EVENT]), 3, " none of the 3 "),
        (Build(parse=ParseSection([ParsedNode("c0", "Conv")])), 6, " 1 of the 6 "),
        (
            convolution_of_shape((1, 8, 2, 2)),
            1,
            "c0 has output 1x8x2x2, but 1x8x4x4 in the model. Give",
        ),
    ],
    ids=["one", "two", "none", "Myelin and layer", "layer", "Myelin and line", "line", "node"]
    + ["output of another shape"],
)
def test_check_same_model_rejects_another_model(build: Build, total: int, message: str) -> None:
    error = has("different-models", path=build.display_name)
    with pytest.raises(BuildLogError, match=message, check=error):
        check_same_model(model(total), build)


@pytest.mark.parametrize(
    ("flags", "layers", "expected"),
    [
        ("int8", [layer("a", inputs="FP32", outputs="FP32")], True),
        ("int8", [layer("a", inputs="INT8", outputs="FP32")], True),
        ("int8", [layer("a", inputs="INT8", outputs="INT8")], False),  # no float remainder
        ("int8", [layer("a", inputs="FP16", outputs="FP32")], False),
        ("", [layer("a", inputs="FP32", outputs="FP32")], False),  # the flags are unknown
        ("int8 fp16", [layer("a", inputs="FP32", outputs="FP32")], False),
        ("best", [layer("a", inputs="FP32", outputs="FP32")], False),
        ("stronglyTyped", [layer("a", inputs="FP32", outputs="FP32")], False),
        ("int8 bf16", [layer("a", inputs="FP32", outputs="FP32")], False),
        (
            "int8",
            [layer("a", "PointWiseV2", inputs="FP32", outputs="FP32")],
            False,
        ),  # no convolution
        ("int8", [layer("a", inputs="INT8 FP32", outputs="INT8")], True),  # a residual
        (
            "int8",
            [layer("a", inputs="INT8 INT8 FP32", outputs="INT8 FP32")],
            False,
        ),  # weights and a second output
    ],
)
def test_has_fp32_remainder(flags: str, layers: list[BuiltLayer], expected: bool) -> None:
    assert (
        has_fp32_convolutions(Build(precision_flags=frozenset(flags.split()), layers=layers))
        is expected
    )


@pytest.mark.parametrize(
    ("complete", "unknown", "mismatch", "partial", "code"),
    [
        (True, 0, False, False, 0),
        (True, 0, True, False, 1),
        (False, 0, False, False, 2),
        (True, 1, False, False, 2),
        (False, 3, False, True, 0),
        (False, 3, True, True, 1),
        (True, 2, False, True, 0),
    ],
)
def test_exit_code(complete: bool, unknown: int, mismatch: bool, partial: bool, code: int) -> None:
    result = Verification(
        BuildFacts(BuildSource.LOG, complete=complete),
        ConvolutionCounts(5, 5 - unknown, unknown),
        mismatches=[Mismatch(MismatchKind.CONVOLUTION, "c", {}, {}, Difference.ABSENT)] * mismatch,
    )
    assert exit_code(result, partial) == code
    assert result.as_json()["build"]["complete"] == (complete and not unknown)


# A model is built and the build is mapped back to it. A function of the test replaces the builder.


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[BuildOptions]:
    requests: list[BuildOptions] = []

    def build(model: Model, **options: Any) -> BuildResult:
        requests.append(request := BuildOptions(**options))
        if request.timeout == 1:
            return BuildResult("tensorrt", "refused", message="no")
        return BuildResult(
            "tensorrt",
            "built",
            "8.5.2",
            model=model,
            names={node.index: node.name for node in model.nodes},
            build=build_of(log_of(prediction(CASE))),
        )

    monkeypatch.setattr("qdqtool.builders.build", build)
    return requests


def test_build_model_nodes(requests: list[BuildOptions]) -> None:
    result = build_model(MODEL, "tensorrt")
    assert (requests[0].keep_engine, result.layers_path) == (False, None)
    assert [n.precision for n in result.nodes] == [INT8] * 21
    # Conv_34 has a residual next to its data.
    assert [result.node(n).inputs for n in ("Conv_22", "Conv_34")] == [(INT8,), (INT8, INT8)]


@pytest.mark.usefixtures("requests")
def test_build_model_layer_table(tmp_path: Path) -> None:
    assert build_model(MODEL, "tensorrt", tmp_path).layers_path == tmp_path / "layers.json"
    text = (tmp_path / "layers.json").read_text()
    assert text.startswith('{\n "builder"') and text.endswith("}\n")  # indented
    table = json.loads(text)
    assert (table["builder"], table["version"], len(table["nodes"])) == ("tensorrt", "8.5.2", 21)
    first = table["Layers"][0]
    assert (first["Name"], first["LayerType"]) == ("QuantizeLinear_2", "Reformat")
    assert first["Inputs"][0]["Dimensions"] == [1, 8, 8, 8]


@pytest.mark.usefixtures("requests")
def test_build_model_rejected_by_the_builder(tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt", tmp_path, timeout=1)
    assert (result.status, result.nodes, result.layers_path) == ("refused", [], None)
    assert list(tmp_path.iterdir()) == []


NODES = [BuiltNode(i, f"n{i}", "Conv", p) for i, p in enumerate((INT8, FP16, INT8))]


def test_built_model_json_without_files() -> None:
    data = BuiltModel(
        "tensorrt-rtx", "built", "1.7.1", (86, 120), seconds=1.23456, nodes=NODES
    ).as_json()
    assert (data["engine"], data["log"], data["layers"]) == (None, None, None)
    assert (data["targets"], data["seconds"]) == (["SM86", "SM120"], 1.235)
    assert data["summary"] == {"convolutions": 3, "int8": 2, "fp8": 0}


def test_built_model_json_paths() -> None:
    paths = {name: Path(name) for name in ("engine", "log", "layers")}
    result = BuiltModel("trtexec", "built", **{f"{name}_path": p for name, p in paths.items()})  # type: ignore[arg-type]
    assert {name: Path(result.as_json()[name]) for name in paths} == paths


def test_verification_from_pairs() -> None:
    whole = prediction(CASE)
    agreeing, wrong, unknown = whole.convolutions[:3]
    pairs = [
        ConvolutionPair(
            agreeing, BuiltNode(agreeing.index, agreeing.name, "Conv", agreeing.precision)
        ),
        ConvolutionPair(wrong, BuiltNode(wrong.index, wrong.name, "Conv", FP16)),
        ConvolutionPair(unknown, None),
    ]
    result = verification_from_pairs(whole, pairs, BuildFacts(BuildSource.LOG))
    assert result.convolutions == ConvolutionCounts(3, 1, 1, (unknown.name,))
    assert [m.name for m in result.mismatches] == [wrong.name]


@pytest.mark.parametrize(
    ("gpu", "int8", "capability"), [(None, 2, "8.6"), ("T4", 0, "7.5"), ("RTX 3060", 2, "8.6")]
)
def test_verify_rtx_build_for_a_gpu(g: Graph, gpu: str | None, int8: int, capability: str) -> None:
    model = g.model(g.conv(g.conv(g.input(1, 16, 16, 16), "a", 16), "b", 16, scale=0.05))
    result = verify(
        model, Build(tensorrt="1.7.1", layers=[BuiltLayer("a")]), target="rtx1.7", gpu=gpu
    )
    assert result.prediction.summary()["int8"] == int8
    assert result.as_json()["compute_capabilities"] == [capability]


def test_verify_rtx_build_with_a_layer_of_unknown_type(g: Graph) -> None:
    """A kernel whose abbreviated name hides the product does not contradict the prediction."""
    model = g.model(g.conv(g.input(1, 16, 16, 16), "a", 16))
    kernel = BuiltLayer(
        "__myl_CastEtc_myl0_1", "kgen", [BuiltTensor("x", Precision.INT8)], onnx_names=["a"]
    )
    result = verify(model, Build(tensorrt="1.7.1", layers=[kernel]), target="rtx1.7")
    assert (result.convolutions.unknown_names, result.mismatches) == (("a",), [])


@pytest.mark.parametrize(
    ("build", "gpu", "capabilities"),
    [
        (Build(gpu={"Compute Capability": "7.5"}), None, ["7.5"]),
        (Build(gpu={"Compute Capability": "8.7"}), "Orin NX", ["8.7"]),
        (Build(device="Tesla T4"), None, ["7.5"]),
        (Build(targets=(75, 86)), None, ["7.5", "8.6"]),
        (Build(targets=(75, 86)), "RTX 3060", ["7.5", "8.6"]),
        (Build(device="H100 SXM"), None, ["9.0"]),
        (Build(), None, ["8.6"]),
    ],
)
def test_choose_target_for_gpu_uses_capabilities_of_an_rtx_build(
    build: Build, gpu: str | None, capabilities: list[str]
) -> None:
    """The build proves that TensorRT-RTX can build for them."""
    target, _ = choose_target_for_gpu(replace(build, is_rtx=True), None, GpuOptions(gpu=gpu))
    assert (target.capability_names, target.name) == (capabilities, RTX.name)
    assert choose_target_for_gpu(build, None, GpuOptions(gpu="V100"))[0].capability_names == []


TWO_TARGETS = Build(is_rtx=True, targets=(75, 86))


@pytest.mark.parametrize(
    ("build", "gpu", "code", "message"),
    [
        (Build(is_rtx=True), "V100", "unsupported", r" 7\.0 .*V100"),
        (
            Build(is_rtx=True, gpu={"Compute Capability": "8.7"}),
            "V100",
            "unsupported",
            r" 7\.0 .*V100",
        ),
        (TWO_TARGETS, "V100", "different-gpus", r"V100.* 7\.0.* 8\.6"),
        (TWO_TARGETS, "RTX 99999", "unknown-choice", "RTX 99999"),
    ],
)
def test_choose_target_for_gpu_rejects_other_gpus(
    build: Build, gpu: str, code: str, message: str
) -> None:
    with pytest.raises(QdqtoolError, match=message, check=has(code)):
        choose_target_for_gpu(build, None, GpuOptions(gpu=gpu))


def test_choose_target_for_gpu_prefers_the_capability_of_the_log() -> None:
    """The capability contradicts the GPU table, and the log has neither clock nor memory."""
    build = Build(
        is_rtx=True,
        device="NVIDIA GeForce RTX 3060",
        gpu={"Compute Capability": "8.9", "SMs": "28"},
    )
    assert (
        choose_target_for_gpu(build, None, GpuOptions())[0].capability_names == ["8.9"]
        and find_build_gpu(build) is None
    )
