"""Checks of arguments: choices, lists of texts, regular expressions."""

import re
from collections.abc import Collection

from qdqtool.errors import QdqtoolError


def check_choice(
    parameter: str,
    value: object,
    choices: Collection[str],
    error: type[QdqtoolError] = QdqtoolError,
) -> None:
    """Raise an error if an argument is not one of its choices.

    Args:
        parameter: Name of the parameter, for the message.
        value: The argument.
        choices: Valid arguments.
        error: Class of the error.

    Raises:
        QdqtoolError: The argument is not one of the choices.
    """
    if value not in choices:
        raise error(
            f"`{parameter}={value!r}`: choose one of {', '.join(choices)}",
            code="unknown-choice",
            parameter=parameter,
        )


def check_not_text(parameter: str, value: object) -> None:
    """Raise an error if an argument is a single text instead of a list of texts.

    Raises:
        QdqtoolError: The argument is a text.
    """
    if isinstance(value, (str, bytes)):
        raise QdqtoolError(
            f"`{parameter}={value!r}` is a string; give a list of strings",
            code="wrong-type",
            parameter=parameter,
        )


def compile_pattern(pattern: str, argument: str, *, parameter: str = "") -> re.Pattern[str]:
    """Compile a regular expression of the user.

    Args:
        pattern: Regular expression.
        argument: Parameter and expression as the user wrote them, for the message.
        parameter: Name of the parameter.

    Raises:
        QdqtoolError: The text is not a valid regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise QdqtoolError(
            f"{argument}: not a regular expression ({error})",
            code="invalid-pattern",
            parameter=parameter,
        ) from None
