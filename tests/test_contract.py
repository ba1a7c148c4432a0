"""What version 0.1 promised still holds: API, command line, exit codes and JSON fields may grow, and never change."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import contract

PROMISED: dict[str, Any] = json.loads(contract.DATA.read_text())
_TEXTS = {"text", "path", "file"}
_POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
# What was changed on purpose. The default method: on images that nobody chose settings by, mse lost to others.
MEANT = {
    "insert: default of method was 'mse', is 'focus'",
    "default of --method was mse, is focus",
    # TensorRT 10 is what users install; evidence tables name their targets.
    *(
        f"{name}: default of target was 'trt8.5', is 'trt10'"
        for name in ("Insertion", "assert_int8", "fix", "insert", "predict")
    ),
    # What stays float: FP16 where the file's types decide, so that TensorRT 11 does not run it in FP32.
    "insert: default of high_precision was 'fp32', is None",
    "default of --high-precision was fp32, is None",
    "nargs of model was 1, is -1",  # predict takes several models
    "calibration.methods.mse is gone",  # the methods that were used, each with a count
    # A finding is made of what was refused, and worded from that; its attributes and its JSON stay.
    "Finding: parameter message is gone",
    "Finding: parameter fix is gone",
    "Finding: new parameter causes has no default",
    "Finding: new parameter words has no default",
    "Finding: positional parameters were ['code', 'severity', 'node', 'message', 'fix', 'evidence', 'id', 'target', "
    "'convolutions', 'values'], are ['code', 'severity', 'node', 'causes', 'evidence', 'words', 'id', 'target', 'way', "
    "'nodes', 'convolutions', 'values', 'automatic', 'saves_ms', 'gains']",
}


# Python API -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python_api() -> dict[str, Any]:
    return contract.python_api()


@pytest.mark.parametrize("module", PROMISED["python"])
def test_python_api(python_api: dict[str, Any], module: str) -> None:
    broken = broken_names(PROMISED["python"][module], python_api[module])
    broken = [text for text in broken if text not in MEANT]
    assert not broken, f"{module}: {'; '.join(broken)}"


def broken_names(promised: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of a module's names is gone or changed."""
    broken = []
    for name, was in promised.items():
        if name not in now:
            broken.append(f"{name} is gone")
        elif isinstance(was, dict):
            broken += [f"{name}: {text}" for text in broken_value(was, now[name])]
    return broken


def broken_value(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The same for one function, class or value."""
    if was["kind"] != now["kind"]:
        return [f"was a {was['kind']}, is a {now['kind']}"]
    broken = []
    if "parameters" in was:
        broken += broken_parameters(was["parameters"], now.get("parameters", []))
    for name, value in was.get("members", {}).items():
        if now["members"].get(name) != value:
            broken.append(f"member {name} was {value!r}, is {now['members'].get(name)!r}")
    broken += [
        f"{base} is no base any more" for base in was.get("bases", []) if base not in now["bases"]
    ]
    for name, attribute in was.get("attributes", {}).items():
        if name not in now["attributes"]:
            broken.append(f"attribute {name} is gone")
        elif isinstance(attribute, list) != isinstance(now["attributes"][name], list):
            broken.append(
                f"attribute {name} was {'a method' if isinstance(attribute, list) else 'no method'}"
            )
        elif isinstance(attribute, list):
            broken += [
                f"{name}(): {text}"
                for text in broken_parameters(attribute, now["attributes"][name])
            ]
    return broken


def broken_parameters(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Every call that was right stays right: names, positions, kinds and defaults stay; new ones have a default."""
    present = {p["name"]: p for p in now}
    broken = []
    for parameter in was:
        found = present.get(parameter["name"])
        if found is None:
            broken.append(f"parameter {parameter['name']} is gone")
        elif found["kind"] != parameter["kind"]:
            broken.append(
                f"parameter {parameter['name']} was {parameter['kind']}, is {found['kind']}"
            )
        elif parameter["default"] is not None and found["default"] != parameter["default"]:
            broken.append(
                f"default of {parameter['name']} was {parameter['default']}, is {found['default']}"
            )
    names = {p["name"] for p in was}
    for parameter in now:
        variadic = parameter["kind"].startswith("VAR_")
        if parameter["name"] not in names and parameter["default"] is None and not variadic:
            broken.append(f"new parameter {parameter['name']} has no default")
    before, after = ([p["name"] for p in ps if p["kind"] in _POSITIONAL] for ps in (was, now))
    if before != after[: len(before)]:
        broken.append(f"positional parameters were {before}, are {after}")
    return broken


# Command line -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command_line() -> dict[str, Any]:
    return contract.command_line()


@pytest.mark.parametrize("command", PROMISED["commands"])
def test_command_line(command_line: dict[str, Any], command: str) -> None:
    assert command in command_line, f"the command {command} is gone"
    broken = broken_options(PROMISED["commands"][command], command_line[command])
    broken = [text for text in broken if text not in MEANT]
    assert not broken, f"{command}: {'; '.join(broken)}"


def broken_options(promised: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of a command's options is gone or changed."""
    broken = []
    for name, was in promised.items():
        found = now.get(name)
        if found is None:
            broken.append(f"{name} is gone")
            continue
        for key in ("spellings", "choices"):
            broken += [f"{name} takes no {x} any more" for x in was[key] if x not in found[key]]
        if found["required"] and not was["required"]:
            broken.append(f"{name} is required now")
        if found["type"] != was["type"] and not {found["type"], was["type"]} <= _TEXTS:
            broken.append(f"{name} was a {was['type']}, is a {found['type']}")
        for key in ("nargs", "multiple", "flag", "default"):
            if found[key] != was[key]:
                broken.append(f"{key} of {name} was {was[key]}, is {found[key]}")
    broken += [
        f"new {name} is required"
        for name, found in now.items()
        if found["required"] and name not in promised
    ]
    return broken


# Exit codes and JSON ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    contract.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def runs(prepared: Path) -> dict[str, Any]:
    return contract.runs(prepared)


def test_runs_files_and_fields_are_as_recorded(prepared: Path) -> None:
    assert {name for name, _ in contract.RUNS} >= set(PROMISED["runs"])
    assert {"agrees.log", "differs.log", "half.log", "residual.onnx"} <= {
        p.name for p in prepared.iterdir()
    }
    was = contract.fields({"schema": "a/1", "n": [{"x": 1, "y": None}]})
    assert was == {
        "": ["object"],
        "schema": ['string "a/1"'],
        "n": ["array"],
        "n[]": ["object"],
        "n[].x": ["number"],
        "n[].y": ["null"],
    }
    assert (
        broken_fields(
            was, contract.fields({"schema": "a/1", "n": [{"x": 2, "y": "now known", "z": 0}]})
        )
        == []
    )
    assert broken_fields(was, contract.fields({"schema": "a/1", "n": [{"x": "2", "y": 1}]})) == [
        "n[].x was number, is string"
    ]
    assert broken_fields(was, contract.fields({"schema": "a/2", "n": [{"x": 2}]})) == [
        "n[].y is gone",
        'schema was string "a/1", is string "a/2"',
    ]


@pytest.mark.parametrize("run", PROMISED["runs"])
def test_exit_code_and_fields(runs: dict[str, Any], run: str) -> None:
    promised = PROMISED["runs"][run]
    assert runs[run]["exit"] == promised["exit"]
    broken = broken_fields(promised.get("fields", {}), runs[run].get("fields", {}))
    broken = [text for text in broken if text not in MEANT]
    assert not broken, f"{run}: {'; '.join(broken)}"


def broken_fields(promised: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """What of the JSON's fields is gone or has another type; null may come where there was a value to be unknown."""
    broken = []
    for path, types in promised.items():
        if path not in now:
            broken.append(f"{path or 'the answer'} is gone")
            continue
        new = set(now[path]) - set(types) - {"null"}
        if new and types != ["null"]:
            broken.append(
                f"{path or 'the answer'} was {' or '.join(types)}, is {' or '.join(now[path])}"
            )
    return broken


# The comparison itself --------------------------------------------------------------------------------------------


def test_additions_are_allowed_and_losses_are_not() -> None:
    def f(a: int, *, b: int = 1) -> None: ...
    def more(a: int, new: int = 0, *, b: int = 1, c: int = 2) -> None: ...
    def fewer(a: int) -> None: ...
    def changed(a: int, *, b: int = 2) -> None: ...
    def demanding(a: int, new: int, *, b: int = 1) -> None: ...
    def shuffled(new: int = 0, a: int = 0, *, b: int = 1) -> None: ...

    was = contract.parameters(f)
    assert broken_parameters(was, contract.parameters(more)) == []
    assert broken_parameters(was, contract.parameters(fewer)) == ["parameter b is gone"]
    assert broken_parameters(was, contract.parameters(changed)) == ["default of b was 1, is 2"]
    assert broken_parameters(was, contract.parameters(demanding)) == [
        "new parameter new has no default"
    ]
    assert any(
        "positional" in text for text in broken_parameters(was, contract.parameters(shuffled))
    )
