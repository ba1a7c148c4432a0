"""Runs models in onnxruntime on the same inputs, to see that a fix does not change what the network computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError

from calibration.session import partial_model
from qdqtool.errors import DataError
from qdqtool.fixing import sandbox
from qdqtool.fixing.options import FixOptions
from qdqtool.fixing.outputs import OutputPart, is_lost, relative, sums_of_squares
from qdqtool.fixing.sandbox import Arrays, RunError, TookTooLong, TooMuch
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import RUN_DOMAINS, STANDARD
from qdqtool.runtime import sessions
from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.util import limits
from qdqtool.util.said import said

__all__ = ["Arrays", "Noise", "NotFinite", "RunError", "Runs", "TooMuch"]
_DYNAMIC = {0: 1}  # an unknown batch
_SIDE = 256  # an unknown height or width: a multiple of every stride in use
ATOL = 1e-6  # of the largest output: rounding of float arithmetic
HALF_ROUNDING = 0.01  # the same of FP16, whose step is 0.05 %, behind some dozen layers


class NotFinite(RunError):
    """A float network that computes no numbers, so that nothing can be held against it."""


@dataclass(frozen=True)
class Noise:
    """How far outputs are from those of the float network.

    Attributes:
        each: For each output, root mean square of the difference over that of the float output.
        finite: Whether all values are numbers.
        parts: The same for the parts of an output that a Concat joins, by output and tensor.
        lost: The parts that have one value, where the float network has several.
    """

    each: dict[str, float]
    finite: bool
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    lost: frozenset[tuple[str, str]] = frozenset()

    @property
    def relative(self) -> float:
        """The worst output's."""
        return max(self.each.values(), default=0.0)


def runnable(model: Model, body: bool = False) -> tuple[onnx.ModelProto, list[str]]:
    """The part of a model that onnxruntime can run, and the nodes where it was cut.

    Args:
        model: The model.
        body: Keep only what leads to the last convolutions; else all but operators that onnxruntime does not have
            (TensorRT's plugins) and what is behind them.
    """
    if body:
        view = View(model)
        keep = {n.index for n in view.weighted} | view.feeds_weighted
        lost = {n.index for n in model.nodes if n.index not in keep}
        return _cut(model, lost), [n.name for n in model.ordered if n.index in lost]
    lost = {n.index for n in model.nodes if not _is_known(n.op, n.domain, model.opset)}
    names = [n.name for n in model.ordered if n.index in lost]
    if not lost:
        return model.proto, []
    tensors: set[str] = set()
    for node in model.ordered:
        if node.index in lost or any(t in tensors for t in node.inputs):
            lost.add(node.index)
            tensors.update(node.outputs)
    return _cut(model, lost), names


def _cut(model: Model, lost: set[int]) -> onnx.ModelProto:
    """The model without some nodes; what they read from the rest becomes an output."""
    made = {o for n in model.nodes if n.index in lost for o in n.outputs}
    ends = [
        t
        for n in model.nodes
        if n.index in lost
        for t in n.inputs
        if t and t not in made and not model.is_constant(t) and t not in model.inputs
    ]
    ends += [t for t in model.outputs if t not in made]
    # Every reader in the rest still sees these tensors, quantized ones apart: those are compared behind their DQ.
    return partial_model(model, [t for t in dict.fromkeys(ends) if not qdq.is_q(model.producer(t))])


def _is_known(op: str, domain: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, max(opset, 1))) if domain in STANDARD else domain in RUN_DOMAINS


def random_inputs(model: Model, seed: int = 0) -> Arrays:
    """Inputs for every graph input: images of smooth shapes and noise, in the range of the first quantizer."""
    generator = np.random.default_rng(seed)
    view = View(model)
    result: Arrays = {}
    for name in model.inputs:
        dims = model.shape(name)
        if dims is None:
            raise RunError(
                f"the shape of input '{name}' is not known", code="unknown-input-shape", node=name
            )
        shape = [d or _DYNAMIC.get(i, _SIDE) for i, d in enumerate(dims)]
        kind = model.elem_type(name) or onnx.TensorProto.FLOAT
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        except KeyError:
            raise RunError(
                f"input '{name}' has a type that onnx does not have ({kind})",
                code="unknown-input-type",
                node=name,
            ) from None
        size = math.prod(shape) * 4
        if size > limits.SESSION_INPUT or min(shape, default=1) < 1:
            raise TooMuch(
                f"input '{name}' of the shape {shape} would take "
                f"{limits.format_excess(size, limits.SESSION_INPUT)}",
                code="input-too-large",
                node=name,
            )
        if not np.issubdtype(dtype, np.floating):
            result[name] = generator.integers(
                -100 if np.issubdtype(dtype, np.signedinteger) else 0, 100, shape
            ).astype(dtype)
            continue
        images = _images(generator, shape)
        images *= np.float32(_range_of(view, name))
        result[name] = images.astype(dtype, copy=False)
    return result


def _images(generator: np.random.Generator, shape: list[int]) -> npt.NDArray[np.float32]:
    noise = generator.random(shape, np.float32)
    if len(shape) != 4 or min(shape[2:]) < 8:
        return noise
    coarse = generator.random((*shape[:2], shape[2] // 8 + 1, shape[3] // 8 + 1), np.float32)
    noise *= np.float32(0.25)
    for row in range(shape[2]):  # row by row: an array of the smooth part would be as large again
        noise[:, :, row] += np.repeat(coarse[:, :, row // 8], 8, axis=2)[
            :, :, : shape[3]
        ] * np.float32(0.75)
    return noise


def _range_of(view: View, name: str) -> float:
    """What the first quantizer of an input can hold; 1 where it has none."""
    for node in view.model.consumers(name):
        if qdq.is_q(node):
            params = view.params(node)
            if params.scale is not None and params.scale.size == 1 and 0 < params.scale[0] < 1e4:
                return float(params.scale[0] * 127)
    return 1.0


def check_inputs(model: Model, given: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Inputs that the user gave, checked against the model.

    Raises:
        DataError: One is missing, or has the wrong rank.
    """
    for name in model.inputs:
        if name not in given:
            raise DataError(
                said("{`inputs`}: have no array for the model's input '{name}'", name=name),
                code="missing-input",
                parameter="inputs",
                node=name,
            )
        dims = model.shape(name)
        if dims is not None and len(dims) != np.ndim(given[name]):
            raise DataError(
                said(
                    "{`inputs`}: '{name}' has {given} dimensions, the model wants {wanted}",
                    name=name,
                    given=np.ndim(given[name]),
                    wanted=len(dims),
                ),
                code="wrong-rank",
                parameter="inputs",
                node=name,
            )
    return {name: np.asarray(given[name]) for name in model.inputs}


class Runs:
    """Runs of models in onnxruntime, within limits on the work and memory of each and on the work of all together.

    The limits are counted from the model, not measured: a loaded machine gives the same result.

    Args:
        effort: By how much they are raised.
        samples: How many samples outputs are compared on.

    Attributes:
        left: Multiplications that are left for all runs.
    """

    def __init__(self, effort: float = FixOptions.effort, samples: int = 1) -> None:
        self.effort = effort
        self.left = limits.SESSION_WORK_ALL * effort * samples

    def run(self, proto: onnx.ModelProto, inputs: Arrays) -> Arrays:
        """The outputs of a model, computed on the CPU without fusing Q/DQ.

        Raises:
            TooMuch: It needs more than it may, or the work for all runs is used up.
            RunError: onnxruntime cannot load or run it.
        """
        inputs = {
            v.name: inputs[v.name] for v in proto.graph.input if v.name in inputs
        }  # a part may need fewer
        try:
            source = proto.SerializeToString()
        except (ValueError, EncodeError):
            raise RunError("the model is over 2 GB", code="model-too-large") from None
        if (
            proto.ir_version > sessions.IR_VERSION
        ):  # of a field that is there twice, the last one counts
            source += onnx.ModelProto(ir_version=sessions.IR_VERSION).SerializeToString()
        cost = estimate_run_cost(proto, {n: array.shape for n, array in inputs.items()})
        need, memory = cost.peak_bytes, limits.SESSION_BYTES * self.effort
        if need > memory:
            raise TooMuch(
                said(
                    "its tensors would take {size}, raise it with {`effort`}",
                    size=limits.format_excess(need, memory, " at once"),
                ),
                code="memory-limit",
                parameter="effort",
            )
        if cost.operations > limits.SESSION_WORK * self.effort:
            raise TooMuch(
                said(
                    "it takes {operations:.2g} multiplications; the limit is {most:.2g}, raise it with "
                    "{`effort`}",
                    operations=cost.operations,
                    most=limits.SESSION_WORK * self.effort,
                ),
                code="work-limit",
                parameter="effort",
            )
        work = cost.operations + limits.SESSION_RUN + limits.SESSION_WORK_BYTE * len(source)
        if work > self.left:
            raise TooMuch(
                said("the work for comparing outputs is used up; raise it with {`effort`}"),
                code="work-used-up",
                parameter="effort",
            )
        self.left -= work
        try:
            return sandbox.SHARED.run(
                source,
                inputs,
                limits.SESSION_SECONDS * self.effort,
                limits.SESSION_PROCESS + 4 * len(source) + need,
            )
        except TookTooLong:
            self.left = 0  # what could not be counted once would not be counted again
            raise


def noise(outputs: Arrays, reference: Arrays) -> Noise:
    """The distance of outputs from the float network's; outputs that are not floats are left out."""
    return noise_of_samples([(outputs, reference)])


def noise_of_samples(
    samples: Sequence[tuple[Arrays, Arrays]], parts: Sequence[OutputPart] = ()
) -> Noise:
    """The same over several samples, each of outputs and those of the float network, and for parts of outputs."""
    sums: dict[str, tuple[float, float, int]] = {}
    by_part: dict[tuple[str, str], tuple[float, float]] = {}
    finite = True
    for outputs, reference in samples:
        for name, wanted in reference.items():
            got = outputs.get(name)
            if got is None or got.shape != wanted.shape:
                return Noise({name: float("inf")}, False)
            if not np.issubdtype(wanted.dtype, np.floating) or not wanted.size:
                continue
            a, b = got.astype(np.float64), wanted.astype(np.float64)
            finite = finite and bool(np.all(np.isfinite(a)))
            difference, level, count = sums.get(name, (0.0, 0.0, 0))
            sums[name] = (
                difference + float(np.sum((a - b) ** 2)),
                level + float(np.sum(b * b)),
                count + b.size,
            )
        for key, more, of in sums_of_squares(outputs, reference, parts):
            difference, level = by_part.get(key, (0.0, 0.0))
            by_part[key] = (difference + more, level + of)
    return Noise(
        {n: relative(d / count, level / count) for n, (d, level, count) in sums.items()},
        finite,
        {key: relative(*found) for key, found in by_part.items()},
        frozenset(p.key for p in parts if is_lost(samples, p)),
    )


def check_finite(reference: Arrays) -> None:
    """Refuses outputs of the float network that nothing can be compared with.

    Raises:
        NotFinite: One of them holds an infinity or a NaN.
    """
    for name, values in reference.items():
        if np.issubdtype(values.dtype, np.floating) and not np.all(np.isfinite(values)):
            raise NotFinite(
                f"output '{name}' of the float network is not finite for these inputs",
                code="output-not-finite",
                node=name,
            )


PART_SLACK = 0.02  # of a part's level: what a part may lose in addition, as small parts vary more


def within(
    before: Noise, after: Noise, factor: float, rounding: float = ATOL, *, parts: bool = False
) -> bool:
    """Whether no output's noise grew by more than a factor, rounding of float arithmetic apart.

    With ``parts`` that of no part of an output either.
    """
    if not after.finite:
        return False
    if not before.finite:
        return True
    if parts and worst_part(before, after, factor) is not None:
        return False
    return all(
        value <= before.each.get(name, 0.0) * factor + rounding
        for name, value in after.each.items()
    )


def worst_part(before: Noise, after: Noise, factor: float) -> tuple[str, str] | None:
    """The part of an output whose noise grew most, by more than a factor or to nothing but one value."""
    grown = {
        key: value / (before.parts.get(key, 0.0) + 1e-9)
        for key, value in after.parts.items()
        if value > before.parts.get(key, 0.0) * factor + PART_SLACK
        or key in after.lost - before.lost
    }
    return max(grown, key=lambda key: grown[key]) if grown else None
