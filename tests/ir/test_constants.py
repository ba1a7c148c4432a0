import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.ir.constants import ConstantEvaluator, find_computed_parameters, fold_constants
from qdqtool.ir.graph import Model
from tests.insertion.nets import Net


def value(net: Net, tensor: str, work: int = 1 << 29) -> np.ndarray | None:
    return ConstantEvaluator(net.output(net.conv("end", "x")).index(), work).evaluate(tensor)


def test_constant_of_chain_of_operators(net: Net) -> None:
    # Weight normalization as torch exports it, against numpy.
    v, g = net.rng.standard_normal((8, 4, 3, 3)), net.rng.standard_normal((8, 1, 1, 1))
    norm = net.op("ReduceL2", "n", net.const("v", v), axes=[1, 2, 3], keepdims=1)
    weights = value(net, net.op("Mul", "m", net.const("g", g), net.op("Div", "d", "v", norm)))
    np.testing.assert_allclose(
        weights, g * v / np.sqrt((v**2).sum((1, 2, 3), keepdims=True)), rtol=1e-5
    )


def test_shared_part_of_constants_is_computed_once(net: Net) -> None:
    chain = [net.const("w", np.ones(8))]
    for i in range(20):
        chain.append(net.op("Neg", f"n{i}", chain[-1]))
    constants = ConstantEvaluator(net.output(net.conv("end", "x")).index(), work=1000)
    for length in (10, 20, 5):
        np.testing.assert_array_equal(
            constants.evaluate(chain[length]), np.ones(8) * (-1) ** length
        )
    assert constants.operations_left == 1000 - 20 * (8 + 8)  # elements read and written by 20 nodes


def sizes(net: Net) -> str:
    # The size is computed, so that the file does not state it.
    numbers = net.const("s", [1 << 15, 1 << 18], np.int64)
    return net.op("Mul", "sizes", numbers, net.const("one", [1, 1], np.int64))


def repeated(net: Net, count: int, op: str, operands: int, **attributes: int) -> str:
    tensor = net.const("w", np.ones(8))
    for i in range(count):
        tensor = net.op(op, f"n{i}", *[tensor] * operands, **attributes)
    return tensor


@pytest.mark.parametrize(
    "build",
    [
        lambda net: net.op("ReduceSum", "r", net.op("ConstantOfShape", "f", sizes(net))),
        lambda net: net.op(
            "ReduceSum", "r", net.op("Expand", "f", net.const("w", np.ones((1, 1))), sizes(net))
        ),
        lambda net: net.op(
            "MatMul",
            "p",
            *[net.op("ConstantOfShape", "f", net.const("side", [4096, 4096], np.int64))] * 2,
        ),
        lambda net: net.op("RandomUniformLike", "u", net.const("w", np.ones(8))),
        lambda net: repeated(net, 1001, "Neg", 1),
        lambda net: repeated(net, 30, "Concat", 2, axis=0),
    ],
    ids=["filled", "expanded", "product", "drawn", "long", "doubled"],
)
def test_expensive_constant_is_not_computed(net: Net, build: Callable[[Net], str]) -> None:
    # A few hundred bytes of nodes compute each constant for hours or in gigabytes.
    net.output(net.conv("end", "x"))
    tensor, constants = build(net), ConstantEvaluator(net.index(), work=1 << 28)
    tracemalloc.start()
    assert constants.evaluate(tensor) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The peak is in bytes. Constants have at most 2^25 elements.
    assert constants.operations_left >= 0 and peak < 2 * (4 << 25)


def test_loop_is_not_run(net: Net) -> None:
    body = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Identity", ["c"], ["d"]),
            onnx.helper.make_node("Add", ["a", "a"], ["b"]),
        ],
        "body",
        [onnx.helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("c", 9), ("a", 1))],
        [onnx.helper.make_tensor_value_info(n, t, []) for n, t in (("d", 9), ("b", 1))],
    )
    trips, go = net.const("trips", 1 << 62, np.int64), net.const("go", True, np.bool_)
    assert value(net, net.op("Loop", "l", trips, go, net.const("w", 1.0), body=body)) is None


def test_work_is_counted_for_all_constants(net: Net) -> None:
    net.output(net.conv("end", "x"))
    names = [net.op("Neg", f"n{i}", net.const(f"w{i}", np.ones(100))) for i in range(3)]
    constants = ConstantEvaluator(net.index(), 450)
    values: list[Any] = [constants.evaluate(n) for n in names]
    assert [v is not None for v in values] == [
        True,
        True,
        False,
    ] and constants.operations_left == 50


def test_tensor_after_quantizer_is_not_constant(net: Net) -> None:
    pair = net.op(
        "DequantizeLinear", "dq", net.const("q", np.ones(4), np.int8), net.const("s", 0.5)
    )
    assert value(net, net.op("Neg", "n", pair)) is None


def test_unknown_tensor_is_not_constant() -> None:
    assert ConstantEvaluator(Model(onnx.ModelProto())).evaluate("nothing") is None


# Folding --------------------------------------------------------------------------------------


def filled(net: Net, name: str, dims: list[int], value: float = 0.5) -> str:
    tensor = onnx.helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [value])
    return net.op("ConstantOfShape", name, net.const(f"{name}.dims", dims, np.int64), value=tensor)


def convolution(net: Net, weights: str) -> Model:
    return net.output(net.op("Conv", "c", "x", weights, kernel_shape=[3, 3], pads=[1] * 4)).index()


def test_computed_weights_become_initializers(net: Net) -> None:
    doubled = net.op("Add", "sum", filled(net, "a", [8, 16, 3, 3]), filled(net, "b", [8, 16, 3, 3]))
    model = convolution(net, doubled)
    folded = fold_constants(model)
    assert [node.op for node in folded.nodes] == ["Conv"]
    np.testing.assert_array_equal(folded.constant(doubled), np.ones((8, 16, 3, 3)))
    assert fold_constants(model) is folded and len(model.nodes) == 4


def test_chain_from_a_static_shape_is_folded(net: Net) -> None:
    size = net.op("Cast", "float", net.op("Size", "size", "x"), to=onnx.TensorProto.FLOAT)
    folded = fold_constants(net.output(net.op("Mul", "scaled", "x", size)).index())
    assert [node.op for node in folded.nodes] == ["Mul"]
    assert folded.constant(size) == np.prod(folded.shape("x"))


def test_large_constant_has_shape_without_data(net: Net) -> None:
    weights = net.op("Neg", "n", filled(net, "w", [1 << 13, 16, 3, 3]))
    folded = fold_constants(convolution(net, weights))
    assert [node.op for node in folded.nodes] == ["Conv"]
    assert (
        folded.constant_shape(weights) == (1 << 13, 16, 3, 3) and folded.constant(weights) is None
    )


def test_computed_scale_is_folded(net: Net) -> None:
    scale, zero = filled(net, "s", [1]), net.const("z", 0, np.int8)
    q = net.op("QuantizeLinear", "q", "x", scale, zero)
    model = net.output(net.op("DequantizeLinear", "dq", q, scale, zero)).index()
    assert [node.op for node in fold_constants(model).nodes] == [
        "QuantizeLinear",
        "DequantizeLinear",
    ]
    assert {t: [n.op for n in nodes] for t, nodes in find_computed_parameters(model).items()} == {
        scale: ["QuantizeLinear", "DequantizeLinear"]
    }


def quantized_weights(net: Net) -> str:
    scale, zero = net.const("s", 0.5), net.const("z", 0, np.int8)
    q = net.op("QuantizeLinear", "q", filled(net, "w", [8, 16, 3, 3]), scale, zero)
    return net.op("DequantizeLinear", "dq", q, scale, zero)


def output_weights(net: Net) -> str:
    weights = filled(net, "w", [8, 16, 3, 3])
    net.output(weights)
    return weights


@pytest.mark.parametrize(
    "make_weights",
    [
        lambda net: net.op(
            "Transpose", "t", net.const("w", np.ones((3, 3, 4, 8))), perm=[3, 2, 0, 1]
        ),
        quantized_weights,
        output_weights,
        lambda net: net.op("RandomNormal", "noise", shape=[8, 16, 3, 3]),
    ],
    ids=["moved", "quantized", "network output", "random"],
)
def test_other_weights_are_not_folded(net: Net, make_weights: Callable[[Net], str]) -> None:
    model = convolution(net, make_weights(net))
    assert fold_constants(model) is model
