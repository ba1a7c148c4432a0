"""The child process that runs models for :mod:`qdqtool.fixing.sandbox`: requests from stdin, answers on stdout.

Run as a file, so that nothing of qdqtool or onnx is imported beside onnxruntime. A request is a line of JSON, the
model's bytes and those of its inputs; an answer is a line of JSON and the bytes of the outputs. What onnxruntime
prints goes nowhere; a crash or too much memory ends this process and nobody else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    _limit(int(sys.argv[1]))
    import numpy  # noqa: F401
    import onnxruntime  # noqa: F401

    if hasattr(signal, "SIGPROF"):
        signal.signal(
            signal.SIGPROF, signal.SIG_DFL
        )  # ends the process, whatever it was started with
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    answers.write(b"{}\n")  # ready: what a model takes counts from here on
    answers.flush()
    requests = sys.stdin.buffer
    while line := requests.readline():
        request = json.loads(line)
        source = requests.read(request["model"])
        _limit(request["memory"])
        _end_after(request["seconds"])
        try:
            arrays = _arrays(requests, request["inputs"])
            found = _run(source, arrays, request["threads"])
            head: dict[str, Any] = {"outputs": [_about(name, array) for name, array in found]}
        except MemoryError:
            found, head = [], {"error": "out of memory", "memory": True}
        except Exception as error:  # onnxruntime's own classes
            text = str(error).strip().splitlines()
            found, head = [], {"error": text[0][:2000] if text else type(error).__name__}
        _end_after(0)
        answers.write(json.dumps(head).encode() + b"\n")
        for _, array in found:
            answers.write(array.tobytes())
        answers.flush()
        del source, found


def _limit(size: int) -> None:
    """Bounds what the process may allocate, where the system can do that."""
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (size if hard == resource.RLIM_INFINITY else min(size, hard), hard),
        )
    except (ImportError, ValueError, OSError):
        return


def _end_after(seconds: float) -> None:
    """Ends the process when it has used the processor for so long, all threads together; 0: never.

    What other programs do with the processor counts nothing, nor does time in which this one is stopped.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _arrays(requests: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np

    result = {}
    for entry in inputs:
        dtype = np.dtype(entry["dtype"])
        data = requests.read(entry["bytes"])
        result[entry["name"]] = np.frombuffer(data, dtype).reshape(entry["shape"])
    return result


def _about(name: str, array: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": array.nbytes,
    }


def _run(source: bytes, arrays: dict[str, Any], threads: int) -> list[tuple[str, Any]]:
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # waiting busily takes longer than a run
    session = ort.InferenceSession(
        source, options, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    names = [o.name for o in session.get_outputs()]
    values = session.run(names, arrays)
    return [
        (n, np.ascontiguousarray(v))
        for n, v in zip(names, values, strict=True)
        if isinstance(v, np.ndarray) and v.dtype.kind in "biuf"
    ]


if __name__ == "__main__":
    main()
