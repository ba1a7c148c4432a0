"""Options of the commands agree with the parameters of the Python functions that they call."""

import inspect
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import pytest

import calibration
import qdqtool
from qdqtool import builders, options
from qdqtool.base.options import Ranges, as_in, concern, option_of, options_of, takes
from qdqtool.commands import inputs
from qdqtool.commands.cli import cli
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.job import extract
from qdqtool.fixing.api import fix
from qdqtool.verification.api import verify_from_log, verify_with_builder
from tests.contract import residual

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "insert": qdqtool.insert,
    "tune": qdqtool.tune,
    "predict": qdqtool.predict,
    "verify": qdqtool.verify,
    "compare": qdqtool.compare,
    "fix": fix,
    "report": qdqtool.report,
    "extract": extract,
    "build": builders.build,
}
DOCUMENTED = (
    *FUNCTIONS.values(),
    calibration.collect,
    calibration.open_data,
    verify_from_log,
    verify_with_builder,
)


def shared_parameters(name: str) -> list[tuple[click.Option, inspect.Parameter]]:
    """Return the options of a command with the parameters of its function that have their names."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    return [
        (option, parameters[str(option.name)])
        for option in command.params
        if isinstance(option, click.Option) and option.name in parameters
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_command_has_the_defaults_of_the_function(name: str) -> None:
    for option, parameter in shared_parameters(name):
        assert option.help
        if option.is_flag:
            assert parameter.default is option.opts[0].startswith("--no-"), option.name
        elif isinstance(option.default, (int, float, str)):  # else the command leaves it out
            assert option.default == parameter.default, option.name


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        (name, str(option.name))
        for name in FUNCTIONS
        for option, _ in shared_parameters(name)
        if isinstance(option.type, click.Choice) and name not in ("build", "verify")
    ],
)
def test_function_has_the_choices_of_the_command(name: str, parameter: str) -> None:
    (option,) = (o for o, _ in shared_parameters(name) if o.name == parameter)
    assert isinstance(option.type, click.Choice)
    arguments: dict[str, Any] = {"data": np.zeros((1, 8, 8, 8), np.float32)}
    arguments = {
        k: v for k, v in arguments.items() if k in inspect.signature(FUNCTIONS[name]).parameters
    }
    with pytest.raises(QdqtoolError, match="no-such") as caught:
        FUNCTIONS[name](residual(), *arguments, **{parameter: "no-such"})
    assert all(choice in str(caught.value) for choice in option.type.choices)


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda f: f.__name__)
def test_function_documents_each_parameter(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    assert "{options}" not in text
    for name in inspect.signature(function).parameters:
        assert f"\n    {name}" in text or f"\n    *{name}" in text or f"``{name}``" in text, name


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda f: f.__name__)
def test_function_rejects_unknown_keywords(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    required = ["m.onnx" for p in parameters if p.default is p.empty and p.kind.value < 2]
    with pytest.raises(TypeError, match="tarket"):
        function(*required, tarket="trt8.5")


# Functions and commands whose parameters are fields of classes


@takes(placing=options.Placing, ranges=Ranges)
def by_keyword(
    first: int, *, placing: options.Placing, ranges: Ranges, last: str = ""
) -> tuple[object, ...]:
    """An example.

    Args:
        first: The first.
        {options}
    """
    return first, placing.head, placing.unify, ranges.percentile, last


@takes(on=options.On, placing=options.Placing)
def by_position(
    first: int, on: options.On, *rest: int, placing: options.Placing
) -> tuple[object, ...]:
    return first, on.target, rest, placing.head


def test_keyword_parameters_become_fields() -> None:
    assert by_keyword(1) == (1, "box", True, 99.99, "")
    other = by_keyword(1, head="none", unify=False, percentile=99.0, last="x")  # type: ignore[call-arg]
    assert other == (1, "none", False, 99.0, "x")
    assert list(inspect.signature(by_keyword).parameters)[:3] == ["first", "last", "head"]
    with pytest.raises(QdqtoolError, match=r"head='all'.*box.*float.*none"):
        by_keyword(1, head="all")  # type: ignore[call-arg]


def test_positional_parameters_become_fields() -> None:
    function: Any = by_position
    assert function(1) == (1, "trt10", (), "box")
    assert function(1, "trt8.5", 2, 3, head="none") == (1, "trt8.5", (2, 3), "none")
    assert function(1, target="trt11") == function(1, on=options.On(target="trt11"))
    kinds = [p.kind.name for p in inspect.signature(function).parameters.values()]
    assert kinds[:3] == ["POSITIONAL_OR_KEYWORD", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL"]


@concern
class Inherited(options.Placing):
    """An example."""

    head: str = as_in(options.Placing, "head", "float", doc="Which.")
    weights: str = as_in(options.Placing, "weights")


def test_inherited_option_keeps_what_it_does_not_state() -> None:
    assert [o.name for o in options_of(Inherited)] == [o.name for o in options_of(options.Placing)]
    assert (Inherited().head, options.Placing().head, Inherited().weights) == (
        "float",
        "box",
        "float",
    )
    before, after = (option_of(c, "head").metadata for c in (options.Placing, Inherited))
    assert after == {**before, "doc": "Which."} and before["doc"] != "Which."
    with pytest.raises(QdqtoolError, match="head='all'"):
        Inherited(head="all")
    with pytest.raises(QdqtoolError, match="exclude=3"):
        Inherited(exclude=3)


def test_command_options_have_the_order_and_help_of_the_decorator() -> None:
    @click.command("example")
    @inputs.made_of("placing", Inherited, "weights", "head", head="As given.")
    @inputs.made_of("shown", inputs.Shown, "everything", everything="All of it.")
    def command(placing: Inherited, shown: inputs.Shown) -> int:
        return len(placing.head) + len(placing.weights) if shown.everything else 0

    assert [(p.name, p.help) for p in command.params if isinstance(p, click.Option)] == [
        ("weights", option_of(options.Placing, "weights").metadata["brief"]),
        ("head", "As given."),
        ("everything", "All of it."),
    ]
    code = command.main(["--all", "--head", "none"], standalone_mode=False)
    assert code == len("none") + len("float")
