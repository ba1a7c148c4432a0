"""Python's source as a tree."""

import ast
import functools
from collections.abc import Collection, Iterable
from pathlib import Path


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a source, which several files of tests look at."""
    return walked(ast.parse(path.read_text(encoding="utf-8")))


_LEAVES = (ast.Name, ast.Constant)  # half of all nodes, below which there are none but contexts


def walked(tree: ast.AST) -> list[ast.AST]:
    """What ``ast.walk`` gives, in a third of its time, without the contexts of names."""
    found = [tree]
    for node in found:
        if node.__class__ in _LEAVES:
            continue
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [v for v in value if isinstance(v, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return found


# What edits a graph ---------------------------------------------------------------------------------------------------

_CHANGES = ("add", "append", "extend", "insert", "pop", "remove")
_OVERWRITES = ("CopyFrom", "MergeFrom", "ParseFromString")
_OF_GRAPHS = ("node", "initializer", "input", "output")


def lines_that_edit(nodes: Iterable[ast.AST]) -> set[tuple[str, int]]:
    """Functions and lines that change a list of a graph or node, or overwrite a node, also by a name of these."""
    found = set()
    for function in (n for n in nodes if isinstance(n, ast.FunctionDef)):
        inside = walked(function)
        names: set[str] = set()  # of such lists and of their entries
        members: set[str] = set()  # of nodes
        for node in inside:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and _is_of(node.value, names):
                    names.add(target.id)
                    members.update({target.id} if _is_of(node.value, members, ("node",)) else ())
            elif isinstance(node, ast.For | ast.comprehension):
                if any(_is_of(part, (), ("node",)) for part in ast.walk(node.iter)):
                    members.update(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
        for node in inside:
            changed: list[ast.expr] = []
            if isinstance(node, ast.Attribute) and node.attr in _OVERWRITES and _is_of(node.value, members, ("node",)):
                found.add((function.name, node.lineno))
            elif isinstance(node, ast.Attribute) and node.attr in _CHANGES:
                changed = [node.value]
            elif isinstance(node, ast.Delete | ast.Assign | ast.AugAssign):
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                each = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
                changed = [e.value for e in each if isinstance(e, ast.Subscript)]
            if any(_is_of(part, names) for part in changed):
                found.add((function.name, node.lineno))
    return found


def _is_of(node: ast.AST, names: Collection[str], lists: tuple[str, ...] = _OF_GRAPHS) -> bool:
    """Whether it is such a list, an entry of one, or goes by one of the names."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr in lists if isinstance(node, ast.Attribute) else isinstance(node, ast.Name) and node.id in names
