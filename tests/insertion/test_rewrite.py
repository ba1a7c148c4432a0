import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.rewrite import (
    ActivationScale,
    quantize,
    rewrite,
    round_up_to_half,
    rounded,
    rounded_name,
)
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.types import Precision, QuantizedTensor
from tests.insertion.nets import Net, check, copied, images, nodes_of, run, value_of


def inserted(
    model: onnx.ModelProto,
    scale: float = 0.05,
    weights: str = "float",
    include: tuple[str, ...] = (),
) -> tuple[onnx.ModelProto, list[QuantizedTensor]]:
    copy = copied(model)
    index = Model(copy)
    placement = place(index, Rules(head="none", include=include))
    quantized = rewrite(
        index,
        placement,
        {t: ActivationScale(scale, "max", None) for t in placement.readers},
        weights,
    )
    check(copy)
    return copy, quantized


def two_layers() -> onnx.ModelProto:
    net = Net()
    first = net.op("Relu", "/m.0/act/Relu", net.conv("/m.0/conv/Conv", "x"))
    net.output(net.op("Relu", "/m.1/act/Relu", net.conv("/m.1/conv/Conv", first)))
    return net.model()


def test_names_and_what_the_model_says_of_itself() -> None:
    model, quantized = inserted(two_layers())
    pairs = [
        f"conv/_{of}_quantizer/{op}Linear"
        for of in ("input", "weight")
        for op in ("Quantize", "Dequantize")
    ]
    layer = [*pairs, "conv/Conv", "act/Relu"]
    assert [n.name for n in model.graph.node] == [f"/m.{i}/{n}" for i in "01" for n in layer]
    assert (quantized[0].tensor, quantized[0].node) == (
        "x",
        "/m.0/conv/_input_quantizer/QuantizeLinear",
    )
    model = two_layers()
    model.metadata_props.add(key="names", value="{0: 'person'}")
    model.doc_string, model.producer_name, model.graph.doc_string = "doc", "pytorch", "graph doc"
    model.graph.node[0].doc_string = "node doc"
    model.opset_import.add(domain="custom", version=3)
    infos = {v.name for v in model.graph.value_info}
    result, _ = inserted(model)
    assert result.metadata_props[0].value == "{0: 'person'}"
    assert (result.doc_string, result.producer_name, result.graph.doc_string) == (
        "doc",
        "pytorch",
        "graph doc",
    )
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
    np.testing.assert_array_equal(
        round_up_to_half(np.nextafter(exact[:4], np.float32(9))),
        np.float16([2.0**-23, 0.5 + 2.0**-11, 1.0 + 2.0**-10, 1.0 + 2.0**-9]),
    )
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
    assert [t.data_type for t in as_int8.graph.initializer if t.name.endswith("_quantized")] == [
        TensorProto.INT8
    ] * 2
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
        [node],
        "q",
        [
            helper.make_tensor_value_info("v", 1, value.shape),
            helper.make_tensor_value_info("s", 1, [5]),
            helper.make_tensor_value_info("z", 3, [5]),
        ],
        [helper.make_tensor_value_info("q", 3, value.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    expected = run(model, {"v": value, "s": scale, "z": np.zeros(5, np.int8)})[0]
    np.testing.assert_array_equal(quantize(value, scale, 1), expected)


def test_axes_of_every_operator(net: Net) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x"))
    up = net.op(
        "ConvTranspose", "t", relu, net.const("tw", net.rng.standard_normal((16, 24, 2, 2)))
    )
    grouped = net.op(
        "ConvTranspose",
        "tg",
        relu,
        net.const("tgw", net.rng.standard_normal((16, 8, 2, 2))),
        group=2,
    )
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
        "c.weight": (0, 16),
        "tw": (None, 1),
        "tgw": (None, 1),
        "g0w": (1, 20),
        "g1w": (0, 20),
        "mw": (1, 20),
    }
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
    net.output(
        net.conv("c", "x"), net.op("Relu", "r", "c/_input_quantizer/QuantizeLinear_output_0")
    )
    _, quantized = inserted(net.model())
    assert quantized[0].node == "c/_input_quantizer_0/QuantizeLinear"


@pytest.mark.parametrize(
    ("name", "taken", "base"),
    [
        ("/m/conv/Conv", (), "/m/conv/_input_quantizer"),
        ("/m/conv/Conv_1", (), "/m/conv/_input_quantizer"),
        ("m/Conv", (), "m/_input_quantizer"),
        ("/m/conv/first", (), "/m/conv/first/_input_quantizer"),  # not called after its operator
        ("/Conv", (), "/Conv/_input_quantizer"),  # no folder
        ("Conv", (), "Conv/_input_quantizer"),
        (
            "/m/conv/Conv",
            ("/m/conv/_input_quantizer/QuantizeLinear",),
            "/m/conv/Conv/_input_quantizer",
        ),
        (
            "/m/conv/Conv",
            ("/m/conv/_input_quantizer/scale", "/m/conv/Conv/_input_quantizer/zero_point"),
            "/m/conv/Conv/_input_quantizer_0",
        ),
        (
            "Conv",
            (
                "Conv/_input_quantizer/DequantizeLinear_output_0",
                "Conv/_input_quantizer_0/QuantizeLinear_output_0",
            ),
            "Conv/_input_quantizer_1",
        ),
    ],
)
def test_pairs_have_their_readers_name_or_one_that_is_free(
    name: str, taken: tuple[str, ...], base: str
) -> None:
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
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(tensor).astype(dtype), tensor.name
            )
        )
    index = Model(model)
    placement = place(index, Rules(head="none", include=["t"]))
    rewrite(
        index, placement, {t: ActivationScale(1.0, "", None) for t in placement.readers}, "sketch"
    )
    found = {
        n.input[0]: value_of(model, n.input[1])
        for n in nodes_of(model, "QuantizeLinear")
        if "weight" in n.name
    }
    assert {t: (v.shape, v.dtype, set(v.ravel().tolist())) for t, v in found.items()} == {
        "c.weight": ((24,), dtype, {1.0}),
        "tw": ((), dtype, {1.0}),
    }


def test_quantized_readers_share_a_pair_and_float_readers_and_outputs_keep_the_tensor_itself(
    net: Net,
) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x"))
    net.output(relu, net.conv("d", relu), net.op("Sigmoid", "s", relu), net.conv("e", relu))
    model, quantized = inserted(net.model())
    assert [q.tensor for q in quantized if q.method == "max"] == ["x", "r.out"]
    readers = {n.name: n.input[0] for n in nodes_of(model, "Conv", "Sigmoid")}
    assert (
        readers["d"] == readers["e"] == "d/_input_quantizer/DequantizeLinear_output_0"
        and readers["s"] == "r.out"
    )
    assert [v.name for v in model.graph.output] == ["r.out", "d.out", "s.out", "e.out"]


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_matrix_products_that_share_a_tensor_have_a_dq_each_and_run_in_int8(
    net: Net, op: str, target: str
) -> None:
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
    assert {c.name: c.precision for c in found} == dict.fromkeys(
        ("c", "one", "two", "three"), Precision.INT8
    )


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
