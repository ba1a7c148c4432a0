"""Python's source as a tree."""

import ast
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
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


def circles(edges: dict[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


# What edits a graph ---------------------------------------------------------------------------------------------------

_CHANGES = ("add", "append", "extend", "insert", "pop", "remove")
_OVERWRITES = ("CopyFrom", "MergeFrom", "ParseFromString")
_OF_GRAPHS = ("node", "initializer", "input", "output")


Functions = Mapping[str, ast.FunctionDef]


def functions_of(nodes: Iterable[ast.AST]) -> Functions:
    return {n.name: n for n in nodes if isinstance(n, ast.FunctionDef)}


def lines_that_edit(nodes: Sequence[ast.AST], others: Functions | None = None) -> set[tuple[str, int]]:
    """Functions and lines that change a list of a graph or node, or overwrite a node, also by a name of these.

    Or give one to a function of the source, or one of the ``others``, that changes what it is given.
    """
    known = {**(others or {}), **functions_of(nodes)}
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef))
    return {(f.name, line) for f in functions for line in _edited(f, set(), _OF_GRAPHS, known)}


def _edited(function: ast.FunctionDef, names: set[str], lists: tuple[str, ...], known: Functions) -> set[int]:
    """Lines that change such a list or its entries, which go by the names too."""
    inside = walked(function)
    found = set()
    members: set[str] = set()  # of nodes
    nodes = lists[:1]
    for node in inside:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and _is_of(node.value, names, lists):
                names.add(target.id)
                members.update({target.id} if _is_of(node.value, members, nodes) else ())
        elif isinstance(node, ast.For | ast.comprehension):
            if any(_is_of(part, (), nodes) for part in ast.walk(node.iter)):
                members.update(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
    for node in inside:
        changed: list[ast.expr] = []
        if isinstance(node, ast.Attribute) and node.attr in _OVERWRITES and _is_of(node.value, members, nodes):
            found.add(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in _CHANGES:
            changed = [node.value]
        elif isinstance(node, ast.Delete | ast.Assign | ast.AugAssign):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            each = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            changed = [e.value for e in each if isinstance(e, ast.Subscript)]
        elif isinstance(node, ast.Call) and (node.args or node.keywords):
            called = known.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
            if called is not None:
                takes = [a.arg for a in called.args.args if a.arg != "self"]
                given = [*zip(takes, node.args, strict=False), *((str(k.arg), k.value) for k in node.keywords)]
                changed = [v for name, v in given if _is_of(v, names, lists) and _edited(called, {name}, (), {})]
        if any(_is_of(part, names, lists) for part in changed):
            found.add(node.lineno)
    return found


def _is_of(node: ast.AST, names: Collection[str], lists: tuple[str, ...]) -> bool:
    """Whether it is such a list, an entry of one, or goes by one of the names."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr in lists if isinstance(node, ast.Attribute) else isinstance(node, ast.Name) and node.id in names
