"""Errors that the user can correct. The command line prints a line and exits with code 2."""

import re

# Control characters, line breaks and surrogates. File names that are not UTF-8 contain surrogates.
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

LONGEST = 600  # maximum number of characters of a message
# Maximum length of a word (such as a node name) and of the path, in messages that are too long.
_WORD, _PATH = 100, 200
_LONG_WORD = re.compile(rf"\S{{{_WORD + 1},}}")


def shorten_text(text: str) -> str:
    """Return a message, with at most :data:`LONGEST` characters.

    In a longer message, long words lose their middle; if this is not enough, the message does too.
    """
    return text if len(text) <= LONGEST else _shorten_words(text)


def _shorten_words(text: str) -> str:
    text = _LONG_WORD.sub(lambda match: _cut_middle(match[0], _WORD), text)
    return text if len(text) <= LONGEST else _cut_middle(text, LONGEST)


def _cut_middle(text: str, length: int) -> str:
    return f"{text[: length // 2 - 3]}...{text[-length // 2 :]}"


class QdqtoolError(Exception):
    """Bad input or an impossible request.

    The message is one line. It names the file, node or tensor, and says what to do. A message that
    is too long is shortened.

    Attributes:
        code: Identifier of the cause, such as ``"unknown-gpu"``. It stays the same if the message
            is reworded.
        path: Path of the file that the error is about. The message begins with this path. Empty if
            the error is about no file.
        parameter: Parameter of the Python API that the error is about; empty if there is none.
        node: ONNX node or tensor that the error is about; empty if there is none.
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
        reason = shorten_text(reason)
        fits = len(path) <= _PATH or len(path) + len(reason) <= LONGEST
        prefix = path if fits else _cut_middle(path, _PATH)
        super().__init__(f"{prefix}: {reason}" if path else reason)
        self.reason = reason
        self.path = path
        self.code = code
        self.parameter = parameter
        self.node = node

    def __str__(self) -> str:
        """Return one line, with control characters escaped."""
        return _UNPRINTED.sub(
            lambda match: match[0].encode("unicode_escape").decode(), super().__str__()
        )


class VersionError(QdqtoolError):
    """A TensorRT version for which qdqtool has no rules."""


class ModelError(QdqtoolError):
    """An ONNX model that cannot be read, is damaged, or is not what the command needs."""


class DataError(QdqtoolError):
    """Calibration data, a cache or a table that cannot be used."""


class BuildLogError(QdqtoolError):
    """A build log, layer JSON or profile that cannot be used."""


class BuilderError(QdqtoolError):
    """A TensorRT builder that is missing, was called wrongly, or did not finish."""


class ClusterError(QdqtoolError):
    """A cluster that cannot be reached, is unsuitable for the work, or has lost its workers."""
