"""Names, field values and JSON of dataclasses that describe nodes and tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_NAMES = "_names"  # key of the cached names in a record's dictionary


class SharedTuple(tuple[T, ...]):
    """Tuple that many records share, with a cache for results computed from its items.

    Attributes:
        more: Name of the node at which the search for items stopped; empty if the items are
            complete.
    """

    more: str

    def __new__(cls, items: Iterable[T] = (), more: str = "") -> Self:
        """Create a tuple of `items`."""
        result = super().__new__(cls, items)
        result.more = more
        return result

    def compute_once(self, function: Callable[[Sequence[T]], R]) -> R:
        """Call a function with the items, and return its result.

        The result is cached, so the function is called only once, and callers must not change the
        result.
        """
        cache: dict[Any, R] = self.__dict__
        if function not in cache:
            cache[function] = function(tuple(self))
        return cache[function]

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[T, ...], str]]:
        return type(self), (tuple(self), self.more)


def collect_names(item: Any) -> tuple[str, ...]:
    """Return the distinct texts in the fields of a record and of the records and tuples in it.

    The fields in the class attribute ``unnamed_fields`` are left out (default: ``op`` and
    ``shape``). The result is cached in the record.
    """
    cache = vars(item)
    if _NAMES not in cache:
        names: dict[str, None] = {}
        _add_names(item, names, set())
        cache[_NAMES] = tuple(names)
    return tuple(cache[_NAMES])


# Types without names. Most fields have one of these types, so skipping them early saves time.
_NAMELESS_TYPES = frozenset((str, int, float, bool, type(None)))


def _add_names(value: Any, names: dict[str, None], visited: set[int]) -> None:
    if id(value) in visited:
        return
    kind = type(value)
    parts: Iterable[Any] = ()
    if kind is SharedTuple:
        names.update(value.compute_once(_collect_part_names))
    elif kind in (tuple, frozenset):
        parts = value
    elif is_dataclass(kind):
        if _NAMES in vars(value):
            names.update(dict.fromkeys(vars(value)[_NAMES]))
        else:
            unnamed_fields = getattr(kind, "unnamed_fields", ("op", "shape"))
            parts = [
                getattr(value, name) for name in field_names(value) if name not in unnamed_fields
            ]
    else:
        return
    visited.add(id(value))
    for part in parts:
        if type(part) is str and part:
            names[part] = None
        elif type(part) not in _NAMELESS_TYPES:
            _add_names(part, names, visited)


def _collect_part_names(parts: Sequence[Any]) -> dict[str, None]:
    names: dict[str, None] = {}
    _add_names(parts, names, set())
    return names


def field_names(item: Any) -> tuple[str, ...]:
    """Return the names of all fields of a dataclass, in the order of the fields."""
    return tuple(item.__match_args__)


def field_values(item: Any) -> tuple[Any, ...]:
    """Return the values of all fields of a dataclass, in the order of the fields."""
    values = item.__dict__
    return tuple([values[name] for name in item.__match_args__])


def to_json_fields(item: Any, *names: str) -> dict[str, Any]:
    """Return fields of a record or dataclass as JSON values, by name.

    Without `names`, all fields of a dataclass are returned. Objects with a method ``as_json`` are
    converted by this method. Members of enumerations become texts.
    """
    return {name: _to_json(getattr(item, name)) for name in names or item.__dataclass_fields__}


def _to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_json(element) for element in value]
    if hasattr(value, "as_json"):
        return value.as_json()
    return str(value) if isinstance(value, StrEnum) else value


def find_by_class(table: Mapping[type, T], kind: type) -> T | None:
    """Return the table entry of a class, else of its nearest base class, else None."""
    return next((table[base] for base in kind.__mro__ if base in table), None)
