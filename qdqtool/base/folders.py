"""Temporary folders that only the process that made them removes."""

from __future__ import annotations

import contextlib
import os
import weakref


class TemporaryFolder:
    """A folder that is removed with its content when the block ends, when nothing holds it any more, or at the end.

    Only the process that made it removes it: what the user's code forks, and ends by ``sys.exit``, does not.

    Attributes:
        name: Its path.
    """

    def __init__(self, prefix: str) -> None:
        import tempfile  # takes its time

        self.name = tempfile.mkdtemp(prefix=prefix)
        self._remove = weakref.finalize(self, _remove_folder, self.name, os.getpid())

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Removes it now."""
        self._remove()


def _remove_folder(path: str, maker: int) -> None:
    if os.getpid() != maker:
        return
    import shutil

    for folder, inner, _ in os.walk(
        path
    ):  # a command of the user's may have taken away the right to write there
        for name in inner:
            if not os.path.islink(place := os.path.join(folder, name)):
                with contextlib.suppress(OSError):
                    os.chmod(place, 0o700)
    shutil.rmtree(path, ignore_errors=True)
