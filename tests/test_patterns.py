"""Regular expressions take time linear in the length of the text.

Each pattern of the package is matched against texts that cause backtracking. Tests compare
measurements of one process at two lengths, so that they do not depend on the speed of the machine.
"""

import ast
import importlib
import importlib.util
import itertools
import pkgutil
import re
import re._constants as sre
import re._parser as parser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import calibration
import qdqtool
from tests.growth_factor import LINEAR, LONGEST, QUADRATIC, growth_factor
from tests.sources import nodes_like

REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
METHODS = ("match", "fullmatch", "search", "finditer", "findall", "sub", "split")

# These patterns search the first 4,000 characters of a message only, and may be quadratic.
BOUNDED_MODULE, BOUNDED_LENGTH = "qdqtool.findings.errors", 1 << 12


def module_names() -> Iterator[str]:
    for package in (qdqtool, calibration):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", ".worker")):
                yield module.name


def collect_patterns() -> dict[str, tuple[re.Pattern[Any], set[str]]]:
    patterns: dict[str, tuple[re.Pattern[Any], set[str]]] = {}
    for name in module_names():
        attributes: dict[str, list[re.Pattern[Any]]] = {}
        if name.startswith(
            "qdqtool.qat."
        ):  # importing these takes seconds and needs training libraries
            spec = importlib.util.find_spec(name)
            source = (path := Path(str(spec.origin))).read_text()
            assert "re.compile" not in source, (
                f"{name}: pass the pattern to a function of `re` where it is used"
            )
        else:
            try:
                module = importlib.import_module(name)
            except ImportError:  # an optional dependency is missing
                continue
            attributes = {
                label: found
                for label, value in vars(module).items()
                if (found := [*patterns_in(value)])
            }
            source = (path := Path(str(module.__file__))).read_text()
        methods: dict[str, set[str]] = {}
        for node in (
            nodes_like(path, ast.Attribute, ast.Call)
            if attributes or re.search(r"\bre\.", source)
            else ()
        ):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in METHODS
                and isinstance(node.value, ast.Name)
            ):
                methods.setdefault(node.value.id, set()).add(node.attr)
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.args
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr in METHODS
                and isinstance(node.args[0], ast.Constant)
            ):
                patterns[f"{name}:{node.lineno}"] = re.compile(node.args[0].value), {node.func.attr}
        for label, found in attributes.items():
            for number, pattern in enumerate(found):
                patterns[f"{name}.{label}[{number}]"] = pattern, methods.get(label, {"search"})
    return patterns


def patterns_in(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from patterns_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from patterns_in(item)


def matching_text(items: Any) -> str:
    return "".join(matching_part(op, argument) for op, argument in items)


def matching_part(op: Any, argument: Any) -> str:
    if op in REPEATS:
        low, _, inner = argument
        return matching_text(inner) * max(1, low)
    parts: dict[Any, Any] = {
        sre.LITERAL: chr,
        sre.NOT_LITERAL: lambda _: "~",
        sre.ANY: lambda _: "a",
        sre.IN: matching_character,
        sre.SUBPATTERN: lambda group: matching_text(group[-1]),
        sre.BRANCH: lambda branches: matching_text(branches[1][0]),
    }
    return parts[op](argument) if op in parts else ""


def matching_character(choices: Any) -> str:
    for op, argument in choices:
        if op is sre.LITERAL:
            return chr(argument)
        if op is sre.RANGE:
            return chr(argument[0])
        if op is sre.CATEGORY:
            return {sre.CATEGORY_DIGIT: "1", sre.CATEGORY_SPACE: " "}.get(argument, "a")
        if op is sre.NEGATE:
            return next(
                c
                for c in "a1 ~\"'"
                if not any(o is sre.LITERAL and chr(a) == c for o, a in choices[1:])
            )
    return "a"


def group_literals(items: Any) -> list[list[Any]]:
    groups: list[list[Any]] = []
    for is_literal, run in itertools.groupby(items, lambda item: item[0] is sre.LITERAL):
        group = list(run)
        groups += [group] if is_literal else [[item] for item in group]
    return groups


def provoking_texts(items: Any) -> Iterator[tuple[str, str, str]]:
    """Yield texts that match the start of a pattern and then repeat a part of it.

    The texts never match the end of the pattern.

    Yields:
        Start of the text, the part to repeat, and end of the text.
    """
    groups = group_literals(items)
    for first, last in itertools.combinations(range(min(len(groups), 9) + 1), 2):
        unit = matching_text([item for group in groups[first:last] for item in group])
        if unit:
            start = matching_text([item for group in groups[:first] for item in group])
            yield start, unit, "\x00"
            yield start, unit, ""
    for op, argument in items:
        is_group = op in REPEATS or op is sre.SUBPATTERN  # whose last part has the items
        inner = argument[1] if op is sre.BRANCH else [argument[-1]] if is_group else []
        for branch in inner:
            yield from provoking_texts(branch)


def apply_method(pattern: re.Pattern[Any], method: str, text: str) -> None:
    subject: Any = text.encode("utf-8", "replace") if isinstance(pattern.pattern, bytes) else text
    result = getattr(pattern, method)(*((subject[:0], subject) if method == "sub" else (subject,)))
    if method == "finditer":
        list(result)


def slow_text(
    pattern: re.Pattern[Any], method: str, limit: float = LINEAR, longest: int = LONGEST
) -> str:
    """Return the start of a text for which the time of a pattern grows faster than `limit`.

    Empty without such a text.
    """
    for start, unit, end in sorted(
        {
            *provoking_texts(parser.parse(pattern.pattern, pattern.flags)),
            *(("", unit, "") for unit in "[( "),
        }
    ):

        def match(length: int) -> None:
            apply_method(pattern, method, start + unit * (length // len(unit)) + end)  # noqa: B023

        if growth_factor(match, limit, longest) > limit:
            return (start + unit * 9 + end)[:60]
    return ""


def test_patterns_are_linear() -> None:
    patterns = collect_patterns()
    assert len(patterns) > 60
    slow = {}
    for place, (pattern, methods) in patterns.items():
        bounded = place.startswith(BOUNDED_MODULE)
        limits = (QUADRATIC, BOUNDED_LENGTH) if bounded else (LINEAR, LONGEST)
        for method in methods:
            if text := slow_text(pattern, method, *limits):
                slow[f"{place} ({method})"] = text
    assert not slow


@pytest.mark.parametrize(
    ("pattern", "method", "is_quadratic"),
    [
        (r"(?:_clone_\d+)+$", "search", True),
        (r"\x1b\][^\x07]*\x07", "sub", True),
        (r"_clone_\d", "search", False),
    ],
)
def test_patterns_quadratic_pattern_is_found(pattern: str, method: str, is_quadratic: bool) -> None:
    assert bool(slow_text(re.compile(pattern), method)) == is_quadratic
