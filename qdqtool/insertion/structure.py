"""Patterns in a float graph that placement has to know; see :mod:`qdqtool.ir.operators` for the operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLVE, commuting_inputs, operator_of
from qdqtool.ir.operators import weight_scale_axis as weight_scale_axis
from qdqtool.patterns.pointwise import activation_outputs, pointwise_region


def is_convolution(node: Node | None) -> bool:
    """Whether a node is a Conv or ConvTranspose."""
    return operator_of(node).kind in CONVOLVE


def reached(start: str, onward: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """A tensor and those that ``onward`` leads to from it, step by step, each once."""
    seen: set[str] = set()
    stack = [start]
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            yield name
            stack.extend(onward(name))


def moved(model: Model, tensor: str) -> Iterator[str]:
    """Results of nodes that a Q passes, which only move a tensor's values."""
    for reader in model.consumers(tensor):
        if tensor in commuting_inputs(model, reader):
            yield from reader.outputs


def longest_path(model: Model, tensor: str, other: str) -> tuple[int, int]:
    """Longest way, in nodes, from each tensor up to what both descend from (their nearest common ancestor)."""
    mine, theirs = _ancestors(model, tensor), _ancestors(model, other)
    common = mine & theirs
    return _height(model, tensor, common), _height(model, other, common)


def _ancestors(model: Model, tensor: str) -> set[int]:
    names = reached(tensor, lambda t: () if (node := model.producer(t)) is None else node.inputs)
    return {node.index for t in names if (node := model.producer(t)) is not None}


def _height(model: Model, tensor: str, common: set[int]) -> int:
    memory = {"": 0}  # what is not there is no way
    stack = [tensor]
    while stack:
        name = stack[-1]
        if name in memory:
            stack.pop()
            continue
        node = model.producer(name)
        if node is None or node.index in common or model.is_constant(name):
            memory[name] = 0
            stack.pop()
            continue
        waiting = [t for t in node.inputs if t not in memory]
        if waiting:
            stack.extend(waiting)
            continue
        memory[name] = 1 + max(memory[t] for t in ("", *node.inputs))
        stack.pop()
    return memory[tensor]


def all_dequantized(model: Model, tensor: str, readers: Callable[[str], set[int]]) -> bool:
    """Whether everything that reads a tensor, behind its activation and what moves its values, reads it dequantized;
    ``readers`` gives the nodes, by index, that will read a tensor so."""
    seen: set[str] = set()
    stack = [tensor]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if model.is_output(name):
            return False
        read = readers(name)
        behind = list(activation_outputs(model, name))
        inside = {
            n.index
            for out in behind
            if (last := model.producer(out))
            for n in pointwise_region(model, name, last)
        }
        stack.extend(behind)
        for reader in model.consumers(name):
            if reader.index in read or reader.index in inside:
                continue
            if name not in commuting_inputs(model, reader):
                return False
            stack.extend(reader.outputs)
    return True
