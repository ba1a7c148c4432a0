"""Frozen records: what a frozen dataclass is, without compiling methods for each class when it is imported.

A hundred small classes are loaded with every command; Python's own decorator compiles five functions for each.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


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
    methods = {"_fields": tuple(fields), "_defaults": defaults, "__match_args__": tuple(fields), **_METHODS}
    for name, value in methods.items():
        if name not in vars(kind):
            setattr(kind, name, value)
    return kind


def contents(item: Any) -> tuple[Any, ...]:
    """The values of all fields of a record, in their order."""
    values = item.__dict__
    return tuple([values[name] for name in item._fields])


def published(item: Any, *names: str) -> dict[str, Any]:
    """Fields of a dataclass as JSON: all, or those named; what has ``as_json`` by that, enumerations as text."""
    return {name: _published(getattr(item, name)) for name in names or item.__dataclass_fields__}


def _published(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_published(one) for one in value]
    return value.as_json() if hasattr(value, "as_json") else str(value) if isinstance(value, StrEnum) else value


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
        left = names[len(args):]
        wrong = [name for name in named if name not in left]
        if wrong or len(args) > len(names) or len(values) < len(names):
            lacking = [name for name in names if name not in values]
            raise TypeError(f"{type(self).__name__}({', '.join(names)}): {len(args)} by place, wrong {wrong}, "
                            f"lacking {lacking}")
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


_METHODS = {"__init__": _init, "__setattr__": _set, "__delattr__": _set, "__eq__": _eq, "__hash__": _hash,
            "__repr__": _repr, "__getstate__": _state}
_HASH = "_hash"  # in a record's dictionary
