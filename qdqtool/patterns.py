"""Regular expressions that users give, and searches that a regular expression would make quadratic."""

from __future__ import annotations

import re

from qdqtool.errors import QdqtoolError


def compile_pattern(pattern: str, given: str) -> re.Pattern[str]:
    """Compiles a user's regular expression.

    Args:
        pattern: The expression.
        given: The option and the expression as the user wrote them, for the message.

    Raises:
        QdqtoolError: It is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise QdqtoolError(f"{given}: not a regular expression ({error})") from None


def split_copies(name: str, mark: str = "_clone_") -> tuple[str, str]:
    """A name and its suffixes ``_clone_1_clone_2``, in time linear in its length.

    Args:
        name: The name; any text.
        mark: What stands before each number.
    """
    end = len(name)
    while True:
        at = name.rfind(mark, 0, end)
        number = name[at + len(mark) : end]
        if at < 0 or not (number.isascii() and number.isdecimal()):
            return name[:end], name[end:]
        end = at
