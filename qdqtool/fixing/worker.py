"""Worker program that runs models for :mod:`qdqtool.fixing.sandbox`.

The program reads requests from stdin and writes answers to stdout. A request is a line of JSON,
followed by the bytes of the model and of its inputs. An answer is a line of JSON, followed by the
bytes of the outputs.

The program imports onnxruntime, but neither qdqtool nor onnx. Output of onnxruntime is discarded. A
crash or a lack of memory ends only this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    discard = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discard, 1)
    os.dup2(discard, 2)
    _limit_memory(int(sys.argv[1]))
    import numpy  # noqa: F401
    import onnxruntime  # noqa: F401

    if hasattr(signal, "SIGPROF"):
        # Let the signal end the process, even if the parent process ignored or blocked it.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    answers.write(b"{}\n")  # tells the parent that imports are done and requests can be sent
    answers.flush()
    requests = sys.stdin.buffer
    while line := requests.readline():
        request = json.loads(line)
        source = requests.read(request["model"])
        _limit_memory(request["memory"])
        _limit_processor_time(request["seconds"])
        try:
            arrays = _read_arrays(requests, request["inputs"])
            outputs = _run(source, arrays, request["threads"])
            head: dict[str, Any] = {"outputs": [_describe(n, array) for n, array in outputs]}
        except MemoryError:
            outputs, head = [], {"error": "out of memory", "memory": True}
        except Exception as error:  # onnxruntime's exceptions share no other base class
            lines = str(error).strip().splitlines()
            outputs, head = [], {"error": lines[0][:2000] if lines else type(error).__name__}
        _limit_processor_time(0)
        answers.write(json.dumps(head).encode() + b"\n")
        for _, array in outputs:
            answers.write(array.tobytes())
        answers.flush()
        del source, outputs


def _limit_memory(size: int) -> None:
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    except (ImportError, ValueError, OSError):
        return


def _limit_processor_time(seconds: float) -> None:
    """Let a signal end the process after some processor seconds of all threads; 0: no limit.

    Time of other programs, and time in which this process is stopped, do not count.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _read_arrays(requests: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np

    arrays = {}
    for entry in inputs:
        flat = np.frombuffer(requests.read(entry["bytes"]), np.dtype(entry["dtype"]))
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return arrays


def _describe(name: str, array: Any) -> dict[str, Any]:
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
    # Otherwise onnxruntime 1.32 rounds biases of FP8 layers with FP16 scales to wrong values.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Without this entry, threads wait busily and use more processor time than the run itself.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
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
