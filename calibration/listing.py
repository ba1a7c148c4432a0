"""Lists of the files in a folder, and digests of file contents."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.util.files import open_input

UNREADABLE = b"unreadable"  # digest of a file that cannot be read
BLOCK = 1 << 16  # bytes
_BLOCKS = 16  # maximum number of blocks in a digest


@dataclass
class FolderListing:
    """Files under a folder.

    Attributes:
        paths: Regular files with one of the suffixes, sorted by their names under the folder.
        suffixes: Number of other files, by suffix in lower case.
        broken_links: Names of broken or circular links with one of the suffixes.
    """

    paths: list[Path] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    broken_links: list[str] = field(default_factory=list)


def list_files(root: Path, suffixes: Set[str]) -> FolderListing:
    """List the files with one of the suffixes in a folder and its subfolders.

    Names that begin with a dot, linked folders, and subfolders that cannot be read are left out.

    Raises:
        DataError: The folder itself cannot be read.
    """
    try:
        os.scandir(os.fspath(root)).close()
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}", str(root), code="file-unreadable"
        ) from error
    listing = FolderListing()
    names: list[str] = []
    for folder, subfolders, files in os.walk(os.fspath(root)):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        prefix = Path(folder).relative_to(root).as_posix()
        for file in files:
            name = file if prefix == "." else f"{prefix}/{file}"
            path = os.path.join(folder, file)
            suffix = os.path.splitext(file)[1].lower()
            if file.startswith("."):
                continue
            if suffix not in suffixes:
                listing.suffixes[suffix] += 1
            elif os.path.isfile(path):
                names.append(name)
            elif not os.path.exists(path):
                listing.broken_links.append(name)
    listing.paths = [root / name for name in sorted(names)]
    return listing


def block_starts(size: int) -> range:
    """Return the offsets of at most 16 evenly spread blocks of a file.

    Args:
        size: Size of the file in bytes.
    """
    return range(0, size, max(BLOCK, (size - BLOCK) // (_BLOCKS - 1)))


def file_digest(path: Path) -> bytes:
    """Return a hash of a file's size and of at most 16 evenly spread blocks of 64 KiB.

    A large file therefore takes no longer than a file of 1 MiB. The hash ignores the modification
    time. A file that cannot be read has the digest :data:`UNREADABLE`.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open_input(path, record=False) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for position in block_starts(size):
                file.seek(position)
                digest.update(file.read(BLOCK))
    except (OSError, QdqtoolError):
        return UNREADABLE
    return digest.digest()
