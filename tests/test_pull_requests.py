import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import onnx
import pytest

from qdqtool.commands.cli import run
from tests.findings.test_causes import residual
from tests.slow import slow_after
from tests.trt.builder import Graph

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
TREE = Path(__file__).parent.parent
ACTION = yaml.safe_load((TREE / "action.yml").read_text())
HOOK = yaml.safe_load((TREE / ".pre-commit-hooks.yaml").read_text())[0]
ODD = "a|b`c\n::error::x<b>@me[d](http://e)"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a repository with two commits.

    The second commit adds ``new model.onnx`` (with a float skip) and removes ``gone.onnx``.
    """
    folder = tmp_path_factory.mktemp("committed")
    git(folder, "init", "-q")
    for name in ("old.onnx", "gone.onnx"):
        onnx.save(residual("shared"), folder / name)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "gone.onnx").unlink()
    onnx.save(residual("float"), folder / "new model.onnx")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "second")
    return folder


@pytest.fixture
def repository(committed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(committed, tmp_path / "repository"))


def act(folder: Path, temp: Path, base: str, **inputs: str) -> tuple[int, str, str, dict[str, str]]:
    """Run the shell steps of the action as a runner does.

    Returns:
        Exit code, stdout, summary and outputs.
    """
    temp.mkdir()
    tool = temp / "qdqtool" / "bin" / "qdqtool"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(TREE))} exec {sys.executable} -m qdqtool "$@"\n'
    )
    tool.chmod(0o755)
    values = {name: str(entry["default"]) for name, entry in ACTION["inputs"].items()} | inputs
    assert values.keys() == ACTION["inputs"].keys()
    context = {f"inputs.{name}": value for name, value in values.items()}
    context |= {
        "github.event.pull_request.base.sha || github.event.before": base,
        "github.action_path": str(TREE),
    }
    summary, outputs, printed = temp / "summary", temp / "outputs", ""
    for step in ACTION["runs"]["steps"]:
        if "run" not in step or step["name"].startswith("Install"):
            continue
        assert "${{" not in step["run"], "inputs reach a script through its environment alone"
        env = {
            k: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: context[m[1]], v)
            for k, v in step.get("env", {}).items()
        }
        env |= {
            "RUNNER_TEMP": str(temp),
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_OUTPUT": str(outputs),
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        printed += done.stdout + done.stderr
        if done.returncode:
            break
    lines = outputs.read_text().splitlines() if outputs.exists() else []
    return (
        done.returncode,
        printed,
        summary.read_text() if summary.exists() else "",
        dict(line.split("=", 1) for line in lines),
    )


def test_action_predicts_changed_models(repository: Path, tmp_path: Path) -> None:
    code, printed, summary, outputs = act(
        repository,
        tmp_path / "t",
        git(repository, "rev-parse", "HEAD~"),
        **{"fail-on": "warning\nerror\n"},
    )
    assert code == 1 and "::error title=qdqtool predict::qdqtool: --fail-on warning" in printed
    assert (
        summary.count("### ") == 1 and "new model.onnx" in summary and "| SKIP-FLOAT |" in summary
    )
    runs = json.loads(Path(outputs["sarif"]).read_text())["runs"]
    uris = {
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in runs[0]["results"]
    }
    assert len(runs) == 1 and uris == {"new%20model.onnx"}


def test_hook_predicts_all_models(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        name for name in git(repository, "ls-files").splitlines() if re.search(HOOK["files"], name)
    ]
    tool, *entry = shlex.split(HOOK["entry"])
    monkeypatch.chdir(repository)
    codes = [
        run([*entry, *arguments, *files])
        for arguments in (HOOK["args"], ["--fail-on", "SKIP-FLOAT"])
    ]
    assert (tool, files, codes) == ("qdqtool", ["new model.onnx", "old.onnx"], [0, 1])


@pytest.mark.parametrize(
    ("inputs", "base", "code", "models"),
    slow_after(
        2,
        [
            ({}, "HEAD", 0, []),  # nothing changed
            (
                {},
                "0" * 40,
                0,
                ["new model.onnx", "old.onnx"],
            ),  # a first push; its findings are warnings, the default is error
            # A pattern, an empty line, one made by an earlier step and in no commit, one that looks like an option
            (
                {"models": "* model.onnx\n\no*.onnx\nbuilt.onnx\n-odd.onnx\n", "require": "c1\nc2"},
                "HEAD",
                0,
                ["-odd.onnx", "built.onnx", "new model.onnx", "old.onnx"],
            ),
            ({"models": "none.onnx"}, "HEAD", 2, []),
            ({"models": "damaged.onnx\nold.onnx"}, "HEAD", 2, ["old.onnx"]),
            ({"models": "old.onnx", "require": "nothing"}, "HEAD", 2, []),
            ({"models": "old.onnx", "target": "$(exit 7)"}, "HEAD", 2, []),
        ],
    ),
)
def test_action_inputs(
    repository: Path,
    tmp_path: Path,
    inputs: dict[str, str],
    base: str,
    code: int,
    models: list[str],
) -> None:
    onnx.save(residual("shared"), repository / "built.onnx")
    onnx.save(residual("shared"), repository / "-odd.onnx")
    (repository / "damaged.onnx").write_bytes(b"\x08\x09damaged")
    commit = base if base.startswith("0") else git(repository, "rev-parse", base)
    actual, printed, summary, outputs = act(repository, tmp_path / "t", commit, **inputs)
    assert actual == code, printed
    assert re.findall("^### (.*) on TensorRT", summary, re.M) == models
    assert ("sarif" in outputs) == bool(models)


# SARIF and Markdown


def written(capsys: pytest.CaptureFixture[str], form: str, *arguments: str) -> str:
    assert run(["predict", *arguments, "--format", form]) in (0, 1)
    return capsys.readouterr().out


def sarif_faults(log: dict[str, Any]) -> list[str]:
    levels = ("none", "note", "warning", "error")
    categories = [r["automationDetails"]["id"] for r in log["runs"]]
    is_2_1_0 = log["version"] == "2.1.0" and "sarif-schema-2.1.0" in log["$schema"]
    checks: list[tuple[Any, str]] = [
        (is_2_1_0, "no version"),
        (len(set(categories)) == len(categories), "two runs of one category"),  # refused since 2025
    ]
    for sarif_run in log["runs"]:
        driver = sarif_run["tool"]["driver"]
        checks += [(driver[name], f"driver lacks {name}") for name in ("name", "version")]
        for rule in driver["rules"]:
            level = rule["defaultConfiguration"]["level"]
            checks += [
                (rule["shortDescription"]["text"], f"{rule['id']}: no text"),
                (level in levels, f"{rule['id']}: level {level}"),
                ("help" not in rule or rule["help"]["text"], "help without text"),
            ]
        for result in sarif_run["results"]:
            place = result["locations"][0]["physicalLocation"]
            uri, rule = place["artifactLocation"]["uri"], driver["rules"][result["ruleIndex"]]
            fingerprints = result["partialFingerprints"].values()
            checks += [
                (rule["id"] == result["ruleId"], "ruleIndex is of another rule"),
                (re.fullmatch(r"(file://)?[A-Za-z0-9/._~%-]+", uri), f"no URI: {uri}"),
                (place["region"]["startLine"] >= 1, "no line"),
                (result["message"]["text"], "no message"),
                (result["level"] in levels, f"level {result['level']}"),
                (all(isinstance(value, str) for value in fingerprints), "fingerprint"),
            ]
    return [fault for holds, fault in checks if not holds]


def test_sarif_has_the_findings_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "\u00fc a.onnx"
    onnx.save(residual("float"), model)
    log = json.loads(written(capsys, "sarif", str(model), "--fail-on", "SKIP-FLOAT"))
    findings = json.loads(written(capsys, "json", str(model)))["findings"]
    assert sarif_faults(log) == []
    results = log["runs"][0]["results"]
    assert [r["ruleId"] for r in results] == [*(f["code"] for f in findings), "REQUIREMENT"]
    levels = {"error": "error", "warning": "warning", "info": "note"}
    assert [r["level"] for r in results[:-1]] == [levels[f["severity"]] for f in findings]
    for result, finding in zip(results, findings, strict=False):
        message = re.sub(r"\bfloat\b", "FP16", finding["message"])  # SARIF names the float type
        text = re.sub(r"\bfloat\b", "FP16", result["message"]["text"])
        assert message in text
        (place,) = result["locations"][0].get("logicalLocations", [{"fullyQualifiedName": ""}])
        assert place["fullyQualifiedName"] == finding["node"]
    uri = results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == f"file://{model}"


def test_sarif_faults_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(residual("float"), tmp_path / "m.onnx")
    log = json.loads(written(capsys, "sarif", str(tmp_path / "m.onnx")))
    log["runs"].append(log["runs"][0])
    log["runs"][0]["results"][0]["ruleIndex"] += 1
    log["runs"][0]["results"][1]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] = (
        "a b"
    )
    assert {fault.split(":")[0] for fault in sarif_faults(log)} == {
        "two runs of one category",
        "ruleIndex is of another rule",
        "no URI",
    }


def test_sarif_fingerprints_do_not_depend_on_other_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(residual("float"), tmp_path / "m.onnx")
    marks = []
    for arguments in ([], ["--fail-on", "warning", "--target", "8.5"]):
        results = json.loads(written(capsys, "sarif", str(tmp_path / "m.onnx"), *arguments))[
            "runs"
        ][0]["results"]
        marks.append(
            {r["ruleId"]: r["partialFingerprints"] for r in results if r["ruleId"] == "SKIP-FLOAT"}
        )
    assert marks[0] == marks[1] and marks[0]


def test_names_are_escaped_in_markdown_and_sarif(
    g: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None, weights="float"))
    for node in proto.graph.node:
        node.name += ODD
    onnx.save(proto, tmp_path / "m.onnx")
    text = written(capsys, "markdown", str(tmp_path / "m.onnx"), "--fail-on", "NO-QDQ")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert not re.search(r"^::|(?<!\\)<b>|@me|(?<!\\)\[d|http://", text, re.M)
    assert sarif_faults(json.loads(written(capsys, "sarif", str(tmp_path / "m.onnx")))) == []


def test_predict_several_models(current_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["float.onnx", "shared.onnx"]
    for name, kind in zip(names, ("float", "shared"), strict=True):
        onnx.save(residual(kind), name)
    assert sarif_faults(json.loads(written(capsys, "sarif", *names, *names))) == []
    assert run(["predict", *names, "--fail-on", "SKIP-FLOAT"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"qdqtool: {names[0]}: --fail-on SKIP-FLOAT") and err.count("\n") == 1
    titles = [line for line in out.splitlines() if line.startswith(tuple(names))]
    assert titles == [f"{name}, TensorRT 10" for name in names]
    assert run(["predict", *names, "--format", "json"]) == 2


@pytest.mark.parametrize("form", ["sarif", "markdown", "text"])
def test_predict_several_models_one_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    names = [str(tmp_path / f"{kind}.onnx") for kind in ("float", "damaged", "shared")]
    for name, kind in zip(names[::2], ("float", "shared"), strict=True):
        onnx.save(residual(kind), name)
    Path(names[1]).write_bytes(b"\x08\x09damaged")
    assert run(["predict", *names, "--format", form, "--fail-on", "SKIP-FLOAT"]) == 2
    out, err = capsys.readouterr()
    assert [line.split(":")[1].strip() for line in err.splitlines()] == names[:2]
    if form == "sarif":
        runs = json.loads(out)["runs"]
        assert sarif_faults(json.loads(out)) == []
        assert [r["ruleId"] for r in runs[1]["results"]] == ["UNUSABLE"] and len(runs) == 3
    elif form == "markdown":
        assert len(re.findall("^### ", out, re.M)) == 3
