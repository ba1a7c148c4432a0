"""Break text into lines for terminals: commands and file names are never broken."""

_SHORT_INDENTS = (0, 2, 4)  # of words that are too long for the indent of their paragraph


def wrap_words(text: str, width: int, indent: int, first: str | None = None) -> list[str]:
    """Wrap a text between words. The indent is shorter if a word is too long for it.

    Args:
        text: The text. Spaces within a line are kept.
        width: Columns. A word with more characters is not broken.
        indent: Number of spaces before each line.
        first: Text in place of the spaces before the first line. None: spaces.
    """
    import textwrap  # not needed by all commands

    start = " " * indent if first is None else first
    if any(len(word) > width - indent for word in text.split()):
        indent = min(indent, max(_SHORT_INDENTS))
    rows = textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [line for row in rows[:1] for line in shorten_indent(row, len(start), width)]
    return lines + [line for row in rows[1:] for line in shorten_indent(row, indent, width)]


def shorten_indent(row: str, start: int, width: int) -> list[str]:
    """Move the last word of a row to the left, or to a line of its own, if the row is too long.

    Args:
        row: A label or spaces, and then a word.
        start: Column of the word.
        width: Columns.
    """
    if len(row) <= width:
        return [row]
    label, word = row[:start].rstrip(), row[start:]
    if label.strip() == "-" and not len(word) <= width < len(word) + 2:
        label, word = "", row.lstrip()
    columns = [column for column in _SHORT_INDENTS if column + len(word) <= width]
    moved = " " * min(start, max(columns, default=max(_SHORT_INDENTS))) + word
    return [label, moved] if label else [moved]
