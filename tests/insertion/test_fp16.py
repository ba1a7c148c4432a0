import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.fp16 import convert_to_fp16, has_fp16, widen_float16
from qdqtool.ir.graph import Model
from qdqtool.patterns.half import float32_inputs
from qdqtool.prediction import predict
from qdqtool.quantization.api import insert
from tests.errors import has
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    check,
    copy_model,
    detector,
    images,
    nodes_of,
    require_prediction,
    run,
    store_as_half,
    two_layers,
)
from tests.notes import note_codes


def small_net(opset: int = 19) -> ModelProto:
    net = Net()
    relu = net.op("Relu", "r", net.conv("c", "x"))
    up = net.op("Resize", "up", relu, "", net.const("scales", [1, 1, 2, 2]), mode="nearest")
    return net.output(net.op("Sigmoid", "s", net.conv("d", up))).model(opset, ir=9)


def copy_as_fp16(model: ModelProto) -> ModelProto:
    copy = copy_model(model)
    convert_to_fp16(Model(copy))
    check(copy)
    return copy


def test_constant_with_float_and_half_consumers_is_copied(net: Net) -> None:
    k = net.const("k", 2.0)
    half = net.op("Mul", "m", net.conv("c", "x"), k)
    after = copy_as_fp16(net.output(net.op("Add", "tail", net.conv("d", half), k)).model(19, ir=9))
    assert {t.name: t.data_type for t in after.graph.initializer if t.name.startswith("k")} == {
        "k": TensorProto.FLOAT,
        "k_fp16": TensorProto.FLOAT16,
    }
    run(after, images(1)[0])


@pytest.mark.parametrize(
    ("op", "opset", "outputs", "stay"),
    [
        ("Conv", 19, 1, set()),
        ("QuantizeLinear", 19, 1, set()),
        ("QuantizeLinear", 13, 1, None),  # float32 alone
        ("DequantizeLinear", 19, 1, set()),
        ("DequantizeLinear", 13, 1, None),  # makes float32
        ("Resize", 19, 1, {2}),
        ("Upsample", 9, 1, {1}),
        ("Cast", 19, 1, None),
        ("EyeLike", 19, 1, None),
        ("MelWeightMatrix", 19, 1, None),
        ("Constant", 19, 1, None),
        ("ConstantOfShape", 19, 1, None),
        ("If", 19, 1, None),
        ("Shape", 19, 1, set()),
        ("TopK", 19, 2, set()),
        ("DynamicQuantizeLinear", 19, 1, None),
        ("LayerNormalization", 19, 1, set()),
        ("LayerNormalization", 19, 2, None),  # the mean may be float32 with any input type
        ("StringNormalizer", 19, 1, set()),
        ("NoSuchOperator", 19, 1, None),
    ],
)
def test_form_of_operator(op: str, opset: int, outputs: int, stay: set[int] | None) -> None:
    assert float32_inputs(op, opset, outputs) == (None if stay is None else frozenset(stay))


@pytest.mark.parametrize("op", ["Add", "Mul", "Div"])
@pytest.mark.parametrize(
    ("value", "count", "half"),
    [
        (65504.0, 1, True),
        (-65504.0, 1, True),
        (65505.0, 1, False),
        (-65505.0, 1, False),
        (65505.0, 17, False),
        (2.0**-24, 1, True),
        (2.0**-25, 1, False),
        (-(2.0**-25), 1, False),
        (0.0, 1, True),
        (2.0**-25, 16, False),
        (2.0**-25, 17, True),
    ],
)
def test_constant_that_half_cannot_hold_keeps_consumer_float(
    op: str, value: float, count: int, half: bool
) -> None:
    """Values too small for half matter only if they are at least a sixteenth of the constant."""
    net = Net(channels=count)
    constant = net.const("k", np.r_[np.ones(count - 1), value].reshape(-1, 1, 1))
    after = net.conv(
        "c", net.op(op, "a", net.conv("b", "x", count, count, 1), constant), count, 4, 1
    )
    index = Model(copy_as_fp16(net.output(after).model(19, ir=9)))
    assert [index.elem_type(index.node(name).output) for name in "ba"] == [
        TensorProto.FLOAT16,
        TensorProto.FLOAT16 if half else TensorProto.FLOAT,
    ]


def test_half_casts_inputs_outputs_and_tail(net: Net) -> None:
    net.inputs += [
        helper.make_tensor_value_info(n, t, [1, 16, 8, 8])
        for n, t in (("f", 1), ("i", 6), ("h", 10))
    ]
    net.output(
        net.op("Sigmoid", "s", net.op("Add", "add", net.conv("c", "x"), "f"))  # the tail reads f
    )
    net.output(net.conv("d", net.op("Cast", "cast", "i", to=1)))
    after = copy_as_fp16(
        net.output(net.op("Neg", "neg", "h"), dtype=TensorProto.FLOAT16).model(19, ir=9)
    )
    assert {(n.input[0], n.output[0]) for n in nodes_of(after, "Cast")} == {
        ("x", "x_fp16"),
        ("i", "cast.out"),
        ("cast.out", "cast.out_fp16"),
        ("c.out_fp16", "c.out"),
        ("d.out_fp16", "d.out"),
    }


def test_half_leaves_integers_other_domains_and_unknown_types(net: Net) -> None:
    inner = net.conv("a", "x")
    shape = net.op(
        "Concat", "sizes", net.op("Shape", "shape", inner), net.const("four", [4], np.int64), axis=0
    )
    mixed = net.op("Mul", "mixed", inner, net.op("Strange", "strange", inner, domain="example"))
    net.output(
        net.conv("b", net.op("Relu", "r", inner)), net.conv("c", net.op("Relu", "late", mixed))
    )
    proto = net.output(net.op("Identity", "end", shape), dtype=TensorProto.INT64).open_model(19)
    assert convert_to_fp16(Model(proto)) == 5  # a, r, b, late and c
    index = Model(proto)
    assert {index.node(n).inputs[0] for n in ("strange", "mixed", "shape")} == {"a.out"}
    assert index.producer("a.out").op == "Cast"  # type: ignore[union-attr]
    assert index.node("r").inputs[0] == "a.out_fp16"


def test_half_tensor_is_cast_for_subgraph(net: Net) -> None:
    inner = net.conv("a", "x")

    def branch(name: str) -> GraphProto:
        node = helper.make_node("Relu", [inner], [f"{name}.out"], name=name)
        output = helper.make_tensor_value_info(f"{name}.out", 1, None)
        return helper.make_graph([node], name, [], [output])

    chosen = net.choice("if", branch)
    before = net.output(net.conv("b", net.op("Add", "add", inner, chosen))).model(19, ir=9)
    after = copy_as_fp16(before)
    index = Model(after)
    assert (
        index.elem_type(index.node("a").output)
        == index.elem_type(index.node("add").output)
        == TensorProto.FLOAT16
    )
    assert_same_outputs(before, after, images(1)[0], atol=5e-3)


def test_half_keeps_tail_float(net: Net) -> None:
    k = net.const("k", np.full((16, 1, 1), 2.0))
    inner = net.op("Mul", "m", net.conv("a", "x"), k)
    moved = net.reshape("flat", net.conv("b", inner), 1, 16, 64)
    net.output(inner, moved, net.op("Sigmoid", "s", moved))
    net.outputs.append(helper.make_tensor_value_info(k, TensorProto.FLOAT, [16, 1, 1]))
    before = net.model(19, ir=9)
    after = copy_as_fp16(before)
    assert [v.type.tensor_type.elem_type for v in after.graph.output] == [TensorProto.FLOAT] * 4
    index = Model(after)
    # Nodes that move the last result are not a tail yet; nodes that compute with it are.
    assert {
        n.name
        for n in index.nodes
        if n.op != "Cast" and index.elem_type(n.output) == TensorProto.FLOAT16
    } == {"a", "m", "b", "flat"}
    assert_same_outputs(before, after, images(1)[0], atol=5e-3)


def test_half_keeps_tail_after_reshape_float(net: Net) -> None:
    flat = net.reshape("flat", net.op("Sigmoid", "s", net.conv("a", "x")), 1, 1024)
    index = Model(
        copy_as_fp16(net.output(net.op("Concat", "cat", flat, flat, axis=1)).model(19, ir=9))
    )
    half = {n.name for n in index.nodes if index.elem_type(n.inputs[0]) == TensorProto.FLOAT16}
    assert half == {"a", "a.out/Cast_to_fp32"}


def test_half_yolov8_decodes_boxes_in_float32() -> None:
    model, data = detector(), images(2, 3, 64, "images")
    options = {"target": "trt11", "method": "max", "residual": "both", "predict": False}
    single, half = (insert(model, data, high_precision=kind, **options) for kind in (None, "fp16"))
    check(half.model)
    index = Model(half.model)
    assert index.opset == 19
    assert {
        index.elem_type(n.output[0]) for n in nodes_of(half.model, "Conv") if "dfl" not in n.name
    } == {TensorProto.FLOAT16}
    for name in ("/model.22/dfl/Softmax", "/model.22/Mul", "/model.22/Sigmoid"):
        assert index.elem_type(index.node(name).inputs[0]) == TensorProto.FLOAT
    assert len(nodes_of(half.model, "Cast")) == 3
    for q in nodes_of(half.model, "QuantizeLinear", "DequantizeLinear"):
        assert index.elem_type(q.input[1]) == TensorProto.FLOAT16
        assert (index.constant(q.input[1]) > 0).all()  # type: ignore[operator]
    float_out, single_out, half_out = (
        run(m, data[0])[0] for m in (model, single.model, half.model)
    )
    # Rounding to FP16 moves values across INT8 steps: the error differs from the error of INT8
    # with FP32, but is not larger.
    assert np.abs(half_out - float_out).mean() < 1.25 * np.abs(single_out - float_out).mean()


@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_scales_of_small_half_values_are_raised(net: Net, factor: float) -> None:
    """Quantized values below 127 times the smallest FP16 number would have a scale of 0."""
    small = net.op("Mul", "small", net.conv("a", "x"), net.const("k", factor))
    model = store_as_half(net.output(net.conv("b", small)).model())
    result = insert(model, half_images(), target="trt10", method="max", head="none")
    index = Model(result.model)
    for entry in result.activations:
        scale = index.constant(index.node(entry.node).input(1))
        assert scale is not None and scale.dtype == np.float16 and scale == entry.scale > 0
    assert "SCALE-NONPOS" not in {f.code for f in predict(result.model).findings}
    assert ("scales-coarse" in note_codes(result.warnings)) is (factor < 1)


def test_high_precision_fp16_is_refused_for_tensorrt_8() -> None:
    with pytest.raises(
        QdqtoolError, check=has("option-conflict", parameter="high_precision"), match=r"trt8\.5"
    ):
        insert(small_net(), images(), high_precision="fp16", target="trt8.5")


def test_float16_model_is_widened_for_tensorrt_8() -> None:
    model = store_as_half(small_net(17), keep=["scales"])
    assert has_fp16(Model(model))
    result = insert(model, half_images(), target="trt8.5", method="max", predict=False)
    check(result.model)
    index = Model(result.model)
    assert index.opset == 17
    assert {index.elem_type(n.input[1]) for n in nodes_of(result.model, "QuantizeLinear")} == {
        TensorProto.FLOAT
    }
    ends = (*result.model.graph.input, *result.model.graph.output)
    assert [v.type.tensor_type.elem_type for v in ends] == [10, 10]
    assert_same_outputs(model, result.model, half_images()[0], atol=0.05)


def half_images() -> list[dict[str, np.ndarray]]:
    return [{k: v.astype(np.float16) for k, v in s.items()} for s in images()]


@pytest.mark.parametrize(
    "where", ["initializer", "input", "value_info", "Constant", "nowhere", "Identity"]
)
def test_has_half(where: str) -> None:
    half = numpy_helper.from_array(np.float16([1.0]), "h")
    wide = numpy_helper.from_array(np.float32([1.0]), "f")
    value = helper.make_tensor_value_info("v", TensorProto.FLOAT16, [1])
    constant = helper.make_node("Constant", [], ["c"], value=half if where == "Constant" else wide)
    graph = helper.make_graph(
        [constant, helper.make_node("Identity", ["c"], ["y"])],
        "g",
        [value] if where == "input" else [],
        [helper.make_tensor_value_info("y", 1, [1])],
        [half if where == "initializer" else wide],
        value_info=[value] if where == "value_info" else [],
    )
    if where == "Identity":  # the type follows from the input's type
        graph.node[0].op_type = "Strange"
    model = Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert has_fp16(model) is (where in ("initializer", "input", "value_info", "Constant"))


def test_to_float_widens_subgraphs_attributes_and_inputs(net: Net) -> None:
    def branch(name: str) -> GraphProto:
        weight = numpy_helper.from_array(np.full((16, 1, 1), 0.5, np.float16), f"{name}.w")
        two = numpy_helper.from_array(np.float16(2.0))
        nodes = [
            helper.make_node("Constant", [], [f"{name}.c"], value=two),
            helper.make_node("Mul", ["x", f"{name}.w"], [f"{name}.m"]),
            helper.make_node("Mul", [f"{name}.m", f"{name}.c"], [f"{name}.out"]),
        ]
        output = helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT16, [1, 16, 8, 8])
        return helper.make_graph(nodes, name, [], [output], [weight])

    net.inputs.append(helper.make_tensor_value_info("i", TensorProto.INT32, [1]))
    cast = net.op("Cast", "cast", "i", to=TensorProto.FLOAT16)
    net.output(net.op("Mul", "mul", net.choice("if", branch), cast), dtype=TensorProto.FLOAT16)
    net.output(net.op("Cast", "kept", "i", to=TensorProto.DOUBLE), dtype=TensorProto.DOUBLE)
    net.outputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 16, 8, 8]))
    net.inputs[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    model, feeds = net.model(), {**half_images()[0], "i": np.int32([3])}
    before = copy_model(model)
    widen_float16(Model(model))
    check(model)
    assert Model(model).node("cast").attributes == {"to": TensorProto.FLOAT}
    assert [v.type.tensor_type.elem_type for v in model.graph.output] == [10, 11, 10]
    assert_same_outputs(before, model, feeds, rtol=2e-3)


def test_to_float_widens_type_attributes(net: Net) -> None:
    attributes = [
        ("to", 10, 1),
        ("dtype", 10, 1),
        ("output_dtype", 10, 1),
        ("axis", 10, 10),
        ("to", 11, 11),
        ("dtype", 6, 6),
    ]
    for i, (name, before, _) in enumerate(attributes):
        net.op("Any", f"n{i}", "x", **{name: before})
    model = net.open_model()
    widen_float16(Model(model))
    assert [node.attribute[0].i for node in model.graph.node] == [after for *_, after in attributes]


@pytest.mark.parametrize(
    ("is_half", "ir", "end"),
    [(True, 3, "input"), (True, 9, "input"), (False, 3, "input"), (True, 8, "output")],
)
def test_weights_that_are_inputs_or_an_output(is_half: bool, ir: int, end: str) -> None:
    """Old exporters list initializers among the inputs."""
    model = store_as_half(two_layers(13)) if is_half else two_layers(13)
    model.ir_version = ir
    infos = [
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    ]
    halves = [i for i in infos if i.type.tensor_type.elem_type == TensorProto.FLOAT16]
    getattr(model.graph, end).extend(infos if end == "input" else halves[:1])
    feeds = half_images()[0] if is_half else images(1)[0]
    options = {} if is_half else {"target": "trt10", "high_precision": "fp16"}
    result = insert(model, [feeds], predict=False, include=["."], **options)
    assert len(result.activations) == 2
    check(result.model)
    assert_same_outputs(model, result.model, feeds, atol=0.1)


def test_stated_output_type_of_a_dequantizer_becomes_half(net: Net) -> None:
    model = net.output(net.conv("d", net.op("Relu", "r", net.conv("c", "x")))).model(23, ir=11)
    quantized = insert(model, images(), head="none", predict=False).model
    for node in nodes_of(quantized, "DequantizeLinear"):
        node.attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT))
    assert predict(quantized, target="11").findings_by_code()["FLOAT-FP32"] == 1
    fixed = copy_as_fp16(quantized)
    attributes = [a.name for n in nodes_of(fixed, "DequantizeLinear") for a in n.attribute]
    assert set(attributes) == {"axis"}
    assert_same_outputs(quantized, fixed, images(1)[0], atol=0.1)


@pytest.mark.parametrize("opset", [19, 21, 22, 23, 25])
def test_newer_opsets_become_fp16_too(opset: int, net: Net) -> None:
    """From opset 23 on, the type of a DequantizeLinear's result may be an attribute."""
    model = net.output(net.conv("d", net.op("Relu", "r", net.conv("c", "x")))).model(opset, ir=11)
    result = insert(model, images(), target="11", head="none")
    assert "FLOAT-FP32" not in require_prediction(result).findings_by_code()
    weights = [t for t in result.model.graph.initializer if len(t.dims) == 4]
    assert {t.data_type for t in weights} == {TensorProto.FLOAT16}
    run(result.model, images(1)[0])
