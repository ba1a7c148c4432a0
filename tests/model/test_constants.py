"""Constants are computed a node at a time: right where they are, and within limits whatever a file asks for."""

import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from qdqtool.model.constants import Constants
from qdqtool.model.graph import Model, Node
from tests.insertion.nets import Net


def value(net: Net, tensor: str, work: int = 1 << 29) -> np.ndarray | None:
    net.output(net.conv("end", "x"))
    return Constants(net.index(), work).value(tensor)


def test_a_chain_of_operators(net: Net) -> None:
    """Weight normalization as torch exports it, against numpy."""
    v, g = net.rng.standard_normal((8, 4, 3, 3)), net.rng.standard_normal((8, 1, 1, 1))
    norm = net.op("ReduceL2", "n", net.const("v", v), axes=[1, 2, 3], keepdims=1)
    found = value(net, net.op("Mul", "m", net.const("g", g), net.op("Div", "d", "v", norm)))
    np.testing.assert_allclose(
        found, g * v / np.sqrt((v**2).sum((1, 2, 3), keepdims=True)), rtol=1e-5
    )


def test_what_several_constants_share_is_computed_once(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, made = [net.const("w", np.ones(8))], []
    for i in range(20):
        chain.append(net.op("Neg", f"n{i}", chain[-1]))
    net.output(net.conv("end", "x"))
    constants, results = Constants(net.index()), Constants.results

    def counted(self: Constants, node: Node, *rest: Any) -> Any:
        made.append(node)
        return results(self, node, *rest)

    monkeypatch.setattr(Constants, "results", counted)
    for place in (10, 20, 5):
        np.testing.assert_array_equal(constants.value(chain[place]), np.ones(8) * (-1) ** place)
    assert len(made) == 20


def asked(net: Net, kind: str) -> str:
    """A constant that takes gigabytes, or hours, in a file of some hundred bytes."""
    sizes = net.op(
        "Mul",
        "sizes",
        net.const("s", [1 << 15, 1 << 18], np.int64),
        net.const("one", [1, 1], np.int64),
    )
    if kind == "filled":  # the size is computed, so that no file states it
        return net.op("ReduceSum", "r", net.op("ConstantOfShape", "f", sizes))
    if kind == "expanded":
        return net.op(
            "ReduceSum", "r", net.op("Expand", "f", net.const("w", np.ones((1, 1))), sizes)
        )
    if kind == "product":
        square = net.op("ConstantOfShape", "f", net.const("side", [4096, 4096], np.int64))
        return net.op("MatMul", "p", square, square)
    if kind == "drawn":
        return net.op("RandomUniformLike", "u", net.const("w", np.ones(8)))
    tensor = net.const("w", np.ones(8))
    for i in range(1001 if kind == "long" else 30):
        joined = ("Concat", f"n{i}", tensor, tensor)
        tensor = net.op(*joined, axis=0) if kind == "doubled" else net.op("Neg", f"n{i}", tensor)
    return tensor


@pytest.mark.parametrize("kind", ["filled", "expanded", "product", "drawn", "long", "doubled"])
def test_what_is_not_computed(net: Net, kind: str) -> None:
    begin = time.process_time()
    assert value(net, asked(net, kind), 1 << 28) is None
    assert time.process_time() - begin < 5


def test_a_loop_is_not_run(net: Net) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["a", "a"], ["b"])],
        "body",
        [helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("c", 9), ("a", 1))],
        [helper.make_tensor_value_info(n, t, []) for n, t in (("d", 9), ("b", 1))],
    )
    trips, go = net.const("trips", 1 << 62, np.int64), net.const("go", True, np.bool_)
    assert value(net, net.op("Loop", "l", trips, go, net.const("w", 1.0), body=body)) is None


def test_work_is_counted_for_all_constants_together(net: Net) -> None:
    net.output(net.conv("end", "x"))
    names = [net.op("Neg", f"n{i}", net.const(f"w{i}", np.ones(100))) for i in range(3)]
    constants = Constants(net.index(), 450)
    found: list[Any] = [constants.value(n) for n in names]
    assert [v is not None for v in found] == [True, True, False] and constants.left == 50


def test_what_depends_on_inputs_or_quantizers_is_no_constant(net: Net) -> None:
    pair = net.op(
        "DequantizeLinear", "dq", net.const("q", np.ones(4), np.int8), net.const("s", 0.5)
    )
    assert value(net, net.op("Neg", "n", pair)) is None
    assert Constants(Model(onnx.ModelProto())).value("nothing") is None
