"""Places in a running network where a quantizer can be.

A place is the data input of a convolution or linear module, or an input of a function call that a module makes: the
Add of a residual, an averaging pool. Calls have no name; they are counted. The n-th Add of a module is the n-th that
runs between the start and the end of its ``forward``, those of its children included. So are the projections of an
``nn.MultiheadAttention``, which hands its weights to a function.
"""

import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WEIGHTED = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
# Their own forward iterates over their children, so that a quantizer among these would run as one of them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

ADD = "add"
POOL = "pool"
LINEAR = "linear"
_ADDS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
_POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))


@dataclass(frozen=True, order=True)
class QuantizerSite:
    """A place, named so that it is found again in every run.

    Attributes:
        module: Qualified name of the module; an empty string for the network itself.
        kind: ``input`` (of a convolution or linear module), ``add``, ``pool`` or ``linear`` (of an attention).
        call: Which of the module's calls of that kind, from 0.
        position: Which of the inputs: the two of an Add, data or weights of a projection.
    """

    module: str
    kind: str
    call: int = 0
    position: int = 0


def call_kind(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """``add`` for a sum of two tensors, ``pool`` for an averaging pool, else None."""
    name = getattr(function, "__name__", "")
    if name in _ADDS:
        return ADD if len(args) == 2 and all(isinstance(a, Tensor) for a in args) else None
    return POOL if name in _POOLS and args and isinstance(args[0], Tensor) else None


def call_out_of_place(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls it; ``x += y`` becomes ``x + y``, because ``x`` may be a quantized copy by now."""
    if getattr(function, "__name__", "") in ("add_", "__iadd__"):
        return torch.add(*args, **kwargs)
    return function(*args, **kwargs)


class _WatcherState(threading.local):
    paused: bool = False


_watchers = _WatcherState()


@contextmanager
def pause_watchers() -> Iterator[None]:
    """Calls made inside are none of the network's: a quantizer's own arithmetic."""
    before, _watchers.paused = _watchers.paused, True
    try:
        yield
    finally:
        _watchers.paused = before


@functools.cache
def _attention() -> tuple[Callable[..., Any], threading.local]:
    """torch's function of attention over a namespace of our own, in which ``linear`` asks what to compute with.

    The function hides its calls from watchers: one that is shown the function as a whole sees nothing inside.
    """
    asked = threading.local()
    inside: dict[str, Any] = {**vars(functional), "has_torch_function": lambda tensors: False}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            weight, bias = _rows(weight, asked.wholes), _rows(bias, asked.wholes)
        changed = asked.seen(LINEAR, (x, weight))
        x, weight = (x, weight) if changed is None else changed
        return functional.linear(x, weight, bias)

    for name in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
        function = inside[name]
        inside[name] = types.FunctionType(function.__code__, inside, name, function.__defaults__)
    inside["linear"] = linear
    return inside["multi_head_attention_forward"], asked


def _rows(part: Any, wholes: tuple[Any, ...]) -> Any:
    """Rows of a packed parameter with numbers that are known, where torch's exporter calculates them at run time."""
    for whole in wholes:
        same = isinstance(part, Tensor) and isinstance(whole, Tensor) and part is not whole
        if same and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # torch's tracer warns of constants, and constants are what is wanted
                first = part.storage_offset() // int(part.stride(0))
                return whole[first : first + int(part.shape[0])]
    return part


class CallWatcher(TorchFunctionMode):  # type: ignore[misc]
    """Sees every Add, averaging pool and projection of an attention of the code that runs inside it.

    Args:
        seen: Called with kind and arguments of each; what it returns are the arguments to go on with, or None for
            those it was given.
        kinds: The kinds that matter, see :func:`resting`.
    """

    def __init__(
        self,
        seen: Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None],
        kinds: Collection[str] = (ADD, POOL, LINEAR),
    ) -> None:
        super().__init__()
        self._seen = seen
        self.kinds = kinds

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is functional.multi_head_attention_forward
            and LINEAR in self.kinds
            and not _watchers.paused
        ):
            attention, asked = _attention()
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            before, asked.seen = getattr(asked, "seen", None), self._seen
            asked.wholes = given["in_proj_weight"], given["in_proj_bias"]
            try:
                with torch._C.DisableTorchFunction():
                    return attention(*args, **kwargs)
            finally:
                asked.seen = before
        kind = None if _watchers.paused else call_kind(func, args)
        if kind is None:
            return func(*args, **kwargs)
        changed = self._seen(kind, args)
        return (
            func(*args, **kwargs) if changed is None else call_out_of_place(func, changed, kwargs)
        )


@contextmanager
def pause_idle_watchers(model: nn.Module, counted: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Watchers rest while a module runs that makes no call of their kinds.

    A watcher sees every function of torch that is called, and to show it one takes as long as a small layer: a network
    of 53 convolutions that one pool behind them has watched runs a fifth longer. The modules get hooks for the time.

    Args:
        model: A network with quantizers.
        counted: The modules in which calls of a kind run, by kind, as traced; watchers of other kinds do not rest.
    """
    inside = {kind: frozenset(names) for kind, names in counted.items()}
    current: Any = getattr(overrides, "_get_current_function_mode", None)
    names = {id(m): n for n, m in model.named_modules()}
    rested: list[list[CallWatcher]] = []

    def quiet(module: nn.Module, kinds: Collection[str]) -> bool:
        return all(k in inside and names.get(id(module)) not in inside[k] for k in kinds)

    def enter(module: nn.Module, _: Any) -> None:
        rested.append([])
        while isinstance(watcher := current(), CallWatcher) and quiet(module, watcher.kinds):
            watcher.__exit__(None, None, None)
            rested[-1].append(watcher)

    def leave(*_: Any) -> None:
        for watcher in reversed(rested.pop()):
            watcher.__enter__()

    def outermost(module: nn.Module, kinds: Collection[str]) -> Iterator[nn.Module]:
        for child in module.children():
            yield from [child] if quiet(child, kinds) else outermost(child, kinds)

    owners: list[Any] = [m for m in model.modules() if getattr(m, "qdq_calls", None)]
    found = {id(m): m for owner in owners for m in outermost(owner, tuple(owner.qdq_expected))}
    with ExitStack() as hooks:
        for module in found.values() if current is not None else ():
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield
