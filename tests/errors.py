from collections.abc import Callable

from qdqtool.errors import QdqtoolError


def has(code: str | None, *values: object, **attributes: str) -> Callable[[BaseException], bool]:
    """Return a check for `pytest.raises(..., check=has("unknown-gpu", parameter="gpu"))`.

    Args:
        code: Expected `QdqtoolError.code`; None for an error that another package raises.
        *values: Texts and numbers that the message, which must be one line, contains.
        **attributes: Expected values of `path`, `parameter` or `node`.
    """

    def check(error: BaseException) -> bool:
        message, actual = str(error), {name: getattr(error, name) for name in attributes}
        if code is not None:
            assert isinstance(error, QdqtoolError)
            assert (error.code, actual) == (code, attributes), message
        missing = [value for value in values if str(value) not in message]
        assert not missing and not (values and "\n" in message), (message, missing)
        return True

    return check
