"""The child process in which onnx works for :mod:`qdqtool.model.apart`: requests from stdin, answers on stdout.

Run as a file, so that nothing of qdqtool is imported, and of onnx its C++ alone: its Python takes a fifth of a second.
A request is a line of numbers and the model's bytes: how many, the memory and the seconds of the processor that it may
take, and either the operator set to convert to, or 0 and what onnx's inference takes. An answer is a line of two
numbers, whether it was done and the length of the model or the words that follow. What onnx prints goes nowhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import types


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _limit("CORE", 0)
    onnx = _onnx()
    requests = sys.stdin.buffer
    while line := requests.readline():
        size, memory, seconds, opset, *flags = map(int, line.split())
        _limit("DATA", memory)
        _limit("CPU", int(time.process_time()) + seconds)
        source = requests.read(size)
        try:
            if opset:
                done, data = 1, onnx.version_converter.convert_version(source, opset)
            else:
                done, data = 1, onnx.shape_inference.infer_shapes(source, *map(bool, flags))
        except MemoryError:
            done, data = 0, b"onnx takes more than %d MB for that" % (memory >> 20)
        except Exception as error:  # C++
            done, data = 0, str(error).encode("utf-8", "replace")
        answers.write(b"%d %d\n" % (done, len(data)))
        answers.write(data)
        answers.flush()


def _onnx() -> types.ModuleType:
    package, found = types.ModuleType("onnx"), importlib.util.find_spec("onnx")
    package.__path__ = (found and found.submodule_search_locations) or []
    sys.modules["onnx"] = package
    from onnx import onnx_cpp2py_export

    return onnx_cpp2py_export


def _limit(what: str, most: int) -> None:
    """Limits what this process may take, where the system can."""
    try:
        import resource

        kind = getattr(resource, f"RLIMIT_{what}")
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    except (ImportError, AttributeError, ValueError, OSError, OverflowError):
        return


if __name__ == "__main__":
    main()
