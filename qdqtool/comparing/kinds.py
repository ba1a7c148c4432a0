"""Whether a file is an ONNX model or a build."""

from __future__ import annotations

import os

from qdqtool.errors import QdqtoolError
from qdqtool.io import files, packed
from qdqtool.io.files import open_input

_MODELS = (".onnx", ".onnx.gz")
_FIRST_FIELD = 0x08  # ir_version, with which every exporter begins


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an ONNX model, by its ending or its first byte; other text is read as a build.

    Raises:
        QdqtoolError: The file cannot be read, or is neither (a PyTorch file, an engine ...).
    """
    name = os.fspath(path)
    if name.lower().endswith(_MODELS):
        return True
    if name == "-":
        return False
    with open_input(path) as file:
        head = file.read(packed.HEAD)
    if head and head[0] == _FIRST_FIELD:
        return True
    known = files.recognise(name, head) if not packed.kind_of(head) else None
    if known is not None and not known.of_build:
        raise QdqtoolError(f"{name}: {files.explain(name, head)}")
    return False
