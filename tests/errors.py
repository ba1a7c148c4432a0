"""Checks of errors by class, code and attributes instead of messages."""

from collections.abc import Callable

from qdqtool.errors import QdqtoolError


def has(code: str, **attributes: str) -> Callable[[BaseException], bool]:
    """Return a check for `pytest.raises(..., check=has("unknown-gpu", parameter="gpu"))`.

    Args:
        code: Expected `QdqtoolError.code`.
        **attributes: Expected values of `path`, `parameter` or `node`.
    """

    def check(error: BaseException) -> bool:
        assert isinstance(error, QdqtoolError)
        actual = {name: getattr(error, name) for name in attributes}
        assert (error.code, actual) == (code, attributes), str(error)
        return True

    return check
