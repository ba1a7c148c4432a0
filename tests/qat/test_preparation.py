import copy
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qdqtool import qat
from qdqtool.errors import QdqtoolError
from qdqtool.qat.modules import (
    ExportQuantizer,
    find_quantizers,
    observe_activations,
    read_amax,
    set_amax,
)
from qdqtool.qat.preparation import load_backend
from qdqtool.reasons.placement import PLACEMENT, SkippedNode
from qdqtool.reasons.weights import WeightsNotConstant
from tests.errors import has
from tests.qat import nets
from tests.qat.backends import BACKENDS

X = torch.randn(2, 16, 16, 16)
IMAGES = torch.randn(2, 3, 64, 64)
SMALL = torch.randn(1, 16, 8, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prepare_keeps_classes_and_keys(backend: str) -> None:
    model = nets.resnet18()
    classes = {n: type(m).__name__ for n, m in model.named_modules()}
    keys = set(model.state_dict())
    nets.ready(model, IMAGES, backend=backend)
    assert {n: type(m).__name__ for n, m in model.named_modules() if n in classes} == classes
    assert isinstance(model.conv1, nn.Conv2d)
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict())
    assert sum(k.endswith("quantizer._amax") for k in added) == len(added) == 30
    assert not model.load_state_dict(nets.resnet18().state_dict(), strict=False).unexpected_keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_quantizers(backend: str) -> None:
    model = nets.prepared(nets.Shared(), X, backend=backend)
    names = {n for n, _ in model.named_modules()}
    assert {"first._input_quantizer", "first._weight_quantizer"} <= names
    assert not hasattr(model.first, "weight_quantizer")  # Ultralytics rescales its amax
    assert "TensorQuantizer" not in {type(m).__name__ for m in model.modules()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_dict_restores_ranges(backend: str) -> None:
    model = nets.ready(nets.Shared(), X, backend=backend)
    other = nets.prepared(nets.Shared(), X, backend=backend)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(nets.evaluate(model, X), nets.evaluate(other, X))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copies_have_their_own_weights(
    backend: str, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model = nets.ready(nets.resnet18(), IMAGES, backend=backend)
    expected, twin = nets.evaluate(model, IMAGES), duplicate(model)
    assert torch.equal(nets.evaluate(twin, IMAGES), expected)
    twin.conv1.weight.data.zero_()
    assert not torch.equal(nets.evaluate(twin, IMAGES), expected)
    assert torch.equal(nets.evaluate(model, IMAGES), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pickle_of_version_0_2_loads(backend: str) -> None:
    """Ultralytics pickles whole networks as checkpoints; classes had other names then."""
    model = nets.ready(nets.resnet18(), IMAGES, backend=backend)
    pickled = pickle.dumps(model, protocol=2)
    for name, old in (
        ("modules\n_rebuild", "modules\n_rebuilt"),
        ("sites\nQuantizerSite", "sites\nSite"),
        ("quantizer_pytorch\nPytorchQuantizer", "quantizer_pytorch\nInt8Quantizer"),
        ("quantizer_modelopt\nModelOptQuantizer", "quantizer_modelopt\nInt8Quantizer"),
    ):
        assert name.encode() in pickled or "quantizer" in name
        pickled = pickled.replace(f"{name}\n".encode(), f"{old}\n".encode())
    loaded = pickle.loads(pickled)
    assert torch.equal(nets.evaluate(loaded, IMAGES), nets.evaluate(model, IMAGES))
    assert qat.preparation.read_plan(loaded) == qat.preparation.read_plan(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_convolution_computes_with_quantized_weights(backend: str) -> None:
    model = nets.prepared(nn.Sequential(nets.conv(bias=False)), X, backend=backend)
    weight = model[0].weight
    with torch.no_grad():
        weight.normal_()
    # Integers from -127 to 127 for each output channel, and for the input, whose range is 1.
    scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
    x = X / X.abs().max()
    quantized, inputs = (weight / scale).round() * scale, (x * 127).round() / 127
    expected = nn.functional.conv2d(inputs, quantized, padding=1)
    result = nets.evaluate(model, x)
    assert torch.allclose(result, expected, atol=1e-3)
    assert not torch.allclose(result, nn.functional.conv2d(x, weight, padding=1), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_trained(backend: str) -> None:
    model = nets.ready(nets.resnet18(), IMAGES, backend=backend).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = nets.float_weights(model.layer2[0].conv1).clone()
    model(IMAGES).square().mean().backward()
    optimizer.step()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert not torch.equal(before, model.layer2[0].conv1.weight)


def test_tied_inputs_share_quantizer() -> None:
    model = nets.prepared(nets.UpAndDown(), X)
    up, down, last = (model.get_submodule(f"{n}._input_quantizer") for n in ("up", "down", "last"))
    assert down is last is not up


def test_weights_can_be_replaced() -> None:
    model = nets.prepared(nn.Sequential(nets.conv()), SMALL)
    model[0].weight = nn.Parameter(torch.zeros(16, 16, 3, 3))
    assert torch.equal(model(SMALL), model[0].bias.reshape(1, -1, 1, 1).expand(1, 16, 8, 8))
    assert "0.weight" in dict(model.named_parameters())


def test_replica_of_data_parallel_computes_the_same() -> None:
    model = nets.prepared(nn.Sequential(nets.conv()), SMALL)
    replica = model[0]._replicate_for_data_parallel()
    for name, parameter in model[0].named_parameters(recurse=False):
        setattr(replica, name, parameter.detach() * 1.0)  # as torch.nn.parallel.replicate does
    assert torch.equal(nets.evaluate(replica, SMALL), nets.evaluate(model, SMALL))


def test_skip_is_quantized() -> None:
    model = nets.ready(nets.resnet18(), IMAGES)
    values: dict[str, torch.Tensor] = {}
    block = model.layer1[0]  # without a downsample: its skip is its input
    block.get_submodule("_residual_quantizer").register_forward_hook(
        lambda m, args, out: values.update(skip=args[0], quantized=out)
    )
    block.register_forward_pre_hook(lambda m, args: values.update(x=args[0]))
    nets.evaluate(model, IMAGES)
    assert torch.equal(values["skip"], values["x"])
    assert not torch.equal(values["quantized"], values["x"])


def test_skips_of_containers_have_quantizers() -> None:
    model = nets.prepared(nets.Skips(), X)
    added = {"_residual_quantizer", "_residual_quantizer_1"}
    assert set(dict(model.named_children())) == {"a", "b", "last"} | added and len(model.a) == 4
    model(X)


def test_plan_is_reported_before_anything_changes() -> None:
    model = nets.Shared()

    def stop(text: str) -> None:
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt, match="convolutions and linear layers in INT8: 3"):
        qat.prepare(model, X, report=stop)
    assert not list(find_quantizers(model)) and type(model.first) is nn.Conv2d


def test_prepare_refuses_prepared_network() -> None:
    model = nets.prepared(nets.Shared(), X)
    with pytest.raises(QdqtoolError, check=has("already-prepared", parameter="model")):
        qat.prepare(model, X, report=None)


def test_more_calls_than_prepared_are_refused() -> None:
    model = nets.prepared(nets.Moody(), X)
    model.eval()(X)
    with pytest.raises(QdqtoolError, check=has("calls-changed"), match="2 calls of kind 'add'"):
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
def test_quantizer_values_and_gradients(backend: str, axis: int | None) -> None:
    quantizer = load_backend(backend)(axis)
    x = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    amax = torch.tensor(1.5)
    if axis is not None:
        shape = [n if i == axis else 1 for i, n in enumerate(x.shape)]
        amax = torch.linspace(0.5, 2.0, x.shape[axis]).reshape(shape)
    assert read_amax(quantizer) is None
    set_amax(quantizer, amax)
    result = quantizer(x)
    result.sum().backward()
    step = amax / 127
    expected = (x.detach() / step).round().clamp(-128, 127) * step
    assert torch.allclose(result.detach(), expected, atol=1e-5)
    # Gradients of the straight-through estimator: one inside the range, zero for clipped values.
    assert torch.equal(x.grad, (x.detach().abs() <= amax).float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_quantizer_follows_maximum(backend: str) -> None:
    quantizer = load_backend(backend)(0)
    for scale in (1.0, 3.0):
        x = torch.randn(4, 6, 3, 3) * scale
        step = x.abs().amax((1, 2, 3), keepdim=True) / 127
        assert torch.allclose(quantizer(x), (x / step).round() * step, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["pytorch-quantization", "modelopt"])
def test_missing_backend_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name.replace("-", "_")
    monkeypatch.delitem(
        sys.modules, f"qdqtool.qat.quantizer_{package.partition('_')[0]}", raising=False
    )
    for module in [m for m in sys.modules if m.partition(".")[0] == package] or [package]:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(
        QdqtoolError, check=has("missing-package", "qdqtool[qat]", parameter="backend")
    ):
        load_backend(name)


def test_failing_weight_quantizer_is_an_error() -> None:
    model = nets.prepared(nn.Sequential(nets.conv()), SMALL)

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AttributeError("amax")

    model[0].add_module("_weight_quantizer", Failing())
    with pytest.raises(RuntimeError, match="the weights' quantizer failed"):
        model(SMALL)


def test_convolution_subclass_keeps_its_forward() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(x, weight, self.bias)

    model = nn.Sequential(Scaled(16, 16, 3, padding=1), nn.ReLU(), nets.conv())
    before = nets.evaluate(model, SMALL)
    qat.prepare(model, SMALL, report=None)
    assert type(model[0]).__name__ == "Scaled" and isinstance(model[0], Scaled)
    assert 0 < (nets.evaluate(model, SMALL) - before).abs().max() < 0.1 * before.std() + 0.05


def test_observers_see_float_activations() -> None:
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    expected = nets.evaluate(model, SMALL)
    qat.prepare(model, SMALL, report=None)
    values: list[torch.Tensor] = []
    with observe_activations(lambda module, attribute, value: values.append(value)):
        assert torch.equal(nets.evaluate(model, SMALL), expected)
    assert len(values) == 2 and torch.equal(values[0], SMALL)
    assert [q.is_weight for q in find_quantizers(model)] == [False, True, False, True]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_export_quantizer_rounds_to_integers(axis: int | None) -> None:
    values = torch.tensor([[-3.0, -0.26, 0.0], [0.74, 1.3, 400.0]])
    scale = torch.tensor(0.5 if axis is None else [0.5, 0.25, 0.125][: values.shape[axis]])
    along = scale if axis is None else scale.reshape([-1, 1] if axis == 0 else [1, -1])
    expected = (values / along).round().clamp(-128, 127) * along
    assert torch.equal(ExportQuantizer(scale, axis)(values), expected)
