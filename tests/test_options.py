"""The options of the commands, the parameters of the functions and their documentation are the fields' own."""

import inspect

import click
import pytest

import qdqtool
from qdqtool import options
from qdqtool.base.options import Images, choices_of, options_of, takes
from qdqtool.cli import cli
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.job import extract
from qdqtool.fixing.api import fix

GROUPS = {
    "insert": (qdqtool.insert, "Ranges Images Kept On Placing Output Workers Measuring"),
    "tune": (qdqtool.tune, "Aim Powered On Ranges Images Placing Remainder Workers Effort"),
    "predict": (qdqtool.predict, "On Assumed Way"), "verify": (qdqtool.verify, "OnBuilds Machine"),
    "compare": (qdqtool.compare, "OnBuilds Gpu"), "fix": (fix, "On Fixes"),
    "report": (qdqtool.report, "Beside OnBuilds Machine Assumed"), "extract": (extract, "Selection On Shrinking"),
}
BY_PLACE = {("predict", "On"), ("fix", "On"), ("fix", "Fixes")}


@pytest.mark.parametrize("name", GROUPS)
def test_every_field_is_a_parameter_an_option_and_documented(name: str) -> None:
    function, groups = GROUPS[name]
    parameters = inspect.signature(function).parameters
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and "{options}" not in (function.__doc__ or "")
    made_options = {p.name: p for p in command.params}
    for word in groups.split():
        group = Images if word == "Images" else getattr(options, word)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if (name, word) in BY_PLACE else inspect.Parameter.KEYWORD_ONLY
        for entry in options_of(group):
            known = entry.metadata
            assert parameters[entry.name].default == entry.default and parameters[entry.name].kind is kind
            assert f"\n        {entry.name}: " in (function.__doc__ or "") and known["doc"]
            if known["brief"]:
                made = made_options[entry.name]
                assert isinstance(made, click.Option) and made.help
                assert made.opts[-1].removeprefix("--") == (known["name"] or entry.name).replace("_", "-")
                if known["choices"] and isinstance(made.type, click.Choice):
                    assert tuple(made.type.choices) == choices_of(group, entry.name) and made.default == entry.default


@takes(placing=options.Placing, ranges=options.Ranges)
def example(first: int, *, placing: options.Placing, ranges: options.Ranges, last: str = "") -> tuple[object, ...]:
    """An example.

    Args:
        first: The first.
        {options}
    """
    return first, placing.head, placing.unify, ranges.percentile, last


def test_keywords_become_fields() -> None:
    assert example(1) == (1, "box", True, 99.99, "")
    assert example(1, head="none", unify=False, percentile=99.0, last="x") == (1, "none", False, 99.0, "x")
    assert list(inspect.signature(example).parameters)[:3] == ["first", "last", "head"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        example(1, heads="none")
    with pytest.raises(QdqtoolError, match="`head='all'`: choose one of box, float, none"):
        example(1, head="all")
    assert by_place(1) == (1, "trt10", (), "box")
    assert by_place(1, "trt8.5", 2, 3, head="none") == (1, "trt8.5", (2, 3), "none")
    assert by_place(1, target="trt11") == by_place(1, on=options.On(target="trt11")) == (1, "trt11", (), "box")
    assert by_place(1, placing=options.Placing(head="float"))[-1] == "float"
    assert [p.kind.name for p in inspect.signature(by_place).parameters.values()][:3] == [
        "POSITIONAL_OR_KEYWORD", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL"]


@takes(on=options.On, placing=options.Placing)
def by_place(first: int, on: options.On, *rest: int, placing: options.Placing) -> tuple[object, ...]:
    return first, on.target, rest, placing.head
