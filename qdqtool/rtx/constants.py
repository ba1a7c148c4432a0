"""Which tensors are constants for the compiler: computed from constants only, without a quantizer on the way."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node

_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial",
                     "Bernoulli"})
_SMALL = 4096  # elements; scales and shapes are no larger, and more is not worth computing here


class Constants:
    """Knows constant tensors, their shapes, and the values of small ones."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.plain: set[str] = set(model.initializers)
        self.with_quantizers: set[str] = set(model.initializers)
        self._values: dict[str, npt.NDArray[Any] | None] = {}
        for node in model.ordered:
            if node.op == "Constant":
                self.plain.update(node.outputs)
                self.with_quantizers.update(node.outputs)
            elif node.op not in _RANDOM and not node.captured:
                inputs = [t for t in node.inputs if t]
                known_shape = node.op in ("Shape", "Size") and self._fixed_shape(node.input(0))
                if known_shape or (inputs and all(t in self.with_quantizers for t in inputs)):
                    self.with_quantizers.update(o for o in node.outputs if o)
                if qdq.is_qdq(node):
                    continue
                if known_shape or (inputs and all(t in self.plain for t in inputs)):
                    self.plain.update(o for o in node.outputs if o)

    def _fixed_shape(self, tensor: str) -> bool:
        shape = self.model.shape(tensor)
        return shape is not None and None not in shape

    def is_plain(self, tensor: str) -> bool:
        """A constant, or computed from constants, with no quantizer on the way."""
        return tensor in self.plain

    def is_weight(self, tensor: str) -> bool:
        """Computed from constants only, quantizers allowed."""
        return tensor in self.with_quantizers

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant; None when not known."""
        shape = self.model.shape(tensor)
        if shape is None or any(d is None for d in shape):
            value = self.value(tensor)
            return None if value is None else value.shape
        return tuple(d for d in shape if d is not None)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """The value of a small plain constant; None when it is large, not constant or cannot be computed."""
        if tensor not in self._values:
            self._values[tensor] = None  # a tensor is never part of its own computation; this only ends odd graphs
            try:
                self._values[tensor] = self._compute(tensor)
            except RecursionError:  # a chain of a thousand constant nodes: its value is not worth more
                return None
        return self._values[tensor]

    def _compute(self, tensor: str) -> npt.NDArray[Any] | None:
        if not self.is_plain(tensor):
            return None
        shape = self.model.constant_shape(tensor)
        if shape is not None:
            return self.model.constant(tensor) if math.prod(shape) <= _SMALL else None
        node = self.model.producer(tensor)
        if node is None:
            return None
        if node.op in ("Shape", "Size"):
            dims = self.model.shape(node.input(0))
            if dims is None or any(d is None for d in dims):
                return None
            whole = np.asarray(dims, dtype=np.int64)
            return whole if node.op == "Shape" and not node.attributes else None
        values = [self.value(t) if t else None for t in node.inputs]
        if any(v is None for v, t in zip(values, node.inputs, strict=True) if t):
            return None
        return _evaluate(self.model, node, [v for v in values if v is not None], tensor)

    def scalar(self, tensor: str) -> float | None:
        """The value of a one-element constant."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def ints(self, tensor: str) -> list[int] | None:
        """The values of a small integer constant."""
        value = self.value(tensor)
        return None if value is None else [int(v) for v in value.reshape(-1)]


def _evaluate(model: Model, node: Node, values: list[npt.NDArray[Any]], wanted: str) -> npt.NDArray[Any] | None:
    """Runs one node of constants with onnx's reference implementation."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    if any(v.size > _SMALL for v in values) or node.domain not in ("", "ai.onnx"):
        return None
    names = [t for t in node.inputs if t]
    graph = helper.make_graph(
        [node.proto], "constant",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
         for n, v in dict(zip(names, values, strict=True)).items()],
        [helper.make_empty_tensor_value_info(wanted)])
    single = helper.make_model(graph, opset_imports=[helper.make_opsetid("", model.opset)])
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results: Any = ReferenceEvaluator(single).run([wanted], dict(zip(names, values, strict=True)))
    except Exception:
        # A strange or unsupported node has no known value, which is all that the caller asks.
        return None
    result = results[0]
    return result if isinstance(result, np.ndarray) and result.size <= _SMALL else None
