"""Models reduced to some tensors, and onnxruntime sessions that compute these tensors."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError

from calibration.dataset import InputSpec, Sample
from qdqtool.errors import DataError, ModelError
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import image_shapes, metadata_size
from qdqtool.ir.qdq import uses_fp8
from qdqtool.proto import external_data as external
from qdqtool.proto.external_data import external_tensors, is_external, read_location
from qdqtool.proto.slim import strip_data
from qdqtool.proto.subgraphs import extract_submodel
from qdqtool.runtime import sessions
from qdqtool.runtime.sessions import open_proto
from qdqtool.util import limits

Size = tuple[int, int]
_MAX_STRIDE = 1024  # larger strides in the metadata are ignored; networks have 8 to 64
_NO_OPERATOR = ("is not a registered function/op", "Could not find an implementation for")


def input_specs(model: Model) -> list[InputSpec]:
    """Return name, shape and type of each model input that is not an initializer.

    Raises:
        ModelError: An input is not a tensor of numbers with a known rank.
    """
    values = [v for v in model.proto.graph.input if v.name not in model.initializers]
    return [_input_spec(model, value) for value in values]


def _input_spec(model: Model, value: onnx.ValueInfoProto) -> InputSpec:
    elem_type = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
    label, path = f"input '{value.name}'", _display_path(model)
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    except KeyError:
        raise ModelError(
            f"{label} is not a tensor of numbers; export the model without it",
            path,
            code="not-a-tensor",
            node=value.name,
        ) from None
    if dtype.kind not in "fiub":
        raise ModelError(
            f"{label} has the type {dtype}; export the model with inputs of numbers or booleans",
            path,
            code="wrong-type",
            node=value.name,
        )
    if not value.type.tensor_type.HasField("shape"):
        raise ModelError(
            f"{label} has no known rank; export the model with shapes",
            path,
            code="unknown-rank",
            node=value.name,
        )
    # Some exporters write 0 or -1 for a dynamic dimension.
    shape = tuple(d if d is not None and d > 0 else None for d in model.shape(value.name) or ())
    return InputSpec(value.name, shape, dtype.name)


def choose_size(model: Model, size: Size | None) -> Size | None:
    """Return the height and width for model inputs with dynamic image size.

    Args:
        model: Model.
        size: Height and width given by the user; None for the ``imgsz`` in the metadata.

    Returns:
        Height and width in pixels; None if neither the user nor the metadata gives them.

    Raises:
        DataError: `size` differs from the fixed size of all inputs, the model has no image input,
            or `size` is not a multiple of the ``stride`` in Ultralytics' metadata.
    """
    if size is None:
        return metadata_size(model)
    shapes = image_shapes(model)
    if not any(None in sides for sides in shapes.values()):
        if tuple(size) not in shapes.values():
            raise _fixed_size_error(model, size, shapes)
        return size
    stride = model.metadata.get("stride", "")
    if not stride.isascii() or not stride.isdigit() or not 1 < int(stride[:5]) <= _MAX_STRIDE:
        return size
    height, width = (-(-side // int(stride)) * int(stride) for side in size)
    if (height, width) != tuple(size):
        raise DataError(
            f"`size` {size[0]}x{size[1]} is not a multiple of the model's stride {stride}; give "
            f"{height}x{width}",
            code="out-of-range",
            parameter="size",
        )
    return size


def _fixed_size_error(
    model: Model, size: Size, shapes: Mapping[str, tuple[int | None, int | None]]
) -> DataError:
    reason = "the model has no input of images"
    for name, (height, width) in shapes.items():
        reason = f"input '{name}' is fixed at {height}x{width}"
    return DataError(
        f"`size` {size[0]}x{size[1]} has no effect, because {reason}. Leave `size` out, or export "
        "the model with another size",
        model.path,
        code="option-without-effect",
        parameter="size",
    )


def _display_path(model: Model) -> str:
    return model.path or "model"


def check_tensors(model: Model, tensors: Sequence[str]) -> None:
    """Check that every tensor exists and is not a constant.

    Raises:
        ModelError: A tensor does not exist, or is a constant.
    """
    computed = {*model.producers, *model.inputs}
    for name in tensors:
        if model.is_constant(name):
            raise ModelError(
                f"tensor '{name}' is a constant, which needs no calibration; do not list it",
                _display_path(model),
                code="constant-tensor",
                node=name,
            )
        if name not in computed:
            close = difflib.get_close_matches(name, computed, 1)
            hint = f"did you mean '{close[0]}'?" if close else "give an input or a computed tensor"
            raise ModelError(
                f"unknown tensor '{name}'; {hint}",
                _display_path(model),
                code="unknown-choice",
                parameter="tensors",
                node=name,
            )


def _strip_weights(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return strip_data(tensor) if external.is_separable(tensor) else tensor


def partial_model(
    model: Model,
    tensors: Sequence[str],
    fed: Sequence[onnx.ValueInfoProto] = (),
    *,
    weights: bool = True,
) -> onnx.ModelProto:
    """Return a model that outputs given tensors, without unused nodes, weights and inputs.

    External data remains external. The IR version is limited to the newest version that onnxruntime
    accepts: exporters write newer versions although the model does not need them.

    Args:
        model: Model to extract from.
        tensors: Names of the outputs.
        fed: Intermediate tensors that become inputs if the outputs depend on them.
        weights: Whether to include large weights; otherwise they are placeholders without data.
    """
    fed_names = {value.name for value in fed}
    source = model.proto
    initializers = source.graph.initializer
    stored = initializers if weights else map(_strip_weights, initializers)
    outputs = [onnx.ValueInfoProto(name=t) for t in tensors]
    result, needed = extract_submodel(
        source, [n.proto for n in model.ordered], outputs, stored, fed_names
    )
    result.ir_version = min(source.ir_version, sessions.IR_VERSION)
    graph = result.graph
    graph.name = graph.name or "calibration"
    # Before IR version 4, initializers had to be inputs too. Since version 4, this is not needed
    # and only prevents constant folding.
    input_initializers = model.initializers if source.ir_version < 4 else {}
    allowed = ({*model.inputs, *input_initializers} - fed_names).intersection(needed)
    graph.input.extend(v for v in source.graph.input if v.name in allowed)
    graph.input.extend(v for v in fed if v.name in needed)
    return result


def external_folder(model: Model) -> str:
    """Return the folder of the model's external weights; empty without external weights.

    Raises:
        ModelError: A weight file is missing or lies outside the model's folder, or the model has
            external weights and no path.
    """
    folder = ""
    for tensor in external_tensors(model.proto.graph):
        location = read_location(tensor)
        if not model.base_dir:
            raise ModelError(
                f"the weights of tensor '{tensor.name}' are in the file '{location}'; give the "
                "path of the model instead of its contents",
                "model",
                code="external-weights",
                node=tensor.name,
            )
        if external.find_weight_file(tensor, model.base_dir, model.path) is None:
            raise ModelError(
                f"weight file '{location}' of tensor '{tensor.name}' is missing. Copy it next to "
                "the model",
                model.path,
                code="file-missing",
                node=tensor.name,
            )
        folder = model.base_dir
    return folder


# Sessions -----------------------------------------------------------------------------------------

_MAX_WORKERS = 4


def worker_count(sample_bytes: int, available: int, histogram_bytes: int = 0) -> int:
    """Return the number of threads that process samples, limited by memory and cores.

    While one thread decodes and counts a sample, another thread runs the network.

    Args:
        sample_bytes: Memory of a sample's tensors in one thread.
        available: Number of cores.
        histogram_bytes: Memory of one thread's histograms. The merged result needs as much again.
    """
    by_cores = max(1, min(_MAX_WORKERS, available // 2 if available > 3 else available))
    by_histograms = limits.COUNTED // max(histogram_bytes, 1) - 1
    return max(1, min(by_cores, limits.FETCHED // max(sample_bytes, 1), by_histograms))


def sample_bytes(model: Model, names: Sequence[str]) -> int:
    """Return how many bytes float32 tensors need if each dynamic dimension is 1."""
    total = 0
    for name in names:
        size = 4
        for dim in model.shape(name) or ():
            size *= 1 if dim is None else dim
        total += size
    return total


def open_session(model: Model, names: Sequence[str], threads: int, *, fold_qdq: bool = True) -> Any:
    """Open an onnxruntime session on the CPU that computes given tensors.

    Args:
        model: Model.
        names: Tensors to compute.
        threads: Threads of the session.
        fold_qdq: Whether onnxruntime may replace Q/DQ pairs by integer kernels.

    Raises:
        ModelError: onnxruntime rejects the model.
    """
    folder = external_folder(model)
    partial = partial_model(model, names, weights=bool(folder))
    # onnxruntime up to 1.31 also replaces FP8 Q/DQ pairs by integer kernels, and then rejects the
    # model.
    fold_qdq = fold_qdq and not uses_fp8(model)
    try:
        try:
            return open_proto(
                partial, threads, weights=model.initializers, folder=folder, fold_qdq=fold_qdq
            )
        except Exception:
            if not folder:
                raise
            # Older onnxruntime (such as 1.20) has no option for the folder of external weights.
            partial = partial_model(model, names)
            _embed_weights(model, partial)
            return open_proto(partial, threads, fold_qdq=fold_qdq)
    except Exception as error:  # onnxruntime's exceptions share no narrower base class
        raise _session_error(model.path, error) from error
    finally:
        return_freed_memory()


def pack_model(model: Model, names: Sequence[str]) -> bytes:
    """Serialize the part of a model that computes given tensors, with all weights.

    Raises:
        ModelError: A weight file is missing, or the result is larger than 2 GB.
    """
    folder = external_folder(model)
    partial = partial_model(model, names)
    try:
        if folder:
            _embed_weights(model, partial)
        return bytes(partial.SerializeToString())
    except (ValueError, EncodeError):
        raise ModelError(
            "is over 2 GB, which cannot be sent to a cluster; calibrate it on one machine",
            _display_path(model),
            code="model-too-large",
        ) from None


def open_packed_session(source: bytes, threads: int, name: str, **options: Any) -> Any:
    """Open a session on the result of :func:`pack_model`.

    Args:
        source: Serialized model.
        threads: Threads of the session.
        name: Path of the original model for messages.
        **options: Options of :func:`qdqtool.runtime.sessions.open_session`.

    Raises:
        ModelError: onnxruntime rejects the model.
    """
    try:
        return sessions.open_session(source, threads, **options)
    except Exception as error:  # onnxruntime's exceptions share no narrower base class
        raise _session_error(name, error) from error


def _session_error(path: str, error: BaseException) -> ModelError:
    reason = sessions.describe_failure(error)
    if any(text in reason for text in _NO_OPERATOR):
        reason += (
            ". If the operator is a plugin of TensorRT, give the ranges as a table "
            "(`calib_table`), or export the model without the plugin"
        )
    return ModelError(
        f"onnxruntime cannot run the model: {reason}",
        path or "model",
        code="onnxruntime-failed",
    )


def _embed_weights(model: Model, partial: onnx.ModelProto) -> None:
    for tensor in partial.graph.initializer:
        if is_external(tensor):
            tensor.CopyFrom(model.external_tensor(tensor) or tensor)


def return_freed_memory() -> None:
    """Return freed memory to the operating system if the C library is glibc.

    Opening a session copies all weights, and glibc keeps the memory of the freed copies: 110 MB for
    YOLOv8s.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class TensorFetcher:
    """Computes tensors of samples with an onnxruntime session.

    The arrays use onnxruntime's own memory, which onnxruntime reuses once the arrays are released.
    Separate output buffers would need additional memory.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs = [i.name for i in session.get_inputs()]
        self.outputs = [o.name for o in session.get_outputs()]

    def run(self, sample: Sample) -> dict[str, npt.NDArray[Any]]:
        """Return the computed tensors by name; release them before the next run to save memory.

        Raises:
            ModelError: onnxruntime fails on the sample.
        """
        try:
            values = self.session.run(self.outputs, {n: sample[n] for n in self.inputs})
        except Exception as error:
            raise ModelError(
                f"onnxruntime failed on a sample: {sessions.describe_failure(error)}",
                code="onnxruntime-failed",
            ) from error
        return dict(zip(self.outputs, values, strict=True))
