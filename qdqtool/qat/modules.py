"""Modules that quantize: the network's own classes, with quantizers in front of what they compute.

A module becomes an instance of a class of the same name that is derived from its own. Class names, parameters and
state-dict keys stay as they are; only the quantizers' own come on top.
"""

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.scales import LEVELS, weight_scale
from qdqtool.qat.networks import (
    align_with_outputs,
    guard_ultralytics,
    norm_factor,
    override_attributes,
)
from qdqtool.qat.sites import LINEAR, WEIGHTED_MODULES, CallWatcher, pause_watchers

_REPLACED = "_qdq_weight_replaced"
_UNCALIBRATED = (
    "an activation quantizer has no range yet and takes each batch's own maximum, which is not what TensorRT does; "
    "call qdqtool.qat.calibrate before training and evaluation"
)
Observer = Callable[[nn.Module, str, Tensor], None]
Watcher = Callable[[nn.Module, str, Tensor, Tensor], None]


class _ThreadState(threading.local):
    observer: Observer | None = None
    watcher: Watcher | None = None


_state = _ThreadState()


def observe_activations(observer: Observer) -> AbstractContextManager[None]:
    """Activations are shown to ``observer`` (module, quantizer's attribute, tensor) and nothing is quantized."""
    return override_attributes(_state, observer=observer)


def observe_quantizers(watcher: Watcher) -> AbstractContextManager[None]:
    """Shows ``watcher`` each quantizer of activations that runs: module, attribute, values before and after."""
    return override_attributes(_state, watcher=watcher)


def _quantize(module: nn.Module, attribute: str, value: Tensor, *, weight: bool = False) -> Any:
    observer = _state.observer
    if observer is not None:
        if not weight:
            with (
                torch._C.DisableTorchFunction()
            ):  # nothing is to be watched here, and watching costs time
                observer(module, attribute, value)
        return value
    if attribute in module.qdq_off:
        return value
    quantizer = getattr(module, attribute)
    if (
        not weight
        and isinstance(quantizer, Int8Mixin)
        and read_amax(quantizer) is None
        and not is_collecting(quantizer)
    ):
        warnings.warn(_UNCALIBRATED, UserWarning, stacklevel=4)
    with pause_watchers():
        result = quantizer(value)
        if _state.watcher is not None and not weight:
            _state.watcher(module, attribute, value, result)
    return result


class QuantizedModule:
    """Mixed into a module's class; see :func:`make_quantizing`.

    Attributes:
        qdq_input: Attribute that holds the quantizer of the data input; None for a module without.
        qdq_weight: The same of the weights.
        qdq_calls: From kind of call, number of the call and input to the attribute that holds its quantizer.
        qdq_expected: How many calls of a kind run inside.
        qdq_off: Attributes whose quantizers let everything through, see :mod:`qdqtool.qat.switching`.
        qdq_norm: Where the BatchNormalization behind the module is, as a module and the name of a child, for weights
            that have one scale for all channels.
    """

    qdq_input: str | None = None
    qdq_weight: str | None = None
    qdq_calls: Mapping[tuple[str, int, int], str] = MappingProxyType({})
    qdq_expected: Mapping[str, int] = MappingProxyType({})
    qdq_off: frozenset[str] = frozenset()
    qdq_norm: tuple[nn.Module, str] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        if self.qdq_input is not None:
            args = (_quantize(module, self.qdq_input, args[0]), *args[1:])
        if self.qdq_weight is None:
            forward = self._with_calls if self.qdq_calls else super().forward  # type: ignore[misc]
            return forward(*args, **kwargs)
        # The weights are quantized once, when forward asks for them; outside of forward they are the float ones.
        self.__dict__["_qdq_running"] = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["_qdq_running"]

    def _with_calls(self, *args: Any, **kwargs: Any) -> Any:
        counts: Counter[str] = Counter()

        def seen(kind: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
            call = counts[kind]
            counts[kind] += 1
            changed = list(values)
            found = False
            for position in range(min(2, len(values))):
                attribute = self.qdq_calls.get((kind, call, position))
                if attribute is not None:
                    weight = is_weight_input(kind, position)
                    changed[position] = _quantize(self, attribute, values[position], weight=weight)
                    found = True
            return tuple(changed) if found else None

        with CallWatcher(seen, tuple(self.qdq_expected)):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        for kind, expected in self.qdq_expected.items():
            if counts[kind] != expected:
                raise QdqtoolError(
                    f"{type(self).__name__}: {counts[kind]} calls of kind '{kind}' ran, {expected} when it was "
                    "prepared, so that its quantizers would be at other places; exclude it, or make the number fixed",
                    code="calls-changed",
                )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        order = type(self).__mro__
        return _rebuild, (order[order.index(QuantizedModule) + 1],), self.__dict__


class QuantizedWeightModule(QuantizedModule):
    """The same for a class with weights."""

    @property
    def weight(self) -> Any:
        module: Any = self
        # Copies for several GPUs (DataParallel) have plain tensors where the module has parameters.
        value = (
            module._parameters["weight"]
            if "weight" in module._parameters
            else module.__dict__[_REPLACED]
        )
        if self.qdq_weight is None or "_qdq_running" not in self.__dict__:
            return value
        try:
            factor = export_norm_factor(self)
            if factor is None:
                return _quantize(module, self.qdq_weight, value, weight=True)
            # What the export quantizes are the weights times the factors of the BatchNormalization behind them. One
            # scale for all channels does not go with factors that differ, so that these are on when it is applied.
            factor = factor.to(value)
            folded = _quantize(module, self.qdq_weight, value * factor, weight=True)
            return folded / torch.where(factor == 0, 1, factor)
        except (
            AttributeError
        ) as error:  # would make Python ask nn.Module, which returns the float weights
            raise RuntimeError(f"the weights' quantizer failed: {error}") from error

    @weight.setter
    def weight(self, value: Any) -> None:
        self.__dict__[_REPLACED] = (
            value  # parameters do not come here: nn.Module.__setattr__ takes them
        )


def export_norm_factor(module: Any) -> Tensor | None:
    """What weights with one scale are multiplied by when they are quantized, in a shape that fits them.

    None for others, and where the BatchNormalization is gone (somebody folded it).
    """
    if module.qdq_norm is None:
        return None
    parent, name = module.qdq_norm
    factor = norm_factor(parent._modules.get(name))
    return None if factor is None else align_with_outputs(module, factor)


@functools.cache
def _derive_class(base: type) -> type:
    mixin = QuantizedWeightModule if issubclass(base, WEIGHTED_MODULES) else QuantizedModule
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (mixin, base), names)


def _rebuild(base: type) -> object:
    """A module out of a pickle or a copy."""
    guard_ultralytics()
    made: Any = _derive_class(base)
    return made.__new__(made)


def make_quantized(module: nn.Module) -> QuantizedModule:
    """Turns a module into one that quantizes, in place; it has no quantizers yet."""
    own: Any = type(module)
    if not issubclass(own, QuantizedModule):
        module.__class__ = _derive_class(own)
    assert isinstance(module, QuantizedModule)
    return module


def is_weight_input(kind: str, position: int) -> bool:
    """Whether an input of a call is weights: those of an attention's projections."""
    return kind == LINEAR and position == 1


class QuantizerReference(NamedTuple):
    """A quantizer of a network: the module that has it, with its qualified name, and the module's attribute."""

    owner: str
    module: Any
    attribute: str
    is_weight: bool

    @property
    def name(self) -> str:
        """``<module>.<attribute>``."""
        return f"{self.owner}.{self.attribute}".lstrip(".")

    @property
    def quantizer(self) -> Any:
        """The backend's module."""
        return getattr(self.module, self.attribute)


def find_quantizers(model: nn.Module) -> Iterator[QuantizerReference]:
    """Every quantizer of a network, in the order of its modules."""
    for owner, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            if module.qdq_input is not None:
                yield QuantizerReference(owner, module, module.qdq_input, False)
            for (kind, _, position), attribute in module.qdq_calls.items():
                yield QuantizerReference(owner, module, attribute, is_weight_input(kind, position))
            if module.qdq_weight is not None:
                yield QuantizerReference(owner, module, module.qdq_weight, True)


def find_uncalibrated(model: nn.Module) -> list[str]:
    """The quantizers of activations that have no range yet."""
    return [
        q.name for q in find_quantizers(model) if not q.is_weight and read_amax(q.quantizer) is None
    ]


class ExportQuantizer(nn.Module):  # type: ignore[misc]
    """Fake quantization that torch exports as a Q/DQ pair.

    Args:
        scale: Scalar, or [channels], in units of the tensor per integer step; None for that of the largest magnitudes
            of the (constant) values.
        axis: The channel axis; None for a scalar scale.
        mark: Called with the values first; what it returns is quantized.
    """

    def __init__(
        self, scale: Tensor | None, axis: int | None, mark: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.axis, self.mark = axis, mark
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        if scale is None:
            scale = torch.from_numpy(
                np.array(weight_scale(x.detach().cpu().numpy(), self.axis))
            ).to(x.device)
        return fake_quantize(x if self.mark is None else self.mark(x), scale, self.axis)


# What the quantizers of all backends have in common: their range, and what is said of them to torch's exporter ------


TINY = torch.finfo(torch.float32).tiny


def read_amax(quantizer: nn.Module) -> Tensor | None:
    """The range of a quantizer, None before it was calibrated; both backends keep it in the same buffer."""
    amax = quantizer._buffers.get("_amax")
    return None if amax is None else amax.detach()


def set_amax(quantizer: nn.Module, amax: Tensor) -> None:
    """Sets the range, on the device of ``amax``, whatever shape it had before."""
    quantizer.register_buffer("_amax", amax.detach().clone())


def is_collecting(quantizer: nn.Module) -> bool:
    """Whether a calibrator of the backend's own is looking at the values now."""
    return bool(getattr(quantizer, "_if_calib", False))


class Int8Mixin:
    """Mixed into a backend's quantizer.

    * A state dict with an amax loads into a network that was only prepared: pytorch-quantization moves such an amax
      to CUDA even where there is none, ModelOpt refuses it as unexpected.
    * ``torch.onnx.export`` writes a Q/DQ pair for it, whoever calls it.

    Attributes:
        qdq_axis: The channel axis, None for one amax.
    """

    qdq_axis: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            module: Any = self
            if getattr(module, "_disabled", False):
                return x
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # torch's tracer warns of constants, and a constant is what is wanted
                scale = torch.from_numpy(
                    np.array(compute_scale(module, x).detach().cpu().numpy())
                ).to(x.device)
                return fake_quantize(x, scale, self.qdq_axis)
        result: Tensor = super().forward(x)  # type: ignore[misc]
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        module: Any = self
        loaded, present = state_dict.get(f"{prefix}_amax"), module._buffers.get("_amax")
        if isinstance(loaded, Tensor) and (present is None or present.shape != loaded.shape):
            device = loaded.device if present is None else present.device
            module.register_buffer("_amax", torch.zeros_like(loaded, device=device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def compute_scale(quantizer: Any, x: Tensor) -> Tensor:
    """The scale, [] or [channels]: that of the range, or of the values themselves where none was set (weights)."""
    amax = read_amax(quantizer)
    if amax is None:
        axis = quantizer.qdq_axis
        others = [i for i in range(x.ndim) if i != axis]
        amax = x.detach().abs().amax(others) if axis is not None else x.detach().abs().amax()
    scale = amax.double().reshape(() if quantizer.qdq_axis is None else (-1,)) / LEVELS
    return scale.float().clamp_min(TINY)


def fake_quantize(x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """Rounding to INT8 and back, which torch exports as a Q/DQ pair."""
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -128, 127)
    scale = scale.float()  # also where the network runs in double precision
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, -128, 127)
