"""Following a tensor through a Q/DQ model: what is fused behind a convolution, who reads it, what made it.

"Commuting" operators are those that a Q can move up past: they copy or select values, so quantizing before or after
gives the same numbers (MaxPool, nearest Resize, Slice, Split, Concat, Reshape, Transpose ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool import qdq
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View
from qdqtool.operators import pooling_of

ACTIVATIONS = (
    "Relu", "LeakyRelu", "Clip", "Elu", "Selu", "PRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Swish",
    "Softplus", "Gelu", "Mish", "Silu", "ThresholdedRelu",
)
POOLS = ("MaxPool", "Resize", "Upsample")
CUTS = ("Split", "Slice")
COPIES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "DepthToSpace", "SpaceToDepth")
JOINS = ("Concat",)
AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")
_LIMIT = 400  # readers looked at from one tensor


def commutes(node: Node) -> bool:
    """Whether a Q can move up past a node."""
    if node.op in ("Resize", "Upsample"):
        return str(node.attributes.get("mode", "nearest")) == "nearest"
    return node.op in POOLS or node.op in CUTS or node.op in COPIES or node.op in JOINS


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
        readers = model.readers(result.tensor)
        silu = silu_of(view, result.tensor)
        if silu is not None and result.activation is None:
            result.fused.extend(silu)
            result.activation, result.silu = silu[-1], True
            result.tensor = silu[-1].output
            continue
        if len(readers) != 1:
            break
        node = readers[0]
        if node.op == "BatchNormalization" and result.activation is None:
            if any(model.constant_proto(t) is None for t in node.inputs[1:]):
                result.stopped = node
                break
        elif node.op in ACTIVATIONS and result.activation is None:
            result.activation, result.silu = node, node.op in ("Swish", "Silu")
        elif not (node.op == "Add" and result.activation is None and _is_bias(view, node, result.tensor)):
            break
        result.fused.append(node)
        result.tensor = node.output
    result.inner = _inner(view, result)
    return result


def silu_of(view: View, tensor: str) -> list[Node] | None:
    """The Sigmoid and Mul that make SiLU of a tensor, when they alone read it."""
    readers = view.model.readers(tensor)
    if len(readers) != 2:
        return None
    gate = next((n for n in readers if n.op in ("Sigmoid", "HardSigmoid")), None)
    mul = next((n for n in readers if n.op == "Mul"), None)
    if gate is None or mul is None or gate.output not in mul.inputs or view.model.is_output(gate.output):
        return None
    return [gate, mul] if len(view.model.readers(gate.output)) == 1 else None


def _is_bias(view: View, node: Node, tensor: str) -> bool:
    return any(t in view.constants for t in node.inputs if t != tensor)


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
    gates = [n for n in ends if n.op in ACTIVATIONS]
    others = [n for n in ends if n.op not in ACTIVATIONS]
    if not gates:
        return None
    return q if all(n.op == "Mul" and _reads_gate(view, n, gates) for n in others) else None


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
    """A reader of a tensor, behind the commuting operators on the way to it.

    Attributes:
        kind: ``q``, ``add`` (a sum of two computed tensors), ``op`` or ``output`` (of the network).
        node: The reader; None for a network output.
        path: The commuting nodes between, the nearest to the tensor first.
    """

    kind: str
    node: Node | None
    path: tuple[Node, ...] = ()


def uses(view: View, tensor: str) -> list[Use]:
    """The readers of a tensor, looked for past commuting operators."""
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
            elif commutes(node) and node.input(0) and (node.op in JOINS or node.input(0) == current):
                for output in node.outputs:
                    if output and output not in visited:
                        visited.add(output)
                        queue.append((output, (*path, node)))
            else:
                found.append(Use("add" if is_sum(view, node) else "op", node, path))
    return found


def is_sum(view: View, node: Node) -> bool:
    """Whether a node adds two computed tensors (a bias is not one)."""
    return node.op in ("Add", "Sum") and sum(t not in view.constants for t in node.inputs if t) >= 2


@dataclass(frozen=True, slots=True)
class Root:
    """Where a tensor comes from, past commuting operators.

    Attributes:
        tensor: The tensor above the first of them.
        maker: What makes it; None for a network input.
        path: The commuting nodes passed, the nearest to the tensor first.
    """

    tensor: str
    maker: Node | None
    path: tuple[Node, ...]


def root(view: View, tensor: str, part: int | None = None) -> Root:
    """Walks up from a tensor past commuting operators.

    Args:
        view: The model.
        tensor: Where to start.
        part: Which input of the first Concat to follow; without it the walk ends at a Concat.
    """
    path: list[Node] = []
    maker = view.model.producer(tensor)
    while maker is not None and commutes(maker):
        if maker.op in JOINS:
            if part is None or part >= len(maker.inputs):
                break
            tensor, part = maker.inputs[part], None
        else:
            tensor = maker.input(0)
        path.append(maker)
        maker = view.model.producer(tensor)
    return Root(tensor, maker, tuple(path))


def no_pooling(view: View, node: Node) -> bool:
    """Whether an average over a tensor is nothing that TensorRT turns into a pooling."""
    return node.op == "ReduceMean" and pooling_of(view.model, node) is None


def layer_of(view: View, tensor: str) -> Node | None:
    """The convolution whose layer writes a tensor, past activation, BatchNormalization and bias; None otherwise."""
    node = view.model.producer(tensor)
    for _ in range(8):
        if node is None or node.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            return node
        if node.op in ACTIVATIONS or node.op == "BatchNormalization":
            node = view.model.producer(node.input(0))
        elif node.op == "Mul":
            gate = next((g for g in (view.model.producer(t) for t in node.inputs)
                         if g is not None and g.op in ("Sigmoid", "HardSigmoid") and g.input(0) in node.inputs), None)
            node = view.model.producer(gate.input(0)) if gate is not None else None
        elif node.op == "Add" and not is_sum(view, node):
            node = view.model.producer(next((t for t in node.inputs if t not in view.constants), ""))
        else:
            return None
    return None
