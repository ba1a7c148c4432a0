import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import click
import numpy as np
import pytest

import calibration
import qdqtool
from qdqtool import builders
from qdqtool.builders.options import BUILDERS, BuildOptions
from qdqtool.commands.cli import cli
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.options import (
    CHECKED_MODELS,
    PREDICTED_MODELS,
    SelectionOptions,
    ShrinkOptions,
)
from qdqtool.fixing.runner import FixOptions
from qdqtool.formats.output import as_options
from qdqtool.insertion import options as of_insertion
from qdqtool.insertion.losses import SAMPLES
from qdqtool.insertion.options import (
    CacheOptions,
    ClusterOptions,
    ImageOptions,
    InsertOptions,
    NetworkOptions,
    PlacementOptions,
    RangeOptions,
)
from qdqtool.insertion.output_errors import SMALL_ERROR
from qdqtool.prediction import check_activations
from qdqtool.reporting.options import ReportInputs
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import GpuOptions, TimingOptions
from qdqtool.trt.targets import DEFAULT_SM, DEFAULT_TARGET
from qdqtool.tuning.options import KEEP, SWEPT_ON, SearchBudget, TuningGoal
from qdqtool.util import limits
from qdqtool.verification.api import verify_with_builder
from qdqtool.verification.local_build import build_model
from tests.errors import has
from tests.sources import nodes_like, sources

Function = Callable[..., Any]


def parameters(function: Function) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


CALIBRATION = (RangeOptions, ImageOptions, ClusterOptions, PlacementOptions)
CLASSES: dict[Function, tuple[type, ...]] = {
    qdqtool.insert: (*CALIBRATION, CacheOptions, NetworkOptions, InsertOptions),
    qdqtool.tune: (*CALIBRATION, NetworkOptions, GpuOptions, TuningGoal, SearchBudget),
    qdqtool.verify: (GpuOptions,),
    qdqtool.report: (GpuOptions, ReportInputs),
    qdqtool.compare: (ImageOptions,),
    qdqtool.fix: (FixOptions, ImageOptions),
    qdqtool.extract: (SelectionOptions, ShrinkOptions),
    builders.build: (BuildOptions,),
    build_model: (BuildOptions,),
    calibration.collect: (ClusterOptions,),
}
# Fields that a function has no parameter for, because it has no use for them.
NOT_PARAMETERS = {
    (qdqtool.tune, "input_type"),
    (qdqtool.tune, "tuned"),
    (qdqtool.verify, "power"),
}


@pytest.mark.parametrize("function", CLASSES, ids=lambda f: f.__name__)
def test_option_classes_have_defaults_of_parameters(function: Function) -> None:
    arguments = parameters(function)
    for cls in CLASSES[function]:
        for field in fields(cls):
            has_value = field.default_factory is MISSING and field.default is not MISSING
            if has_value and (function, field.name) not in NOT_PARAMETERS:
                assert arguments[field.name].default == field.default, field.name


def test_functions_have_the_same_defaults() -> None:
    for name in ("percentile", "max_images", "size", "overwrite_cache"):
        default = parameters(qdqtool.insert)[name].default
        for function in (calibration.collect, calibration.open_data, calibration.amax_of):
            if name in parameters(function):
                assert parameters(function)[name].default == default, name
    assert [
        parameters(f)["preprocess"].default for f in (calibration.collect, calibration.open_data)
    ] == [calibration.Preprocess()] * 2


@pytest.mark.parametrize(
    "function",
    [*CLASSES, qdqtool.predict, calibration.open_data, check_activations],
    ids=lambda f: f.__name__,
)
def test_every_parameter_is_documented(function: Function) -> None:
    text = inspect.getdoc(function) or ""
    if function is build_model:  # names those of build
        return
    for name in parameters(function):
        assert f"\n    {name}: " in text, name


# Numbers of numpy


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (RangeOptions("percentile", percentile=np.float32(99.5)), "percentile", 99.5),
        (RangeOptions(max_images=np.int64(8)), "max_images", 8),
        (ImageOptions(size=np.array([32, 64])), "size", (32, 64)),  # type: ignore[arg-type]
        (InsertOptions(losses=np.int64(2)), "losses", 2),
        (NetworkOptions(smooth=np.float32(0.5)), "smooth", 0.5),
        (GpuOptions(clock=np.float32(1500)), "clock", 1500.0),
        (TuningGoal(keep=np.float64(0.5)), "keep", 0.5),
        (SearchBudget(workers=np.int8(2)), "workers", 2),
        (FixOptions(effort=np.float32(2)), "effort", 2.0),
        (SelectionOptions(hops=np.int64(1)), "hops", 1),
        (ShrinkOptions(minimize=True, limit=np.int64(9)), "tries", 9),
        (calibration.Preprocess(scale=np.float32(0.5)), "scale", 0.5),
        (calibration.Preprocess(mean=np.array([1.0, 2.0, 3.0])), "mean", (1.0, 2.0, 3.0)),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_hold_numbers_of_python(options: Any, field: str, expected: Any) -> None:
    value = getattr(options, field)
    assert value == expected and type(value) is type(expected)
    if isinstance(value, tuple):
        assert {type(v) for v in value} == {type(v) for v in expected}


@pytest.mark.parametrize("size", [320, (320,), (3, 320, 320)])
def test_size_needs_height_and_width(size: Any) -> None:
    with pytest.raises(QdqtoolError, check=has("wrong-type", parameter="size")):
        ImageOptions(size=size)


def test_fraction_is_not_a_number_of_images() -> None:
    with pytest.raises(TypeError):
        qdqtool.insert(b"", max_images=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameter", ["exclude", "include", "exclude_op"])
@pytest.mark.parametrize("function", [qdqtool.insert, qdqtool.tune], ids=["insert", "tune"])
def test_single_pattern_is_not_a_list(function: Function, parameter: str) -> None:
    with pytest.raises(QdqtoolError, check=has("wrong-type", parameter=parameter)):
        function(b"", None, **{parameter: "conv"})


# Commands


def command_options(command: str) -> dict[str, click.Option]:
    click_command = cli.get_command(click.Context(cli), command)
    return {str(p.name): p for p in click_command.params if isinstance(p, click.Option)}


def option_default(option: click.Option) -> Any:
    value = option.get_default(click.Context(cli))
    return value if isinstance(value, (bool, int, float, str)) else None


FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "insert": (qdqtool.insert,),
    "tune": (qdqtool.tune,),
    "predict": (qdqtool.predict, predict_on_gpu, check_activations, TimingOptions),
    "verify": (qdqtool.verify, verify_with_builder),
    "compare": (qdqtool.compare,),
    "report": (qdqtool.report,),
    "fix": (qdqtool.fix,),
    "extract": (qdqtool.extract,),
    "build": (builders.build,),
}
IMAGES = {f.name for f in fields(calibration.Preprocess)} - {"fill"}
# Options of commands that are not parameters: outputs, formats, and what decides the exit code.
ONLY_COMMANDS = {
    "output",
    "form",
    "everything",
    "strongly_typed",  # part of the target
    *IMAGES,  # fields of `preprocess`
}
ONLY_COMMAND = {
    "insert": {"calib", "write_table", "gpu"},
    "tune": {"calib", "result", "no_state"},
    "predict": {"trace", "layers", "require_gain", "required", "fail_on", "calib"},
    "verify": {"from_log", "allow_partial", "require_shapes"},
    "compare": {"more_a", "more_b", "fail_on", "page", "calib", "min_agreement"},
    "report": set(),
    "fix": {"calib", "dla_cache"},
    "extract": {"issue", "verification"},
    "build": set(),
}
# Parameters of functions without an option: inputs, objects of Python, and fixed settings.
ONLY_FUNCTION = {
    "insert": {"model", "data", "progress"},
    "tune": {"model", "data", "mapper", "progress", "say"},
    "predict": {"model", "advice"},
    "verify": {"model", "builds"},
    "compare": {"a", "b", "data", "progress"},
    "report": {"model", "builds"},
    "fix": {"source", "data", "progress"},
    "extract": {"model", "keep_interrupted"},
    "build": {"model"},
}
# Defaults of commands that differ from those of functions.
OTHER_DEFAULT = {
    ("insert", "losses"): (None, 0),  # a user of the command wants the measurement
    ("tune", "state"): (None, None),  # OUTPUT.tuning, a name that a function does not know
}
# Options whose missing value (None, no value, no flag) stands for the function's default.
UNSET = {"target": DEFAULT_TARGET, "effort": 1.0, "unify": True, "predict": True, "finding": ()}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_are_the_parameters(command: str) -> None:
    function = FUNCTIONS[command][0]
    extra = ONLY_COMMANDS | ONLY_COMMAND[command]
    if "output" in parameters(function):
        extra = extra - {"output"}
    of_functions = {name for f in FUNCTIONS[command] for name in parameters(f)}
    options = command_options(command)
    assert options.keys() - extra <= of_functions
    assert parameters(function).keys() - options.keys() == ONLY_FUNCTION[command]


@pytest.mark.parametrize("command", FUNCTIONS)
def test_package_documents_options_without_equal_parameter(command: str) -> None:
    names = {max(option.opts, key=len) for option in command_options(command).values()}
    equal = {f"--{name.replace('_', '-')}" for name in parameters(FUNCTIONS[command][0])}
    assert names - equal <= set(re.findall(r"--[a-z-]+", qdqtool.__doc__ or ""))


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_have_defaults_of_parameters(command: str) -> None:
    arguments = parameters(FUNCTIONS[command][0])
    for name, option in command_options(command).items():
        if name not in arguments or (command, name) in OTHER_DEFAULT:
            continue
        default = arguments[name].default
        if option.show_default:
            assert option_default(option) == default, name
        elif not (option.multiple or option.is_flag):
            assert option_default(option) is None or option.required, name
            assert default in (None, UNSET.get(name)), name
        else:
            assert default in ((), None, False) or UNSET.get(name) is default, name


@pytest.mark.parametrize(("command", "name"), OTHER_DEFAULT)
def test_other_defaults_of_commands(command: str, name: str) -> None:
    of_command, of_function = OTHER_DEFAULT[command, name]
    assert option_default(command_options(command)[name]) is of_command
    assert parameters(FUNCTIONS[command][0])[name].default == of_function


def test_image_options_have_defaults_of_preprocess() -> None:
    defaults = {f.name: f.default for f in fields(calibration.Preprocess)}
    options = command_options("insert")
    assert option_default(options["resize"]) == defaults["resize"]
    assert defaults["bgr"] is False and options["bgr"].is_flag
    assert all(option_default(options[name]) is None for name in ("scale", "mean", "std"))


CHOICES = {
    "method": of_insertion.METHODS,
    "head": of_insertion.HEADS,
    "residual": of_insertion.RESIDUALS,
    "builder": BUILDERS,
}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_choices_are_those_of_functions(command: str) -> None:
    assert set(of_insertion.METHODS) == set(calibration.METHODS)
    for name, option in command_options(command).items():
        if name in CHOICES:
            assert tuple(option.type.choices) == CHOICES[name]


# Defaults in texts


@pytest.mark.parametrize(
    ("command", "name", "text"),
    [
        ("insert", "target", f"[default: {DEFAULT_TARGET}]"),
        ("verify", "target", f"[default: the version of the build, else {DEFAULT_TARGET}]"),
        ("insert", "losses", f"[default: {SAMPLES};"),
        ("insert", "losses", f"by {SMALL_ERROR:.0%} or more]"),
        ("insert", "smooth", f"ALPHA is {command_options('insert')['smooth'].flag_value} if"),
        ("tune", "keep", f"[default: {KEEP}]"),
        ("tune", "swept_on", f"[default: {SWEPT_ON}]"),
        ("tune", "check_timeout", f"[default: {limits.USER_SECONDS:g}]"),
        ("extract", "check_timeout", f"[default: {limits.USER_SECONDS:g}]"),
        ("extract", "limit", f"[default: {PREDICTED_MODELS}, fewer"),
        ("extract", "limit", f"{CHECKED_MODELS} with --builder or --check]"),
        ("fix", "effort", f"[default: {FixOptions.effort:g}]"),
    ],
)
def test_help_states_default(command: str, name: str, text: str) -> None:
    assert text in str(command_options(command)[name].help)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (qdqtool.compare, f"build, or ``{DEFAULT_TARGET}``"),
        (qdqtool.report, f"build: ``{DEFAULT_TARGET}``"),
        (builders.build, f"Default: {DEFAULT_SM[0]}, or"),
        (qdqtool.tune, f"Default: {KEEP} without a"),
        (qdqtool.tune, f"single sites. Default: {SWEPT_ON}."),
        (qdqtool.tune, f"Default: {limits.USER_SECONDS:g}."),
        (qdqtool.extract, f"Default: {limits.USER_SECONDS:g}."),
        (qdqtool.extract, f"Default: {PREDICTED_MODELS}, or {CHECKED_MODELS} with a"),
        (qdqtool.insert, f"the error is measured on {SAMPLES} images"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_docstring_states_default(function: Function, text: str) -> None:
    assert text in " ".join((inspect.getdoc(function) or "").split())


def quoted_names(options: set[str]) -> set[str]:
    """Return the options in backticks in messages, also those of `name=value`.

    Docstrings are left out.
    """
    pattern = f"`({'|'.join(options)})(?:=[^`]*)?`"
    names: set[str] = set()
    for path in sources().values():
        nodes = list(nodes_like(path, ast.Expr, ast.Constant, text=pattern))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in docstrings:
                names.update(re.findall(pattern, node.value))
    return names


def test_parameters_in_messages_become_options() -> None:
    named = quoted_names(
        {
            parameter.name
            for name in cli.list_commands(click.Context(cli))
            if (command := cli.get_command(click.Context(cli), name)) is not None
            for parameter in command.params
            if isinstance(parameter, click.Option)
        }
    )
    assert len(named) > 30
    assert {name for name in named if not as_options(f"`{name}`").startswith("--")} == set()
