"""What both backends' quantizers have in common: their range, and what is said of them to torch's exporter."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LEVELS = 127  # symmetric INT8: the scale is amax / 127, in units of the tensor per integer step
_TINY = torch.finfo(torch.float32).tiny


def amax_of(quantizer: nn.Module) -> Tensor | None:
    """The range of a quantizer, None before it was calibrated; both backends keep it in the same buffer."""
    amax = quantizer._buffers.get("_amax")
    return None if amax is None else amax.detach()


def set_amax(quantizer: nn.Module, amax: Tensor) -> None:
    """Sets the range, on the device of ``amax``, whatever shape it had before."""
    quantizer.register_buffer("_amax", amax.detach().clone())


def collecting(quantizer: nn.Module) -> bool:
    """Whether a calibrator of the backend's own is looking at the values now."""
    return bool(getattr(quantizer, "_if_calib", False))


class Int8:
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
                warnings.simplefilter("ignore")  # torch's tracer warns of constants, and a constant is what is wanted
                scale = torch.from_numpy(np.array(scale_of(module, x).detach().cpu().numpy())).to(x.device)
                return fake_quantized(x, scale, self.qdq_axis)
        result: Tensor = super().forward(x)  # type: ignore[misc]
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        module: Any = self
        loaded = state_dict.get(f"{prefix}_amax")
        if isinstance(loaded, Tensor):
            present = module._buffers.get("_amax")
            if present is None or present.shape != loaded.shape:
                device = present.device if present is not None else loaded.device
                module.register_buffer("_amax", torch.zeros_like(loaded, device=device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def scale_of(quantizer: Any, x: Tensor) -> Tensor:
    """The scale, [] or [channels]: that of the range, or of the values themselves where none was set (weights)."""
    amax = amax_of(quantizer)
    if amax is None:
        axis = quantizer.qdq_axis
        others = [i for i in range(x.ndim) if i != axis]
        amax = x.detach().abs().amax(others) if axis is not None else x.detach().abs().amax()
    scale = amax.double().reshape(() if quantizer.qdq_axis is None else (-1,)) / LEVELS
    return scale.float().clamp_min(_TINY)


def fake_quantized(x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """Rounding to INT8 and back, which torch exports as a Q/DQ pair."""
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -128, 127)
    scale = scale.float()  # also where the network runs in double precision
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, -128, 127)
