"""Inference of tensor types and shapes with onnx.

Models that :mod:`qdqtool.proto.inference_checks` accepts are inferred in this process. All other
models are inferred in a child process with limited memory and time. Conversion to another operator
set always uses a child process.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import onnx

from qdqtool.proto.inference_checks import is_safe_to_infer
from qdqtool.util import limits

Types = dict[str, onnx.TypeProto]
_WORKER = Path(__file__).parent / "shapes_worker.py"
_SMALL_MODEL = 1 << 20  # bytes; results for larger models are not kept in memory


def infer_types(proto: onnx.ModelProto) -> Types | None:
    """Return the types of tensors in a model's main graph, by name; None if inference fails.

    Args:
        proto: Model, which is not changed; preferably without large weights.
    """
    for data_prop in (True, False):
        try:
            graph = infer_shapes(proto, data_prop=data_prop).graph
        except Exception:  # inference fails for custom operators and unusual types
            continue
        return {value.name: value.type for value in (*graph.value_info, *graph.output)}
    return None


def infer_shapes(
    proto: onnx.ModelProto,
    *,
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Return a copy of a model with inferred types; the options are those of onnx.

    Raises:
        Exception: onnx rejects the model, crashes, or exceeds its limits.
    """
    if is_safe_to_infer(proto):
        return onnx.shape_inference.infer_shapes(
            proto, check_type=check_type, strict_mode=strict_mode, data_prop=data_prop
        )
    numbers = int(check_type), int(strict_mode), int(data_prop)
    return _parse_model(_run_in_child(proto.SerializeToString(), "infer", *numbers))


def convert_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert a model to another version of ONNX's operator set.

    Raises:
        Exception: onnx rejects the model, crashes, or exceeds its limits.
    """
    source = proto.SerializeToString(deterministic=True)
    convert = _convert_small if len(source) <= _SMALL_MODEL else _convert_opset
    return _parse_model(convert(source, opset))


def _convert_opset(source: bytes, opset: int) -> bytes:
    return _run_in_child(source, "convert", opset)


# Cached, because one command may convert the same network for an INT8 and for an FP8 variant.
_convert_small = functools.lru_cache(16)(_convert_opset)


def _parse_model(data: bytes) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    return model


def _run_in_child(source: bytes, task: str, *numbers: int) -> bytes:
    """Run a task of shapes_worker.py in a child process, and return the resulting model.

    Raises:
        RuntimeError: onnx rejects the model, crashes, or exceeds the limits of time or memory.
    """
    memory = limits.ONNX_BYTES + limits.ONNX_BYTES_BYTE * len(source)
    command = [sys.executable, "-P", str(_WORKER), str(memory), task, *map(str, numbers)]
    try:
        child = subprocess.run(
            command, input=source, capture_output=True, timeout=limits.ONNX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"onnx needs more than {limits.ONNX_SECONDS} s") from None
    if child.returncode < 0:
        raise RuntimeError("onnx crashes on this model")
    if child.returncode:
        reason = child.stderr.decode("utf-8", "replace").strip()
        raise RuntimeError(reason.splitlines()[-1] if reason else "onnx fails on this model")
    return child.stdout
