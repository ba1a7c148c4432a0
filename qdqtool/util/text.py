"""Format text for terminals, logs and JSON: short, one line, no control characters.

Names in models, logs, JSON and archives are untrusted. A terminal would execute an escape sequence
in a name, and some JSON readers reject C1 control characters. :func:`escape_hidden` escapes these
characters. The command line escapes everything that it prints to stdout and stderr, and code that
writes results to files calls the function as well.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

# Characters to escape: C0 (except tab and newline), DEL and C1; separators that some terminals
# treat as newlines; marks that are invisible or change the text direction; unpaired surrogates
# (Python uses them in file names that are not valid UTF-8); characters that XML forbids; invisible
# tag characters.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\U000e0000-\U000e007f]"
)

_SENTENCE_END = re.compile(r"(?<=[.!?\"])[ ](?=[A-Z])")

_REPR = 60  # maximum number of characters of a value in a message


def escape_hidden(text: str) -> str:
    r"""Replace hidden characters by escapes such as ``\u001b``, which are valid in JSON."""
    return (
        _HIDDEN.sub(lambda match: _escape_characters(match[0]), text)
        if _HIDDEN.search(text)
        else text
    )


def build_name_pattern(names: Sequence[str]) -> str:
    """Return a regular expression that matches the names and no other name."""
    escaped = [re.escape(name).replace(r"\-", "-") for name in names]
    return f"^{escaped[0]}$" if len(escaped) == 1 else f"^({'|'.join(escaped)})$"


def as_line(text: str) -> str:
    """Return a text on one line, with tabs, line breaks and hidden characters escaped."""
    return escape_hidden(text).replace("\n", "\\n").replace("\t", "\\t")


def as_text(lines: Iterable[str]) -> str:
    """Join lines into one text. Tabs, line breaks and hidden characters in a line are escaped."""
    return "".join(f"{as_line(line)}\n" for line in lines)


def _escape_characters(text: str) -> str:
    # JSON escapes characters above U+FFFF as two units.
    units = text.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs)


def escape_unencodable(text: str, stream: TextIO) -> str:
    """Escape the characters of a text that the encoding of a stream does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "escapes").decode(encoding)


def _handle_encode_error(error: Any) -> tuple[str, int]:
    return _escape_characters(error.object[error.start : error.end]), error.end


codecs.register_error("escapes", _handle_encode_error)


def one_line(text: str) -> str:
    """Replace each run of white space by one space, and escape hidden characters."""
    return escape_hidden(" ".join(text.split()))


def format_reason(error: BaseException, length: int = 200, *, first_line: bool = False) -> str:
    """Return an exception's message on one line, or its class name if the message is empty.

    Args:
        error: Exception of another package or of the user.
        length: Maximum number of characters.
        first_line: Whether to use only the first line.
    """
    try:
        text = str(error)
    except Exception:  # the user's class may define a ``__str__`` that fails
        text = ""
    if first_line:
        text = next(iter(text.strip().splitlines()), "")
    return " ".join(text.split())[:length] or type(error).__name__


def brief_repr(value: object) -> str:
    """Return the `repr` of a value on one line for a message, cut after 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # ``repr`` of a user's class or of a huge integer may fail
        text = object.__repr__(value)
    return text if len(text) <= _REPR else f"{text[:_REPR]}..."


def drop_repeated_sentences(texts: Sequence[str]) -> list[str]:
    """Remove the sentences of each text that an earlier text already contains."""
    seen: set[str] = set()
    results = []
    for text in texts:
        sentences = _SENTENCE_END.split(text)
        results.append(" ".join(s for s in sentences if s not in seen))
        seen.update(sentences)
    return results


def format_count(number: int | str | None, word: str) -> str:
    """Return a number and a noun in singular or plural: ``1 layer``, ``2 layers``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def format_count_were(number: int, word: str) -> str:
    """Return a number, a noun and a verb: ``1 layer was``, ``2 layers were``."""
    return f"{format_count(number, word)} {'was' if number == 1 else 'were'}"


def format_shape(shape: Iterable[int | None]) -> str:
    """Return dimensions as ``1x3x640x640``, with ``?`` for unknown ones."""
    return "x".join("?" if size is None else str(size) for size in shape)


def format_list(items: Sequence[str], most: int = 4) -> str:
    """Return at most `most` items as text, such as ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def keep_end(name: str, width: int) -> str:
    """Shorten a name to `width` characters by cutting the start; names differ at the end."""
    return name if len(name) <= width else f"...{name[-(width - 3) :]}"


def cut_middle(name: str, width: int) -> str:
    """Shorten a name to `width` characters (at least 20) by cutting the middle.

    Names of layers usually differ at the beginning or at the end.
    """
    width = max(20, width)
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"


def format_layer_counts(convolutions: int, products: int) -> str:
    """Return ``9 layers (1 convolution, 8 matrix products)``, ``6 convolutions`` or similar."""
    of_convolutions = format_count(convolutions, "convolution")
    of_products = format_count(products, "matrix product")
    if convolutions and products:
        return f"{convolutions + products} layers ({of_convolutions}, {of_products})"
    return of_products if products else of_convolutions


def round_significant(value: float) -> float:
    """Round a value to four significant digits."""
    return float(f"{value:.4g}")


def format_factor(factor: float) -> str:
    """Return a factor with one decimal, or with two or three if one decimal would show 1.0."""
    digits = next((d for d in (1, 2) if float(f"{factor:.{d}f}") != 1), 3)
    return f"{factor:.{digits}f}x"


def format_speed(ratio: float) -> str:
    """Return a ratio of speeds as ``1.7x faster``, or below 20 % as ``15 % slower``."""
    factor = max(ratio, 1 / ratio)
    amount = format_excess(factor) if is_small_factor(factor) else format_factor(factor)
    return f"{amount} {'faster' if ratio >= 1 else 'slower'}"


def is_small_factor(factor: float) -> bool:
    """Return whether :func:`format_speed` prints a factor of at least 1 as a percentage."""
    return round(100 * (factor - 1)) < 20


def format_excess(factor: float) -> str:
    """Return how far a factor is above 1: ``15 %`` for 1.15, ``0.5 %`` for 1.005."""
    percent = 100 * (factor - 1)
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %"


def format_ms(value: float, *, unit: bool = True) -> str:
    """Return a time with about three significant digits, such as ``0.681 ms``."""
    rounded = round_significant(value)
    digits = next((d for d, bound in enumerate((1000, 100, 1, 0.1)) if rounded >= bound), 4)
    return f"{value:.{digits}f}" + (" ms" if unit else "")
