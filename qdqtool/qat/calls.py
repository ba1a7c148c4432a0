"""Arguments of torch networks, and calls in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qdqtool.errors import QdqtoolError

# Position of a tensor among the arguments (such as ``argument 1``), its kind (``floats``,
# ``integers``, ``booleans`` ...) and its shape.
TensorDescription = tuple[str, str, list[int]]


@dataclass(frozen=True)
class NetworkCall:
    """Positional and keyword arguments of a network."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the arguments, in the order of the exported model's inputs."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]

    @property
    def description(self) -> list[TensorDescription]:
        """Position, kind of numbers and shape of each tensor among the arguments."""
        places = {f"argument {i + 1}": v for i, v in enumerate(self.args)}
        places |= {f"'{k}'": v for k, v in self.kwargs.items()}
        return [
            (p, _dtype_kind(v), list(v.shape)) for p, v in places.items() if isinstance(v, Tensor)
        ]

    def __str__(self) -> str:
        return ", ".join(describe_tensor(*d[1:]) for d in self.description) or "no tensor"

    def map_arguments(self, change: Callable[[Any], Any]) -> NetworkCall:
        """Return a copy in which `change` was applied to every argument."""
        kwargs = {k: change(v) for k, v in self.kwargs.items()}
        return NetworkCall(tuple(map(change, self.args)), kwargs)

    def to_device(self, device: torch.device | str) -> NetworkCall:
        """Return a copy whose tensors are detached and moved to a device."""
        return self.map_arguments(lambda v: v.detach().to(device) if isinstance(v, Tensor) else v)

    def run(
        self, module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> Any:
        """Call a module with these arguments, and return its result.

        Args:
            module: Network to call.
            device: Device to which the tensors are moved.
            dtype: Type to which floating-point tensors are converted; None keeps their types.
        """

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        call = self.map_arguments(move)
        return module(*call.args, **call.kwargs)


def describe_tensor(kind: str, shape: Sequence[int]) -> str:
    """Return the shape and kind of a tensor as text, such as ``1x3x8x8 floats``."""
    return f"{'x'.join(map(str, shape))} {kind}" if shape else f"a scalar of type {kind}"


def _dtype_kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floats"
    return "booleans" if tensor.dtype == torch.bool else "integers"


def as_call(sample: Any, expected: Sequence[TensorDescription] = ()) -> NetworkCall:
    """Convert a sample to the arguments of a network, and check the tensors.

    Args:
        sample: A tensor, a tuple of arguments or a dict of keyword arguments.
        expected: Description of the tensors in the sample given to :func:`qdqtool.qat.prepare`.
            The tensors of the new sample must have the same kinds and numbers of dimensions. If
            empty, nothing is compared.

    Raises:
        QdqtoolError: The sample has a wrong type; or a tensor is empty, contains NaN, or differs
            from `expected`.
    """
    if isinstance(sample, Tensor):
        call = NetworkCall((sample,))
    elif isinstance(sample, list | tuple):
        call = NetworkCall(tuple(sample))
    elif isinstance(sample, dict):
        call = NetworkCall((), dict(sample))
    else:
        raise QdqtoolError(
            f"`sample` is a {type(sample).__name__}; give a tensor, a tuple of the network's "
            "arguments or a dict of its keyword arguments",
            code="wrong-type",
            parameter="sample",
        )
    expected_types = {place: (kind, shape) for place, kind, shape in expected}
    for (place, kind, shape), tensor in zip(call.description, call.tensors, strict=True):
        name = f"sample, {place} ({describe_tensor(kind, shape)})"
        _check_tensor(tensor, name)
        expected_kind, expected_shape = expected_types.get(place, (kind, shape))
        if (kind, len(shape)) != (expected_kind, len(expected_shape)):
            raise QdqtoolError(
                f"{name}: the network was prepared with "
                f"{describe_tensor(expected_kind, expected_shape)}; give a tensor of this type and "
                "number of dimensions",
                code="wrong-shape",
                parameter="sample",
            )
    return call


def _check_tensor(tensor: Tensor, name: str) -> None:
    if not tensor.numel():
        raise QdqtoolError(
            f"{name}: the tensor is empty; give a size of at least 1 in each dimension",
            code="empty",
            parameter="sample",
        )
    if bool(torch.isnan(tensor).any()):
        raise QdqtoolError(
            f"{name}: the tensor contains NaN; give values like real inputs of the network",
            code="not-finite",
            parameter="sample",
        )


def find_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU if there is none."""
    first = next((t for t in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients until the context ends, then restore all modes.

    In the context, torch's fused attention for evaluation is disabled. It cannot be exported to
    ONNX, and it bypasses quantizers.
    """
    before = [(m, m.training) for m in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in before:
            module.training = training
