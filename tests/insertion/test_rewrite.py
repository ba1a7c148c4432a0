import numpy as np
import onnx
import pytest

from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.rewrite import (
    ActivationScale,
    QuantizedTensor,
    insert_pairs,
    name_rounded_weights,
    quantize_to_int8,
    round_up_to_half,
    round_weights,
)
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from tests.insertion.nets import (
    Net,
    check,
    copy_model,
    images,
    nodes_of,
    one_layer,
    run,
    set_value,
    value_of,
)


def insert_scaled(
    model: onnx.ModelProto,
    scale: float = 0.05,
    weights: str = "float",
    include: tuple[str, ...] = (),
) -> tuple[onnx.ModelProto, list[QuantizedTensor]]:
    copy = copy_model(model)
    index = Model(copy)
    placement = compute_placement(index, PlacementRules(head="none", include=include))
    quantized = insert_pairs(
        index,
        placement,
        {t: ActivationScale(scale, "max", None) for t in placement.inputs},
        weights,
    )
    check(copy)
    return copy, quantized


def two_layers() -> onnx.ModelProto:
    net = Net()
    first = net.op("Relu", "/m.0/act/Relu", net.conv("/m.0/conv/Conv", "x"))
    return net.output(net.op("Relu", "/m.1/act/Relu", net.conv("/m.1/conv/Conv", first))).model()


def test_pairs_are_named_after_layers() -> None:
    model, quantized = insert_scaled(two_layers())
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


def test_rewrite_keeps_metadata() -> None:
    model = two_layers()
    model.metadata_props.add(key="names", value="{0: 'person'}")
    model.doc_string, model.producer_name, model.graph.doc_string = "doc", "pytorch", "graph doc"
    model.graph.node[0].doc_string = "node doc"
    model.opset_import.add(domain="custom", version=3)
    infos = {v.name for v in model.graph.value_info}
    result, _ = insert_scaled(model)
    assert result.metadata_props[0].value == "{0: 'person'}"
    texts = [result.doc_string, result.producer_name, result.graph.doc_string]
    assert texts == ["doc", "pytorch", "graph doc"]
    assert nodes_of(result, "Conv")[0].doc_string == "node doc"
    assert {(o.domain, o.version) for o in result.opset_import} == {("", 17), ("custom", 3)}
    assert infos <= {v.name for v in result.graph.value_info}


def test_weights_have_scales_per_channel() -> None:
    model, _ = insert_scaled(two_layers(), 0.05)
    for node in nodes_of(model, "QuantizeLinear"):
        scale, zero = value_of(model, node.input[1]), value_of(model, node.input[2])
        assert zero.dtype == np.int8 and not zero.any() and scale.shape == zero.shape
        axis = [a.i for a in node.attribute if a.name == "axis"]
        has_channels = "_weight_" in node.name
        assert (scale.shape, axis) == (((16,), [0]) if has_channels else ((), []))
        assert has_channels or scale == np.float32(0.05)


def test_round_up_to_half() -> None:
    values = np.float32([1e-9, 6e-8, 1e-6, 0.1, 1.0, 3.14159, 60000.0])
    half = round_up_to_half(values)
    assert half.dtype == np.float16
    assert (half.astype(np.float32) >= values).all() and (half > 0).all()
    assert half[3].astype(np.float32) / values[3] < 1.001
    exact = np.float32([2.0**-24, 0.5, 1.0, 1.0 + 2.0**-10, 32768.0])
    np.testing.assert_array_equal(round_up_to_half(exact), exact.astype(np.float16))
    np.testing.assert_array_equal(
        round_up_to_half(np.nextafter(exact[:4], np.float32(9))),
        np.float16([2.0**-23, 0.5 + 2.0**-11, 1.0 + 2.0**-10, 1.0 + 2.0**-9]),
    )


def test_quantized_convolution_is_product_of_quantized_values() -> None:
    """A 1x1 convolution sums quantized inputs times quantized weights, plus the float bias."""
    net = Net(side=4)
    before = net.output(net.conv("c", "x", kernel=1)).model()
    model, _ = insert_scaled(before, 0.01)
    x = images(1, side=4)[0]["x"]
    w, b = value_of(before, "c.weight")[:, :, 0, 0].astype(np.float64), value_of(before, "c.bias")
    steps = np.abs(w).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    xq = np.clip(np.rint(x.astype(np.float64) / np.float32(0.01)), -128, 127) * np.float32(0.01)
    expected = np.einsum("oi,nihw->nohw", np.rint(w / steps) * steps, xq) + b[None, :, None, None]
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_int8_weights_give_same_outputs() -> None:
    base = two_layers()
    as_float, _ = insert_scaled(base)
    as_int8, quantized = insert_scaled(base, weights="int8")
    feeds = images(1)[0]
    np.testing.assert_array_equal(run(as_float, feeds)[0], run(as_int8, feeds)[0])
    assert len(nodes_of(as_int8, "QuantizeLinear")) == 2
    assert [t.data_type for t in as_int8.graph.initializer if t.name.endswith("_quantized")] == [
        onnx.TensorProto.INT8
    ] * 2
    assert not any(t.name == "/m.0/conv/Conv.weight" for t in as_int8.graph.initializer)
    assert quantized[1].node == "/m.0/conv/_weight_quantizer/DequantizeLinear"


def test_quantize_equals_onnxruntime() -> None:
    rng = np.random.default_rng(3)
    value = rng.normal(0, 1, (6, 5, 3, 3)).astype(np.float32)
    value[0, 0] = [[0.5, 1.5, -0.5], [-1.5, 2.5, 200.0], [-200.0, 0.0, 3.5]]
    scale = rng.uniform(0.5, 2.0, 5).astype(np.float32)
    scale[0] = 1.0
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("QuantizeLinear", ["v", "s", "z"], ["q"], axis=1)],
        "q",
        [
            onnx.helper.make_tensor_value_info("v", 1, value.shape),
            onnx.helper.make_tensor_value_info("s", 1, [5]),
            onnx.helper.make_tensor_value_info("z", 3, [5]),
        ],
        [onnx.helper.make_tensor_value_info("q", 3, value.shape)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 8
    expected = run(model, {"v": value, "s": scale, "z": np.zeros(5, np.int8)})[0]
    np.testing.assert_array_equal(quantize_to_int8(value, scale, 1), expected)


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "axis"),
    [
        ("Conv", (20, 16, 1, 1), {}, 0),
        ("ConvTranspose", (16, 24, 2, 2), {}, None),
        ("ConvTranspose", (16, 8, 2, 2), {"group": 2}, None),
        ("Gemm", (16, 20), {}, 1),
        ("Gemm", (20, 16), {"transB": 1}, 0),
        ("MatMul", (16, 20), {}, 1),
    ],
)
def test_weight_axis_of_operator(
    net: Net, op: str, shape: tuple[int, ...], attributes: dict[str, int], axis: int | None
) -> None:
    pooled = net.op("GlobalAveragePool", "pool", "x")
    data = pooled if len(shape) == 4 else net.op("Flatten", "flat", pooled)
    weights = net.const("w", net.rng.standard_normal(shape))
    model, _ = insert_scaled(net.output(net.op(op, "n", data, weights, **attributes)).model())
    (q,) = [n for n in nodes_of(model, "QuantizeLinear") if "_weight_" in n.name]
    assert [a.i for a in q.attribute if a.name == "axis"] == ([] if axis is None else [axis])
    assert value_of(model, q.input[1]).shape == (() if axis is None else (20,))
    run(model, images(1)[0])


@pytest.mark.parametrize("names", [["", "", ""], ["/a/Conv", "/a/Conv_1", "/a/Conv_2"]])
def test_pairs_of_unnamed_and_similar_nodes_have_unique_names(net: Net, names: list[str]) -> None:
    tensor = "x"
    for i in range(3):
        tensor = net.op("Relu", f"r{i}", net.conv(f"c{i}", tensor))
    model = net.output(tensor).model()
    for node, name in zip(nodes_of(model, "Conv"), names, strict=True):
        node.name = name
    result, quantized = insert_scaled(model)
    added = [n.name for n in nodes_of(result, "QuantizeLinear", "DequantizeLinear")]
    assert len(set(added)) == len(added) == 12 and len({q.node for q in quantized}) == 6
    run(result, images(1)[0])


@pytest.mark.parametrize(
    ("name", "used", "base"),
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
def test_pairs_are_named_after_consumer(
    net: Net, name: str, used: tuple[str, ...], base: str
) -> None:
    model = net.output(net.conv("c", "x"), *(net.op("Relu", node, "x") for node in used)).model()
    for node in model.graph.node:
        if node.name == "c":
            node.name = name
    _, quantized = insert_scaled(model)
    assert quantized[0].node == f"{base}/QuantizeLinear"


def test_names_of_pairs_avoid_existing_tensors(net: Net) -> None:
    net.op("Relu", "other", "x")
    net.nodes[-1].output[0] = tensor = "c/_input_quantizer/QuantizeLinear_output_0"
    _, quantized = insert_scaled(
        net.output(net.conv("c", "x"), net.op("Relu", "r", tensor)).model()
    )
    assert quantized[0].node == "c/_input_quantizer_0/QuantizeLinear"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sketched_weights_have_scales_of_one(net: Net, dtype: type) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x", cout=24))
    model = net.output(
        net.op("ConvTranspose", "t", relu, net.const("tw", np.full((24, 8, 2, 2), 3.0)))
    ).model()
    for name in [t.name for t in model.graph.initializer]:
        set_value(model, name, value_of(model, name).astype(dtype))
    index = Model(model)
    placement = compute_placement(index, PlacementRules(head="none", include=["t"]))
    insert_pairs(
        index, placement, {t: ActivationScale(1.0, "", None) for t in placement.inputs}, "sketch"
    )
    scales = {
        n.input[0]: value_of(model, n.input[1])
        for n in nodes_of(model, "QuantizeLinear")
        if "weight" in n.name
    }
    assert {t: (v.shape, v.dtype, set(v.ravel().tolist())) for t, v in scales.items()} == {
        "c.weight": ((24,), dtype, {1.0}),
        "tw": ((), dtype, {1.0}),
    }


def test_quantized_consumers_share_pair(
    net: Net,
) -> None:
    relu = net.op("Relu", "r", net.conv("c", "x"))
    net.output(relu, net.conv("d", relu), net.op("Sigmoid", "s", relu), net.conv("e", relu))
    model, quantized = insert_scaled(net.model())
    assert [q.tensor for q in quantized if q.method == "max"] == ["x", "r.out"]
    readers = {n.name: n.input[0] for n in nodes_of(model, "Conv", "Sigmoid")}
    assert (
        readers["d"] == readers["e"] == "d/_input_quantizer/DequantizeLinear_output_0"
        and readers["s"] == "r.out"
    )
    assert [v.name for v in model.graph.output] == ["r.out", "d.out", "s.out", "e.out"]


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_matrix_products_that_share_tensor_have_a_dq_each(net: Net, op: str, target: str) -> None:
    rows = net.op("Flatten", "f", net.op("GlobalAveragePool", "g", net.conv("c", "x")))
    rng = np.random.default_rng(0)
    outputs = [
        net.op(op, name, rows, net.const(f"{name}.w", rng.normal(size=(16, 4))))
        for name in ("one", "two", "three")
    ]
    model, quantized = insert_scaled(net.output(*outputs).model())
    shared = [n for n in nodes_of(model, "QuantizeLinear") if n.input[0] == rows]
    assert len(shared) == 1 and len([q for q in quantized if q.tensor == rows]) == 1
    dqs = {n.output[0]: n for n in nodes_of(model, "DequantizeLinear")}
    fed = [dqs[n.input[0]] for n in nodes_of(model, op)]
    assert len({n.name for n in fed}) == 3 and {n.input[0] for n in fed} == {shared[0].output[0]}
    assert fed[1].name == "two/_input_quantizer/DequantizeLinear"
    assert {c.name: c.precision for c in predict(model, target).convolutions} == dict.fromkeys(
        ("c", "one", "two", "three"), Precision.INT8
    )


@pytest.mark.parametrize("size", [1e-40, 1e-3, 1.0, 1e30])
def test_rounded_weights_equal_q_and_dq_of_onnxruntime(size: float) -> None:
    model = one_layer()
    value = np.random.default_rng(7).normal(0, size, (16, 16, 3, 3)).astype(np.float32)
    value[1] = 0.0
    set_value(model, "c.weight", value)
    pairs, _ = insert_scaled(model)
    pairs.graph.output.append(
        onnx.helper.make_tensor_value_info(
            nodes_of(pairs, "Conv")[0].input[1], onnx.TensorProto.FLOAT, None
        )
    )
    expected = run(pairs, images(1)[0])[-1]
    assert np.array_equal(round_weights(value, 0).view(np.uint32), expected.view(np.uint32))


def test_rewrite_with_rounded_weights() -> None:
    index = Model(one_layer())
    placement = compute_placement(index, PlacementRules(head="none"))
    quantized = insert_pairs(index, placement, {"x": ActivationScale(0.05, "max", None)}, "rounded")
    assert name_rounded_weights("c.weight", 0) in {t for n in index.nodes for t in n.inputs}
    assert [q.tensor for q in quantized] == ["x"]
