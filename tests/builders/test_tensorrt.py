"""The worker for the tensorrt package, with a stand-in for the package: there is no GPU where tests run."""

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool import builders
from qdqtool.base.records import replaced
from qdqtool.builders import child as child_module
from qdqtool.builders import run as runs
from qdqtool.builders.child import Child, is_installed, print_once
from qdqtool.builders.run import log_names, with_log_names
from qdqtool.buildlog.read import read_build
from qdqtool.errors import BuilderError, ModelError, QdqtoolError
from qdqtool.model.modelfile import load
from qdqtool.trt.rtx.predict import predict_rtx
from qdqtool.trt.targets import RTX
from qdqtool.types import Precision
from qdqtool.verification.build_model import build_model, compare, status_agrees
from tests.builders.models import NASTY, saved, two_convolutions
from tests.raising import raises
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
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    home = tmp_path / "site"
    home.mkdir()
    (home / "tensorrt.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("PYTHONPATH", str(home))
    return saved(two_convolutions(), tmp_path)


def test_a_build(model: str, tmp_path: Path) -> None:
    result = build_model(model, "tensorrt", tmp_path / "out", keep_engine=True)
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: n.precision for n in result.nodes} == {"first": "INT8", "second": "FP16"}
    assert result.engine_path is not None and result.engine_path.read_bytes() == b"plan"


def test_refusal_and_crash(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, status in (("refuse", "refused"), ("crash", "crashed")):
        monkeypatch.setenv("FAKE", case)
        assert builders.build(model, "tensorrt").status == status
    monkeypatch.setenv("FAKE", "no gpu")
    with raises(BuilderError, "Child.ask GPU"):
        builders.build(model, "tensorrt")


needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


@needs_compiler
def test_a_build_leaves_log_layers_and_engine(tmp_path: Path) -> None:
    path = saved(two_convolutions(), tmp_path)
    out = tmp_path / "new" / "out"
    result = build_model(path, output=out, keep_engine=True)
    assert (result.status, result.version, result.targets) == ("built", "1.7.1.116", (86,))
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP32"}
    assert sorted(p.name for p in out.iterdir()) == ["build.log", "engine.plan", "layers.json"]
    assert (out / "engine.plan").stat().st_size > 1000
    table = json.loads((out / "layers.json").read_text())
    assert [n["precision"] for n in table["nodes"]] == ["INT8", "FP32"]
    # Both files are what the readers of real builds take, and they say the same.
    for name in ("build.log", "layers.json"):
        build = read_build(str(out / name))
        found = {n: x for x in build.layers if x.type == "correlation" for n in x.onnx_names}
        assert found["first"].input_precision == Precision.INT8
        assert found["second"].input_precision == Precision.FP32


@needs_compiler
@pytest.mark.parametrize("names", [("", ""), ("same", "same"), (NASTY, "two words")])
def test_odd_names_are_mapped_back(names: tuple[str, str], tmp_path: Path) -> None:
    path = saved(two_convolutions(*names), tmp_path)
    result = build_model(path, output=tmp_path / "out")
    convs = [n for n in load(path).nodes if n.op == "Conv"]
    assert [n.name for n in result.nodes] == [c.name for c in convs]
    assert [str(n.precision) for n in result.nodes] == ["INT8", "FP32"]


@needs_compiler
def test_a_refusal_carries_the_compilers_words(tmp_path: Path) -> None:
    path = saved(two_convolutions(bad_zero_point=True), tmp_path)
    result = build_model(path)
    assert result.status == "refused"
    assert "shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported" in result.message
    assert status_agrees(predict_rtx(load(path)), result)


@needs_compiler
def test_a_crash_is_an_answer_and_the_next_build_works(tmp_path: Path) -> None:
    net = Net()
    x, scale, zero = net.input((1, 8, 8, 8)), net.input(()), net.const(np.int8(0))
    q = net.op("QuantizeLinear", x, scale, zero)
    bad = net.model(net.conv(net.op("DequantizeLinear", q, scale, zero), 8))
    (tmp_path / "bad").mkdir()
    result = build_model(saved(bad, tmp_path / "bad"))
    assert result.status == "crashed" and result.message
    assert status_agrees(predict_rtx(load(bad)), result)
    with Child() as child:
        request = {"model": saved(bad, tmp_path / "bad"), "log": str(tmp_path / "log"), "sm": [86]}
        assert child.ask(request, 60)["status"] == "crashed"
        assert (
            child.ask({**request, "model": saved(two_convolutions(), tmp_path)}, 60)["status"]
            == "built"
        )


@needs_compiler
def test_targets(tmp_path: Path) -> None:
    path = saved(two_convolutions(), tmp_path)
    turing = build_model(path, sm=[75, 86])
    assert {str(n.precision) for n in turing.nodes} == {"FP32"}
    both = replaced(RTX, capabilities=(75, 86))
    assert [p.agrees for p in compare(predict_rtx(load(path), both), turing)] == [True, True]
    assert [p.predicted.name for p in compare(predict_rtx(load(path)), turing) if not p.agrees] == [
        "first"
    ]


@needs_compiler
def test_dynamic_shapes(tmp_path: Path) -> None:
    model = two_convolutions()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    path = saved(model, tmp_path)
    shapes = [[1, 8, 8, 8], [2, 8, 8, 8], [4, 8, 8, 8]]
    for given, status in ((None, "built"), (shapes, "built"), (shapes[::-1], "refused")):
        result = builders.build(
            path, shapes=None if given is None else {model.graph.input[0].name: given}
        )
        assert result.status == status


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"builder": "tvm"}, "build 'tvm' tensorrt-rtx"),
        ({"sm": [87]}, "build SM87 SM86"),
        ({"keep_engine": True}, "build folder"),
        ({"timeout": 0}, "seconds `timeout 0"),
        ({"timeout": 1e400}, "seconds `timeout inf"),
        ({"builder": "trtexec", "output": "\0"}, "run_one '\\x00'"),
        ({"model": "none.onnx"}, "build none.onnx"),
        ({"builder": "trtexec", "sm": [86]}, "build trtexec"),
        ({"builder": "trtexec"}, "build_with_trtexec PATH"),
    ],
)
def test_bad_requests(
    options: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runs, "_USUAL", ())
    with raises(QdqtoolError, told):
        builders.build(**{"model": saved(two_convolutions(), tmp_path), **options})


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "is_installed", lambda package: False)
    with raises(BuilderError, "Child.__init__ qdqtool[rtx]"):
        builders.build(saved(two_convolutions(), tmp_path))


def test_a_stuck_compiler_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys, time\nsys.stdin.readline()\ntime.sleep(60)\n")
    monkeypatch.setattr(child_module, "WORKER", worker)
    monkeypatch.setattr(child_module, "is_installed", lambda package: True)
    with Child() as child:
        assert child.ask({}, 0.5) == {"status": "timeout"}
        worker.write_text("import sys\nsys.stdin.readline()\nsys.exit(3)\n")
        assert child.ask({}, 20)["status"] == "crashed"
        answer = json.dumps({"status": "unavailable", "message": "no GPU"})
        worker.write_text(f"import sys\nsys.stdin.readline()\nprint({answer!r})\n")
        with pytest.raises(BuilderError, match="no GPU"):
            child.ask({}, 20)


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
HELP_11 = HELP_10.replace("--int8", "").replace("--fp16", "")


@pytest.mark.parametrize(
    ("text", "wanted", "unwanted"),
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
        (HELP_11, {"--skipInference", "--dumpLayerInfo"}, ("--int8", "--fp16", "--buildOnly")),
    ],
)
def test_flags_are_those_of_the_version(
    text: str, wanted: set[str], unwanted: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = runs.flags(text, tmp_path / "m.onnx", tmp_path / "l.json", None, {})
    assert wanted <= set(chosen)
    assert not [f for f in chosen if f.startswith(unwanted)]


def test_shapes_and_engine(tmp_path: Path) -> None:
    shapes = {"images": [[1, 3, 32, 32], [1, 3, 64, 64], [2, 3, 64, 64]]}
    chosen = runs.flags(
        HELP_85, tmp_path / "m.onnx", tmp_path / "l.json", tmp_path / "e.plan", shapes
    )
    assert {"--maxShapes=images:2x3x64x64", f"--saveEngine={tmp_path / 'e.plan'}"} <= set(chosen)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec", "8.5.3"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] #", "8.6.1"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9] #", "10.13.3"),
        ("nothing", ""),
    ],
)
def test_version(line: str, version: str) -> None:
    assert runs.version_of(line.encode()) == version


def fake(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trtexec that says what ``body`` makes it say."""
    script = folder / "trtexec"
    script.write_text(
        f"#!/bin/sh\ncase \"$1\" in --help) echo '{HELP_85}'; exit 0;; esac\n"
        f"echo '&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec'\n{body}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


LISTING = """cat <<'END'
[01/01/2026-00:00:00] [V] [TRT] Engine Layer Information:
Layer(CaskConvolution): w + QuantizeLinear_12 + first + Relu_18, Tactic: 0x1, x[Int8(1,8,8,8)] -> y[Int8(1,8,8,8)]
Layer(CaskConvolution): second, Tactic: 0x2, y[Float(1,8,8,8)] -> z[Float(1,4,8,8)]
&&&& PASSED TensorRT.trtexec [TensorRT v8503] # trtexec
END"""


def test_a_build_trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, LISTING, monkeypatch)
    result = build_model(saved(two_convolutions(), tmp_path), "trtexec", tmp_path / "out")
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP32"}
    assert result.log_path is not None and "RUNNING" in result.log_path.read_text()
    assert result.layers_path is not None and result.layers_path.exists()


def test_a_refusal_a_crash_and_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(two_convolutions(), tmp_path)
    fake(
        tmp_path,
        "echo '[01/01/2026-00:00:00] [E] [TRT] Assertion failed: scaleAllPositive'; exit 1",
        monkeypatch,
    )
    result = builders.build(path, "trtexec")
    assert (result.status, result.message) == ("refused", "Assertion failed: scaleAllPositive")
    fake(tmp_path, "kill -SEGV $$", monkeypatch)
    assert builders.build(path, "trtexec").status == "crashed"
    fake(tmp_path, "sleep 60 & wait", monkeypatch)
    start = time.monotonic()
    assert (
        builders.build(path, "trtexec", timeout=0.5).status == "timeout"
        and time.monotonic() - start < 10
    )


def test_names_and_copies(tmp_path: Path) -> None:
    path = saved(two_convolutions("/model.0/conv/Conv", "b"), tmp_path)
    model = load(path)
    names = log_names(model)
    assert [names[n.index] for n in model.nodes] == [n.proto.name for n in model.nodes]
    assert with_log_names(model, names, tmp_path / "unused") == Path(path)
    model = load(saved(two_convolutions("same", "same"), tmp_path))
    convs = [n for n in model.nodes if n.op == "Conv"]
    assert [log_names(model)[n.index] for n in convs] == [n.output for n in convs]


@pytest.mark.parametrize("bad", ["", NASTY, "two words", "x" * 300, "[ONNX Layer: a]"])
def test_names_that_a_log_cannot_carry_are_replaced_in_a_copy(bad: str, tmp_path: Path) -> None:
    path = saved(two_convolutions(bad, "second"), tmp_path)
    before = Path(path).read_bytes()
    model = load(path)
    names = log_names(model)
    work = tmp_path / "work"
    work.mkdir()
    copy, original = onnx.load(with_log_names(model, names, work)), onnx.load(path)
    assert [n.name for n in copy.graph.node] == [names[n.index] for n in model.nodes]
    assert len({n.name for n in copy.graph.node}) == len(copy.graph.node)
    assert all(n.name and "\n" not in n.name and "[" not in n.name for n in copy.graph.node)
    assert Path(path).read_bytes() == before
    for node in (*copy.graph.node, *original.graph.node):
        node.name = ""
    assert copy.graph == original.graph


def test_missing_weight_file_is_told_before_the_build(tmp_path: Path) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(
        two_convolutions("a", "b"),
        path,
        save_as_external_data=True,
        location="outside.bin",
        size_threshold=0,
    )
    model = load(path)
    assert with_log_names(model, log_names(model), tmp_path / "unused") == path
    (tmp_path / "outside.bin").unlink()
    with raises(ModelError, "require_weights outside.onnx outside.bin"):
        with_log_names(load(path), log_names(model), tmp_path / "unused")


def test_said_once_for_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert print_once() and "NVIDIA's licence" in capsys.readouterr().err
    assert not print_once() and capsys.readouterr().err == ""


@pytest.mark.parametrize("refuses", [False, True])
def test_said_each_time_where_nothing_can_be_kept(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder that is a file, or another user's: asking for the mark is refused, not answered with no."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    if refuses:
        monkeypatch.setattr("os.stat", refused)
        monkeypatch.setattr("pathlib.Path.mkdir", refused)
    assert print_once() and print_once()
