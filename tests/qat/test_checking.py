import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat.checking import NoiseInjector
from qdqtool.qat.modules import set_amax
from tests.errors import has
from tests.qat import nets
from tests.qat.backends import BACKENDS

X = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(5))


class Deep(nn.Module):
    """Network of many layers with skips, so that differences of one integer step add up."""

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
    with pytest.warns(UserWarning, match="calibrated with 1 image"):
        qat.calibrate(model, [X])
    return model


@pytest.fixture(scope="module")
def exported(ready: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checking") / "q.onnx"
    export = qat.export(ready, path, X)
    assert export.check.pieces > 10 and export.check.worst < 5e-4
    return path


def initializer(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(t for t in graph.initializer if t.name == name)


def quantizers(graph: onnx.GraphProto, *, weights: bool = False) -> list[onnx.NodeProto]:
    constants = {t.name for t in graph.initializer}
    return [
        n
        for n in graph.node
        if n.op_type == "QuantizeLinear" and (n.input[0] in constants) == weights
    ]


def pair(graph: onnx.GraphProto, q: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.name == q.name or q.output[0] in n.input]


def set_input(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], position: int, value: np.ndarray
) -> None:
    graph.initializer.append(onnx.numpy_helper.from_array(value, "other"))
    for node in nodes:
        node.input[position] = "other"


def change_scale(
    graph: onnx.GraphProto, q: onnx.NodeProto, factor: float, with_dq: bool = True
) -> None:
    scale = onnx.numpy_helper.to_array(initializer(graph, q.input[1]))
    set_input(graph, pair(graph, q) if with_dq else [q], 1, scale * np.float32(factor))


def remove_pair(graph: onnx.GraphProto, q: onnx.NodeProto) -> None:
    for dq in [n for n in graph.node if q.output[0] in n.input]:
        for consumer in graph.node:
            consumer.input[:] = [q.input[0] if t == dq.output[0] else t for t in consumer.input]
        graph.node.remove(dq)
    graph.node.remove(q)


def make_skip_float(graph: onnx.GraphProto) -> None:
    for q in quantizers(graph):
        dq = next(n for n in graph.node if q.output[0] in n.input)
        for consumer in graph.node:
            if consumer.op_type == "Add" and dq.output[0] in consumer.input:
                consumer.input[list(consumer.input).index(dq.output[0])] = q.input[0]
                return
    raise AssertionError("no pair has a skip")


def change_axis(graph: onnx.GraphProto) -> None:
    for node in pair(graph, quantizers(graph, weights=True)[1]):
        next(a for a in node.attribute if a.name == "axis").i = 1


def swap_weights(graph: onnx.GraphProto) -> None:
    first, second = quantizers(graph, weights=True)[1:3]
    for i in range(2):
        a, b = initializer(graph, first.input[i]), initializer(graph, second.input[i])
        a.raw_data, b.raw_data = b.raw_data, a.raw_data


@pytest.mark.parametrize(
    ("change", "code", "node"),
    [
        (
            lambda g: change_scale(g, quantizers(g)[5], 1.001),
            "different-scale",
            "/blocks.2/blocks.2.3/_input_quantizer/QuantizeLinear",
        ),
        (
            lambda g: change_scale(g, quantizers(g)[3], 1.01, with_dq=False),
            "different-scale",
            "/blocks.1/blocks.1.3/_input_quantizer/QuantizeLinear",
        ),
        (
            lambda g: set_input(g, pair(g, quantizers(g)[2]), 2, np.int8(1)),
            "not-symmetric-int8",
            "/blocks.1/blocks.1.0/_input_quantizer/QuantizeLinear",
        ),
        (lambda g: remove_pair(g, quantizers(g)[-1]), "missing-pair", "last._input_quantizer"),
        (
            lambda g: setattr(pair(g, quantizers(g)[5])[1], "op_type", "QuantizeLinear"),
            "no-dequantizer",
            "/blocks.2/blocks.2.3/_input_quantizer/QuantizeLinear",
        ),
        (
            lambda g: change_scale(g, quantizers(g, weights=True)[4], 1.02),
            "different-results",
            None,
        ),
        (lambda g: remove_pair(g, quantizers(g, weights=True)[2]), "different-results", None),
        (make_skip_float, "different-results", None),
        (change_axis, "different-results", None),
        (swap_weights, "different-results", None),
    ],
    ids=[
        "scale of activation",
        "scale of Q",
        "zero point",
        "activation without pair",
        "two Qs in a row",
        "scale of weights",
        "weights without pair",
        "float skip",
        "axis",
        "swapped weights",
    ],
)
def test_check_refuses_changed_model(
    change: Callable[[onnx.GraphProto], None],
    code: str,
    node: str | None,
    ready: nn.Module,
    exported: Path,
    tmp_path: Path,
) -> None:
    proto = onnx.load(exported)
    change(proto.graph)
    onnx.save(proto, tmp_path / "wrong.onnx")
    attributes = {"path": str(tmp_path / "wrong.onnx")} | ({} if node is None else {"node": node})
    with pytest.raises(ModelError, check=has(code, **attributes)) as caught:
        qat.check(ready, tmp_path / "wrong.onnx", X)
    assert caught.value.node


@pytest.mark.parametrize("sample", [X, torch.zeros_like(X)], ids=["random", "zeros"])
def test_check_passes_exported_model(
    sample: torch.Tensor, ready: nn.Module, exported: Path
) -> None:
    result = qat.check(ready, exported, sample)
    assert result.worst < 5e-4 and result.pieces > 10
    assert "pieces agree" in result.text() and "rounding errors" in result.text()


def test_check_of_network_that_cannot_run_in_float64(
    tmp_path: Path,
) -> None:
    fixed = torch.randn(16, 16, 1, 1)  # neither parameter nor buffer: stays float32

    class Filter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(torch.relu(x), fixed)

    model = nets.ready(nn.Sequential(nets.conv(), Filter(), nets.conv()), X)
    export = qat.export(model, tmp_path / "q.onnx", X)
    assert 0 < export.noise < 0.1 and export.check.worst < 5e-4  # from random rounding only


def test_noise_is_about_that_of_single_precision(tmp_path: Path) -> None:
    """Compare with the network's rounding in float64."""
    torch.manual_seed(0)
    model = nets.ready(nn.Sequential(*(m for _ in range(6) for m in (nets.conv(), nn.SiLU()))), X)
    export = qat.export(model, tmp_path / "q.onnx", X)
    single, x = nets.evaluate(model, X).double(), X.double()
    for name, module in model.named_children():
        if isinstance(module, nn.Conv2d):
            step = np.float32(nets.range_of(model, f"{name}._input_quantizer") / 127)
            x = (x / step).round().clamp(-128, 127) * step
            weight = nets.float_weights(module)
            grid = weight.abs().amax((1, 2, 3), keepdim=True) / 127
            rounded = (weight / grid).round().double() * grid.double()
            x = nn.functional.conv2d(x, rounded, module.bias.detach().double(), padding=1)
        else:
            x = nn.functional.silu(x)
    noise = float(((single - x) ** 2).mean().sqrt() / x.std())
    assert 0.5 * noise - 1e-6 < export.noise < 10 * noise + 0.02


def test_noise_depends_on_seed_and_call() -> None:
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(1)) * 3 + 5
    noise = NoiseInjector([1e-2, 1e-4])
    assert torch.equal(noise(x), x)
    noise.start(7)
    changes = [noise(x) - x for _ in range(3)]
    sizes = [float(change.double().std() / x.double().std()) for change in changes]
    assert sizes == pytest.approx([1e-2, 1e-4, 1e-6], rel=0.2)  # further calls by rounding only
    for seed in (7, 8):
        noise.start(seed)
        assert torch.equal(noise(x) - x, changes[0]) is (seed == 7)
    noise.start(None)
    assert torch.equal(noise(x), x)


def test_noise_of_values_between_two_integers(tmp_path: Path) -> None:
    """In single precision, every value is halfway between two integers."""
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1))
    for module in model:
        nn.init.dirac_(module.weight)
        nn.init.zeros_(module.bias)
    x = (
        torch.tensor([0.5, 1.5, 2.5, 126.5])
        .repeat(64, 16, 1)
        .permute(1, 0, 2)
        .reshape(1, 16, 16, 16)
    )
    qat.prepare(model, x, report=None)
    for name in ("0._input_quantizer", "1._input_quantizer"):
        set_amax(model.get_submodule(name), torch.tensor(127.0))
    with qat.disabled(model, r"0\._input"):
        export = qat.export(model, tmp_path / "q.onnx", x)
    assert export.noise > 1e-3 and export.difference < 0.05 + 5 * export.noise


SMALL = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_network_trains_and_exports_as_uncompiled(backend: str, tmp_path: Path) -> None:
    """torch's compiler traces the network with its gradients; no code is generated."""
    torch.manual_seed(0)
    model = nets.prepared(nets.randomise(nets.Skips()), SMALL, backend=backend)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    qat.calibrate(compiled, [SMALL])
    qat.calibrate(plain, [SMALL])
    torch.testing.assert_close(nets.evaluate(compiled, SMALL), nets.evaluate(plain, SMALL))
    for network in (compiled.train(), plain.train()):
        network(SMALL).square().mean().backward()
    gradients = ([p.grad for p in network.parameters()] for network in (model, plain))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    summaries = [
        qat.export(n, tmp_path / f"{i}.onnx", SMALL).summary
        for i, n in enumerate((compiled, plain))
    ]
    assert summaries[0] == summaries[1] and summaries[0]["int8"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [lambda model: torch.compile(model, backend="aot_eager"), nn.DataParallel],
    ids=["compile", "DataParallel"],
)
def test_prepare_refuses_wrapped_network(wrap: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(QdqtoolError, check=has("wrapped-network", parameter="model")):
        qat.prepare(wrap(nets.Skips()), SMALL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_restores_plan_and_state(backend: str, tmp_path: Path) -> None:
    model = nets.ready(nets.randomise(nets.Skips()), SMALL, backend=backend)
    qat.disable(model, r"^b\.")
    torch.save(qat.checkpoint(model), tmp_path / "qat.pt")
    saved = torch.load(tmp_path / "qat.pt", weights_only=True)
    for other in (nets.Skips(), nets.ready(nets.Skips(), SMALL, backend=backend)):
        assert qat.restore(other, saved) == qat.preparation.read_plan(model)
        assert torch.equal(nets.evaluate(other, SMALL), nets.evaluate(model, SMALL))
    qat.enable(other)
    assert qat.export(other, tmp_path / "q.onnx", SMALL).summary["conversions"] == 1


SAMPLE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return nets.ready(nets.resnet18(), SAMPLE)


def partly_prepared() -> nn.Module:
    return nets.prepared(nets.resnet18(), SAMPLE, exclude=["layer1"])


@pytest.mark.parametrize(
    ("network", "saved", "code", "message"),
    [
        pytest.param(nets.Shared, {}, "different-models", "'conv1'", id="other modules"),
        pytest.param(
            lambda: nets.resnet18(2 * nets.WIDTH),
            {},
            "different-models",
            "'conv1.weight'",
            id="other shapes",
        ),
        pytest.param(partly_prepared, {}, "different-plans", "quantizers", id="other plan"),
        pytest.param(
            nets.resnet18,
            {"plan": {"activations": 3}},
            "wrong-format",
            "plan of quantizers is damaged",
            id="damaged plan",
        ),
        pytest.param(
            partly_prepared, None, "different-models", "the checkpoint has", id="other state dict"
        ),
        pytest.param(
            nets.resnet18,
            None,
            "checkpoint-without-plan",
            "prepare first",
            id="state dict into float",
        ),
    ],
)
def test_restore_is_refused(
    network: Callable[[], nn.Module],
    saved: dict[str, object] | None,
    code: str,
    message: str,
    trained: nn.Module,
) -> None:
    state = trained.state_dict() if saved is None else {**qat.checkpoint(trained), **saved}
    with pytest.raises(QdqtoolError, check=has(code), match=message):
        qat.restore(network(), state)


class TwoBranches(nn.Module):
    """Block whose own method merges its two convolutions into one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nets.conv(), nets.conv()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)

    def forward_fuse(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)

    def fuse_convs(self) -> None:
        conv = nets.conv()
        conv.weight.copy_(self.first.weight + self.second.weight)
        conv.bias.copy_(self.first.bias + self.second.bias)
        del self.first, self.second
        self.conv = conv


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([TwoBranches()], "no module '1'"),
        ([nn.ModuleDict({"conv": nets.conv()}), nets.conv()], "branches to merge in module '0'"),
    ],
    ids=["fewer modules", "another module"],
)
def test_restore_into_network_with_other_modules_after_merging_is_refused(
    modules: list[nn.Module], message: str
) -> None:
    saved = qat.checkpoint(nets.ready(nn.Sequential(TwoBranches(), nets.conv()), X))
    assert saved["plan"]["merged"] == ["0"]
    with pytest.raises(QdqtoolError, check=has("different-models"), match=message):
        qat.restore(nn.Sequential(*modules), saved)
