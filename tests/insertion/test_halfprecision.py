from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from qdqtool.demo.model import yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.graph import Model
from qdqtool.insertion.api import insert
from qdqtool.insertion.halfprecision import has_half, to_float, to_half
from tests.insertion.nets import Net, check, images, nodes_of, run


def small_net(opset: int = 19) -> onnx.ModelProto:
    net = Net()
    relu = net.op("Relu", "r", net.conv("c", "x"))
    up = net.op("Resize", "up", relu, "", net.const("scales", [1, 1, 2, 2]), mode="nearest")
    net.output(net.op("Sigmoid", "s", net.conv("d", up)))
    return net.model(opset, ir=9)


def as_half(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    to_half(copy)
    check(copy)
    return copy


def test_inputs_and_outputs_keep_their_types_and_convolutions_change() -> None:
    before = small_net()
    after = as_half(before)
    assert [v.type.tensor_type.elem_type for v in (*after.graph.input, *after.graph.output)] == [1, 1]
    index = Model(after)
    for node in nodes_of(after, "Conv"):
        assert index.elem_type(node.output[0]) == TensorProto.FLOAT16
        assert index.elem_type(node.input[1]) == TensorProto.FLOAT16
    feeds = images(1)[0]
    np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], atol=5e-3)


def test_resize_scales_stay_float32_and_the_tail_too() -> None:
    after = as_half(small_net())
    index = Model(after)
    resize = index.node("up")
    assert index.elem_type(resize.inputs[0]) == TensorProto.FLOAT16
    assert index.elem_type(resize.inputs[2]) == TensorProto.FLOAT
    assert index.elem_type(index.node("s").inputs[0]) == TensorProto.FLOAT
    assert len(nodes_of(after, "Cast")) == 2


def test_constants_that_half_cannot_hold_keep_their_node_float() -> None:
    net = Net()
    big = net.op("Add", "big", net.conv("c", "x"), net.const("huge", 1e9))
    tiny = net.op("Div", "tiny", net.conv("d", big), net.const("eps", 1e-12))
    fine = net.op("Mul", "fine", tiny, net.const("k", 1e-12))
    net.output(net.conv("e", fine))
    index = Model(as_half(net.model(19, ir=9)))
    types = {n: index.elem_type(index.node(n).output) for n in ("c", "big", "tiny", "fine", "e")}
    assert types["big"] == types["tiny"] == types["fine"] == TensorProto.FLOAT
    assert types["c"] == TensorProto.FLOAT16


def test_a_shared_constant_is_kept_for_its_float_reader() -> None:
    net = Net()
    k = net.const("k", 2.0)
    half = net.op("Mul", "m", net.conv("c", "x"), k)
    net.output(net.op("Add", "tail", net.conv("d", half), k))
    after = as_half(net.model(19, ir=9))
    assert {t.name: t.data_type for t in after.graph.initializer if t.name.startswith("k")} == {
        "k": TensorProto.FLOAT, "k_fp16": TensorProto.FLOAT16,
    }  # fmt: skip
    run(after, images(1)[0])


def test_yolov8_in_half_without_int8_is_close() -> None:
    model = yolov8n(64, classes=4)
    for entry in model.opset_import:
        entry.version = 19  # nothing in this model changed between 17 and 19
    half = as_half(model)
    feeds = images(1, 3, 64, "images")[0]
    before, after = run(model, feeds)[0], run(half, feeds)[0]
    assert np.abs(after - before)[:, :4].mean() < 0.1  # pixels, of 64
    assert np.abs(after - before)[:, 4:].mean() < 1e-4


def test_yolov8_in_half_differs_little_and_decodes_boxes_in_float32() -> None:
    model = yolov8n(64, classes=4)
    data = images(3, 3, 64, "images")
    single = insert(model, data, target="trt11", method="max", predict=False)
    half = insert(model, data, target="trt11", method="max", predict=False, high_precision="fp16")
    check(half.model)
    assert half.notes == ["opset raised from 17 to 19"]
    index = Model(half.model)
    kinds = {index.elem_type(n.output[0]) for n in nodes_of(half.model, "Conv") if "dfl" not in n.name}
    assert kinds == {TensorProto.FLOAT16}
    for name in ("/model.22/dfl/Softmax", "/model.22/Mul", "/model.22/Sigmoid"):
        assert index.elem_type(index.node(name).inputs[0]) == TensorProto.FLOAT
    assert len(nodes_of(half.model, "Cast")) == 3
    for q in nodes_of(half.model, "QuantizeLinear", "DequantizeLinear"):
        assert index.elem_type(q.input[1]) == TensorProto.FLOAT16
        assert (index.constant(q.input[1]) > 0).all()  # type: ignore[operator]
    feeds = data[0]
    float_out, one, two = (run(m, feeds)[0] for m in (model, single.model, half.model))
    # Rounding to FP16 moves values over INT8 steps, so that INT8's error comes out otherwise, but no larger.
    assert np.abs(two - float_out).mean() < 1.25 * np.abs(one - float_out).mean()


def test_fp16_is_refused_where_the_target_takes_no_fp16_scales() -> None:
    with pytest.raises(QdqtoolError, match=r"trt8\.5 takes no FP16 scales"):
        insert(small_net(), images(), high_precision="fp16", target="trt8.5")


def float16_model() -> onnx.ModelProto:
    """The small net in float16 altogether, inputs and outputs included."""
    model = small_net(17)
    for tensor in model.graph.initializer:
        if tensor.name != "scales":
            half = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    check(model)
    return model


def half_images() -> list[dict[str, np.ndarray]]:
    return [{k: v.astype(np.float16) for k, v in s.items()} for s in images()]


def test_float16_model_for_a_target_with_fp16_scales() -> None:
    model = float16_model()
    assert has_half(Model(model))
    result = insert(model, half_images(), target="trt11", method="max", predict=False)
    check(result.model)
    index = Model(result.model)
    assert index.opset == 19
    assert {index.elem_type(n.input[1]) for n in nodes_of(result.model, "QuantizeLinear")} == {TensorProto.FLOAT16}
    feeds = half_images()[0]
    np.testing.assert_allclose(run(result.model, feeds)[0], run(model, feeds)[0], atol=0.05)


def test_float16_model_for_tensorrt_8_is_widened() -> None:
    model = float16_model()
    result = insert(model, half_images(), target="trt8.5", method="max", predict=False)
    check(result.model)
    assert "widened to float32" in result.notes[0]
    index = Model(result.model)
    assert index.opset == 17
    assert {index.elem_type(n.input[1]) for n in nodes_of(result.model, "QuantizeLinear")} == {TensorProto.FLOAT}
    ends = (*result.model.graph.input, *result.model.graph.output)
    assert [v.type.tensor_type.elem_type for v in ends] == [10, 10]
    feeds = half_images()[0]
    np.testing.assert_allclose(run(result.model, feeds)[0], run(model, feeds)[0], atol=0.05)


def test_widening_alone_changes_no_number_by_more_than_half_precision() -> None:
    model = float16_model()
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    to_float(wide)
    check(wide)
    feeds = half_images()[0]
    np.testing.assert_allclose(run(wide, feeds)[0], run(model, feeds)[0], atol=5e-3)
