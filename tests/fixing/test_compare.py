"""Noise against the float network, computed by hand."""

import numpy as np
import onnx
import onnx.parser
import pytest

from qdqtool.fixing import compare
from qdqtool.fixing.api import fix
from qdqtool.fixing.runner import ModelRunner, RunError, RunLimitError
from qdqtool.ir.graph import Model
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.util import limits
from tests.findings.test_causes import residual
from tests.trt.builder import Graph


def pair_model(scale=0.1):
    g = Graph()
    return g.model(g.pair(g.input(1, 4, 8, 8), "p", scale))


def test_runner_computes_float_outputs():
    proto = remove_quantizers(Model(pair_model())).proto
    assert [n.op_type for n in proto.graph.node] == ["Identity"]
    x = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    assert np.array_equal(ModelRunner().run(proto, {"x": x})["p.DQ:0"], x)
    g = Graph()
    x = g.input(1, 4, 8, 8)
    proto = remove_quantizers(Model(g.model(g.pair(x, "p", 0.1), "p.Q:0"))).proto
    assert {n.op_type for n in proto.graph.node} == {"QuantizeLinear", "Identity"}
    values = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    found = ModelRunner().run(proto, {"x": values})
    assert np.array_equal(found["p.DQ:0"], values)
    assert np.array_equal(found["p.Q:0"], np.clip(np.rint(values / np.float32(0.1)), -128, 127))
    g = Graph()
    y = g.conv(g.input(1, 16, 8, 8), "c", 16)
    model = Model(g.model(g.op("Softmax", y, "soft", axis=1)))
    proto, cut = compare.cut_runnable_part(model, body=True)
    assert cut == ["soft"] and [o.name for o in proto.graph.output] == ["c:0"]


def test_noise_is_measured_and_inputs_are_checked():
    before = compare.OutputNoise({"a": 1.0, "b": 0.01}, True)
    assert compare.is_within(before, compare.OutputNoise({"a": 1.0, "b": 0.012}, True), 1.3)
    assert not compare.is_within(before, compare.OutputNoise({"a": 0.5, "b": 0.5}, True), 1.3)
    assert not compare.is_within(before, compare.OutputNoise({"a": 0.5, "b": 0.0}, False), 1.3)
    proto = pair_model()
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4, 8, 8)).astype(np.float32)
    reference = ModelRunner().run(remove_quantizers(Model(proto).copy()).proto, {"x": x})
    got = compare.measure_noise([(ModelRunner().run(proto, {"x": x}), reference)])
    rounded = np.rint(x / np.float32(0.1)) * np.float32(0.1)
    wanted = np.sqrt(np.mean((rounded - x) ** 2.0)) / np.sqrt(np.mean(x.astype(float) ** 2))
    assert got.relative == pytest.approx(wanted, rel=1e-5)
    proto = pair_model(0.02)
    proto.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(RunError) as caught:
        compare.random_inputs(Model(proto))
    assert (caught.value.code, caught.value.node) == ("unknown-input-type", "x")
    proto = pair_model(0.02)
    del proto.graph.value_info[:], proto.graph.output[:]
    shape = proto.graph.input[0].type.tensor_type.shape
    shape.dim.extend(
        onnx.TensorShapeProto.Dimension(dim_value=1) for _ in range(65 - len(shape.dim))
    )
    with pytest.raises(RunError) as caught:  # 65 dimensions are none that anybody could know
        compare.random_inputs(Model(proto))
    assert (caught.value.code, caught.value.node) == ("unknown-input-shape", "x")
    proto = pair_model()
    proto.graph.node[0].op_type = "Unheard"
    with pytest.raises(RunError):
        ModelRunner().run(proto, {"x": np.zeros((1, 4, 8, 8), np.float32)})


def test_random_inputs_fill_the_first_quantizer(g):
    arrays = compare.random_inputs(Model(pair_model(0.02)))
    assert arrays["x"].shape == (1, 4, 8, 8) and arrays["x"].dtype == np.float32
    assert 0.8 * 127 * 0.02 < arrays["x"].max() <= 127 * 0.02
    assert np.array_equal(arrays["x"], compare.random_inputs(Model(pair_model(0.02)))["x"])
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) {y = Relu(x)}'
    )
    assert compare.random_inputs(Model(proto))["x"].shape == ()
    g.input(1, 3, 8, 8)
    shape = g.inputs[0].type.tensor_type.shape
    shape.dim[0].dim_param = "batch"
    shape.dim[2].dim_param = "h"
    assert compare.random_inputs(Model(g.model(g.relu("x", "r"))))["x"].shape == (1, 3, 256, 8)


@pytest.mark.parametrize("where", ["behind the last convolution", "everywhere"])
def test_overflowing_float_network_is_not_compared(where):
    """It is compared after the last convolutions, if it is finite there."""
    proto = residual("float")
    if where == "everywhere":
        fixed = fix(proto, "trt8.5", inputs={"x": np.full((1, 16, 16, 16), 3e38, np.float32)})
        assert not fixed.applied
        assert fixed.refused[0].why_not.values["cause"] == "output-not-finite"
        return
    last = proto.graph.output[0].name
    for i in range(2):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3e38), f"huge{i}"))
        node = onnx.helper.make_node(
            "Mul", [last if i == 0 else "big0", f"huge{i}"], [f"big{i}"], f"big{i}"
        )
        proto.graph.node.append(node)
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info("big1", 1, None))
    fixed = fix(proto, "trt8.5")
    assert [c.code for c in fixed.applied] == ["SKIP-FLOAT"]
    (note,) = (n for n in fixed.notes if n.code == "compared-in-body")
    assert note.values["cause"] == "output-not-finite"


@pytest.mark.parametrize("shape", [["n", 64, "h", "w"], [1, 64, 1, 1], [1, 64, 1024, 1024]])
def test_run_cost_depends_on_inputs_only(
    monkeypatch: pytest.MonkeyPatch, shape: list[object]
) -> None:
    """Four outputs of 256 MB each, whatever the file states."""
    weight = onnx.numpy_helper.from_array(np.ones((64, 1, 1, 1), np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["x", "w"], [f"y{k}"]) for k in range(4)],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 1, "h", "w"])],
        [onnx.helper.make_tensor_value_info(f"y{k}", 1, shape) for k in range(4)],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    with pytest.raises(RunLimitError) as caught:
        ModelRunner().run(model, {"x": np.zeros((1, 1, 1024, 1024), np.float32)})
    assert caught.value.code == "memory-limit"


@pytest.mark.parametrize("ir", [8, 10, 11, 14, 99])
def test_runner_accepts_newer_ir_versions(ir: int) -> None:
    model = pair_model()
    model.ir_version = ir
    x = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(ModelRunner().run(model, {"x": x})["p.DQ:0"], x, atol=0.05)
    assert model.ir_version == ir


def convolution(side: int) -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.ones((16, 8, 3, 3), np.float32), "w")
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
            onnx.helper.make_node("Relu", ["c"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [1, 8, side, side])],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
        [weight],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])


@pytest.mark.parametrize(
    "kind",
    [
        "INT4",
        "UINT4",
        "BFLOAT16",
        "FLOAT8E4M3FN",
        "FLOAT8E5M2",
        "FLOAT4E2M1",
        "COMPLEX64",
    ],
)
def test_fix_accepts_input_types_that_onnxruntime_lacks(kind: str) -> None:
    """Outputs after the last convolutions are compared, with a note."""
    model = residual("float")
    more = onnx.helper.make_tensor_value_info("more", getattr(onnx.TensorProto, kind), [1, 4])
    model.graph.input.append(more)
    model.graph.node.append(
        onnx.helper.make_node("Cast", ["more"], ["less"], to=onnx.TensorProto.FLOAT)
    )
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("less", onnx.TensorProto.FLOAT, [1, 4])
    )
    made = fix(model, "trt8.5")
    assert len(made.applied) == 1 and "compared-in-body" in {n.code for n in made.notes}
    assert (
        onnx.checker.check_model(made.proto) is None and made.proto.graph.output[-1].name == "less"
    )


def test_runner_stops_at_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = convolution(20), {"x": np.zeros((1, 8, 20, 20), np.float32)}
    one = estimate_run_cost(model, {}).operations
    monkeypatch.setattr(limits, "SESSION_WORK", one - 1)
    with pytest.raises(RunLimitError) as caught:
        ModelRunner().run(model, x)
    assert caught.value.code == "work-limit"
    assert ModelRunner(2.0).run(model, x)["y"].shape == (1, 16, 20, 20)
    monkeypatch.setattr(limits, "SESSION_WORK", 10 * one)
    monkeypatch.setattr(limits, "SESSION_WORK_ALL", 2 * (one + limits.SESSION_RUN + 10**6))
    runs = ModelRunner()
    runs.run(model, x)
    runs.run(model, x)
    with pytest.raises(RunLimitError) as caught:
        runs.run(model, x)
    assert caught.value.code == "work-used-up"
    runs = ModelRunner(2.5)
    for _ in range(5):
        runs.run(model, x)
    with pytest.raises(RunLimitError) as caught:
        runs.run(model, x)
    assert caught.value.code == "work-used-up"
    monkeypatch.setattr(limits, "SESSION_BYTES", estimate_run_cost(model, {}).peak_bytes - 1)
    with pytest.raises(RunLimitError) as caught:
        ModelRunner().run(model, x)
    assert caught.value.code == "memory-limit"
    ModelRunner(1.5).run(model, x)
