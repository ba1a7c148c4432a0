"""Runs of models in onnxruntime within limits of memory and work, and inputs of the runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from calibration.session import partial_model
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.proto.external_data import serialize
from qdqtool.proto.subgraphs import RUN_DOMAINS, STANDARD
from qdqtool.runtime import sessions
from qdqtool.runtime.run_cost import RunCost, estimate_run_cost
from qdqtool.util import limits
from qdqtool.util.checks import check_not_text

Arrays = dict[str, npt.NDArray[Any]]
_MAX_THREADS = 4
_DYNAMIC = {0: 1}  # size of an unknown dimension by axis: 1 for the batch
_SIDE = 256  # size of an unknown height or width, a multiple of all usual strides


@dataclass(frozen=True)
class FixOptions:
    """Options of `fix`: findings to fix, and inputs and limits of the comparison of outputs.

    Attributes:
        only: Finding codes to fix. Empty: all codes except those that are fixed only on request.
        inputs: Arrays by input name, with which the model is run. None: random arrays.
        effort: Factor for the limits of the runs that compare outputs.
    """

    only: Sequence[str] = ()
    inputs: Mapping[str, Any] | None = None
    effort: float = 1.0

    def __post_init__(self) -> None:
        check_not_text("only", self.only)
        if not 0 < self.effort <= limits.EFFORT:
            raise QdqtoolError(
                f"`effort={self.effort!r}` is out of range; give a number above 0 and at most "
                f"{limits.EFFORT:g}",
                code="value-out-of-range",
                parameter="effort",
            )
        object.__setattr__(self, "effort", float(self.effort))


class RunError(Exception):
    """Error: onnxruntime cannot run a model.

    Attributes:
        code: Identifier of the cause, such as ``"memory-limit"``. It stays the same if the message
            is reworded.
        node: Tensor that the error is about; empty if the error is about no tensor.
    """

    def __init__(self, message: str, *, code: str, node: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.node = node


class RunLimitError(RunError):
    """Error: a model takes more work or memory than `effort` permits."""


class NotFiniteError(RunError):
    """Error: the outputs of the float network are not finite, so they cannot be a reference."""


class ModelRunner:
    """Runs models in onnxruntime, with limits on memory and work.

    Memory and work are computed from the model, not measured. The load of the machine therefore
    does not change which runs are permitted.

    Args:
        effort: Factor for the limits.
        samples: Number of samples on which outputs are compared.

    Attributes:
        work_left: Number of multiplications that remain for further runs.
    """

    def __init__(self, effort: float = FixOptions.effort, samples: int = 1) -> None:
        self.effort = effort
        self.work_left = limits.SESSION_WORK_ALL * effort * samples

    def run(self, proto: onnx.ModelProto, inputs: Arrays) -> Arrays:
        """Return the outputs of a model for one sample, as :meth:`run_samples`."""
        return self.run_samples(proto, [inputs])[0]

    def run_samples(self, proto: onnx.ModelProto, samples: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of a model, computed on the CPU without fusion of Q/DQ.

        Inputs that the model does not have are ignored. Outputs that are not arrays of numbers are
        left out.

        Args:
            proto: The model.
            samples: For each sample, the inputs by name.

        Raises:
            RunLimitError: The runs need more memory or work than permitted.
            RunError: onnxruntime cannot load or run the model.
        """
        names = [v.name for v in proto.graph.input]
        samples = [{n: sample[n] for n in names if n in sample} for sample in samples]
        source = _serialize(proto)
        self._spend_work(proto, samples, len(source))
        threads = min(_MAX_THREADS, sessions.core_count())
        try:
            session = sessions.open_session(source, threads, optimize="basic", fold_qdq=False)
            outputs = [output.name for output in session.get_outputs()]
            with sessions.silence_output():
                results = [session.run(outputs, sample) for sample in samples]
        except Exception as error:  # onnxruntime's exceptions share no other base class
            raise RunError(sessions.describe_failure(error), code="onnxruntime-error") from error
        return [_select_numbers(outputs, values) for values in results]

    def _spend_work(
        self, proto: onnx.ModelProto, samples: Sequence[Arrays], model_bytes: int
    ) -> None:
        cost: RunCost | None = None
        previous_shapes = None
        for sample in samples:
            shapes = {name: array.shape for name, array in sample.items()}
            if cost is None or shapes != previous_shapes:
                cost = estimate_run_cost(proto, shapes)
            previous_shapes = shapes
            self._spend_work_of_run(cost, model_bytes)

    def _spend_work_of_run(self, cost: RunCost, model_bytes: int) -> None:
        memory = limits.SESSION_BYTES * self.effort
        if cost.peak_bytes > memory:
            raise RunLimitError(
                "the tensors of a run would take "
                f"{limits.format_excess(cost.peak_bytes, memory, ' at once')}; increase `effort`",
                code="memory-limit",
            )
        if cost.operations > limits.SESSION_WORK * self.effort:
            raise RunLimitError(
                f"a run takes {cost.operations:.2g} multiplications; the limit is "
                f"{limits.SESSION_WORK * self.effort:.2g}; increase `effort`",
                code="work-limit",
            )
        work = cost.operations + limits.SESSION_RUN + limits.SESSION_WORK_BYTE * model_bytes
        if work > self.work_left:
            raise RunLimitError(
                "the limit on the work for comparing outputs is reached; increase `effort`",
                code="work-used-up",
            )
        self.work_left -= work


def _select_numbers(names: Sequence[str], values: Sequence[Any]) -> Arrays:
    return {
        name: value
        for name, value in zip(names, values, strict=True)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    }


def _serialize(proto: onnx.ModelProto) -> bytes:
    source = serialize(proto)
    if source is None:
        raise RunError("the model exceeds 2 GB", code="model-too-large")
    if proto.ir_version > sessions.IR_VERSION:
        # If a serialized message has a scalar field twice, protobuf uses the last value.
        source += onnx.ModelProto(ir_version=sessions.IR_VERSION).SerializeToString()
    return source


def cut_runnable_part(model: Model, body: bool = False) -> tuple[onnx.ModelProto, list[str]]:
    """Return the part of a model that onnxruntime can run, and the names of the removed nodes.

    Args:
        model: The model.
        body: Whether to keep only the nodes up to the last convolutions. If not, the operators that
            onnxruntime does not have (such as TensorRT plugins) and all nodes downstream are
            removed.
    """
    if body:
        view = View(model)
        needed = {n.index for n in view.nodes_with_weights} | view.feeds_weighted
        removed = {n.index for n in model.nodes if n.index not in needed}
        return _remove_nodes(model, removed), _list_node_names(model, removed)
    removed = {n.index for n in model.nodes if not _can_run_operator(n.op, n.domain, model.opset)}
    if not removed:
        return model.proto, []
    names = _list_node_names(model, removed)
    return _remove_nodes(model, model.find_downstream(removed)), names


def _list_node_names(model: Model, indices: set[int]) -> list[str]:
    return [n.name for n in model.ordered if n.index in indices]


def _remove_nodes(model: Model, removed: set[int]) -> onnx.ModelProto:
    """Return the model without some nodes. Tensors that these nodes consume become outputs."""
    nodes = [n for n in model.nodes if n.index in removed]
    produced = {o for n in nodes for o in n.outputs}
    read = dict.fromkeys(t for n in nodes for t in n.inputs)
    fixed = {"", *produced, *model.inputs}
    ends = [t for t in read if t not in fixed and not model.is_constant(t)]
    ends += [t for t in model.outputs if t not in produced]
    # Integer outputs of Qs are left out, because their dequantized values are compared.
    return partial_model(model, [t for t in dict.fromkeys(ends) if not qdq.is_q(model.producer(t))])


def _can_run_operator(op: str, domain: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, max(opset, 1))) if domain in STANDARD else domain in RUN_DOMAINS


def draw_random_inputs(model: Model) -> Arrays:
    """Return a random array for every graph input.

    Float values are within the range of the input's first Q, and integers are from -100 (0 if
    unsigned) to 99. Float inputs of rank 4 are images of smooth areas and noise. An unknown size is
    1 (batch) or 256.

    Raises:
        RunError: The shape or the type of an input is unknown, or an input is too large.
    """
    generator = np.random.default_rng(0)
    view = View(model)
    inputs: Arrays = {}
    for name in model.inputs:
        shape, dtype = _input_shape(model, name), _input_type(model, name)
        if np.issubdtype(dtype, np.floating):
            images = _draw_images(generator, shape)
            images *= np.float32(_input_maximum(view, name))
            inputs[name] = images.astype(dtype, copy=False)
        else:
            low = -100 if np.issubdtype(dtype, np.signedinteger) else 0
            inputs[name] = generator.integers(low, 100, shape).astype(dtype)
    return inputs


def _input_shape(model: Model, name: str) -> list[int]:
    dims = model.shape(name)
    if dims is None:
        raise RunError(
            f"the shape of input '{name}' is unknown; give it with `inputs`",
            code="unknown-input-shape",
            node=name,
        )
    shape = [d or _DYNAMIC.get(i, _SIDE) for i, d in enumerate(dims)]
    size = math.prod(shape) * 4
    if size > limits.SESSION_INPUT or min(shape, default=1) < 1:
        raise RunLimitError(
            f"input '{name}' of the shape {shape} would take "
            f"{limits.format_excess(size, limits.SESSION_INPUT)}; give it with `inputs`",
            code="input-too-large",
            node=name,
        )
    return shape


def _input_type(model: Model, name: str) -> np.dtype[Any]:
    kind = model.elem_type(name) or onnx.TensorProto.FLOAT
    try:
        dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(kind)
    except KeyError:
        raise RunError(
            f"input '{name}': this version of onnx has no data type with the number {kind}; give "
            "the input with `inputs`",
            code="unknown-input-type",
            node=name,
        ) from None
    return dtype


def _draw_images(generator: np.random.Generator, shape: list[int]) -> npt.NDArray[np.float32]:
    noise = generator.random(shape, np.float32)
    if len(shape) != 4 or min(shape[2:]) < 8:
        return noise
    coarse = generator.random((*shape[:2], shape[2] // 8 + 1, shape[3] // 8 + 1), np.float32)
    noise *= np.float32(0.25)
    smooth = coarse.repeat(8, axis=2).repeat(8, axis=3)[:, :, : shape[2], : shape[3]]
    return noise + np.float32(0.75) * smooth


def _input_maximum(view: View, name: str) -> float:
    """Return the largest value that a Q of an input can represent.

    The first Q that has a single plausible scale is used. Without such a Q, the result is 1.
    """
    for node in view.model.consumers(name):
        if qdq.is_q(node):
            scale = view.params(node).single_scale
            if scale is not None and 0 < scale < 1e4:
                return scale * 127
    return 1.0


def select_inputs(model: Model, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Return the user's arrays that are inputs of a model.

    Raises:
        DataError: An array is missing, or has the wrong rank.
    """
    for name in model.inputs:
        if name not in arrays:
            raise DataError(
                f"`inputs` has no array for the model's input '{name}'; add this array",
                code="missing-input",
                parameter="inputs",
                node=name,
            )
        dims, rank = model.shape(name), np.ndim(arrays[name])
        if dims is not None and len(dims) != rank:
            raise DataError(
                f"`inputs`: '{name}' has {rank} dimensions, but the model's input has "
                f"{len(dims)}; give an array of that rank",
                code="wrong-rank",
                parameter="inputs",
                node=name,
            )
    return {name: np.asarray(arrays[name]) for name in model.inputs}


def check_finite(reference: Sequence[Arrays]) -> None:
    """Check that the float network's outputs of each sample are finite.

    Raises:
        NotFiniteError: An output contains infinity or NaN.
    """
    for name, values in itertools.chain.from_iterable(outputs.items() for outputs in reference):
        if np.issubdtype(values.dtype, np.floating) and not np.all(np.isfinite(values)):
            raise NotFiniteError(
                f"output '{name}' of the float network is NaN or infinite for these inputs; give "
                "other inputs",
                code="output-not-finite",
                node=name,
            )
