"""The child process in which onnx works for :mod:`qdqtool.model.apart`: requests from stdin, answers on stdout.

Run as a file, so that nothing of qdqtool is imported. A request is a line of numbers and the model's bytes: how
many, and either the operator set to convert to, or 0 and what onnx's inference takes. An answer is a line of two
numbers, whether it was done and the length of the model or the words that follow. What onnx prints goes nowhere.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _without_core_files()
    import onnx
    from onnx import version_converter

    requests = sys.stdin.buffer
    while line := requests.readline():
        size, opset, *flags = map(int, line.split())
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


def _without_core_files() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    except (ImportError, ValueError, OSError):
        return


if __name__ == "__main__":
    main()
