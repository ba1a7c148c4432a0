"""Names as the page shows them: without hidden characters, and of a length that a page can bear."""

from __future__ import annotations

from collections.abc import Iterable

from qdqtool.buildlog.names import parts
from qdqtool.text import as_line

LONGEST = 400  # characters of a name; of a longer one both ends, which tell it from others
LONGEST_TEXT = 4_000


def shown(name: str, longest: int = LONGEST) -> str:
    """A name for the page; of a long one the beginning, the end and how much is left out."""
    if len(name) > longest:
        half = longest // 2 - 20
        name = f"{name[:half]} …{len(name) - 2 * half} characters… {name[-half:]}"
    return as_line(name)


def told(text: str) -> str:
    """A message or a fix for the page."""
    return shown(text, LONGEST_TEXT)


def short(name: str, width: int) -> str:
    """The end of a name, which tells nodes apart, in at most ``width`` characters."""
    name = shown(name)
    return name if len(name) <= width else f"…{name[-(width - 1):]}"


def plain(name: str, op: str) -> str:
    """A node's name without its operator at the end and the slash in front: ``model.2/cv1/conv``."""
    head, slash, last = name.rpartition("/")
    return (head if slash and last.startswith(op) and head else name).removeprefix("/")


class Spoken:
    """Which nodes the names of TensorRT's log lines speak of."""

    def __init__(self, names: Iterable[str]) -> None:
        known = set(names)
        # Splitting looks through all known names; only those that hold a joint can be split wrongly.
        self._joined = frozenset(n for n in known if any(j in n for j in (" + ", " || ", ", ", "PWN(")))

    def of(self, name: str) -> list[str]:
        """The ONNX names in a layer's or a tensor's name."""
        return parts(name, self._joined).bases if name else []
