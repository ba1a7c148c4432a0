"""Public interface as JSON: Python API, command line, exit codes and JSON fields.

`tests/tools/record_contract.py` writes a record of a release into `tests/data`, and
`tests/test_contract.py` compares the present interface with the records. Both use the functions of
this module, which use only public imports.
"""

import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import os
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import click
import numpy as np
import onnx

from qdqtool import predict
from qdqtool.commands.cli import cli, run
from tests.buildlog import samples
from tests.calibration.nets import write_pictures
from tests.findings.lint.test_api import simple
from tests.insertion.nets import images
from tests.trt.builder import Graph
from tests.tuning.nets import branchy
from tests.verification.synthetic import log_of
from tests.verification.test_log_comparison import log_with_parse_section

DATA = Path(__file__).parent / "data"
RECORDS = {"0.1": DATA / "contract-0.1.json", "0.2": DATA / "contract.json"}

# Documented import paths, with the public names of modules that have no `__all__`.
MODULES: dict[str, tuple[str, ...] | None] = {
    "qdqtool": None,
    "qdqtool.builders": ("build",),
    "qdqtool.errors": (
        "BuildLogError",
        "BuilderError",
        "ClusterError",
        "DataError",
        "ModelError",
        "QdqtoolError",
        "VersionError",
    ),
    "qdqtool.fixing.api": ("Fixed", "fix"),
    "qdqtool.qat": None,
    "qdqtool.qat.lightning": ("QATCallback",),
    "qdqtool.qat.ultralytics": None,
    "qdqtool.testing": ("assert_int8",),
    "qdqtool.verification.api": ("exit_code", "verify_from_log", "verify_with_builder"),
    "calibration": None,
}
# Packages that a module needs and the default installation does not have.
OPTIONAL_PACKAGES = {
    "qdqtool.qat": ("torch",),
    "qdqtool.qat.lightning": ("torch", "lightning"),
    "qdqtool.qat.ultralytics": ("torch", "ultralytics"),
}

Description = dict[str, Any]


# Python API


def describe_module(name: str) -> Description:
    if "lightning" in OPTIONAL_PACKAGES.get(name, ()):
        from tests.qat.torchvision_ops import usable_torchvision

        usable_torchvision()
    module = importlib.import_module(name)
    return {n: describe_value(getattr(module, n)) for n in (MODULES[name] or tuple(module.__all__))}


def describe_value(value: Any) -> Description:
    if inspect.isclass(value):
        return describe_class(value)
    if inspect.isfunction(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": "module" if isinstance(value, ModuleType) else type(value).__name__}


def describe_class(cls: type) -> Description:
    if issubclass(cls, enum.Enum):
        members = {m.name: m.value for m in cls}
        return {"kind": "enum", "members": members, "attributes": attributes(cls)}
    if issubclass(cls, BaseException):
        bases = [c.__name__ for c in cls.__mro__ if issubclass(c, Exception)]
        return {"kind": "exception", "bases": bases, "attributes": attributes(cls)}
    description: Description = {"kind": "class", "attributes": attributes(cls)}
    # Users construct these classes, and functions of qdqtool all others.
    if dataclasses.is_dataclass(cls) or cls.__module__.startswith("qdqtool.qat.lightning"):
        description["parameters"] = parameters(cls)
    return description


def attributes(cls: type) -> Description:
    """Return the parameters of each public method, and `value` for other public attributes.

    Attributes that a library defines are left out.
    """
    packages = ("qdqtool", "calibration", "collections")
    own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] in packages]
    names = {n for c in own for n in (*vars(c), *vars(c).get("__annotations__", ()))}
    if dataclasses.is_dataclass(cls):
        names |= {f.name for f in dataclasses.fields(cls)}
    if issubclass(cls, BaseException):
        names |= set(vars(cls()))
    descriptions: Description = {}
    for name in sorted(n for n in names if not n.startswith("_")):
        value = inspect.getattr_static(cls, name, None)
        method = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        descriptions[name] = parameters(method) if inspect.isfunction(method) else "value"
    return descriptions


def parameters(function: Any) -> list[Description]:
    return [
        {
            "name": p.name,
            "kind": p.kind.name,
            "default": None
            if p.default is inspect.Parameter.empty
            else describe_default(p.default),
        }
        for p in inspect.signature(function).parameters.values()
    ]


def describe_default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return repr(value).replace("<factory>", "made anew")


# Command line


def describe_command(name: str) -> Description:
    command = cli.get_command(click.Context(cli), name)
    return {max(p.opts, key=len): describe_parameter(p) for p in command.params}


def describe_parameter(parameter: click.Parameter) -> Description:
    kind = parameter.type
    default = parameter.default if isinstance(parameter.default, (bool, int, float, str)) else None
    has_range = isinstance(kind, (click.IntRange, click.FloatRange))
    value_alone = getattr(parameter, "flag_value", None)
    return {
        "spellings": sorted([*parameter.opts, *parameter.secondary_opts]),
        "required": parameter.required,
        "nargs": parameter.nargs,
        "multiple": bool(getattr(parameter, "multiple", False)),
        "flag": bool(getattr(parameter, "is_flag", False)),
        "type": kind.name,
        "choices": list(kind.choices) if isinstance(kind, click.Choice) else [],
        "range": [kind.min, kind.max] if has_range else None,
        "default": default or None,
        "value alone": value_alone if isinstance(value_alone, float) else None,
    }


# Runs: exit codes and JSON fields

# Name of a run and its arguments: {d} is the folder of `prepare`, {m} the network of its builds.
RUNS = {
    "predict": "predict {d}/residual.onnx --format json",
    "predict whole network": "predict {m} --format json",
    "predict rtx": "predict {d}/residual.onnx --target rtx1.7 --format json",
    "predict GPU": "predict {d}/residual.onnx --gpu 'RTX 3060' --format json",
    "predict float on GPU": "predict {d}/float.onnx --gpu 'RTX 3060' --format json",
    "predict capability": "predict {d}/residual.onnx --sm 6.1 --format json",
    "predict images": "predict {d}/quantized.onnx --calib {d}/images --size 16 --format json",
    "predict builder": "predict {d}/residual.onnx --for onnxruntime --format json",
    "predict assumption": "predict {d}/silu-add.onnx --format json",
    "predict SARIF": "predict {d}/residual.onnx --format sarif",
    "predict Markdown": "predict {d}/residual.onnx --format markdown",
    "predict text": "predict {d}/residual.onnx --all --trace --layers",
    "predict require met": "predict {d}/residual.onnx --require c0",
    "predict require unmet": "predict {d}/residual.onnx --require c4",
    "predict require nothing": "predict {d}/residual.onnx --require nowhere",
    "predict require gain unmet": "predict {d}/residual.onnx --gpu T4 --require-gain 50",
    "predict fail on code": "predict {d}/residual.onnx --fail-on SKIP-FLOAT",
    "predict fail on severity": "predict {d}/residual.onnx --fail-on warning",
    "predict fail on error": "predict {d}/residual.onnx --fail-on error",
    "predict several models": "predict {d}/residual.onnx {m}",
    "predict one damaged model": "predict {d}/residual.onnx {d}/garbage.onnx",
    "predict no such file": "predict {d}/none.onnx",
    "predict garbage": "predict {d}/garbage.onnx",
    "predict no such target": "predict {d}/residual.onnx --target trt7",
    "predict no such option": "predict {d}/residual.onnx --nothing",
    "verify": "verify {m} {d}/agrees.log --format json",
    "verify mismatch": "verify {m} {d}/differs.log --format json",
    "verify partial": "verify {m} {d}/half.log --format json",
    "verify partial allowed": "verify {m} {d}/half.log --allow-partial",
    "verify from log": "verify --from-log {d}/parsed.log --format json",
    "verify times": "verify {m} {d}/agrees.log {d}/profile.json --gpu T4 --format json",
    "verify builder": "verify {m} --builder trtexec --format json",
    "verify another model": "verify {d}/residual.onnx {d}/agrees.log",
    "verify garbage": "verify {m} {d}/garbage.log",
    "verify without build": "verify {m}",
    "fix": "fix {d}/residual.onnx -o {d}/fixed.onnx --format json",
    "fix refused": "fix {d}/residual.onnx -o {d}/fixed4.onnx --only SKIP-FLOAT --only CONCAT-SCALE "
    "--format json",
    "fix text": "fix {d}/residual.onnx -o {d}/fixed2.onnx",
    "fix no such code": "fix {d}/residual.onnx -o {d}/fixed3.onnx --only NOTHING",
    "fix error left": "fix {d}/not-a-number.onnx -o {d}/fixed5.onnx --only ADD-BOTH --format json",
    "compare": "compare {d}/residual.onnx {m} --target trt8.5 --format json",
    "compare float model": "compare {d}/float.onnx {d}/quantized.onnx --format json",
    "compare times": "compare {d}/residual.onnx {d}/fixed.onnx --gpu T4 --format json",
    "compare builds": "compare {d}/agrees.log {d}/differs.log --format json",
    "compare build": "compare {m} {d}/differs.log --format json",
    "compare fail on met": "compare {d}/fixed.onnx {d}/residual.onnx --fail-on conversions",
    "compare fail on unmet": "compare {m} {m} --fail-on any",
    "compare fail on open": "compare {m} {d}/agrees.log --fail-on slower",
    "compare no such file": "compare {m} {d}/none.onnx",
    "insert": "insert {d}/float.onnx --calib {d}/images --size 16 -o {d}/q.onnx --format json",
    "insert GPU": "insert {d}/float.onnx --calib {d}/images --losses 2 --gpu T4 -o {d}/q5.onnx "
    "--format json",
    "insert text": "insert {d}/float.onnx --calib {d}/images -o {d}/q2.onnx",
    "insert without images": "insert {d}/float.onnx -o {d}/q3.onnx",
    "insert quantized already": "insert {d}/residual.onnx --calib {d}/images -o {d}/q4.onnx",
    "tune": "tune {d}/branches.onnx --calib {d}/pixels.npy --keep 0.9 --gpu T4 --state {d}/state --result "
    "{d}/tuning.json -o {d}/t.onnx --format json",
    "tune unreachable": "tune {d}/branches.onnx --calib {d}/pixels.npy --keep 1 --no-state -o "
    "{d}/t2.onnx --format json",
    "tune without images": "tune {d}/branches.onnx -o {d}/t3.onnx",
    "extract": "extract {d}/residual.onnx --finding SKIP-FLOAT -o {d}/part.onnx --format json",
    "extract minimized": "extract {d}/residual.onnx --node c2 --minimize --limit 20 --private -o "
    "{d}/part2.onnx --format json",
    "extract no such node": "extract {d}/residual.onnx --node none -o {d}/part3.onnx",
    "report": "report {d}/quantized.onnx --float {d}/float.onnx -o {d}/page.html --format json",
    "report build": "report {m} {d}/agrees.log -o {d}/page2.html --format json",
    "report garbage": "report {m} {d}/garbage.log -o {d}/page3.html",
    "explain code": "explain SKIP-FLOAT --format json",
    "explain list": "explain --list --format json",
    "explain error": "explain 'Could not fuse 2nd input (kernel weights) of CONVOLUTION' "
    "--format json",
    "explain unknown error": "explain '[E] [TRT] These words are new' --format json",
    "explain line": "explain 'Running: QDQToCopy on QuantizeLinear_28' --format json",
    "explain builder": "explain --for deepstream --format json",
    "explain code for builder": "explain FLAG-FP16 --for python --format json",
    "explain nothing known": "explain xyzzy",
    "log": "log {d}/trtexec.log --format json",
    "log pass": "log {d}/agrees.log --pass QDQToCopy --format json",
    "log to onnx": "log {d}/trtexec.log --to-onnx {d}/from_log.onnx --format json",
    "log garbage": "log {d}/garbage.log",
    "gpus": "gpus --format json",
    "gpus one": "gpus 'Orin NX 16GB' --format json",
    "gpus no such GPU": "gpus nothing",
    "engine": "engine {d}/trtexec.log --format json",
    "engine times": "engine {d}/agrees.log --profile {d}/profile.json --gpu T4 --format json",
    "engine compared": "engine {d}/trtexec.log --compare {d}/trtexec.log --format json",
    "engine garbage": "engine {d}/garbage.log",
    "build": "build {m} --builder trtexec -o {d}/built --engine --format json",
    "build refused": "build {d}/not-a-number.onnx --builder trtexec --format json",
    "build no such file": "build {d}/none.onnx",
    "build no such GPU": "build {d}/residual.onnx --sm x",
    "demo wrong size": "demo -o {d}/demo --size 100",
}
# Objects whose keys are names of the model, of codes or of types, and not fields.
MAPS: tuple[str, ...] = (
    "before.findings",
    "after.findings",
    "mismatches[].predicted",
    "mismatches[].built",
)


def prepare(folder: Path) -> None:
    onnx.save(residual(), folder / "residual.onnx")
    onnx.save(whole := blocks(), folder / "whole.onnx")
    onnx.save(float_network(), folder / "float.onnx")
    onnx.save(float_network(scale=0.05), folder / "quantized.onnx")
    write_pictures(folder / "images", 2)
    onnx.save(branchy(), folder / "branches.onnx")
    np.save(folder / "pixels.npy", np.concatenate([d["x"] for d in images(8, 16, 16)]))
    onnx.save(silu_add(), folder / "silu-add.onnx")
    onnx.save(simple(scale=float("nan"), zero=3), folder / "not-a-number.onnx")
    prediction = predict(whole, "trt8.5")
    lines = log_of(prediction)
    (folder / "agrees.log").write_text("\n".join(lines) + "\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("Layer(C"))
    before, arrow, after = lines[first].rpartition(" -> ")
    other = after.replace("Int8", "Float") if "Int8" in after else after.replace("Float", "Int8")
    changed = [*lines[:first], before + arrow + other, *lines[first + 1 :]]
    (folder / "differs.log").write_text("\n".join(changed) + "\n")
    end = next(i for i, line in enumerate(lines) if "Engine Layer Information" in line)
    (folder / "half.log").write_text("\n".join(lines[:end]) + "\n")
    times = [
        {"name": layer.name, "timeMs": 1.0, "averageMs": 0.02, "medianMs": 0.02, "percentage": 9.0}
        for layer in prediction.layers
    ]
    (folder / "profile.json").write_text(json.dumps([{"count": 50}, *times]))
    (folder / "trtexec.log").write_text(samples.trtexec_log())
    (folder / "parsed.log").write_text(log_with_parse_section(whole))
    (folder / "garbage.onnx").write_bytes(b"garbage")
    (folder / "garbage.log").write_text("no build\n")
    write_trtexec(folder / "bin" / "trtexec", folder / "agrees.log")


def write_trtexec(path: Path, log: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        f"""#!/bin/sh
case "$*" in
*--help*) echo "--int8 --fp16 --buildOnly --profilingVerbosity=mode ::= layer_names_only|detailed" ;;
*not-a-number*) echo "[01/01/2026-00:00:00] [E] [TRT] Assertion failed: scaleAllPositive"; exit 1 ;;
*) cat '{log}' ;;
esac
for word; do case "$word" in --saveEngine=*) echo engine > "${{word#*=}}" ;; esac; done
"""
    )
    path.chmod(0o755)


def residual() -> onnx.ModelProto:
    g = Graph()
    stem = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=0.05), "r0")
    long = g.relu(g.conv(stem, "c1", scale=0.05), "r1")
    total = g.relu(g.add(g.conv(long, "c2", scale=0.05), stem, "sum"), "r2")
    return g.model(g.conv(g.conv(total, "c3", scale=0.05), "c4", weights="float"))


def blocks() -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 16, 16), "Conv_0", scale=0.05), "Relu_0")
    for i in (1, 3):
        long = g.relu(g.conv(x, f"Conv_{i}", scale=0.05), f"Relu_{i}")
        total = g.add(
            g.conv(long, f"Conv_{i + 1}", scale=0.05), g.pair(x, f"skip_{i}", 0.05), f"Add_{i}"
        )
        x = g.relu(total, f"Relu_{i + 1}")
    return g.model(g.conv(g.pool(x, "MaxPool_5"), "Conv_6", scale=0.05))


def float_network(scale: float | None = None) -> onnx.ModelProto:
    g, weights = Graph(), ("float" if scale is None else "tensor")
    image = g.input(1, 3, 16, 16, name="images")
    pooled = g.pool(g.relu(g.conv(image, "c0", scale=scale, weights=weights), "r0"), "pool")
    branches = [pooled, g.relu(g.conv(pooled, "c1", scale=scale, weights=weights), "r1")]
    return g.model(g.conv(g.concat(branches, "join"), "c2", scale=scale, weights=weights))


def silu_add() -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16, scale=0.05), "r0")
    total = g.add(g.silu(g.conv(x, "c1", 16, scale=0.05), "s1"), g.pair(x, "skip", 0.05), "sum")
    return g.model(g.conv(total, "c2", 16, scale=0.05))


@dataclasses.dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def call(arguments: list[str], folder: Path) -> Answer:
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "XDG_STATE_HOME": str(folder),
        "COLUMNS": "80",
    }
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment),
    ):
        code = run(arguments)
    return Answer(code, out.getvalue(), err.getvalue())


def run_all(folder: Path) -> Description:
    results: Description = {}
    for name, line in RUNS.items():
        arguments = [a.format(d=folder, m=folder / "whole.onnx") for a in shlex.split(line)]
        answer = call(arguments, folder)
        results[name] = {"arguments": line, "exit": answer.code}
        if "--format json" in line:
            assert answer.out, f"{name}: exit code {answer.code}, {answer.err}"
            results[name]["fields"] = fields(json.loads(answer.out))
    return results


def fields(data: Any) -> dict[str, list[str]]:
    """Return the path of each field with its JSON types; `[]` is any element, `{}` any key."""
    types: dict[str, set[str]] = {}
    collect_fields(data, "", types)
    return {k: sorted(v) for k, v in sorted(types.items())}


def collect_fields(data: Any, path: str, types: dict[str, set[str]]) -> None:
    name = path.removeprefix(".")
    kinds = {type(None): "null", dict: "object", list: "array", str: "string", bool: "boolean"}
    kind = kinds.get(type(data), "number")
    types.setdefault(name, set()).add(f'string "{data}"' if name == "schema" else kind)
    if isinstance(data, dict):
        for key, value in data.items():
            collect_fields(value, f"{path}{{}}" if name in MAPS else f"{path}.{key}", types)
    elif isinstance(data, list):
        for value in data:
            collect_fields(value, f"{path}[]", types)
