"""`make bench` runs what can run: a script that cannot without arguments or optional packages is known to `run.py`."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
OPTIONAL = {"torch", "torchvision", "ultralytics", "selenium", "distributed", "tensorrt_rtx", "lightning", "modelopt"}
RUN: dict[str, Any] = runpy.run_path(str(HERE / "run.py"))
NAMES = sorted(RUN["benchmarks"]())


def wants_arguments(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            name = node.args[0]
            optional = any(k.arg in ("nargs", "default") for k in node.keywords)
            required = any(k.arg == "required" and ast.unparse(k.value) == "True" for k in node.keywords)
            if required or (isinstance(name, ast.Constant) and not str(name.value).startswith("-") and not optional):
                return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_what_a_script_needs_is_known(name: str) -> None:
    tree = ast.parse((HERE / f"{name}.py").read_text("utf-8"))
    assert (name in RUN["DATA"]) == wants_arguments(tree)
    imported = {a.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom)}
    if name not in RUN["DATA"]:
        assert imported & OPTIONAL <= set(RUN["PACKAGES"].get(name, ()))


def test_only_scripts_that_are_there_are_named() -> None:
    assert set(RUN["DATA"]) | set(RUN["PACKAGES"]) <= set(NAMES)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RUN["missing"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert missing("tune_trained") == "torch"
    assert missing("predict") == ""
    assert missing("accuracy") == RUN["DATA"]["accuracy"]
