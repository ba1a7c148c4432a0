"""What users build on, as plain data: Python API, command line, exit codes and JSON fields.

``tests/tools/record_contract.py`` wrote ``tests/data/contract.json`` from version 0.1; ``tests/test_contract.py`` holds
the present against it. Both describe with the functions here.
"""

import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import shlex
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from PIL import Image

from qdqtool import predict
from qdqtool.commands.cli import COMMANDS, cli, run
from tests.buildlog import samples
from tests.tables import rows
from tests.trt.builder import Graph
from tests.verification.synthetic import log_of

DATA = Path(__file__).parent / "data" / "contract.json"
# Documented ways in. A name without a module's __all__ is given as module:name.
MODULES = ("qdqtool", "qdqtool.qat", "calibration")
SINGLE = (
    "qdqtool.testing:assert_int8",
    "qdqtool.fixing.api:fix",
    "qdqtool.fixing.api:Fixed",
    "qdqtool.builders:build",
    "qdqtool.verification.api:exit_code",
    "qdqtool.errors:QdqtoolError",
    "qdqtool.errors:ModelError",
    "qdqtool.errors:DataError",
    "qdqtool.errors:BuildLogError",
    "qdqtool.errors:BuilderError",
)
NEEDS_TORCH = ("qdqtool.qat",)

Described = dict[str, Any]


# Python API -------------------------------------------------------------------------------------------------------


def python_api() -> Described:
    """Module to its public names and what can be done with each."""
    found: Described = {}
    for name in MODULES:
        module = importlib.import_module(name)
        names = module.__all__
        found[name] = {
            n: "name" if name in NEEDS_TORCH else _described(getattr(module, n)) for n in names
        }
    for entry in SINGLE:
        name, _, attribute = entry.partition(":")
        found.setdefault(name, {})[attribute] = _described(
            getattr(importlib.import_module(name), attribute)
        )
    return found


def _described(value: Any) -> Any:
    if inspect.isclass(value):
        return _class(value)
    if inspect.isfunction(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": type(value).__name__}


def _class(cls: type) -> Described:
    if issubclass(cls, enum.Enum):
        return {
            "kind": "enum",
            "members": {m.name: m.value for m in cls},
            "attributes": _attributes(cls),
        }
    kind = "exception" if issubclass(cls, BaseException) else "class"
    found: Described = {"kind": kind, "attributes": _attributes(cls)}
    if kind == "exception":
        found["bases"] = [c.__name__ for c in cls.__mro__ if issubclass(c, Exception)]
    elif dataclasses.is_dataclass(cls):
        found["parameters"] = parameters(cls)
    return found


def _attributes(cls: type) -> Described:
    """Public attribute to the parameters of the method, or to ``value``."""
    plain = set(dir(str)) | set(dir(Exception))
    names = {n for n in dir(cls) if not n.startswith("_")}
    if dataclasses.is_dataclass(cls):
        names |= {f.name for f in dataclasses.fields(cls)}
    found: Described = {}
    for name in sorted(names):
        own = any(
            name in vars(c)
            for c in cls.__mro__
            if c.__module__.partition(".")[0] in ("qdqtool", "calibration")
        )
        if name in plain and not own:
            continue
        value = inspect.getattr_static(cls, name, None)
        method = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        found[name] = parameters(method) if inspect.isfunction(method) else "value"
    return found


def parameters(function: Any) -> list[Described]:
    """Name, kind and default (as text; None without one) of each parameter."""
    missing = inspect.Parameter.empty
    return [
        {
            "name": p.name,
            "kind": p.kind.name,
            "default": None if p.default is missing else _default(p.default),
        }
        for p in inspect.signature(function).parameters.values()
    ]


def _default(value: Any) -> str:
    return (
        str(value.value)
        if isinstance(value, enum.Enum)
        else repr(value).replace("<factory>", "made anew")
    )


# Command line -----------------------------------------------------------------------------------------------------


def command_line() -> Described:
    """Command to its arguments and options, as click tells them in ``--help``."""
    context = click.Context(cli)
    found: Described = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = {max(p.opts, key=len): _parameter(p) for p in command.params}
    return found


def _parameter(parameter: click.Parameter) -> Described:
    kind = parameter.type
    default = parameter.default if isinstance(parameter.default, (bool, int, float, str)) else None
    return {
        "spellings": sorted([*parameter.opts, *parameter.secondary_opts]),
        "required": parameter.required,
        "nargs": parameter.nargs,
        "multiple": bool(getattr(parameter, "multiple", False)),
        "flag": bool(getattr(parameter, "is_flag", False)),
        "type": kind.name,
        "choices": list(kind.choices) if isinstance(kind, click.Choice) else [],
        "default": default or None,
    }


# Runs -------------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Writes the files that :data:`RUNS` name."""
    onnx.save(residual(), folder / "residual.onnx")
    onnx.save(whole := _whole(), folder / "whole.onnx")
    onnx.save(_plain(), folder / "float.onnx")
    (folder / "images").mkdir()
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
    lines = log_of(predict(whole, "trt8.5"))
    (folder / "agrees.log").write_text("\n".join(lines) + "\n")
    at = next(i for i, x in enumerate(lines) if x.startswith("Layer(C"))
    before, arrow, after = lines[at].rpartition(" -> ")
    swapped = after.replace("Int8", "Float") if "Int8" in after else after.replace("Float", "Int8")
    (folder / "differs.log").write_text(
        "\n".join([*lines[:at], before + arrow + swapped, *lines[at + 1 :]]) + "\n"
    )
    end = next(i for i, x in enumerate(lines) if "Engine Layer Information" in x)
    (folder / "half.log").write_text("\n".join(lines[:end]) + "\n")
    (folder / "trtexec.log").write_text(samples.trtexec_log())
    (folder / "garbage.onnx").write_bytes(b"garbage")
    (folder / "garbage.log").write_text("no build\n")


def residual() -> onnx.ModelProto:
    """A block whose skip connection is float, and weights that nothing quantizes."""
    g = Graph()
    stem = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=0.05), "r0")
    long = g.relu(g.conv(stem, "c1", scale=0.05), "r1")
    total = g.relu(g.add(g.conv(long, "c2", scale=0.05), stem, "sum"), "r2")
    return g.model(g.conv(g.conv(total, "c3", scale=0.05), "c4", weights="float"))


def _whole() -> onnx.ModelProto:
    """Two blocks and what is pooled of them, with names of their own; all that fuses has Q/DQ."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 16, 16), "Conv_0", scale=0.05), "Relu_0")
    for at in (1, 3):
        long = g.relu(g.conv(x, f"Conv_{at}", scale=0.05), f"Relu_{at}")
        total = g.add(
            g.conv(long, f"Conv_{at + 1}", scale=0.05), g.pair(x, f"skip_{at}", 0.05), f"Add_{at}"
        )
        x = g.relu(total, f"Relu_{at + 1}")
    return g.model(g.conv(g.pool(x, "MaxPool_5"), "Conv_6", scale=0.05))


def _plain() -> onnx.ModelProto:
    """A float network."""
    g = Graph()
    x = g.relu(
        g.conv(g.input(1, 3, 16, 16, name="images"), "c0", scale=None, weights="float"), "r0"
    )
    pooled = g.pool(x, "pool")
    parts = [pooled, g.relu(g.conv(pooled, "c1", scale=None, weights="float"), "r1")]
    return g.model(g.conv(g.concat(parts, "join"), "c2", scale=None, weights="float"))


# Name of the run and arguments ({d} is the folder, {m} the network of the builds); of JSON on stdout the fields count.
RUNS = rows("contract-runs.tsv")
# Objects whose keys are names of the model or finding codes and not fields.
MAPS = ("before.findings", "after.findings", "mismatches[].predicted", "mismatches[].built")


def runs(folder: Path) -> Described:
    """Runs :data:`RUNS` in a prepared folder: exit code, and the fields of the JSON with their types."""
    found: Described = {}
    for name, arguments in RUNS:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(
                [a.format(d=folder, m=folder / "whole.onnx") for a in shlex.split(arguments)]
            )
        found[name] = {"exit": code}
        if "--format json" in arguments:
            assert out.getvalue(), f"{name}: exit {code}, {err.getvalue()}"
            found[name]["fields"] = fields(json.loads(out.getvalue()))
    return found


def fields(data: Any, path: str = "") -> dict[str, list[str]]:
    """Path of each field to the JSON types found there; ``[]`` stands for any element, ``{}`` for any key."""
    found: dict[str, set[str]] = {}
    _collect(data, path, found)
    return {k: sorted(v) for k, v in sorted(found.items())}


def _collect(data: Any, path: str, found: dict[str, set[str]]) -> None:
    name = path.removeprefix(".")
    kinds = {type(None): "null", dict: "object", list: "array", str: "string", bool: "boolean"}
    kind = kinds.get(type(data), "number")
    found.setdefault(name, set()).add(f'string "{data}"' if name == "schema" else kind)
    if isinstance(data, dict):
        for key, value in data.items():
            _collect(value, f"{path}{{}}" if name in MAPS else f"{path}.{key}", found)
    elif isinstance(data, list):
        for value in data:
            _collect(value, f"{path}[]", found)
