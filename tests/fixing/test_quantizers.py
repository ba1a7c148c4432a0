from collections.abc import Callable

import numpy as np
import onnx
import pytest

import qdqtool
from tests.patterns.test_fake_quantizers import run
from tests.trt.builder import Graph


def identity(g: Graph, name: str, value: np.ndarray) -> str:
    return g.op("Identity", g.const(f"{name}.src", value), f"{name}.node")


def two_identities(g: Graph, name: str, value: np.ndarray) -> str:
    return g.op("Identity", identity(g, name, value), f"{name}.node2")


def cast(g: Graph, name: str, value: np.ndarray) -> str:
    wide = np.float64 if value.dtype == np.float32 else np.int32
    to = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return g.op("Cast", g.const(f"{name}.src", value.astype(wide)), f"{name}.node", to=to)


def reshape(g: Graph, name: str, value: np.ndarray) -> str:
    shape = g.const(f"{name}.shape", np.array(value.shape, np.int64))
    return g.op("Reshape", [g.const(f"{name}.src", value.reshape(1, -1)), shape], f"{name}.node")


def transpose(g: Graph, name: str, value: np.ndarray) -> str:
    return g.op("Transpose", g.const(f"{name}.src", value.T), f"{name}.node")


def squeeze(g: Graph, name: str, value: np.ndarray) -> str:
    axes = g.const(f"{name}.axes", np.array([0], np.int64))
    return g.op("Squeeze", [g.const(f"{name}.src", value[None]), axes], f"{name}.node")


def product(g: Graph, name: str, value: np.ndarray) -> str:
    factor = g.const(f"{name}.factor", np.ones((), value.dtype))
    return g.op("Mul", [g.const(f"{name}.src", value), factor], f"{name}.node")


def stored(g: Graph, name: str, value: np.ndarray) -> str:
    return g.const(name, value)


CHAINS = (identity, two_identities, cast, reshape, transpose, squeeze, product)


def network(role: str, chain: Callable[[Graph, str, np.ndarray], str]) -> onnx.ModelProto:
    g = Graph(opset=17)

    def constant(part: str, value: np.ndarray) -> str:
        return (chain if part == role else stored)(g, part, value)

    weights = np.random.default_rng(0).normal(0, 0.1, (16, 16, 1, 1)).astype(np.float32)
    scales = (np.abs(weights).max((1, 2, 3)) / 127).astype(np.float32)
    x = [g.input(1, 16, 8, 8), constant("scale", np.float32(0.05)[()] * np.ones((), np.float32))]
    x.append(constant("zero", np.zeros((), np.int8)))
    data = g.op("DequantizeLinear", [g.op("QuantizeLinear", x, "q"), *x[1:]], "dq")
    parameters = [constant("weight scale", scales), constant("weight zero", np.zeros(16, np.int8))]
    values = (
        constant(role, np.rint(weights / scales.reshape(-1, 1, 1, 1)).astype(np.int8))
        if role == "integers"
        else g.op("QuantizeLinear", [constant("weights", weights), *parameters], "wq", axis=0)
    )
    w = g.op("DequantizeLinear", [values, *parameters], "wdq", axis=0)
    return g.model(g.relu(g.op("Conv", [data, w], "c", kernel_shape=[1, 1]), "r"))


def codes(prediction: qdqtool.Prediction) -> set[str]:
    return {f.code for f in prediction.findings} - {"FLAG-FP16", "OUT-FLOAT", "INPUT-CONVERSION"}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    "role", ["scale", "zero", "weight scale", "weight zero", "weights", "integers"]
)
def test_fix_folds_constant(role: str, chain: Callable[[Graph, str, np.ndarray], str]) -> None:
    before = network(role, chain)
    prediction = qdqtool.predict(before)
    assert codes(prediction) & {"SCALE-INDIRECT", "WEIGHT-INDIRECT", "W-NONCONST"}
    assert "SCALE-DYNAMIC" not in codes(prediction)
    fixed = qdqtool.fix(before)
    assert codes(fixed.after) <= {"WEIGHT-PREQUANT"} and fixed.after.summary()["int8"] == 1
    ops = {n.op_type for n in fixed.proto.graph.node}
    assert ops == {"QuantizeLinear", "DequantizeLinear", "Conv", "Relu"}
    np.testing.assert_allclose(run(fixed.proto), run(before), atol=1e-6)


@pytest.mark.parametrize(
    ("chain", "target", "is_refused"),
    [
        (identity, "trt8.5", True),
        (identity, "trt10", False),
        (identity, "rtx1.7", False),
        (two_identities, "rtx1.7", False),
        (reshape, "trt10", True),
        (reshape, "rtx1.7", True),
        (squeeze, "rtx1.7", True),
        (product, "rtx1.7", True),
        (cast, "rtx1.7", False),
    ],
)
def test_zero_point_behind_a_node(
    chain: Callable[[Graph, str, np.ndarray], str], target: str, is_refused: bool
) -> None:
    """As TensorRT-RTX builds it (test_builds.py)."""
    prediction = qdqtool.predict(network("zero", chain), target)
    reasons = [f.causes[0].reason for f in prediction.findings if f.code == "WEIGHT-INDIRECT"]
    assert {(r.node, r.quantizer) for r in reasons} == (
        {("zero.node", "q")} if is_refused else set()
    )


@pytest.mark.parametrize("is_explicit", [True, False], ids=["axis 0", "no axis"])
def test_fix_raises_opset_of_per_channel_quantizers(is_explicit: bool) -> None:
    expected = network("none", stored)  # opset 17, in which the axis is valid
    before = onnx.ModelProto()
    before.CopyFrom(expected)
    before.opset_import[0].version = 12
    if not is_explicit:
        for node in before.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                del node.attribute[:]
    assert "OPSET-AXIS" in codes(qdqtool.predict(before))
    fixed = qdqtool.fix(before)
    assert [a.code for a in fixed.applied] == ["OPSET-AXIS"]
    assert fixed.ok and fixed.after.summary()["int8"] == 1
    assert fixed.fixed_places()["OPSET-AXIS"] == fixed.before.findings_by_code()["OPSET-AXIS"]
    np.testing.assert_array_equal(run(fixed.proto), run(expected))


def test_fix_of_other_codes_keeps_the_opset() -> None:
    model = network("none", stored)
    model.opset_import[0].version = 12
    fixed = qdqtool.fix(model, only=["SILU-INNER-Q"])
    assert fixed.proto.opset_import[0].version == 12 and not fixed.applied
