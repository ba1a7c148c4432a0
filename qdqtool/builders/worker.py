"""Child process that runs TensorRT: reads requests from stdin, writes answers to stdout.

Each request and each answer is one line of JSON. The process runs this file directly (``worker.py
tensorrt_rtx`` or ``worker.py tensorrt``), so it imports nothing of qdqtool, onnx or numpy. A crash
of the compiler ends only this process. The parent process then knows the signal, and the log up to
the crash.

Request:  {"model", "log", "sm": [86], "engine": path or null, "layers": path or null,
           "profiles": {"x": [min, opt, max]}}
Answer:   {"status": "built"|"refused"|"unavailable", "stage": "parse"|"build", "errors": [text],
           "seconds", "engine_bytes", "version", "message"}
"""

import importlib
import json
import os
import sys
import time
from typing import Any

SEVERITIES = "FEWIV"  # letters in trtexec's log: internal error, error, warning, info, verbose


def _create_logger(trt: Any) -> Any:
    class FileLogger(trt.ILogger):  # type: ignore[misc]
        """Logger that writes lines in trtexec's format, and collects errors for the answer."""

        def __init__(self) -> None:
            super().__init__()
            self.file: Any = None
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = int(getattr(severity, "value", severity))
            if self.file is not None:
                stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
                self.file.write(f"[{stamp}] [{SEVERITIES[level]}] [TRT] {message}\n")
                if level <= 1:
                    self.file.flush()
            if level <= 1:
                self.errors.append(message)

    return FileLogger()


def _configure_builder(trt: Any, config: Any, request: dict[str, Any], is_rtx: bool) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if is_rtx:
        config.num_compute_capabilities = len(request["sm"])
        for index, capability in enumerate(request["sm"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
        return
    # TensorRT 11 does not have these flags, because it uses the types in the model.
    for name in ("INT8", "FP16"):
        flag = getattr(trt.BuilderFlag, name, None)
        if flag is not None:
            config.set_flag(flag)


def _add_profile(builder: Any, network: Any, config: Any, profiles: dict[str, Any]) -> None:
    """Add an optimization profile if the network has inputs with dynamic dimensions.

    For inputs without shapes in the request, the batch is 1. Other dynamic dimensions are 32 to
    640, preferably 640. These sizes fit the strides of detection networks.
    """
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [tensor for tensor in inputs if any(size < 0 for size in tensor.shape)]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        shapes = profiles.get(tensor.name)
        if not shapes:
            low, high = _fill_shape(tensor.shape, 32), _fill_shape(tensor.shape, 640)
            shapes = low, high, high
        profile.set_shape(tensor.name, *map(tuple, shapes))
    config.add_optimization_profile(profile)


def _fill_shape(shape: Any, size: int) -> list[int]:
    return [d if d >= 0 else (size if axis else 1) for axis, d in enumerate(shape)]


def _build_engine(trt: Any, logger: Any, request: dict[str, Any], is_rtx: bool) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError) as error:
        return {
            "status": "unavailable",
            "message": f"TensorRT {trt.__version__} finds no usable GPU ({error}); build on a "
            "machine with a GPU, or with tensorrt-rtx",
        }
    flags, network_flags = trt.NetworkDefinitionCreationFlag, 0
    if is_rtx:  # TensorRT-RTX networks are always strongly typed
        network_flags = 1 << int(flags.STRONGLY_TYPED)
    elif int(trt.__version__.split(".")[0]) < 10:
        network_flags = 1 << int(flags.EXPLICIT_BATCH)
    network = builder.create_network(network_flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["model"]):
        texts = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        return {"status": "refused", "stage": "parse", "errors": texts + logger.errors}
    config = builder.create_builder_config()
    _configure_builder(trt, config, request, is_rtx)
    _add_profile(builder, network, config, request.get("profiles") or {})
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return {"status": "refused", "stage": "build", "errors": list(logger.errors)}
    if request.get("engine"):
        with open(request["engine"], "wb") as file:
            file.write(plan)
    if request.get("layers"):  # creating the inspector needs the GPU
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        inspector = engine.create_engine_inspector()
        with open(request["layers"], "w", encoding="utf-8") as text:
            text.write(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return {
        "status": "built",
        "stage": "build",
        "errors": list(logger.errors),
        "engine_bytes": plan.nbytes,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the compiler's output goes to stderr, so that stdout has only answers
    package = sys.argv[1]
    try:
        trt = importlib.import_module(package)
    except (ImportError, OSError) as error:
        message = f"{package} cannot be loaded: {error}"
        answers.write(json.dumps({"status": "unavailable", "message": message}) + "\n")
        return
    logger = _create_logger(trt)
    for line in sys.stdin:
        request = json.loads(line)
        logger.errors = []
        with open(
            request["log"], "w", encoding="utf-8", errors="replace", buffering=1 << 16
        ) as logger.file:
            # The first line is the same as in a log of trtexec.
            logger.file.write(f"[I] TensorRT version: {trt.__version__}\n")
            answer = _build_engine(trt, logger, request, package == "tensorrt_rtx")
        logger.file = None
        answer["version"] = trt.__version__
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
