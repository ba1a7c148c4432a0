"""GenericConvActFusion: yolo-resnet18-orin-trt8502, line 5365."""

import pytest

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.refusals import ActivationBeforeAdd
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def test_activations_and_their_readers(g: Graph) -> None:
    out = g.op("LeakyRelu", g.bn(g.conv(g.input(1, 3, 8, 8), "Conv"), "bn"), "LeakyRelu")
    found = step(g.model(out), GenericConvActFusion)
    assert found.rows == [("Running", "Conv"), ("Fusing", "Conv", "PWN(LeakyRelu)")]
    assert evidence_of(found.layer("Conv + PWN(LeakyRelu)")) == Evidence.SEEN
    g = Graph()
    # mobilenetv2-titanrtx-qat-residual, 17 of them
    out = g.op("Clip", g.conv(g.input(1, 8, 8, 8), "Conv", groups=8), "Clip_13")
    found = step(g.model(out), GenericConvActFusion)
    assert found.rows == [("Running", "Conv"), ("Fusing", "Conv", "PWN(Clip_13)")]
    assert evidence_of(found.layer("Conv + PWN(Clip_13)")) == Evidence.SEEN
    g = Graph()
    conv = g.conv(g.input(1, 3, 8, 8), "c")
    leaky = g.op("LeakyRelu", conv, "l")
    assert step(g.model(leaky, conv), GenericConvActFusion).rows == []
    g = Graph()
    out = g.op("LeakyRelu", g.relu(g.conv(g.input(1, 3, 8, 8), "c"), "r"), "l")
    assert step(g.model(out), GenericConvActFusion).rows == []


@pytest.mark.parametrize(
    ("groups", "evidence"),
    [(1, Evidence.SEEN), (8, Evidence.ASSUMED)],
    ids=[
        "silu",
        "depthwise-silu",
    ],  # a YOLOv8n on 10.14.1; TensorRT issue 3205 (NVIDIA's own depthwise kernel)
)
def test_silu(g: Graph, groups: int, evidence: Evidence) -> None:
    out = g.silu(g.conv(g.input(1, 8, 8, 8), "Conv", groups=groups), "act")
    found = step(g.model(out), GenericConvActFusion)
    assert found.rows == [("Running", "Conv"), ("Fusing", "Conv", "PWN(act.s, act.m)")]
    assert evidence_of(found.layer("Conv + PWN(act.s, act.m)")) == evidence


def test_silu_joined_with_a_residual_is_refused(g: Graph) -> None:
    """TensorRT issue 2204: PWN(PWN(sigmoid, mul), add) has a second input."""
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    out = g.add(g.silu(g.conv(x, "Conv"), "act"), x, "Add")
    found = step(g.model(out), GenericConvActFusion)
    assert (found.rows, found.reasons) == ([], [("Conv", "activation-before-add")])
    (refusal,) = found.refusals
    assert isinstance(refusal, ActivationBeforeAdd)
    assert (refusal.add, refusal.activation) == ("Add", "act.m")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("silu", "SiLU"),
        ("gate of another", "Mul"),
        ("leaky", "LeakyRelu"),
        ("two", "Exp"),
        ("hard", "HardSwish"),
        ("Swish", "SiLU"),
        ("gate alone", "Sigmoid"),
        ("gate and another", "Exp"),
        ("gate and a number", "Mul"),
        ("more", "Exp"),
    ],
)
def test_what_the_activation_is_called(form: str, name: str) -> None:
    """x * gate(x), and nothing else that begins with a gate, is SiLU; the rest has its last operator's name."""
    g = Graph(opset=14)
    x = g.conv(g.input(1, 8, 8, 8), "c")
    if form == "silu":
        x = g.silu(x, "act")
    elif form == "more":
        x = g.op("Exp", g.silu(x, "inner"), "act")
    elif form.startswith("gate a"):
        x = g.op("Sigmoid", x, "act" if form == "gate alone" else "s")
        if form == "gate and another":
            x = g.op("Exp", x, "act")
        elif form == "gate and a number":
            x = g.op("Mul", [x, g.const("two", [2.0])], "act")
    elif form == "gate of another":
        x = g.op("Mul", [x, g.op("Exp", g.op("Abs", x, "abs"), "e")], "act")
    elif form == "two":
        x = g.op("Exp", g.op("Abs", x, "abs"), "act")
    else:
        x = g.op({"leaky": "LeakyRelu", "hard": "HardSwish"}.get(form, form), x, "act")
    found = step(g.model(g.op("Softmax", x, "end")), GenericConvActFusion)
    activations = [
        layer.fusion.activation for layer in found.network.of_kind(LayerKind.CONVOLUTION)
    ]
    assert [a.op for a in activations if a is not None] == [name]
