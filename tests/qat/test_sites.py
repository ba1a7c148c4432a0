"""Watchers of calls, and where they rest."""

import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qdqtool
from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.explain.left_float import PLACEMENT, Excluded, Hidden, SkippedNode
from qdqtool.qat import plan
from qdqtool.qat.modules import observing
from qdqtool.qat.sites import CallWatcher, Site, resting
from qdqtool.qat.trace import trace
from tests.qat import nets
from tests.raising import raises

X = torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A skip around a branch that holds a skip itself."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nets.conv(), nn.BatchNorm2d(16), nn.ReLU(), inner or nn.Identity(), nets.conv()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.branch(x))


class Network(nn.Module):
    """Nested skips, with a pool behind everything."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nets.conv(), nn.BatchNorm2d(16), Block(), Block(Block()))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), 1)
        return self.last(pooled.flatten(1))


class Counting(TorchFunctionMode):  # type: ignore[misc]
    """A mode of the user's own."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


def _prepared() -> tuple[nn.Module, qat.Plan]:
    torch.manual_seed(0)
    model = Network().eval()
    return model, qat.prepare(model, X, report=None)


def _seen(
    model: nn.Module, counted: dict[str, list[str]] | None
) -> tuple[list[tuple[str, str, Tensor]], int]:
    """What observers see, and how many calls the watchers were shown."""
    found: list[tuple[str, str, Tensor]] = []
    names = {id(m): n for n, m in model.named_modules()}
    shown = 0
    original = CallWatcher.__torch_function__

    def counting(self: CallWatcher, *given: Any) -> Any:
        nonlocal shown
        shown += 1
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(CallWatcher, "__torch_function__", counting)
        with (
            observing(lambda module, name, value: found.append((names[id(module)], name, value))),
            nullcontext() if counted is None else resting(model, counted),
        ):
            model(X)
    return found, shown


def test_what_is_watched() -> None:
    model, plan = _prepared()
    assert set(plan.counted) == {"add", "pool"} and plan.counted["pool"] == [""]
    assert {a.site.kind for a in plan.activations} == {"input", "add", "pool"}
    wanted, many = _seen(model, None)
    found, few = _seen(model, plan.counted)
    assert [f[:2] for f in found] == [w[:2] for w in wanted]
    assert all(torch.equal(f[2], w[2]) for f, w in zip(found, wanted, strict=True))
    assert few < many / 3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model, plan = _prepared()
    _, many = _seen(model, None)
    found, all_of_them = _seen(model, {})
    assert all_of_them == many and len(found) == len(_seen(model, plan.counted)[0])


def test_modes_of_the_user_go_on_and_errors_leave_nothing_behind() -> None:
    model, plan = _prepared()
    Counting.calls = 0
    with torch.no_grad(), observing(lambda *_: None), resting(model, plan.counted), Counting():
        model(X)
        outside = Counting.calls
    assert outside > 20
    handle = model.features[2].branch[2].register_forward_pre_hook(_fail)
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        observing(lambda *_: None),
        resting(model, plan.counted),
    ):
        model(X)
    handle.remove()
    assert torch.overrides._get_current_function_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(_seen(model, plan.counted)[0]) == len(_seen(model, None)[0])


def _fail(*_: Any) -> None:
    raise RuntimeError("on purpose")


def test_what_is_seen_and_left() -> None:
    model = ResNet18(10, nets.WIDTH)
    traced = trace(model, torch.randn(1, 3, 64, 64))
    nodes = {n.name: n for n in traced.proto.graph.node}
    kinds = {name: nodes[name].op_type for name, _ in traced.sites}
    assert sorted(kinds.values()) == ["Add"] * 8 + ["Conv"] * 20 + ["Gemm", "GlobalAveragePool"]
    modules = {s.module for s in traced.sites.values() if s.kind == "input"}
    assert modules == {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    for (node, position), site in traced.sites.items():
        if (
            site.kind == "add"
        ):  # the node's name holds the block's; the sides are those of "out += identity"
            assert f"/{site.module}/" in node and site.position == position
    traced = trace(ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64))
    assert len(traced.norms) == 20
    assert traced.norms["layer3.0.bn2"] == "layer3.0.conv2"
    assert traced.norms["layer3.0.downsample.1"] == "layer3.0.downsample.0"
    model = nets.Moody()
    model.b.eval()
    before = [(n, m.training) for n, m in model.named_modules()]
    trace(model, torch.randn(1, 16, 8, 8))
    assert [(n, m.training) for n, m in model.named_modules()] == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_graph_computes_what_the_network_does_and_has_no_marks() -> None:
    model = nets.randomise(ResNet18(10, nets.WIDTH))
    x = torch.randn(1, 3, 64, 64)
    proto = trace(model, x).proto
    assert {n.domain for n in proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(result, model.eval()(x).numpy(), rtol=1e-3, atol=1e-4)


def test_modules_that_run_twice_or_in_containers() -> None:
    traced = trace(nets.Skips(), torch.randn(1, 16, 8, 8))
    adds = {s for s in traced.sites.values() if s.kind == "add"}
    assert adds == {Site("", "add", call, position) for call in (0, 1) for position in (0, 1)}
    assert traced.calls["", "add"] == 2
    found = plan(nets.Shared(), ONE)
    assert [a.site.module for a in found.activations] == ["first", "both", "last"]
    assert found.convolutions == ["first", "both", "last"]
    found = plan(nets.UpAndDown(), ONE)
    group = {a.site.module: a.group for a in found.activations}
    assert (
        group["down"] == group["last"] != group["up"]
    )  # "down" reads the network's input, which Concat takes as well
    loose = plan(nets.UpAndDown(), ONE, unify=False)
    assert len({a.group for a in loose.activations}) == 3
    assert loose.tied == [] and found.tied == [["down", "last"]]


def test_what_torch_cannot_export_is_told_in_one_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such thing\nsecond line")

    with raises(ModelError, "export_proto"):
        trace(Broken(), torch.zeros(1))


ONE = torch.randn(1, 16, 16, 16)


def test_residuals_as_insert_places_them() -> None:
    found = plan(ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64))
    assert len(found.convolutions) == 21
    residuals = [a.site for a in found.activations if a.role == "residual"]
    assert len(residuals) == 8 and all(s.position == 1 for s in residuals)  # "out += identity"
    assert [a.site.module for a in found.activations if a.site.kind == "pool"] == ["avgpool"]
    model = nets.randomise(ResNet18(10, nets.WIDTH))
    sample = torch.randn(2, 3, 64, 64)
    file = io.BytesIO()
    torch.onnx.export(model.eval(), (sample[:1],), file, opset_version=17, dynamo=False)
    float_model = onnx.load_from_string(file.getvalue())
    inserted = qdqtool.insert(float_model, sample.numpy(), predict=False)
    found = plan(model, sample[:1])
    assert len(inserted.weights) == len(found.weights)
    assert len(inserted.activations) == len({a.tensor for a in found.activations})


def test_what_stays_float() -> None:
    found = plan(nets.Odd(), ONE)
    assert found.convolutions == ["last"]
    assert len(found.skipped) == 3
    assert {reason for _, reason in found.skipped} == {Hidden.WEIGHTED}
    with pytest.raises(ModelError, match="nothing to quantize"):
        plan(nets.conv(), ONE, exclude=["Conv"])
    with pytest.raises(ModelError, match="no Conv"):
        plan(nn.ReLU(), ONE)


def test_choices_of_sites() -> None:
    model, sample = ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64)
    found = plan(model, sample, exclude=[r"^layer4\.", "/fc/"])
    assert len(found.convolutions) == 21 - 5 - 1
    assert not any(a.site.module.startswith("layer4") for a in found.activations)
    assert ("fc", SkippedNode(Excluded(PLACEMENT, "fc", "exclude", "/fc/")).reason) in found.skipped
    small = nn.Sequential(
        nets.conv(16, 16), nn.ReLU(), nets.conv(16, 5, 1), nn.ReLU(), nets.conv(5, 5, 3)
    )
    assert plan(small, ONE).convolutions == ["0", "2"]
    assert plan(small, ONE, include=["^4$"]).convolutions == ["0", "2", "4"]
    found = plan(nets.UpAndDown(), ONE, target="rtx1.7")
    assert "up" not in found.convolutions  # TensorRT-RTX runs no ConvTranspose in INT8
    text = plan(nets.UpAndDown(), ONE, exclude=["up"]).text()
    assert "2 convolutions and linear layers in INT8" in text
    assert "one amax  down, last" in text
    assert "float     up: excluded by `exclude` up" in text
    assert "--" not in text


@pytest.mark.parametrize("option", ["exclude", "include"])
def test_patterns_have_to_match(option: str) -> None:
    with pytest.raises(QdqtoolError, match=re.escape(f"{option} 'nothing': matches no module")):
        plan(nets.Shared(), ONE, **{option: ["first", "nothing"]})  # type: ignore[arg-type]
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        plan(nets.Shared(), ONE, **{option: ["("]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"backend": "brevitas"}, {"head": "all"}, {"residual": "yes"}, {"target": "trt3"}]
)
def test_wrong_options(options: dict[str, str]) -> None:
    with pytest.raises(QdqtoolError):
        plan(nets.Shared(), ONE, **options)  # type: ignore[arg-type]


def test_projections_of_attention_are_reached() -> None:
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
    assert found.convolutions == ["up", "attention", "down"] and found.unseen == ["expert"]
    assert [w.call for w in found.weights] == [None, 0, 1, None]
    assert len(plan(Attending(), torch.randn(1, 5, 16), exclude=["attention"]).weights) == 2


class Projected(nn.Module):
    """Attention to itself, to the same with positions, or to other keys and values."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(16, 16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        q = x + torch.sin(x)
        given = {"self": (x, x, x), "positions": (q, q, x), "cross": (q, x, x)}[self.kind]
        return self.down(x + self.attention(*given, need_weights=False)[0])


@pytest.mark.parametrize("cross_first", [False, True])
def test_one_attention_called_in_two_ways_is_refused_when_the_network_is_prepared(
    cross_first: bool,
) -> None:
    """By name; one for each way, and the module left float, are taken."""

    class Both(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.up, self.own = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
            self.other = nn.MultiheadAttention(16, 2, batch_first=True) if apart else self.own

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = self.up(x)
            for cross in (cross_first, not cross_first):
                y = memory if cross else x
                x = x + (self.other if cross else self.own)(x, y, y, need_weights=False)[0]
            return x

    sample = (torch.randn(1, 5, 16), torch.randn(1, 7, 16))
    for call in (lambda m: plan(m, sample), lambda m: qat.prepare(m, sample, report=None)):
        with raises(QdqtoolError, "_refuse_varied MultiheadAttention 2 3 exclude=['^own$']"):
            call(Both(False))
    assert plan(Both(False), sample, exclude=["^own$"]).convolutions == ["up"]
    assert plan(Both(True), sample).convolutions == (
        ["up", "other", "own"] if cross_first else ["up", "own", "other"]
    )


TOKENS = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("kind", "options", "projections"),
    [
        ("self", {"batch_first": True}, 2),
        ("positions", {"batch_first": True}, 4),
        ("cross", {"bias": False}, 3),
        ("self", {"kdim": 16, "vdim": 16, "add_bias_kv": True, "batch_first": True}, 2),
    ],
)
def test_projections_of_attention_are_quantized_as_insert_places_them(
    kind: str, options: dict[str, Any], projections: int, tmp_path: Path
) -> None:
    """Packed or not; trained with gradients, in evaluation not by torch's fused path, and kept in a checkpoint."""
    torch.manual_seed(0)
    model = Projected(kind, **options).eval()
    with torch.no_grad():
        wanted = model(TOKENS)
    torch.onnx.export(
        model, (TOKENS,), tmp_path / "float.onnx", dynamo=False, opset_version=17, input_names=["x"]
    )
    found = qat.prepare(model, TOKENS, report=None)
    assert len(found.weights) == projections + 2
    qat.calibrate(model, [TOKENS])
    with torch.no_grad():
        quantized = model(TOKENS)
        with qat.disabled(model):
            torch.testing.assert_close(model(TOKENS), wanted)
    assert 1e-4 < float((quantized - wanted).std() / wanted.std()) < 0.1
    model.train()(TOKENS).sum().backward()
    assert model.attention.in_proj_weight.grad is not None and bool(
        model.attention.in_proj_weight.grad.any()
    )
    other = Projected(kind, **options).eval()
    qat.restore(other, qat.checkpoint(model.eval()))
    with torch.no_grad():
        assert torch.equal(other(TOKENS), quantized)
    done = qat.export(model, tmp_path / "q.onnx", TOKENS)
    inserted = qdqtool.insert(
        tmp_path / "float.onnx", [{"x": TOKENS.numpy()}], residual="none", losses=0
    )
    assert inserted.prediction is not None
    assert (
        done.summary["matrix_products_int8"]
        == inserted.prediction.summary()["matrix_products_int8"]
    )
    assert done.summary["matrix_products_int8"] == projections + 2
    weights = [
        sum(n.op_type == "QuantizeLinear" for n in m.graph.node)
        for m in (onnx.load(tmp_path / "q.onnx"), inserted.model)
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_quantized_attention_is_compiled_as_it_is() -> None:
    torch.manual_seed(0)
    model = nets.ready(Projected("positions", batch_first=True).eval(), TOKENS)
    compiled = torch.compile(model, backend="aot_eager")
    grads = []
    for network in (model, compiled):
        model.zero_grad()
        out = network(TOKENS)
        torch.testing.assert_close(out, model(TOKENS))
        out.square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 8
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


def test_attention_and_integers(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    with torch.no_grad():
        wanted = layer(TOKENS)
    assert len(qat.preparation.plan_of(nets.ready(layer, TOKENS)).weights) == 4
    with torch.no_grad():
        assert not torch.allclose(layer(TOKENS), wanted, atol=1e-5)
    tokens = torch.arange(10)[None]
    model = nets.ready(
        nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval(), tokens
    )
    with raises(QdqtoolError, "as_call 1x10"):
        qat.export(model, tmp_path / "m.onnx", tokens.float())
    assert qat.export(model, tmp_path / "m.onnx", tokens).difference < 0.1


PLAIN = "as_call 1: 16x16x8x8 torch."  # tensor


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda x: torch.zeros(1, 3, 8, 8), "reference Sequential: (1x3x8x8"),
        (lambda x: (x, x), "reference Sequential: (16x16x8x8 2 3"),
        (lambda x: (), "reference Sequential: (no"),
        (lambda x: {"image": x}, "reference Sequential: 'image'"),
        (lambda x: None, "sample_for sample=None"),
        (lambda x: x.numpy(), "as_call ndarray"),
        (lambda x: "x", "as_call str"),
        (lambda x: 3.5, "as_call float"),
        (lambda x: x.long(), "as_call 1: 16x16x8x8 integers 1x16x8x8 floats"),
        (lambda x: x > 0, "as_call 1: booleans 1x16x8x8 floats"),
        (lambda x: x[0], "as_call 1: 16x8x8 1x16x8x8"),
        (lambda x: x[0, 0, 0, 0], "as_call 1: number 1x16x8x8"),
        (lambda x: x[:0], "as_call 1: 0x16x8x8"),
        (lambda x: x[:, :, :0], "as_call 1: 16x16x0x8"),
        (lambda x: x * torch.nan, "as_call 1: 16x16x8x8 numbers"),
        (lambda x: x.to("meta"), f"{PLAIN}strided, meta"),
        (lambda x: x.to_sparse(), f"{PLAIN}sparse_coo, cpu"),
        (lambda x: x.to(torch.complex64), f"{PLAIN}complex64"),
        (lambda x: x.to_mkldnn(), f"{PLAIN}_mkldnn"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), f"{PLAIN}qint8"),
        (lambda x: [x.to_sparse()], f"{PLAIN}sparse_coo"),
        (lambda x: {"input": x.to(torch.complex64)}, "as_call 'input'"),
    ],
)
def test_a_wrong_sample_ends_in_one_line(
    tmp_path: Path, wrong: Callable[[torch.Tensor], Any], told: str
) -> None:
    model, _ = _ready()
    with raises(QdqtoolError, told) as caught:
        qat.export(model, tmp_path / "m.onnx", wrong(MANY))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    qat.export(model, tmp_path / "m.onnx", MANY[:1])
    with raises(QdqtoolError, told):
        qat.check(model, tmp_path / "m.onnx", wrong(MANY))


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.bfloat16])
def test_floats_of_another_width_are_taken(tmp_path: Path, kind: torch.dtype) -> None:
    """The network is exported in FP32, whatever it was trained in."""
    model, _ = _ready()
    assert qat.export(model, tmp_path / "m.onnx", MANY[:1].to(kind)).difference < 0.1


MANY = torch.randn(16, 16, 8, 8, generator=torch.Generator().manual_seed(2))


def _ready() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv(), nn.ReLU(), nets.conv()).eval()
    with torch.no_grad():
        wanted = model(MANY)
    qat.calibrate(nets.prepared(model, MANY[:1]), MANY)
    return model, wanted


def test_what_is_off(tmp_path: Path) -> None:
    model, wanted = _ready()
    with torch.no_grad():
        quantized = model(MANY)
        assert not torch.equal(quantized, wanted)
        with qat.disabled(model):
            assert torch.equal(model(MANY), wanted)
        assert torch.equal(model(MANY), quantized)
        assert len(qat.disable(model, r"^2\.")) == 2
        assert not torch.equal(model(MANY), quantized)
        assert qat.enable(model) == []
        assert torch.equal(model(MANY), quantized)
    with raises(QdqtoolError, "_switch nothing"):
        qat.disable(model, "nothing")
    model, _ = _ready()
    qat.disable(model, r"^2\.")
    done = qat.export(model, tmp_path / "q.onnx", MANY[:1])
    assert (done.summary["int8"], done.summary["float"]) == (2, 1)


def test_the_layer_that_costs_most_comes_first() -> None:
    model, wanted = _ready()
    model[2]._input_quantizer._amax.mul_(0.05)  # a range that clips nearly everything
    found = qat.sensitivity(model, [MANY])
    assert found[0].module == "2" and found[0].loss > 5 * found[1].loss
    with torch.no_grad(), qat.disabled(model, r"^(0|4)\."):
        by_hand = float(((model(MANY) - wanted) ** 2).mean().sqrt() / wanted.std())
    assert found[0].loss == pytest.approx(by_hand, rel=1e-4)
    measured = qat.sensitivity(
        model, [], metric=lambda m: -float((m(MANY) - wanted).square().mean())
    )
    assert measured[0].module == "2"
