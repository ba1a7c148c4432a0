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

# Characters to escape: C0 (except tab and newline), DEL and C1; separators that some terminals
# treat as newlines; marks that are invisible or change the text direction; single surrogates, which
# Python uses for file names that are not UTF-8; characters that XML forbids; invisible tag
# characters.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\U000e0000-\U000e007f]"
)

_SENTENCE_END = re.compile(r"(?<=[.!?\"])[ ](?=[A-Z])")

_REPR = 60  # maximum number of characters of a value in a message


def escape_hidden(text: str) -> str:
    r"""Replace hidden characters by escapes such as ``\u001b``, which are valid in JSON."""
    return _HIDDEN.sub(lambda match: _escape(match[0]), text) if _HIDDEN.search(text) else text


def as_line(text: str) -> str:
    """Return a text on one line, with tabs, line breaks and hidden characters escaped."""
    return escape_hidden(text).replace("\n", "\\n").replace("\t", "\\t")


def as_text(lines: Iterable[str]) -> str:
    """Join lines to one text; line breaks inside a line are escaped."""
    return "".join(f"{as_line(line)}\n" for line in lines)


def _escape(text: str) -> str:
    # JSON escapes characters above U+FFFF as two units.
    units = text.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs)


def escape_unencodable(text: str, stream: TextIO) -> str:
    """Return a text with escapes for characters that a stream cannot encode."""
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
        first_line: Whether to use only the first line.
    """
    try:
        text = str(error)
    except Exception:  # ``str`` of a user's class may fail
        text = ""
    if first_line:
        text = next(iter(text.strip().splitlines()), "")
    return " ".join(text.split())[:length] or type(error).__name__


def brief_repr(value: object) -> str:
    """Return the beginning of a value's `repr` on one line, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # ``repr`` of a user's class or of a huge integer may fail
        text = object.__repr__(value)
    return text if len(text) <= _REPR else f"{text[:_REPR]}..."


def drop_repeated_sentences(texts: Sequence[str]) -> list[str]:
    """Return texts without sentences that an earlier text already contains."""
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
    """Return at most `most` items as text, such as ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def keep_end(name: str, width: int) -> str:
    """Return the end of a name, which distinguishes nodes, in at most `width` characters."""
    return name if len(name) <= width else f"...{name[-(width - 3) :]}"


def cut_middle(name: str, width: int) -> str:
    """Return a name in at most `width` columns, without its middle if it is too long.

    Layers usually differ at the beginning or end of their names.
    """
    width = max(20, width)
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"


def format_layer_counts(convolutions: int, products: int) -> str:
    """Return ``74 (1 convolution, 73 matrix products)`` or, for one kind, ``64 convolutions``."""
    of_convolutions = format_count(convolutions, "convolution")
    of_products = format_count(products, "matrix product")
    if convolutions and products:
        return f"{convolutions + products} ({of_convolutions}, {of_products})"
    return of_products if products else of_convolutions
