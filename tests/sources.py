import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[1]


@functools.cache
def sources() -> dict[str, Path]:
    files = {}
    for package in ("qdqtool", "calibration"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def nodes_of(path: Path) -> list[ast.AST]:
    return walked(ast.parse(path.read_text(encoding="utf-8")))


def nodes_like(path: Path, *kinds: type[Node], text: str = "") -> Iterator[Node]:
    """Yield the nodes of a source that are of these classes.

    Args:
        path: Source.
        kinds: Classes of the nodes.
        text: Pattern that the source must contain. Other sources are not parsed.
    """
    source = path.read_text(encoding="utf-8")
    if re.search(text, source):
        yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def walked(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))
