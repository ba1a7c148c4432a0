"""Steps that each add to a network behind a tensor, and return the tensor that they make."""

from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N")


def chain(*steps: Callable[[N, str], str]) -> Callable[[N, str], str]:
    """One step after the other."""

    def add(net: N, tensor: str) -> str:
        for step in steps:
            tensor = step(net, tensor)
        return tensor

    return add
