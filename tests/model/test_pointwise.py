"""An activation is a pointwise subgraph of one run-time tensor, however it is written."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.model.graph import Model
from qdqtool.model.pointwise import (
    activation_behind,
    activation_input,
    activation_outputs,
    is_bias,
    region,
    run_time_inputs,
)
from tests.insertion.nets import Net


def gelu(net: Net, tensor: str) -> str:
    """Erf form, as torch exports it: Div, Erf, Add, Mul, Mul."""
    erf = net.op("Erf", "erf", net.op("Div", "div", tensor, net.const("root", np.sqrt(2.0))))
    return net.op("Mul", "half", net.op("Mul", "mul", tensor, net.op("Add", "plus", erf, net.const("one", 1.0))),
                  net.const("0.5", 0.5))


def hard_swish(net: Net, tensor: str) -> str:
    """x * clip(x + 3, 0, 6) / 6, as MobileNetV3 exports it below opset 14."""
    shifted = net.op("Add", "shift", tensor, net.const("three", 3.0))
    clipped = net.op("Clip", "clip", shifted, net.const("zero", 0.0), net.const("six", 6.0))
    return net.op("Div", "sixth", net.op("Mul", "gate", tensor, clipped), "six")


def silu(net: Net, tensor: str) -> str:
    return net.silu("s", tensor)


def relu(net: Net, tensor: str) -> str:
    return net.op("Relu", "r", tensor)


def softplus_mish(net: Net, tensor: str) -> str:
    return net.op("Mul", "m", net.op("Tanh", "t", net.op("Softplus", "sp", tensor)), tensor)


def power(net: Net, tensor: str) -> str:
    return net.op("Pow", "p", tensor, net.const("two", 2.0))


FORMS = {
    "relu": (relu, 1), "silu": (silu, 2), "gelu": (gelu, 5), "hard_swish": (hard_swish, 4), "mish": (softplus_mish, 3),
    "power": (power, 1),
}


def made(form: str) -> tuple[Model, str]:
    net = Net()
    out = FORMS[form][0](net, net.conv("c", "x"))
    net.output(net.conv("next", out))
    return net.index(), out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_function_of_the_convolutions_result(form: str) -> None:
    model, out = made(form)
    assert list(activation_outputs(model, "c.out")) == [out]
    tensor, nodes = out, 0
    while tensor != "c.out":
        node = model.producer(tensor)
        assert node is not None
        source = activation_input(model, node)
        assert source is not None
        nodes += len(region(model, source, node))
        tensor = source
    assert nodes == FORMS[form][1]


@pytest.mark.parametrize("form", FORMS)
def test_what_follows_a_convolution_is_found_part_by_part(form: str) -> None:
    model, out = made(form)
    tensor, nodes = "c.out", 0
    while tensor != out:
        found = activation_behind(model, tensor)
        assert found
        nodes += len(found)
        tensor = found[-1].output
    assert nodes == FORMS[form][1]


def test_two_tensors_make_no_activation() -> None:
    net = Net()
    a, b = net.conv("a", "x"), net.conv("b", "x")
    net.output(net.op("Mul", "m", net.op("Sigmoid", "g", a), b))
    model = net.index()
    assert activation_input(model, model.node("m")) is None
    assert activation_input(model, model.node("g")) == "a.out"
    assert [n.name for n in activation_behind(model, "a.out") or ()] == ["g"]
    assert activation_behind(model, "b.out") is None


def test_a_result_that_leaves_halfway_is_no_single_activation() -> None:
    net = Net()
    gate = net.op("Sigmoid", "g", net.conv("c", "x"))
    net.output(net.op("Mul", "m", "c.out", gate), net.conv("other", gate))
    model = net.index()
    assert list(activation_outputs(model, "c.out")) == ["g.out", "m.out"]
    assert activation_behind(model, "c.out") is None


def test_constants_are_no_run_time_inputs_even_behind_a_reshape() -> None:
    net = Net()
    net.const("k", np.ones(16))
    shaped = net.op("Reshape", "shape", "k", net.const("to", [1, 16, 1, 1], np.int64))
    net.output(net.op("Add", "add", net.conv("c", "x"), shaped))
    model = net.index()
    add = model.node("add")
    assert run_time_inputs(model, add) == ["c.out"]
    assert is_bias(model, add)
    assert not is_bias(model, model.node("c"))


def test_a_normalization_is_no_pointwise_function() -> None:
    net = Net()
    net.output(net.op("Softmax", "s", net.conv("c", "x")))
    model = net.index()
    assert activation_input(model, model.node("s")) is None
    assert activation_behind(model, "c.out") is None
