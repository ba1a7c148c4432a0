import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool import Precision, builders
from qdqtool.builders import trtexec
from qdqtool.builders.compiler_process import CompilerProcess, print_license_notice
from qdqtool.builders.run import choose_log_names, prepare_model_file
from qdqtool.buildlog.read import read_build
from qdqtool.errors import BuilderError, ModelError, QdqtoolError
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import load
from qdqtool.trt.rtx.predict import predict_rtx
from qdqtool.trt.targets import RTX
from qdqtool.verification.local_build import build_model, is_status_as_predicted, pair_convolutions
from tests.builders.models import NASTY, needs_compiler, saved, two_convolutions
from tests.errors import has
from tools.fuzz.net import Net

PACKAGE = """
import enum, json, os
__version__ = "8.5.3"
class ILogger:
    def __init__(self): pass
class NetworkDefinitionCreationFlag: EXPLICIT_BATCH = 0; STRONGLY_TYPED = 1
class ProfilingVerbosity: DETAILED = 2
class LayerInformationFormat: JSON = 1
class BuilderFlag: INT8 = "int8"; FP16 = "fp16"
class Network:
    num_inputs = 0
class Config:
    def __init__(self): self.flags = set()
    def set_flag(self, flag): self.flags.add(flag)
class Plan:
    nbytes = 4
    def __bytes__(self): return b"plan"
class Builder:
    def __init__(self, logger):
        if os.environ.get("FAKE") == "no gpu": raise TypeError("pybind11::init(): factory function returned nullptr")
        self.logger = logger
    def create_network(self, flags):
        assert flags == 1, "explicit batch"
        return Network()
    def create_builder_config(self): self.config = Config(); return self.config
    def build_serialized_network(self, network, config):
        assert config.flags == {"int8", "fp16"}
        if os.environ.get("FAKE") == "crash": os.abort()
        self.logger.log(4, "Original: 4 layers")
        return memoryview(b"plan")
class Error:
    def desc(self): return "Assertion failed: no"
class OnnxParser:
    def __init__(self, network, logger): pass
    num_errors = 1
    def get_error(self, i): return Error()
    def parse_from_file(self, path): return os.environ.get("FAKE") != "refuse"
class Inspector:
    def get_engine_information(self, form):
        tensor = lambda n, t: {"Name": n, "Dimensions": [1, 8], "Format/Datatype": t}
        return json.dumps({"Layers": [
            {"Name": "w + QuantizeLinear_12 + first + Relu_18", "LayerType": "CaskConvolution",
             "Inputs": [tensor("x", "Row major Int8 format")], "Outputs": [tensor("y", "Row major Int8 format")]},
            {"Name": "second", "LayerType": "CaskConvolution", "Inputs": [tensor("y", "Row major linear FP16 format")],
             "Outputs": [tensor("z", "Row major linear FP16 format")]}], "Bindings": ["x", "z"]})
class Engine:
    def create_engine_inspector(self): return Inspector()
class Runtime:
    def __init__(self, logger): pass
    def deserialize_cuda_engine(self, plan): return Engine()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def model(site: Path, tmp_path: Path) -> str:
    (site / "tensorrt.py").write_text(textwrap.dedent(PACKAGE))
    return saved(two_convolutions(), tmp_path)


def test_build_with_tensorrt(model: str, tmp_path: Path) -> None:
    result = build_model(model, "tensorrt", tmp_path / "out", keep_engine=True)
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: n.precision for n in result.nodes} == {"first": "INT8", "second": "FP16"}
    assert result.engine_path.read_bytes() == b"plan"


@pytest.mark.parametrize(("behavior", "status"), [("refuse", "refused"), ("crash", "crashed")])
def test_build_with_tensorrt_that_fails(
    behavior: str, status: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", behavior)
    assert builders.build(model, "tensorrt").status == status


def test_build_with_tensorrt_needs_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "no gpu")
    with pytest.raises(BuilderError, match="GPU", check=has("builder-unavailable")):
        builders.build(model, "tensorrt")


@needs_compiler
def test_build_with_rtx_writes_log_layers_and_engine(tmp_path: Path) -> None:
    path, out = saved(two_convolutions(), tmp_path), tmp_path / "new" / "out"
    result = build_model(path, output=out, keep_engine=True)
    assert (result.status, result.version, result.targets) == ("built", "1.7.1.116", (86,))
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP32"}
    assert sorted(p.name for p in out.iterdir()) == ["build.log", "engine.plan", "layers.json"]
    assert (out / "engine.plan").stat().st_size > 1000
    table = json.loads((out / "layers.json").read_text())
    assert [n["precision"] for n in table["nodes"]] == ["INT8", "FP32"]
    for name in ("build.log", "layers.json"):
        layers = [x for x in read_build(out / name).layers if x.type == "correlation"]
        inputs = {n: layer.input_precision for layer in layers for n in layer.onnx_names}
        assert (inputs["first"], inputs["second"]) == (Precision.INT8, Precision.FP32)


@needs_compiler
@pytest.mark.parametrize("names", [("", ""), ("same", "same"), (NASTY, "two words")])
def test_build_with_rtx_maps_unusual_names(names: tuple[str, str], tmp_path: Path) -> None:
    path = saved(two_convolutions(*names), tmp_path)
    result = build_model(path, output=tmp_path / "out")
    convs = [n for n in load(path).nodes if n.op == "Conv"]
    assert [n.name for n in result.nodes] == [c.name for c in convs]
    assert [str(n.precision) for n in result.nodes] == ["INT8", "FP32"]


@needs_compiler
def test_build_with_rtx_rejection_has_its_message(tmp_path: Path) -> None:
    path = saved(two_convolutions(bad_zero_point=True), tmp_path)
    result = build_model(path)
    assert result.status == "refused"
    assert "shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported" in result.message
    assert is_status_as_predicted(predict_rtx(load(path)), result)


@needs_compiler
def test_build_with_rtx_after_a_crash(tmp_path: Path) -> None:
    net = Net()
    x, scale, zero = net.input((1, 8, 8, 8)), net.input(()), net.const(np.int8(0))
    q = net.op("QuantizeLinear", x, scale, zero)
    bad = net.model(net.conv(net.op("DequantizeLinear", q, scale, zero), 8))
    (tmp_path / "bad").mkdir()
    result = build_model(saved(bad, tmp_path / "bad"))
    assert result.status == "crashed" and result.message
    assert is_status_as_predicted(predict_rtx(load(bad)), result)
    with CompilerProcess() as process:
        request = {"model": saved(bad, tmp_path / "bad"), "log": str(tmp_path / "log"), "sm": [86]}
        assert process.send_request(request, 60)["status"] == "crashed"
        request["model"] = saved(two_convolutions(), tmp_path)
        assert process.send_request(request, 60)["status"] == "built"


@needs_compiler
def test_build_with_rtx_for_turing_is_float(tmp_path: Path) -> None:
    path = saved(two_convolutions(), tmp_path)
    turing = build_model(path, sm=[75, 86])
    assert {str(n.precision) for n in turing.nodes} == {"FP32"}
    both = replace(RTX, capabilities=(75, 86))
    assert [p.agrees for p in pair_convolutions(predict_rtx(load(path), both), turing.nodes)] == [
        True,
        True,
    ]
    assert [
        p.predicted.name
        for p in pair_convolutions(predict_rtx(load(path)), turing.nodes)
        if not p.agrees
    ] == ["first"]


SHAPES = [[1, 8, 8, 8], [2, 8, 8, 8], [4, 8, 8, 8]]


@needs_compiler
@pytest.mark.parametrize(
    ("shapes", "status"),
    [(None, "built"), (SHAPES, "built"), (SHAPES[::-1], "refused")],
    ids=["default", "ascending", "descending"],
)
def test_build_with_rtx_and_dynamic_shapes(
    shapes: list[list[int]] | None, status: str, tmp_path: Path
) -> None:
    model = two_convolutions()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    profile = None if shapes is None else {model.graph.input[0].name: shapes}
    assert builders.build(saved(model, tmp_path), shapes=profile).status == status


@pytest.fixture
def no_trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(trtexec, "TRTEXEC_PATHS", ())


@pytest.mark.usefixtures("no_trtexec")
@pytest.mark.parametrize(
    ("options", "code", "parameter", "detail"),
    [
        ({"builder": "tvm"}, "unknown-choice", "builder", "'tvm'.*tensorrt-rtx"),
        ({"sm": [87]}, "unknown-choice", "sm", "SM87.*SM86"),
        ({"keep_engine": True}, "missing-argument", "output", "folder"),
        ({"builder": "trtexec", "output": "\0"}, "wrong-file-name", "output", r"'\\x00'"),
        ({"model": "none.onnx"}, "file-missing", "", "none.onnx"),
        ({"builder": "trtexec", "sm": [86]}, "option-conflict", "sm", "trtexec"),
        ({"builder": "trtexec"}, "missing-program", "builder", "PATH"),
        ({"timeout": 0}, "out-of-range", "timeout", "`timeout=0`"),
        ({"timeout": 1e400}, "out-of-range", "timeout", "`timeout=inf`"),
    ],
)
def test_build_rejects_arguments(
    options: dict[str, Any], code: str, parameter: str, detail: str, tmp_path: Path
) -> None:
    with pytest.raises(QdqtoolError, match=detail, check=has(code, parameter=parameter)):
        builders.build(**{"model": saved(two_convolutions(), tmp_path), **options})


def test_build_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BuilderError, match=r"qdqtool\[rtx\]", check=has("missing-package")):
        builders.build(saved(two_convolutions(), tmp_path))


@pytest.mark.parametrize(
    ("source", "timeout", "status"),
    [("import time; time.sleep(3600)", 0.5, "timeout"), ("import sys; sys.exit(3)", 60, "crashed")],
)
def test_compiler_process_whose_compiler_does_not_answer(
    source: str, timeout: float, status: str, site: Path
) -> None:
    (site / "compiler.py").write_text(source)
    with CompilerProcess("compiler") as process:
        assert process.send_request({}, timeout)["status"] == status


def test_compiler_process_whose_compiler_cannot_be_loaded(site: Path) -> None:
    (site / "compiler.py").write_text("raise ImportError('no driver')")
    with (
        CompilerProcess("compiler") as process,
        pytest.raises(BuilderError, match="no driver", check=has("builder-unavailable")),
    ):
        process.send_request({}, 60)


HELP_80 = (
    "--onnx --int8 --fp16 --verbose --buildOnly --nvtxMode=[default|verbose|none] --saveEngine"
)
HELP_85 = (
    HELP_80
    + " --profilingVerbosity=mode ::= layer_names_only|detailed|none --dumpLayerInfo --exportLayerInfo"
)
HELP_10 = (
    HELP_85.replace("--buildOnly", "").replace("--nvtxMode", "")
    + " --skipInference --stronglyTyped"
)


@pytest.mark.parametrize(
    ("text", "expected", "absent"),
    [
        (
            HELP_80,
            {"--int8", "--fp16", "--buildOnly", "--nvtxMode=verbose"},
            ("--dumpLayerInfo", "--profilingVerbosity"),
        ),
        (
            HELP_85,
            {"--int8", "--buildOnly", "--profilingVerbosity=detailed", "--dumpLayerInfo"},
            ("--skipInference",),
        ),
        (
            HELP_10,
            {"--int8", "--fp16", "--skipInference"},
            ("--buildOnly", "--nvtxMode", "--stronglyTyped"),
        ),
        (
            HELP_10.replace("--int8", "").replace("--fp16", ""),
            {"--skipInference", "--dumpLayerInfo"},
            ("--int8", "--fp16", "--buildOnly"),
        ),
    ],
)
def test_trtexec_flags_of_a_version(text: str, expected: set[str], absent: tuple[str, ...]) -> None:
    flags = trtexec.trtexec_flags(text, Path("m.onnx"), Path("l.json"), None, {})
    assert expected <= set(flags) and not [flag for flag in flags if flag.startswith(absent)]


def test_trtexec_flags_for_shapes_and_engine() -> None:
    shapes = {"images": [[1, 3, 32, 32], [1, 3, 64, 64], [2, 3, 64, 64]]}
    flags = trtexec.trtexec_flags(HELP_85, Path("m.onnx"), Path("l.json"), Path("e.plan"), shapes)
    assert {"--maxShapes=images:2x3x64x64", "--saveEngine=e.plan"} <= set(flags)


@pytest.fixture
def write_trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(script: str) -> None:
        (tmp_path / "trtexec").write_text(
            f"#!/bin/sh\ncase \"$1\" in --help) echo '{HELP_85}'; exit 0;; esac\n"
            f"echo '&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec'\n{script}\n"
        )
        (tmp_path / "trtexec").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return write


LISTING = """cat <<'END'
[01/01/2026-00:00:00] [V] [TRT] Engine Layer Information:
Layer(CaskConvolution): w + QuantizeLinear_12 + first + Relu_18, Tactic: 0x1, x[Int8(1,8,8,8)] -> y[Int8(1,8,8,8)]
Layer(CaskConvolution): second, Tactic: 0x2, y[Float(1,8,8,8)] -> z[Float(1,4,8,8)]
&&&& PASSED TensorRT.trtexec [TensorRT v8503] # trtexec
END"""


def test_build_with_trtexec(write_trtexec: Callable[[str], None], tmp_path: Path) -> None:
    write_trtexec(LISTING)
    result = build_model(to_graphsurgeon(two_convolutions()), "trtexec", tmp_path / "out")
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP32"}
    assert "RUNNING" in result.log_path.read_text() and result.layers_path.exists()


ERROR = "[01/01/2026-00:00:00] [E] [TRT] Assertion failed: scaleAllPositive"


@pytest.mark.parametrize(
    ("script", "timeout", "status", "message"),
    [
        (f"echo '{ERROR}'; exit 1", 60, "refused", "Assertion failed: scaleAllPositive"),
        ("kill -SEGV $$", 60, "crashed", "trtexec was stopped by signal 11"),
        ("sleep 3600 & wait", 0.5, "timeout", "stopped after 0.5 s"),
    ],
    ids=["refused", "crashed", "timeout"],
)
def test_build_with_trtexec_that_fails(
    script: str,
    timeout: float,
    status: str,
    message: str,
    write_trtexec: Callable[[str], None],
    tmp_path: Path,
) -> None:
    write_trtexec(script)
    result = builders.build(saved(two_convolutions(), tmp_path), "trtexec", timeout=timeout)
    assert (result.status, result.message) == (status, message)


def test_log_names_are_the_names_of_the_model(tmp_path: Path) -> None:
    path = saved(two_convolutions("/model.0/conv/Conv", "b"), tmp_path)
    model = load(path)
    names = choose_log_names(model)
    assert [names[n.index] for n in model.nodes] == [n.proto.name for n in model.nodes]
    assert prepare_model_file(model, names, tmp_path / "unused") == Path(path)


def test_log_names_of_equal_names_are_outputs(tmp_path: Path) -> None:
    model = load(saved(two_convolutions("same", "same"), tmp_path))
    convs = [n for n in model.nodes if n.op == "Conv"]
    assert [choose_log_names(model)[n.index] for n in convs] == [n.output for n in convs]


@pytest.mark.parametrize(
    "name",
    ["", NASTY, "two words", "x" * 300, "[ONNX Layer: a]"],
    ids=["empty", "separators", "space", "long", "metadata"],
)
def test_with_log_names_writes_a_copy_with_other_names(name: str, tmp_path: Path) -> None:
    """A log cannot contain these names."""
    path = saved(two_convolutions(name, "second"), tmp_path)
    before, model = Path(path).read_bytes(), load(path)
    names, work = choose_log_names(model), tmp_path / "work"
    work.mkdir()
    copy, original = onnx.load(prepare_model_file(model, names, work)), onnx.load(path)
    assert [n.name for n in copy.graph.node] == [names[n.index] for n in model.nodes]
    assert len({n.name for n in copy.graph.node}) == len(copy.graph.node)
    assert all(n.name and "\n" not in n.name and "[" not in n.name for n in copy.graph.node)
    assert Path(path).read_bytes() == before
    for node in (*copy.graph.node, *original.graph.node):
        node.name = ""
    assert copy.graph == original.graph


def test_with_log_names_needs_the_weight_file(tmp_path: Path) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(
        two_convolutions("a", "b"),
        path,
        save_as_external_data=True,
        location="outside.bin",
        size_threshold=0,
    )
    model = load(path)
    assert prepare_model_file(model, choose_log_names(model), tmp_path / "unused") == path
    (tmp_path / "outside.bin").unlink()
    with pytest.raises(ModelError, match=r"outside\.onnx.*outside\.bin"):
        prepare_model_file(load(path), choose_log_names(model), tmp_path / "unused")


def test_print_once_prints_once_for_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert print_license_notice() and "NVIDIA's license" in capsys.readouterr().err
    assert not print_license_notice() and capsys.readouterr().err == ""


def test_print_once_prints_each_time_if_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert print_license_notice() and print_license_notice()
