"""Sentences that hold the values in them, so that they can be said again: to somebody else, or of other names.

A sentence is a string, and whoever has one prints it as it is. In its template ``{`clock`}`` is a parameter of the
library and ``{`smooth`:{alpha:g}}`` one with its value: functions are told `clock`, the command line ``--clock``.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Self

from qdqtool.errors import LONGEST, QdqtoolError, shorten
from qdqtool.util.text import format_count, format_count_were, format_list

Told = Callable[[str, str], str]
"""How a parameter is called, of its name and of its value as text, which is empty where none is given."""


class Parameter:
    """A parameter of the library as a value of a sentence, where the template does not name it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __format__(self, value: str) -> str:
        return _as_argument(self.name, value)


def _as_argument(name: str, value: str) -> str:
    return f"`{name}={value}`" if value else f"`{name}`"


class Said(str):
    """A sentence, with its template and the values in it; without a template it is the words alone."""

    template: str = ""
    values: Mapping[str, Any] = {}

    def saying(self, template: str, values: Mapping[str, Any]) -> Self:
        """A sentence of the same kind."""
        made = type(self)(_Words(_as_argument).vformat(template, (), values))
        made.__dict__.update(self.__dict__, template=template, values=values)
        return made

    def renamed(self, name: Callable[[str], str]) -> Self:
        """The same of other names: ``name`` is asked for each text among the values, and of a sentence that is words
        alone for these."""
        if not self.template:
            return type(self)(name(self))
        return self.saying(
            self.template, {key: _renamed(value, name) for key, value in self.values.items()}
        )

    def brief(self) -> Self:
        """The same where it is as long as a message may be; else the middle of its long values is left out."""
        return self if len(self) <= LONGEST else self.renamed(shorten)


def _renamed(value: Any, name: Callable[[str], str]) -> Any:
    if isinstance(value, Said):
        return value.renamed(name)
    if type(value) in (list, tuple, frozenset):
        return type(value)(_renamed(v, name) for v in value)
    return name(value) if isinstance(value, str) and not isinstance(value, Enum) else value


def said(template: str, /, **values: Any) -> Said:
    """The sentence of a template; what a field of it may be told stands at :class:`_Words`."""
    return Said().saying(template, values)


def of_error(error: Exception) -> Said:
    """What an error says, and of which class it is (``kind``); the error itself would hold what its callers held."""
    if isinstance(error, QdqtoolError):
        template = "{path}: {reason}" if error.path else "{reason}"
        return said(template, path=error.path, reason=error.reason, kind=type(error)).brief()
    first = next(iter(error.args), "")
    return said(
        "{reason}", reason=first if isinstance(first, Said) else str(error), kind=type(error)
    )


def told(what: str, parameter: Told) -> str:
    """A sentence with its parameters called otherwise; the words of others stay."""
    if not isinstance(what, Said) or not what.template:
        return what
    return _Words(parameter).vformat(what.template, (), what.values)


class _Words(string.Formatter):
    """Also ``{n:counted layer}`` (``2 layers``), ``{n:were layer}`` (``2 layers were``), ``{names:joined ; }``.

    ``{pairs:each %s is %s}`` lists records of several values, ``{pairs:first 3 %s is %s}`` the first ones.
    """

    def __init__(self, parameter: Told) -> None:
        self.parameter = parameter

    def get_value(self, key: int | str, args: Any, values: Any) -> Any:
        return Parameter(key.strip("`")) if isinstance(key, str) and key[0] == "`" else values[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Parameter):
            return self.parameter(value.name, format_spec)
        how, _, word = format_spec.partition(" ")
        if how in ("each", "first"):
            most, _, word = word.partition(" ") if how == "first" else (str(len(value)), "", word)
            return format_list([word % item for item in self._told(value)], int(most))
        if how in ("counted", "were"):
            return (format_count if how == "counted" else format_count_were)(value, word)
        return (
            word.join(self._told(value))
            if how == "joined"
            else str(format(self._told(value), format_spec))
        )

    def _told(self, value: Any) -> Any:
        """A value with the sentences in it told to the same reader."""
        if self.parameter is _as_argument:
            return value
        if isinstance(value, str):
            return told(value, self.parameter)
        return type(value)(map(self._told, value)) if type(value) in (list, tuple) else value
