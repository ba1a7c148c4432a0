import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qdqtool
from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat import plan
from qdqtool.qat.modules import set_amax
from qdqtool.qat.sites import QuantizerSite
from qdqtool.qat.trace import NetworkTrace, trace_network
from qdqtool.reasons.placement import (
    PLACEMENT,
    ExcludedNode,
    NothingToQuantize,
    SkipCause,
    SkippedNode,
)
from tests.errors import has
from tests.insertion.nets import run
from tests.qat import nets


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nets.conv(), nn.BatchNorm2d(16), nn.ReLU(), inner or nn.Identity(), nets.conv()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.branch(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nets.conv(), nn.BatchNorm2d(16), Block(), Block(Block()))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def test_plan_counts_calls() -> None:
    counted = plan(
        Network(), torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    )
    assert set(counted.counted) == {"add", "pool"} and counted.counted["pool"] == [""]
    assert {a.site.kind for a in counted.activations} == {"input", "add", "pool"}


@pytest.fixture(scope="module")
def traced() -> tuple[nn.Module, NetworkTrace]:
    model = ResNet18(10, nets.WIDTH)
    return model, trace_network(model, torch.randn(1, 3, 64, 64))


def test_trace_finds_sites(traced: tuple[nn.Module, NetworkTrace]) -> None:
    model, trace = traced
    nodes = {n.name: n for n in trace.proto.graph.node}
    ops = Counter(nodes[name].op_type for name in {name for name, _ in trace.sites})
    assert ops == {"Add": 8, "Conv": 20, "Gemm": 1, "GlobalAveragePool": 1}
    modules = {s.module for s in trace.sites.values() if s.kind == "input"}
    assert modules == {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def test_sites_of_adds_are_in_their_blocks(traced: tuple[nn.Module, NetworkTrace]) -> None:
    """The positions are those of ``out += identity``."""
    adds = {key: site for key, site in traced[1].sites.items() if site.kind == "add"}
    for (node, position), site in adds.items():
        assert f"/{site.module}/" in node and site.position == position


def test_trace_finds_normalizations(traced: tuple[nn.Module, NetworkTrace]) -> None:
    norms = traced[1].norms
    expected = {
        "layer3.0.bn2": "layer3.0.conv2",
        "layer3.0.downsample.1": "layer3.0.downsample.0",
    }
    assert len(norms) == 20 and expected.items() <= norms.items()


def test_trace_keeps_modes() -> None:
    model = nets.Moody()
    model.b.eval()
    before = [(n, m.training) for n, m in model.named_modules()]
    trace_network(model, torch.randn(1, 16, 8, 8))
    assert [(n, m.training) for n, m in model.named_modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_traced_graph_computes_the_same_and_has_no_marks() -> None:
    model = nets.randomise(ResNet18(10, nets.WIDTH))
    x = torch.randn(1, 3, 64, 64)
    proto = trace_network(model, x).proto
    assert {n.domain for n in proto.graph.node} == {""}
    (result,) = run(proto, {proto.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(result, nets.evaluate(model, x).numpy(), rtol=1e-3, atol=1e-4)


def test_sites_of_containers_count_calls() -> None:
    traced = trace_network(nets.Skips(), torch.randn(1, 16, 8, 8))
    assert {s for s in traced.sites.values() if s.kind == "add"} == {
        QuantizerSite("", "add", call, position) for call in (0, 1) for position in (0, 1)
    }
    assert traced.calls["", "add"] == 2


def test_plan_of_module_that_runs_twice() -> None:
    shared = plan(nets.Shared(), ONE)
    assert [a.site.module for a in shared.activations] == ["first", "both", "last"]
    assert shared.convolutions == ["first", "both", "last"]


@pytest.mark.parametrize("unify", [True, False])
def test_plan_ties_inputs_of_concat_unless_unify_is_off(unify: bool) -> None:
    """``down`` and the Concat both consume the network's input."""
    tied = plan(nets.UpAndDown(), ONE, unify=unify)
    group = {a.site.module: a.group for a in tied.activations}
    assert (group["down"] == group["last"]) is unify and group["last"] != group["up"]
    assert tied.tied == [["down", "last"]] * unify


def test_error_of_torch_export_is_one_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such thing\nsecond line")

    with pytest.raises(ModelError, check=has("export-failed"), match=r"no such thing$"):
        trace_network(Broken(), torch.zeros(1))


ONE = torch.randn(1, 16, 16, 16)


IMAGES = torch.randn(2, 3, 64, 64)


def test_plan_of_resnet18() -> None:
    resnet_plan = plan(nets.resnet18(), IMAGES)
    assert len(resnet_plan.convolutions) == 21
    residuals = [a.site.position for a in resnet_plan.activations if a.role == "residual"]
    assert residuals == [1] * 8  # "out += identity"
    assert [a.site.module for a in resnet_plan.activations if a.site.kind == "pool"] == ["avgpool"]


def test_plan_has_quantizers_of_insert(tmp_path: Path) -> None:
    model, path = nets.resnet18(), tmp_path / "float.onnx"
    torch.onnx.export(model.eval(), (IMAGES[:1],), path, opset_version=17, dynamo=False)
    inserted = qdqtool.insert(path, IMAGES.numpy(), predict=False)
    trained = plan(model, IMAGES[:1])
    assert len(inserted.weights) == len(trained.weights)
    assert len(inserted.activations) == len({a.tensor for a in trained.activations})


def test_convolutions_without_module_are_left_float() -> None:
    odd = plan(nets.Odd(), ONE)
    assert odd.convolutions == ["last"]
    assert [reason for _, reason in odd.skipped] == [SkipCause.UNTRACED_WEIGHTS] * 3


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [(nets.conv(), {"exclude": ["Conv"]}, "nothing to quantize"), (nn.ReLU(), {}, "no Conv")],
    ids=["excluded", "no convolution"],
)
def test_plan_without_quantizer_is_refused(
    model: nn.Module, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NothingToQuantize, match=reason):
        plan(model, ONE, **options)


def test_exclude_leaves_modules_float() -> None:
    partial = plan(nets.resnet18(), IMAGES, exclude=[r"^layer4\.", "/fc/"])
    assert len(partial.convolutions) == 21 - 5 - 1
    assert not any(a.site.module.startswith("layer4") for a in partial.activations)
    reason = SkippedNode(ExcludedNode(PLACEMENT, "fc", "exclude", "/fc/")).reason
    assert ("fc", reason) in partial.skipped


@pytest.mark.parametrize(
    ("include", "convolutions"), [([], ["0", "2"]), (["^4$"], ["0", "2", "4"])]
)
def test_include_quantizes_small_convolution(include: list[str], convolutions: list[str]) -> None:
    relu = nn.ReLU()
    small = nn.Sequential(nets.conv(), relu, nets.conv(16, 5, 1), relu, nets.conv(5, 5))
    assert plan(small, ONE, include=include).convolutions == convolutions


def test_transposed_convolution_is_float_for_rtx() -> None:
    assert "up" not in plan(nets.UpAndDown(), ONE, target="rtx1.7").convolutions


def test_text_of_plan() -> None:
    text = plan(nets.UpAndDown(), ONE, exclude=["up"]).text()
    for part in (
        "convolutions and linear layers in INT8: 2",
        "one amax  down, last",
        "float     up: excluded by `exclude` up",
    ):
        assert part in text
    assert "--" not in text


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("exclude", ["first", "nothing"], "'nothing'"),
        ("exclude", ["first", "("], "not a regular expression"),
        ("include", ["first", "nothing"], "'nothing'"),
        ("include", ["first", "("], "not a regular expression"),
        ("backend", "brevitas", "'brevitas'"),
        ("head", "all", "'all'"),
        ("residual", "yes", "'yes'"),
        ("target", "trt3", "'trt3'"),
    ],
)
def test_pattern_without_match_or_unknown_choice_is_refused(
    option: str, value: Any, reason: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(None, option, reason)):
        plan(nets.Shared(), ONE, **{option: value})


def test_plan_of_attention() -> None:
    model, sample = Projected("self", batch_first=True), torch.randn(1, 5, 16)
    model.expert = nn.Linear(16, 16)  # never called
    attention = plan(model, sample)
    assert attention.convolutions == ["up", "attention", "down"]
    assert attention.unseen == ["expert"]
    assert [w.call for w in attention.weights] == [None, 0, 1, None]
    assert len(plan(model, sample, exclude=["attention"]).weights) == 2


class Projected(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(16, 16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        q = x + torch.sin(x)
        inputs = {"self": (x, x, x), "positions": (q, q, x), "cross": (q, x, x)}[self.kind]
        return self.down(x + self.attention(*inputs, need_weights=False)[0])


@pytest.mark.parametrize("cross_first", [False, True])
def test_attention_called_in_two_ways_is_refused(
    cross_first: bool,
) -> None:
    """The plan accepts one attention for each kind of call, and an excluded attention."""

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
        expected = has("calls-differ", "2 or 3", "exclude=['^own$']", node="own")
        with pytest.raises(QdqtoolError, check=expected):
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
def test_attention_is_quantized_as_by_insert(
    kind: str, options: dict[str, Any], projections: int, tmp_path: Path
) -> None:
    """With packed and with separate weights, the projections are trained, exported and restored."""
    torch.manual_seed(0)
    model, path = Projected(kind, **options).eval(), tmp_path / "float.onnx"
    expected = nets.evaluate(model, TOKENS)
    export = {"dynamo": False, "opset_version": 17, "input_names": ["x"]}
    torch.onnx.export(model, (TOKENS,), path, **export)
    assert len(qat.prepare(model, TOKENS, report=None).weights) == projections + 2
    qat.calibrate(model, [TOKENS])
    quantized = nets.evaluate(model, TOKENS)
    with qat.disabled(model):
        torch.testing.assert_close(nets.evaluate(model, TOKENS), expected)
    assert 1e-4 < float((quantized - expected).std() / expected.std()) < 0.1
    model.train()(TOKENS).sum().backward()
    gradient = model.attention.in_proj_weight.grad
    assert gradient is not None and bool(gradient.any())
    other = Projected(kind, **options).eval()
    qat.restore(other, qat.checkpoint(model.eval()))
    assert torch.equal(nets.evaluate(other, TOKENS), quantized)
    summary = qat.export(model, tmp_path / "q.onnx", TOKENS).summary
    inserted = qdqtool.insert(path, [{"x": TOKENS.numpy()}], residual="none", losses=0)
    for counts in (summary, inserted.prediction.summary()):
        assert counts["matrix_products_int8"] == projections + 2
    trained, placed = (
        sum(n.op_type == "QuantizeLinear" for n in m.graph.node)
        for m in (onnx.load(tmp_path / "q.onnx"), inserted.model)
    )
    assert trained == placed


@pytest.mark.slow
def test_compiled_attention_computes_the_same(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = nets.ready(Projected("positions", batch_first=True).eval(), TOKENS)
    compiled, gradients = torch.compile(model, backend="aot_eager"), []
    for network in (model, compiled):
        model.zero_grad()
        output = network(TOKENS)
        torch.testing.assert_close(output, model(TOKENS))
        output.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 8 and not [w for w in recwarn if "lru_cache" in str(w.message)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_encoder_layer_is_quantized() -> None:
    layer = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    before = nets.evaluate(layer, TOKENS)
    assert len(qat.preparation.read_plan(nets.ready(layer, TOKENS)).weights) == 4
    assert not torch.allclose(nets.evaluate(layer, TOKENS), before, atol=1e-5)


def test_network_with_integer_input(tmp_path: Path) -> None:
    tokens = torch.arange(10)[None]
    model = nets.ready(
        nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval(), tokens
    )
    with pytest.raises(
        QdqtoolError, check=has("wrong-shape", parameter="sample"), match="1x10 floats"
    ):
        qat.export(model, tmp_path / "m.onnx", tokens.float())
    assert qat.export(model, tmp_path / "m.onnx", tokens).difference < 0.1


MANY = torch.randn(16, 16, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def ready() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv(), nn.ReLU(), nets.conv())
    before = nets.evaluate(model, MANY)
    qat.calibrate(nets.prepared(model, MANY[:1]), MANY)
    return model, before


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        (lambda x: torch.zeros(1, 3, 8, 8), "wrong-call", "(1x3x8x8 floats)"),
        (lambda x: (x, x), "wrong-call", "2 positional arguments but 3"),
        (lambda x: (), "wrong-call", "(no tensor)"),
        (lambda x: {"image": x}, "wrong-call", "'image'"),
        (lambda x: None, "missing-argument", "`sample` is missing"),
        (lambda x: x.numpy(), "wrong-type", "ndarray"),
        (lambda x: "x", "wrong-type", "str"),
        (lambda x: 3.5, "wrong-type", "float"),
        (lambda x: x.long(), "wrong-shape", "8 integers): the network was prepared with 1x16x8x8"),
        (
            lambda x: x > 0,
            "wrong-shape",
            "booleans): the network was prepared with 1x16x8x8 floats",
        ),
        (lambda x: x[0], "wrong-shape", "argument 1 (16x8x8 floats)"),
        (lambda x: x[0, 0, 0, 0], "wrong-shape", "argument 1 (a scalar of type floats)"),
        (lambda x: x[:0], "empty", "0x16x8x8 floats"),
        (lambda x: x[:, :, :0], "empty", "16x16x0x8 floats"),
        (lambda x: x * torch.nan, "not-finite", "16x16x8x8 floats"),
    ],
)
def test_unsuitable_sample_is_refused(
    ready: tuple[nn.Module, Tensor],
    tmp_path: Path,
    change: Callable[[Tensor], Any],
    code: str,
    value: str,
) -> None:
    model, path = ready[0], tmp_path / "m.onnx"
    with pytest.raises(QdqtoolError, check=has(code, value, parameter="sample")):
        qat.export(model, path, change(MANY))
    assert not list(tmp_path.iterdir())
    qat.export(model, path, MANY[:1])
    with pytest.raises(QdqtoolError, check=has(code, parameter="sample"), match=re.escape(value)):
        qat.check(model, path, change(MANY))


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.bfloat16])
def test_sample_of_another_float_width(
    ready: tuple[nn.Module, Tensor], tmp_path: Path, kind: torch.dtype
) -> None:
    """The network is exported in FP32."""
    assert qat.export(ready[0], tmp_path / "m.onnx", MANY[:1].to(kind)).difference < 0.1


def test_disabled_quantizers_compute_float(ready: tuple[nn.Module, Tensor]) -> None:
    model, before = ready
    quantized = nets.evaluate(model, MANY)
    assert not torch.equal(quantized, before)
    with qat.disabled(model):
        assert torch.equal(nets.evaluate(model, MANY), before)
    assert torch.equal(nets.evaluate(model, MANY), quantized)
    assert len(qat.disable(model, r"^2\.")) == 2
    assert not torch.equal(nets.evaluate(model, MANY), quantized)
    assert qat.enable(model) == [] and torch.equal(nets.evaluate(model, MANY), quantized)


def test_disable_without_match_is_refused(ready: tuple[nn.Module, Tensor]) -> None:
    with pytest.raises(
        QdqtoolError, check=has("no-match", parameter="patterns"), match="'nothing'"
    ):
        qat.disable(ready[0], "nothing")


def test_disabled_layer_is_exported_in_float(
    ready: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    qat.disable(ready[0], r"^2\.")
    summary = qat.export(ready[0], tmp_path / "q.onnx", MANY[:1]).summary
    assert (summary["int8"], summary["float"]) == (2, 1)


def test_sensitivity_names_worst_layer_first(ready: tuple[nn.Module, Tensor]) -> None:
    model, before = ready
    clipping = model.get_submodule("2._input_quantizer")
    set_amax(clipping, torch.tensor(0.05 * nets.range_of(model, "2._input_quantizer")))
    first, second, *_ = qat.sensitivity(model, [MANY])
    assert first.module == "2" and first.loss > 5 * second.loss
    with qat.disabled(model, r"^(0|4)\."):
        error = ((nets.evaluate(model, MANY) - before) ** 2).mean().sqrt() / before.std()
    assert first.loss == pytest.approx(float(error), rel=1e-4)
    measured = qat.sensitivity(
        model, [], metric=lambda m: -float((nets.evaluate(m, MANY) - before).square().mean())
    )
    assert measured[0].module == "2"
