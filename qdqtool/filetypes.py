"""Files that are no ONNX model, recognised by their first bytes or their ending, and the next step with each."""

from __future__ import annotations

from qdqtool.records import record

HEAD = 64  # first bytes that decide


@record
class FileType:
    """A kind of file that users take for a model.

    Attributes:
        name: What it is.
        step: How to get an ONNX model, or what to do with it instead.
        endings: Endings of its names.
        magics: Bytes that it has at an offset.
        of_build: Whether it may describe a build.
    """

    name: str
    step: str
    endings: tuple[str, ...] = ()
    magics: tuple[tuple[int, bytes], ...] = ()
    of_build: bool = False


_EXPORT = "export it to ONNX first: torch.onnx.export, or `yolo export model=... format=onnx` for Ultralytics"
_TF = "convert it to ONNX first, for instance with tf2onnx"
_BUILT = "an engine holds no graph to look at: give its ONNX file; 'qdqtool engine' reads its layer JSON"

_TYPES = (
    FileType("a TensorRT engine", _BUILT, (".engine", ".trt", ".plan"), ((0, b"ftrt"), (0, b"ptrt"))),
    FileType("an OpenVINO model", "export the network to ONNX from where it was trained", (".xml",),
             ((0, b"<?xml version=\"1.0\"?>\n<net "),)),
    FileType("a TensorFlow Lite model", _TF, (".tflite",), ((4, b"TFL3"),)),
    FileType("a TensorFlow or Keras model", _TF, (".pb", ".h5", ".keras"), ((0, b"\x89HDF"),)),
    FileType("a Core ML model", "export the network to ONNX from where it was trained", (".mlmodel", ".mlpackage")),
    FileType("a safetensors file (weights without a graph)", _EXPORT, (".safetensors",)),
    FileType("a PyTorch file", _EXPORT, (".pt", ".pth", ".ckpt", ".pt2", ".torchscript"),
             ((0, b"\x80\x02"), (0, b"\x80\x03"), (0, b"\x80\x04"))),
    FileType("a picture", "give the ONNX model here, and pictures to --calib", (".jpg", ".jpeg", ".png", ".bmp"),
             ((0, b"\x89PNG"), (0, b"\xff\xd8\xff"))),
    FileType("a numpy file", "give the ONNX model here", (".npy", ".npz"), ((0, b"\x93NUMPY"),)),
    FileType("a Git LFS pointer", "fetch the model itself with `git lfs pull`", (),
             ((0, b"version https://git-lfs"),)),
    FileType("a web page", "the download went wrong: fetch the file itself", (),
             ((0, b"<!DOCTYPE html"), (0, b"<!doctype html"), (0, b"<html"))),
    FileType("JSON", "give the ONNX model first, then the builds of it", (".json",), ((0, b"{"), (0, b"[")),
             of_build=True),
    FileType("a log", "give the ONNX model first, then the builds of it", (".log",), of_build=True),
    FileType("a zip archive", "unpack it; a PyTorch file is one too: export that to ONNX", (".zip",),
             ((0, b"PK\x03\x04"),)),
)


def recognise(name: str, head: bytes) -> FileType | None:
    """What a file is, by its ending first; None for one that may well be a damaged ONNX model.

    Args:
        name: Its path.
        head: Its first bytes, :data:`HEAD` of them or more.
    """
    lower = name.lower()
    by_magic = next((t for t in _TYPES if any(head[at:at + len(m)] == m for at, m in t.magics)), None)
    by_name = next((t for t in _TYPES if lower.endswith(t.endings)), None) if not lower.endswith(".onnx") else None
    return by_name or by_magic


def explain(name: str, head: bytes, missing: str = "") -> str:
    """One sentence for an error: what the file is instead of an ONNX model, and the next step.

    Args:
        name: Its path.
        head: Its first bytes.
        missing: What it lacks, where it could be read as an ONNX model.
    """
    if not head:
        return "is empty, not an ONNX model; export or copy it again"
    found = recognise(name, head)
    if found is not None:
        return f"is {found.name}, not an ONNX model; {found.step}"
    if missing:
        return f"not an ONNX model ({missing})"
    if head[0] == 0x08:  # how every exporter's file begins
        return "an ONNX model that is cut off or damaged; export or copy it again"
    return "not an ONNX model, or damaged; export it again"
