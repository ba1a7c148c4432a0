"""Regular expressions that users give."""

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
