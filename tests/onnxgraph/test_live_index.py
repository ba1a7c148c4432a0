"""After any edits the index of a model is what indexing its message anew gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdqtool.errors import ModelError
from qdqtool.graph import Model, Node
from qdqtool.onnxgraph.editor import Editor
from qdqtool.qdq import is_dq, is_q
from tests.trt.builder import Graph


def network(seed: int) -> onnx.ModelProto:
    """Pairs, a residual, a Concat, a Reshape whose shape is a constant, and names that are not unique."""
    g = Graph(seed=seed)
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "stem", 8), "stem.r")
    y = g.conv(g.pair(x, "p", 0.1), "a", 8)
    x = g.relu(g.add(y, g.pair(x, "skip", 0.2), "sum"), "r")
    x = g.concat([x, g.pair(y, "q", 0.3)], "cat")
    x = g.op("Reshape", [x, g.const("dims", np.array([1, 16, 64], np.int64))], "shaped")
    model = g.model(g.relu(x, "end"), y)
    for node in model.graph.node:
        if node.name in ("r", "end"):
            node.name = "same"
    return model


def described(model: Model) -> dict[str, object]:
    """All that an index says, nodes by their place."""
    tensors = sorted({t for n in model.nodes for t in (*n.inputs, *n.outputs) if t} | set(model.inputs))
    return {
        "nodes": [(n.index, n.name, n.op, n.domain, n.inputs, n.outputs, n.captured, n.proto.SerializeToString(),
                   sorted(n.attributes)) for n in model.nodes],
        "ordered": [n.index for n in model.ordered],
        "producers": {t: n.index for t, n in model.producers.items()},
        "consumers": {t: [n.index for n in found] for t, found in model.consumers.items()},
        "by name": [model.node(n.name).index for n in model.nodes],
        "initializers": {t: p.SerializeToString() for t, p in model.initializers.items()},
        "inputs": model.inputs, "outputs": model.outputs,
        "constants": {t: None if (v := model.constant(t)) is None else v.tolist() for t in tensors},
        "types": {t: (model.elem_type(t), model.shape(t)) for t in tensors},
    }  # fmt: skip


def edit(model: Model, draw: st.DrawFn) -> None:
    """Up to four edits that take effect together."""
    editor = Editor(model)
    tensors = sorted(t for t in (*model.producers, *model.inputs) if not model.is_constant(t))

    def any_node() -> Node:
        return draw(st.sampled_from([n for n in model.nodes if not editor.is_removed(n)]))

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("pair", "cast", "redirect", "bypass", "constant", "parameters", "relu", "rename")))
        node = any_node()
        if kind == "pair" and node.inputs and not model.is_constant(node.input(0)):
            constants = [editor.constant("new/scale", np.float32(0.5)), editor.constant("new/zero", np.int8(0))]
            q = editor.insert(node, "QuantizeLinear", "new/Q", [node.input(0), *constants])
            editor.set_input(node, 0, editor.insert(node, "DequantizeLinear", "new/DQ", [q, *constants]))
        elif kind == "cast":
            name = editor.name(f"{node.output}_half")
            editor.cast(node.output, name, onnx.TensorProto.FLOAT16, node)
            editor.set_input(node, 0, editor.insert(node, "Cast", "back", [node.input(0)], {"to": 1}))
        elif kind == "redirect":
            editor.redirect(node.output, draw(st.sampled_from(tensors)))
        elif kind == "bypass" and is_q(node):
            editor.bypass(node, [n for n in model.readers(node.output) if is_dq(n) and not editor.is_removed(n)])
        elif kind == "constant" and model.initializers:
            name = draw(st.sampled_from(sorted(model.initializers)))
            value = model.constant(name)
            assert value is not None
            editor.set_constant(name, value[::-1] if value.ndim else value + value)
        elif kind == "parameters" and is_q(node):
            editor.set_quantizer(node, np.array(0.25), np.zeros((), draw(st.sampled_from((np.int8, np.uint8)))))
        elif kind == "relu":
            editor.set_input(node, 0, editor.insert(node, "Relu", "same", [node.input(0)]))
        elif kind == "rename" and not model.is_output(node.output):
            editor.redirect(node.output, fresh := editor.name("renamed"))
            editor.set_output(node, 0, fresh)
    editor.finish()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 3), st.booleans())
def test_the_index_is_that_of_the_message(data: st.DataObject, seed: int, asked: bool) -> None:
    model = Model(network(seed))
    for _ in range(data.draw(st.integers(1, 4))):
        if asked:
            model.shape("end:0")  # types are known then, and have to be kept
        try:
            edit(model, data.draw)
        except ModelError:  # a cycle, or two makers of one tensor: such a model is not used any more
            return
        assert described(model) == described(Model(model.proto))


def test_types_of_new_pairs_are_known_without_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(network(0))
    assert model.shape("end:0") == (1, 16, 64)
    monkeypatch.setattr("qdqtool.graph.infer", lambda proto: pytest.fail("inferred again"))
    node = model.node("stem.r")
    editor = Editor(model)
    constants = [editor.constant("s", np.float32(0.5)), editor.constant("z", np.int8(0))]
    q = editor.insert(node, "QuantizeLinear", "Q", [node.input(0), *constants])
    editor.set_input(node, 0, editor.insert(node, "DequantizeLinear", "DQ", [q, *constants]))
    editor.finish()
    assert (model.elem_type(q), model.shape(q)) == (onnx.TensorProto.INT8, (1, 8, 8, 8))
    assert model.shape("end:0") == (1, 16, 64) and model.sha256 == "edited"


def test_a_copy_is_edited_alone() -> None:
    model = Model(network(0))
    before = described(model), model.proto.SerializeToString()
    copy = model.copy()
    assert described(copy) == before[0]
    editor = Editor(copy)
    assert editor.bypass(copy.node("p.Q"), [copy.node("p.DQ")])
    assert editor.finish() is copy and "p.Q:0" not in copy.producers
    assert (described(model), model.proto.SerializeToString()) == before


@pytest.mark.parametrize("kind", ["cycle", "two makers"])
def test_edits_that_damage_a_graph_are_refused(kind: str) -> None:
    model = Model(network(0))
    editor = Editor(model)
    if kind == "cycle":
        editor.set_input(model.node("p.Q"), 0, "end:0")
    else:
        editor.set_output(model.node("stem.r"), 0, "sum:0")
    with pytest.raises(ModelError, match="cycle" if kind == "cycle" else "made by two nodes"):
        editor.finish()
