from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qdqtool
from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat.modules import folded_later
from qdqtool.testing import assert_int8
from tests.qat import nets
from tests.qat.backends import BACKENDS

X = torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(5))


def _ready(model: nn.Module, sample: torch.Tensor = X, **options: object) -> nn.Module:
    nets.randomise(model)
    qat.prepare(model, sample, report=None, **options)  # type: ignore[arg-type]
    qat.calibrate(model, [sample])
    return model


def _run(path: Path, x: torch.Tensor) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_resnet18_runs_as_planned(backend: str, tmp_path: Path) -> None:
    sample = torch.randn(2, 3, 64, 64)
    model = _ready(ResNet18(10, nets.WIDTH), sample, backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", sample)
    assert done.summary == qdqtool.predict(tmp_path / "q.onnx", "trt8.5").summary()
    assert done.summary["int8"] == len(done.plan.convolutions) == 21
    assert done.summary["int8_to_int8"] == 20 and done.summary["conversions"] == 1
    assert_int8(done.path, "trt8.5", max_conversions=1)
    with torch.no_grad():
        wanted = model.eval()(sample).numpy()
    error = np.sqrt(np.mean((_run(tmp_path / "q.onnx", sample) - wanted) ** 2)) / wanted.std()
    assert error == pytest.approx(done.difference, rel=1e-3) and error < 0.05


def test_batch_normalization_is_folded_without_changing_an_integer(tmp_path: Path) -> None:
    model = nn.Sequential(nets.conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(), nets.conv())
    _ready(model)
    with torch.no_grad():
        model[1].weight[3] = -0.7  # a channel with a negative factor, and one with none
        model[1].weight[4] = 0.0
    qat.export(model, tmp_path / "q.onnx", X)
    proto = onnx.load(tmp_path / "q.onnx")
    assert "BatchNormalization" not in {n.op_type for n in proto.graph.node}
    conv = next(n for n in proto.graph.node if n.name == "/0/Conv")
    made = {o: n for n in proto.graph.node for o in n.output}
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    q = made[made[conv.input[1]].input[0]]
    folded, scale = values[q.input[0]], values[q.input[1]].reshape(-1, 1, 1, 1)
    weight = model[0]._parameters["weight"].detach().numpy()
    trained = np.round(weight / (np.abs(weight).max((1, 2, 3), keepdims=True) / 127))
    factor = model[1].weight.detach().numpy()
    np.testing.assert_array_equal(np.round(folded / scale), trained * np.sign(factor).reshape(-1, 1, 1, 1))
    with torch.no_grad():
        wanted = model.eval()(X).numpy()
    np.testing.assert_allclose(_run(tmp_path / "q.onnx", X), wanted, atol=0.02 * wanted.std())


def test_fixed_ranges_of_weights_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nets.conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(), nets.conv())
    _ready(model)
    nets.max_calibrate(model, X)
    model[0]._weight_quantizer._amax.mul_(0.5)  # as if the weights had grown since
    done = qat.export(model, tmp_path / "q.onnx", X)
    with torch.no_grad():
        wanted = model.eval()(X).numpy()
    np.testing.assert_allclose(_run(tmp_path / "q.onnx", X), wanted, atol=0.02 * wanted.std())
    assert done.difference < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(backend: str, groups: int, tmp_path: Path) -> None:
    model = _ready(nets.UpAndDown(groups), backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.summary["int8"] == 3
    assert done.difference < 0.02
    graph = onnx.load(tmp_path / "q.onnx").graph
    assert "BatchNormalization" not in {n.op_type for n in graph.node}
    # One scale for all channels, and the trained integers are those of the weights with BatchNormalization folded in.
    made = {o: n for n in graph.node for o in n.output}
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    conv = next(n for n in graph.node if n.op_type == "ConvTranspose")
    q = made[made[conv.input[1]].input[0]]
    factor = (model.bn.weight / (model.bn.running_var + model.bn.eps).sqrt()).detach().numpy()
    weight = model.up._parameters["weight"].detach().numpy()  # [in, out / groups, 2, 2]
    parts = zip(np.split(weight, groups), np.split(factor, groups), strict=True)
    folded = np.concatenate([part * f.reshape(1, -1, 1, 1) for part, f in parts])
    scale = np.abs(folded).max() / 127
    assert values[q.input[1]] == pytest.approx(scale, rel=1e-5)
    np.testing.assert_allclose(values[q.input[0]], folded, rtol=1e-5, atol=1e-7)


def test_a_transposed_convolution_trains_with_the_integers_that_are_exported(tmp_path: Path) -> None:
    model = _ready(nets.UpAndDown())
    with torch.no_grad():
        model.bn.weight[:3] = torch.tensor([4.0, 0.0, -2.0])  # factors far apart, one of them nothing
    seen: list[torch.Tensor] = []
    keep = model.up.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    inputs: list[torch.Tensor] = []
    with torch.no_grad():
        model.eval()(X)
        inputs.append(torch.relu(model.down(X)))
    keep.remove()
    factor = (model.bn.weight / (model.bn.running_var + model.bn.eps).sqrt()).detach().reshape(1, -1, 1, 1)
    folded = model.up._parameters["weight"].detach() * factor
    scale = folded.abs().max() / 127
    quantized = (folded / scale).round() * scale
    x = model.up._input_quantizer(inputs[0])
    wanted = torch.nn.functional.conv_transpose2d(x, quantized, stride=2)
    torch.testing.assert_close(seen[0] * factor, wanted, rtol=1e-4, atol=1e-4)
    model.train()
    model(X).square().mean().backward()
    assert model.up._parameters["weight"].grad is not None
    copied = copy.deepcopy(model)
    copied.bn = nn.Identity()  # as if somebody had folded it: from here on the weights are quantized as they are
    assert folded_later(copied.up) is None and folded_later(model.up) is not None
    assert copied.up.qdq_norm[0] is copied and set(copied.state_dict()) < set(model.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_layers_become_products_with_the_dq_beside_them(backend: str, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 32)
    model = _ready(nets.Tokens(), x, backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", x)
    assert done.summary["int8"] == 2
    assert "Transpose" not in {n.op_type for n in onnx.load(tmp_path / "q.onnx").graph.node}


@pytest.mark.parametrize("net", [nets.Shared, nets.Skips, nets.Heads])
def test_other_networks_compute_the_same(net: type[nn.Module], tmp_path: Path) -> None:
    model = _ready(net())
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.difference < 0.02
    assert done.summary["float"] == 0


def test_constants_pairs_and_names(tmp_path: Path) -> None:
    sample = torch.randn(1, 3, 64, 64)
    model = _ready(ResNet18(10, nets.WIDTH), sample)
    qat.export(model, tmp_path / "q.onnx", sample, input_names=["images"], output_names=["scores"])
    graph = onnx.load(tmp_path / "q.onnx").graph
    assert [i.name for i in graph.input] == ["images"] and [o.name for o in graph.output] == ["scores"]
    constants = {t.name for t in graph.initializer}
    pairs = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all({n.input[1], n.input[2]} <= constants for n in pairs)
    assert not {"Constant", "Identity", "Cast"} & {n.op_type for n in graph.node}
    assert len({n.name for n in graph.node}) == len(graph.node)
    names = {n.name for n in graph.node}
    assert {"/layer1/layer1.0/conv1/Conv", "/layer1/layer1.0/conv2/_input_quantizer/QuantizeLinear"} <= names
    # Three places read the input of layer2.0: one pair serves both convolutions; the skip is the downsample's result.
    activations = [n for n in pairs if n.op_type == "QuantizeLinear" and n.input[0] not in constants]
    assert len(activations) == len({n.input[0] for n in activations})


def test_dynamic_batch(tmp_path: Path) -> None:
    sample = torch.randn(1, 3, 64, 64)
    model = _ready(ResNet18(10, nets.WIDTH), sample)
    qat.export(model, tmp_path / "q.onnx", sample, dynamic_batch=True)
    assert _run(tmp_path / "q.onnx", torch.randn(3, 3, 64, 64)).shape == (3, 10)


def test_the_network_goes_on_as_before(tmp_path: Path) -> None:
    model = _ready(ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64))
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    qat.export(model, tmp_path / "q.onnx", torch.randn(1, 3, 64, 64))
    assert model.training
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    model(torch.randn(2, 3, 64, 64)).sum().backward()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, match=r"call qdqtool\.qat\.prepare"):
        qat.export(nets.conv(), tmp_path / "q.onnx", X)
    model = nets.Shared()
    qat.prepare(model, X, report=None)
    with pytest.raises(QdqtoolError, match=r"'first\._input_quantizer' has no range; call qdqtool\.qat\.calibrate"):
        qat.export(model, tmp_path / "q.onnx", X)
    qat.calibrate(model, [X])
    with pytest.raises(QdqtoolError, match="13 or newer"):
        qat.export(model, tmp_path / "q.onnx", X, opset=11)
    with pytest.raises(QdqtoolError):
        qat.export(model, tmp_path / "none" / "q.onnx", X)
    assert not list(tmp_path.iterdir())


def test_results_that_are_not_the_networks_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _ready(nets.Shared())
    import qdqtool.qat.exporting as room

    honest = room.weight_scale
    monkeypatch.setattr(room, "weight_scale", lambda weight, axis: honest(weight, axis) * 0.2)
    with pytest.raises(ModelError, match="nothing was written"):
        qat.export(model, tmp_path / "q.onnx", X)
    with pytest.warns(UserWarning, match="written all the same"):
        qat.export(model, tmp_path / "q.onnx", X, tolerance=10.0)
    (tmp_path / "q.onnx").unlink()
    assert not list(tmp_path.iterdir())


class Kept:
    """What a network puts its last results into that is no module, as RAFT does."""

    def __init__(self) -> None:
        self.pyramid: list[torch.Tensor] = []


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nets.conv(), nets.conv()
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(x))
        self.kept.pyramid = [y]
        return self.two(y)


def test_results_that_a_network_keeps_are_no_obstacle(tmp_path: Path) -> None:
    model = _ready(Keeping())
    model.train()
    model(X).sum().backward()
    assert model.kept.pyramid[0].grad_fn is not None
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.summary["int8"] == 2
    assert model.kept.pyramid[0].grad_fn is not None, "the network is left as it was"
