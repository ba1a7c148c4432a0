"""The options of the commands, the parameters of the functions and their documentation are the fields' own."""

from __future__ import annotations

import inspect
from dataclasses import fields

import click
import pytest

import qdqtool
from qdqtool.cli import cli
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.options import Images, Kept, Output, Placing, Ranges, Remainder, Workers, takes

GROUPS = {
    "insert": (qdqtool.insert, (Ranges, Images, Kept, Placing, Output, Workers)),
    "tune": (qdqtool.tune, (Ranges, Images, Placing, Remainder, Workers)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_every_field_is_a_parameter_an_option_and_documented(name: str) -> None:
    function, groups = GROUPS[name]
    parameters = inspect.signature(function).parameters
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and "{options}" not in (function.__doc__ or "")
    options = {p.name: p for p in command.params}
    for entry in (f for group in groups for f in fields(group)):
        assert parameters[entry.name].default == entry.default
        assert parameters[entry.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"\n        {entry.name}: " in (function.__doc__ or "")
        if entry.metadata["brief"]:
            made = options[entry.metadata["flag"] or entry.name]
            assert isinstance(made, click.Option) and made.help == entry.metadata["brief"]
            kind = made.type
            if entry.metadata["choices"] and isinstance(kind, click.Choice):
                assert tuple(kind.choices) == entry.metadata["choices"] and made.default == entry.default


@takes(placing=Placing, ranges=Ranges)
def example(first: int, *, placing: Placing, ranges: Ranges, last: str = "") -> tuple[object, ...]:
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


def test_wrong_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        example(1, heads="none")
    with pytest.raises(QdqtoolError, match="`head='all'`: choose one of box, float, none"):
        example(1, head="all")
