"""The options of the commands, the parameters of the functions and their documentation are the fields' own."""

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import click
import pytest

import calibration
import qdqtool
from qdqtool import builders, options
from qdqtool.base import options as of_calibration
from qdqtool.base.options import as_in, choices_of, concern, option_of, options_of, takes
from qdqtool.commands import inputs
from qdqtool.commands.cli import COMMANDS, cli
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.job import extract
from qdqtool.fixing.api import fix
from qdqtool.verification.api import verify_from_log, verify_with_builder
from tests.raising import raises
from tests.sources import nodes_like, nodes_of
from tests.test_structure import sources

GROUPS = {
    "insert": (qdqtool.insert, "Ranges Images Kept On Placing Output Workers Measuring Checking"),
    "tune": (qdqtool.tune, "Aim Powered On Ranges Images Placing Remainder Workers Effort"),
    "predict": (qdqtool.predict, "On Assumed Way"),
    "verify": (qdqtool.verify, "OnBuilds Machine"),
    "compare": (qdqtool.compare, "OnBuilds Gpu"),
    "fix": (fix, "On Fixes"),
    "report": (qdqtool.report, "Beside OnBuilds Machine Assumed"),
    "extract": (extract, "Selection On Shrinking"),
    "build": (builders.build, "Building"),
}
# What no command is called after.
FUNCTIONS = {
    calibration.collect: "Collected Workers",
    calibration.open_data: "Samples",
    verify_with_builder: "Here OnBuilds",
    verify_from_log: "OnBuilds",
}
BY_PLACE = {
    ("predict", "On"),
    ("fix", "On"),
    ("fix", "Fixes"),
    ("build", "Building"),
    ("open_data", "Samples"),
    ("verify_with_builder", "Here"),
    ("verify_with_builder", "OnBuilds"),
}


def group_named(word: str) -> type:
    found: type = getattr(options if hasattr(options, word) else of_calibration, word)
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_every_field_is_a_parameter_an_option_and_documented(name: str) -> None:
    function, groups = GROUPS[name]
    fields_are_parameters(name, function, groups)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and "{options}" not in (function.__doc__ or "")
    made_options = {p.name: p for p in command.params}
    for word in groups.split():
        group = group_named(word)
        for entry in options_of(group):
            known = entry.metadata
            if known["brief"]:
                made = made_options[entry.name]
                assert isinstance(made, click.Option) and made.help
                assert made.opts[-1].removeprefix("--") == (known["name"] or entry.name).replace(
                    "_", "-"
                )
                if known["choices"] and isinstance(made.type, click.Choice):
                    assert (
                        tuple(made.type.choices) == choices_of(group, entry.name)
                        and made.default == entry.default
                    )


def fields_are_parameters(name: str, function: Any, groups: str) -> None:
    parameters = inspect.signature(function).parameters
    for word in groups.split():
        kind = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if (name, word) in BY_PLACE
            else inspect.Parameter.KEYWORD_ONLY
        )
        for entry in options_of(group_named(word)):
            assert (
                parameters[entry.name].default == entry.default
                and parameters[entry.name].kind is kind
            )
            text = " ".join(entry.metadata["doc"].split())
            assert text and f" {entry.name}: {text}" in " ".join((function.__doc__ or "").split())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_field_is_a_documented_parameter(function: Any) -> None:
    fields_are_parameters(function.__name__, function, FUNCTIONS[function])


@takes(placing=options.Placing, ranges=of_calibration.Ranges)
def example(
    first: int, *, placing: options.Placing, ranges: of_calibration.Ranges, last: str = ""
) -> tuple[object, ...]:
    """An example.

    Args:
        first: The first.
        {options}
    """
    return first, placing.head, placing.unify, ranges.percentile, last


def test_keywords_become_fields() -> None:
    assert example(1) == (1, "box", True, 99.99, "")
    assert example(1, head="none", unify=False, percentile=99.0, last="x") == (
        1,
        "none",
        False,
        99.0,
        "x",
    )
    assert list(inspect.signature(example).parameters)[:3] == ["first", "last", "head"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        example(1, heads="none")
    with raises(QdqtoolError, "check_choice `head='all'` box float none"):
        example(1, head="all")
    assert by_place(1) == (1, "trt10", (), "box")
    assert by_place(1, "trt8.5", 2, 3, head="none") == (1, "trt8.5", (2, 3), "none")
    assert (
        by_place(1, target="trt11")
        == by_place(1, on=options.On(target="trt11"))
        == (1, "trt11", (), "box")
    )
    assert by_place(1, placing=options.Placing(head="float"))[-1] == "float"
    assert [p.kind.name for p in inspect.signature(by_place).parameters.values()][:3] == [
        "POSITIONAL_OR_KEYWORD",
        "POSITIONAL_OR_KEYWORD",
        "VAR_POSITIONAL",
    ]


@takes(on=options.On, placing=options.Placing)
def by_place(
    first: int, on: options.On, *rest: int, placing: options.Placing
) -> tuple[object, ...]:
    return first, on.target, rest, placing.head


@concern
class Inherited(options.Placing):
    """An example."""

    head: str = as_in(options.Placing, "head", "float", doc="Which.")
    weights: str = as_in(options.Placing, "weights")


def test_an_option_of_another_concern() -> None:
    assert [o.name for o in options_of(Inherited)] == [o.name for o in options_of(options.Placing)]
    assert (Inherited().head, options.Placing().head, Inherited().weights) == (
        "float",
        "box",
        "float",
    )
    was, now = option_of(options.Placing, "head").metadata, option_of(Inherited, "head").metadata
    assert now == {**was, "doc": "Which."} and was["doc"] != "Which."
    with raises(QdqtoolError, "check_choice box float none"):
        Inherited(head="all")


def test_fields_in_another_order_and_without_a_text() -> None:
    @click.command("example")
    @inputs.made_of("one", Inherited, "weights", "head", head="As told.")
    @inputs.made_of("two", inputs.Shown, "everything", everything="All of it.")
    def command(one: Inherited, two: inputs.Shown) -> int:
        return len(one.head) + len(one.weights) if two.everything else 0

    told = {p.name: p.help for p in command.params if isinstance(p, click.Option)}
    assert list(told.items()) == [
        ("weights", option_of(options.Placing, "weights").metadata["brief"]),
        ("head", "As told."),
        ("everything", "All of it."),
    ]
    assert command.main(["--all", "--head", "none"], standalone_mode=False) == len("none") + len(
        "float"
    )


# Stated once ------------------------------------------------------------------------------------------------------

# Where click's options are made of fields. The arguments of a command stand there: they have no help and no default.
MAKER = "qdqtool.commands.inputs"
TEXTS = (ast.Constant, ast.JoinedStr)


def made_by_hand(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What is made of click's own options beside :data:`MAKER`, and there with a text or a default written out."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "click":
            yield from (
                f"{module}:{node.lineno}"
                for a in node.names
                if a.name.lower() in ("option", "argument")
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = ast.unparse(node.func).lower()
            written = [
                k
                for k in node.keywords
                if k.arg in ("help", "default") and isinstance(k.value, TEXTS)
            ]
            if (kind == "click.option" and module != MAKER) or (
                kind in ("click.option", "click.argument") and written
            ):
                yield f"{module}:{node.lineno}"


def test_click_options_are_made_of_fields() -> None:
    assert [
        w for module, path in sources().items() for w in made_by_hand(module, nodes_of(path))
    ] == []
    source = """
from click import option, Choice
click.option("--a")
click.argument("m", type=click.Path())
click.argument("n", default=1)
click.version_option("1", help="x")
"""
    assert list(made_by_hand("a", ast.walk(ast.parse(source)))) == ["a:2", "a:3", "a:5"]
    written = 'click.option(*names, help="text")\nclick.option(*names, help=brief, default=shown)'
    assert list(made_by_hand(MAKER, ast.walk(ast.parse(written)))) == [f"{MAKER}:1"]


@functools.cache
def concerns() -> set[type]:
    """Every class with options."""
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in COMMANDS]
    homes = [
        of_calibration,
        options,
        inputs,
        *(inspect.getmodule(c.callback) for c in commands if c is not None),
    ]
    return {
        v
        for home in homes
        for v in vars(home).values()
        if isinstance(v, type) and "_options" in vars(v)
    } | {of_calibration.Preprocess}


def said_by(default: object) -> str:
    """A default in words; empty where it says nothing that would have to be kept equal."""
    return "" if isinstance(default, bool | None) or default in ((), "") else repr(default)


def stated(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, bool, str]]:
    """Name, default, whether it is an option's, and place of parameters and fields whose defaults are written there.

    And of what a body takes where there is no value: ``x or 3``, ``3 if x is None else x``, ``x = 3``.
    """
    for node in nodes:
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef):
            given = node.args
            pairs += zip(
                [a.arg for a in (*given.posonlyargs, *given.args)][::-1],
                given.defaults[::-1],
                strict=False,
            )
            pairs += zip([a.arg for a in given.kwonlyargs], given.kw_defaults, strict=True)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pairs = [(node.targets[0].id, node.value)]
        elif isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            named = [
                ast.unparse(p).rpartition(".")[2]
                for p in parts
                if isinstance(p, ast.Name | ast.Attribute)
            ]
            pairs = [(name, parts[i]) for name in named for i in (0, -1)]
        for name, value in pairs:
            of_option = (
                isinstance(value, ast.Call)
                and ast.unparse(value.func) == "option"
                and bool(value.args)
            )
            said = said_by(written(module, value.args[0] if of_option else value))  # type: ignore[union-attr]
            if said:
                yield name, said, of_option, f"{module}:{node.lineno}"  # type: ignore[attr-defined]


def written(module: str, value: ast.AST | None) -> object:
    """What is written out there, or where the name comes from; None where it is another's."""
    if isinstance(value, ast.Name) and module in sources():
        for node in nodes_like(sources()[module], ast.Assign, ast.ImportFrom):
            if isinstance(node, ast.Assign) and any(
                getattr(t, "id", "") == value.id for t in node.targets
            ):
                return written(module, node.value)
            if isinstance(node, ast.ImportFrom) and value.id in [
                a.asname or a.name for a in node.names
            ]:
                return (
                    None if node.module == "qdqtool.options" else written(str(node.module), value)
                )
    try:
        return ast.literal_eval(value) if isinstance(value, ast.expr) else None
    except ValueError:
        return None


def test_no_default_is_stated_twice() -> None:
    """A parameter named as an option takes its default from the option, and an option that of another (``as_in``)."""
    known = {(o.name, said_by(o.default)) for group in concerns() for o in options_of(group)}
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in sources().items():
        kinds = (ast.FunctionDef, ast.AnnAssign, ast.Assign, ast.BoolOp, ast.IfExp)
        for name, said, of_option, where in stated(module, nodes_like(path, *kinds)):
            if (name, said) in known:
                found.setdefault((name, said), [] if of_option else ["beside the option"]).append(
                    where
                )
    assert {key: places for key, places in found.items() if len(places) > 1} == {}
    assert (
        ("head", "'box'") in found
        and ("max_images", "512") in found
        and ("max_images", "64") not in found
    )
    source = """
def f(a=1, b="x", *, size=320, head=Placing.head, other=None):
    a = a or 1
    return 320 if size is None else self.size
    size = 3
class C:
    size: int = option(320, "a text")
    weights: str = "int8"
"""
    assert sorted(stated("a", ast.walk(ast.parse(source))), key=lambda row: row[3]) == [
        ("b", "'x'", False, "a:2"),
        ("a", "1", False, "a:2"),
        ("size", "320", False, "a:2"),
        ("a", "1", False, "a:3"),
        ("size", "320", False, "a:4"),
        ("size", "3", False, "a:5"),
        ("size", "320", True, "a:7"),
        ("weights", "'int8'", False, "a:8"),
    ]
