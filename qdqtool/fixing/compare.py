"""Runnable parts of models, their inputs, and the errors of their outputs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from calibration.session import partial_model
from qdqtool.errors import DataError
from qdqtool.fixing.outputs import OutputNoise, OutputPart, is_part_lost, select_part
from qdqtool.fixing.runner import Arrays, RunError, RunLimitError
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import RUN_DOMAINS, STANDARD
from qdqtool.util import limits

_DYNAMIC = {0: 1}  # sizes of unknown dimensions, by axis: batch 1
_SIDE = 256  # size for an unknown height or width: a multiple of every usual stride
ATOL = 1e-6  # difference by rounding in float32, relative to the largest output
HALF_ROUNDING = 0.01  # difference by rounding in FP16 (step 0.05 %) after some dozen layers


class NotFiniteError(RunError):
    """Error: the float network's outputs are not finite and cannot serve as a reference."""


def cut_runnable_part(model: Model, body: bool = False) -> tuple[onnx.ModelProto, list[str]]:
    """Return the part of a model that onnxruntime can run, and the names of the removed nodes.

    Args:
        model: The model.
        body: Whether to keep only the nodes up to the last convolutions. Otherwise operators that
            onnxruntime lacks (such as TensorRT plugins) and all nodes after them are removed.
    """
    if body:
        view = View(model)
        needed = {n.index for n in view.nodes_with_weights} | view.feeds_weighted
        removed = {n.index for n in model.nodes if n.index not in needed}
        return _remove_nodes(model, removed), _list_node_names(model, removed)
    removed = {n.index for n in model.nodes if not _can_run(n.op, n.domain, model.opset)}
    if not removed:
        return model.proto, []
    names = _list_node_names(model, removed)
    return _remove_nodes(model, _add_downstream(model, removed)), names


def _add_downstream(model: Model, indices: set[int]) -> set[int]:
    """Return the given node indices together with those of all dependent nodes."""
    dependent: set[int] = set()
    tensors: set[str] = set()
    for node in model.ordered:
        if node.index in indices or not tensors.isdisjoint(node.inputs):
            dependent.add(node.index)
            tensors.update(node.outputs)
    return dependent


def _list_node_names(model: Model, indices: set[int]) -> list[str]:
    return [n.name for n in model.ordered if n.index in indices]


def _remove_nodes(model: Model, removed: set[int]) -> onnx.ModelProto:
    """Return the model without some nodes; tensors that these nodes consume become outputs."""
    nodes = [n for n in model.nodes if n.index in removed]
    produced = {o for n in nodes for o in n.outputs}
    read = dict.fromkeys(t for n in nodes for t in n.inputs)
    fixed = {"", *produced, *model.inputs}
    ends = [t for t in read if t not in fixed and not model.is_constant(t)]
    ends += [t for t in model.outputs if t not in produced]
    # Integer outputs of Qs are left out: their dequantized values are compared.
    return partial_model(model, [t for t in dict.fromkeys(ends) if not qdq.is_q(model.producer(t))])


def _can_run(op: str, domain: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, max(opset, 1))) if domain in STANDARD else domain in RUN_DOMAINS


def random_inputs(model: Model) -> Arrays:
    """Return a random array for every graph input, within the range of the input's first Q.

    Inputs of rank 4 get images of smooth shapes and noise. Unknown sizes become 1 (batch) or 256.
    """
    generator = np.random.default_rng(0)
    view = View(model)
    inputs: Arrays = {}
    for name in model.inputs:
        shape, dtype = _input_shape(model, name), _input_type(model, name)
        if np.issubdtype(dtype, np.floating):
            images = _draw_images(generator, shape)
            images *= np.float32(_input_range(view, name))
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
            f"{limits.format_excess(size, limits.SESSION_INPUT)}",
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
            f"input '{name}': {kind} is not a data type of this version of onnx",
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


def _input_range(view: View, name: str) -> float:
    """Return the largest value that the first Q of an input can represent.

    The result is 1 if no Q reads the input with a single plausible scale.
    """
    for node in view.model.consumers(name):
        if qdq.is_q(node):
            params = view.params(node)
            if params.scale is not None and params.scale.size == 1 and 0 < params.scale[0] < 1e4:
                return float(params.scale[0] * 127)
    return 1.0


def check_inputs(model: Model, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Return the user's arrays for the inputs of a model, without other arrays.

    Raises:
        DataError: An array is missing, or has the wrong rank.
    """
    for name in model.inputs:
        if name not in arrays:
            raise DataError(
                f"`inputs`: no array for the model's input '{name}'; add an array",
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


def measure_noise(
    samples: Sequence[tuple[Arrays, Arrays]], parts: Sequence[OutputPart] = ()
) -> OutputNoise:
    """Return the errors of outputs against the float network's outputs, over all samples.

    An output that is missing or has another shape makes the error infinite.

    Args:
        samples: For each sample, the outputs and the float network's outputs. Outputs that are not
            floats are ignored.
        parts: Parts of outputs that are measured separately, in addition.
    """
    sums: defaultdict[str, ErrorSums] = defaultdict(ErrorSums)
    part_sums: defaultdict[tuple[str, str], ErrorSums] = defaultdict(ErrorSums)
    finite = True
    for outputs, reference in samples:
        for name, expected in reference.items():
            actual = outputs.get(name)
            if actual is None or actual.shape != expected.shape:
                return OutputNoise({name: float("inf")}, False)
            if np.issubdtype(expected.dtype, np.floating) and expected.size:
                finite = finite and bool(np.all(np.isfinite(actual)))
                sums[name].add(actual, expected)
        for part in parts:
            pair = select_part(outputs, reference, part)
            if pair is not None:
                part_sums[part.key].add(*pair)
    return OutputNoise(
        {name: total.relative_error for name, total in sums.items()},
        finite,
        {key: total.relative_error for key, total in part_sums.items()},
        frozenset(p.key for p in parts if is_part_lost(samples, p)),
    )


class ErrorSums:
    """Sums over the values of an output or of a part of it, in all samples."""

    def __init__(self) -> None:
        self._difference = self._level = 0.0  # sums of squares
        self._count = 0

    def add(self, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Add the values of one sample."""
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        self._difference += float(np.sum((actual - expected) ** 2))
        self._level += float(np.sum(expected**2))
        self._count += expected.size

    @property
    def relative_error(self) -> float:
        """Root mean square of the difference, divided by that of the expected values.

        If all expected values are 0, the root mean square of the difference.
        """
        return math.sqrt(self._difference / (self._level or max(self._count, 1)))


def check_finite(reference: Sequence[Arrays]) -> None:
    """Check that the float network's outputs of each sample are finite.

    Raises:
        NotFiniteError: An output holds an infinity or a NaN.
    """
    for name, values in itertools.chain.from_iterable(outputs.items() for outputs in reference):
        if np.issubdtype(values.dtype, np.floating) and not np.all(np.isfinite(values)):
            raise NotFiniteError(
                f"output '{name}' of the float network is NaN or infinite for these inputs; give "
                "other inputs",
                code="output-not-finite",
                node=name,
            )


PART_SLACK = 0.02  # additional error permitted for a part of an output: small parts vary more


def is_within(
    before: OutputNoise,
    after: OutputNoise,
    factor: float,
    rounding: float = ATOL,
    *,
    parts: bool = False,
) -> bool:
    """Return whether the error of every output grew by at most a factor plus rounding.

    Args:
        before: Errors of the model without the change.
        after: Errors of the changed model.
        factor: Permitted growth factor.
        rounding: Permitted growth in addition.
        parts: Whether to check the parts of outputs too.
    """
    if not after.finite:
        return False
    if not before.finite:
        return True
    if parts and find_worst_part(before, after, factor) is not None:
        return False
    return all(
        noise <= before.each.get(name, 0.0) * factor + rounding
        for name, noise in after.each.items()
    )


def find_worst_part(
    before: OutputNoise, after: OutputNoise, factor: float
) -> tuple[str, str] | None:
    """Return output and tensor of the part whose error grew most beyond the permitted factor.

    Parts that became constant count as well. None if no part exceeds its limit.
    """
    growth = {
        key: noise / (before.parts.get(key, 0.0) + 1e-9)
        for key, noise in after.parts.items()
        if noise > before.parts.get(key, 0.0) * factor + PART_SLACK
        or key in after.lost - before.lost
    }
    return max(growth, key=lambda key: growth[key]) if growth else None
