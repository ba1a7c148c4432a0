"""Compares arguments with the annotations of the parameters they are for, so that a wrong type ends in one line."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from qdqtool.errors import QdqtoolError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {
    str: "text", bytes: "bytes", int: "an integer", float: "a number", bool: "True or False", type(None): "None",
    os.PathLike: "a path", collections.abc.Callable: "a function", collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a list", tuple: "a tuple",
}
_TEXTS = (str, bytes, bytearray, memoryview, Mapping)
_SHOWN = 60  # characters of a value in a message


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses arguments of another type than annotated, with the parameter's name.

    Numbers of numpy are numbers, whatever has ``__fspath__`` is a path, any collection is a list.
    """

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        signature = _signature(function)
        given = signature.bind(*args, **keywords).arguments  # a TypeError as for any function of Python
        for name, value in given.items():
            parameter = signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD or value is parameter.default:
                continue
            for one in value if parameter.kind is inspect.Parameter.VAR_POSITIONAL else (value,):
                require(name, one, parameter.annotation, function.__module__)
        return function(*args, **keywords)

    return call


def require(name: str, value: object, annotation: Any, module: str) -> None:
    """Refuses a value of another type.

    Args:
        name: The parameter's.
        value: What was given for it.
        annotation: Its annotation, in words or as a type.
        module: Where the annotation stands.

    Raises:
        QdqtoolError: The value is of another type.
    """
    hint = _evaluated(annotation, module) if isinstance(annotation, str) else annotation
    if not fits(value, hint):
        try:
            shown = " ".join(repr(value).split())
        except Exception:  # of a class of the user's
            shown = object.__repr__(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise QdqtoolError(f"`{name}={shown}`: is {_class(value)}; give {_words(hint)}")


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@functools.cache
def _evaluated(annotation: str, module: str) -> Any:
    """The type that an annotation names; Any where it names what is imported for type checkers alone."""
    try:
        return eval(annotation, vars(sys.modules[module]))  # our own source
    except (NameError, TypeError):
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
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is int:  # an array has a length, and some have an index
        return isinstance(value, SupportsIndex) and not (isinstance(value, bool | type) or hasattr(value, "__len__"))
    if hint is bool:
        # "bool_" is numpy's before version 2; 0 and 1 have always been taken.
        return type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))
    kind = origin or hint
    if kind is collections.abc.Callable:
        return callable(value)
    if kind is collections.abc.Mapping:
        return isinstance(value, Mapping) and (not inner or all(
            fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()))
    if kind is tuple:
        if isinstance(value, _TEXTS) or not isinstance(value, Collection):
            return False
        if Ellipsis in inner:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if kind is collections.abc.Sequence:
        if isinstance(value, _TEXTS) or not isinstance(value, Collection) or hasattr(value, "dtype"):
            return False  # an array is neither true nor false, and an iterator is read once only
        return all(fits(one, inner[0]) for one in value)
    if getattr(kind, "__name__", "") == "ndarray":
        return not isinstance(value, _TEXTS) and value is not None
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False) and kind is not os.PathLike:
        return True
    if kind.__module__.partition(".")[0] == "onnx" and type(value).__module__.partition(".")[0] == "onnx_graphsurgeon":
        return True  # its graphs are exported
    if kind is os.PathLike and isinstance(value, os.PathLike):
        try:
            return isinstance(os.fspath(value), str)  # a path may be bytes
        except Exception:  # of a class of the user's
            return False
    return isinstance(value, kind)


def _class(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _words(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        words = list(dict.fromkeys(_words(one) for one in inner))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if origin is collections.abc.Sequence and inner and inner[0] is not Any:
        return f"a list of {_words(inner[0])}"
    if origin is tuple and Ellipsis not in inner:
        return f"({', '.join(map(_words, inner))})"
    kind = origin or hint
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
