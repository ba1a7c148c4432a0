"""The editor keeps indices until the end, drops only what lost its reader, and leaves a valid order."""

import numpy as np
import onnx

from qdqtool.graph import Model
from qdqtool.onnxgraph.editor import Editor
from tests.trt.builder import Graph


def two_pairs():
    g = Graph()
    x = g.relu(g.input(1, 4, 4, 4), "r")
    g.const("spare", np.float32(1))
    return g.model(g.relu(g.pair(g.pair(x, "a", 0.1), "b", 0.2), "end"))


def test_bypass_drops_the_pair_and_its_constants():
    model = Model(two_pairs())
    editor = Editor(model.copy())
    assert editor.bypass(model.node("a.Q"), [model.node("a.DQ")])
    proto = editor.finish().proto
    assert [n.name for n in proto.graph.node] == ["r", "b.Q", "b.DQ", "end"]
    names = {t.name for t in proto.graph.initializer}
    assert "a.Q.scale" not in names and "b.Q.scale" in names
    assert "spare" in names  # nothing read it before either: not ours to drop
    onnx.checker.check_model(proto, full_check=True)


def test_a_dequantized_output_keeps_its_name():
    g = Graph()
    y = g.relu(g.input(1, 4), "r")
    model = Model(g.model(g.relu(y, "other"), g.pair(y, "a")))
    editor = Editor(model.copy())
    assert editor.bypass(model.node("a.Q"), [model.node("a.DQ")])
    proto = editor.finish().proto
    assert [o.name for o in proto.graph.output] == ["other:0", "a.DQ:0"]
    assert list(proto.graph.node[0].output) == ["a.DQ:0"] and list(proto.graph.node[1].input) == ["a.DQ:0"]
    onnx.checker.check_model(proto, full_check=True)


def test_a_network_input_is_not_renamed():
    g = Graph()
    model = Model(g.model(g.pair(g.input(1, 4), "a")))
    assert not Editor(model.copy()).bypass(model.node("a.Q"), [model.node("a.DQ")])


def test_inserted_nodes_stand_in_front_and_names_are_new():
    model = Model(two_pairs())
    editor = Editor(model.copy())
    first = editor.insert(model.node("end"), "Relu", "r", ["b.DQ:0"])
    editor.set_input(model.node("end"), 0, first)
    proto = editor.finish().proto
    assert [n.name for n in proto.graph.node][-2:] == ["r_1", "end"]
    onnx.checker.check_model(proto, full_check=True)


def test_order_is_mended():
    model = Model(two_pairs())
    editor = Editor(model.copy())
    made = editor.insert(model.node("end"), "Relu", "late", ["r:0"])
    editor.set_input(model.node("a.Q"), 0, made)  # an early node reads what is inserted behind it
    onnx.checker.check_model(editor.finish().proto, full_check=True)


def test_the_model_given_stays_as_it_was():
    proto = two_pairs()
    before = proto.SerializeToString(deterministic=True)
    model = Model(proto)
    editor = Editor(model.copy())
    editor.set_quantizer(model.node("a.Q"), np.array(0.5), np.zeros((), np.int8))
    editor.finish()
    assert proto.SerializeToString(deterministic=True) == before


def test_new_parameters_keep_the_scale_type():
    g = Graph(opset=19, half=True)
    model = Model(g.model(g.pair(g.input(1, 4), "a", 0.1)))
    editor = Editor(model.copy())
    editor.set_quantizer(model.node("a.Q"), np.array(0.5), np.zeros((), np.int8))
    new = editor.finish()
    name = new.node("a.Q").input(1)
    assert new.elem_type(name) == onnx.TensorProto.FLOAT16 and new.constant(name) == 0.5


def test_pairs_that_follow_each_other_go_together():
    model = Model(two_pairs())
    for order in (("a", "b"), ("b", "a")):
        editor = Editor(model.copy())
        for stem in order:
            assert editor.bypass(model.node(f"{stem}.Q"), [model.node(f"{stem}.DQ")])
        proto = editor.finish().proto
        assert [n.name for n in proto.graph.node] == ["r", "end"]
        onnx.checker.check_model(proto, full_check=True)
