"""Activations by law: a pointwise subgraph of one run-time tensor, however many nodes it is written in.

SiLU (Sigmoid, Mul), GELU (Div, Erf, Add, Mul, Mul) and HardSwish (Add, Clip, Mul, Div) are functions of one tensor;
constant operands are no inputs. TensorRT joins the nodes into one ``PWN`` and takes that into the convolution in front.
:mod:`qdqtool.model.operators` lists which operators are pointwise.

Insertion and heads ask here what is a function of what, before there is any Q/DQ. What a convolution takes in of it the
simulator says (:mod:`qdqtool.trt.taken`).
"""

from __future__ import annotations

from collections.abc import Iterator

from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import is_pointwise, is_run_time, is_sum

_LONGEST = 24  # nodes of one activation; Mish written out has six


def run_time_inputs(model: Model, node: Node) -> list[str]:
    """The tensors computed at run time that a node reads, each once."""
    return [t for t in dict.fromkeys(node.inputs) if t and is_run_time(model, t)]


def activation_input(model: Model, node: Node | None) -> str | None:
    """The tensor of which alone a pointwise node's output is a function, the nearest such; None where there is none.

    ``x`` for ``Relu(x)``, for the Mul of ``x * Sigmoid(x)`` and for that of ``x * (1 + Erf(x / 1.41))``; None for a sum
    of two tensors that are no functions of one another.
    """
    read: dict[str, None] = {}
    for _ in range(_LONGEST):
        if node is None or not is_pointwise(node) or len(node.outputs) != 1:
            return None
        read.update(dict.fromkeys(run_time_inputs(model, node)))
        if len(read) <= 1:
            return next(iter(read), None)
        # What was made last is a function of no other that is read, so it is none that all of them are functions of.
        last = max(read, key=lambda tensor: _place(model, tensor))
        del read[last]
        node = model.producer(last)
    return None


def _place(model: Model, tensor: str) -> int:
    """Of the tensor's maker in a topological order; before all of them where the network is given it."""
    places = model.cache.setdefault("places", {})
    if not places:
        places.update({n.index: place for place, n in enumerate(model.ordered)})
    maker = model.producer(tensor)
    return -1 if maker is None else places[maker.index]


def region(model: Model, tensor: str, node: Node) -> list[Node]:
    """The nodes between a tensor and ``node``, a pointwise function of it (see :func:`activation_input`), in order."""
    found: dict[int, Node] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.index in found:
            continue
        found[current.index] = current
        for name in run_time_inputs(model, current):
            above = model.producer(name)
            if name != tensor and above is not None:
                stack.append(above)
    return [found[i] for i in sorted(found)]


def activation_outputs(model: Model, tensor: str) -> Iterator[str]:
    """Results of the pointwise functions of a tensor, those apart that only go on into them (a SiLU's Sigmoid)."""
    known: dict[str, None] = {tensor: None}
    inside: set[int] = set()
    queue = [tensor]
    for current in queue:
        for node in model.consumers(current):
            if (
                node.index in inside
                or len(inside) >= _LONGEST
                or not is_pointwise(node)
                or len(node.outputs) != 1
            ):
                continue
            if all(t in known for t in run_time_inputs(model, node)):
                inside.add(node.index)
                known[node.output] = None
                queue.append(node.output)
    for name in list(known)[1:]:
        readers = model.consumers(name)
        if model.is_output(name) or not readers or any(r.index not in inside for r in readers):
            yield name


def is_bias(model: Model, node: Node) -> bool:
    """Whether a node adds a constant, which a convolution takes as its bias."""
    return is_sum(node) and len(run_time_inputs(model, node)) == 1
