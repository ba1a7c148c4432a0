"""Text for terminals, logs and JSON: no control characters, one line, short.

Names in models, logs, JSON and archives come from others. An escape sequence in a name would run in
the user's terminal, and some JSON readers reject C1 codes. The filter for both is here. The command
line puts it on stdout and stderr, and code that writes an answer to a file uses it as well.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

# C0 (except tab and newline), DEL and C1; separators that some terminals take for newlines; marks
# that change the direction of text or are invisible; halves of surrogate pairs, which Python uses
# for file names that are not UTF-8; characters that XML forbids; invisible letters of tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\U000e0000-\U000e007f]"
)

_SENTENCE_END = re.compile(r"(?<=[.!?\"])[ ](?=[A-Z])")

_REPR = 60  # characters of a value in a message


def escape_hidden(text: str) -> str:
    r"""Write every hidden character as ``\u001b``, which means the same in a JSON string."""
    return _HIDDEN.sub(lambda match: _escape(match[0]), text) if _HIDDEN.search(text) else text


def as_line(text: str) -> str:
    """Return text as one line: tabs and line breaks, which only a name contains, are escaped."""
    return escape_hidden(text).replace("\n", "\\n").replace("\t", "\\t")


def as_text(lines: Iterable[str]) -> str:
    """Return lines as one text; a name with a line break does not start a new line."""
    return "".join(f"{as_line(line)}\n" for line in lines)


def _escape(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")  # two units above U+FFFF, as in JSON
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs)


def escape_unencodable(text: str, stream: TextIO) -> str:
    """Escape the characters that a stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "escapes").decode(encoding)


def _handle_encode_error(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return _escape(error.object[error.start : error.end]), error.end


codecs.register_error("escapes", _handle_encode_error)


def one_line(text: str) -> str:
    """Return text on one line: each run of white space becomes one space."""
    return escape_hidden(" ".join(text.split()))


def reason_of(error: BaseException, length: int = 200, *, first_line: bool = False) -> str:
    """Return the message of an exception on one line, or the name of its class.

    Args:
        error: Exception of another package or of the user.
        length: Maximum number of characters.
        first_line: Whether only the first line is used.
    """
    try:
        text = str(error)
    except Exception:  # a class of the user
        text = ""
    if first_line:
        text = next(iter(text.strip().splitlines()), "")
    return " ".join(text.split())[:length] or type(error).__name__


def brief_repr(value: object) -> str:
    """Return the beginning of a value's `repr` on one line, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the user, or an integer of more digits than Python prints
        text = object.__repr__(value)
    return text if len(text) <= _REPR else f"{text[:_REPR]}..."


def drop_repeated_sentences(texts: Sequence[str]) -> list[str]:
    """Return texts without sentences that an earlier one contains."""
    seen: set[str] = set()
    results = []
    for text in texts:
        sentences = _SENTENCE_END.split(text)
        results.append(" ".join(s for s in sentences if s not in seen))
        seen.update(sentences)
    return results


def format_count(number: int | str | None, word: str) -> str:
    """Return ``1 layer`` or ``2 layers``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def format_count_were(number: int, word: str) -> str:
    """Return ``1 layer was`` or ``2 layers were``."""
    return f"{format_count(number, word)} {'was' if number == 1 else 'were'}"


def format_list(items: Sequence[str], most: int = 4) -> str:
    """Return the first few items: ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def keep_end(name: str, width: int) -> str:
    """Return the end of a name, which distinguishes nodes, in at most `width` characters."""
    return name if len(name) <= width else f"...{name[-(width - 3) :]}"


def cut_middle(name: str, width: int) -> str:
    """Return a name in at most `width` columns, without its middle if it is too long.

    Beginning and end distinguish layers.
    """
    width = max(20, width)
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"


def format_layer_counts(convolutions: int, products: int) -> str:
    """Return ``74 (1 convolution, 73 matrix products)``, or ``64 convolutions`` of one kind."""
    of_convolutions = format_count(convolutions, "convolution")
    of_products = format_count(products, "matrix product")
    if convolutions and products:
        return f"{convolutions + products} ({of_convolutions}, {of_products})"
    return of_products if products else of_convolutions
