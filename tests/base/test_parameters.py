"""Arguments of wrong types end in one line that names the parameter, in every public function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import calibration
import qdqtool
import qdqtool.testing
from calibration import (
    Dataset,
    Focus,
    FocusMap,
    InputSpec,
    Preprocess,
    Statistics,
    TensorStatistics,
    open_data,
)
from qdqtool.base.parameters import require, typed
from qdqtool.base.said import of_error, said
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.render.output import as_options
from tests.errors import has
from tests.slow import slow_after
from tests.verification.comparing.networks import float_network, network

_VALUES = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
_STATS = TensorStatistics.of(_VALUES)
_INPUTS = [InputSpec("x", (1, 1, 8, 8))]
_DATA = open_data([{"x": _VALUES}], _INPUTS)
_MODEL = network()
#: A valid argument for each parameter without a default.
RIGHT: dict[str, Any] = {
    "model": _MODEL,
    "source": _MODEL,
    "a": _MODEL,
    "b": _MODEL,
    "builds": "no such log",
    "data": [{"x": _VALUES}],
    "stats": _STATS,
    "statistics": Statistics({"x": _STATS}),
    "amax": np.array([0.5]),
    "method": "max",
    "parts": [_STATS],
    "other": _STATS,
    "tensors": {"x": _STATS},
    "path": "out",
    "array": _VALUES,
    "what": "it",
    "bits": 7,
    "number": 0,
    "inputs": _INPUTS,
    "name": "x",
    "shape": (1, 2),
    "max_images": 1,
    "scores": ("x",),
    "outputs": {"x": _VALUES},
    "masks": [np.ones((8, 8), bool)],
    "looks": _DATA.looks,
    "skipped": [],
    "change": None,
    "point": None,
}
RIGHT_FOR: dict[str, dict[str, Any]] = {
    "Statistics.merge": {"other": Statistics({})},
    "Dataset": {"source": _DATA.source},
    "collect": {"tensors": ["x"]},
    "open_data": {"source": [{"x": _VALUES}]},
    "TensorStatistics.add_focus": {"parts": [_VALUES]},
    "TensorStatistics.coarse": {"bits": 3},
    "tune": {"model": float_network(), "data": [{"x": _VALUES}] * 4},
    "insert": {"model": float_network()},
}


@functools.cache
def objects() -> dict[type, Any]:
    """Return an object of each class whose methods are called."""
    return {
        TensorStatistics: _STATS,
        Statistics: Statistics({"x": _STATS}),
        InputSpec: _INPUTS[0],
        Dataset: _DATA,
        Focus: Focus(("x",)),
        FocusMap: FocusMap(RIGHT["masks"]),
        Preprocess: Preprocess(),
        qdqtool.Prediction: qdqtool.predict(_MODEL),
        qdqtool.Comparison: qdqtool.compare(_MODEL, _MODEL),
        qdqtool.Extraction: qdqtool.extract(_MODEL, node=_MODEL.graph.node[0].name),
        qdqtool.Report: qdqtool.report(_MODEL),
        qdqtool.Fixed: qdqtool.fix(_MODEL),
    }


#: Results that take a calibration or a log.
EXPENSIVE = (qdqtool.Insertion, qdqtool.Tuning, qdqtool.Verification)


class Deceptive:
    """Object whose length, elements, path and array raise errors when they are read."""

    def refuse(self, *_: object) -> Any:
        raise RuntimeError("no")

    __len__ = __iter__ = __getitem__ = __fspath__ = __array__ = __index__ = __float__ = __bool__ = (
        __repr__
    ) = refuse
    __contains__ = __eq__ = refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


def broken_objects() -> Iterator[object]:
    """Return objects of usual types with one method that raises an error."""
    for name in ("__fspath__", "__getattr__", "__index__"):
        yield type("Fails", (), {name: Deceptive.refuse})()
    for kind in (str, list, dict, tuple, int, float, bytes, set):
        for name in (
            *(f"__{n}__" for n in ("iter", "len", "str", "repr", "bool", "format", "eq")),
            "strip",
            "items",
        ):
            if hasattr(kind, name) and not (
                name in ("__str__", "__eq__") and kind in (bytes, set, int, float)
            ):
                hashed = {"__hash__": kind.__hash__} if kind.__hash__ else {}
                yield type("Fails", (kind,), {name: Deceptive.refuse, **hashed})()
    yield type("Fails", (), {"__class__": property(Deceptive.refuse)})()
    yield type("Fails", (), {"__fspath__": lambda self: 5})()
    yield type("Fails", (), {"__fspath__": lambda self: b"x"})()


BROKEN = tuple(broken_objects())
NEVER_RIGHT = (object(), 1j, Deceptive(), [object()], {1: object()})
HALVES = ("\ud800", Path("\ud800"), ["\ud800"], {"\ud800": 1})  # half a character
WRONG: tuple[Any, ...] = (
    5,
    -1,
    2.5,
    True,
    None,
    "no such thing",
    "",
    b"\x00",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    (1, "a"),
    {3},
    int,
    float("nan"),
    np.zeros((2, 2)),
    np.array(["a"]),
    np.array([object()]),
    np.float32(1),
    Path("no such file"),
    iter([1]),
    range(3),
)


class Unmeasured(list[int]):
    """A list without a length."""

    def __len__(self) -> int:
        raise ValueError("no length")


@pytest.mark.parametrize("hint", [object, int])
def test_object_that_raises_is_of_wrong_type(hint: Any) -> None:
    with pytest.raises(QdqtoolError, check=has("wrong-type", parameter="data")) as caught:
        require("data", Unmeasured([1]), hint, __name__)
    assert "[1]" in str(caught.value) and "ValueError" in str(caught.value)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return public functions, classes of the calibration, and methods of both, by name."""
    yield "assert_int8", qdqtool.testing.assert_int8
    for module in (qdqtool, calibration):
        for name in module.__all__:
            entry = getattr(module, name)
            if not callable(entry) or (inspect.isclass(entry) and issubclass(entry, str)):
                continue
            if not inspect.isclass(entry) or module is calibration:
                yield name, entry
            if not inspect.isclass(entry) or entry in EXPENSIVE:
                continue
            for method, member in inspect.getmembers(entry):
                own = method in vars(entry) and not method.startswith("_") and callable(member)
                if own and set(inspect.signature(member).parameters) - {"self"}:
                    yield f"{name}.{method}", getattr(objects()[entry], method)


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    return dict(public())


@functools.cache
def parameters_of(name: str) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(functions()[name]).parameters.values())


def every_case() -> list[tuple[str, str]]:
    """Return (function, parameter) for every parameter of every public function."""
    return [(name, p.name) for name in functions() for p in parameters_of(name)]


@contextlib.contextmanager
def naming_case(name: str, parameter: str, kind: type) -> Iterator[None]:
    """Add the case to errors of the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{name}({parameter}=...) with a {kind}")
        raise


def call(name: str, parameter: str, value: object) -> QdqtoolError | None:
    """Call a function with a value among valid arguments; return the error."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for p in parameters_of(name):
        valid = RIGHT_FOR.get(name, {}).get(p.name, RIGHT.get(p.name))
        argument = valid if p.default is p.empty else p.default
        if p.name == parameter:
            argument = value
        if p.kind is p.VAR_POSITIONAL:
            positional += [argument] if p.name == parameter or name == "verify" else []
        elif p.kind is not p.KEYWORD_ONLY:
            positional.append(argument)
        elif p.name == parameter or p.default is p.empty:
            keywords[p.name] = argument
    try:
        result = functions()[name](*positional, **keywords)
        if inspect.isgenerator(result) or isinstance(result, Dataset):
            next(iter(result), None)  # these look at their data when it is read
    except QdqtoolError as error:
        return error
    return None


def is_one_line(error: QdqtoolError | None) -> bool:
    return "\n" not in str(error)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nowhere")
def test_value_of_wrong_type_is_an_error_with_parameter() -> None:
    for name, parameter in every_case():
        accepts_objects = parameter in ("data", "evaluation", "cluster")
        accepts_objects |= (name, parameter) == ("open_data", "source")
        for value in NEVER_RIGHT:
            if accepts_objects and isinstance(value, Deceptive):
                continue  # errors of the user's own data are passed on
            with naming_case(name, parameter, type(value)):
                error = call(name, parameter, value)
                assert error is not None and is_one_line(error)
                assert accepts_objects or error.parameter == parameter, str(error)


@pytest.mark.usefixtures("nowhere")
def test_half_a_character_is_an_error_with_parameter() -> None:
    for number, (name, parameter) in enumerate(every_case()):
        value = HALVES[number % len(HALVES)]
        with naming_case(name, parameter, type(value)):
            error = call(name, parameter, value)
            assert error is not None and str(error).isprintable()
            assert (error.code, error.parameter) == ("wrong-encoding", parameter), str(error)


@pytest.mark.usefixtures("nowhere")
def test_file_name_that_is_not_utf_8_is_possible() -> None:
    with pytest.raises(QdqtoolError, check=has("file-missing", path="a\udcff.onnx")):
        qdqtool.predict("a\udcff.onnx")


@pytest.mark.usefixtures("nowhere")
def test_messages_are_shorter_than_long_values() -> None:
    words, length = ("x", "a/", "1=1,"), 10_000
    for number, (name, parameter) in enumerate(every_case()):
        # A command is split letter by letter, which takes long.
        text = words[number % len(words)] * (length // (50 if parameter == "check" else 1))
        for value in (text, ([text], {text: text}, [("x", text)])[number % 7 % 3]):
            with naming_case(name, parameter, type(value)):
                try:
                    error: Exception | None = call(name, parameter, value)
                except (ValueError, KeyError, IndexError) as documented:
                    error = documented
                assert len(str(error)) < 500, str(error)[:100]


LONG_SENTENCE = said(
    "{`clock`} {name}: {why}", name="n" * 10_000, why=said("{what} is wrong", what="w" * 10_000)
)


@pytest.mark.parametrize(
    ("reason", "path"),
    [(LONG_SENTENCE, ""), (LONG_SENTENCE, "p" * 10_000), ("r" * 10_000, "p")],
    ids=["sentence", "sentence and path", "text and path"],
)
def test_long_message_is_shortened(reason: str, path: str) -> None:
    error = QdqtoolError(reason, path)
    assert len(str(error)) < 500 and len(as_options(of_error(error))) < 700
    assert str(error)[0] == (path or "`")[0] and error.path == path


def test_shortened_message_keeps_beginning_and_end() -> None:
    error = QdqtoolError(LONG_SENTENCE)
    assert as_options(of_error(error)).startswith("--clock nnn")
    assert str(error).endswith("www is wrong")


FOLDER = "/".join(["folder"] * 30)


@pytest.mark.parametrize(
    "error",
    [
        QdqtoolError(
            f"{FOLDER}/log.txt, {FOLDER}/layers.json: names 0 of 21 convolutions of {FOLDER}/model"
        ),
        QdqtoolError("names 0 of 21 convolutions " + FOLDER * 3, FOLDER),
        QdqtoolError(
            said(
                "{names:joined , }: names 0 of 21 convolutions",
                names=[f"{FOLDER}/{n}" for n in range(5)],
            )
        ),
    ],
    ids=["text", "path", "sentence"],
)
def test_shortened_message_keeps_text_between_long_paths(error: QdqtoolError) -> None:
    for text in (str(error), of_error(error)):
        assert "names 0 of 21 convolutions" in text and len(text) < 1000 < len(FOLDER) * 6


def one_value(value: object) -> Iterator[object]:
    yield value
    raise KeyError("no")


ITERABLES = [
    (name, p.name)
    for name, function in functions().items()
    for p in inspect.signature(function).parameters.values()
    if str(p.annotation).startswith("Iterable[")
]


@pytest.mark.parametrize(("name", "parameter"), ITERABLES)
def test_error_of_iterable_names_parameter(name: str, parameter: str) -> None:
    first = {"parts": _STATS, "skipped": ("a", "b")}.get(parameter, "text")
    if name == "TensorStatistics.add_focus":
        first = _VALUES
    for value in (
        one_value(first),
        type("Fails", (), {"__iter__": Deceptive.refuse})(),
        type("Fails", (), {"__iter__": lambda self: self, "__next__": Deceptive.refuse})(),
    ):
        error = call(name, parameter, value)
        assert error is not None and (error.code, error.parameter) == (
            "iteration-failed",
            parameter,
        )
    error = call(name, parameter, iter([1j]))
    assert error is not None and (error.code, error.parameter) == ("wrong-type", parameter)


def test_parameters_that_take_iterables() -> None:
    expected = ("merge_all", "parts"), ("TensorStatistics.add_focus", "parts")
    assert set(ITERABLES) > {*expected, ("Statistics", "notes")}


def test_negative_number_of_bits_is_an_error() -> None:
    with pytest.raises(DataError) as caught:
        _STATS.coarse(-1)
    assert "-1" in str(caught.value)


def test_failed_iterable_changes_nothing() -> None:
    statistics = TensorStatistics()
    with pytest.raises(QdqtoolError, check=has("iteration-failed", parameter="parts")):
        statistics.add_focus(one_value(_VALUES))  # type: ignore[arg-type]
    assert statistics.focus is None


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("third", slow_after(1, range(3)))
def test_object_that_raises_is_accepted_or_an_error(third: int) -> None:
    # Each parameter gets a third of the values, and its neighbors the others.
    values = (*BROKEN, *([v] for v in BROKEN), ..., NotImplemented)
    for number, (name, parameter) in enumerate(every_case()):
        large = [10**400, -(10**400)] if hasattr(qdqtool, name) else []
        for value in (*values[(number + third) % 3 :: 3], *large):
            # The ValueError of a number that is too large is documented.
            with naming_case(name, parameter, type(value)), contextlib.suppress(ValueError):
                assert is_one_line(call(name, parameter, value))


def test_data_that_raises_is_an_error() -> None:
    data = type("Fails", (), {"__iter__": Deceptive.refuse})()
    with pytest.raises(DataError) as caught:
        qdqtool.insert(float_network(), data)  # type: ignore[arg-type]
    assert "calibration data" in str(caught.value) and "no" in str(caught.value)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("package", slow_after(1, ["calibration", "qdqtool"]))
def test_wrong_value_raises_documented_errors_only(package: str) -> None:
    names = [name for name, f in functions().items() if f.__module__.startswith(package)]
    for name in names:
        documented: tuple[type[Exception], ...] = (ValueError, KeyError, IndexError)
        if name == "assert_int8":
            documented = (*documented, AssertionError)
        for p in parameters_of(name):
            for value in (v for v in WRONG if v is not p.default):
                with naming_case(name, p.name, type(value)), contextlib.suppress(*documented):
                    assert is_one_line(call(name, p.name, value))


@pytest.mark.parametrize("result", EXPENSIVE)
def test_methods_of_expensive_results_check_arguments(result: type) -> None:
    members = inspect.getmembers(result, inspect.isfunction)
    methods = [member for name, member in members if not name.startswith("_")]
    with_arguments = [m for m in methods if len(inspect.signature(m).parameters) > 1]
    assert all(hasattr(m, "__wrapped__") for m in with_arguments)


def test_numpy_object_that_looks_like_an_array_is_not_a_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", dtype=np.ones(2))
    is_wrong_type = has("wrong-type", parameter="model")
    with np.load(tmp_path / "a.npz") as a, pytest.raises(QdqtoolError, check=is_wrong_type):
        qdqtool.predict(a.f)


def test_array_of_records_is_not_an_array_of_numbers() -> None:
    records = np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")])
    with pytest.raises(QdqtoolError) as caught:
        TensorStatistics().add(records)
    assert caught.value.code == "wrong-type" and "numbers" in str(caught.value)


@typed
def with_list(
    number: float, array: npt.NDArray[Any], numbers: Sequence[float], whole: int = 1
) -> object:
    return number, array, numbers, whole


@typed
def without_list(number: float, array: npt.NDArray[Any], whole: int | None = None) -> object:
    return number, array, whole


ARRAY = np.ones(2)


@pytest.mark.parametrize(
    ("function", "valid", "position", "wrong"),
    [
        *(
            (with_list, (1, ARRAY, [1.0], 2), position, value)
            for position, value in (
                (0, "x"),
                (0, None),
                (1, [1.0]),
                (1, np.array([object()])),
                (2, ["x"]),
                (2, 1.0),
                (3, 1.5),
            )
        ),
        *(
            (without_list, (1.5, ARRAY, 3), position, value)
            for position, value in ((0, "x"), (1, np.array(["x"])), (1, 3), (2, "x"))
        ),
    ],
)
def test_wrong_type_after_valid_calls_is_an_error(
    function: Callable[..., object], valid: tuple[object, ...], position: int, wrong: object
) -> None:
    # Types of valid arguments are cached.
    for _ in range(3):
        assert function(*valid) == valid
    for _ in range(2):
        with pytest.raises(QdqtoolError, check=lambda e: e.code == "wrong-type"):
            function(*valid[:position], wrong, *valid[position + 1 :])


def test_typed_function_accepts_default_and_whole_number() -> None:
    assert without_list(2, ARRAY) == (2, ARRAY, None)
