import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import QdqtoolError
from qdqtool.explain.left_float import PLACEMENT, SkippedNode
from qdqtool.qat.modules import ExportQuantizer, amax_of, observing, quantizers_of, set_amax
from qdqtool.qat.preparation import backend_named
from qdqtool.trt.refusals import WeightsNotConstant
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.raising import raises

X = torch.randn(2, 16, 16, 16)


def _resnet() -> nn.Module:
    return nets.randomise(ResNet18(10, nets.WIDTH))


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_keys_and_names_stay(backend: str) -> None:
    model = _resnet()
    classes = {n: type(m).__name__ for n, m in model.named_modules()}
    keys = list(model.state_dict())
    nets.ready(model, torch.randn(1, 3, 64, 64), backend=backend)
    assert {n: type(m).__name__ for n, m in model.named_modules() if n in classes} == classes
    assert isinstance(model.conv1, nn.Conv2d)
    new = [k for k in model.state_dict() if k not in keys]
    assert set(keys) <= set(model.state_dict())
    assert len(new) == 30 and all(
        k.endswith("quantizer._amax") for k in new
    )  # 21 inputs, 8 skips, the pool
    float_weights = _resnet().state_dict()
    assert not model.load_state_dict(float_weights, strict=False).unexpected_keys
    model = nets.prepared(nets.Shared(), X, backend=backend)
    names = {n for n, _ in model.named_modules()}
    assert {"first._input_quantizer", "first._weight_quantizer"} <= names
    assert not hasattr(model.first, "weight_quantizer")  # Ultralytics rescales its amax
    assert "TensorQuantizer" not in {type(m).__name__ for m in model.modules()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_and_copies(backend: str) -> None:
    model, other = (
        nets.ready(nets.Shared(), X, backend=backend),
        nets.prepared(nets.Shared(), X, backend=backend),
    )
    other.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(X), other.eval()(X))
    sample = torch.randn(1, 3, 64, 64)
    model = nets.ready(_resnet(), sample, backend=backend).eval()
    with torch.no_grad():
        wanted = model(sample)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(sample), wanted)
            twin.conv1.weight.data.zero_()
            assert not torch.equal(twin(sample), wanted)
        assert torch.equal(model(sample), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_their_gradients(backend: str) -> None:
    model = nets.prepared(nn.Sequential(nets.conv(bias=False)), X, backend=backend)
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
    sample = torch.randn(2, 3, 64, 64)
    model = nets.ready(_resnet(), sample, backend=backend).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = model.layer2[0].conv1.weight.detach().clone()
    model(sample).square().mean().backward()
    optimizer.step()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert not torch.equal(before, model.layer2[0].conv1.weight)


def test_modules_that_are_tied_or_changed() -> None:
    model = nets.prepared(nets.UpAndDown(), X)
    assert model.down._input_quantizer is model.last._input_quantizer
    assert model.up._input_quantizer is not model.last._input_quantizer
    model = nets.prepared(nn.Sequential(nets.conv()), X_MODULES)
    model[0].weight = nn.Parameter(torch.zeros(16, 16, 3, 3))
    assert torch.equal(model(X_MODULES), model[0].bias.reshape(1, -1, 1, 1).expand(1, 16, 8, 8))
    assert "0.weight" in dict(model.named_parameters())
    model = nets.prepared(nn.Sequential(nets.conv()), X_MODULES)
    replica = model[0]._replicate_for_data_parallel()
    for name, parameter in model[0]._parameters.items():
        setattr(replica, name, parameter.detach() * 1.0)  # as torch.nn.parallel.replicate does
    with torch.no_grad():
        assert torch.equal(replica(X_MODULES), model(X_MODULES))


def test_skips() -> None:
    sample = torch.randn(1, 3, 64, 64)
    model = nets.ready(_resnet(), sample)
    seen = {}
    block = model.layer1[0]
    block._residual_quantizer.register_forward_hook(
        lambda m, args, out: seen.update(skip=args[0], quantized=out)
    )
    block.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model.eval()(sample)
    assert torch.equal(
        seen["skip"], seen["x"]
    )  # this block has no downsample: its skip is its input
    assert not torch.equal(seen["quantized"], seen["x"])
    model = nets.prepared(nets.Skips(), X)
    assert set(dict(model.named_children())) == {
        "a",
        "b",
        "last",
        "_residual_quantizer",
        "_residual_quantizer_1",
    }
    assert len(model.a) == 4
    model(X)


def test_what_is_told_before_anything_changes() -> None:
    model = nets.Shared()
    said = []

    def stop(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qat.prepare(model, X, report=stop)
    assert "3 convolutions and linear layers in INT8" in said[0]
    assert not list(quantizers_of(model)) and type(model.first) is nn.Conv2d
    model = nets.prepared(nets.Shared(), X)
    with pytest.raises(QdqtoolError, match="is prepared already"):
        qat.prepare(model, X, report=None)
    model = nets.prepared(nets.Moody(), X)
    model.eval()(X)
    with raises(QdqtoolError, "Quantizing._with_calls 2 add 1"):
        model.train()(X)


def test_computed_weights_stay_float() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(2, 3)

    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    nn.utils.parametrize.register_parametrization(model[2], "weight", Turned())
    plan = qat.plan(model, X)
    assert plan.convolutions == ["0"] and plan.skipped == [
        ("2", SkippedNode(WeightsNotConstant(PLACEMENT, "2", "2.weight")).reason)
    ]
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    assert qat.plan(model, X).convolutions == ["0", "2"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_values_and_gradients_are_those_of_int8(backend: str, axis: int | None) -> None:
    quantizer = backend_named(backend)(axis)
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
    quantizer = backend_named(backend)(0)
    for scale in (1.0, 3.0):
        x = torch.randn(4, 6, 3, 3) * scale
        step = x.abs().amax((1, 2, 3), keepdim=True) / 127
        assert torch.allclose(quantizer(x), (x / step).round() * step, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["pytorch-quantization", "modelopt"])
def test_a_missing_backend_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name.replace("-", "_")
    monkeypatch.delitem(
        sys.modules, f"qdqtool.qat.quantizer_{package.partition('_')[0]}", raising=False
    )
    for module in [m for m in sys.modules if m.partition(".")[0] == package] or [package]:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with raises(QdqtoolError, "backend_named qdqtool[qat]"):
        backend_named(name)


X_MODULES = torch.randn(1, 16, 8, 8)


def test_a_failing_quantizer_of_weights_is_an_error_and_not_a_float_convolution() -> None:
    model = nets.prepared(nn.Sequential(nets.conv()), X_MODULES)

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AttributeError("amax")

    model[0]._weight_quantizer = Failing()
    with raises(RuntimeError, "QuantizingWeights.weight"):
        model(X_MODULES)


def test_a_convolution_of_ones_own_keeps_its_behaviour() -> None:
    class Scaled(nn.Conv2d):
        """Standardizes its weights."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(x, weight, self.bias)

    model = nn.Sequential(Scaled(16, 16, 3, padding=1), nn.ReLU(), nets.conv())
    with torch.no_grad():
        wanted = model(X_MODULES)
        qat.prepare(model, X_MODULES, report=None)
        assert type(model[0]).__name__ == "Scaled" and isinstance(model[0], Scaled)
        found = model(X_MODULES)
    assert 0 < (found - wanted).abs().max() < 0.1 * wanted.std() + 0.05


def test_observers_see_activations_and_nothing_is_quantized() -> None:
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    with torch.no_grad():
        wanted = model(X_MODULES)
        qat.prepare(model, X_MODULES, report=None)
        seen: list[torch.Tensor] = []
        with observing(lambda module, attribute, value: seen.append(value)):
            assert torch.equal(model(X_MODULES), wanted)
    assert len(seen) == 2 and torch.equal(seen[0], X_MODULES)
    assert [q.weight for q in quantizers_of(model)] == [False, True, False, True]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_exported_quantizer_rounds_to_integers(axis: int | None) -> None:
    values = torch.tensor([[-3.0, -0.26, 0.0], [0.74, 1.3, 400.0]])
    scale = (
        torch.tensor(0.5)
        if axis is None
        else torch.tensor([0.5, 0.25, 0.125][: values.shape[axis]])
    )
    along = scale if axis is None else scale.reshape([-1, 1] if axis == 0 else [1, -1])
    expected = (values / along).round().clamp(-128, 127) * along
    assert torch.equal(ExportQuantizer(scale, axis)(values), expected)
