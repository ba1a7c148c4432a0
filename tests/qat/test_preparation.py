from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import QdqtoolError
from qdqtool.qat.modules import quantizers_of
from tests.qat import nets
from tests.qat.backends import BACKENDS

X = torch.randn(2, 16, 16, 16)


def _resnet() -> nn.Module:
    model = ResNet18(10, nets.WIDTH)
    nets.randomise(model)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_and_keys_stay(backend: str) -> None:
    model = _resnet()
    classes = {n: type(m).__name__ for n, m in model.named_modules()}
    keys = list(model.state_dict())
    sample = torch.randn(1, 3, 64, 64)
    qat.prepare(model, sample, backend=backend, report=None)
    qat.calibrate(model, [sample])
    assert {n: type(m).__name__ for n, m in model.named_modules() if n in classes} == classes
    assert isinstance(model.conv1, nn.Conv2d)
    new = [k for k in model.state_dict() if k not in keys]
    assert set(keys) <= set(model.state_dict())
    assert len(new) == 30 and all(k.endswith("quantizer._amax") for k in new)  # 21 inputs, 8 skips, the pool
    float_weights = _resnet().state_dict()
    assert not model.load_state_dict(float_weights, strict=False).unexpected_keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_name_is_taken_for_modelopts(backend: str) -> None:
    model = nets.Shared()
    qat.prepare(model, X, backend=backend, report=None)
    names = {n for n, _ in model.named_modules()}
    assert {"first._input_quantizer", "first._weight_quantizer"} <= names
    assert not hasattr(model.first, "weight_quantizer")  # Ultralytics rescales its amax
    assert "TensorQuantizer" not in {type(m).__name__ for m in model.modules()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_loads_into_a_prepared_network(backend: str) -> None:
    model, other = nets.Shared(), nets.Shared()
    for network in (model, other):
        qat.prepare(network, X, backend=backend, report=None)
    qat.calibrate(model, [X])
    other.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(X), other.eval()(X))


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_and_pickles_compute_the_same_and_share_nothing(backend: str) -> None:
    model = _resnet()
    sample = torch.randn(1, 3, 64, 64)
    qat.prepare(model, sample, backend=backend, report=None)
    qat.calibrate(model, [sample])
    model.eval()
    with torch.no_grad():
        wanted = model(sample)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(sample), wanted)
            twin.conv1.weight.data.zero_()
            assert not torch.equal(twin(sample), wanted)
        assert torch.equal(model(sample), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_float_outside_and_quantized_inside(backend: str) -> None:
    model = nn.Sequential(nets.conv(bias=False))
    qat.prepare(model, X, backend=backend, report=None)
    weight = model[0].weight
    assert weight is model[0]._parameters["weight"]
    with torch.no_grad():
        weight.normal_()
        # Independent of both backends: integers -127 ... 127 for each output channel.
        scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
        quantized = (weight / scale).round() * scale
        x = X / X.abs().max()
        step = X.abs().max() / X.abs().max() / 127
        expected = nn.functional.conv2d((x / step).round() * step, quantized, padding=1)
        assert torch.allclose(model(x), expected, atol=1e-3)
        assert not torch.allclose(model(x), nn.functional.conv2d(x, weight, padding=1), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_reach_the_float_weights(backend: str) -> None:
    model = _resnet()
    sample = torch.randn(2, 3, 64, 64)
    qat.prepare(model, sample, backend=backend, report=None)
    qat.calibrate(model, [sample])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = model.layer2[0].conv1.weight.detach().clone()
    model(sample).square().mean().backward()
    optimizer.step()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert not torch.equal(before, model.layer2[0].conv1.weight)


def test_tied_places_share_one_module() -> None:
    model = nets.UpAndDown()
    qat.prepare(model, X, report=None)
    assert model.down._input_quantizer is model.last._input_quantizer
    assert model.up._input_quantizer is not model.last._input_quantizer


def test_only_the_skip_is_quantized_and_inside_the_block() -> None:
    model = _resnet()
    sample = torch.randn(1, 3, 64, 64)
    qat.prepare(model, sample, report=None)
    qat.calibrate(model, [sample])
    seen = {}
    block = model.layer1[0]
    block._residual_quantizer.register_forward_hook(lambda m, args, out: seen.update(skip=args[0], quantized=out))
    block.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model.eval()(sample)
    assert torch.equal(seen["skip"], seen["x"])  # this block has no downsample: its skip is its input
    assert not torch.equal(seen["quantized"], seen["x"])


def test_skips_in_containers_are_quantized_from_outside() -> None:
    model = nets.Skips()
    qat.prepare(model, X, report=None)
    assert set(dict(model.named_children())) == {"a", "b", "last", "_residual_quantizer", "_residual_quantizer_1"}
    assert len(model.a) == 4
    model(X)


def test_the_plan_is_reported_before_anything_changes() -> None:
    model = nets.Shared()
    said = []

    def stop(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qat.prepare(model, X, report=stop)
    assert "3 convolutions and linear layers in INT8" in said[0]
    assert not list(quantizers_of(model)) and type(model.first) is nn.Conv2d


def test_prepared_twice() -> None:
    model = nets.Shared()
    qat.prepare(model, X, report=None)
    with pytest.raises(QdqtoolError, match="is prepared already"):
        qat.prepare(model, X, report=None)


def test_other_calls_in_training_than_in_evaluation_are_told() -> None:
    model = nets.Moody()
    qat.prepare(model, X, report=None)
    model.eval()(X)
    with pytest.raises(QdqtoolError, match="2 calls of kind 'add' ran, 1 when it was prepared"):
        model.train()(X)


def test_computed_weights_are_refused_before_anything_changes() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(2, 3)

    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    nn.utils.parametrize.register_parametrization(model[2], "weight", Turned())
    with pytest.raises(QdqtoolError, match=r"'2': its weights are computed \(parametrization, pruning\)"):
        qat.prepare(model, X, report=None)
    assert not list(quantizers_of(model))
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    qat.prepare(model, X, report=None)
