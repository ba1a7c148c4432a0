"""Wrong models are refused, each kind for itself, also where the network's own noise would hide them."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat.checking import Shaking
from qdqtool.qat.modules import set_amax
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.raising import raises

X = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(5))


class Deep(nn.Module):
    """Skips and many layers, so that single integer steps add up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nets.conv(), nn.BatchNorm2d(16), nn.SiLU(), nets.conv(), nn.BatchNorm2d(16)
            )
            for _ in range(5)
        )
        self.last = nets.conv(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.last(x)


@pytest.fixture(scope="module")
def ready() -> nn.Module:
    model = nets.prepared(nets.randomise(Deep()), X)
    with pytest.warns(UserWarning, match="calibrated with 1 image:"):
        qat.calibrate(model, [X])
    return model


@pytest.fixture(scope="module")
def exported(ready: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checking") / "q.onnx"
    done = qat.export(ready, path, X)
    assert done.check.pieces > 10 and done.check.worst < 5e-4
    return path


def _initializer(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(t for t in graph.initializer if t.name == name)


def _q(graph: onnx.GraphProto, weights: bool) -> list[onnx.NodeProto]:
    constants = {t.name for t in graph.initializer}
    return [
        n
        for n in graph.node
        if n.op_type == "QuantizeLinear" and (n.input[0] in constants) == weights
    ]


def _pair(graph: onnx.GraphProto, q: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.name == q.name or q.output[0] in n.input]


def _give(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], position: int, value: np.ndarray
) -> None:
    """Gives nodes a scale or zero point of their own."""
    graph.initializer.append(numpy_helper.from_array(value, "other"))
    for node in nodes:
        node.input[position] = "other"


def _scale(graph: onnx.GraphProto, q: onnx.NodeProto, factor: float) -> np.ndarray:
    return (numpy_helper.to_array(_initializer(graph, q.input[1])) * np.float32(factor)).astype(
        np.float32
    )


def _activation_scale(graph: onnx.GraphProto) -> None:
    q = _q(graph, False)[5]
    _give(graph, _pair(graph, q), 1, _scale(graph, q, 1.001))


def _weight_scale(graph: onnx.GraphProto) -> None:
    q = _q(graph, True)[4]
    _give(graph, _pair(graph, q), 1, _scale(graph, q, 1.02))


def _one_of_two_scales(graph: onnx.GraphProto) -> None:
    q = _q(graph, False)[3]
    _give(graph, [q], 1, _scale(graph, q, 1.01))


def _drop(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    dqs = [n for n in graph.node if node.output[0] in n.input]
    for dq in dqs:
        for reader in graph.node:
            for i, name in enumerate(reader.input):
                if name == dq.output[0]:
                    reader.input[i] = node.input[0]
        graph.node.remove(dq)
    graph.node.remove(node)


def _one_reader_without(graph: onnx.GraphProto) -> None:
    """A pair serves a convolution and a skip; the skip reads the float tensor now."""
    for q in _q(graph, False):
        dq = next(n for n in graph.node if q.output[0] in n.input)
        readers = [n for n in graph.node if dq.output[0] in n.input]
        if len(readers) > 1:
            add = next(n for n in readers if n.op_type == "Add")
            add.input[list(add.input).index(dq.output[0])] = q.input[0]
            return
    raise AssertionError("no pair has two readers")


def _axis(graph: onnx.GraphProto) -> None:
    for node in _pair(graph, _q(graph, True)[1]):
        next(a for a in node.attribute if a.name == "axis").i = 1


def _swapped_weights(graph: onnx.GraphProto) -> None:
    first, second = _q(graph, True)[1:3]
    for i in range(2):
        one, two = _initializer(graph, first.input[i]), _initializer(graph, second.input[i])
        one.raw_data, two.raw_data = two.raw_data, one.raw_data


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_activation_scale, "/blocks.2.3/_input_quantizer/QuantizeLinear' scale"),
        (_one_of_two_scales, "/blocks.1.3/_input_quantizer/QuantizeLinear' scale"),
        (_weight_scale, "deviation"),
        (lambda graph: _drop(graph, _q(graph, False)[-1]), "'last._input_quantizer' missing"),
        (lambda graph: _drop(graph, _q(graph, True)[2]), "deviation"),
        (_one_reader_without, "deviation"),
        (_axis, "deviation"),
        (_swapped_weights, "deviation"),
        (
            lambda graph: _give(graph, _pair(graph, _q(graph, False)[2]), 2, np.int8(1)),
            "/blocks.1.0/_input_quantizer/QuantizeLinear' symmetric",
        ),
    ],
)
def test_wrong_models_are_refused(
    change: Callable[[onnx.GraphProto], None],
    named: str,
    ready: nn.Module,
    exported: Path,
    tmp_path: Path,
) -> None:
    proto = onnx.load(exported)
    change(proto.graph)
    onnx.save(proto, tmp_path / "wrong.onnx")
    with raises(ModelError, f"check {named}"):
        qat.check(ready, tmp_path / "wrong.onnx", X)


def test_the_right_one_passes_also_on_a_sample_of_zeros(ready: nn.Module, exported: Path) -> None:
    for sample in (X, torch.zeros_like(X)):
        found = qat.check(ready, exported, sample)
        assert found.worst < 5e-4 and found.pieces > 10
        assert "pieces agree" in found.text() and "own noise is" in found.text()


def test_a_network_that_cannot_run_in_double_precision_is_checked_piece_by_piece(
    tmp_path: Path,
) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nets.conv(), nets.conv()
            self.filter = torch.randn(16, 16, 1, 1)  # neither parameter nor buffer: stays float32

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(nn.functional.conv2d(torch.relu(self.first(x)), self.filter))

    model = nets.ready(Fixed(), X)
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert 0 < done.noise < 0.1 and done.check.worst < 5e-4  # of rounding at random alone


def test_noise_is_at_least_that_of_the_same_network_in_double_precision(tmp_path: Path) -> None:
    """By hand: the same rounding in float64, against the network's own results."""
    torch.manual_seed(0)
    model = nets.ready(nn.Sequential(*(m for _ in range(6) for m in (nets.conv(), nn.SiLU()))), X)
    done = qat.export(model, tmp_path / "q.onnx", X)
    with torch.no_grad():
        single = model.eval()(X).double()
        x = X.double()
        for module in model:
            if isinstance(module, nn.Conv2d):
                step = np.float32(float(module._input_quantizer._amax) / 127)
                x = (x / step).round().clamp(-128, 127) * step
                weight = module._parameters["weight"].detach()
                grid = weight.abs().amax((1, 2, 3), keepdim=True) / 127
                rounded = (weight / grid).round().double() * grid.double()
                x = nn.functional.conv2d(x, rounded, module.bias.double(), padding=1)
            else:
                x = nn.functional.silu(x)
    wanted = float(((single - x) ** 2).mean().sqrt() / x.std())
    assert 0.5 * wanted - 1e-6 < done.noise < 10 * wanted + 0.02


def test_shaken_networks(tmp_path: Path) -> None:
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(1)) * 3 + 5
    shaking = Shaking([1e-2, 1e-4])
    assert torch.equal(shaking(x), x)
    shaking.start(7)
    first = [shaking(x) - x for _ in range(3)]
    for change, size in zip(
        first, (1e-2, 1e-4, 1e-6), strict=True
    ):  # a call beyond those known: by rounding
        assert float(change.double().std() / x.double().std()) == pytest.approx(size, rel=0.2)
    shaking.start(7)
    assert torch.equal(shaking(x) - x, first[0])
    shaking.start(8)
    assert not torch.equal(shaking(x) - x, first[0])
    shaking.start(None)
    assert torch.equal(shaking(x), x)
    # Every value lies on the edge between two integers, as far as single precision can tell
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1))
    with torch.no_grad():
        for module in model:
            module.weight.copy_(torch.eye(16).reshape(16, 16, 1, 1))
            module.bias.zero_()
    x = (
        torch.tensor([0.5, 1.5, 2.5, 126.5])
        .repeat(64, 16, 1)
        .permute(1, 0, 2)
        .reshape(1, 16, 16, 16)
    )
    qat.prepare(model, x, report=None)
    for quantizer in (model[0]._input_quantizer, model[1]._input_quantizer):
        set_amax(quantizer, torch.tensor(127.0))
    with qat.disabled(model, r"0\._input"):
        done = qat.export(model, tmp_path / "q.onnx", x)
    assert done.noise > 1e-3 and done.difference < 0.05 + 5 * done.noise


SMALL = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_network_computes_trains_and_exports_as_without(
    backend: str, tmp_path: Path
) -> None:
    """Traced by torch's compiler, gradients included; the code it would make of that is not ours to test."""
    torch.manual_seed(0)
    model = nets.prepared(nets.randomise(nets.Skips()), SMALL, backend=backend)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    qat.calibrate(compiled, [SMALL])
    qat.calibrate(plain, [SMALL])
    torch.testing.assert_close(compiled.eval()(SMALL), plain.eval()(SMALL))
    for network in (compiled.train(), plain.train()):
        network(SMALL).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    summaries = [
        qat.export(n, tmp_path / f"{i}.onnx", SMALL).summary
        for i, n in enumerate((compiled, plain))
    ]
    assert summaries[0] == summaries[1] and summaries[0]["int8"] == 5
    with raises(QdqtoolError, "refuse_wrapped compile"):
        qat.prepare(torch.compile(nets.Skips(), backend="aot_eager"), SMALL)


SAMPLE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def _ready(model: nn.Module, sample: torch.Tensor, **options: object) -> nn.Module:
    return nets.ready(nets.randomise(model), sample, **options).eval()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_plain_data_and_restores_everything(backend: str, tmp_path: Path) -> None:
    model = _ready(nets.Skips(), SMALL, backend=backend)
    qat.disable(model, r"^b\.")
    torch.save(qat.checkpoint(model), tmp_path / "qat.pt")
    saved = torch.load(tmp_path / "qat.pt", weights_only=True)
    for other in (nets.Skips(), _ready(nets.Skips(), SMALL, backend=backend)):
        plan = qat.restore(other, saved)
        assert plan == qat.preparation.plan_of(model)
        with torch.no_grad():
            assert torch.equal(other.eval()(SMALL), model(SMALL))
    qat.enable(other)
    assert qat.export(other, tmp_path / "q.onnx", SMALL).summary["conversions"] == 1


def test_other_networks_and_plans_are_told(tmp_path: Path) -> None:
    model = _ready(ResNet18(10, nets.WIDTH), SAMPLE)
    saved = qat.checkpoint(model)
    with raises(QdqtoolError, "restore another"):
        qat.restore(nets.Shared(), saved)
    other = nets.prepared(ResNet18(10, nets.WIDTH), SAMPLE, exclude=["layer1"])
    with raises(QdqtoolError, "restore quantizers"):
        qat.restore(other, saved)
    with raises(QdqtoolError, "_load"):
        qat.restore(other, model.state_dict())
    with raises(QdqtoolError, "restore says"):
        qat.restore(ResNet18(10, nets.WIDTH), model.state_dict())
    wide = ResNet18(10, 2 * nets.WIDTH)
    with raises(QdqtoolError, "_load conv1.weight"):
        qat.restore(wide, saved)
    with raises(QdqtoolError, "plan_from"):
        qat.restore(ResNet18(10, nets.WIDTH), {**saved, "plan": {"activations": 3}})
