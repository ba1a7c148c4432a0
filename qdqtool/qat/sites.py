"""Sites: the inputs of modules and function calls where quantizers can be inserted.

A site is the data input of a convolution or linear module, or an input of a function call inside a
module. Such calls are a residual Add, an average pool, and a projection of
``nn.MultiheadAttention`` (which passes its weights to a function). Calls have no names, so they
have numbers. The n-th Add of a module is the n-th Add that runs during the module's ``forward``.
The Adds of its children count too.
"""

import inspect
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WEIGHTED_MODULES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
# Containers cannot hold quantizers, because they would run a quantizer as one of their layers.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

ADD = "add"
POOL = "pool"
LINEAR = "linear"
_ADDS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
_POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))

# Function that receives the kind and the arguments of a call, and returns new arguments or None. If
# it returns None, the arguments stay the same.
CallObserver = Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]


@dataclass(frozen=True, order=True)
class QuantizerSite:
    """Input of a module or function call where a quantizer can be inserted.

    Attributes:
        module: Qualified name of the module; an empty string for the network itself.
        kind: ``input`` (of a convolution or linear module), ``add``, ``pool`` or ``linear`` (a
            projection of attention).
        call: Number of the call among the module's calls of this kind, starting at 0.
        position: Position of the input, 0 or 1. The inputs of a projection are data and weights.
    """

    module: str
    kind: str
    call: int = 0
    position: int = 0


Site = QuantizerSite  # name in pickles of version 0.2


def call_kind(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Return ``add`` for a sum of two tensors, ``pool`` for an average pool, else None."""
    name = getattr(function, "__name__", "")
    if name in _ADDS:
        return ADD if len(args) == 2 and all(isinstance(a, Tensor) for a in args) else None
    return POOL if name in _POOLS and args and isinstance(args[0], Tensor) else None


def call_out_of_place(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function, but compute ``x + y`` instead of ``x += y``.

    `x` may be a quantized copy of a tensor. An addition in place would not change the tensor
    itself.
    """
    if getattr(function, "__name__", "") in ("add_", "__iadd__"):
        return torch.add(*args, **kwargs)
    return function(*args, **kwargs)


class _ThreadState(threading.local):
    """State of the call watchers in a thread.

    Attributes:
        paused: Whether watchers ignore calls.
        projection_observer: Observer of the projections while nn.MultiheadAttention runs; else
            None.
        packed: Packed weights and biases of the projections of the running nn.MultiheadAttention.
    """

    paused: bool = False
    projection_observer: CallObserver | None = None
    packed: tuple[Any, ...] = ()


_state = _ThreadState()


@contextmanager
def pause_watchers() -> Iterator[None]:
    """Pause the thread's call watchers in the context, for example while quantizers run."""
    before, _state.paused = _state.paused, True
    try:
        yield
    finally:
        _state.paused = before


def _project_quantized(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a projection of attention, after the observer has quantized its inputs."""
    if torch.onnx.is_in_onnx_export():
        weight, bias = _constant_rows(weight), _constant_rows(bias)
    assert _state.projection_observer is not None
    x, weight = _state.projection_observer(LINEAR, (x, weight)) or (x, weight)
    return functional.linear(x, weight, bias)


def _constant_rows(part: Any) -> Any:
    """Return a slice of a packed parameter as a slice with constant bounds.

    If the bounds are not constant, torch's exporter writes nodes that compute them at run time.
    Other tensors are returned unchanged.
    """
    for whole in _state.packed:
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor) or part is whole:
            continue
        if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the bounds become constants
                first = part.storage_offset() // int(part.stride(0))
                return whole[first : first + int(part.shape[0])]
    return part


def _copy_attention() -> Callable[..., Any]:
    """Return a copy of torch's attention function whose projections call `_project_quantized`.

    The copy is needed because a function mode of torch sees the original function as a single call,
    not its projections. The copy has the same code with other globals.
    """
    names: dict[str, Any] = {
        **vars(functional),
        "has_torch_function": lambda tensors: False,
        "linear": _project_quantized,
    }
    for name in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
        function = names[name]
        names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
    copy: Callable[..., Any] = names["multi_head_attention_forward"]
    return copy


_watched_attention = _copy_attention()


class CallWatcher(TorchFunctionMode):  # type: ignore[misc]
    """Context that intercepts the calls of Adds, average pools and projections of attention.

    Args:
        observer: See :data:`CallObserver`.
        kinds: Kinds of calls to intercept.
    """

    def __init__(
        self, observer: CallObserver, kinds: Collection[str] = (ADD, POOL, LINEAR)
    ) -> None:
        super().__init__()
        self._observer = observer
        self.kinds = kinds

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _state.paused:
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward and LINEAR in self.kinds:
            return self._run_attention(args, kwargs)
        kind = call_kind(func, args)
        replacement = None if kind is None else self._observer(kind, args)
        if replacement is None:
            return func(*args, **kwargs)
        return call_out_of_place(func, replacement, kwargs)

    def _run_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(functional.multi_head_attention_forward)
        arguments = signature.bind(*args, **kwargs).arguments
        before, _state.projection_observer = _state.projection_observer, self._observer
        _state.packed = arguments["in_proj_weight"], arguments["in_proj_bias"]
        try:
            with torch._C.DisableTorchFunction():
                return _watched_attention(*args, **kwargs)
        finally:
            _state.projection_observer = before
