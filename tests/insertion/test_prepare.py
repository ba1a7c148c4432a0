from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.errors import ModelError
from qdqtool.insertion.prepare import prepare
from tests.insertion.nets import Net, check, images, nodes_of, run


def same(before: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 1e-4) -> None:
    for feeds in images(2):
        for one, two in zip(run(before, feeds), run(after, feeds), strict=True):
            np.testing.assert_allclose(two, one, rtol=tolerance, atol=tolerance)


def prepared(model: onnx.ModelProto, opset: int = 13) -> tuple[onnx.ModelProto, list[str]]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    notes = prepare(copy, opset=opset)
    check(copy)
    return copy, notes


@pytest.mark.parametrize("bias", [True, False])
def test_batch_normalization_is_folded_into_a_convolution(bias: bool) -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.norm("n", net.conv("c", "x", bias=bias))))
    before = net.model()
    after, notes = prepared(before)
    assert notes == ["1 BatchNormalization nodes were folded into their convolutions"]
    assert not nodes_of(after, "BatchNormalization")
    assert len(after.graph.initializer) == 2
    assert {v.name for v in after.graph.value_info} <= {"n.out"}
    same(before, after)


@pytest.mark.parametrize("group", [1, 4])
def test_batch_normalization_is_folded_into_a_transposed_convolution(group: int) -> None:
    net = Net()
    weight = net.const("w", net.rng.standard_normal((16, 16 // group, 2, 2)))
    net.output(net.norm("n", net.op("ConvTranspose", "t", "x", weight, group=group, strides=[2, 2])))
    before = net.model()
    after, _ = prepared(before)
    assert not nodes_of(after, "BatchNormalization")
    same(before, after)


def test_batch_normalization_that_cannot_be_folded_stays() -> None:
    net = Net()
    shared = net.conv("c", "x")
    net.output(net.norm("n1", shared), net.op("Relu", "other", shared), net.norm("n2", net.op("Relu", "r", "x")))
    after, notes = prepared(net.model())
    assert len(nodes_of(after, "BatchNormalization")) == 2
    assert notes == []


def test_shared_weights_are_copied_before_their_own_normalizations_are_folded() -> None:
    net = Net()
    first = net.conv("a", "x", bias=False)
    second = net.conv("b", "x", bias=False, weight="a.weight")
    net.output(net.norm("na", first), net.norm("nb", second))
    before = net.model()
    after, notes = prepared(before)
    assert notes[0] == "1 weights shared by several nodes were copied"
    weights = [n.input[1] for n in nodes_of(after, "Conv")]
    assert len(set(weights)) == 2
    same(before, after)


def test_weights_read_by_another_operator_as_well_are_copied() -> None:
    net = Net()
    out = net.conv("c", "x", kernel=1, bias=False)
    net.output(out, net.op("Relu", "r", "c.weight"))
    after, _ = prepared(net.model())
    assert nodes_of(after, "Conv")[0].input[1] != "c.weight"
    same(net.model(), after)


def test_weights_behind_identity_transpose_and_reshape_become_constants() -> None:
    net = Net()
    flat = net.const("w", net.rng.standard_normal((16 * 9, 16)))
    turned = net.op("Transpose", "t", net.op("Identity", "i", flat), perm=[1, 0])
    kernel = net.op("Reshape", "r", turned, net.const("shape", [0, 16, 3, -1], np.int64))
    half = net.const("h", net.rng.standard_normal((16, 16, 1, 1)), np.float16)
    wide = net.op("Cast", "cast", half, to=1)
    filled = net.op("ConstantOfShape", "f", net.const("fs", [4, 16, 1, 1], np.int64))
    net.output(net.op("Conv", "a", "x", kernel), net.op("Conv", "b", "x", wide), net.op("Conv", "z", "x", filled))
    before = net.model()
    after, notes = prepared(before)
    assert notes == ["3 weights computed from constants were folded"]
    assert [n.op_type for n in after.graph.node] == ["Conv"] * 3
    assert len(after.graph.initializer) == 3
    same(before, after)


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_opset_is_raised_and_everything_else_kept(opset: int) -> None:
    net = Net()
    relu = net.op("Relu", "named/relu", net.conv("named/conv", "x"))
    net.output(net.op("Squeeze", "sq", net.op("GlobalAveragePool", "gap", relu), axes=[2, 3]))
    before = net.model(opset, ir=6)
    before.metadata_props.add(key="stride", value="32")
    before.doc_string = "kept"
    before.graph.node[0].doc_string = "first"
    before.opset_import.add(domain="Paddle", version=1)
    after, notes = prepared(before)
    assert notes == [f"opset raised from {opset} to 13"]
    assert {(o.domain, o.version) for o in after.opset_import} == {("", 13), ("Paddle", 1)}
    assert after.metadata_props[0].value == "32"
    assert after.doc_string == "kept"
    assert after.graph.node[0].doc_string == "first"
    assert [n.name for n in after.graph.node if n.name][:2] == ["named/conv", "named/relu"]
    assert after.ir_version == 7
    same(before, after)


def test_an_opset_that_cannot_be_raised_is_one_clear_error() -> None:
    net = Net()
    scales = net.const("s", [1, 1, 2, 2])
    net.output(net.op("Upsample", "u", net.conv("c", "x"), scales, mode="linear"))
    model = net.model(9, ir=6)
    model.graph.node[-1].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match=r"opset 9 cannot be raised to 13 \(.*\); export with opset 13 or newer"):
        prepare(model)


def test_nodes_with_one_name_are_named_after_their_outputs() -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.conv("b", net.conv("a", "x"))))
    model = net.model()
    for node in model.graph.node:
        node.name = "same"
    after, notes = prepared(model)
    assert [n.name for n in after.graph.node] == ["a.out", "b.out", "r.out"]
    assert notes[0].startswith("3 nodes that shared a name")
    run(after, images(1)[0])


def test_functions_are_inlined() -> None:
    net = Net()
    net.const("w", net.rng.standard_normal((16, 16, 1, 1)))
    block = onnx.helper.make_node("Block", ["x", "w"], ["y"], name="block", domain="mine")
    net.nodes.append(block)
    net.output(net.op("Relu", "r", "y"))
    inner = [onnx.helper.make_node("Conv", ["a", "k"], ["b"], name="inner/Conv")]
    imports = [onnx.helper.make_opsetid("", 17)]
    function = onnx.helper.make_function("mine", "Block", ["a", "k"], ["b"], inner, imports)
    graph = onnx.helper.make_graph(net.nodes, "g", net.inputs, net.outputs, net.initializers)
    model = onnx.helper.make_model(
        graph, functions=[function], opset_imports=[*imports, onnx.helper.make_opsetid("mine", 1)]
    )
    model.ir_version = 8
    model = onnx.shape_inference.infer_shapes(model)
    after, notes = prepared(model)
    assert notes == ["the model's own functions were inlined"]
    assert [n.op_type for n in after.graph.node] == ["Conv", "Relu"]
    same(model, after)


def test_a_sum_of_two_is_an_add() -> None:
    net = Net()
    net.output(net.op("Sum", "two", net.conv("a", "x"), "x"), net.op("Sum", "three", "x", "x", "x"))
    after, notes = prepared(net.model())
    assert [n.op_type for n in after.graph.node] == ["Conv", "Add", "Sum"]
    assert notes == ["1 Sum nodes of two inputs were written as Add, which TensorRT fuses"]
    same(net.model(), after)


def test_a_newer_opset_stays() -> None:
    net = Net()
    net.output(net.conv("c", "x"))
    model = net.model(17)
    before = model.SerializeToString()
    assert prepare(model) == []
    assert model.SerializeToString() == before
