"""Torch modules with quantizers.

The class of a module is replaced by a subclass of the same name. Parameters and keys of the state
dict stay the same. Quantizers add keys.
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
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.insertion.scales import weight_scale
from qdqtool.qat.batch_norms import align_with_outputs, norm_factor
from qdqtool.qat.networks import override_attributes
from qdqtool.qat.sites import LINEAR, WEIGHTED_MODULES, CallWatcher, pause_watchers
from qdqtool.qat.ultralytics_guard import guard_ultralytics

TINY = torch.finfo(torch.float32).tiny
_REPLACED = "_qdq_weight_replaced"
_UNCALIBRATED = (
    "an activation quantizer has no range yet and uses the maximum of each batch, "
    "unlike TensorRT; call qdqtool.qat.calibrate before training and evaluation"
)
ActivationObserver = Callable[[nn.Module, str, Tensor], None]
QuantizerObserver = Callable[[nn.Module, str, Tensor, Tensor], None]


class _ObserverState(threading.local):
    activations: ActivationObserver | None = None
    quantizers: QuantizerObserver | None = None


_observers = _ObserverState()


def observe_activations(observer: ActivationObserver) -> AbstractContextManager[None]:
    """Return a context in which quantizers are off and an observer receives their inputs.

    Args:
        observer: Function that receives the module, the name of the quantizer's attribute, and the
            input of the quantizer. Quantizers of weights are not observed.
    """
    return override_attributes(_observers, activations=observer)


def observe_quantizers(observer: QuantizerObserver) -> AbstractContextManager[None]:
    """Return a context in which an observer receives the inputs and outputs of quantizers.

    Args:
        observer: Function that receives the module, the name of the quantizer's attribute, and the
            input and output of the quantizer. Quantizers of weights are not observed.
    """
    return override_attributes(_observers, quantizers=observer)


def _run_quantizer(module: Any, attribute: str, value: Tensor, *, is_weight: bool = False) -> Any:
    if _observers.activations is not None:
        if not is_weight:
            with torch._C.DisableTorchFunction():  # the observer's own calls are not observed
                _observers.activations(module, attribute, value)
        return value
    if attribute in module.qdq_off:
        return value
    quantizer = getattr(module, attribute)
    if (
        not is_weight
        and isinstance(quantizer, Int8Mixin)
        and read_amax(quantizer) is None
        and not is_collecting(quantizer)
    ):
        warnings.warn(_UNCALIBRATED, UserWarning, stacklevel=4)
    with pause_watchers():
        result = quantizer(value)
        if _observers.quantizers is not None and not is_weight:
            _observers.quantizers(module, attribute, value, result)
    return result


class QuantizedModule:
    """Mixin for classes of modules with quantizers, see :func:`convert_to_quantized_module`.

    Attributes:
        qdq_input: Attribute that holds the quantizer of the data input; None without a quantizer.
        qdq_weight: Attribute that holds the quantizer of the weights; None without a quantizer.
        qdq_calls: By kind of call, number of the call and position of an input: the attribute that
            holds the quantizer of this input.
        qdq_expected: Number of calls that must run inside the module, by kind of call.
        qdq_off: Attributes of disabled quantizers, see :mod:`qdqtool.qat.switching`.
        qdq_norm: Parent and attribute of the BatchNormalization after the module, if the weights
            have one scale for all channels; else None.
    """

    qdq_input: str | None = None
    qdq_weight: str | None = None
    qdq_calls: Mapping[tuple[str, int, int], str] = MappingProxyType({})
    qdq_expected: Mapping[str, int] = MappingProxyType({})
    qdq_off: frozenset[str] = frozenset()
    qdq_norm: tuple[nn.Module, str] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original `forward` with quantized data, weights and inputs of calls."""
        if self.qdq_input is not None:
            args = (_run_quantizer(self, self.qdq_input, args[0]), *args[1:])
        if self.qdq_weight is None and self.qdq_calls:
            return self._forward_with_calls(*args, **kwargs)
        if self.qdq_weight is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        # During forward, `weight` returns quantized weights; otherwise it returns float weights.
        self.__dict__["_qdq_running"] = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["_qdq_running"]

    def _forward_with_calls(self, *args: Any, **kwargs: Any) -> Any:
        counts: Counter[str] = Counter()

        def quantize_inputs(kind: str, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            call = counts[kind]
            counts[kind] += 1
            attributes = [self.qdq_calls.get((kind, call, position)) for position in (0, 1)]
            if attributes == [None, None]:
                return None
            quantized = list(inputs)
            for position, attribute in enumerate(attributes):
                if attribute is not None:
                    is_weight = is_weight_input(kind, position)
                    value = inputs[position]
                    quantized[position] = _run_quantizer(
                        self, attribute, value, is_weight=is_weight
                    )
            return tuple(quantized)

        with CallWatcher(quantize_inputs, tuple(self.qdq_expected)):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        for kind, expected in self.qdq_expected.items():
            if counts[kind] != expected:
                raise QdqtoolError(
                    f"{type(self).__name__}: {counts[kind]} calls of kind '{kind}' ran, but there "
                    f"were {expected} in the preparation, so quantizers cannot be assigned to "
                    "calls; exclude this module, or make the number of calls constant",
                    code="calls-changed",
                )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        order = type(self).__mro__
        return _rebuild_module, (order[order.index(QuantizedModule) + 1],), self.__dict__


class QuantizedWeightModule(QuantizedModule):
    """Mixin for the class of a module with weights."""

    @property
    def weight(self) -> Any:
        """The weights, quantized while the module runs."""
        module: Any = self
        # Replicas of DataParallel have plain tensors instead of parameters.
        value = (
            module._parameters["weight"]
            if "weight" in module._parameters
            else module.__dict__[_REPLACED]
        )
        if self.qdq_weight is None or "_qdq_running" not in self.__dict__:
            return value
        try:
            factor = following_norm_factor(self)
            if factor is None:
                return _run_quantizer(module, self.qdq_weight, value, is_weight=True)
            # The export folds BatchNormalization into the weights and then quantizes the weights. A
            # scale for all channels depends on the factors of the channels, so training must apply
            # the factors.
            factor = factor.to(value)
            folded = _run_quantizer(module, self.qdq_weight, value * factor, is_weight=True)
            return folded / torch.where(factor == 0, 1, factor)
        except AttributeError as error:
            # After an AttributeError in this property, nn.Module would return the float weights.
            raise RuntimeError(f"the weights' quantizer failed: {error}") from error

    @weight.setter
    def weight(self, value: Any) -> None:
        # The value is a plain tensor, because nn.Module.__setattr__ sets parameters itself.
        self.__dict__[_REPLACED] = value


def following_norm_factor(module: Any) -> Tensor | None:
    """Return the factors of the following BatchNormalization, shaped to multiply the weights.

    Returns:
        The factors. None if no BatchNormalization follows or it is folded already, or if the
        weights have one scale for each channel.
    """
    if module.qdq_norm is None:
        return None
    parent, name = module.qdq_norm
    factor = norm_factor(parent._modules.get(name))
    return None if factor is None else align_with_outputs(module, factor)


@functools.cache
def _derive_quantized_class(base: type) -> type:
    mixin = QuantizedWeightModule if issubclass(base, WEIGHTED_MODULES) else QuantizedModule
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (mixin, base), names)


def _rebuild_module(base: type) -> object:
    """Create an empty quantized module. pickle and copy set its attributes afterwards."""
    guard_ultralytics()
    derived: Any = _derive_quantized_class(base)
    return derived.__new__(derived)


_rebuilt = _rebuild_module  # name in pickles of version 0.2


def convert_to_quantized_module(module: nn.Module) -> QuantizedModule:
    """Change the class of a module, in place, to a subclass that can hold quantizers.

    The module remains the same object, so references from optimizers, hooks and other modules stay
    valid. The new class has the name of the old class and derives from the old class and
    :class:`QuantizedModule`. Copies and pickles create the subclass again.
    """
    own: Any = type(module)
    if not issubclass(own, QuantizedModule):
        module.__class__ = _derive_quantized_class(own)
    assert isinstance(module, QuantizedModule)
    return module


def is_weight_input(kind: str, position: int) -> bool:
    """Return whether an input of a call is the weights of an attention's projection."""
    return kind == LINEAR and position == 1


class QuantizerReference(NamedTuple):
    """A quantizer of a network and the module that holds the quantizer.

    Attributes:
        owner: Qualified name of the module.
        module: Module with the quantizer.
        attribute: Attribute of the module that holds the quantizer.
        is_weight: Whether it is a quantizer of weights.
    """

    owner: str
    module: Any
    attribute: str
    is_weight: bool

    @property
    def name(self) -> str:
        """Name of the quantizer: ``<module>.<attribute>``."""
        return f"{self.owner}.{self.attribute}".lstrip(".")

    @property
    def quantizer(self) -> Any:
        """Quantizer module of the backend."""
        return getattr(self.module, self.attribute)


def find_quantizers(model: nn.Module) -> Iterator[QuantizerReference]:
    """Yield every attribute that holds a quantizer, in the order of the network's modules."""
    for owner, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            if module.qdq_input is not None:
                yield QuantizerReference(owner, module, module.qdq_input, False)
            for (kind, _, position), attribute in module.qdq_calls.items():
                yield QuantizerReference(owner, module, attribute, is_weight_input(kind, position))
            if module.qdq_weight is not None:
                yield QuantizerReference(owner, module, module.qdq_weight, True)


def find_uncalibrated(model: nn.Module) -> list[str]:
    """Return the names of the activation quantizers that have no range yet."""
    activations = (q for q in find_quantizers(model) if not q.is_weight)
    return [q.name for q in activations if read_amax(q.quantizer) is None]


class ExportQuantizer(nn.Module):  # type: ignore[misc]
    """Fake quantization that torch exports as a Q/DQ pair.

    Args:
        scale: Scale of shape [] or [channels]. None: the scale is computed from the largest
            magnitudes of the values, which must be constant.
        axis: Channel axis; None for a scalar scale.
        mark: Function that is applied to the values before quantization; None for no function.
    """

    def __init__(
        self, scale: Tensor | None, axis: int | None, mark: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.axis, self.mark = axis, mark
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Quantize and dequantize a tensor."""
        scale: Any = self.scale
        if scale is None:
            array = np.array(weight_scale(x.detach().cpu().numpy(), self.axis))
            scale = torch.from_numpy(array).to(x.device)
        return fake_quantize(x if self.mark is None else self.mark(x), scale, self.axis)


# Common parts of the quantizers of all backends: their range, and their export --------------------


def read_amax(quantizer: nn.Module) -> Tensor | None:
    """Return the range (amax) of a quantizer; None before the calibration.

    Both backends store the range in the buffer ``_amax``.
    """
    amax = quantizer._buffers.get("_amax")
    return None if amax is None else amax.detach()


def set_amax(quantizer: nn.Module, amax: Tensor) -> None:
    """Set the range of a quantizer to a copy of `amax`, on the same device as `amax`."""
    quantizer.register_buffer("_amax", amax.detach().clone())


def is_collecting(quantizer: nn.Module) -> bool:
    """Return whether the backend's own calibrator is collecting values."""
    return bool(getattr(quantizer, "_if_calib", False))


class Int8Mixin:
    """Mixin that changes two things in a backend's quantizer.

    * A state dict with ranges can be loaded into a network without ranges. The original quantizers
      fail: pytorch-quantization moves ranges to CUDA even without a GPU, and ModelOpt rejects
      unknown keys.
    * ``torch.onnx.export`` writes a Q/DQ pair for the quantizer, unless it is disabled.

    Attributes:
        qdq_axis: Channel axis; None for one range for all channels.
    """

    qdq_axis: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the backend's forward, or write a Q/DQ pair in an export to ONNX."""
        module: Any = self
        if not torch.onnx.is_in_onnx_export():
            result: Tensor = super().forward(x)  # type: ignore[misc]
            return result
        if getattr(module, "_disabled", False):
            return x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the scale becomes a constant
            array = np.array(compute_scale(module, x).detach().cpu().numpy())
            return fake_quantize(x, torch.from_numpy(array).to(x.device), self.qdq_axis)

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
    """Return the INT8 scale of a quantizer, of shape [] or [channels].

    The scale is computed from the range of the quantizer, or from the magnitudes in `x` if the
    quantizer has no range.
    """
    amax, axis = read_amax(quantizer), quantizer.qdq_axis
    if amax is None:
        magnitudes = x.detach().abs()
        other_axes = [i for i in range(x.ndim) if i != axis]
        amax = magnitudes.amax() if axis is None else magnitudes.amax(other_axes)
    scale = amax.double().reshape(() if axis is None else (-1,)) / LEVELS
    return scale.float().clamp_min(TINY)


def fake_quantize(x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """Quantize a tensor to INT8 and dequantize it. torch exports this as a Q/DQ pair."""
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -128, 127)
    scale = scale.float()  # torch requires a float32 scale even for a network in double precision
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, -128, 127)
