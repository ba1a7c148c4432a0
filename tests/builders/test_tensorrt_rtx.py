from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qdqtool import builders
from qdqtool.builders import child as child_module
from qdqtool.builders.child import Child, is_installed
from qdqtool.buildlog.read import read_build
from qdqtool.errors import BuilderError, ModelError
from qdqtool.modelfile import load
from qdqtool.rtx.predict import predict_rtx
from qdqtool.types import Precision
from qdqtool.verification.build_model import build_model
from qdqtool.verification.pairs import compare, status_agrees, verify_rtx
from tests.builders.models import NASTY, saved, two_convolutions
from tests.fuzz.net import Net

needs_compiler = pytest.mark.skipif(not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")


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
    assert (result.status, result.message) == ("crashed", "the compiler died of signal 11 (SIGSEGV)")
    assert status_agrees(predict_rtx(load(bad)), result)
    with Child() as child:
        request = {"model": saved(bad, tmp_path / "bad"), "log": str(tmp_path / "log"), "sm": [86]}
        assert child.ask(request, 60)["status"] == "crashed"
        assert child.ask({**request, "model": saved(two_convolutions(), tmp_path)}, 60)["status"] == "built"


@needs_compiler
def test_targets(tmp_path: Path) -> None:
    path = saved(two_convolutions(), tmp_path)
    turing = build_model(path, sm=[75, 86])
    assert {str(n.precision) for n in turing.nodes} == {"FP32"}
    prediction = predict_rtx(load(path), sm=(75, 86))
    assert [p.agrees for p in compare(prediction, turing)] == [True, True]
    assert verify_rtx(prediction, turing) == []
    assert [p.predicted.name for p in verify_rtx(predict_rtx(load(path)), turing)] == ["first"]


@needs_compiler
def test_dynamic_shapes(tmp_path: Path) -> None:
    model = two_convolutions()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    path = saved(model, tmp_path)
    name = model.graph.input[0].name
    assert builders.build(path).status == "built"
    assert builders.build(path, shapes={name: [[1, 8, 8, 8], [2, 8, 8, 8], [4, 8, 8, 8]]}).status == "built"
    assert builders.build(path, shapes={name: [[4, 8, 8, 8], [2, 8, 8, 8], [1, 8, 8, 8]]}).status == "refused"


def test_bad_requests(tmp_path: Path) -> None:
    path = saved(two_convolutions(), tmp_path)
    with pytest.raises(BuilderError, match="unknown builder 'tvm'"):
        builders.build(path, "tvm")
    with pytest.raises(BuilderError, match="cannot build for SM87"):
        builders.build(path, sm=[87])
    with pytest.raises(BuilderError, match="needs a folder"):
        builders.build(path, keep_engine=True)
    with pytest.raises(BuilderError, match="not positive"):
        builders.build(path, timeout=0)
    with pytest.raises(ModelError, match="no such file"):
        builders.build(tmp_path / "none.onnx")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "is_installed", lambda package: False)
    with pytest.raises(BuilderError, match=r"pip install 'qdqtool\[rtx\]'"):
        builders.build(saved(two_convolutions(), tmp_path))


def test_a_stuck_compiler_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys, time\nsys.stdin.readline()\ntime.sleep(60)\n")
    monkeypatch.setattr(child_module, "WORKER", worker)
    monkeypatch.setattr(child_module, "is_installed", lambda package: True)
    with Child() as child:
        assert child.ask({}, 0.5) == {"status": "timeout"}
        worker.write_text("import sys\nsys.stdin.readline()\nsys.exit(3)\n")
        assert child.ask({}, 20) == {"status": "crashed", "message": "the compiler's process ended with code 3"}
        answer = json.dumps({"status": "unavailable", "message": "no GPU"})
        worker.write_text(f"import sys\nsys.stdin.readline()\nprint({answer!r})\n")
        with pytest.raises(BuilderError, match="no GPU"):
            child.ask({}, 20)
