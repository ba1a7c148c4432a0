from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import QdqtoolError
from tests.qat import nets
from tests.qat.backends import BACKENDS

SAMPLE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def _ready(backend: str = "pytorch-quantization") -> nn.Module:
    model = ResNet18(10, nets.WIDTH)
    nets.randomise(model)
    qat.prepare(model, SAMPLE, backend=backend, report=None)
    qat.calibrate(model, [SAMPLE])
    return model.eval()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_plain_data_and_restores_everything(backend: str, tmp_path: Path) -> None:
    model = _ready(backend)
    qat.disable(model, "layer2")
    torch.save(qat.checkpoint(model), tmp_path / "qat.pt")
    saved = torch.load(tmp_path / "qat.pt", weights_only=True)
    for other in (ResNet18(10, nets.WIDTH), _ready(backend)):
        plan = qat.restore(other, saved)
        assert plan == qat.preparation.plan_of(model)
        with torch.no_grad():
            assert torch.equal(other.eval()(SAMPLE), model(SAMPLE))
    qat.enable(other)
    assert qat.export(other, tmp_path / "q.onnx", SAMPLE).summary["conversions"] == 1


def test_other_networks_and_plans_are_told(tmp_path: Path) -> None:
    model = _ready()
    saved = qat.checkpoint(model)
    with pytest.raises(QdqtoolError, match="is of another network"):
        qat.restore(nets.Shared(), saved)
    other = ResNet18(10, nets.WIDTH)
    qat.prepare(other, SAMPLE, exclude=["layer1"], report=None)
    with pytest.raises(QdqtoolError, match=r"plan has other quantizers .* restore it into the float network"):
        qat.restore(other, saved)
    with pytest.raises(QdqtoolError, match=r"it is of another (network or )?plan"):
        qat.restore(other, model.state_dict())
    with pytest.raises(QdqtoolError, match="says nothing of the plan"):
        qat.restore(ResNet18(10, nets.WIDTH), model.state_dict())
    wide = ResNet18(10, 2 * nets.WIDTH)
    with pytest.raises(QdqtoolError, match=r"has in another shape 'conv1\.weight'"):
        qat.restore(wide, saved)
    with pytest.raises(QdqtoolError, match="plan cannot be read"):
        qat.restore(ResNet18(10, nets.WIDTH), {**saved, "plan": {"activations": 3}})
