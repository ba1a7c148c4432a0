from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qdqtool.base.records import replaced
from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rewrite as rewriting
from qdqtool.insertion.placement import Placement, Rules, class_outputs, place
from qdqtool.insertion.prepare import prepare
from qdqtool.insertion.rewrite import ActivationScale, quantize, rewrite, round_up_to_half, rounded, rounded_name
from qdqtool.insertion.scales import scale_groups
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.outcome import settled, simulate
from qdqtool.trt.targets import TARGETS, Target, target_named
from qdqtool.types import Precision, QuantizedTensor
from tests.insertion.nets import Net, check, copied, detector, images, nodes_of, run, value_of
from tests.tables import in_turn


def inserted(
    model: onnx.ModelProto, scale: float = 0.05, weights: str = "float", include: tuple[str, ...] = ()
) -> tuple[onnx.ModelProto, list[QuantizedTensor]]:
    copy = copied(model)
    index = Model(copy)
    placement = place(index, Rules(head="none", include=include))
    quantized = rewrite(index, placement, {t: ActivationScale(scale, "max", None) for t in placement.readers}, weights)
    check(copy)
    return copy, quantized


def two_layers() -> onnx.ModelProto:
    net = Net()
    first = net.op("Relu", "/m.0/act/Relu", net.conv("/m.0/conv/Conv", "x"))
    net.output(net.op("Relu", "/m.1/act/Relu", net.conv("/m.1/conv/Conv", first)))
    return net.model()


def test_names_and_what_the_model_says_of_itself() -> None:
    model, quantized = inserted(two_layers())
    pairs = [f"conv/_{of}_quantizer/{op}Linear" for of in ("input", "weight") for op in ("Quantize", "Dequantize")]
    layer = [*pairs, "conv/Conv", "act/Relu"]
    assert [n.name for n in model.graph.node] == [f"/m.{i}/{n}" for i in "01" for n in layer]
    assert (quantized[0].tensor, quantized[0].node) == ("x", "/m.0/conv/_input_quantizer/QuantizeLinear")
    model = two_layers()
    model.metadata_props.add(key="names", value="{0: 'person'}")
    model.doc_string, model.producer_name, model.graph.doc_string = "doc", "pytorch", "graph doc"
    model.graph.node[0].doc_string = "node doc"
    model.opset_import.add(domain="custom", version=3)
    infos = {v.name for v in model.graph.value_info}
    result, _ = inserted(model)
    assert result.metadata_props[0].value == "{0: 'person'}"
    assert (result.doc_string, result.producer_name, result.graph.doc_string) == ("doc", "pytorch", "graph doc")
    assert nodes_of(result, "Conv")[0].doc_string == "node doc"
    assert {(o.domain, o.version) for o in result.opset_import} == {("", 17), ("custom", 3)}
    assert infos <= {v.name for v in result.graph.value_info}


def test_scales_of_weights() -> None:
    model, _ = inserted(two_layers(), 0.05)
    for node in nodes_of(model, "QuantizeLinear"):
        scale, zero = value_of(model, node.input[1]), value_of(model, node.input[2])
        assert zero.dtype == np.int8
        assert not zero.any()
        assert scale.shape == zero.shape
        axis = [a.i for a in node.attribute if a.name == "axis"]
        if "_weight_" in node.name:
            assert (scale.shape, axis) == ((16,), [0])
        else:
            assert (scale.shape, axis) == ((), [])
            assert float(scale) == np.float32(0.05)
    values = np.float32([1e-9, 6e-8, 1e-6, 0.1, 1.0, 3.14159, 60000.0])
    half = round_up_to_half(values)
    assert half.dtype == np.float16
    assert (half.astype(np.float32) >= values).all()
    assert (half > 0).all()
    exact = np.float32([2.0**-24, 0.5, 1.0, 1.0 + 2.0**-10, 32768.0])  # numbers that FP16 has stay
    np.testing.assert_array_equal(round_up_to_half(exact), exact.astype(np.float16))
    np.testing.assert_array_equal(round_up_to_half(np.nextafter(exact[:4], np.float32(9))),
                                  np.float16([2.0**-23, 0.5 + 2.0**-11, 1.0 + 2.0**-10, 1.0 + 2.0**-9]))
    assert half[3].astype(np.float32) / values[3] < 1.001


def test_numbers_of_pairs() -> None:
    """One convolution 1x1: the sum over channels of quantized inputs times quantized weights, plus the float bias."""
    net = Net(side=4)
    net.output(net.conv("c", "x", kernel=1))
    before = net.model()
    model, _ = inserted(before, 0.01)
    x = images(1, side=4)[0]["x"]
    w, b = value_of(before, "c.weight")[:, :, 0, 0].astype(np.float64), value_of(before, "c.bias")
    steps = np.abs(w).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    wq = np.rint(w / steps) * steps
    xq = np.clip(np.rint(x.astype(np.float64) / np.float32(0.01)), -128, 127) * np.float32(0.01)
    expected = np.einsum("oi,nihw->nohw", wq, xq) + b[None, :, None, None]
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)
    base = two_layers()
    as_float, _ = inserted(base)
    as_int8, quantized = inserted(base, weights="int8")
    feeds = images(1)[0]
    np.testing.assert_array_equal(run(as_float, feeds)[0], run(as_int8, feeds)[0])
    assert len(nodes_of(as_int8, "QuantizeLinear")) == 2
    assert [t.data_type for t in as_int8.graph.initializer if t.name.endswith("_quantized")] == [TensorProto.INT8] * 2
    assert not any(t.name == "/m.0/conv/Conv.weight" for t in as_int8.graph.initializer)
    assert quantized[1].node == "/m.0/conv/_weight_quantizer/DequantizeLinear"


def test_codes_are_those_of_onnxruntime() -> None:
    rng = np.random.default_rng(3)
    value = rng.normal(0, 1, (6, 5, 3, 3)).astype(np.float32)
    value[0, 0] = [[0.5, 1.5, -0.5], [-1.5, 2.5, 200.0], [-200.0, 0.0, 3.5]]
    scale = rng.uniform(0.5, 2.0, 5).astype(np.float32)
    scale[0] = 1.0
    node = helper.make_node("QuantizeLinear", ["v", "s", "z"], ["q"], axis=1)
    graph = helper.make_graph(
        [node], "q", [helper.make_tensor_value_info("v", 1, value.shape), helper.make_tensor_value_info("s", 1, [5]),
                      helper.make_tensor_value_info("z", 3, [5])],
        [helper.make_tensor_value_info("q", 3, value.shape)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    expected = run(model, {"v": value, "s": scale, "z": np.zeros(5, np.int8)})[0]
    np.testing.assert_array_equal(quantize(value, scale, 1), expected)


def test_axes_of_every_operator(net: Net) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x"))
    up = net.op("ConvTranspose", "t", relu, net.const("tw", net.rng.standard_normal((16, 24, 2, 2))))
    grouped = net.op("ConvTranspose", "tg", relu, net.const("tgw", net.rng.standard_normal((16, 8, 2, 2))), group=2)
    flat = net.op("Flatten", "f", net.op("GlobalAveragePool", "gap", relu))
    g0 = net.op("Gemm", "g0", flat, net.const("g0w", net.rng.standard_normal((16, 20))))
    g1 = net.op("Gemm", "g1", flat, net.const("g1w", net.rng.standard_normal((20, 16))), transB=1)
    m = net.op("MatMul", "m", flat, net.const("mw", net.rng.standard_normal((16, 20))))
    net.output(up, grouped, g0, g1, m)
    model, _ = inserted(net.model())
    found = {}
    for node in nodes_of(model, "QuantizeLinear"):
        if "_weight_" in node.name:
            axis = [a.i for a in node.attribute if a.name == "axis"]
            found[node.input[0]] = (axis[0] if axis else None, value_of(model, node.input[1]).size)
    assert found == {
        "c.weight": (0, 16), "tw": (None, 1), "tgw": (None, 1), "g0w": (1, 20), "g1w": (0, 20), "mw": (1, 20),
    }  # fmt: skip
    run(model, images(1)[0])


@pytest.mark.parametrize("names", [["", "", ""], ["/a/Conv", "/a/Conv_1", "/a/Conv_2"]])
def test_missing_and_alike_names_still_give_unique_ones(net: Net, names: list[str]) -> None:
    tensor = "x"
    for i in range(3):
        tensor = net.op("Relu", f"r{i}", net.conv(f"c{i}", tensor))
    net.output(tensor)
    model = net.model()
    for node, name in zip(nodes_of(model, "Conv"), names, strict=True):
        node.name = name
    result, quantized = inserted(model)
    added = [n.name for n in nodes_of(result, "QuantizeLinear", "DequantizeLinear")]
    assert len(set(added)) == len(added) == 12
    assert len({q.node for q in quantized}) == 6
    run(result, images(1)[0])
    net = Net()
    net.op("Relu", "other", "x")
    net.nodes[-1].output[0] = "c/_input_quantizer/QuantizeLinear_output_0"
    net.output(net.conv("c", "x"), net.op("Relu", "r", "c/_input_quantizer/QuantizeLinear_output_0"))
    _, quantized = inserted(net.model())
    assert quantized[0].node == "c/_input_quantizer_0/QuantizeLinear"


@in_turn(("name", "taken", "base"), [
    ("/m/conv/Conv", (), "/m/conv/_input_quantizer"),
    ("/m/conv/Conv_1", (), "/m/conv/_input_quantizer"),
    ("m/Conv", (), "m/_input_quantizer"),
    ("/m/conv/first", (), "/m/conv/first/_input_quantizer"),  # not called after its operator
    ("/Conv", (), "/Conv/_input_quantizer"),  # no folder
    ("Conv", (), "Conv/_input_quantizer"),
    ("/m/conv/Conv", ("/m/conv/_input_quantizer/QuantizeLinear",), "/m/conv/Conv/_input_quantizer"),
    ("/m/conv/Conv", ("/m/conv/_input_quantizer/scale", "/m/conv/Conv/_input_quantizer/zero_point"),
     "/m/conv/Conv/_input_quantizer_0"),
    ("Conv", ("Conv/_input_quantizer/DequantizeLinear_output_0", "Conv/_input_quantizer_0/QuantizeLinear_output_0"),
     "Conv/_input_quantizer_1"),
])  # fmt: skip
def test_pairs_have_their_readers_name_or_one_that_is_free(name: str, taken: tuple[str, ...], base: str) -> None:
    net = Net()
    net.output(net.conv("c", "x"), *(net.op("Relu", t, "x") for t in taken))
    model = net.model()
    for node in model.graph.node:
        if node.name == "c":
            node.name = name
    _, quantized = inserted(model)
    assert quantized[0].node == f"{base}/QuantizeLinear"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sketched_weights_have_scales_of_one_of_the_right_shape(net: Net, dtype: type) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x", cout=24))
    net.output(net.op("ConvTranspose", "t", relu, net.const("tw", np.full((24, 8, 2, 2), 3.0))))
    model = net.model()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    index = Model(model)
    placement = place(index, Rules(head="none", include=["t"]))
    rewrite(index, placement, {t: ActivationScale(1.0, "", None) for t in placement.readers}, "sketch")
    found = {n.input[0]: value_of(model, n.input[1]) for n in nodes_of(model, "QuantizeLinear") if "weight" in n.name}
    assert {t: (v.shape, v.dtype, set(v.ravel().tolist())) for t, v in found.items()} == {
        "c.weight": ((24,), dtype, {1.0}), "tw": ((), dtype, {1.0}),
    }  # fmt: skip


def test_quantized_readers_share_a_pair_and_float_readers_and_outputs_keep_the_tensor_itself(net: Net) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x"))
    net.output(relu, net.conv("d", relu), net.op("Sigmoid", "s", relu), net.conv("e", relu))
    model, quantized = inserted(net.model())
    assert [q.tensor for q in quantized if q.method == "max"] == ["x", "r.out"]
    readers = {n.name: n.input[0] for n in nodes_of(model, "Conv", "Sigmoid")}
    assert readers["d"] == readers["e"] == "d/_input_quantizer/DequantizeLinear_output_0" and readers["s"] == "r.out"
    assert [v.name for v in model.graph.output] == ["r.out", "d.out", "s.out", "e.out"]


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_matrix_products_that_share_a_tensor_have_a_dq_each_and_run_in_int8(net: Net, op: str, target: str) -> None:
    rows = net.op("Flatten", "f", net.op("GlobalAveragePool", "g", net.conv("c", "x")))
    rng = np.random.default_rng(0)
    outputs = []
    for name in ("one", "two", "three"):
        weight = net.const(f"{name}.w", rng.normal(size=(16, 4)))
        outputs.append(net.op(op, name, rows, weight))
    net.output(*outputs)
    model, quantized = inserted(net.model())
    shared = [n for n in nodes_of(model, "QuantizeLinear") if n.input[0] == rows]
    assert len(shared) == 1 and len([q for q in quantized if q.tensor == rows]) == 1
    dqs = {n.output[0]: n for n in nodes_of(model, "DequantizeLinear")}
    fed = [dqs[n.input[0]] for n in nodes_of(model, op)]
    assert len({n.name for n in fed}) == 3 and {n.input[0] for n in fed} == {shared[0].output[0]}
    assert fed[1].name == "two/_input_quantizer/DequantizeLinear"
    found = predict(model, target).convolutions
    assert {c.name: c.precision for c in found} == dict.fromkeys(("c", "one", "two", "three"), Precision.INT8)


@pytest.mark.parametrize("size", [1e-40, 1e-3, 1.0, 1e30])
def test_rounded_weights_are_bit_by_bit_what_onnxruntime_makes_of_q_and_dq(size: float) -> None:
    net = Net()
    net.output(net.conv("/m.0/conv/Conv", "x"))
    model = net.model()
    name = next(n.input[1] for n in model.graph.node if n.op_type == "Conv")
    (weights,) = [t for t in model.graph.initializer if t.name == name]
    value = (np.random.default_rng(7).normal(0, size, tuple(weights.dims))).astype(np.float32)
    value[1] = 0.0
    weights.CopyFrom(onnx.numpy_helper.from_array(value, name))
    pairs, _ = inserted(model)
    made = next(n.input[1] for n in pairs.graph.node if n.op_type == "Conv")
    pairs.graph.output.append(helper.make_tensor_value_info(made, TensorProto.FLOAT, None))
    wanted = run(pairs, images(1)[0])[-1]
    assert np.array_equal(rounded(value, 0).view(np.uint32), wanted.view(np.uint32))
    index = Model(model)
    placement = place(index, Rules(head="none"))
    quantized = rewrite(index, placement, {"x": ActivationScale(0.05, "max", None)}, "rounded")
    assert rounded_name(name, 0) in {t for n in index.nodes for t in n.inputs}
    assert [q.tensor for q in quantized] == ["x"]


# The residual inputs behind an activation: the worse of two outcomes decides. Then, which tensors are class scores.

TRT85 = target_named("trt8.5")


def bottleneck(activation: str) -> Model:
    """Conv, activation and an Add with what the block reads, then another convolution."""
    net = Net()
    stem = net.silu("stem/s", net.conv("stem", "x"))
    inner = net.conv("c", stem)
    inner = net.silu("s", inner) if activation else inner
    net.output(net.op("Relu", "end", net.conv("next", net.op("Add", "add", inner, stem))))
    return net.index()


def outcomes(model: Model, option: str) -> dict[bool, tuple[int, int]]:
    """INT8 convolutions with INT8 output and conversions, where Conv + SiLU + Add stay apart and where they fuse."""
    placement = place(model, Rules(residual_after_activation=option))
    proto = rewriting.sketch(model, placement, scale_groups(model, placement.readers)).proto
    found = {}
    for fused in (False, True):
        summary = simulate(Model(proto), replaced(TRT85, residual_through_activation=fused)).summary()
        found[fused] = summary["int8_to_int8"], summary["conversions"]
    return found


def after_activation(model: Model, target: Target = TRT85) -> str:
    return rewriting.after_activation(model, Rules(), target, True)


def test_what_both_inputs_are_worth() -> None:
    model = bottleneck("silu")
    both, skip = outcomes(model, "both"), outcomes(model, "skip")
    assert both[False] == both[True]
    assert skip[False] < both[False]
    assert after_activation(model) == "both"
    # By hand: of three the last writes float; without it the Add stays float, and with it all that is written
    model = bottleneck("silu")

    def worth(**rules: Any) -> tuple[int, int, int]:
        placement = place(model, Rules(**rules))
        proto = rewriting.sketch(model, placement, scale_groups(model, placement.readers)).proto
        return rewriting._worth(settled(Model(proto), TRT85))

    assert worth(residual="both") == (3, 2, -1)
    assert worth(residual="both", exclude=["^next$"]) == (2, 0, -2)
    assert after_activation(bottleneck("silu"), target=TARGETS["rtx1.7"]) == "none"


def test_the_demo_network_gets_what_is_better_in_the_worse_case() -> None:
    proto = copied(detector())
    prepare(Model(proto))
    model = Model(proto)
    worst = {o: min((i, -c) for i, c in outcomes(model, o).values()) for o in rewriting.OPTIONS}
    assert after_activation(model) == max(rewriting.OPTIONS, key=lambda o: worst[o])


@pytest.mark.parametrize(("worths", "option", "asked"), [
    ([(3, 3, -2), (3, 3, -1), (3, 3, 0)], "skip", 3), ([(3, 3, -1), (3, 4, 0), (3, 3, 0)], "skip", 3),
    ([(3, 3, -1), (3, 4, 0), (3, 3, -1)], "both", 3), ([(3, 3, -1), (3, 4, 0), (3, 3, -2)], "both", 3),
    ([(3, 3, -1), (3, 3, -2)], "both", 2),  # given up at its first outcome that is no better
    ([(1, 1, -9), (2, 2, -1)], "both", 3),  # the third cannot be simulated: what the evidence says
])  # fmt: skip
def test_the_skip_has_to_be_better_in_both_outcomes(
    worths: list[tuple[int, int, int]], option: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both quantized nothing depends on whether they fuse: one outcome of that, two of the skip."""
    fused: list[bool] = []

    def worth(_: object, target: Target) -> tuple[int, int, int]:
        fused.append(target.residual_through_activation)
        if len(fused) > len(worths):
            raise QdqtoolError("no pass can take this")
        return worths[len(fused) - 1]

    monkeypatch.setattr(rewriting, "settled", worth)
    monkeypatch.setattr(rewriting, "_worth", lambda found: found)
    assert after_activation(bottleneck("silu")) == option
    assert fused == [False, False, True][:asked]
    fused.clear()
    assert after_activation(bottleneck("")) == "both" and not fused


def test_a_sketch_needs_no_weights_and_ties_what_is_tied() -> None:
    model = bottleneck("silu")
    placement: Placement = place(model, Rules())
    before = model.proto.SerializeToString(deterministic=True)
    proto = rewriting.sketch(model, placement, scale_groups(model, placement.readers)).proto
    assert model.proto.SerializeToString(deterministic=True) == before
    scales = {n.input[0]: value_of(proto, n.input[1]) for n in nodes_of(proto, "QuantizeLinear")}
    assert {t: float(s) for t, s in scales.items() if not s.ndim} == {
        "x": 1.0, "stem/s/Mul.out": 2.0, "add.out": 3.0, "s/Mul.out": 4.0,
    }  # fmt: skip
    assert {t: s.shape for t, s in scales.items() if s.ndim} == {f"{c}.weight": (16,) for c in ("stem", "c", "next")}
    full = {t.name: len(t.raw_data) for t in model.proto.graph.initializer}
    assert all(not t.raw_data for t in proto.graph.initializer if full.get(t.name, 0) > 4096)


def test_class_scores() -> None:
    model = Model(detector(classes=3))
    found = class_outputs(model)
    assert len(found) == 3
    assert [model.shape(t) for t in found] == [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 2, 2)]
    made = Net()
    body = made.op("Relu", "relu", made.conv("body", "x"))
    made.output(made.op("Sigmoid", "sigmoid", made.conv("heat", body, cout=3)), made.conv("size", body, cout=2))
    assert class_outputs(made.index()) == ("heat.out",)
    # A point in [n, classes, h, w] is a place in the picture; in a row of numbers or a sound it is none
    made = Net()
    assert scored(made, made.conv("c", "x")) == ("c.out",)
    made = Net()
    row = made.op("Reshape", "row", "x", made.const("shape", [1, 16, 64], np.int64))
    assert scored(made, made.op("Conv", "c", row, made.const("w", np.ones((3, 16, 1))))) == ()
    made = Net()
    assert scored(made, made.op("MatMul", "m", "x", made.const("w", np.ones((8, 3))))) == ()
    made = Net()
    made.output(made.op("Sigmoid", "sigmoid", made.conv("c", made.op("Strange", "any", "x", domain="example"))))
    assert class_outputs(Model(made.open_model())) == ()


def scored(net: Net, tensor: str) -> tuple[str, ...]:
    """The class outputs of a network whose scores are the Sigmoid of a tensor."""
    net.output(net.op("Sigmoid", "sigmoid", tensor))
    return class_outputs(net.index())


@in_turn("moved", ["Reshape", "Transpose", "Concat", ""])
@in_turn(("end", "found"), [("Mul", ()), ("Sqrt", ()), ("", ("c.out",)), ("TopK", ("c.out",))])
def test_scores_go_out_or_are_sorted_but_not_calculated_with(moved: str, end: str, found: tuple[str, ...]) -> None:
    made = Net()
    scores = made.op("Sigmoid", "sigmoid", made.conv("c", "x"))
    if moved == "Reshape":
        scores = made.op("Reshape", "moved", scores, made.const("shape", [1, 16, 64], np.int64))
    elif moved == "Transpose":
        scores = made.op("Transpose", "moved", scores, perm=[0, 2, 3, 1])
    elif moved == "Concat":
        scores = made.op("Concat", "moved", scores, "x", axis=1)
    if end == "Mul":
        scores = made.op("Mul", "end", made.const("two", 2.0), scores)
    elif end == "Sqrt":
        scores = made.op("Sqrt", "end", scores)
    elif end == "TopK":  # what is done with the best of them is no matter
        best = made.op("TopK", "top", scores, made.const("k", [1], np.int64), outputs=2, axis=1)
        scores = made.op("Mul", "end", best[0], made.const("two", 2.0))
    made.output(scores)
    assert class_outputs(made.index()) == found
