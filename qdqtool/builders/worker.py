"""The child process that talks to a TensorRT: reads one request a line from stdin, writes one answer a line.

Run as a file (``worker.py tensorrt_rtx`` or ``worker.py tensorrt``), so that nothing of qdqtool, onnx or numpy is
imported beside the compiler. A crash of the compiler ends this process and nobody else; the parent reads the signal
and the log written so far.

Request:  {"model", "log", "sm": [86], "engine": path or null, "layers": path or null,
           "profiles": {"x": [min, opt, max]}}
Answer:   {"status": "built"|"refused"|"unavailable", "stage": "parse"|"build", "errors": [text], "seconds",
           "engine_bytes", "version", "message"}
"""

import importlib
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
            if self.file is not None:
                stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
                self.file.write(f"[{stamp}] [{SEVERITY[level]}] [TRT] {message}\n")
                if level <= 1:
                    self.file.flush()
            if level <= 1:
                self.errors.append(message)

    return Logger()


def _configure(trt: Any, config: Any, request: dict[str, Any], rtx: bool) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if rtx:
        config.num_compute_capabilities = len(request["sm"])
        for index, capability in enumerate(request["sm"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
        return
    for name in ("INT8", "FP16"):  # TensorRT 11 has neither: the ONNX types decide
        flag = getattr(trt.BuilderFlag, name, None)
        if flag is not None:
            config.set_flag(flag)


def _add_profile(builder: Any, network: Any, config: Any, profiles: dict[str, Any]) -> None:
    """One optimization profile for the inputs that have run-time dimensions, given or usual ones.

    Usual is batch 1; other open dimensions 32 to 640, 640 preferred, which fits the strides of detection networks.
    """
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [t for t in inputs if any(d < 0 for d in t.shape)]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        low, best = (
            [d if d >= 0 else (1 if axis == 0 else usual) for axis, d in enumerate(tensor.shape)]
            for usual in (32, 640)
        )
        profile.set_shape(tensor.name, *map(tuple, profiles.get(tensor.name) or (low, best, best)))
    config.add_optimization_profile(profile)


def _build(trt: Any, logger: Any, request: dict[str, Any], rtx: bool) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError) as error:
        return {
            "status": "unavailable",
            "message": f"TensorRT {trt.__version__} finds no usable GPU ({error})",
        }
    flags, network_flags = trt.NetworkDefinitionCreationFlag, 0
    if rtx:  # it knows nothing but strong types
        network_flags = 1 << int(flags.STRONGLY_TYPED)
    elif int(trt.__version__.split(".")[0]) < 10:
        network_flags = 1 << int(flags.EXPLICIT_BATCH)
    network = builder.create_network(network_flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["model"]):
        texts = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        return {"status": "refused", "stage": "parse", "errors": texts + logger.errors}
    config = builder.create_builder_config()
    _configure(trt, config, request, rtx)
    _add_profile(builder, network, config, request.get("profiles") or {})
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return {"status": "refused", "stage": "build", "errors": list(logger.errors)}
    if request.get("engine"):
        with open(request["engine"], "wb") as file:
            file.write(plan)
    if request.get("layers"):  # takes the GPU that classic TensorRT builds on anyway
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        with open(request["layers"], "w", encoding="utf-8") as text:
            text.write(
                engine.create_engine_inspector().get_engine_information(
                    trt.LayerInformationFormat.JSON
                )
            )
    return {
        "status": "built",
        "stage": "build",
        "errors": list(logger.errors),
        "engine_bytes": plan.nbytes,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the compiler prints by itself must not land among the answers
    package = sys.argv[1]
    try:
        trt = importlib.import_module(package)
    except (ImportError, OSError) as error:
        answers.write(
            json.dumps({"status": "unavailable", "message": f"{package} cannot be loaded: {error}"})
            + "\n"
        )
        return
    rtx = package == "tensorrt_rtx"
    logger = _logger(trt)
    for line in sys.stdin:
        request = json.loads(line)
        logger.errors = []
        with open(
            request["log"], "w", encoding="utf-8", errors="replace", buffering=1 << 16
        ) as logger.file:
            logger.file.write(
                f"[I] TensorRT version: {trt.__version__}\n"
            )  # as trtexec's log begins
            answer = _build(trt, logger, request, rtx)
        logger.file = None
        answer["version"] = trt.__version__
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
