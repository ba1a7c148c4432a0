from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch

from qdqtool.errors import QdqtoolError
from qdqtool.qat.amax import amax_of, set_amax
from qdqtool.qat.backends import backend_named
from tests.qat.backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_values_and_gradients_are_those_of_int8(backend: str, axis: int | None) -> None:
    quantizer = backend_named(backend).make(axis)
    x = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    amax = torch.tensor(1.5)
    if axis is not None:
        shape = [1, 1, 1, 1]
        shape[axis] = x.shape[axis]
        amax = torch.linspace(0.5, 2.0, x.shape[axis]).reshape(shape)
    assert amax_of(quantizer) is None
    set_amax(quantizer, amax)
    result = quantizer(x)
    result.sum().backward()
    step = amax / 127
    expected = (x.detach() / step).round().clamp(-128, 127) * step
    assert torch.allclose(result.detach(), expected, atol=1e-5)
    assert x.grad is not None
    # The straight-through estimator: one inside the range, nothing from what was clipped.
    assert torch.equal(x.grad, (x.detach().abs() <= amax).float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_range_weights_follow_their_maximum(backend: str) -> None:
    quantizer = backend_named(backend).make(0)
    for scale in (1.0, 3.0):
        x = torch.randn(4, 6, 3, 3) * scale
        step = x.abs().amax((1, 2, 3), keepdim=True) / 127
        assert torch.allclose(quantizer(x), (x / step).round() * step, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["pytorch-quantization", "modelopt"])
def test_a_missing_backend_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room = f"qdqtool.qat.quantizer_{'modelopt' if name == 'modelopt' else 'pytorch'}"
    monkeypatch.delitem(sys.modules, room, raising=False)
    import qdqtool.qat

    monkeypatch.delattr(qdqtool.qat, room.rpartition(".")[2], raising=False)
    honest = builtins.__import__

    def blocked(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] in ("modelopt", "pytorch_quantization"):
            raise ImportError(f"No module named '{module}'")
        return honest(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(QdqtoolError, match=r"cannot be imported .*pip install 'qdqtool\[qat\]'"):
        backend_named(name)
