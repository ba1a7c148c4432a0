"""verify on logs written from predictions and changed in one place, and on the recorded builds."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qdqtool.base.notes import Note, Remark, remarks
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
    ParseSection,
    Section,
)
from qdqtool.commands.cli import run
from qdqtool.errors import BuildLogError, QdqtoolError, VersionError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.options import Building, Machine
from qdqtool.prediction import predict
from qdqtool.timing.expected import gpu_of
from qdqtool.trt.targets import RTX, TARGETS
from qdqtool.types import Precision
from qdqtool.verification import api
from qdqtool.verification.api import (
    check_same_model,
    choose_target,
    exit_code,
    flag_notes,
    target_of,
    verify,
)
from qdqtool.verification.build_model import BuiltModel, Pair, build_model
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.lines import Verification, of_pairs
from tests.buildlog.evidence import build_file
from tests.buildlog.samples import build_of
from tests.raising import raises
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import HOME, prediction
from tests.trt.evidence import model as published
from tests.verification.synthetic import log_of

pytestmark = pytest.mark.usefixtures("published_once")
CASE = "resnet18-qat-rtx2000-trt8510"
MODEL = HOME / CASE / "model.onnx.gz"


def written(folder: Path, lines: list[str]) -> str:
    path = folder / "build.log"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return log_of(prediction(CASE))


def place(lines: list[str], text: str) -> int:
    return next(i for i, line in enumerate(lines) if text in line)


def test_the_build_and_its_layers(tmp_path: Path, lines: list[str]) -> None:
    result = verify(MODEL, written(tmp_path, lines))
    assert result.convolutions.agree == result.convolutions.total == 21
    assert result.trace.predicted == result.trace.built == result.trace.agree == 607
    assert (result.conversions.as_json(), result.mismatches) == ({"predicted": 1, "built": 1}, [])
    assert result.prediction is not None and result.prediction.target == "trt8.5"
    assert exit_code(result) == 0
    at = next(i for i, x in enumerate(lines) if x.startswith("Layer(") and "Conv_34 + Add_42" in x)
    first, _, rest = lines[at].partition(" (Int8")
    second, _, last = rest.partition(" (Int8")
    changed = [*lines[:at], f"{first} (Int8{second} (Float{last}", *lines[at + 1 :]]
    result = verify(MODEL, written(tmp_path, changed))
    assert exit_code(result) == 1
    assert next(m.differs for m in result.mismatches if m.name == "Conv_34") == Difference.RESIDUAL


@pytest.mark.parametrize("conv", ["Conv_9", "Conv_34", "Gemm_311"])
def test_one_output_changed_in_the_engine(tmp_path: Path, lines: list[str], conv: str) -> None:
    at = next(
        i
        for i, x in enumerate(lines)
        if x.startswith("Layer(C") and f" {conv} +" in x.replace(",", " +")
    )
    before, arrow, after = lines[at].rpartition(" -> ")
    swapped = after.replace("Int8", "Float") if "Int8" in after else after.replace("Float", "Int8")
    changed = [*lines[:at], before + arrow + swapped, *lines[at + 1 :]]
    result = verify(MODEL, written(tmp_path, changed))
    assert exit_code(result) == 1
    assert conv in {m.name for m in result.mismatches if m.kind == "convolution"}
    assert result.mismatches[0].line == at + 1


def test_files_of_a_build(tmp_path: Path, lines: list[str]) -> None:
    log = written(tmp_path, lines)
    assert verify(MODEL, [log]).convolutions == verify(MODEL, log).convolutions
    for none in ((), ([],)):
        with pytest.raises(BuildLogError, match="no build given"):
            verify(MODEL, *none)
    with raises(BuildLogError, "build_of model"):
        verify(MODEL, MODEL)
    # Half a dozen names of each are in the other as well, for other convolutions
    with pytest.raises(BuildLogError, match="another export"):
        verify(build_file("resnet18-a100-qat", "model.onnx.gz"), build_file(CASE, "log.txt"))
    with pytest.raises(VersionError, match=r"older than 8\.0"):
        choose_target(Build(tensorrt="7.2.1"), None)
    with pytest.raises(QdqtoolError, match="unknown target"):
        choose_target(Build(tensorrt="8.5.2"), "trt7")
    with raises(BuildLogError, "check_told optimizer"):
        check_same_model(model(1), Build(parse=ParseSection()))


def test_parts_of_a_log(tmp_path: Path, lines: list[str]) -> None:
    end = place(lines, "Engine Layer Information")
    result = verify(MODEL, written(tmp_path, lines[:end]))
    assert (result.convolutions.agree, result.conversions.built, exit_code(result)) == (21, 1, 2)
    names = [node.name for node in load(MODEL).nodes if node.op == "Conv"][:2]
    path = written(tmp_path, [f"[V] [TRT] Parsing node: {name} [Conv]" for name in names])
    with raises(BuildLogError, "check_same_model too"):
        verify(MODEL, path)
    end = place(lines, "ConstWeightsFusion on conv1.weight")
    result = verify(MODEL, written(tmp_path, lines[:end]))
    assert (
        result.mismatches == []
        and not result.complete
        and str(Gap(Section.LISTING)) in result.build.missing
    )
    assert (exit_code(result), exit_code(result, allow_partial=True)) == (2, 0)
    assert result.convolutions.unknown < result.convolutions.total
    at = place(lines, "QuantizeDoubleInputNodes: fusing QuantizeLinear_27 into Conv_22")
    result = verify(MODEL, written(tmp_path, [*lines[:at], *lines[at + 1 :]]))
    assert (exit_code(result), result.trace.built) == (1, 606)
    assert [(m.name, m.differs) for m in result.mismatches if m.kind == "trace"] == [
        ("QuantizeDoubleInputNodes: fusing QuantizeLinear_27 into Conv_22", Difference.NOT_LOGGED)
    ]
    at = place(lines, "Running: QDQToCopy on QuantizeLinear_2")
    extra = [lines[at].replace("QuantizeLinear_2", "QuantizeLinear_15")]
    result = verify(MODEL, written(tmp_path, [*lines[:at], *extra, *lines[at:]]))
    trace = next(m for m in result.mismatches if m.kind == "trace")
    assert (trace.line, trace.differs) == (at + 1, Difference.FIRST_LINE)


def test_command_line(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lines)
    assert run(["verify", str(MODEL), path, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["build"]["tensorrt"], data["convolutions"]["agree"]) == (
        "qdqtool/verification/1",
        "8.5.2",
        21,
    )
    assert run(["verify", str(MODEL)]) == 2
    assert "give MODEL and at least one BUILD" in capsys.readouterr().err
    assert run(["verify", str(MODEL), str(tmp_path / "none.log")]) == 2
    assert "none.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "convolutions", "lines"),
    [
        ("yolo-resnet18-orin-trt8502", 43, 1011),
        ("resnet18-qat-rtx2000-trt8510", 21, 607),
    ],
)
def test_the_recorded_logs(case: str, convolutions: int, lines: int) -> None:
    built = build_file(case)
    result = verify(published(case), built)
    trace = result.trace
    assert (
        result.convolutions.agree,
        trace.predicted,
        trace.built,
        trace.agree,
        exit_code(result),
    ) == (convolutions, lines, lines, lines, 0)


@pytest.mark.parametrize(
    ("case", "files", "convolutions"),
    [
        ("resnet18-a100-qat", ["graph.json", "profile.json"], 21),
        ("resnet18-a100-qat-residual", ["graph.json"], 21),
        ("resnet18-a100-qat-residual-qgap", ["graph.json"], 21),
        ("mobilenetv2-titanrtx-qat-residual", ["graph.json"], 53),
        ("centernet-resnet34-qat-trt80", ["log.txt"], 48),
    ],
)
def test_the_recorded_listings(case: str, files: list[str], convolutions: int) -> None:
    built = [build_file(case, f) for f in files]
    result = verify(published(case), *built)
    assert (result.convolutions.agree, result.mismatches, exit_code(result)) == (
        convolutions,
        [],
        0,
    )


@pytest.mark.parametrize(
    "case", slow_after(1, ["resnet18-qat-rtx2000-trt8510", "yolo-resnet18-orin-trt8502"])
)
def test_no_change_of_a_precision_in_a_recorded_log_goes_unnoticed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of layer, input and output, in the engine lines and, where printed, in the layer information."""
    raw = build_file(case).read_bytes().splitlines()
    model = published(case)
    predicted = predict(model, TARGETS["trt8.5"])
    monkeypatch.setattr(api, "predict", lambda _model, _target: predicted)
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
    for i, match in places[:: len(places) // 10]:
        other = (
            "Int8" if match[0] != "Int8" else "Float" if lines[i].startswith("Layer(") else "FP32"
        )
        changed = lines[i][: match.start()] + other + lines[i][match.end() :]
        result = verify(model, build_of([*lines[:i], changed, *lines[i + 1 :]]))
        assert exit_code(result) == 1, changed
        assert any(m.line == i + 1 or i + 1 in m.values for m in result.mismatches), changed


@pytest.mark.parametrize(
    "case", slow_after(1, ["resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual"])
)
def test_no_change_of_a_layer_json_goes_unnoticed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(build_file(case, "graph.json").read_text())
    model = published(case)
    predicted = predict(model, TARGETS["trt8.4"])
    monkeypatch.setattr(api, "predict", lambda _model, _target: predicted)
    edges = [t for layer in data["Layers"] for side in ("Inputs", "Outputs") for t in layer[side]]
    for edge in [
        edges[-1],
        *edges[::4],
    ]:  # the last one is the network's output, which the model names otherwise
        before = edge["Format/Datatype"]
        edge["Format/Datatype"] = (
            "Row major linear FP32" if "Int8" in before else "Row major Int8 format"
        )
        assert exit_code(verify(model, build_of(data))) == 1, edge
        edge["Format/Datatype"] = before
    for lost in range(0, len(data["Layers"]), 5):
        rest = data | {"Layers": [*data["Layers"][:lost], *data["Layers"][lost + 1 :]]}
        assert exit_code(verify(model, build_of(rest))) == 2
    half = json.dumps(data, indent=1)
    result = verify(model, build_of(half[: len(half) // 2]))
    assert (result.mismatches, exit_code(result)) == ([], 2)


# The rules of verify that need no whole build: which target, which model, which flags, and when it ends with what.

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def layer(
    name: str, kind: str = "CaskConvolution", inputs: str = "", outputs: str = "", **more: object
) -> BuiltLayer:
    """A layer whose tensors are given by their types, such as ``INT8 FP32``."""

    def tensors(side: str, types: str) -> list[BuiltTensor]:
        return [BuiltTensor(f"{name}.{side}{i}", Precision(t)) for i, t in enumerate(types.split())]

    return BuiltLayer(name, kind, tensors("in", inputs), tensors("out", outputs), **more)  # type: ignore[arg-type]


def model(count: int) -> Model:
    g = Graph()
    x = g.input(1, 8, 4, 4)
    return Model(g.model(*(g.conv(x, f"c{i}", 8, 1) for i in range(count))))


@pytest.mark.parametrize(
    ("build", "target", "chosen", "told"),
    [
        (Build(tensorrt="8.5.2"), None, "trt8.5", None),
        (Build(tensorrt="8.5.2"), "trt10", "trt10", None),  # the user's word comes first
        (Build(tensorrt="10.3.0"), None, "trt10", None),
        (Build(tensorrt="8.4.1", version_hint="10.0"), None, "trt8.4", None),
        (
            Build(version_hint="8.6"),
            None,
            "trt10",
            Remark.AMBIGUOUS_VERSION(version="8.6", target="trt10"),
        ),
        (
            Build(version_hint="10.0"),
            None,
            "trt10",
            Remark.VERSION_OF_SPELLING(version="10.0", target="trt10"),
        ),
        (Build(), None, "trt10", Remark.NO_VERSION(target="trt10")),
        (Build(is_rtx=True), None, RTX.name, None),
        (Build(is_rtx=True, tensorrt="1.7.1"), None, RTX.name, None),
    ],
)
def test_the_target_is_the_builds_version(
    build: Build, target: str | None, chosen: str, told: Note | None
) -> None:
    found, notes = choose_target(build, target)
    assert found is TARGETS[chosen]
    assert notes == ([told] if told else [])


def named(count: int) -> list[BuiltLayer]:
    return [layer(f"c{i}") for i in range(count)] + [layer("other", "PointWiseV2")]


@pytest.mark.parametrize(
    ("total", "found", "same"),
    [
        (5, 1, True),
        (6, 1, False),
        (10, 2, True),
        (11, 2, False),
        (4, 0, False),
        (1, 1, True),
    ],
)
def test_a_fifth_of_the_names_makes_it_the_same_model(total: int, found: int, same: bool) -> None:
    build = Build(layers=named(found), files=["b.log"])
    with (
        contextlib.nullcontext()
        if same
        else raises(BuildLogError, f"check_same_model b.log: {found} {total}")
    ):
        check_same_model(model(total), build)


@pytest.mark.parametrize(
    ("build", "allowed"),
    [
        (Build(layers=[layer("a", "Myelin"), layer("b", "Myelin")]), True),
        (Build(layers=[layer("a", "Myelin"), layer("b")]), False),
        (Build(layers=[layer("b")]), False),
        (
            Build(layers=[layer("a", "Myelin")], trace=[LogEvent("QDQToCopy", "Running", "q")]),
            False,
        ),
        (Build(trace=[LogEvent("QDQToCopy", "Running", "q")]), False),
    ],
)
def test_an_engine_that_is_all_myelin_names_nothing(build: Build, allowed: bool) -> None:
    """Its blocks have no names of nodes; a layer or a pass line besides would have."""
    words = "check_same_model 0 3"
    with contextlib.nullcontext() if allowed else raises(BuildLogError, words):
        check_same_model(model(3), build)


@pytest.mark.parametrize(
    ("flags", "layers", "told"),
    [
        ("int8", [layer("a", inputs="FP32", outputs="FP32")], True),
        ("int8", [layer("a", inputs="INT8", outputs="FP32")], True),
        ("int8", [layer("a", inputs="INT8", outputs="INT8")], False),  # no float remainder
        ("int8", [layer("a", inputs="FP16", outputs="FP32")], False),
        ("", [layer("a", inputs="FP32", outputs="FP32")], False),  # not told what it may use
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
        ),  # weights, a second result
    ],
)
def test_fp32_is_a_matter_of_flags(flags: str, layers: list[BuiltLayer], told: bool) -> None:
    found = flag_notes(Build(precision_flags=frozenset(flags.split()), layers=layers))
    assert remarks(found) == [Remark.NO_FP16_FLAG] * told


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
def test_exit_codes(complete: bool, unknown: int, mismatch: bool, partial: bool, code: int) -> None:
    """1 says no whatever is missing; 2 says that the build leaves something open, unless that is allowed."""
    wrong = [Mismatch(MismatchKind.CONVOLUTION, "c", {}, {}, Difference.GONE)] if mismatch else []
    found = Verification(
        BuildFacts(BuildSource.LOG, complete=complete),
        ConvolutionCounts(5, 5 - unknown, unknown),
        mismatches=wrong,
    )
    assert exit_code(found, partial) == code


# Building a model and mapping the build back to it, with a builder that says what the test wants.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Building]:
    """What the builder was asked for; it builds as predicted, or refuses where the time limit is 1 s."""
    calls: list[Building] = []

    def build(model: str, how: Building) -> BuildResult:
        calls.append(how)
        if how.timeout == 1:
            return BuildResult("tensorrt", "refused", message="no")
        graph = load(MODEL)
        read = build_of(log_of(prediction(CASE)))
        return BuildResult(
            "tensorrt",
            "built",
            "8.5.2",
            model=graph,
            names={n.index: n.name for n in graph.nodes},
            build=read,
        )

    monkeypatch.setattr("qdqtool.builders.build", build)
    return calls


def test_the_layers_are_written(asked: list[Building], tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt", tmp_path)
    assert asked[0].keep_engine is False, "no engine is kept unless asked for"
    assert [n.precision for n in result.nodes] == [Precision.INT8] * 21
    assert result.node("Conv_22").inputs == (Precision.INT8,)
    assert result.node("Conv_34").inputs == (Precision.INT8, Precision.INT8), (
        "data, then the residual"
    )
    assert result.layers_path == tmp_path / "layers.json"
    text = (tmp_path / "layers.json").read_text()
    table = json.loads(text)
    assert text.startswith('{\n "builder"') and text.endswith("}\n"), "indented for people"
    assert (table["builder"], table["version"], len(table["nodes"])) == ("tensorrt", "8.5.2", 21)
    first = table["Layers"][0]
    assert (first["Name"], first["LayerType"]) == ("QuantizeLinear_2", "Reformat")
    assert first["Inputs"][0]["Dimensions"] == [1, 8, 8, 8]


def test_what_is_told_of_a_build(tmp_path: Path) -> None:
    """Paths where something was kept, null elsewhere; convolutions counted, those in INT8 among them."""
    rows = [
        BuiltNode(i, f"n{i}", "Conv", p)
        for i, p in enumerate((Precision.INT8, Precision.FP16, Precision.INT8))
    ]
    told = BuiltModel(
        "tensorrt-rtx", "built", "1.7.1", (86, 120), seconds=1.23456, nodes=rows
    ).as_json()
    assert (told["engine"], told["log"], told["layers"]) == (None, None, None)
    assert (told["targets"], told["seconds"]) == (["SM86", "SM120"], 1.235)
    assert told["summary"] == {"convolutions": 3, "int8": 2}
    kept = {name: tmp_path / name for name in ("engine_path", "log_path", "layers_path")}
    told = BuiltModel("trtexec", "built", **kept).as_json()  # type: ignore[arg-type]
    assert [told[n] for n in ("engine", "log", "layers")] == [str(p) for p in kept.values()]
    assert BuiltModel("trtexec", "built", nodes=rows).node("n1") is rows[1]
    with pytest.raises(KeyError):
        BuiltModel("trtexec", "built", nodes=rows).node("n3")


def test_pairs_and_what_was_not_built(asked: list[Building], tmp_path: Path) -> None:
    result = build_model(MODEL, "tensorrt", tmp_path, timeout=1)
    assert (result.status, result.nodes, result.layers_path) == ("refused", [], None)
    assert list(tmp_path.iterdir()) == []
    result = build_model(MODEL, "tensorrt")
    assert len(result.nodes) == 21 and result.layers_path is None
    told = prediction(CASE)
    first, second, third = told.convolutions[:3]
    float_one = BuiltNode(second.index, second.name, "Conv", Precision.FP16)
    rows = [
        Pair(first, BuiltNode(first.index, first.name, "Conv", first.precision)),
        Pair(second, float_one),
    ]
    result = of_pairs(told, [*rows, Pair(third, None)], BuildFacts(BuildSource.LOG))
    assert result.convolutions == ConvolutionCounts(3, 1, 1, (third.name,))
    assert [m.name for m in result.mismatches] == [second.name]


def test_a_build_of_tensorrt_rtx_is_predicted_for_the_gpu_that_was_named() -> None:
    g = Graph()
    model = g.model(g.conv(g.conv(g.input(1, 16, 16, 16), "a", 16), "b", 16, scale=0.05))
    build = Build(tensorrt="1.7.1", layers=[BuiltLayer("a")])
    for gpu, int8, cc in ((None, 2, "8.6"), ("T4", 0, "7.5"), ("RTX 3060", 2, "8.6")):
        found = verify(model, build, target="rtx1.7", gpu=gpu)
        assert found.prediction.summary()["int8"] == int8 and found.as_json()[
            "compute_capabilities"
        ] == [cc]


@pytest.mark.parametrize(
    ("said", "capabilities"),
    [
        (Build(gpu={"Compute Capability": "7.5"}), ["7.5"]),
        (Build(device="Tesla T4"), ["7.5"]),
        (Build(targets=(75, 86)), ["7.5", "8.6"]),
        (Build(device="H100 SXM"), ["9.0"]),
        (Build(), ["8.6"]),
    ],
)
def test_a_build_of_tensorrt_rtx_is_predicted_for_what_it_says_it_is_for(
    said: Build, capabilities: list[str]
) -> None:
    """Also where ours cannot build for it: there is a build."""
    target, _ = target_of(replace(said, is_rtx=True), None, Machine())
    assert target.told == capabilities and target.name == RTX.name
    assert target_of(said, None, Machine(gpu="V100"))[0].told == []
    with raises(QdqtoolError, "Target.built_for 7.0 V100"):
        target_of(Build(is_rtx=True), None, Machine(gpu="V100"))


def test_the_gpu_where_a_build_ran_is_not_what_it_was_built_for() -> None:
    """The user's words are for times; of a table that states its targets, these hold, and what a log states exists."""
    both = Build(is_rtx=True, targets=(75, 86))
    assert target_of(both, None, Machine(gpu="RTX 3060"))[0].told == ["7.5", "8.6"]
    with raises(QdqtoolError, "target_of V100 7.0 8.6"):
        target_of(both, None, Machine(gpu="V100"))
    with raises(QdqtoolError, "find RTX 99999"):
        target_of(both, None, Machine(gpu="RTX 99999"))
    stated = {"Compute Capability": "8.7"}
    assert target_of(Build(is_rtx=True, gpu=stated), None, Machine(gpu="Orin NX"))[0].told == [
        "8.7"
    ]
    with raises(QdqtoolError, "Target.built_for 7.0 V100"):
        target_of(Build(is_rtx=True, gpu=stated), None, Machine(gpu="V100"))
    # The log's capability is not the table's of that name, and it states neither clock nor memory.
    odd = Build(
        is_rtx=True,
        device="NVIDIA GeForce RTX 3060",
        gpu={"Compute Capability": "8.9", "SMs": "28"},
    )
    assert target_of(odd, None, Machine())[0].told == ["8.9"] and gpu_of(odd) is None
