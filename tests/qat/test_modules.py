from __future__ import annotations

import pytest
import torch
from torch import nn

from qdqtool import qat
from qdqtool.qat.modules import ExportQuantizer, observing, quantizers_of
from tests.qat import nets

X = torch.randn(1, 16, 8, 8)


def test_a_failing_quantizer_of_weights_is_an_error_and_not_a_float_convolution() -> None:
    model = nn.Sequential(nets.conv())
    qat.prepare(model, X, report=None)

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AttributeError("amax")

    model[0]._weight_quantizer = Failing()
    with pytest.raises(RuntimeError, match="the weights' quantizer failed: amax"):
        model(X)


def test_weights_can_be_replaced() -> None:
    model = nn.Sequential(nets.conv())
    qat.prepare(model, X, report=None)
    model[0].weight = nn.Parameter(torch.zeros(16, 16, 3, 3))
    assert torch.equal(model(X), model[0].bias.reshape(1, -1, 1, 1).expand(1, 16, 8, 8))
    assert "0.weight" in dict(model.named_parameters())


def test_a_convolution_of_ones_own_keeps_its_behaviour() -> None:
    class Scaled(nn.Conv2d):
        """Standardizes its weights."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(x, weight, self.bias)

    model = nn.Sequential(Scaled(16, 16, 3, padding=1), nn.ReLU(), nets.conv())
    with torch.no_grad():
        wanted = model(X)
        qat.prepare(model, X, report=None)
        assert type(model[0]).__name__ == "Scaled" and isinstance(model[0], Scaled)
        found = model(X)
    assert 0 < (found - wanted).abs().max() < 0.1 * wanted.std() + 0.05


def test_observers_see_activations_and_nothing_is_quantized() -> None:
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    with torch.no_grad():
        wanted = model(X)
        qat.prepare(model, X, report=None)
        seen: list[torch.Tensor] = []
        with observing(lambda module, attribute, value: seen.append(value)):
            assert torch.equal(model(X), wanted)
    assert len(seen) == 2 and torch.equal(seen[0], X)
    assert [weight for _, _, weight in quantizers_of(model)] == [False, True, False, True]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_exported_quantizer_rounds_to_integers(axis: int | None) -> None:
    values = torch.tensor([[-3.0, -0.26, 0.0], [0.74, 1.3, 400.0]])
    scale = torch.tensor(0.5) if axis is None else torch.tensor([0.5, 0.25, 0.125][: values.shape[axis]])
    along = scale if axis is None else scale.reshape([-1, 1] if axis == 0 else [1, -1])
    expected = (values / along).round().clamp(-128, 127) * along
    assert torch.equal(ExportQuantizer(scale, axis)(values), expected)


def test_copies_with_plain_tensors_for_parameters_work() -> None:
    model = nn.Sequential(nets.conv())
    qat.prepare(model, X, report=None)
    replica = model[0]._replicate_for_data_parallel()
    for name, parameter in model[0]._parameters.items():
        setattr(replica, name, parameter.detach() * 1.0)  # as torch.nn.parallel.replicate does
    with torch.no_grad():
        assert torch.equal(replica(X), model(X))
