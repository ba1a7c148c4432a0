"""Predictions do not depend on how exporters write Q/DQ, names, weights and scales."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool import Precision, Prediction, insert
from qdqtool.evidence import Evidence
from qdqtool.prediction import predict
from qdqtool.reasons.quantizers import NonzeroZeroPoint
from tests.insertion.nets import detector
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.rtx.test_patterns import FOLDER, patterns

INT8, FLOAT = Precision.INT8, Precision.FLOAT
Outcome = tuple[list[Precision], Precision]


def chain(g: Graph, weights: str = "qdq") -> onnx.ModelProto:
    x = g.relu(g.conv(g.input(1, 3, 8, 8), "a", weights=weights), "r")
    return g.model(g.op("Softmax", g.conv(x, "b", weights=weights), "s"))


def outcomes(prediction: Prediction) -> dict[str, Outcome]:
    return {c.name: (c.inputs, c.output) for c in prediction.convolutions}


EXPECTED: dict[str, Outcome] = {"a": ([INT8], INT8), "b": ([INT8], FLOAT)}


@pytest.mark.parametrize("constant_nodes", [False, True])
@pytest.mark.parametrize("weights", ["qdq", "tensor", "int8"])
@pytest.mark.parametrize("target", ["trt8.0", "trt8.4", "trt8.5", "trt8.6", "trt10"])
def test_forms_of_weights_and_constants(weights: str, constant_nodes: bool, target: str) -> None:
    prediction = predict(chain(Graph(constant_nodes=constant_nodes), weights), target, advice=False)
    assert (outcomes(prediction), prediction.conversion_nodes) == (EXPECTED, ["a.in.Q"])


@pytest.mark.parametrize("shape", [(), (1,)], ids=["[]", "[1]"])
@pytest.mark.parametrize("zero", [True, False], ids=["zero-point", "no-zero-point"])
def test_scale_shapes(g: Graph, shape: tuple[int, ...], zero: bool) -> None:
    x = g.input(1, 3, 8, 8)
    for name in "ab":
        scale = g.const(f"{name}.s", np.full(shape, 0.1, np.float32))
        point = [g.const(f"{name}.z", np.zeros(shape, np.int8))] if zero else []
        x = g.op("QuantizeLinear", [x, scale, *point], f"{name}.Q")
        x = g.op("DequantizeLinear", [x, scale, *point], f"{name}.DQ")
        x = g.relu(g.conv(x, name, scale=None), f"{name}.r")
    assert outcomes(predict(g.model(g.op("Softmax", x, "s")), advice=False)) == EXPECTED


def with_axis(axis: int) -> onnx.ModelProto:
    model = chain(Graph())
    for attribute in (
        a for n in model.graph.node if n.op_type.endswith("quantizeLinear") for a in n.attribute
    ):
        attribute.i = axis
    return model


def with_microsoft_domain() -> onnx.ModelProto:
    model = chain(Graph())
    for node in model.graph.node:
        node.domain = (
            "com.microsoft" if node.op_type in ("QuantizeLinear", "DequantizeLinear") else ""
        )
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


def with_initializers_as_inputs() -> onnx.ModelProto:
    model = chain(Graph())
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in model.graph.initializer
    )
    return model


@pytest.mark.parametrize(
    "model",
    [
        # Before opset 13 a tensor has one scale, and Split and Softmax have other semantics.
        *(
            pytest.param(
                chain(Graph(opset=opset), "tensor" if opset < 13 else "qdq"), id=f"opset {opset}"
            )
            for opset in range(10, 24)
        ),
        pytest.param(with_axis(0), id="axis 0"),
        pytest.param(with_axis(-4), id="axis -4"),
        pytest.param(with_microsoft_domain(), id="com.microsoft"),
        pytest.param(with_initializers_as_inputs(), id="initializers as inputs"),
        pytest.param(chain(Graph(opset=19, half=True)), id="float16"),
    ],
)
def test_one_network_in_many_spellings(model: onnx.ModelProto) -> None:
    assert outcomes(predict(model, "trt10", advice=False)) == EXPECTED


@pytest.mark.parametrize("label", ["", "same"])
def test_nodes_without_unique_names_go_by_first_output(label: str) -> None:
    model = chain(Graph())
    for node in model.graph.node:
        node.name = label
    prediction = predict(model, advice=False)
    assert outcomes(prediction) == {"a:0": EXPECTED["a"], "b:0": EXPECTED["b"]}
    assert len(prediction.conversion_nodes) == 1
    names = [layer.name for layer in prediction.layers]
    assert len(names) == len(set(names))


def test_unnamed_nodes_have_layer_names_of_parser() -> None:
    # NVIDIA's parser: node_of_<output> (NVIDIA/TensorRT issue 3385).
    model = chain(Graph(), "int8")
    for node in model.graph.node:
        node.name = ""
    assert (
        predict(model, advice=False).convolutions[0].layer == "a.weight + node_of_a:0 + node_of_r:0"
    )


def test_onnxruntime_asymmetric_runs_in_float(tmp_path: Path) -> None:
    # TensorRT accepts only the zero point 0.
    prediction = predict(quantize_with_onnxruntime(tmp_path), advice=False)
    assert all(c.precision.is_float for c in prediction.convolutions)
    reasons = [r for r in prediction.refusals if r.pass_name == "QuantizeDoubleInputNodes"]
    assert {type(r) for r in reasons} == {NonzeroZeroPoint}


def test_onnxruntime_without_bias_quantizers(tmp_path: Path) -> None:
    options = {
        "ActivationSymmetric": True,
        "QuantizeBias": False,
        "OpTypesToExcludeOutputQuantization": ["Conv"],
    }
    prediction = predict(quantize_with_onnxruntime(tmp_path, extra_options=options), advice=False)
    assert [c.precision for c in prediction.convolutions] == [INT8, INT8]


@pytest.mark.parametrize("keep", ["scales", "nothing"])
def test_missing_external_data(tmp_path: Path, keep: str) -> None:
    model, path = chain(Graph()), tmp_path / "model.onnx"
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=(1024 if keep == "scales" else 0),
        convert_attribute=True,
    )
    (tmp_path / "weights.bin").unlink()
    assert outcomes(predict(path, advice=False)) == EXPECTED


# Exporters ----------------------------------------------------------------------------------------------------


class RandomImages:
    def __init__(self, count: int = 2) -> None:
        self.images = iter(np.random.default_rng(0).normal(0, 1, (count, 1, 3, 8, 8)))

    def get_next(self) -> dict[str, Any] | None:
        image = next(self.images, None)
        return None if image is None else {"x": image.astype(np.float32)}


def quantize_with_onnxruntime(tmp_path: Path, **options: Any) -> onnx.ModelProto:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    CalibrationDataReader.register(RandomImages)
    g = Graph()
    x = g.relu(g.conv(g.input(1, 3, 8, 8), "a", scale=None, weights="float", bias=True), "r")
    onnx.save(
        g.model(g.conv(x, "b", scale=None, weights="float", bias=True)), tmp_path / "float.onnx"
    )
    quantize_static(
        str(tmp_path / "float.onnx"),
        str(tmp_path / "q.onnx"),
        RandomImages(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        **options,
    )
    return onnx.load(tmp_path / "q.onnx")


@pytest.mark.parametrize("per_channel", [False, True])
def test_onnxruntime_symmetric(tmp_path: Path, per_channel: bool) -> None:
    # The bias is int32 and comes from a DQ, the weights are int8, and the output has a pair.
    model = quantize_with_onnxruntime(
        tmp_path, per_channel=per_channel, extra_options={"ActivationSymmetric": True}
    )
    assert any(n.op_type == "DequantizeLinear" and "bias" in n.input[0] for n in model.graph.node)
    assert outcomes(predict(model, advice=False)) == {"a": ([INT8], INT8), "b": ([INT8], INT8)}


def tensorflow(g: Graph, fold: bool) -> onnx.ModelProto:
    """Build a network in NHWC: Transposes around each convolution, pairs outside of them.

    Weights are HWIO and have a pair before their Transpose, unless it is folded.
    """
    x, channels = g.input(1, 8, 8, 3), 3
    for name in "ab":
        x = g.op("Transpose", g.pair(x, f"{name}.in", [0.1]), f"{name}.before", perm=[0, 3, 1, 2])
        if fold:
            weights = g.weights(name, (8, channels, 3, 3), "qdq")
        else:
            stored = g.const(f"{name}.weight", g.random.normal(0, 0.3, (3, 3, channels, 8)))
            pair = g.pair(stored, f"{name}.w", [0.01] * 8, axis=3)
            weights = g.op("Transpose", pair, f"{name}.wt", perm=[3, 2, 0, 1])
        x = g.op("Conv", [x, weights], name, pads=[1] * 4)
        x = g.relu(g.op("Transpose", x, f"{name}.after", perm=[0, 2, 3, 1]), f"{name}.r")
        channels = 8
    return g.model(g.op("Softmax", x, "s"))


@pytest.mark.parametrize("fold", [True, False], ids=["weights-OIHW", "weights-HWIO"])
@pytest.mark.parametrize("constant_nodes", [True, False])
def test_tensorflow(fold: bool, constant_nodes: bool) -> None:
    # The DQ moves down past the Transpose, so that every convolution reads INT8. Scales have shape
    # [1].
    prediction = predict(tensorflow(Graph(constant_nodes=constant_nodes), fold), advice=False)
    assert [(c.name, c.inputs) for c in prediction.convolutions] == [("a", [INT8]), ("b", [INT8])]


def test_modelopt(g: Graph) -> None:
    x = g.relu(g.conv(g.input(1, 3, 8, 8), "stem", weights="int8", bias=True), "r")
    y = g.relu(g.conv(x, "a", weights="int8", bias=True), "ra")
    y = g.conv(y, "b", weights="int8", bias=True)
    out = g.relu(g.add(y, g.pair(x, "skip", 0.1), "Add"), "rb")
    pooled = g.op("GlobalAveragePool", g.conv(out, "c", weights="int8"), "gap")
    prediction = predict(g.model(pooled), advice=False)
    assert outcomes(prediction) == {
        "stem": ([INT8], INT8),
        "a": ([INT8], INT8),
        "b": ([INT8, INT8], INT8),
        "c": ([INT8], FLOAT),
    }
    assert next(c for c in prediction.convolutions if c.name == "b").fused == ["Add", "rb"]


def test_float16_before_opset_19(g: Graph) -> None:
    # Scales stay float32, and a Cast to float16 follows each DQ.
    half = onnx.TensorProto.FLOAT16
    x = g.op("Cast", g.input(1, 3, 8, 8), "to16", to=half)
    x = g.op("Cast", x, "to32", to=onnx.TensorProto.FLOAT)
    weights = g.op("Cast", g.weights("c", (8, 3, 3, 3), "qdq"), "weights16", to=half)
    out = g.op("Conv", [g.op("Cast", g.pair(x, "in"), "data16", to=half), weights], "c")
    conv = predict(g.model(g.op("Softmax", out, "s")), "trt10", advice=False).convolutions[0]
    assert (conv.inputs, conv.output, conv.evidence) == ([INT8], FLOAT, Evidence.ASSUMED)


@pytest.mark.skipif(
    not (FOLDER / "patterns.tar.xz").exists(), reason="the shared patterns are not here"
)
@pytest.mark.parametrize("target", slow_after(1, ["trt8.5", "trt8.0", "trt11"]))
def test_shared_patterns_are_predicted_on_every_target(target: str) -> None:
    assert len(patterns()) == 163
    for name, data in patterns().items():
        prediction = predict(data, target, advice=False)
        operators = [n.op_type for n in onnx.ModelProto.FromString(data).graph.node]
        weighted = sum(op in ("Conv", "ConvTranspose", "Gemm", "MatMul") for op in operators)
        assert len(prediction.convolutions) <= weighted, name
        assert (prediction.conversions > 0) <= (
            "QuantizeLinear" in operators or "DequantizeLinear" in operators
        ), name


@pytest.mark.parametrize("weights", slow_after(1, ["float", "int8"]))
def test_inserted_model_has_int8_convolutions(weights: str) -> None:
    # Every convolution whose weights got a pair is INT8, every other one is float.
    data = np.random.default_rng(0).uniform(0, 1, (1, 3, 64, 64)).astype(np.float32)
    inserted = insert(detector(), data, method="max", weights=weights, predict=False)
    prediction = predict(inserted.model, advice=False)
    dequantizers = {
        o for n in inserted.model.graph.node if n.op_type == "DequantizeLinear" for o in n.output
    }
    expected = {
        n.name: INT8 if n.input[1] in dequantizers else FLOAT
        for n in inserted.model.graph.node
        if n.op_type == "Conv"
    }
    assert list(expected.values()).count(INT8) == 27
    assert {c.name: c.precision for c in prediction.convolutions} == expected


# Strange graphs -----------------------------------------------------------------------------------------------


def conv_names(prediction: Prediction) -> list[str]:
    return [c.name for c in prediction.convolutions]


def test_graph_of_input_or_constant_only_has_no_layers(g: Graph) -> None:
    g.input(1, 3, 8, 8)
    assert predict(g.model("x"), advice=False).layers == []
    g.const("k", [1.0])
    assert predict(g.model("k"), advice=False).convolutions == []


def test_empty_graph() -> None:
    graph = onnx.helper.make_graph([], "g", [], [])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])
    prediction = predict(model, advice=False)
    assert (prediction.convolutions, prediction.layers, prediction.conversions) == ([], [], 0)


def test_network_input_of_integers_needs_no_conversion(g: Graph) -> None:
    g.inputs.append(onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT8, [1, 3, 8, 8]))
    g.channels["i"] = 3
    prediction = predict(g.model(g.conv(g.dq("i", "dq"), "c", scale=None)), advice=False)
    assert (outcomes(prediction), prediction.conversions) == ({"c": ([INT8], FLOAT)}, 0)


def test_convolution_without_effect_is_not_listed(g: Graph) -> None:
    x = g.input(1, 3, 8, 8)
    g.conv(x, "dead")
    assert conv_names(predict(g.model(g.conv(x, "alive")), advice=False)) == ["alive"]


def test_network_output_of_integers(g: Graph) -> None:
    assert outcomes(
        predict(g.model(g.q(g.conv(g.input(1, 3, 8, 8), "c"), "out")), advice=False)
    ) == {"c": ([INT8], INT8)}


def test_consumer_in_branch_keeps_output_float(g: Graph) -> None:
    conv = g.conv(g.input(1, 3, 8, 8), "c")
    branches = {
        "then_branch": branch("then", conv, "Relu"),
        "else_branch": branch("else", conv, "Neg"),
    }
    condition = g.const("yes", np.asarray(True))
    g.nodes.append(onnx.helper.make_node("If", [condition], ["if:0"], "If", **branches))
    prediction = predict(g.model("if:0", g.op("Softmax", g.conv(conv, "d"), "s")), advice=False)
    assert outcomes(prediction) == {"c": ([INT8], FLOAT), "d": ([INT8], FLOAT)}


def test_consumer_in_loop_keeps_output_float(g: Graph) -> None:
    body = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Identity", ["go"], ["go_on"]),
            onnx.helper.make_node("Add", ["v", g.conv(g.input(1, 3, 8, 8), "c", 3)], ["w"]),
        ],
        "body",
        [
            onnx.helper.make_tensor_value_info("n", onnx.TensorProto.INT64, []),
            onnx.helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, None),
        ],
        [
            onnx.helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, None),
        ],
    )
    count = g.const("count", np.asarray(3, np.int64))
    g.nodes.append(onnx.helper.make_node("Loop", [count, "", "x"], ["loop:0"], "Loop", body=body))
    assert outcomes(predict(g.model("loop:0"), advice=False)) == {"c": ([INT8], FLOAT)}


def branch(name: str, outer: str, op: str) -> onnx.GraphProto:
    out = onnx.helper.make_tensor_value_info(f"{name}_out", onnx.TensorProto.FLOAT, None)
    return onnx.helper.make_graph(
        [onnx.helper.make_node(op, [outer], [f"{name}_out"], f"{name}_{op}")], name, [], [out]
    )
