"""Recognition of files that users pass in place of an ONNX model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeVar

from qdqtool.errors import QdqtoolError

_Error = TypeVar("_Error", bound=QdqtoolError)

HEAD = 64  # bytes at the start of a file that identify its type


class FileType(NamedTuple):
    """A type of file that users pass in place of a model.

    Attributes:
        name: Name with article, such as "a PyTorch file".
        advice: How to get an ONNX model from the file, or how to use the file instead.
        endings: File name endings.
        magics: Pairs of offset and bytes. Each pair alone identifies the type.
        is_build_record: Whether the file may be the log or layer JSON of a TensorRT build.
    """

    name: str
    advice: str
    endings: tuple[str, ...] = ()
    magics: tuple[tuple[int, bytes], ...] = ()
    is_build_record: bool = False


_EXPORT = (
    "export it to ONNX first: torch.onnx.export, or `yolo export model=... format=onnx` for "
    "Ultralytics"
)
_TF = "convert it to ONNX first, for instance with tf2onnx"
_BUILT = (
    "an engine contains no ONNX graph: give the ONNX file of the engine ('qdqtool engine' "
    "reads its layer JSON)"
)

_TYPES = (
    FileType(
        "a TensorRT engine", _BUILT, (".engine", ".trt", ".plan"), ((0, b"ftrt"), (0, b"ptrt"))
    ),
    FileType(
        "an OpenVINO model",
        "export the network to ONNX from where it was trained",
        (".xml",),
        ((0, b'<?xml version="1.0"?>\n<net '),),
    ),
    FileType("a TensorFlow Lite model", _TF, (".tflite",), ((4, b"TFL3"),)),
    FileType("a TensorFlow or Keras model", _TF, (".pb", ".h5", ".keras"), ((0, b"\x89HDF"),)),
    FileType(
        "a Core ML model",
        "export the network to ONNX from where it was trained",
        (".mlmodel", ".mlpackage"),
    ),
    FileType("a safetensors file (weights without a graph)", _EXPORT, (".safetensors",)),
    FileType(
        "a PyTorch file",
        _EXPORT,
        (".pt", ".pth", ".ckpt", ".pt2", ".torchscript"),
        ((0, b"\x80\x02"), (0, b"\x80\x03"), (0, b"\x80\x04")),
    ),
    FileType(
        "an image",
        "give the ONNX model here, and images to `data`",
        (".jpg", ".jpeg", ".png", ".bmp"),
        ((0, b"\x89PNG"), (0, b"\xff\xd8\xff")),
    ),
    FileType("a numpy file", "give the ONNX model here", (".npy", ".npz"), ((0, b"\x93NUMPY"),)),
    FileType(
        "a Git LFS pointer",
        "fetch the model itself with `git lfs pull`",
        (),
        ((0, b"version https://git-lfs"),),
    ),
    FileType(
        "a web page",
        "the download failed: download the model file itself",
        (),
        ((0, b"<!DOCTYPE html"), (0, b"<!doctype html"), (0, b"<html")),
    ),
    FileType(
        "JSON",
        "give the ONNX model first, then the builds of it",
        (".json",),
        ((0, b"{"), (0, b"[")),
        is_build_record=True,
    ),
    FileType(
        "a log",
        "give the ONNX model first, then the builds of it",
        (".log",),
        is_build_record=True,
    ),
    FileType(
        "a zip archive",
        "unpack the archive; if it is a PyTorch checkpoint, export the network to ONNX",
        (".zip",),
        ((0, b"PK\x03\x04"),),
    ),
)


def recognize_file_type(name: str, head: bytes) -> FileType | None:
    """Return the type of a file by the ending of its name or its first bytes; None if unknown.

    The ending decides first, unless it is ``.onnx``. A file of unknown type may be a damaged ONNX
    model.

    Args:
        name: Path.
        head: First `HEAD` bytes or more.
    """
    lower = name.lower()
    if not lower.endswith(".onnx"):
        for file_type in _TYPES:
            if file_type.endings and lower.endswith(file_type.endings):
                return file_type
    for file_type in _TYPES:
        if any(head.startswith(magic, offset) for offset, magic in file_type.magics):
            return file_type
    return None


def wrong_file_error(name: str, head: bytes, missing: str = "", *, error: type[_Error]) -> _Error:
    """Return the error for a file that is not an ONNX model, with its type and a fix.

    Args:
        name: Path.
        head: First bytes.
        missing: Missing parts of a file that could be parsed as an ONNX model, else empty.
        error: Class of the error.
    """
    if not head:
        reason = "is empty, not an ONNX model; export or copy it again"
        return error(reason, name, code="empty")
    file_type = recognize_file_type(name, head)
    if file_type is not None:
        reason = f"is {file_type.name}, not an ONNX model; {file_type.advice}"
    elif missing:
        reason = f"not an ONNX model ({missing}); export it again"
    elif head[0] == 0x08:  # exporters write the field ir_version first, with this byte as its key
        reason = "the ONNX model is truncated or damaged; export or copy it again"
        return error(reason, name, code="file-damaged")
    else:
        reason = "not an ONNX model, or a damaged model; export it again"
    return error(reason, name, code="wrong-format")


def is_model_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has the ending of an ONNX model."""
    return os.fspath(path).lower().endswith((".onnx", ".onnx.gz"))


def model_stem(path: str | os.PathLike[str]) -> str:
    """Return the name of a model's file without its ending."""
    name = Path(path).name
    for ending in (".gz", ".onnx"):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return name
