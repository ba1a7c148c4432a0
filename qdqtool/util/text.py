"""What may reach a terminal, a log or a JSON: no control character of any origin.

Names in models, logs, JSON and archives are other people's bytes. An escape sequence among them would run in the
user's terminal, and a JSON reader may choke on C1 codes. The one filter is here; the command line puts it over stdout
and stderr, and whatever writes an answer to a file uses it as well.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

# C0 (but for tab and newline), DEL and C1; separators that some terminals take for newlines; marks that turn the
# direction of text around or take no room; halves of surrogate pairs, which is how Python holds file names that are not
# UTF-8; what XML does not allow; letters of the private alphabet of tags, which nothing shows.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\U000e0000-\U000e007f]"
)

_REPR = 60  # characters of a value in a message


def visible(text: str) -> str:
    r"""The text with every hidden character written as ``\u001b``, which means the same inside a JSON string."""
    return _HIDDEN.sub(_written, text) if _HIDDEN.search(text) else text


def as_line(text: str) -> str:
    """The text as one line of an answer: tabs and line breaks, which only a name can bring here, are escapes too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def as_text(lines: Iterable[str]) -> str:
    """Lines as one text: whatever names are in them, each is one line."""
    return "".join(f"{as_line(line)}\n" for line in lines)


def _written(match: re.Match[str]) -> str:
    return _escapes(match[0])


def _escapes(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")  # two of them above U+FFFF, as JSON writes it
    return "".join(
        f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)
    )


def encodable(text: str, stream: TextIO) -> str:
    """The text with what a stream's encoding does not have as escapes, which mean the same inside a JSON string."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "escapes").decode(encoding)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return _escapes(error.object[error.start : error.end]), error.end


codecs.register_error("escapes", _replaced)


def one_line(text: str) -> str:
    """The text on one line: every run of white space, newlines included, is one space."""
    return visible(" ".join(text.split()))


def reason_of(error: BaseException, length: int = 200, *, first_line: bool = False) -> str:
    """What an exception of somebody else's code says, on one line; the name of its class where it says nothing."""
    try:
        text = str(error)
    except Exception:  # of a class of the user's
        text = ""
    if first_line:
        text = next(iter(text.strip().splitlines()), "")
    return " ".join(text.split())[:length] or type(error).__name__


def brief_repr(value: object) -> str:
    """Return the beginning of a value's `repr` on one line, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the user's, or an integer of more digits than Python prints
        text = object.__repr__(value)
    return text if len(text) <= _REPR else f"{text[:_REPR]}..."


def counted(number: int | str | None, word: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def were(number: int, word: str) -> str:
    """``1 layer was``, ``2 layers were``."""
    return f"{counted(number, word)} {'was' if number == 1 else 'were'}"


def listed(items: Sequence[str], most: int = 4) -> str:
    """The first few of a list: ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def ending(name: str, width: int) -> str:
    """The end of a name, which is what distinguishes nodes, in at most ``width`` characters."""
    return name if len(name) <= width else f"...{name[-(width - 3) :]}"


def middle(name: str, width: int) -> str:
    """A name in at most ``width`` columns; the middle is cut, since beginning and end distinguish layers."""
    width = max(20, width)
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"


def layers_counted(convolutions: int, products: int) -> str:
    """``74 (1 convolution, 73 matrix products)``; of one kind alone ``64 convolutions``."""
    kinds = [
        counted(n, what)
        for n, what in ((convolutions, "convolution"), (products, "matrix product"))
        if n
    ]
    if len(kinds) == 2:
        return f"{convolutions + products} ({', '.join(kinds)})"
    return kinds[0] if kinds else "0 convolutions"
