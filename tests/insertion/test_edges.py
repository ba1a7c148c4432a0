"""The edges of the rules of insertion: unknown shapes, constants that others still read, and other rare neighbours."""

from __future__ import annotations

import numpy as np
import onnx

from qdqtool.graph import Model
from qdqtool.insertion.halfprecision import to_half
from qdqtool.insertion.placement import Rules, place
from tests.insertion.nets import Net, check, images, run


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with Constant nodes instead of initializers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    constants = copy.graph.initializer
    made = [onnx.helper.make_node("Constant", [], [t.name], f"{t.name}/Constant", value=t) for t in constants]
    nodes = [*made, *copy.graph.node]
    del copy.graph.initializer[:]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def test_constant_nodes_that_are_still_read_stay() -> None:
    """Only float constants whose FP16 copies took their place go: shapes and the scales of a Resize are read on."""
    net = Net()
    up = net.op("Resize", "up", net.conv("c", "x"), "", net.const("scales", [1, 1, 2, 2]), mode="nearest")
    flat = net.op("Reshape", "flat", up, net.const("shape", [1, 16, -1], np.int64))
    back = net.op("Reshape", "back", flat, net.const("shape_back", [1, 16, 16, 16], np.int64))
    net.output(net.conv("d", back))
    before = with_constant_nodes(net.model(19, ir=9))
    after = onnx.ModelProto()
    after.CopyFrom(before)
    to_half(after)
    check(after)
    left = {n.output[0] for n in after.graph.node if n.op_type == "Constant"}
    assert {"scales", "shape", "shape_back"} <= left
    assert not any(t.startswith("c.weight") for t in left)
    np.testing.assert_allclose(run(after, images(1)[0])[0], run(before, images(1)[0])[0], atol=2e-2)


def test_a_residual_of_unknown_shape_is_a_residual() -> None:
    """Shape inference stops at operators of other domains; what is not known to be a broadcast is taken as none."""
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    skip = net.op("Strange", "strange", stem, domain="example")
    out = net.op("Add", "add", net.conv("c1", stem), skip)
    net.nodes.append(onnx.helper.make_node("Conv", [out, "c0.weight"], ["y"], "c2", kernel_shape=[3, 3]))
    graph = onnx.helper.make_graph(
        net.nodes, "net", net.inputs, [onnx.helper.make_empty_tensor_value_info("y")], net.initializers)
    model = Model(onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=[
        onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("example", 1)])))
    assert model.shape("strange.out") is None and model.shape("c1.out") is not None
    placed = place(model, Rules(head="none"))
    assert [r.role for r in placed.readers["strange.out"]] == ["residual"]
