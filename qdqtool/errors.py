"""Errors that the user can act on: shown as one line on stderr, exit code 2, no traceback."""

import re
from collections.abc import Callable

# Line breaks and other control characters; halves of characters, as file names that are not UTF-8 have them.
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

LONGEST = (
    600  # characters of a message; what is longer holds something that nobody reads to its end
)
_WORD, _PATH = (
    100,
    200,
)  # what is left then of each word, as a name is one, and of the path in front
_LONG_WORD = re.compile(rf"\S{{{_WORD + 1},}}")


def brief(text: str) -> str:
    """A message, with the middle of what makes it too long left out: of its values, where it is a sentence."""
    if len(text) <= LONGEST:
        return text
    shorter: Callable[[], str] | None = getattr(text, "brief", None)  # of one that knows its values
    return shortened(text) if shorter is None else shorter()


def shortened(text: str) -> str:
    """A text whose long words have lost their middle, so that what it says is left; if still too long, its own."""
    text = _LONG_WORD.sub(lambda found: _ends(found[0], _WORD), text)
    return text if len(text) <= LONGEST else _ends(text, LONGEST)


def _ends(text: str, length: int) -> str:
    """Beginning and end, each in half of the length."""
    return f"{text[: length // 2 - 3]}...{text[-length // 2 :]}"


class QdqtoolError(Exception):
    """Bad input or an impossible request.

    The message is one line that names the file, node or tensor and says what to do about it. The
    middle of a long message is left out.

    Attributes:
        code: Identifier of the cause, such as ``"unknown-gpu"``. It stays when the message is reworded.
        path: File that the error is about. The message begins with it. Empty if there is none.
        parameter: Parameter of the Python API that the error is about. Empty if there is none.
        node: ONNX node or tensor that the error is about. Empty if there is none.
        reason: Message without the path.
    """

    def __init__(
        self,
        reason: str = "",
        path: str = "",
        *,
        code: str = "",
        parameter: str = "",
        node: str = "",
    ) -> None:
        reason = brief(reason)
        fits = len(path) <= _PATH or len(path) + len(reason) <= LONGEST
        prefix = path if fits else _ends(path, _PATH)
        super().__init__(f"{prefix}: {reason}" if path else reason)
        self.reason = reason
        self.path = path
        self.code = code
        self.parameter = parameter
        self.node = node

    def __str__(self) -> str:
        """One line that can be printed, whatever is in the names."""
        return _UNPRINTED.sub(
            lambda found: found[0].encode("unicode_escape").decode(), super().__str__()
        )


class VersionError(QdqtoolError):
    """A TensorRT version that no target fits."""


class ModelError(QdqtoolError):
    """An ONNX model that cannot be read, is damaged, or is not what the command needs."""


class DataError(QdqtoolError):
    """Calibration data, a cache or a table that cannot be used."""


class BuildLogError(QdqtoolError):
    """A build log, layer JSON or profile that cannot be used."""


class BuilderError(QdqtoolError):
    """A TensorRT builder that is missing, was called wrongly, or did not finish."""


class ClusterError(QdqtoolError):
    """A cluster that cannot be reached, is not fit for the work, or lost its workers."""
