"""Writes the stubs of packages from the signatures of their functions: ``python -m tests.tools.make_stub``.

A function whose parameters are the fields of options has its signature at run time alone; type checkers and editors
read the stub.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import calibration
import qdqtool

PACKAGES = (qdqtool, calibration)
_OPTIONS = (
    "qdqtool.base.options",
    "qdqtool.options",
)  # modules whose annotations a function takes over
_HEAD = '"""The signatures that functions have at run time; ``python -m tests.tools.make_stub`` writes them."""'
_WIDTH = 120


@functools.cache
def defined(module: str) -> dict[str, str]:
    """Name to the line that imports it, of what a module imports (for type checkers as well) and defines."""
    path = sys.modules[module].__file__
    assert path is not None
    found = {}
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"from {node.module} import {a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.asname or a.name: f"import {a.name}" + f" as {a.asname}" * (a.asname is not None)
                for a in node.names
                if a.asname or "." not in a.name
            }
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"from {module} import {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                found.setdefault(target.id, f"from {module} import {target.id}")
    return found


def names(annotations: Iterator[str]) -> set[str]:
    return {
        n.id for text in annotations for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)
    }


def literal(value: object) -> str:
    try:
        ast.literal_eval(repr(value))
    except ValueError:
        return "..."
    return repr(value)


def function_text(name: str, signature: inspect.Signature) -> str:
    """Its definition, in as many lines as it takes."""
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in parts):
            parts.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {literal(parameter.default)}"
        parts.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    line = f"def {name}({', '.join(parts)}) -> {signature.return_annotation}: ..."
    if len(line) <= _WIDTH:
        return line
    return "\n".join(
        [f"def {name}(", *(f"    {p}," for p in parts), f") -> {signature.return_annotation}: ..."]
    )


def _object(line: str) -> object:
    scope: dict[str, object] = {}
    exec(line, scope)
    return scope[line.split()[-1]]


def path_of(package: ModuleType) -> Path:
    assert package.__file__ is not None
    return Path(package.__file__).with_suffix(".pyi")


@functools.cache
def stub(package: ModuleType) -> str:
    """The text of a package's stub."""
    public: dict[str, Any] = {name: getattr(package, name) for name in package.__all__}
    classes = {
        n: f"from {v.__module__} import {n} as {n}"
        for n, v in public.items()
        if isinstance(v, type)
    }
    imported = defined(package.__name__)
    classes |= {
        n: f"{imported[n]} as {n}"
        for n, v in public.items()
        if not isinstance(v, type | FunctionType | str)
    }
    imports: dict[str, str] = {}
    functions = []
    for name, value in public.items():
        if isinstance(value, FunctionType):
            known = {
                n: line for m in (value.__module__, *_OPTIONS) for n, line in defined(m).items()
            }
            signature = inspect.signature(value)
            texts = [p.annotation for p in signature.parameters.values()] + [
                signature.return_annotation
            ]
            assert all(isinstance(t, str) for t in texts), (
                f"{value.__module__}: from __future__ import annotations"
            )
            for used in names(iter(texts)) & known.keys() - classes.keys():
                assert _object(imports.setdefault(used, known[used])) is _object(known[used]), (
                    f"two classes {used}"
                )
            functions.append(function_text(name, signature))
    lines = sorted(
        {*imports.values(), *classes.values()}, key=lambda line: (line.startswith("from"), line)
    )
    exported = "".join(f'    "{name}",\n' for name in public)
    version = ["__version__: str", ""] if "__version__" in public else []
    return "\n".join(
        [_HEAD, "", *lines, "", f"__all__ = [\n{exported}]", "", *version, *functions, ""]
    )


if __name__ == "__main__":
    for made in PACKAGES:
        path_of(made).write_text(stub(made), encoding="utf-8")
