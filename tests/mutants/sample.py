"""Finds the places that can be changed, and draws from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator

# What stands for a comparison: its negation, and the neighbour that differs in the boundary.
_COMPARISONS = (
    ("Eq", "NotEq"), ("NotEq", "Eq"), ("Lt", "LtE"), ("Lt", "GtE"), ("LtE", "Lt"), ("LtE", "Gt"), ("Gt", "GtE"),
    ("Gt", "LtE"), ("GtE", "Gt"), ("GtE", "Lt"), ("Is", "IsNot"), ("IsNot", "Is"),
)  # fmt: skip
OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{a}_{b}" for a, b in _COMPARISONS),
    "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceUnaryOperator_Delete_Not", "core/AddNot",
    "core/NumberReplacer", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "own/Membership",
)  # fmt: skip


class Membership(Operator):
    """Turns ``in`` into ``not in`` and back; cosmic-ray leaves these two comparisons alone."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if _is_membership(node):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        word = " in" if node.children[1].type == "comp_op" else " not in"
        node.children[1] = parso.parse(word)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("a in b", "a not in b"), Example("a not in b", "a in b"))


def _is_membership(node: Any) -> bool:
    return node.type == "comparison" and node.children[1].get_code().split() in (["in"], ["not", "in"])


def operator_named(name: str) -> Operator:
    made: Operator = Membership() if name == "own/Membership" else get_operator(name)()
    return made


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        file: Path from the root of the tree.
        line: Line of the change, from 1.
        column: Column, from 0.
        operator: Name of the operator.
        occurrence: The how-many-eth place of the operator in the file.
    """

    file: str
    line: int
    column: int
    operator: str
    occurrence: int

    def apply(self, code: str) -> str:
        changed = mutate_code(code, operator_named(self.operator), self.occurrence)
        assert changed is not None, f"{self}: nothing to change"
        return str(changed)


class _Finder(Visitor):
    def __init__(self, operators: dict[str, Operator]) -> None:
        self.operators = operators
        self.found: list[tuple[str, int, Any]] = []
        self.counts = dict.fromkeys(operators, 0)

    def visit(self, node: Any) -> Any:
        for name, operator in self.operators.items():
            for start, _ in operator.mutation_positions(node):
                if not _pointless(node):
                    self.found.append((name, self.counts[name], start))
                self.counts[name] += 1
        return node


def _pointless(node: Any) -> bool:
    """Whether a change could not matter (a decorator's slots=True, type checking) or would always be seen (assert)."""
    if node.type == "assert_stmt" or (node.type == "if_stmt" and "TYPE_CHECKING" in node.children[1].get_code()):
        return True
    while node is not None:
        if node.type in ("decorator", "annassign_type", "tfpdef", "assert_stmt"):
            return True
        parent = node.parent
        if parent is not None and parent.type == "funcdef" and parent.annotation is node:
            return True
        if parent is not None and parent.type == "annassign" and parent.children[1] is node:
            return True
        node = parent
    return False


def mutants_of(root: Path, file: str) -> list[list[Mutant]]:
    """Every mutant of a file; those that change the same place stand together."""
    finder = _Finder({name: operator_named(name) for name in OPERATORS})
    finder.walk(get_ast((root / file).read_text(encoding="utf-8")))
    places: dict[Any, list[Mutant]] = {}
    for name, occurrence, (line, column) in finder.found:
        places.setdefault((line, column), []).append(Mutant(file, line, column, name, occurrence))
    return [places[at] for at in sorted(places)]


def draw(root: Path, package: str, count: int, dice: random.Random) -> tuple[list[Mutant], int]:
    """Up to ``count`` mutants of a package, one for each place; and the number of places."""
    files = sorted(str(p.relative_to(root)) for p in (root / package).rglob("*.py"))
    places: Sequence[list[Mutant]] = [place for file in files for place in mutants_of(root, file)]
    chosen = dice.sample(places, min(count, len(places)))
    return [dice.choice(place) for place in chosen], len(places)
