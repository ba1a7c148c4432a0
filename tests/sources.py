"""Python's source as a tree."""

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a source, which several files of tests look at."""
    return walked(ast.parse(path.read_text(encoding="utf-8")))


@functools.cache
def _by_kind(path: Path) -> Mapping[type[ast.AST], list[Any]]:
    found: dict[type[ast.AST], list[Any]] = {}
    for node in nodes_of(path):
        found.setdefault(node.__class__, []).append(node)
    return found


def nodes_like(path: Path, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of a source that are of these classes: most look for a tenth of all."""
    return (node for kind in kinds for node in _by_kind(path).get(kind, ()))


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


def _statements(tree: ast.Module) -> list[ast.AST]:
    """A module and its statements, those inside others too: a twentieth of all nodes."""
    found: list[ast.AST] = [tree]
    for node in found:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, None)
            if isinstance(inside, list):
                found += inside
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


def lines_that_edit(
    nodes: Sequence[ast.AST], others: Functions | None = None
) -> set[tuple[str, int]]:
    """Functions and lines that change a list of a graph or node, or overwrite a node, also by a name of these.

    Or give one to a function of the source, or one of the ``others``, that changes what it is given.
    """
    known = {**(others or {}), **functions_of(nodes)}
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef))
    return {(f.name, line) for f in functions for line in _edited(f, set(), _OF_GRAPHS, known)}


def _edited(
    function: ast.FunctionDef, names: set[str], lists: tuple[str, ...], known: Functions
) -> set[int]:
    """Lines that change such a list or its entries, which go by the names too."""
    inside = walked(function)
    if not names and not any(n.__class__ is ast.Attribute and n.attr in lists for n in inside):  # type: ignore[attr-defined]
        return set()  # neither such a list nor what goes by another name
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
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _OVERWRITES
            and _is_of(node.value, members, nodes)
        ):
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
                given = [
                    *zip(takes, node.args, strict=False),
                    *((str(k.arg), k.value) for k in node.keywords),
                ]
                changed = [
                    v
                    for name, v in given
                    if _is_of(v, names, lists) and _edited(called, {name}, (), {})
                ]
        if any(_is_of(part, names, lists) for part in changed):
            found.add(node.lineno)
    return found


def _is_of(node: ast.AST, names: Collection[str], lists: tuple[str, ...]) -> bool:
    """Whether it is such a list, an entry of one, or goes by one of the names."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (
        node.attr in lists
        if isinstance(node, ast.Attribute)
        else isinstance(node, ast.Name) and node.id in names
    )


# What reads a sentence ------------------------------------------------------------------------------------------------

# Fields of results that hold sentences, and what looks into a text.
SAID = {
    "checked",
    "fix",
    "kept",
    "message",
    "note",
    "notes",
    "reason",
    "sentence",
    "warnings",
    "why",
    "why_not",
}
LOOKS = {
    "count",
    "endswith",
    "find",
    "findall",
    "fullmatch",
    "index",
    "match",
    "partition",
    "search",
    "split",
    "startswith",
}
_EACH = "|".join(sorted(SAID))
_NAMES = re.compile(rf"\.(?:{_EACH})\b|\[[\"'](?:{_EACH})[\"']\]")


def lines_that_read(source: str, nodes: Sequence[ast.AST] | None = None) -> list[int]:
    """Lines that look into what results say: a field of SAID, or a name that was given one, beside words.

    Words are texts, constants and compiled patterns of the module, and names that a loop gives those of them.
    ``nodes`` are those of the source, where somebody has them.
    """
    found = []
    named = [number for number, line in enumerate(source.splitlines(), 1) if _NAMES.search(line)]
    if nodes is None:
        nodes = _statements(ast.parse(source)) if named else []
    constants: set[str] = set()
    for node in (n for module in nodes[:1] for n in getattr(module, "body", ())):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and value is not None
            and _has_words(value, constants)
        ):
            constants.update(
                _names(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            )
    for function in (n for n in nodes if isinstance(n, ast.FunctionDef)):
        if not any(function.lineno <= number <= (function.end_lineno or 0) for number in named):
            continue  # where none of these fields is named, none is read
        inside = walked(function)
        given, worded = set[str](), set(constants)
        for _ in range(2):  # a comprehension may stand in front of what it is given
            for node in inside:
                target, value = (
                    (node.targets[0], node.value)
                    if isinstance(node, ast.Assign)
                    else (
                        (node.target, node.iter)
                        if isinstance(node, ast.comprehension | ast.For)
                        else (None, None)
                    )
                )
                if target is None or value is None:
                    continue
                if _is_said(value, given):
                    given.update(_names(target))
                elif not isinstance(node, ast.Assign) and _has_words(value, worded):
                    worded.update(_names(target))
        for node in inside:
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Compare):
                for one, other in zip(
                    [node.left, *node.comparators], node.comparators, strict=False
                ):
                    both = isinstance(one, ast.Tuple) and isinstance(other, ast.Tuple)
                    pairs += zip(one.elts, other.elts, strict=False) if both else [(one, other)]  # type: ignore
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOOKS
            ):
                pairs += [(node.func.value, part) for part in node.args]
                pairs += zip(node.args, node.args[1:], strict=False)
            pairs += [(other, one) for one, other in pairs]
            if any(_is_said(one, given) and _has_words(other, worded) for one, other in pairs):
                found.append(node.lineno)
    return found


def _is_said(node: ast.expr, given: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in given
    if isinstance(node, ast.Attribute):
        return node.attr in SAID or (hasattr(str, node.attr) and _is_said(node.value, given))
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Attribute) and node.value.attr == "values":
            return False
        return (isinstance(node.slice, ast.Constant) and node.slice.value in SAID) or _is_said(
            node.value, given
        )
    if isinstance(node, ast.Call):
        asked = [node.func] if isinstance(node.func, ast.Attribute) else []
        asked += (
            node.args
            if isinstance(node.func, ast.Name) and node.func.id in ("str", "next", "list", "set")
            else []
        )
        return any(_is_said(part, given) for part in asked)
    if isinstance(node, ast.Compare):
        return False
    parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
    return any(_is_said(part, given) for part in parts)


def _names(target: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def _has_words(node: ast.AST, worded: Collection[str] = ()) -> bool:
    """Whether a text of words stands there, or a name of one: not what a remark is made with, and no key."""
    if isinstance(node, ast.Name):
        return node.id in worded
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and re.search(r"[A-Za-z]{3}", node.value) is not None
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Subscript):
        parts = [node.value]
    elif isinstance(node, ast.Call):
        parts = node.args if ast.unparse(node.func) == "re.compile" else [node.func]
    return any(_has_words(part, worded) for part in parts)
