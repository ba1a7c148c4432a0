"""Error for wrong use of the command line."""

import click


class UsageError(click.UsageError):
    """Arguments or options that are missing, contradict each other, or have no effect.

    Attributes:
        code: Identifier of the cause, such as ``"option-conflict"``; independent of the message.
        parameter: Argument or option that the error is about, as click names it.
    """

    def __init__(self, message: str, *, code: str, parameter: str) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = parameter
