"""Wrong types end in one line that names the parameter, in everything that is public."""

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
from qdqtool.base.said import of_error
from qdqtool.base.said import said as said_of
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.render.output import as_options
from tests.raising import raises
from tests.slow import slow_after
from tests.verification.comparing.networks import float_network, network

_VALUES = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
_STATS = TensorStatistics.of(_VALUES)
_INPUTS = [InputSpec("x", (1, 1, 8, 8))]
_DATA = open_data([{"x": _VALUES}], _INPUTS)
_MODEL = network()
#: An argument that is right, for each parameter that has no default.
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
_OWN: dict[str, dict[str, Any]] = {
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
    """One of each class whose methods are called."""
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


#: They need calibration, or a log, and save as the others do.
_NOT_MADE = (qdqtool.Insertion, qdqtool.Tuning, qdqtool.Verification)


class Deceptive:
    """Has a length, elements, a path and an array until one asks for them."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("no")

    __len__ = __iter__ = __getitem__ = __fspath__ = __array__ = __index__ = __float__ = __bool__ = (
        __repr__
    ) = _refuse
    __contains__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


def _broken() -> Iterator[object]:
    """Objects of which one thing fails that their kind can do, or that are of no kind."""
    for name in ("__fspath__", "__getattr__", "__index__"):
        yield type("Fails", (), {name: Deceptive._refuse})()
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
                yield type("Fails", (kind,), {name: Deceptive._refuse, **hashed})()
    yield type("Fails", (), {"__class__": property(Deceptive._refuse)})()
    yield type("Fails", (), {"__fspath__": lambda self: 5})()
    yield type("Fails", (), {"__fspath__": lambda self: b"x"})()


BROKEN = tuple(_broken())
NEVER_RIGHT = (object(), 1j, Deceptive(), [object()], {1: object()})
HALVES = ("\ud800", Path("\ud800"), ["\ud800"], {"\ud800": 1})  # that nothing can write
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


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        (object, "raises ValueError when it is asked for what it holds"),
        (int, "what it holds; give an integer"),
    ],
)
def test_what_an_object_raises_is_told(hint: Any, told: str) -> None:
    with pytest.raises(QdqtoolError) as caught:
        require("data", Unmeasured([1]), hint, __name__)
    assert str(caught.value).startswith("`data=[1]`: is ") and str(caught.value).endswith(told)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions; classes of the calibration, whose objects users make; methods of all."""
    yield "assert_int8", qdqtool.testing.assert_int8
    for module in (qdqtool, calibration):
        for name in module.__all__:
            entry = getattr(module, name)
            if not callable(entry) or (inspect.isclass(entry) and issubclass(entry, str)):
                continue
            if not inspect.isclass(entry) or module is calibration:
                yield name, entry
            if not inspect.isclass(entry) or entry in _NOT_MADE:
                continue
            for method, found in inspect.getmembers(entry):
                own = method in vars(entry) and not method.startswith("_") and callable(found)
                if own and set(inspect.signature(found).parameters) - {"self"}:
                    yield f"{name}.{method}", getattr(objects()[entry], method)


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    return dict(public())


@functools.cache
def parameters_of(name: str) -> list[tuple[str, Any, bool, bool]]:
    """The name, the default and whether it is to be named and one of many, of each."""
    return [
        (p.name, p.default, p.kind is p.KEYWORD_ONLY, p.kind is p.VAR_POSITIONAL)
        for p in inspect.signature(functions()[name]).parameters.values()
    ]


def every_case() -> list[tuple[str, str]]:
    return [(name, parameter) for name in functions() for parameter, *_ in parameters_of(name)]


@contextlib.contextmanager
def at(name: str, parameter: str, given: type) -> Iterator[None]:
    """Names the case in what a test raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{name}({parameter}=...), given {given}")
        raise


def call(name: str, parameter: str, value: object) -> str:
    """What an argument among right ones is refused with; empty where it is taken."""
    function, empty = functions()[name], inspect.Parameter.empty
    right = _OWN.get(name, {})
    first, given = [], {}
    for known, default, to_be_named, many in parameters_of(name):
        one = (
            value
            if known == parameter
            else default
            if default is not empty
            else right.get(known, RIGHT.get(known))
        )
        if many:
            first.extend([one] if known == parameter or name == "verify" else [])
        elif not to_be_named:
            first.append(one)
        elif known == parameter or default is empty:
            given[known] = one
    try:
        result = function(*first, **given)
        if inspect.isgenerator(result) or isinstance(
            result, Dataset
        ):  # they look at what they read
            next(iter(result), None)
    except QdqtoolError as error:
        return str(error)
    return ""


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without the files that the values name, where what is written hurts nobody."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nowhere")
def test_what_is_never_right_is_refused_with_the_name() -> None:
    for name, parameter in every_case():
        anything = parameter in ("data", "evaluation", "cluster") or (name, parameter) == (
            "open_data",
            "source",
        )
        for value in NEVER_RIGHT:
            if anything and isinstance(value, Deceptive):
                continue  # what a user's own data raises is the user's
            with at(name, parameter, type(value)):
                said = call(name, parameter, value)
                assert "\n" not in said
                assert said if anything else said.startswith(f"`{parameter}="), (
                    value.__class__,
                    said,
                )


@pytest.mark.usefixtures("nowhere")
def test_half_a_character_is_refused_with_the_name() -> None:
    for number, (name, parameter) in enumerate(every_case()):
        value = HALVES[number % len(HALVES)]
        with at(name, parameter, type(value)):
            said = call(name, parameter, value)
            assert said.startswith(f"`{parameter}=") and said.isprintable(), said
    with raises(QdqtoolError, "unreadable|open_input a\\udcff.onnx:"):  # a name of Linux
        qdqtool.predict("a\udcff.onnx")


_WORDS = ("x", "a/", "1=1,")


@pytest.mark.usefixtures("nowhere")
def test_no_message_is_as_long_as_what_was_given() -> None:
    length = 10_000
    for number, (name, parameter) in enumerate(every_case()):
        # A command is taken apart letter by letter.
        text = _WORDS[number % len(_WORDS)] * (length // (50 if parameter == "check" else 1))
        for value in (text, ([text], {text: text}, [("x", text)])[number % 7 % 3]):
            with at(name, parameter, type(value)):
                try:
                    said = call(name, parameter, value)
                except (
                    ValueError,
                    KeyError,
                    IndexError,
                ) as error:  # documented, of values of the right type
                    said = str(error)
                assert len(said) < 500, said[:100]
    sentence = said_of(
        "{`clock`} {name}: {why}",
        name="n" * length,
        why=said_of("{what} is wrong", what="w" * length),
    )
    for error in (
        QdqtoolError(sentence),
        QdqtoolError(sentence, "p" * length),
        QdqtoolError("r" * length, "p"),
    ):
        assert len(str(error)) < 500 and len(as_options(of_error(error))) < 700
        assert str(error)[0] in "`p" and error.path in ("", "p", "p" * length)
    found = QdqtoolError(sentence)
    assert as_options(of_error(found)).startswith("--clock nnn") and str(found).endswith(
        "www is wrong"
    )
    folder = "/".join(["folder"] * 30)
    for plain in (
        QdqtoolError(
            f"{folder}/log.txt, {folder}/layers.json: names 0 of 21 convolutions of {folder}/model"
        ),
        QdqtoolError("names 0 of 21 convolutions " + folder * 3, folder),
        QdqtoolError(
            said_of(
                "{names:joined , }: names 0 of 21 convolutions",
                names=[f"{folder}/{n}" for n in range(5)],
            )
        ),
    ):
        for text in (str(plain), of_error(plain)):
            assert "names 0 of 21 convolutions" in text and len(text) < 1000 < len(folder) * 6


def _first_then(found: object) -> Iterator[object]:
    yield found
    raise KeyError("no")


def test_what_an_iterable_raises_names_the_parameter() -> None:
    taken = {
        (name, p.name)
        for name, function in functions().items()
        for p in inspect.signature(function).parameters.values()
        if str(p.annotation).startswith("Iterable[")
    }
    assert taken > {
        ("merge_all", "parts"),
        ("TensorStatistics.add_focus", "parts"),
        ("Statistics", "notes"),
    }
    first = {"parts": _STATS, "skipped": ("a", "b")}
    for name, parameter in sorted(taken):
        found = _VALUES if name == "TensorStatistics.add_focus" else first.get(parameter, "text")
        iterables = (
            _first_then(found),
            type("Fails", (), {"__iter__": Deceptive._refuse})(),
            type("Fails", (), {"__iter__": lambda self: self, "__next__": Deceptive._refuse})(),
        )
        for value in iterables:
            with at(name, parameter, type(value)):
                said = call(name, parameter, value)
                assert said.startswith(f"`{parameter}=") and "Error when it is read: " in said, said
        with at(name, parameter, list):
            assert call(name, parameter, iter([1j])).startswith(f"`{parameter}=1j`: is complex")
    with raises(DataError, "TensorStatistics.coarse -1"):
        _STATS.coarse(-1)
    taken_in = TensorStatistics()
    with raises(QdqtoolError, "read parts"):
        taken_in.add_focus(_first_then(_VALUES))  # type: ignore[arg-type]
    assert taken_in.focus is None


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("third", slow_after(1, range(3)))
def test_what_fails_when_it_is_looked_at_is_refused_or_taken(third: int) -> None:
    """Each parameter gets a third of what can fail, and its neighbours the others."""
    values = (*BROKEN, *([v] for v in BROKEN), ..., NotImplemented)
    for number, (name, parameter) in enumerate(every_case()):
        large = [10**400, -(10**400)] if hasattr(qdqtool, name) else []
        for value in (*values[(number + third) % 3 :: 3], *large):
            # A number that is too large is documented.
            with at(name, parameter, type(value)), contextlib.suppress(ValueError):
                assert "\n" not in call(name, parameter, value)
    with pytest.raises(DataError, match=r"calibration data"):
        qdqtool.insert(float_network(), type("Fails", (), {"__iter__": Deceptive._refuse})())  # type: ignore[arg-type]


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("package", slow_after(1, ["calibration", "qdqtool"]))
def test_nothing_comes_from_inside(package: str) -> None:
    for name, parameter in every_case():
        documented = (ValueError, KeyError, IndexError)  # of values of the right type
        if name == "assert_int8":
            documented = (*documented, AssertionError)
        default = next(given for known, given, *_ in parameters_of(name) if known == parameter)
        wrong = WRONG if functions()[name].__module__.startswith(package) else ()
        for value in (
            v for v in wrong if v is not default
        ):  # which would be the same call for each parameter
            with at(name, parameter, type(value)), contextlib.suppress(*documented):
                assert "\n" not in call(name, parameter, value)


def test_results_that_take_a_model_and_a_log_to_make_look_at_arguments_as_the_others_do() -> None:
    for result in _NOT_MADE:
        methods = [
            m for n, m in inspect.getmembers(result, inspect.isfunction) if not n.startswith("_")
        ]
        assert all(
            hasattr(m, "__wrapped__") for m in methods if len(inspect.signature(m).parameters) > 1
        )


def test_objects_of_numpy_that_hold_anything(tmp_path: Path) -> None:
    """What looks like an array by its attributes alone, and arrays of records."""
    np.savez(tmp_path / "a.npz", dtype=np.ones(2))
    with np.load(tmp_path / "a.npz") as found, pytest.raises(QdqtoolError, match=r"^`model="):
        qdqtool.predict(found.f)
    records = np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")])
    with raises(QdqtoolError, "require numbers"):
        TensorStatistics().add(records)


def test_what_fits_once_does_not_let_others_in() -> None:
    """Kinds of arguments that were found to fit are not looked at again; one of another kind is."""

    @typed
    def taken(
        number: float, array: npt.NDArray[Any], some: Sequence[float], whole: int = 1
    ) -> object:
        return number, array, some, whole

    good = (1, np.ones(2), [1.0], 2)
    for _ in range(3):
        assert taken(*good) == good
    for place, bad in (
        (0, "x"),
        (0, None),
        (1, [1.0]),
        (1, np.array([object()])),
        (2, ["x"]),
        (2, 1.0),
        (3, 1.5),
    ):
        for _ in range(2):
            with pytest.raises(QdqtoolError):
                taken(*good[:place], bad, *good[place + 1 :])  # type: ignore[arg-type]

    @typed
    def numbers(number: float, array: npt.NDArray[Any], whole: int | None = None) -> object:
        return number, array, whole

    for _ in range(3):
        assert numbers(1.5, good[1], 3) == (1.5, good[1], 3) and numbers(2, good[1]) == (
            2,
            good[1],
            None,
        )
    for bad_call in (
        ("x", good[1], 3),
        (1.5, good[1], "x"),
        (1.5, np.array(["x"]), 3),
        (1.5, 3, 3),
    ):
        for _ in range(2):
            with pytest.raises(QdqtoolError):
                numbers(*bad_call)  # type: ignore[arg-type]
