from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.graph import Model
from qdqtool.qat.cleanup import fold_constants, merge_pairs, transpose_weights
from qdqtool.qat.trace import drop_marks

RNG = np.random.default_rng(0)


def _model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], outputs: list[str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, [2, None]) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _run(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    return session.run(None, {"x": x})


def _pair(tensor: str, name: str, scale: str = "s", zero: str = "z", **axis: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [tensor, scale, zero], [f"{name}_q"], f"{name}/Q", **axis),
        helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_dq"], f"{name}/DQ", **axis),
    ]


def _ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def test_constants_become_initializers() -> None:
    weight = RNG.normal(size=(3, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["c"], "c", value=numpy_helper.from_array(np.zeros((), np.float32))),
        helper.make_node("Cast", ["c"], ["z"], "cast", to=TensorProto.INT8),
        helper.make_node("Identity", ["w"], ["w2"], "identity"),
        helper.make_node("Transpose", ["w2"], ["wt"], "transpose", perm=[1, 0]),
        *_pair("x", "x"),
        helper.make_node("MatMul", ["x_dq", "wt"], ["y"], "product"),
    ]
    model = _model(nodes, {"w": weight, "s": np.float32(0.05).reshape(())}, ["y"])
    folded = fold_constants(Model(model).copy()).proto
    assert _ops(folded) == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    np.testing.assert_array_equal(_run(model)[0], _run(folded)[0])


def test_a_transpose_of_weights_goes_into_them() -> None:
    weight = RNG.normal(size=(3, 4)).astype(np.float32)
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    nodes = [
        *_pair("w", "w", "ws", "wz", axis=0),
        helper.make_node("Transpose", ["w_dq"], ["wt"], "transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"], "product"),
    ]
    model = _model(nodes, {"w": weight, "ws": scales, "wz": np.zeros(3, np.int8)}, ["y"])
    moved = transpose_weights(Model(model).copy()).proto
    assert _ops(moved) == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    np.testing.assert_array_equal(_run(model)[0], _run(moved)[0])


@pytest.mark.parametrize(("second", "left"), [("s", 1), ("other", 2)])
def test_pairs_merge_where_the_scale_is_the_same(second: str, left: int) -> None:
    nodes = [
        *_pair("x", "a"), *_pair("x", "b", second),
        helper.make_node("Relu", ["a_dq"], ["y"], "relu"), helper.make_node("Neg", ["b_dq"], ["v"], "neg"),
    ]  # fmt: skip
    constants = {"s": np.float32(0.05).reshape(()), "other": np.float32(0.1).reshape(()), "z": np.int8(0).reshape(())}
    model = _model(nodes, constants, ["y", "v"])
    merged = merge_pairs(Model(model).copy()).proto
    assert _ops(merged).count("QuantizeLinear") == left
    for before, after in zip(_run(model), _run(merged), strict=True):
        np.testing.assert_array_equal(before, after)


def test_matrix_products_keep_a_dq_of_their_own() -> None:
    weight = RNG.normal(size=(4, 3)).astype(np.float32)
    nodes = [node for name in "abcd" for node in _pair("x", name)]
    nodes += [
        helper.make_node("MatMul", ["a_dq", "w"], ["one"], "one"), helper.make_node("Relu", ["b_dq"], ["two"], "two"),
        helper.make_node("Gemm", ["c_dq", "w"], ["three"], "three"),
        helper.make_node("Neg", ["d_dq"], ["four"], "four"),
    ]  # fmt: skip
    constants = {"s": np.float32(0.05).reshape(()), "z": np.int8(0).reshape(()), "w": weight}
    model = _model(nodes, constants, ["one", "two", "three", "four"])
    merged = merge_pairs(Model(model).copy()).proto
    assert _ops(merged).count("QuantizeLinear") == 1 and _ops(merged).count("DequantizeLinear") == 3
    fed = {n.name: n.input[0] for n in merged.graph.node}
    assert fed["two"] == fed["four"] and len({fed[n] for n in ("one", "two", "three")}) == 3
    for before, after in zip(_run(model), _run(merged), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_pair_that_is_an_output_stays() -> None:
    constants = {"s": np.float32(0.05).reshape(()), "z": np.int8(0).reshape(())}
    model = _model([*_pair("x", "a"), *_pair("x", "b")], constants, ["a_dq", "b_dq"])
    assert _ops(merge_pairs(Model(model).copy()).proto).count("DequantizeLinear") == 2


def _branch(captured: str, name: str) -> onnx.GraphProto:
    nodes = [helper.make_node("Add", [captured, captured], [f"{name}_out"])]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)])


def _if(captured: str) -> onnx.NodeProto:
    """A node whose both branches read a tensor from outside, as detectors of torchvision have them."""
    branches = {f"{n}_branch": _branch(captured, f"{n}_{captured}") for n in ("then", "else")}
    return helper.make_node("If", ["yes"], [f"if_{captured}"], f"if_{captured}", **branches)


def test_what_a_subgraph_reads_stays() -> None:
    constants = {"s": np.float32(0.05).reshape(()), "z": np.int8(0).reshape(()), "yes": np.array(True)}
    nodes = [
        helper.make_node("Constant", [], ["c"], "c", value=numpy_helper.from_array(np.float32([1, 2, 3, 4]))),
        *_pair("x", "a"), *_pair("x", "b"), _if("c"), _if("b_dq"),
        helper.make_node("Add", ["a_dq", "c"], ["sum"], "sum"),
        helper.make_node("Add", ["sum", "if_c"], ["more"], "more"),
        helper.make_node("Add", ["more", "if_b_dq"], ["y"], "y"),
    ]  # fmt: skip
    model = _model(nodes, constants, ["y"])
    copies = [Model(model).copy() for _ in range(3)]
    for tidied in (fold_constants(copies[0]), merge_pairs(copies[1]), merge_pairs(fold_constants(copies[2]))):
        onnx.checker.check_model(tidied.proto)
        np.testing.assert_array_equal(_run(model)[0], _run(tidied.proto)[0])


def test_a_subgraph_reads_what_stood_in_front_of_a_mark() -> None:
    mark = helper.make_node("Mark", ["x"], ["marked"], domain="qdqtool.qat", key=b"0")
    adding = helper.make_node("Add", ["if_marked", "marked"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy")
    yes = numpy_helper.from_array(np.array(True), "yes")
    graph = helper.make_graph([mark, _if("marked"), adding], "g", [x], [y], [yes])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("qdqtool.qat", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    drop_marks(model, {"marked": "x"})
    onnx.checker.check_model(model)
    values = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    np.testing.assert_array_equal(_run(model)[0], 3 * values)
