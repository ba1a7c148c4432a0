import contextlib
import functools
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

from qdqtool.commands import COMMANDS
from qdqtool.findings.codes import CODES
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Finding
from tests import contract, wording
from tests.findings import test_each_code
from tests.insertion.nets import detector
from tests.optional import without_package
from tests.snapshots import Cases
from tests.trt.builder import Graph

# A number that is not a part of a name or of a version.
MEASURED = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?(?!\.?\w)")

# Answers of each command. `#` at the end: the answer has measured numbers.
ANSWERS: dict[str, tuple[str, ...]] = {
    "insert": (
        "insert detector.onnx --calib detector.npz -o q.onnx #",
        "insert float.onnx --calib images -o q.onnx --all #",
        "insert float.onnx --calib images -o q.onnx --losses 2 --gpu 'RTX 4090' --all #",
        "insert float.onnx --calib images -o q.onnx --target 8.5 --gpu 'Jetson Nano' #",
        "insert float.onnx --calib images -o q.onnx --target rtx1.7 --input-type uint8 #",
    ),
    "tune": (
        "tune branches.onnx --calib pixels.npy --keep 0.9 --gpu T4 --workers 1 -o q.onnx #",
        "tune branches.onnx --calib pixels.npy --keep 1 --no-state --workers 1 --all -o q.onnx #",
    ),
    "predict": (
        "predict residual.onnx",
        "predict residual.onnx --all --trace --layers",
        "predict whole.onnx",
        "predict float.onnx",
        "predict not-a-number.onnx",
        "predict silu-add.onnx",
        "predict residual.onnx --gpu 'RTX 3060'",
        "predict residual.onnx --gpu 'RTX 3060' --layers",
        "predict float.onnx --gpu 'Orin Nano 8GB'",
        "predict residual.onnx --target rtx1.7",
        "predict residual.onnx --sm 6.1",
        "predict residual.onnx --for deepstream",
        "predict residual.onnx whole.onnx",
        "predict residual.onnx --format markdown",
        "predict quantized.onnx --calib images #",
        "predict residual.onnx --require c4",
        "predict residual.onnx --fail-on warning",
        "predict residual.onnx --gpu T4 --require-gain 50",
        "predict residual.onnx garbage.onnx",
        "predict residual.onnx --assume silu-add=fused",
    ),
    "verify": (
        "verify whole.onnx agrees.log",
        "verify whole.onnx differs.log",
        "verify whole.onnx half.log",
        "verify whole.onnx half.log --allow-partial",
        "verify whole.onnx agrees.log profile.json --gpu T4",
        "verify --from-log parsed.log",
        "verify whole.onnx --builder trtexec",
    ),
    "compare": (
        "compare residual.onnx whole.onnx --target trt8.5",
        "compare float.onnx quantized.onnx --gpu T4",
        "compare agrees.log differs.log",
        "compare whole.onnx differs.log",
        "compare whole.onnx whole.onnx",
        "compare quantized.onnx float.onnx --fail-on lost-int8",
        "compare whole.onnx agrees.log --fail-on slower",
    ),
    "report": (
        "report quantized.onnx --float float.onnx -o page.html #",
        "report whole.onnx agrees.log -o page.html #",
        "report float.onnx -o page.html #",
    ),
    "fix": (
        "fix residual.onnx -o fixed.onnx",
        "fix not-a-number.onnx -o fixed.onnx --only ADD-BOTH",
        "fix whole.onnx -o fixed.onnx",
    ),
    "extract": (
        "extract residual.onnx --finding SKIP-FLOAT -o part.onnx",
        "extract residual.onnx --node c2 --minimize --limit 20 --private -o part.onnx",
    ),
    "explain": (
        "explain --list",
        "explain SKIP-FLOAT",
        "explain ADD-ACT",
        "explain 'Could not fuse 2nd input (kernel weights) of CONVOLUTION'",
        "explain '[E] [TRT] These words are new'",
        "explain 'Running: QDQToCopy on QuantizeLinear_28'",
        "explain --for deepstream",
        "explain FLAG-FP16 --for python",
    ),
    "log": (
        "log trtexec.log",
        "log trtexec.log --all",
        "log agrees.log",
        "log agrees.log --pass QDQToCopy",
        "log trtexec.log --to-onnx graph.onnx",
        "log names.json",
    ),
    "gpus": ("gpus", "gpus 'Orin NX 16GB'"),
    "engine": (
        "engine trtexec.log",
        "engine agrees.log --profile profile.json --gpu T4",
        "engine trtexec.log --compare agrees.log",
        "engine trtexec.log --dot engine.dot",
    ),
    "build": (
        "build whole.onnx --builder trtexec -o built #",
        "build not-a-number.onnx --builder trtexec #",
    ),
    "demo": ("demo -o demo --size 32 --images 2 #",),
}

# Errors of each command.
ERRORS: dict[str, tuple[str, ...]] = {
    "insert": (
        "insert float.onnx",
        "insert none.onnx --calib images",
        "insert float.onnx --calib nowhere",
        "insert float.onnx --calib empty",
        "insert float.onnx --calib broken-images",
        "insert float.onnx --calib images -o no/where/q.onnx",
        "insert float.onnx --calib images -o empty",
        "insert float.onnx --calib images -o float.onnx",
        "insert float.onnx --calib images -o q.onnx --write-table q.onnx",
        "insert float.onnx --calib images -o q.onnx --calib-cache q.onnx",
        "insert float.onnx --calib images -o q.onnx --calib-cache float.onnx",
        "insert float.onnx --calib images --method-for max",
        "insert float.onnx --calib images --method-for ^none$=max -o q.onnx",
        "insert float.onnx --calib images --exclude none -o q.onnx",
        "insert float.onnx --calib images --exclude . -o q.onnx",
        "insert float.onnx --calib images --size big",
        "insert float.onnx --calib images --mean 1,2",
        "insert float.onnx --calib images --std 0",
        "insert float.onnx --calib images --percentile 0.99",
        "insert float.onnx --calib images --max-images 0",
        "insert float.onnx --calib images --calib-table table.cache",
        "insert float.onnx --calib-table float.onnx",
        "insert float.onnx --calib images --gpu Orin",
        "insert float.onnx --calib images --gpu 'GTX 1080'",
        "insert float.onnx --calib images --mixed-cpus",
        "insert quantized.onnx --calib images",
        "insert garbage.onnx --calib images",
    ),
    "tune": (
        "tune branches.onnx",
        "tune branches.onnx --calib pixels.npy --keep 2",
        "tune branches.onnx --calib pixels.npy --budget-ms 3",
        "tune branches.onnx --calib pixels.npy --budget-ms 3 --gpu T4 --keep 0.9",
        "tune branches.onnx --calib pixels.npy --target 8.5 --gpu 'Jetson Nano'",
        "tune branches.onnx --calib pixels.npy --metric f",
        "tune branches.onnx --calib pixels.npy --metric json:dumps --workers 1",
        "tune branches.onnx --calib pixels.npy --time-limit soon",
        "tune branches.onnx --calib pixels.npy --eval one.npy",
        "tune branches.onnx --calib pixels.npy --eval nowhere",
        "tune branches.onnx --calib pixels.npy --state pixels.npy",
        "tune branches.onnx --calib pixels.npy -o branches.onnx",
        "tune branches.onnx --calib pixels.npy -o a --state a",
        "tune branches.onnx --calib pixels.npy --state s --no-state",
        "tune branches.onnx --calib pixels.npy --state garbage.log",
        "tune branches.onnx --calib pixels.npy --exclude none",
        "tune branches.onnx --calib pixels.npy --exclude-op Conv",
        "tune quantized.onnx --calib images",
    ),
    "predict": (
        "predict",
        "predict none.onnx",
        "predict garbage.onnx",
        "predict empty.onnx",
        "predict picture.onnx",
        "predict page.onnx",
        "predict lfs.onnx",
        "predict model.pt",
        "predict model.engine",
        "predict model.tflite",
        "predict model.xml",
        "predict model.safetensors",
        "predict layers.json",
        "predict pixels.npy",
        "predict cut.onnx",
        "predict images",
        "predict residual.onnx --nothing",
        "predict residual.onnx --target trt7",
        "predict residual.onnx --require nothing",
        "predict residual.onnx --require [",
        "predict residual.onnx --fail-on SKIP-FLAOT",
        "predict residual.onnx --clock 1000",
        "predict residual.onnx --require-gain 2",
        "predict residual.onnx --gpu T4 --require-gain nan",
        "predict residual.onnx --gpu 'rtx 9999'",
        "predict residual.onnx --gpu T4 --clock 5",
        "predict residual.onnx --gpu T4 --calibrate none.json",
        "predict residual.onnx --gpu T4 --save-calibration x.json",
        "predict residual.onnx --gpu T4 --calibrate 1ms --save-calibration residual.onnx",
        "predict residual.onnx --gpu T4 --sm 8.6",
        "predict residual.onnx --gpu T4 --gpu 'RTX 3060' --clock 900",
        "predict residual.onnx --gpu T4 --power x",
        "predict residual.onnx --gpu 'Orin Nano 8GB' --power 999W",
        "predict residual.onnx --gpu 'Orin Nano 8GB' --power MAXN_SUPER",
        "predict residual.onnx --sm 7.7",
        "predict residual.onnx --target 12",
        "predict residual.onnx --sm banana",
        "predict residual.onnx --sm 'GTX 1666'",
        "predict residual.onnx --sm 10.3 --target rtx1.7",
        "predict residual.onnx --for make",
        "predict residual.onnx --assume silu-add",
        "predict residual.onnx --assume silu-add=perhaps",
        "predict residual.onnx --assume relu-add=fused",
        "predict residual.onnx --assume silu-add=fused --assume silu-add=apart",
        "predict residual.onnx whole.onnx --format json",
        "predict residual.onnx -o -",
        "predict residual.onnx -o residual.onnx",
    ),
    "verify": (
        "verify whole.onnx",
        "verify residual.onnx agrees.log",
        "verify whole.onnx garbage.log",
        "verify whole.onnx none.log",
        "verify whole.onnx old.log",
        "verify --from-log agrees.log",
        "verify --from-log",
        "verify --from-log agrees.log --gpu T4",
        "verify whole.onnx agrees.log --builder trtexec",
    ),
    "compare": (
        "compare float.onnx none.onnx",
        "compare float.onnx model.pt",
        "compare float.onnx quantized.onnx --with-a whole.onnx",
        "compare float.onnx quantized.onnx --target trt5",
        "compare float.onnx quantized.onnx --gpu 'GTX 1080'",
        "compare float.onnx quantized.onnx --fail-on weather",
        "compare float.onnx quantized.onnx --min-agreement 0.9",
        "compare float.onnx quantized.onnx -o float.onnx",
        "compare float.onnx agrees.log --report page.html",
    ),
    "report": (
        "report quantized.onnx float.onnx --float float.onnx",
        "report quantized.onnx --clock 1000",
        "report quantized.onnx --gpu T4 --size 4096",
        "report quantized.onnx --calib-cache quantized.onnx",
        "report quantized.onnx --tuning quantized.onnx",
        "report whole.onnx garbage.log",
        "report quantized.onnx -o quantized.onnx",
        "report quantized.onnx -o no/such/folder/r.html",
        "report quantized.onnx --assume silu",
    ),
    "fix": (
        "fix residual.onnx",
        "fix residual.onnx -o f.onnx --only NOPE",
        "fix residual.onnx -o f.onnx --only CH-ALIGN",
        "fix residual.onnx -o f.onnx --target trt7",
        "fix residual.onnx -o f.onnx --inputs none.npz",
        "fix residual.onnx -o f.onnx --inputs garbage.npz",
    ),
    "extract": (
        "extract residual.onnx --node c2",
        "extract residual.onnx -o part.onnx --node none",
        "extract residual.onnx -o part.onnx --finding NOPE",
        "extract residual.onnx -o residual.onnx --finding SKIP-FLOAT",
        "extract residual.onnx -o part.onnx --finding SKIP-FLOAT --report residual.onnx",
        "extract residual.onnx -o part.onnx --finding SKIP-FLOAT --report part.onnx",
        "extract residual.onnx -o none/part.onnx --finding SKIP-FLOAT",
        "extract residual.onnx -o images --finding SKIP-FLOAT",
        "extract residual.onnx -o part.onnx --finding SKIP-FLOAT --verification layers.json",
        "extract residual.onnx -o part.onnx --finding SKIP-FLOAT --report r.md --verification "
        "garbage.log",
        "extract residual.onnx -o part.onnx --finding SKIP-FLOAT --report r.md --verification "
        "layers.json",
    ),
    "explain": ("explain", "explain SKIPFLOAT", "explain 'what ails thee'"),
    "log": (
        "log none.log",
        "log garbage.log",
        "log agrees.log --pass NoSuchPass",
        "log agrees.log --pass Const",
        "log residual.onnx",
    ),
    "gpus": ("gpus nothing", "gpus Orin"),
    "engine": (
        "engine garbage.log",
        "engine names.json",
        "engine profile.json",
        "engine other.json",
        "engine nested.json",
    ),
    "build": (
        "build none.onnx",
        "build float.onnx --sm x",
        "build float.onnx --sm 87",
        "build float.onnx --sm 86 --builder trtexec",
        "build float.onnx --shapes images",
        "build float.onnx --shapes a:1x2,1x2",
        "build float.onnx --timeout -1",
        "build float.onnx --timeout nan",
        "build float.onnx --builder tvm",
        "build float.onnx --engine",
    ),
    "demo": (
        "demo -o d --size 100",
        "demo -o d --size 992",
        "demo -o d --target trt1",
        "demo -o d --images 9223372036854775808",
        "demo -o garbage.log",
    ),
}

# Files that are not models.
OTHER_FILES = {
    "empty.onnx": b"",
    "picture.onnx": b"\x89PNG\r\n",
    "page.onnx": b"<!DOCTYPE html><html>",
    "lfs.onnx": b"version https://git-lfs.github.com/spec/v1\n",
    "model.pt": b"PK\x03\x04archive",
    "model.engine": b"ftrt\x00\x00\x00",
    "model.tflite": b"\x1c\x00\x00\x00TFL3",
    "model.xml": b'<?xml version="1.0"?>\n<net name="a">',
    "model.safetensors": b"\x10\x00\x00\x00\x00\x00\x00\x00{}",
    "garbage.npz": b"hello",
    "layers.json": b'{"Layers": []}',
    "names.json": b'{"Layers": ["conv1 + relu1", "pool"], "Bindings": ["in", "out"]}',
    "other.json": b'{"x": 1}',
    "nested.json": b"[" * 100_000,
    "broken-images/a.png": b"not a picture",
    "old.log": b"&&&& RUNNING TensorRT.trtexec [TensorRT v7203] # trtexec --onnx=m.onnx\n",
}


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    home = tempfile.TemporaryDirectory(prefix="qdqtool-snapshots-")
    path = Path(home.name)
    contract.prepare(path)
    onnx.save(detector(), path / "detector.onnx")
    pixels = np.random.default_rng(0).random((2, 3, 64, 64), np.float32)
    np.savez(path / "detector.npz", images=pixels)
    np.save(path / "one.npy", np.load(path / "pixels.npy")[:1])
    for name, data in OTHER_FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)
    whole = (path / "whole.onnx").read_bytes()
    (path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (path / "empty").mkdir()
    return home


def answer(line: str) -> str:
    home = Path(folder().name)
    command = line.removesuffix(" #")
    with contextlib.chdir(home), without_package("tensorrt_rtx"):  # which would build the demo
        result = contract.call(shlex.split(command), home)
    text = result.out + "".join(f"stderr: {line}\n" for line in result.err.splitlines())
    text = re.sub(  # the path of Python would wrap the command differently elsewhere
        rf"{re.escape(shlex.quote(sys.executable))}((?:\\\n|.)*)",
        lambda match: "python" + re.sub(r"\\\n +", "", match[1]),
        text,
    )
    text = re.sub(r"(^Wrote page\.html \()[\d.]+ [KM]B", r"\1# KB", text, flags=re.MULTILINE)
    text = re.sub(r"(^Took |^Wrote .*[ (])\d+\.\d s", r"\1#.# s", text, flags=re.MULTILINE)
    if command != line:
        text = MEASURED.sub("#.#", text)
        text = re.sub(r"at most about [\w ]+ with", "at most about # with", text)
    return text + (f"exit code: {result.code}\n" if result.code else "")


def list_files() -> dict[Path, int]:
    """Return the time of the last change of each file, except for measurements of `tune`."""
    files = (p for p in Path(folder().name).rglob("*") if p.is_file() and ".tuning" not in p.name)
    return {p: p.stat().st_mtime_ns for p in files}


def command_cases(name: str) -> Cases:
    """Run the commands of a topic. Outputs are removed, because later topics would replace them."""
    prepared = list_files()
    lines = (f"{name} --help", *ANSWERS[name])
    answers = {f"$ qdqtool {line.removesuffix(' #')}": answer(line) for line in lines}
    files, errors = list_files(), {f"$ qdqtool {line}": answer(line) for line in ERRORS[name]}
    assert list_files() == files, "files that a command wrote before it failed"
    for path in files.keys() - prepared.keys():
        path.unlink()
    return answers | errors


def networks_with_findings() -> Iterator[tuple[str, list[Finding]]]:
    yield from wording.findings()
    for code, make in test_each_code.NETWORKS.items():
        yield f"network of {code}", predict(make(Graph()), "trt8.5").findings
    for code, make_prediction in test_each_code.PREDICTIONS.items():
        yield f"prediction of {code}", make_prediction().findings


def finding_cases() -> Cases:
    texts: dict[str, dict[str, str]] = {}
    for network, findings in networks_with_findings():
        for f in findings:
            text = f"{f.message}\n    fix: {f.fix}"
            texts.setdefault(f.code, {}).setdefault(text, f"{network}: {f.severity}")
    assert texts.keys() == CODES.keys()
    return {
        code: "\n".join(f"{network}\n    {text}" for text, network in texts[code].items())
        for code in sorted(texts)
    }


def comparison_cases() -> Cases:
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        return {heading: "\n".join(x) for heading, x in wording.comparisons(Path()).items()}


SNAPSHOTS: dict[str, Callable[[], Cases]] = {
    "qdqtool": lambda: {
        f"$ qdqtool {line}": answer(line) for line in ("--help", "--version", "perdict", "--no")
    },
    **{name: functools.partial(command_cases, name) for name in COMMANDS},
    "comparisons": comparison_cases,
    "findings": finding_cases,
    "headlines": lambda: {"Headlines": "\n".join(wording.headlines())},
    "left-float": lambda: {
        kind: "\n".join(reasons) for kind, reasons in wording.left_float_reasons().items()
    },
}
