"""The two backends behind one interface: whose quantizer module, under which attribute names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdqtool.errors import QdqtoolError


@dataclass(frozen=True)
class Backend:
    """What differs between backends.

    Attributes:
        name: As the user writes it.
        prefix: In front of attribute names: pytorch-quantization's have an underscore (``_input_quantizer``).
        make: A quantizer for symmetric INT8; the argument is the channel axis, None for one amax.
    """

    name: str
    prefix: str
    make: Callable[[int | None], nn.Module]


def backend_named(name: str) -> Backend:
    """The backend of that name.

    Raises:
        QdqtoolError: It is not installed.
    """
    try:
        if name == "modelopt":
            from qdqtool.qat import quantizer_modelopt

            return Backend(name, "", quantizer_modelopt.make)
        from qdqtool.qat import quantizer_pytorch

        return Backend(name, "_", quantizer_pytorch.make)
    except ImportError as error:
        raise QdqtoolError(
            f"backend='{name}' cannot be imported ({str(error).splitlines()[0]}); pip install 'qdqtool[qat]'"
        ) from error


def amax_of(quantizer: nn.Module) -> Tensor | None:
    """The range of a quantizer, None before it was calibrated; both backends keep it in the same buffer."""
    amax = quantizer._buffers.get("_amax")
    return None if amax is None else amax.detach()


def set_amax(quantizer: nn.Module, amax: Tensor) -> None:
    """Sets the range, on the device of ``amax``, whatever shape it had before."""
    quantizer.register_buffer("_amax", amax.detach().clone())


class LoadsAmax:
    """Mixed into a backend's quantizer: a state dict with an amax loads into a network that was only prepared.

    pytorch-quantization moves such an amax to CUDA even where there is none, ModelOpt refuses it as unexpected.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        module: Any = self
        loaded = state_dict.get(f"{prefix}_amax")
        if isinstance(loaded, Tensor):
            present = module._buffers.get("_amax")
            if present is None or present.shape != loaded.shape:
                device = present.device if present is not None else loaded.device
                module.register_buffer("_amax", torch.zeros_like(loaded, device=device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]
