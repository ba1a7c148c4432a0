"""The child process that talks to TensorRT-RTX: reads one request a line from stdin, writes one answer a line.

Run as a file, so that nothing of qdqtool, onnx or numpy is imported beside the compiler. A crash of the compiler ends
this process and nobody else; the parent reads the signal and the log written so far.

Request:  {"model", "log", "sm": [86], "engine": path or null, "profiles": {"x": [min, opt, max]}}
Answer:   {"status": "built"|"refused", "stage": "parse"|"build", "errors": [text], "seconds",
          "engine_bytes", "version"}
"""

import json
import os
import sys
import time
from typing import Any

SEVERITY = "FEWIV"  # internal error, error, warning, info, verbose: the letters of trtexec's log


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Writes trtexec's line format; errors are kept for the answer."""

        def __init__(self) -> None:
            super().__init__()
            self.file: Any = None
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = int(getattr(severity, "value", severity))
            stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
            if self.file is not None:
                self.file.write(f"[{stamp}] [{SEVERITY[level]}] [TRT] {message}\n")
                if level <= 1:
                    self.file.flush()
            if level <= 1:
                self.errors.append(message)

    return Logger()


def _add_profile(trt: Any, builder: Any, network: Any, config: Any, profiles: dict[str, Any]) -> None:
    """One optimization profile for the inputs that have run-time dimensions."""
    wanted = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [t for t in wanted if any(d < 0 for d in t.shape)]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        shapes = profiles.get(tensor.name) or _default_profile(tuple(tensor.shape))
        profile.set_shape(tensor.name, *(tuple(s) for s in shapes))
    config.add_optimization_profile(profile)


def _default_profile(shape: tuple[int, ...]) -> list[list[int]]:
    """Batch 1; other open dimensions 32 to 640, 640 preferred, which fits the strides of detection networks."""
    low = [d if d >= 0 else (1 if axis == 0 else 32) for axis, d in enumerate(shape)]
    best = [d if d >= 0 else (1 if axis == 0 else 640) for axis, d in enumerate(shape)]
    return [low, best, best]


def _build(trt: Any, logger: Any, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["model"]):
        texts = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        return {"status": "refused", "stage": "parse", "errors": texts + logger.errors}
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = len(request["sm"])
    for index, capability in enumerate(request["sm"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
    _add_profile(trt, builder, network, config, request.get("profiles") or {})
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return {"status": "refused", "stage": "build", "errors": list(logger.errors)}
    if request.get("engine"):
        with open(request["engine"], "wb") as file:
            file.write(plan)
    return {"status": "built", "stage": "build", "errors": list(logger.errors), "engine_bytes": plan.nbytes,
            "seconds": time.perf_counter() - start}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the compiler prints by itself must not land among the answers
    import tensorrt_rtx as trt

    logger = _logger(trt)
    for line in sys.stdin:
        request = json.loads(line)
        logger.errors = []
        with open(request["log"], "w", encoding="utf-8", errors="replace", buffering=1 << 16) as logger.file:
            answer = _build(trt, logger, request)
        logger.file = None
        answer["version"] = trt.__version__
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
