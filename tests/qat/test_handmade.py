"""ResNet-18 in the three placements of the published A100 engines, with pytorch-quantization's own modules."""

from __future__ import annotations

import pytest
import torch

import qdqtool
from qdqtool.testing import assert_int8
from tests.qat import nets

# What the published engines hold (8, 12 + 7, 12 + 8 INT8 in and out), and their conversions.
PUBLISHED = {"convolutions": (8, 10), "residual": (19, 3), "pool": (20, 1)}


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    return torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("placement", PUBLISHED)
@pytest.mark.parametrize("opset", [13, 17])
def test_resnet18_is_predicted_as_the_published_engines(placement: str, opset: int, sample: torch.Tensor) -> None:
    model = nets.handmade(placement)
    nets.max_calibrate(model, sample)
    summary = qdqtool.predict(nets.raw_export(model, sample, opset), target="trt8.5").summary()
    int8_to_int8, conversions = PUBLISHED[placement]
    assert summary == {
        "convolutions": 21,
        "int8": 21,
        "int8_to_int8": int8_to_int8,
        "int8_to_float": 21 - int8_to_int8,
        "float": 0,
        "conversions": conversions,
    }


def test_assert_int8_names_the_skip_and_its_fix(sample: torch.Tensor) -> None:
    model = nets.handmade("convolutions")
    nets.max_calibrate(model, sample)
    proto = nets.raw_export(model, sample)
    assert_int8(proto, "trt8.5")
    with pytest.raises(AssertionError) as caught:
        assert_int8(proto, "trt8.5", max_conversions=1)
    message = str(caught.value)
    assert "10 conversions stay, 1 allowed" in message
    assert "SKIP-FLOAT" in message and "fix:" in message
