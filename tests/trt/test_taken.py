"""What convolutions take in before there is any Q/DQ: the passes say it, and nobody else knows."""

from collections.abc import Callable

import numpy as np
import pytest

from qdqtool.explain.lint.api import run as lint
from qdqtool.explain.report import Report
from qdqtool.insertion.api import insert
from qdqtool.insertion.placement import Rules, place
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.trt import taken as taken_module
from qdqtool.trt.faults import DepthwiseAdd, DepthwiseSilu
from qdqtool.trt.layers import constant_of
from qdqtool.trt.outcome import settled
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.taken import Taken, taken
from qdqtool.trt.targets import TARGETS, target_named
from tests.insertion.nets import Net, images
from tests.model.test_structures import gelu, hard_swish
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
def test_what_writes_the_input_of_an_add_is_the_same_on_all_targets(net: Net, form: str) -> None:
    make, activation = FORMS[form]
    inner = make(net, net.conv("c", "x"))
    net.output(net.op("Relu", "end", net.op("Add", "add", inner, "x")))
    for target in (t for t in TARGETS.values() if not t.is_rtx):
        found = Taken(net.index(), target)
        assert {t: layer.nodes[0] for t, layer in found.summed.items()} == {inner: "c"}
        fusion = found.nodes["c"].fusion
        assert (fusion.activation.op if fusion.activation is not None else "") == activation
        assert fusion.activated is (form not in ("", "bn", "bias"))
        assert fusion.bare == ("c.out" if fusion.activated else "")


def test_a_sum_that_is_a_function_of_one_tensor_is_an_activation(net: Net) -> None:
    up = net.op(
        "ConvTranspose", "up", "x", net.const("w", np.ones((16, 16, 1, 1))), kernel_shape=[1, 1]
    )
    own = net.op("Add", "own", up, net.op("Tanh", "tanh", up))
    net.output(net.op("Add", "add", own, "x"))
    assert taken(net.index()).summed.keys() == {"own.out"}


@pytest.mark.parametrize("output", ["s/Sigmoid.out", "s/Mul.out", "c.out"])
@pytest.mark.parametrize("op", ["", "Cos"])
def test_what_is_read_elsewhere_on_the_way_is_not_written_for_the_add(
    net: Net, output: str, op: str
) -> None:
    add = net.op("Add", "add", net.silu("s", net.conv("c", "x")), "x")
    net.output(add, net.op(op, "other", output) if op else output)
    assert "s/Mul.out" not in taken(net.index()).summed


def test_it_is_asked_once_until_the_network_is_edited_and_no_sums_are_taken(net: Net) -> None:
    net.output(net.conv("end", net.op("Add", "add", net.conv("c", "x"), net.conv("d", "x"))))
    model = net.index()
    assert taken(model) is taken(model) and taken(model) is not taken(net.index())
    assert taken(model).summed.keys() == {"c.out", "d.out"}
    assert [layer.nodes for layer in taken(model).nodes.values()] == [["c"], ["d"], ["end"]]


# Nobody else knows: without the pass that takes an activation, or with another one, all answers follow.


def told(net: Net) -> tuple[set[str], list[type], list[type]]:
    """What a network's residual Adds read quantized, and the forms for which placement and checks want float."""
    model = net.index()
    placement = place(model, Rules(head="none", failing=[DepthwiseSilu, DepthwiseAdd]))
    read = {t for t, readers in placement.readers.items() for r in readers if r.role == "residual"}
    made = Model(insert(net.model(), images(1), method="max", target="trt10", head="none").model)
    report = Report("trt8.6")
    lint(View(made), report, settled(made, target_named("trt8.6")).convolutions)
    forms = (DepthwiseSilu, DepthwiseAdd)
    return (
        read,
        [type(s.refusal) for s in placement.skipped if isinstance(s.refusal, forms)],
        [
            type(c.refusal)
            for f in report.findings
            for c in f.causes
            if isinstance(c.refusal, forms)
        ],
    )


def residual_and_depthwise(kind: str) -> Net:
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    deep = net.silu("act", net.conv("dw", stem, group=16))
    inner = {"silu": lambda x: net.silu("s", x), "neg": lambda x: net.op("Neg", "neg", x)}[kind](
        net.conv("c", deep)
    )
    net.output(net.conv("end", net.op("Add", "add", inner, deep)))
    return net


def test_what_no_pass_takes_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(residual_and_depthwise("silu")) == (
        {"s/Mul.out", "act/Mul.out"},
        [DepthwiseSilu],
        [DepthwiseSilu],
    )
    assert told(residual_and_depthwise("neg"))[0] == {"neg.out", "act/Mul.out"}  # a layer between
    monkeypatch.setattr(GenericConvActFusion, "apply", lambda self, network: None)
    assert told(residual_and_depthwise("silu")) == ({"s/Mul.out", "act/Mul.out"}, [], [])
    monkeypatch.setattr("qdqtool.trt.taken.KINDS", ())
    assert told(residual_and_depthwise("silu")) == (set(), [], [])


def test_a_bias_in_front_of_an_add_is_no_sum_of_a_depthwise_convolution(net: Net) -> None:
    def forms(*inner: str) -> list[type]:
        net = Net()
        x = net.conv("dw", net.conv("c", "x"), group=16)
        for op in inner:
            x = (
                net.op("Add", "bias", x, net.const("k", np.ones((16, 1, 1))))
                if op == "bias"
                else net.op(op, op, x)
            )
        net.output(net.conv("end", net.op("Add", "add", x, "x")))
        return told(net)[2]

    assert (
        forms() == forms("bias") == [DepthwiseAdd] and forms("Relu") == forms("bias", "Relu") == []
    )


def test_sums_along_a_chain_are_followed_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the sums of a long chain would be followed to its front."""
    looked = []
    monkeypatch.setattr(
        taken_module, "constant_of", lambda tensor: looked.append(tensor) or constant_of(tensor)
    )

    def work(size: int) -> int:
        looked.clear()
        g = Graph()
        gate, other = g.input(1, 8, 4, 4, name="gate"), g.input(1, 8, 4, 4, name="other")
        x, sums = g.conv(g.input(1, 8, 4, 4), "c"), []
        for i in range(size):
            x = g.op("Mul", [x, gate], f"m{i}")
            sums.append(g.add(x, other, f"a{i}"))
        Taken(Model(g.model(*sums)))
        return len(looked)

    assert work(600) < 3 * work(300)
