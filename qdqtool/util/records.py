"""Frozen records, which behave like frozen dataclasses and are faster to define.

Every command imports about 40 small classes. Python's dataclass decorator compiles six functions
for each class, which takes up to a millisecond. All records share the functions of this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
R = TypeVar("R")

_HASH = "_hash"  # key of the cached hash in a record's dictionary
_NAMES = "_names"


@dataclass_transform(frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """Class decorator that adds the methods of a frozen dataclass.

    The fields are the annotations of the class and its base classes, except ``ClassVar``.
    Comparison, hash and ``repr`` use the values of all fields, unless the class defines these
    methods itself. Default values must not be mutable, because all records share them.
    """
    fields = list(getattr(kind, "_fields", ()))
    defaults = dict(getattr(kind, "_defaults", ()))
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        if "ClassVar" in str(annotation):
            continue
        if name not in fields:
            fields.append(name)
        if name in vars(kind):
            defaults[name] = vars(kind)[name]
    attributes = {
        "_fields": tuple(fields),
        "_defaults": defaults,
        "__match_args__": tuple(fields),
        **_METHODS,
    }
    for name, value in attributes.items():
        if name not in vars(kind):
            setattr(kind, name, value)
    return kind


class SharedTuple(tuple[T, ...]):
    """Tuple that many records share, with a cache of results computed from its items.

    Attributes:
        more: Name of the node at which the search for items stopped; empty if the items are
            complete.
    """

    more: str

    def __new__(cls, items: Iterable[T] = (), more: str = "") -> SharedTuple[T]:
        """Create a tuple of `items`."""
        result = super().__new__(cls, items)
        result.more = more
        return result

    def once(self, function: Callable[[Sequence[T]], R]) -> R:
        """Call a function with the items, or return its cached result.

        Callers must not change the result.
        """
        cache: dict[Any, Any] = self.__dict__
        if function not in cache:
            cache[function] = function(tuple(self))
        result: R = cache[function]
        return result

    def __reduce__(self) -> tuple[type[SharedTuple[T]], tuple[tuple[T, ...], str]]:
        return type(self), (tuple(self), self.more)


def once(function: Callable[[Sequence[T]], R]) -> Callable[[Sequence[T]], R]:
    """Decorate a function of a sequence to cache its result per :class:`SharedTuple`."""
    return functools.wraps(function)(
        lambda items: items.once(function) if type(items) is SharedTuple else function(items)
    )


def collect_names(item: Any) -> tuple[str, ...]:
    """Return the distinct texts in a record, including nested records and tuples.

    A class attribute ``unnamed_fields`` lists fields to leave out (default: ``op`` and ``shape``).
    The result is cached in the record.
    """
    cache = vars(item)
    if _NAMES not in cache:
        names: dict[str, None] = {}
        _add_names(item, names, set())
        cache[_NAMES] = tuple(names)
    result: tuple[str, ...] = cache[_NAMES]
    return result


# Most fields have these types, which contain no names. Skipping them early saves time.
_NAMELESS_TYPES = frozenset((int, float, bool, type(None)))


def _add_names(value: Any, names: dict[str, None], visited: set[int]) -> None:
    """Add the texts in a value to `names`, and the value's id to `visited`."""
    if id(value) in visited:
        return
    kind = type(value)
    parts: Iterable[Any] = ()
    if kind is SharedTuple:
        names.update(value.once(_names_of))
    elif kind in (tuple, frozenset):
        parts = value
    elif hasattr(kind, "_fields"):
        if _NAMES in vars(value):
            names.update(dict.fromkeys(vars(value)[_NAMES]))
        else:
            unnamed_fields = getattr(kind, "unnamed_fields", ("op", "shape"))
            parts = [getattr(value, name) for name in kind._fields if name not in unnamed_fields]
    else:
        return
    visited.add(id(value))
    for part in parts:
        if type(part) is str:
            if part:
                names[part] = None
        elif type(part) not in _NAMELESS_TYPES:
            _add_names(part, names, visited)


def _names_of(parts: Sequence[Any]) -> dict[str, None]:
    names: dict[str, None] = {}
    _add_names(parts, names, set())
    return names


def field_values(item: Any) -> tuple[Any, ...]:
    """Return the values of all fields of a record, in the order of the fields."""
    values = item.__dict__
    return tuple([values[name] for name in item._fields])


def to_json_fields(item: Any, *names: str) -> dict[str, Any]:
    """Return fields of a record or dataclass as JSON values, by name; all fields by default.

    Objects with a method ``as_json`` are converted with this method. Enumerations become texts.
    """
    fields = names or getattr(item, "_fields", None) or item.__dataclass_fields__
    return {name: _to_json(getattr(item, name)) for name in fields}


def _to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_json(element) for element in value]
    if hasattr(value, "as_json"):
        return value.as_json()
    return str(value) if isinstance(value, StrEnum) else value


def nearest(table: Mapping[type, T], kind: type) -> T | None:
    """Return the table entry of a class or of its nearest base class; None without an entry."""
    return next((table[base] for base in kind.__mro__ if base in table), None)


def replace_fields(item: T, **changes: Any) -> T:
    """Return a copy of a record with new values for the fields in `changes`."""
    values = dict(zip(item._fields, field_values(item), strict=True))  # type: ignore[attr-defined]
    return type(item)(**{**values, **changes})


def _init(self: Any, *args: Any, **named: Any) -> None:
    fields = self._fields
    if len(args) == len(fields) and not named:  # fast path for the usual case
        self.__dict__.update(zip(fields, args, strict=True))
        return
    positional = dict(zip(fields, args, strict=False))
    values = {**self._defaults, **positional, **named}
    if (
        len(args) > len(fields)
        or len(values) != len(fields)
        or any(name not in values for name in fields)
        or not named.keys().isdisjoint(positional)
    ):
        raise TypeError(
            f"{type(self).__name__} needs the fields {', '.join(fields)}; got {args} and {named}"
        )
    self.__dict__.update(values)


def _set(self: Any, name: str, *value: object) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")


def _eq(self: Any, other: object) -> bool:
    return type(self) is type(other) and field_values(self) == field_values(other)


def _hash(self: Any) -> int:
    """Return the hash, cached because records may contain each other in long chains."""
    values = self.__dict__
    if _HASH not in values:
        values[_HASH] = hash((type(self), field_values(self)))
    result: int = values[_HASH]
    return result


def _getstate(self: Any) -> dict[str, Any]:
    """Return the fields to pickle, without caches: hashes differ between processes."""
    return dict(zip(self._fields, field_values(self), strict=True))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
    return f"{type(self).__name__}({values})"


_METHODS = {
    "__init__": _init,
    "__setattr__": _set,
    "__delattr__": _set,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__getstate__": _getstate,
}
