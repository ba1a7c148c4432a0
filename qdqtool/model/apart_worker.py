"""The child process in which onnx works for :mod:`qdqtool.model.apart`: requests from stdin, answers on stdout.

Run as a file, so that nothing of qdqtool is imported. A request is a line of numbers and the model's bytes: how
many, and either the operator set to convert to, or 0 and what onnx's inference takes. An answer is a line of two
numbers, whether it was done and the length of the model or the words that follow. What onnx prints goes nowhere.
"""

from __future__ import annotations

import os
import sys

_MEMORY = 640 << 20  # bytes that a model may take, beside onnx's own
_MEMORY_BYTE = 256  # and for each of its own


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _without_core_files()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each has memory of its own
    import onnx
    from onnx import version_converter

    requests = sys.stdin.buffer
    while line := requests.readline():
        size, opset, *flags = map(int, line.split())
        _limit_memory(size)
        source = requests.read(size)
        try:
            if opset:
                made = version_converter.convert_version(onnx.ModelProto.FromString(source), opset)
            else:
                made = onnx.shape_inference.infer_shapes(source, *map(bool, flags))
            done, data = 1, made.SerializeToString()
        except Exception as error:  # C++
            done, data = 0, str(error).encode("utf-8", "replace")
        answers.write(b"%d %d\n" % (done, len(data)))
        answers.write(data)
        answers.flush()


def _limit_memory(size: int) -> None:
    """Onnx's converter makes a dimension for each entry of what may be a shape; of a network's bytes it makes 85."""
    try:
        import resource

        limit, most = _MEMORY + _MEMORY_BYTE * size, resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    except (ImportError, ValueError, OSError, OverflowError):
        return


def _without_core_files() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    except (ImportError, ValueError, OSError):
        return


if __name__ == "__main__":
    main()
