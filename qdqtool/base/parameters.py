"""Compares arguments with the annotations of the parameters they are for, so that a wrong type ends in one line."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import functools
import inspect
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar

from qdqtool.base.said import Parameter, said
from qdqtool.base.text import reason_of
from qdqtool.errors import QdqtoolError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {
    str: "text",
    bytes: "bytes",
    int: "an integer",
    float: "a number",
    bool: "True or False",
    type(None): "None",
    os.PathLike: "a path",
    dict: "a dict",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a list",
    collections.abc.Iterable: "a list",
    collections.abc.Set: "a set",
    tuple: "a tuple",
}
_TEXTS = (str, bytes, bytearray, memoryview, Mapping)
_OURS = ("qdqtool", "calibration")
_SOUND = ("builtins", "numpy", *_OURS)  # packages whose classes do what they are derived from
_LISTS = (list, tuple)
_CONTAINERS = (
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Mapping,
    dict,
    tuple,
)
_DECIDED = (str, float, type(None))  # built in, and whether one fits is decided by its type alone
_NUMBERS = (int, bool, float, type(None))
_fitting: set[tuple[str, str, type, Any]] = (
    set()
)  # what was found to fit: a call for each tensor of each image asks
_UNSTATED = inspect.Parameter.empty
_SHOWN = 60  # characters of a value in a message


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses arguments of another type than annotated, with the parameter's name.

    Numbers of numpy are numbers, whatever has ``__fspath__`` is a path, any collection is a list.
    """

    fitting: set[tuple[Any, ...]] = set()  # kinds of arguments, by place, that were found to fit

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        kinds = () if keywords else tuple(map(_kind, args))
        if kinds in fitting:
            return function(*args, **keywords)
        single, rest, known = _parameters(function)
        first: Any = list(args)
        named: Any = dict(keywords)
        module = function.__module__
        decided = bool(kinds) and None not in kinds  # by the kinds alone
        for place, value in enumerate(args):
            parameter = single[place] if place < len(single) else rest
            if not (
                parameter is None or parameter.annotation is _UNSTATED or value is parameter.default
            ):
                first[place] = require(parameter.name, value, parameter.annotation, module)
                exact = type(value).__name__ == parameter.annotation
                decided = (
                    decided
                    and first[place] is value
                    and (exact or _key(value, parameter.annotation, module) in _fitting)
                )
        if decided:
            fitting.add(kinds)
        for name, value in keywords.items():
            if name in known and value is not known[name].default:
                named[name] = require(name, value, known[name].annotation, module)
        return function(
            *first, **named
        )  # a TypeError as for any function of Python where they do not fit

    return call


def _kind(value: Any) -> Any:
    """What decides whether an argument fits where its type does; None where the value may, as of a text."""
    kind = type(value)
    if kind in _NUMBERS or kind.__module__.partition(".")[0] in _OURS:
        return kind
    return value.dtype if kind.__module__ == "numpy" and kind.__name__ == "ndarray" else None


def _key(value: Any, annotation: Any, module: str) -> tuple[str, str, type, Any] | None:
    """By what it is remembered that a value fits; None where its type does not decide that."""
    kind = type(value)
    array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"
    if isinstance(annotation, str) and (
        array or kind in _DECIDED or kind.__module__.partition(".")[0] in _OURS
    ):
        return annotation, module, kind, value.dtype if array else None
    return None


def require(name: str, value: Any, annotation: Any, module: str) -> Any:
    """Refuses a value of another type.

    Args:
        name: The parameter's.
        value: What was given for it.
        annotation: Its annotation, in words or as a type.
        module: Where the annotation stands.

    Returns:
        The value; a number of numpy, or any other, as Python's own, and an array for a tuple as one.

    Raises:
        QdqtoolError: The value is of another type.
    """
    hint = _evaluated(annotation, module) if isinstance(annotation, str) else annotation
    kind = type(value)
    if not _is_whole(value):
        raise QdqtoolError(
            said(
                "{parameter:{value}}: no name and no text can hold half a character",
                parameter=Parameter(name),
                value=shown(value),
            ),
            code="wrong-encoding",
            parameter=name,
        )
    if kind is hint:
        return value
    key = _key(value, annotation, module)
    if key in _fitting:
        return value
    asked: str = ""
    try:
        right = _sound(value) and fits(value, hint)
    except (
        Exception
    ) as error:  # of a class of the user's, which has a length or elements and does not give them
        right, asked = (
            False,
            said(
                ", which raises {kind} when it is asked for what it holds",
                kind=type(error).__name__,
            ),
        )
    if not right:
        wanted = (
            "" if asked and hint in (Any, object) else said("; give {wanted}", wanted=_words(hint))
        )
        raise QdqtoolError(
            said(
                "{parameter:{value}}: is {kind}{asked}{wanted}",
                parameter=Parameter(name),
                value=shown(value),
                kind=_class(value),
                asked=asked,
                wanted=wanted,
            ),
            code="wrong-type",
            parameter=name,
        )
    either = typing.get_origin(hint) in (types.UnionType, typing.Union)
    hints = typing.get_args(hint) if either else (hint,)
    result = _plain(value, hints)
    if (
        typing.get_origin(hint) is collections.abc.Iterable
        and kind not in _LISTS
        and Any not in typing.get_args(hint)
    ):
        return read(name, value, typing.get_args(hint)[0], module)
    if (
        key
        and result is value
        and not any((typing.get_origin(h) or h) in _CONTAINERS for h in hints)
    ):
        _fitting.add(key)
    return result


def read(name: str, given: Iterable[Any], hint: Any = Any, module: str = __name__) -> Iterator[Any]:
    """What an iterable of the user's gives, each looked at when it comes; see :func:`require` for the arguments.

    Raises:
        QdqtoolError: It raised something, or gave something of another type.
    """
    try:
        for one in given:
            yield one if hint is Any else require(name, one, hint, module)
    except (QdqtoolError, MemoryError):
        raise
    except Exception as error:
        raise QdqtoolError(
            said(
                "{parameter:{value}}: raises {kind} when it is read: {reason}",
                parameter=Parameter(name),
                value=shown(given),
                kind=type(error).__name__,
                reason=reason_of(error),
            ),
            code="iteration-failed",
            parameter=name,
        ) from error


def compile_pattern(pattern: str, given: str, *, parameter: str = "") -> re.Pattern[str]:
    """Compiles a user's regular expression.

    Args:
        pattern: The expression.
        given: The parameter and the expression as the user wrote them, for the message.
        parameter: Name of the parameter.

    Raises:
        QdqtoolError: It is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise QdqtoolError(
            said("{given}: not a regular expression ({error})", given=given, error=str(error)),
            code="invalid-pattern",
            parameter=parameter,
        ) from None


def shown(value: object) -> str:
    """A value as a message quotes it: its beginning, on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a class of the user's
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_whole(value: Any) -> bool:
    """Whether a text, a path or the texts in a list or dict can be written; bytes that are not UTF-8, as Python has
    them in names of files, can."""
    if type(value) in (*_LISTS, dict, set):
        return all(type(one) is not str or _is_whole(one) for one in value)
    text = str(value) if issubclass(type(value), PurePath) else value
    if type(text) is str and not text.isascii():
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return False
    return True


def _plain(value: Any, hints: tuple[Any, ...]) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, numbers.Integral) and int in hints:
        return int(value)
    if isinstance(value, numbers.Real) and float in hints:
        return float(value)
    whole = [h for h in hints if typing.get_origin(h) is tuple]
    return tuple(value.tolist()) if whole and _is_array(value) else value


def _sound(value: Any) -> bool:
    """Whether an object of a class that is derived from a basic one does what that does, and all in a list of such.

    Raises:
        Exception: Whatever it raises when it does not.
    """
    if type(value) in _LISTS:
        asked = {
            k
            for k in set(map(type, value))
            if k in _LISTS or k.__module__.partition(".")[0] not in _SOUND
        }
        return not asked or all(_sound(v) for v in value if type(v) in asked)
    if type(value).__module__.partition(".")[0] in _SOUND:
        return True
    if isinstance(value, os.PathLike):
        return isinstance(os.fspath(value), str)  # a path may be bytes
    kind = next(
        (k for k in (str, bytes, int, float, list, tuple, dict, set) if isinstance(value, k)), None
    )
    if kind is None:
        return True
    shown = f"{value} {value!r} {value!s}"
    if isinstance(value, Collection):
        shown += f"{len(value)}{iter(value)}{value == value}"
    if isinstance(value, str):
        shown += f"{value.strip()}{value[:1] in value}"
    if isinstance(value, list | tuple | bytes):
        shown += f"{value[:1]!r}"
    if isinstance(value, dict):
        shown += f"{value.items()}{value.keys()}{value.values()}"
    return bool(shown) and bool(value) in (False, True)


def typed_fields(record: Any) -> None:
    """Refuses values of another type than the fields of a dataclass are annotated with; for its ``__post_init__``.

    Raises:
        QdqtoolError: A field is of another type.
    """
    for one in dataclasses.fields(record):
        require_field(record, one.name, one.type, type(record).__module__)


def require_field(record: Any, name: str, annotation: Any, module: str) -> Any:
    """As :func:`require` of a field of a record, which then holds what is returned.

    Raises:
        QdqtoolError: The field is of another type.
    """
    given = getattr(record, name)
    value = require(name, given, annotation, module)
    if value is not given:
        object.__setattr__(record, name, value)
    return value


_Known = tuple[list[inspect.Parameter], inspect.Parameter | None, dict[str, inspect.Parameter]]


@functools.cache
def _parameters(function: Callable[..., Any]) -> _Known:
    """The parameters that take one argument by position, the one that takes the rest, and those with names."""
    known = inspect.signature(function).parameters
    single = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p for p in known.values() if p.kind is p.VAR_POSITIONAL), None)
    return (
        single,
        rest,
        {n: p for n, p in known.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)},
    )


class _Names(dict[str, Any]):
    """The names of a module; Any for what is imported for type checkers alone."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@functools.cache
def _evaluated(annotation: str, module: str) -> Any:
    """The type that an annotation names."""
    try:
        return eval(annotation, {}, _Names(vars(sys.modules[module])))  # our own source
    except TypeError:
        return Any


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type."""
    if hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, TypeVar | str):
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return (
            not isinstance(value, bool)
            and isinstance(value, numbers.Real)
            and float(value) is not None
        )
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is bool:
        # "bool_" is numpy's before version 2; 0 and 1 have always been taken.
        return type(value).__name__ in ("bool", "bool_") or (
            isinstance(value, int) and value in (0, 1)
        )
    kind = origin or hint
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in (collections.abc.Mapping, dict):
        return isinstance(value, kind) and (
            not inner or all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
        )
    if kind is tuple:
        if isinstance(value, _TEXTS) or not isinstance(value, Collection):
            return False
        if Ellipsis in inner:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if kind is collections.abc.Sequence:
        if (
            isinstance(value, _TEXTS)
            or not isinstance(value, Collection)
            or hasattr(value, "dtype")
        ):
            return False  # an array is neither true nor false, and an iterator is read once only
        return all(fits(one, inner[0]) for one in value)
    if kind is collections.abc.Iterable:  # an iterator's elements are looked at where they are read
        return (
            isinstance(value, Iterable)
            and not isinstance(value, _TEXTS)
            and (not isinstance(value, Collection) or all(fits(one, inner[0]) for one in value))
        )
    if getattr(kind, "__name__", "") == "ndarray":
        return _is_array(value)
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False) and kind is not os.PathLike:
        return all(
            hasattr(value, n)
            for n in (*vars(kind), *kind.__annotations__)
            if n == "__call__" or n[0] != "_"
        )
    if (
        kind.__module__.partition(".")[0] == "onnx"
        and type(value).__module__.partition(".")[0] == "onnx_graphsurgeon"
    ):
        return True  # its graphs are exported
    return isinstance(value, kind)


def _is_array(value: object) -> bool:
    """Whether it is an array of numbers, of numpy or of what gives numpy its arrays."""
    return (
        hasattr(value, "ndim")
        and hasattr(value, "__array__")
        and (
            getattr(getattr(value, "dtype", None), "kind", "f") not in "OSUMm"
            and getattr(getattr(value, "dtype", None), "names", None) is None
        )
    )


def _class(value: object) -> str:
    try:
        kind = getattr(getattr(value, "dtype", None), "name", "")
    except Exception:  # of a class of the user's
        kind = ""
    return (
        "None"
        if value is None
        else f"{type(value).__name__} of {kind}"
        if kind
        else type(value).__name__
    )


def _words(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        words = list(dict.fromkeys(_words(one) for one in inner))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if (
        origin in (collections.abc.Sequence, collections.abc.Iterable)
        and inner
        and inner[0] is not Any
    ):
        return f"a list of {_words(inner[0])}"
    if origin in (collections.abc.Mapping, dict) and Any not in inner:
        return f"a dict from {' to '.join(map(_words, inner))}"
    if origin is tuple and Ellipsis not in inner:
        return f"({', '.join(map(_words, inner))})"
    kind = origin or hint
    if getattr(kind, "__name__", "") == "ndarray":
        return "an array of numbers"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
