"""Places in a running network where a quantizer can stand.

A place is the data input of a convolution or linear module, or an input of a function call that a module makes: the
Add of a residual, an averaging pool. Calls have no name; they are counted. The n-th Add of a module is the n-th that
runs between the start and the end of its ``forward``, those of its children included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WEIGHTED = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
# Their own forward iterates over their children, so that a quantizer among these would run as one of them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

ADD = "add"
POOL = "pool"
_ADDS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
_POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))


@dataclass(frozen=True, order=True)
class Site:
    """A place, named so that it is found again in every run.

    Attributes:
        module: Qualified name of the module; an empty string for the network itself.
        kind: ``input`` (of a convolution or linear module), ``add`` or ``pool``.
        call: Which of the module's calls of that kind, from 0.
        position: Which of the two inputs of an Add.
    """

    module: str
    kind: str
    call: int = 0
    position: int = 0


def kind_of_call(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """``add`` for a sum of two tensors, ``pool`` for an averaging pool, else None."""
    name = getattr(function, "__name__", "")
    if name in _ADDS:
        return ADD if len(args) == 2 and all(isinstance(a, Tensor) for a in args) else None
    return POOL if name in _POOLS and args and isinstance(args[0], Tensor) else None


def call_with(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls it; ``x += y`` becomes ``x + y``, because ``x`` may be a quantized copy by now."""
    if getattr(function, "__name__", "") in ("add_", "__iadd__"):
        return torch.add(*args, **kwargs)
    return function(*args, **kwargs)


class _Running(threading.local):
    paused: bool = False


_running = _Running()


@contextmanager
def uncounted() -> Iterator[None]:
    """Calls made inside are none of the network's: a quantizer's own arithmetic."""
    before, _running.paused = _running.paused, True
    try:
        yield
    finally:
        _running.paused = before


class CallWatcher(TorchFunctionMode):  # type: ignore[misc]
    """Sees every Add and averaging pool of the code that runs inside it.

    Args:
        seen: Called with kind and arguments of each; what it returns are the arguments to go on with, or None for
            those it was given.
    """

    def __init__(self, seen: Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = None if _running.paused else kind_of_call(func, args)
        if kind is None:
            return func(*args, **kwargs)
        changed = self._seen(kind, args)
        return func(*args, **kwargs) if changed is None else call_with(func, changed, kwargs)
