import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_package(name: str) -> Iterator[None]:
    module = sys.modules.pop(name, None)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
