"""ResNet-18 in the three placements of the published A100 engines, with pytorch-quantization's own modules."""

from __future__ import annotations

import pytest
import torch

import qdqtool
from examples import resnet
from qdqtool.qat.trace import Call, export_proto
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


def test_modelopts_own_export_is_an_input_like_any_other(sample: torch.Tensor) -> None:
    quantization = pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    model = resnet.ResNet18(10, nets.WIDTH)
    nets.randomise(model)
    quantization.quantize(model.eval(), quantization.INT8_DEFAULT_CFG, lambda network: network(sample))
    proto = export_proto(model, Call((sample,)), 17)
    assert "BatchNormalization" in {n.op_type for n in proto.graph.node}  # unfolded, and scales are Constant nodes
    prediction = qdqtool.predict(proto, "trt8.5")
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"], summary["float"]) == (21, 21, 0)
    # Each block's first convolution, and the stem, whose MaxPool ModelOpt quantizes; the skips are float.
    outputs = {c.name: c.int8_in_int8_out for c in prediction.convolutions}
    assert {n for n, both in outputs.items() if both} == {"/conv1/Conv"} | {
        f"/layer{stage}/layer{stage}.{block}/conv1/Conv" for stage in (1, 2, 3, 4) for block in (0, 1)
    }
    with pytest.raises(AssertionError, match="SKIP-FLOAT"):
        assert_int8(proto, "trt8.5", max_conversions=1)


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
