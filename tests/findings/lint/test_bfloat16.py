import ml_dtypes
import numpy as np
import onnx
import pytest

import qdqtool

SHAPE = [1, 16, 8, 8]


def tensor(name: str, value: np.ndarray) -> onnx.TensorProto:
    data = np.asarray(value).astype(ml_dtypes.bfloat16)
    return onnx.helper.make_tensor(
        name, onnx.TensorProto.BFLOAT16, data.shape, data.tobytes(), raw=True
    )


def model(nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]) -> onnx.ModelProto:
    ends = [
        onnx.helper.make_tensor_value_info(t, onnx.TensorProto.BFLOAT16, SHAPE) for t in ("x", "y")
    ]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10
    )


def weights() -> onnx.TensorProto:
    return tensor("w", np.random.default_rng(0).normal(0, 0.1, (16, 16, 1, 1)))


def quantized() -> onnx.ModelProto:
    zero = onnx.numpy_helper.from_array(np.int8(0), "z")
    scale = ["s", "z"]
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", *scale], ["q"], "q"),
        onnx.helper.make_node("DequantizeLinear", ["q", *scale], ["d"], "dq"),
        onnx.helper.make_node("QuantizeLinear", ["w", *scale], ["wq"], "wq"),
        onnx.helper.make_node("DequantizeLinear", ["wq", *scale], ["wd"], "wdq"),
        onnx.helper.make_node("Conv", ["d", "wd"], ["c"], "c"),
        onnx.helper.make_node("Relu", ["c"], ["y"], "r"),
    ]
    return model(nodes, [weights(), tensor("s", np.array(0.02)), zero])


@pytest.mark.parametrize(
    ("target", "is_refused"),
    [("8.0", True), ("8.6", True), ("9.0", False), ("10.3", False), ("11", False)],
)
def test_parsers_before_9_refuse_bfloat16(target: str, is_refused: bool) -> None:
    findings = qdqtool.predict(quantized(), target).findings
    assert [f.code for f in findings if f.severity == "error"] == ["FLOAT-BF16"] * is_refused


@pytest.mark.parametrize(("sm", "is_refused"), [("7.0", True), ("7.5", True), ("8.0", False)])
def test_gpus_before_8_have_no_bfloat16(sm: str, is_refused: bool) -> None:
    assert (
        "GPU-NO-BF16" in qdqtool.predict(quantized(), "trt10", sm=sm).findings_by_code()
    ) == is_refused


def test_insert_widens_bfloat16() -> None:
    x = np.random.default_rng(1).normal(0, 1, SHAPE).astype(np.float32)
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], "c"),
        onnx.helper.make_node("Relu", ["c"], ["y"]),
    ]
    insertion = qdqtool.insert(model(nodes, [weights()]), [{"x": x}])
    assert "bfloat16-widened" in [note.code for note in insertion.notes]
    assert qdqtool.predict(insertion.model).summary()["int8"] == 1
    before = np.asarray(onnx.numpy_helper.to_array(weights()), np.float32)
    stored = map(onnx.numpy_helper.to_array, insertion.model.graph.initializer)
    assert any(np.array_equal(value, before) for value in stored)
