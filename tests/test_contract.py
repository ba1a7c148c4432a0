"""API, command line, exit codes and JSON fields of releases grow and never change.

What 0.2 promises is recorded before its release; `python -m tests.tools.record_contract` writes the record.
"""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from qdqtool.commands import COMMANDS
from tests import contract
from tests.contract import Description

PROMISED: dict[str, Description] = {
    release: json.loads(path.read_text("utf-8")) for release, path in contract.RECORDS.items()
}

# Changes since 0.1 on purpose.
CHANGES = {
    # The method that is most accurate on images that nobody chose the settings by.
    "insert: default of method was 'mse', is 'focus'",
    "default of --method was mse, is focus",
    # TensorRT 10 is what users install; evidence tables name their targets.
    *(
        f"{name}: default of target was 'trt8.5', is 'trt10'"
        for name in ("Insertion", "assert_int8", "fix", "insert", "predict")
    ),
    # FP16 if the file's types decide, so that TensorRT 11 does not run the remainder in FP32.
    "insert: default of high_precision was 'fp32', is None",
    "default of --high-precision was fp32, is None",
    # auto is float for INT8, the only precision of these versions.
    "insert: default of attention was 'float', is 'auto'",
    "tune: default of attention was 'float', is 'auto'",
    "default of --attention was float, is auto",
    # predict accepts several models.
    "nargs of model was 1, is -1",
    # The method of each tensor that was used, each with a count.
    "calibration.methods.mse is gone",
    # A finding is made of its causes. Its attributes and its JSON stay.
    "Finding: parameter message is gone",
    "Finding: parameter fix is gone",
    "Finding: new parameter causes has no default",
    "Finding: new parameter words has no default",
    "Finding: positional parameters were ['code', 'severity', 'node', 'message', 'fix', 'evidence', 'id', 'target', "
    "'convolutions', 'values'], are ['code', 'severity', 'node', 'causes', 'evidence', 'words', 'id', 'target', 'way', "
    "'nodes', 'convolutions', 'values', 'automatic', 'saves_ms', 'gains']",
}


# Importing these takes seconds.


def each(section: str) -> list[Any]:
    return [
        pytest.param(
            release,
            entry,
            id=f"{release}-{entry}",
            marks=pytest.mark.slow
            if entry in ("qdqtool.qat.lightning", "qdqtool.qat.ultralytics")
            else (),
        )
        for release, record in PROMISED.items()
        for entry in record[section]
    ]


# Python API


@pytest.mark.parametrize(("release", "module"), each("python"))
def test_contract_python_api(release: str, module: str) -> None:
    for package in contract.OPTIONAL_PACKAGES.get(module, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    breaks = broken_names(PROMISED[release]["python"][module], contract.describe_module(module))
    assert [text for text in breaks if text not in CHANGES] == []


def broken_names(promised: Description, now: Description) -> list[str]:
    breaks = []
    for name, description in promised.items():
        if name not in now:
            breaks.append(f"{name} is gone")
        elif isinstance(description, dict):
            breaks += [f"{name}: {text}" for text in broken_value(description, now[name])]
    return breaks


def broken_value(promised: Description, now: Description) -> list[str]:
    if promised["kind"] != now["kind"]:
        return [f"was a {promised['kind']}, is a {now['kind']}"]
    breaks: list[str] = []
    if "parameters" in promised:
        breaks += broken_parameters(promised["parameters"], now.get("parameters", []))
    breaks += [
        f"member {name} was {value!r}, is {now['members'].get(name)!r}"
        for name, value in promised.get("members", {}).items()
        if now["members"].get(name) != value
    ]
    breaks += [
        f"{base} is not a base any more"
        for base in promised.get("bases", [])
        if base not in now["bases"]
    ]
    for name, attribute in promised.get("attributes", {}).items():
        if name not in now["attributes"]:
            breaks.append(f"attribute {name} is gone")
        elif isinstance(attribute, list) != isinstance(now["attributes"][name], list):
            kind = "a method" if isinstance(attribute, list) else "not a method"
            breaks.append(f"attribute {name} was {kind}")
        elif isinstance(attribute, list):
            method = broken_parameters(attribute, now["attributes"][name])
            breaks += [f"{name}(): {text}" for text in method]
    return breaks


def broken_parameters(promised: list[Description], now: list[Description]) -> list[str]:
    """Return why a call that was right would be wrong now.

    Names, positions, kinds and defaults stay; new parameters have a default.
    """
    old, new = ({p["name"]: p for p in parameters} for parameters in (promised, now))
    both = [(name, old[name], new[name]) for name in old if name in new]
    breaks = [f"parameter {name} is gone" for name in old if name not in new]
    breaks += [
        f"parameter {name} was {a['kind']}, is {b['kind']}"
        for name, a, b in both
        if a["kind"] != b["kind"]
    ]
    breaks += [
        f"default of {name} was {a['default']}, is {b['default']}"
        for name, a, b in both
        if a["default"] not in (None, b["default"])
    ]
    breaks += [
        f"new parameter {name} has no default"
        for name, p in new.items()
        if name not in old and p["default"] is None and not p["kind"].startswith("VAR_")
    ]
    before, after = (
        [p["name"] for p in parameters if p["kind"].startswith("POSITIONAL")]
        for parameters in (promised, now)
    )
    if before != after[: len(before)]:
        breaks.append(f"positional parameters were {before}, are {after}")
    return breaks


# Command line


@pytest.mark.parametrize(("release", "command"), each("commands"))
def test_contract_command_line(release: str, command: str) -> None:
    breaks = broken_options(
        PROMISED[release]["commands"][command], contract.describe_command(command)
    )
    assert [text for text in breaks if text not in CHANGES] == []


def test_contract_has_every_command() -> None:
    assert PROMISED["0.2"]["commands"].keys() == COMMANDS.keys()
    assert {run.split()[0] for run in PROMISED["0.2"]["runs"]} == COMMANDS.keys()


def broken_options(promised: Description, now: Description) -> list[str]:
    texts = ("text", "path", "file")
    breaks = [f"{name} is gone" for name in promised if name not in now]
    for name, option, other in [(n, o, now[n]) for n, o in promised.items() if n in now]:
        for key in ("spellings", "choices"):
            breaks += [f"{name}: {x} is gone" for x in option[key] if x not in other[key]]
        breaks += [
            f"{key} of {name} was {option[key]}, is {other[key]}"
            for key in ("nargs", "flag", "default", "value alone", "range")
            if key in option and other[key] != option[key]
        ]
        before, after = ("text" if o["type"] in texts else o["type"] for o in (option, other))
        checks = {
            f"{name} is required now": other["required"] and not option["required"],
            f"{name} was a {before}, is a {after}": before != after,
            f"{name} can be given once only": option.get("multiple") and not other["multiple"],
        }
        breaks += [text for text, is_broken in checks.items() if is_broken]
    breaks += [
        f"new {name} is required"
        for name, option in now.items()
        if option["required"] and name not in promised
    ]
    return breaks


# Exit codes and JSON fields


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Description:
    folder = tmp_path_factory.mktemp("contract")
    contract.prepare(folder)
    return contract.run_all(folder)


@pytest.mark.parametrize(("release", "run"), each("runs"))
def test_contract_exit_code_and_json_fields(runs: Description, release: str, run: str) -> None:
    promised = PROMISED[release]["runs"][run]
    assert runs[run]["exit"] == promised["exit"]
    breaks = broken_fields(promised.get("fields", {}), runs[run].get("fields", {}))
    assert [text for text in breaks if text not in CHANGES] == []


def broken_fields(promised: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Return which JSON fields are gone or have another type.

    A value may become null, because it may be unknown.
    """
    breaks = []
    for path, types in promised.items():
        if path not in now:
            breaks.append(f"{path or 'the answer'} is gone")
        elif types != ["null"] and set(now[path]) - set(types) - {"null"}:
            before, after = " or ".join(types), " or ".join(now[path])
            breaks.append(f"{path or 'the answer'} was {before}, is {after}")
    return breaks


# The comparison itself


def f(a: int, *, b: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("other", "breaks"),
    [
        (lambda a, new=0, *, b=1, c=2: None, []),
        (lambda a: None, ["parameter b is gone"]),
        (lambda a, *, b=2: None, ["default of b was 1, is 2"]),
        (lambda a, new, *, b=1: None, ["new parameter new has no default"]),
        (
            lambda new=0, a=0, *, b=1: None,
            ["positional parameters were ['a'], are ['new', 'a']"],
        ),
    ],
    ids=["more", "fewer", "other default", "required", "other order"],
)
def test_broken_parameters(other: Any, breaks: list[str]) -> None:
    assert broken_parameters(contract.parameters(f), contract.parameters(other)) == breaks


def test_fields_have_paths_and_types() -> None:
    assert contract.fields({"schema": "a/1", "n": [{"x": 1, "y": None}, {"x": "1"}]}) == {
        "": ["object"],
        "schema": ['string "a/1"'],
        "n": ["array"],
        "n[]": ["object"],
        "n[].x": ["number", "string"],
        "n[].y": ["null"],
    }


@pytest.mark.parametrize(
    ("answer", "breaks"),
    [
        ({"schema": "a/1", "n": [{"x": 2, "y": "now known", "new": 0}]}, []),
        ({"schema": "a/1", "n": [{"x": "2", "y": 1}]}, ["n[].x was number, is string"]),
        (
            {"schema": "a/2", "n": [{"x": 2}]},
            ["n[].y is gone", 'schema was string "a/1", is string "a/2"'],
        ),
    ],
    ids=["more", "other type", "fewer"],
)
def test_broken_fields(answer: Any, breaks: list[str]) -> None:
    promised = contract.fields({"schema": "a/1", "n": [{"x": 1, "y": None}]})
    assert broken_fields(promised, contract.fields(answer)) == breaks


def test_broken_options() -> None:
    promised = contract.describe_command("gpus")
    assert broken_options(promised, promised) == []
    changed = {name: dict(option) for name, option in promised.items()}
    changed["--format"] |= {"choices": ["json"], "default": "json"}
    del changed["--sources"]
    assert broken_options(promised, changed) == [
        "--sources is gone",
        "--format: text is gone",
        "default of --format was text, is json",
    ]
