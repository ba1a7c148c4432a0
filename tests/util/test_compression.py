import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from calibration.cache import load_progress
from qdqtool.buildlog.read import read_build
from qdqtool.errors import BuildLogError, DataError, ModelError, QdqtoolError
from qdqtool.ir.modelfile import load
from qdqtool.util import limits
from qdqtool.util.compression import HEAD, find_magic, unpack_blocks
from tests.calibration.nets import conv_net
from tests.errors import has

Compress = Callable[[bytes], bytes]

TEXT = b"".join(b"line %d\n" % k for k in range(120_000))  # more than one block
each_format = pytest.mark.parametrize(
    "compress",
    [
        pytest.param(lambda data: gzip.compress(data, 1), id="gzip"),
        pytest.param(lambda data: lzma.compress(data, preset=0), id="xz"),
    ],
)


def unpack_file(path: Path, limit: int = 1 << 30, *, whole: bool = True) -> bytes:
    with path.open("rb") as file:
        return b"".join(unpack_blocks(file.read(HEAD), file.read, str(path), limit, whole=whole))


@each_format
@pytest.mark.parametrize("cuts", [[], [0], [7], [7, 7, 1_100_000]], ids=str)
@pytest.mark.parametrize("padding", [b"", bytes(512)], ids=["end", "zeros after the end"])
def test_all_members_are_unpacked(
    tmp_path: Path, compress: Compress, cuts: list[int], padding: bytes
) -> None:
    members = [compress(TEXT[a:b]) for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    (tmp_path / "f").write_bytes(b"".join(members) + padding)
    assert unpack_file(tmp_path / "f") == TEXT


@each_format
def test_file_unpacks_to_the_limit(tmp_path: Path, compress: Compress) -> None:
    path = tmp_path / "f"
    path.write_bytes(compress(TEXT))
    assert unpack_file(path, len(TEXT)) == TEXT
    with pytest.raises(QdqtoolError, check=has("file-too-large", path=str(path))):
        unpack_file(path, len(TEXT) - 1)


@each_format
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :],
    ],
    ids=["cut", "changed"],
)
def test_damage_is_an_error_or_ends_the_data(
    tmp_path: Path, compress: Compress, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(damage(compress(np.random.default_rng(0).bytes(1 << 21))))
    with pytest.raises(QdqtoolError, check=has("file-damaged", path=str(path))):
        unpack_file(path)
    assert 0 < len(unpack_file(path, whole=False)) <= 1 << 21


@pytest.mark.parametrize("head", [b"", b"\x1f", b"\xfd7zXZ", b"plain text"])
def test_other_files_have_no_magic_number(head: bytes) -> None:
    assert find_magic(head) == b""


def test_compressed_bombs_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 9 MB may unpack to 4 GB."""
    monkeypatch.setattr(limits, "UNPACKED", 1 << 20)
    zeros, model = bytes(3 << 20), conv_net()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3 << 18), "zeros"))
    (tmp_path / "model.onnx.gz").write_bytes(gzip.compress(model.SerializeToString()))
    (tmp_path / "log.gz").write_bytes(gzip.compress(zeros))
    (tmp_path / "log.xz").write_bytes(lzma.compress(zeros))
    np.savez_compressed(tmp_path / "cache.npz", header=np.zeros(3 << 20, np.uint8))
    with pytest.raises(ModelError, check=has("file-too-large")):
        load(tmp_path / "model.onnx.gz")
    for log in ("log.gz", "log.xz"):
        with pytest.raises(BuildLogError, check=has("file-too-large")):
            read_build(tmp_path / log)
    with pytest.raises(DataError, check=has("file-too-large")):
        load_progress(tmp_path / "cache.npz")
