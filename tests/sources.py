"""Python sources of the packages, and their syntax trees."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[1]
PACKAGES = ("qdqtool", "calibration")


@functools.cache
def sources() -> dict[str, Path]:
    """Return the file of each module that is installed."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a source, the module first; parsed once for all tests of a process."""
    return walked(ast.parse(path.read_text(encoding="utf-8")))


def nodes_like(path: Path, *kinds: type[Node]) -> Iterator[Node]:
    """Yield the nodes of a source that are of these classes."""
    return (node for node in nodes_of(path) if isinstance(node, kinds))


def walked(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))
