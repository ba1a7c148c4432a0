from __future__ import annotations

import time
from pathlib import Path

import pytest

from qdqtool import builders
from qdqtool.builders import trtexec
from qdqtool.errors import BuilderError
from qdqtool.verification.build_model import build_model
from tests.builders.models import saved, two_convolutions

HELP_80 = "--onnx --int8 --fp16 --verbose --buildOnly --nvtxMode=[default|verbose|none] --saveEngine"
HELP_85 = HELP_80 + " --profilingVerbosity=mode ::= layer_names_only|detailed|none --dumpLayerInfo --exportLayerInfo"
HELP_10 = HELP_85.replace("--buildOnly", "").replace("--nvtxMode", "") + " --skipInference --stronglyTyped"
HELP_11 = HELP_10.replace("--int8", "").replace("--fp16", "")


@pytest.mark.parametrize(("text", "wanted", "unwanted"), [
    (HELP_80, {"--int8", "--fp16", "--buildOnly", "--nvtxMode=verbose"}, ("--dumpLayerInfo", "--profilingVerbosity")),
    (HELP_85, {"--int8", "--buildOnly", "--profilingVerbosity=detailed", "--dumpLayerInfo"}, ("--skipInference",)),
    (HELP_10, {"--int8", "--fp16", "--skipInference"}, ("--buildOnly", "--nvtxMode", "--stronglyTyped")),
    (HELP_11, {"--skipInference", "--dumpLayerInfo"}, ("--int8", "--fp16", "--buildOnly")),
])
def test_flags_are_those_of_the_version(text: str, wanted: set[str], unwanted: tuple[str, ...], tmp_path: Path) -> None:
    chosen = trtexec.flags(text, tmp_path / "m.onnx", tmp_path / "l.json", None, {})
    assert wanted <= set(chosen)
    assert not [f for f in chosen if f.startswith(unwanted)]


def test_shapes_and_engine(tmp_path: Path) -> None:
    shapes = {"images": [[1, 3, 32, 32], [1, 3, 64, 64], [2, 3, 64, 64]]}
    chosen = trtexec.flags(HELP_85, tmp_path / "m.onnx", tmp_path / "l.json", tmp_path / "e.plan", shapes)
    assert "--maxShapes=images:2x3x64x64" in chosen
    assert f"--saveEngine={tmp_path / 'e.plan'}" in chosen


@pytest.mark.parametrize(("line", "version"), [
    ("&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec", "8.5.3"),
    ("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] #", "8.6.1"),
    ("&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9] #", "10.13.3"),
    ("nothing", ""),
])
def test_version(line: str, version: str) -> None:
    assert trtexec.version_of(line.encode()) == version


def fake(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trtexec that says what ``body`` makes it say."""
    script = folder / "trtexec"
    script.write_text(f"#!/bin/sh\ncase \"$1\" in --help) echo '{HELP_85}'; exit 0;; esac\n"
                      f"echo '&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec'\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


LISTING = """cat <<'END'
[01/01/2026-00:00:00] [V] [TRT] Engine Layer Information:
Layer(CaskConvolution): w + QuantizeLinear_12 + first + Relu_18, Tactic: 0x1, x[Int8(1,8,8,8)] -> y[Int8(1,8,8,8)]
Layer(CaskConvolution): second, Tactic: 0x2, y[Float(1,8,8,8)] -> z[Float(1,4,8,8)]
&&&& PASSED TensorRT.trtexec [TensorRT v8503] # trtexec
END"""


def test_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, LISTING, monkeypatch)
    result = build_model(saved(two_convolutions(), tmp_path), "trtexec", tmp_path / "out")
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP32"}
    assert result.log_path is not None and "RUNNING" in result.log_path.read_text()
    assert result.layers_path is not None and result.layers_path.exists()


def test_a_refusal_a_crash_and_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(two_convolutions(), tmp_path)
    fake(tmp_path, "echo '[01/01/2026-00:00:00] [E] [TRT] Assertion failed: scaleAllPositive'; exit 1", monkeypatch)
    result = builders.build(path, "trtexec")
    assert (result.status, result.message) == ("refused", "Assertion failed: scaleAllPositive")
    fake(tmp_path, "kill -SEGV $$", monkeypatch)
    assert builders.build(path, "trtexec").status == "crashed"
    fake(tmp_path, "sleep 60 & wait", monkeypatch)
    start = time.monotonic()
    result = builders.build(path, "trtexec", timeout=0.5)
    assert result.status == "timeout"
    assert time.monotonic() - start < 10


def test_no_trtexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(trtexec, "_USUAL", ())
    with pytest.raises(BuilderError, match="no trtexec on PATH"):
        builders.build(saved(two_convolutions(), tmp_path), "trtexec")
    with pytest.raises(BuilderError, match="compute capabilities are for tensorrt-rtx"):
        builders.build(saved(two_convolutions(), tmp_path), "trtexec", sm=[86])
