from __future__ import annotations

import io
import re

import onnx
import pytest
import torch
from torch import nn

import qdqtool
from examples.resnet import ResNet18
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat import plan
from tests.qat import nets

X = torch.randn(1, 16, 16, 16)


def test_resnet18_gets_skips_and_the_pool() -> None:
    found = plan(ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64))
    assert len(found.convolutions) == 21
    residuals = [a.site for a in found.activations if a.role == "residual"]
    assert len(residuals) == 8 and all(s.position == 1 for s in residuals)  # "out += identity"
    assert [a.site.module for a in found.activations if a.site.kind == "pool"] == ["avgpool"]


def test_it_decides_as_insert_does() -> None:
    model = ResNet18(10, nets.WIDTH)
    nets.randomise(model)
    sample = torch.randn(2, 3, 64, 64)
    file = io.BytesIO()
    torch.onnx.export(model.eval(), (sample[:1],), file, opset_version=17, dynamo=False)
    float_model = onnx.load_from_string(file.getvalue())
    inserted = qdqtool.insert(float_model, sample.numpy(), predict=False)
    found = plan(model, sample[:1])
    assert len(inserted.weights) == len(found.weights)
    assert len(inserted.activations) == len({a.tensor for a in found.activations})


def test_tied_tensors_are_one_group() -> None:
    found = plan(nets.UpAndDown(), X)
    group = {a.site.module: a.group for a in found.activations}
    assert group["down"] == group["last"] != group["up"]  # "down" reads the network's input, which Concat takes as well
    loose = plan(nets.UpAndDown(), X, unify=False)
    assert len({a.group for a in loose.activations}) == 3
    assert loose.tied == [] and found.tied == [["down", "last"]]


def test_a_module_that_runs_twice_has_one_quantizer() -> None:
    found = plan(nets.Shared(), X)
    assert [a.site.module for a in found.activations] == ["first", "both", "last"]
    assert found.convolutions == ["first", "both", "last"]


def test_what_no_module_reaches_stays_float_and_is_told() -> None:
    found = plan(nets.Odd(), X)
    assert found.convolutions == ["last"]
    assert len(found.skipped) == 3
    assert all("function call" in reason for _, reason in found.skipped)


def test_exclude_finds_modules_and_nodes() -> None:
    model, sample = ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64)
    found = plan(model, sample, exclude=[r"^layer4\.", "/fc/"])
    assert len(found.convolutions) == 21 - 5 - 1
    assert not any(a.site.module.startswith("layer4") for a in found.activations)
    assert ("fc", "excluded by exclude '/fc/'") in found.skipped


@pytest.mark.parametrize("option", ["exclude", "include"])
def test_patterns_have_to_match(option: str) -> None:
    with pytest.raises(QdqtoolError, match=re.escape(f"{option} 'nothing': matches no module")):
        plan(nets.Shared(), X, **{option: ["first", "nothing"]})  # type: ignore[arg-type]
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        plan(nets.Shared(), X, **{option: ["("]})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"backend": "brevitas"}, {"head": "all"}, {"residual": "yes"}, {"target": "trt3"}])
def test_wrong_options(options: dict[str, str]) -> None:
    with pytest.raises(QdqtoolError):
        plan(nets.Shared(), X, **options)  # type: ignore[arg-type]


def test_nothing_to_quantize() -> None:
    with pytest.raises(ModelError, match="nothing to quantize"):
        plan(nets.conv(), X, exclude=["Conv"])
    with pytest.raises(ModelError, match="no Conv"):
        plan(nn.ReLU(), X)


def test_include_takes_back_what_a_rule_left() -> None:
    small = nn.Sequential(nets.conv(16, 16), nn.ReLU(), nets.conv(16, 5, 1), nn.ReLU(), nets.conv(5, 5, 3))
    assert plan(small, X).convolutions == ["0", "2"]
    assert plan(small, X, include=["^4$"]).convolutions == ["0", "2", "4"]


def test_the_text_names_everything() -> None:
    text = plan(nets.UpAndDown(), X, exclude=["up"]).text()
    assert "2 convolutions and linear layers in INT8" in text
    assert "one amax  down, last" in text
    assert "float     up: excluded by exclude 'up'" in text
    assert "--" not in text


def test_targets_differ() -> None:
    found = plan(nets.UpAndDown(), X, target="rtx1.7")
    assert "up" not in found.convolutions  # TensorRT-RTX runs no ConvTranspose in INT8


def test_weights_that_are_computed_stay_float() -> None:
    model = nn.Sequential(nets.conv(), nn.ReLU(), nn.utils.parametrizations.weight_norm(nets.conv()))
    found = plan(model, X)
    assert found.convolutions == ["0"]
    assert found.skipped == [("2", "its weights are computed, not constant")]


def test_projections_of_attention_are_told_once_and_not_as_unreached() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.expert = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            return self.down(x + self.attention(x, x, x, need_weights=False)[0])

    found = plan(Attending(), torch.randn(1, 5, 16))
    assert found.convolutions == ["up", "down"] and found.unseen == ["expert"]
    assert sum("nn.MultiheadAttention" in reason for _, reason in found.skipped) == 2
