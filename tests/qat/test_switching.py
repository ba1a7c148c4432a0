from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from qdqtool import qat
from qdqtool.errors import QdqtoolError
from tests.qat import nets

X = torch.randn(16, 16, 8, 8, generator=torch.Generator().manual_seed(2))


def _ready() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv(), nn.ReLU(), nets.conv()).eval()
    with torch.no_grad():
        wanted = model(X)
    qat.prepare(model, X[:1], report=None)
    qat.calibrate(model, X)
    return model, wanted


def test_all_off_is_the_float_network() -> None:
    model, wanted = _ready()
    with torch.no_grad():
        quantized = model(X)
        assert not torch.equal(quantized, wanted)
        with qat.disabled(model):
            assert torch.equal(model(X), wanted)
        assert torch.equal(model(X), quantized)
        assert len(qat.disable(model, r"^2\.")) == 2
        assert not torch.equal(model(X), quantized)
        assert qat.enable(model) == []
        assert torch.equal(model(X), quantized)
    with pytest.raises(QdqtoolError, match="'nothing': matches no quantizer; names look like"):
        qat.disable(model, "nothing")


def test_what_is_off_has_no_pair_in_the_export(tmp_path: Path) -> None:
    model, _ = _ready()
    qat.disable(model, r"^2\.")
    done = qat.export(model, tmp_path / "q.onnx", X[:1])
    assert (done.summary["int8"], done.summary["float"]) == (2, 1)


def test_the_layer_that_costs_most_comes_first() -> None:
    model, wanted = _ready()
    model[2]._input_quantizer._amax.mul_(0.05)  # a range that clips nearly everything
    found = qat.sensitivity(model, [X])
    assert found[0].module == "2" and found[0].loss > 5 * found[1].loss
    with torch.no_grad(), qat.disabled(model, r"^(0|4)\."):
        by_hand = float(((model(X) - wanted) ** 2).mean().sqrt() / wanted.std())
    assert found[0].loss == pytest.approx(by_hand, rel=1e-4)
    measured = qat.sensitivity(model, [], metric=lambda m: -float((m(X) - wanted).square().mean()))
    assert measured[0].module == "2"
