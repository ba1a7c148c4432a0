"""Whether a file is an ONNX model or a build."""

from __future__ import annotations

import os

from qdqtool import packed
from qdqtool.files import open_input

_MODELS = (".onnx", ".onnx.gz")
_FIRST_FIELD = 0x08  # ir_version, with which every exporter begins


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an ONNX model, by its ending or its first byte; anything else is read as a build."""
    name = os.fspath(path)
    if name.lower().endswith(_MODELS):
        return True
    if name == "-":
        return False
    with open_input(path) as file:
        head = file.read(packed.HEAD)
    return bool(head) and head[0] == _FIRST_FIELD
