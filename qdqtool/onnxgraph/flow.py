"""Following a tensor through a Q/DQ model: what is fused behind a convolution, and who reads it.

What a Q passes and what is an activation stands in :mod:`qdqtool.operators`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool import operators, qdq
from qdqtool.graph import Node
from qdqtool.onnxgraph.pointwise import activation_behind, activation_input, is_bias
from qdqtool.onnxgraph.view import View
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import inputs_behind_q, is_activation

_LIMIT = 400  # readers looked at from one tensor
_DEEP = 8  # nodes between a convolution and the end of its layer


@dataclass(slots=True)
class Boundary:
    """The result of a convolution's layer.

    Attributes:
        tensor: What the layer writes, behind the BatchNormalization and activation that it takes.
        fused: The nodes it takes, in order.
        activation: The activation among them (for SiLU the Mul), if any.
        silu: Whether that is SiLU as Sigmoid and Mul, or one Swish node.
        inner: A Q between the convolution and its activation, where one stands.
        stopped: A BatchNormalization that cannot be folded.
    """

    tensor: str
    fused: list[Node] = field(default_factory=list)
    activation: Node | None = None
    silu: bool = False
    inner: Node | None = None
    stopped: Node | None = None


def boundary(view: View, conv: Node) -> Boundary:
    """What a convolution's layer writes, once the operators that TensorRT fuses behind it are taken in."""
    model = view.model
    result = Boundary(conv.output)
    while not model.is_output(result.tensor):
        found = _normalization(view, result) if result.activation is None else None
        if found is None and result.stopped is None:
            found = _activation(view, result)
        if not found:
            break
        result.fused.extend(found)
        result.tensor = found[-1].output
    result.inner = _inner(view, result)
    return result


def _normalization(view: View, result: Boundary) -> list[Node] | None:
    """A BatchNormalization or bias that alone reads a convolution's result."""
    readers = view.model.readers(result.tensor)
    if len(readers) != 1:
        return None
    node = readers[0]
    if operators.of(node).kind == LayerKind.SCALE:
        if any(view.model.constant_proto(t) is None for t in node.inputs[1:]):
            result.stopped = node
            return None
        return [node]
    if not operators.is_sum(node):
        return None
    known = any(t in view.constants for t in node.inputs if t != result.tensor)
    return [node] if known or is_bias(view.model, node) else None


def _activation(view: View, result: Boundary) -> list[Node] | None:
    """The pointwise nodes that are taken next; a Relu ends the layer and joins no others."""
    found = activation_behind(view.model, result.tensor)
    if not found or (result.activation is not None and (_is_relu(result.activation) or _is_relu(found[-1]))):
        return None
    result.silu = result.activation is None and _is_silu(found)
    result.activation = found[-1]
    return found


def _is_relu(node: Node) -> bool:
    known = operators.of(node).activation
    return known is not None and known.type == "RELU"


def _is_silu(nodes: list[Node]) -> bool:
    """Whether pointwise nodes are SiLU: a gate and its Mul, or one node."""
    known = operators.of(nodes[0]).activation
    if known is None:
        return False
    return known.type == "SWISH" if len(nodes) == 1 else known.gate and len(nodes) == 2


def _inner(view: View, result: Boundary) -> Node | None:
    """A Q right behind the convolution whose DQs feed nothing but an activation."""
    if result.activation is not None:
        return None
    model = view.model
    readers = model.readers(result.tensor)
    if len(readers) != 1 or not qdq.is_q(readers[0]) or model.is_output(result.tensor):
        return None
    q = readers[0]
    ends = [n for dq in model.readers(q.output) if qdq.is_dq(dq) for n in model.readers(dq.output)]
    gates = [n for n in ends if is_activation(n)]
    others = [n for n in ends if not is_activation(n)]
    if not gates:
        return None
    return q if all(operators.of(n).operation == "PROD" and _reads_gate(view, n, gates) for n in others) else None


def _reads_gate(view: View, mul: Node, gates: list[Node]) -> bool:
    """Whether a Mul multiplies with one of the gates, directly or through a Q/DQ pair."""
    outputs = {g.output for g in gates}
    for tensor in mul.inputs:
        found = qdq.source_of_dq(view.model, tensor)
        source = found[1].input(0) if found is not None and found[1] is not None else tensor
        if source in outputs:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Use:
    """A reader of a tensor, behind the operators on the way to it that a Q passes.

    Attributes:
        kind: ``q``, ``add`` (a sum of two computed tensors), ``op`` or ``output`` (of the network).
        node: The reader; None for a network output.
        path: The nodes between that a Q passes, the nearest to the tensor first.
    """

    kind: str
    node: Node | None
    path: tuple[Node, ...] = ()


_KEPT = 4096  # tensors whose readers are remembered


def uses(view: View, tensor: str) -> list[Use]:
    """The readers of a tensor, looked for past operators that a Q passes; kept for the next caller."""
    known: dict[str, list[Use]] = view.known.setdefault("uses", {})
    if tensor not in known:
        if len(known) > _KEPT:
            known.clear()
        known[tensor] = _uses(view, tensor)
    return known[tensor]


def _uses(view: View, tensor: str) -> list[Use]:
    found: list[Use] = []
    queue: list[tuple[str, tuple[Node, ...]]] = [(tensor, ())]
    visited: set[str] = {tensor}
    for current, path in queue:
        if len(visited) > _LIMIT:
            break
        if view.model.is_output(current):
            found.append(Use("output", None, path))
        for node in dict.fromkeys(view.model.readers(current)):
            if qdq.is_q(node):
                found.append(Use("q", node, path))
            elif current in inputs_behind_q(view.model, node):
                for output in node.outputs:
                    if output and output not in visited:
                        visited.add(output)
                        queue.append((output, (*path, node)))
            else:
                found.append(Use("add" if is_sum(view, node) else "op", node, path))
    return found


def is_sum(view: View, node: Node) -> bool:
    """Whether a node adds two computed tensors (a bias is not one)."""
    return operators.is_sum(node) and sum(t not in view.constants for t in node.inputs if t) >= 2


def layer_of(view: View, tensor: str) -> Node | None:
    """The convolution whose layer writes a tensor, past activation, BatchNormalization and bias; None otherwise."""
    node = view.model.producer(tensor)
    for _ in range(_DEEP):
        known = operators.of(node)
        if node is None or known.weights is not None:
            return node
        if known.kind == LayerKind.SCALE:
            above: str | None = node.input(0)
        elif operators.is_sum(node) and not is_sum(view, node):
            above = next((t for t in node.inputs if t not in view.constants), None)
        else:
            above = activation_input(view.model, node)
        if not above:
            return None
        node = view.model.producer(above)
    return None
