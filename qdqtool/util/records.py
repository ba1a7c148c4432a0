"""Frozen records: what a frozen dataclass is, without compiling methods for each class when it is imported.

A hundred small classes are loaded with every command; Python's own decorator compiles five functions for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
R = TypeVar("R")


@dataclass_transform(frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """Makes a record of a class: its annotations, after those of its bases, are the fields.

    Values of fields are compared, hashed and printed, unless the class says how. A default is shared, so it must not
    be one that changes. What is annotated as ``ClassVar`` is no field.
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
    methods = {
        "_fields": tuple(fields),
        "_defaults": defaults,
        "__match_args__": tuple(fields),
        **_METHODS,
    }
    for name, value in methods.items():
        if name not in vars(kind):
            setattr(kind, name, value)
    return kind


class Shared(tuple[T, ...]):
    """A tuple that many records hold: what is worked out of it is kept with it.

    Attributes:
        more: Where further items are that were not looked for; empty where these are all.
    """

    more: str

    def __new__(cls, items: Iterable[T] = (), more: str = "") -> Shared[T]:
        made = super().__new__(cls, items)
        made.more = more
        return made

    def once(self, work: Callable[[Sequence[T]], R]) -> R:
        """The result of a function of these items; not to be changed."""
        kept: dict[Any, Any] = self.__dict__
        if work not in kept:
            kept[work] = work(tuple(self))
        found: R = kept[work]
        return found

    def __reduce__(self) -> tuple[type[Shared[T]], tuple[tuple[T, ...], str]]:
        return type(self), (tuple(self), self.more)


def once(work: Callable[[Sequence[T]], R]) -> Callable[[Sequence[T]], R]:
    """A function of a sequence, worked out once for each :class:`Shared` one."""
    return functools.wraps(work)(
        lambda items: items.once(work) if type(items) is Shared else work(items)
    )


def names_in(item: Any) -> tuple[str, ...]:
    """Every text in a record, each once, in the records and tuples that it holds too, but for the fields ``nameless``
    of its class (``op`` and ``shape``); worked out once."""
    kept = vars(item)
    if _NAMES not in kept:
        kept[_NAMES] = tuple(_add_names(item, {}, set()))
    found: tuple[str, ...] = kept[_NAMES]
    return found


def _add_names(value: Any, found: dict[str, None], seen: set[int]) -> dict[str, None]:
    """Adds the names in a record or tuple; what several others hold, as ways do their steps, is looked at once."""
    seen.add(id(value))
    if type(value) is Shared:
        found.update(value.once(_names_of))
        return found
    if hasattr(value, "_fields"):
        known = vars(value).get(_NAMES)
        if known:
            found.update(dict.fromkeys(known))
            return found
        apart = getattr(value, "nameless", ("op", "shape"))
        parts = [getattr(value, name) for name in value._fields if name not in apart]
    else:
        parts = [
            p
            for p, known in zip(value, map(seen.__contains__, map(id, value)), strict=True)
            if not known
        ]
    for part in parts:
        kind = type(part)
        if kind is str:
            if part:
                found[part] = None
        elif (
            kind not in _NAMELESS
            and id(part) not in seen
            and (hasattr(part, "_fields") or kind in _SEVERAL)
        ):
            _add_names(part, found, seen)
    return found


def _names_of(parts: Sequence[Any]) -> dict[str, None]:
    return _add_names(parts, {}, set())


_NAMELESS = frozenset((int, float, bool, type(None)))
_SEVERAL = frozenset((tuple, Shared, frozenset))
_NAMES = "_names"  # in a record's dictionary, once they are known


def contents(item: Any) -> tuple[Any, ...]:
    """The values of all fields of a record, in their order."""
    values = item.__dict__
    return tuple([values[name] for name in item._fields])


def published(item: Any, *names: str) -> dict[str, Any]:
    """Fields of a record or dataclass as JSON: all, or those named; what has ``as_json`` by that, enumerations as text."""
    fields = names or getattr(item, "_fields", None) or item.__dataclass_fields__
    return {name: _published(getattr(item, name)) for name in fields}


def _published(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_published(one) for one in value]
    return (
        value.as_json()
        if hasattr(value, "as_json")
        else str(value)
        if isinstance(value, StrEnum)
        else value
    )


def nearest(table: Mapping[type, T], kind: type) -> T | None:
    """What a table says of a class, or of the nearest of its bases; None where it knows none of them."""
    return next((table[base] for base in kind.__mro__ if base in table), None)


def replaced(item: T, **changes: Any) -> T:
    """A record with other values in some fields."""
    values: dict[str, Any] = dict(zip(item._fields, contents(item), strict=True))  # type: ignore[attr-defined]
    return type(item)(**{**values, **changes})


def _init(self: Any, *args: Any, **named: Any) -> None:
    names = self._fields
    values = self.__dict__
    if named or len(args) != len(names):
        values.update(self._defaults)
        values.update(zip(names, args, strict=False))
        values.update(named)
        left = names[len(args) :]
        wrong = [name for name in named if name not in left]
        if wrong or len(args) > len(names) or len(values) < len(names):
            lacking = [name for name in names if name not in values]
            raise TypeError(
                f"{type(self).__name__}({', '.join(names)}): {len(args)} by place, wrong {wrong}, "
                f"lacking {lacking}"
            )
    else:
        values.update(zip(names, args, strict=False))


def _set(self: Any, name: str, *value: object) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")


def _eq(self: Any, other: object) -> bool:
    return type(self) is type(other) and contents(self) == contents(other)


def _hash(self: Any) -> int:
    """Worked out once: a record may hold others, each of which holds the one before."""
    values = self.__dict__
    found: int | None = values.get(_HASH)
    if found is None:
        found = values[_HASH] = hash((type(self), contents(self)))
    return found


def _state(self: Any) -> dict[str, Any]:
    """What a copy gets, or another process, where texts have other hashes."""
    return dict(zip(self._fields, contents(self), strict=True))


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
    "__getstate__": _state,
}
_HASH = "_hash"  # in a record's dictionary
