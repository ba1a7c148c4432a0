"""Activations as pointwise functions of one run-time tensor, in any number of nodes.

SiLU (Sigmoid, Mul), GELU (Div, Erf, Add, Mul, Mul) and HardSwish (Add, Clip, Mul, Div) are
functions of one tensor; constant operands do not count as inputs. TensorRT joins the nodes into one
``PWN`` and fuses it into the convolution before it. :mod:`qdqtool.ir.operators` lists the pointwise
operators.

Insertion and the recognition of heads use this module for float networks. The simulator decides
which of these functions a convolution fuses (:mod:`qdqtool.trt.float_fusions`).
"""

from __future__ import annotations

from collections.abc import Iterator

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import is_pointwise, is_run_time, is_sum

_MAX_NODES = 24  # maximum number of nodes of an activation; Mish in elementary operators has six


def run_time_inputs(model: Model, node: Node) -> list[str]:
    """Return a node's distinct inputs that are not constant."""
    return [t for t in dict.fromkeys(node.inputs) if t and is_run_time(model, t)]


def activation_input(model: Model, node: Node | None) -> str | None:
    """Return the nearest tensor that alone determines a pointwise node's output, or None.

    The tensor is ``x`` for ``Relu(x)``, for the Mul of ``x * Sigmoid(x)`` and for the Mul of
    ``x * (1 + Erf(x / 1.41))``. None for a sum of two tensors that are not functions
    of one tensor.
    """
    operands: dict[str, None] = {}
    for _ in range(_MAX_NODES):
        if node is None or not is_pointwise(node) or len(node.outputs) != 1:
            return None
        operands.update(dict.fromkeys(run_time_inputs(model, node)))
        if len(operands) <= 1:
            return next(iter(operands), None)
        # The operand that is computed last cannot be an input of the other operands. So it is
        # not the tensor of which all operands are functions.
        last = max(operands, key=lambda tensor: _position(model, tensor))
        del operands[last]
        node = model.producer(last)
    return None


def _position(model: Model, tensor: str) -> int:
    """Return the topological position of a tensor's producer; -1 for a network input."""
    producer = model.producer(tensor)
    return -1 if producer is None else model.positions[producer.index]


def pointwise_region(model: Model, tensor: str, node: Node) -> list[Node]:
    """Return the nodes that compute a pointwise function of a tensor, in graph order.

    Args:
        model: The model.
        tensor: The function's input, see :func:`activation_input`.
        node: The last node of the function.
    """
    nodes: dict[int, Node] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.index in nodes:
            continue
        nodes[current.index] = current
        for name in run_time_inputs(model, current):
            producer = model.producer(name)
            if name != tensor and producer is not None:
                stack.append(producer)
    return [nodes[index] for index in sorted(nodes)]


def activation_outputs(model: Model, tensor: str) -> Iterator[str]:
    """Yield the results of the pointwise functions of a tensor.

    Results that are only used inside another function (a SiLU's Sigmoid) are left out.
    """
    functions: dict[str, None] = {tensor: None}  # tensors that depend only on the given tensor
    inside: set[int] = set()
    queue = [tensor]
    for current in queue:
        for node in model.consumers(current):
            if node.index in inside or len(inside) >= _MAX_NODES:
                continue
            if _is_function_of(model, node, functions):
                inside.add(node.index)
                functions[node.output] = None
                queue.append(node.output)
    yield from (
        name
        for name in list(functions)[1:]
        if model.is_output(name) or _is_used_outside(model, name, inside)
    )


def _is_used_outside(model: Model, tensor: str, nodes: set[int]) -> bool:
    consumers = model.consumers(tensor)
    return not consumers or not all(node.index in nodes for node in consumers)


def _is_function_of(model: Model, node: Node, tensors: dict[str, None]) -> bool:
    return (
        is_pointwise(node)
        and len(node.outputs) == 1
        and all(name in tensors for name in run_time_inputs(model, node))
    )


def is_bias(model: Model, node: Node) -> bool:
    """Return whether a node adds a constant to a tensor, as a bias does."""
    return is_sum(node) and len(run_time_inputs(model, node)) == 1
