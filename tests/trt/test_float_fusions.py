import cProfile
from collections.abc import Callable

import numpy as np
import pytest

from qdqtool.findings.lint.api import run as lint
from qdqtool.findings.report import FindingReport
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.quantization.api import insert
from qdqtool.reasons.convolutions import DepthwiseAdd, DepthwiseSilu
from qdqtool.trt.float_fusions import FloatFusions, find_float_fusions
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.targets import TARGETS, target_named
from tests.insertion.nets import Net, images
from tests.patterns.test_structures import gelu, hard_swish
from tests.trt.builder import Graph

FORMS: dict[str, tuple[Callable[[Net, str], str], str]] = {
    "": (lambda net, x: x, ""),
    "bn": (lambda net, x: net.norm("b", x), ""),
    "bias": (lambda net, x: net.op("Add", "bias", x, net.const("k", np.ones((16, 1, 1)))), ""),
    "relu": (lambda net, x: net.op("Relu", "r", x), ""),
    "silu": (lambda net, x: net.silu("s", x), "SiLU"),
    "gelu": (gelu, "Mul"),
    "hard_swish": (hard_swish, "Div"),
}


@pytest.mark.parametrize("form", FORMS)
def test_fusions_of_add_input_are_equal_on_all_targets(
    net: Net, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, activation = FORMS[form]
    inner = make(net, net.conv("c", "x"))
    net.output(net.op("Relu", "end", net.op("Add", "add", inner, "x")))
    for target in (t for t in TARGETS.values() if not t.is_rtx):
        monkeypatch.setattr("qdqtool.trt.float_fusions.ANY_TARGET", target)
        fusions = FloatFusions(net.index())
        assert {t: layer.nodes[0] for t, layer in fusions.add_inputs.items()} == {inner: "c"}
        fusion = fusions.layers["c"].fusion
        assert (fusion.activation.op if fusion.activation is not None else "") == activation
        assert fusion.has_activation is (form not in ("", "bn", "bias"))
        assert fusion.tensor_before_activation == ("c.out" if fusion.has_activation else "")


def test_add_of_one_tensor_is_an_activation(net: Net) -> None:
    up = net.op(
        "ConvTranspose", "up", "x", net.const("w", np.ones((16, 16, 1, 1))), kernel_shape=[1, 1]
    )
    net.output(net.op("Add", "add", net.op("Add", "own", up, net.op("Tanh", "tanh", up)), "x"))
    assert find_float_fusions(net.index()).add_inputs.keys() == {"own.out"}


@pytest.mark.parametrize("output", ["s/Sigmoid.out", "s/Mul.out", "c.out"])
@pytest.mark.parametrize("op", ["", "Cos"])
def test_tensor_with_other_consumer_is_not_an_add_input(net: Net, output: str, op: str) -> None:
    add = net.op("Add", "add", net.silu("s", net.conv("c", "x")), "x")
    net.output(add, net.op(op, "other", output) if op else output)
    assert "s/Mul.out" not in find_float_fusions(net.index()).add_inputs


def test_fusions_are_cached_and_residual_adds_are_not_fused(net: Net) -> None:
    model = net.output(
        net.conv("end", net.op("Add", "add", net.conv("c", "x"), net.conv("d", "x")))
    ).index()
    assert find_float_fusions(model) is find_float_fusions(model) and find_float_fusions(
        model
    ) is not find_float_fusions(net.index())
    assert find_float_fusions(model).add_inputs.keys() == {"c.out", "d.out"}
    assert [layer.nodes for layer in find_float_fusions(model).layers.values()] == [
        ["c"],
        ["d"],
        ["end"],
    ]


FORMS_KEPT_FLOAT = (DepthwiseSilu, DepthwiseAdd)


def forms_skipped(net: Net) -> list[type]:
    placement = compute_placement(
        net.index(), PlacementRules(head="none", failing=list(FORMS_KEPT_FLOAT))
    )
    return [type(s.record) for s in placement.skipped if isinstance(s.record, FORMS_KEPT_FLOAT)]


def forms_reported(net: Net) -> list[type]:
    model = Model(insert(net.model(), images(1), method="max", target="trt10", head="none").model)
    report = FindingReport("trt8.6")
    lint(
        View(model),
        report,
        simulate_without_alternatives(model, target_named("trt8.6")).convolutions,
    )
    reasons = [cause.reason for finding in report.findings for cause in finding.causes]
    return [type(r) for r in reasons if isinstance(r, FORMS_KEPT_FLOAT)]


def activate(net: Net, kind: str, x: str, name: str) -> str:
    return net.silu(name, x) if kind == "silu" else net.op(kind, name, x)


def residual_and_depthwise(inner: str, depthwise: str) -> Net:
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    deep = activate(net, depthwise, net.conv("dw", stem, group=16), "act")
    out = activate(net, inner, net.conv("c", deep), "s")
    return net.output(net.conv("end", net.op("Add", "add", out, deep)))


@pytest.mark.parametrize(
    ("inner", "tensor"), [("silu", "s/Mul.out"), ("Relu", "s.out"), ("Neg", "s.out")]
)
def test_placement_quantizes_inputs_of_residual_add(inner: str, tensor: str) -> None:
    model = residual_and_depthwise(inner, "silu").index()
    inputs = compute_placement(model, PlacementRules(head="none")).inputs.items()
    residuals = {t for t, consumers in inputs if any(c.role == "residual" for c in consumers)}
    assert residuals == {tensor, "act/Mul.out"}


@pytest.mark.parametrize(
    ("depthwise", "forms"), [("silu", [DepthwiseSilu]), ("Relu", []), ("Neg", []), ("Tanh", [])]
)
def test_placement_and_findings_agree_on_depthwise_silu(depthwise: str, forms: list[type]) -> None:
    net = residual_and_depthwise("silu", depthwise)
    assert forms_skipped(net) == forms_reported(net) == forms


@pytest.mark.parametrize(
    ("operators", "forms"),
    [
        ((), [DepthwiseAdd]),
        (("bias",), [DepthwiseAdd]),  # adding a bias is not a residual Add
        (("Relu",), []),
        (("bias", "Relu"), []),
    ],
    ids=["none", "bias", "relu", "bias-relu"],
)
def test_depthwise_convolution_before_add_is_reported(
    net: Net, operators: tuple[str, ...], forms: list[type]
) -> None:
    x = net.conv("dw", net.conv("c", "x"), group=16)
    for op in operators:
        bias = [net.const("k", np.ones((16, 1, 1)))] if op == "bias" else []
        x = net.op("Add" if bias else op, op, x, *bias)
    assert forms_reported(net.output(net.conv("end", net.op("Add", "add", x, "x")))) == forms


def test_work_grows_linearly_with_adds_along_a_chain() -> None:
    def calls(size: int) -> int:
        g = Graph()
        gate, other = g.input(1, 8, 4, 4, name="gate"), g.input(1, 8, 4, 4, name="other")
        x, sums = g.conv(g.input(1, 8, 4, 4), "c"), []
        for i in range(size):
            x = g.op("Mul", [x, gate], f"m{i}")
            sums.append(g.add(x, other, f"a{i}"))
        profile = cProfile.Profile()
        profile.runcall(FloatFusions, Model(g.model(*sums)))
        return sum(entry.callcount for entry in profile.getstats())

    # The search upstream of each Add is bounded, else this would be 4.
    assert calls(400) < 3 * calls(200)
