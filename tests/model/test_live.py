"""Bytes that live at the same time, counted by hand."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import counts_up
from qdqtool.model.live import peak_bytes
from qdqtool.model.qdq import is_dq, is_q
from qdqtool.model.subgraphs import rename
from tests.insertion.nets import Net
from tests.trt.builder import Graph

KB = 1024


def model(
    nodes: list[tuple[str, list[str], str]], shape: tuple[object, ...] = (1, 4, 8, 8)
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones((1, 4, 8, 8), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


CHAIN = [("Relu", ["x"], "a"), ("Relu", ["a"], "b"), ("Relu", ["b"], "c"), ("Relu", ["c"], "y")]


@pytest.mark.parametrize(
    ("nodes", "tensors"),
    [
        ([("Relu", ["x"], "y")], 2),
        (CHAIN, 3),  # the input, what is read and what is made
        ([*CHAIN[:3], ("Add", ["c", "a"], "y")], 4),  # and a, which is read again
        ([("Add", ["x", "w"], "y")], 2),  # no weights
        ([("Relu", ["x"], "unread"), ("Relu", ["x"], "y")], 2),
        ([("Relu", ["x"], "y"), ("Relu", ["y"], "a"), ("Relu", ["a"], "b")], 4),  # an output stays
    ],
)
def test_tensors_that_live_at_the_same_time(
    nodes: list[tuple[str, list[str], str]], tensors: int
) -> None:
    assert peak_bytes(model(nodes), {}) == tensors * KB
    assert (
        peak_bytes(model(nodes), {"x": (1, 4, 16, 8)})
        == (tensors if nodes[0][0] == "Add" else 2 * tensors) * KB
    )


@pytest.mark.parametrize("shape", [("n", 4, "h", "w"), (0, 4, -1, -1), (1, 4, 2, 2), (1, 4, 8, 8)])
def test_the_shapes_that_are_fed_count_and_not_what_the_file_says(
    shape: tuple[object, ...],
) -> None:
    made = model(CHAIN, shape)
    made.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 1]))
    assert peak_bytes(made, {"x": (2, 4, 16, 16)}) == 3 * 8 * KB


def test_what_lives() -> None:
    assert peak_bytes(model(CHAIN, ("n", 4, 8, "w")), {}) == 3 * 4 * 4 * 8
    assert peak_bytes(model(CHAIN, (-1, 4, 8, 0)), {}) == 3 * 4 * 4 * 8, (
        "so some exporters write open ones"
    )
    assert peak_bytes(model([("Cast", ["x"], "a"), ("Cast", ["a"], "y")]), {}) == KB, (
        "of no known type: no size"
    )
    halves = model([("Relu", ["x"], "y")])
    for value in (*halves.graph.input, *halves.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert peak_bytes(halves, {}) == KB
    sequence = model([("Relu", ["x"], "y"), ("SequenceConstruct", ["y"], "s")])
    sequence.graph.output.append(
        helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    )
    assert peak_bytes(sequence, {}) == 2 * KB
    # `a` is read by the bodies of If alone, behind `c`
    bodies = {
        f"{which}_branch": helper.make_graph(
            [helper.make_node("Identity", ["a"], ["out"])],
            which,
            [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 4, 8, 8])],
        )
        for which in ("then", "else")
    }
    made = model(CHAIN[:3])
    made.graph.input.append(helper.make_tensor_value_info("t", TensorProto.BOOL, []))
    made.graph.node.append(helper.make_node("If", ["t"], ["y"], **bodies))
    assert peak_bytes(made, {}) == 4 * KB + 1  # x, a, b and c, then x, a, c and y


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
    tensors = sorted(
        {t for n in model.nodes for t in (*n.inputs, *n.outputs) if t} | set(model.inputs)
    )
    return {
        "nodes": [
            (
                n.index,
                n.name,
                n.op,
                n.domain,
                n.inputs,
                n.outputs,
                n.captured,
                n.proto.SerializeToString(),
                sorted(n.attributes),
            )
            for n in model.nodes
        ],
        "ordered": [n.index for n in model.ordered],
        "producers": {t: n.index for t, n in model.producers.items()},
        "consumers": {t: [n.index for n in found] for t, found in model.consumers.items()},
        "by name": [model.node(n.name).index for n in model.nodes],
        "initializers": {t: p.SerializeToString() for t, p in model.initializers.items()},
        "inputs": model.inputs,
        "outputs": model.outputs,
        "constants": {t: None if (v := model.constant(t)) is None else v.tolist() for t in tensors},
        "types": {t: (model.elem_type(t), model.shape(t)) for t in tensors},
    }


def edit(model: Model, draw: st.DrawFn) -> None:
    """Up to four edits that take effect together."""
    editor = Editor(model)
    tensors = sorted(t for t in (*model.producers, *model.inputs) if not model.is_constant(t))

    def any_node() -> Node:
        return draw(st.sampled_from([n for n in model.nodes if not editor.is_removed(n)]))

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(
                ("pair", "cast", "redirect", "bypass", "constant", "parameters", "relu", "rename")
            )
        )
        node = any_node()
        if kind == "pair" and node.inputs and not model.is_constant(node.input(0)):
            constants = [
                editor.constant("new/scale", np.float32(0.5)),
                editor.constant("new/zero", np.int8(0)),
            ]
            q = editor.insert(node, "QuantizeLinear", "new/Q", [node.input(0), *constants])
            editor.set_input(
                node, 0, editor.insert(node, "DequantizeLinear", "new/DQ", [q, *constants])
            )
        elif kind == "cast":
            name = editor.name(f"{node.output}_half")
            editor.cast(node.output, name, onnx.TensorProto.FLOAT16, node)
            editor.set_input(
                node, 0, editor.insert(node, "Cast", "back", [node.input(0)], {"to": 1})
            )
        elif kind == "redirect":
            editor.redirect(node.output, draw(st.sampled_from(tensors)))
        elif kind == "bypass" and is_q(node):
            editor.bypass(
                node,
                [n for n in model.readers(node.output) if is_dq(n) and not editor.is_removed(n)],
            )
        elif kind == "constant" and model.initializers:
            name = draw(st.sampled_from(sorted(model.initializers)))
            value = model.constant(name)
            assert value is not None
            editor.set_constant(name, value[::-1] if value.ndim else value + value)
        elif kind == "parameters" and is_q(node):
            editor.set_quantizer(
                node, np.array(0.25), np.zeros((), draw(st.sampled_from((np.int8, np.uint8))))
            )
        elif kind == "relu":
            editor.set_input(node, 0, editor.insert(node, "Relu", "same", [node.input(0)]))
        elif kind == "rename" and not model.is_output(node.output):
            editor.redirect(node.output, fresh := editor.name("renamed"))
            editor.set_output(node, 0, fresh)
    editor.finish()


@given(st.data(), st.integers(0, 3), st.booleans())
def test_the_index_is_that_of_the_message(data: st.DataObject, seed: int, asked: bool) -> None:
    model = Model(network(seed))
    for _ in range(data.draw(st.integers(1, 4))):
        if asked:
            model.shape("end:0")  # types are known then, and have to be kept
        try:
            edit(model, data.draw)
        except (
            ModelError
        ):  # a cycle, or two makers of one tensor: such a model is not used any more
            return
        assert described(model) == described(Model(model.proto))


def test_names_and_types_of_pairs(monkeypatch: pytest.MonkeyPatch, g) -> None:
    model = Model(network(0))
    assert model.shape("end:0") == (1, 16, 64)
    monkeypatch.setattr("qdqtool.model.graph.infer", lambda proto: pytest.fail("inferred again"))
    node = model.node("stem.r")
    editor = Editor(model)
    constants = [editor.constant("s", np.float32(0.5)), editor.constant("z", np.int8(0))]
    q = editor.insert(node, "QuantizeLinear", "Q", [node.input(0), *constants])
    editor.set_input(node, 0, editor.insert(node, "DequantizeLinear", "DQ", [q, *constants]))
    editor.finish()
    assert (model.elem_type(q), model.shape(q)) == (onnx.TensorProto.INT8, (1, 8, 8, 8))
    assert model.shape("end:0") == (1, 16, 64) and model.sha256 == "edited"
    y = g.relu(g.input(1, 4), "r")
    model = Model(g.model(g.relu(y, "other"), g.pair(y, "a")))
    editor = Editor(model.copy())
    assert editor.bypass(model.node("a.Q"), [model.node("a.DQ")])
    proto = editor.finish().proto
    assert [o.name for o in proto.graph.output] == ["other:0", "a.DQ:0"]
    assert list(proto.graph.node[0].output) == ["a.DQ:0"] and list(proto.graph.node[1].input) == [
        "a.DQ:0"
    ]
    onnx.checker.check_model(proto, full_check=True)
    g = Graph()
    model = Model(g.model(g.pair(g.input(1, 4), "a")))
    assert not Editor(model.copy()).bypass(model.node("a.Q"), [model.node("a.DQ")])


def test_the_index_of_a_copy_and_its_order() -> None:
    model = Model(network(0))
    before = described(model), model.proto.SerializeToString()
    copy = model.copy()
    assert described(copy) == before[0]
    editor = Editor(copy)
    assert editor.bypass(copy.node("p.Q"), [copy.node("p.DQ")])
    assert editor.finish() is copy and "p.Q:0" not in copy.producers
    assert (described(model), model.proto.SerializeToString()) == before
    proto = two_pairs()
    before = proto.SerializeToString(deterministic=True)
    model = Model(proto)
    editor = Editor(model.copy())
    editor.set_quantizer(model.node("a.Q"), np.array(0.5), np.zeros((), np.int8))
    editor.finish()
    assert proto.SerializeToString(deterministic=True) == before
    model = Model(two_pairs())
    editor = Editor(model.copy())
    made = editor.insert(model.node("end"), "Relu", "late", ["r:0"])
    editor.set_input(model.node("a.Q"), 0, made)  # an early node reads what is inserted behind it
    onnx.checker.check_model(editor.finish().proto, full_check=True)


def test_what_a_copy_learns_of_its_constants_is_its_own() -> None:
    model = Model(two_pairs())
    copy, name = model.copy(), "spare"
    before = model.type_of(name)
    (stored,) = (t for t in copy.proto.graph.initializer if t.name == name)
    stored.CopyFrom(onnx.numpy_helper.from_array(np.zeros((2, 3), np.int8), name))
    copy.replace_constants((), {name: stored}, True)
    assert copy.type_of(name) == (onnx.TensorProto.INT8, (2, 3))
    assert model.type_of(name) == before == (onnx.TensorProto.FLOAT, ())


@pytest.mark.parametrize("kind", ["cycle", "two makers"])
def test_edits_that_damage_a_graph_are_refused(kind: str) -> None:
    model = Model(network(0))
    editor = Editor(model)
    if kind == "cycle":
        editor.set_input(model.node("p.Q"), 0, "end:0")
    else:
        editor.set_output(model.node("stem.r"), 0, "sum:0")
    with pytest.raises(ModelError, match="cycle" if kind == "cycle" else "'sum' and 'stem.r'"):
        editor.finish()


def test_what_a_new_subgraph_reads_stays():
    """A DQ becomes an If whose branches alone read what stood in front of its Q."""
    model = Model(two_pairs())
    editor, dq, source = Editor(model), model.node("a.DQ"), model.node("a.Q").input(0)
    ends = [onnx.ValueInfoProto(name="in")]
    inner = helper.make_graph([helper.make_node("Neg", [source], ["in"])], "inner", [], ends)
    editor.rewrite(
        dq,
        "If",
        [editor.constant("yes", np.array(True))],
        {"then_branch": inner, "else_branch": inner},
    )
    made = editor.finish()
    assert [n.name for n in made.nodes] == ["r", "a.DQ", "b.Q", "b.DQ", "end"]
    assert "a.Q.scale" not in made.initializers and {n.op for n in made.readers(source)} == {"If"}
    rename(made.proto.graph.node, {source: "new", "in": "there"})
    branch = made.proto.graph.node[1].attribute[0].g
    assert (made.proto.graph.node[0].output[0], branch.node[0].input[0]) == ("new", "new")
    assert (branch.node[0].output[0], branch.output[0].name) == ("there", "there")


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
    model = Model(two_pairs())
    for order in (("a", "b"), ("b", "a")):
        editor = Editor(model.copy())
        for stem in order:
            assert editor.bypass(model.node(f"{stem}.Q"), [model.node(f"{stem}.DQ")])
        proto = editor.finish().proto
        assert [n.name for n in proto.graph.node] == ["r", "end"]
        onnx.checker.check_model(proto, full_check=True)


def test_inserted_nodes():
    model = Model(two_pairs())
    editor = Editor(model.copy())
    first = editor.insert(model.node("end"), "Relu", "r", ["b.DQ:0"])
    editor.set_input(model.node("end"), 0, first)
    proto = editor.finish().proto
    assert [n.name for n in proto.graph.node][-2:] == ["r_1", "end"]
    onnx.checker.check_model(proto, full_check=True)
    g = Graph(opset=19, half=True)
    model = Model(g.model(g.pair(g.input(1, 4), "a", 0.1)))
    editor = Editor(model.copy())
    editor.set_quantizer(model.node("a.Q"), np.array(0.5), np.zeros((), np.int8))
    new = editor.finish()
    name = new.node("a.Q").input(1)
    assert new.elem_type(name) == onnx.TensorProto.FLOAT16 and new.constant(name) == 0.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(16), True),
        (range(1, 17), False),
        (range(3), False),
        ([0, 1, 2, 4], False),
        (range(4), True),
        (np.rint(np.arange(16) * 127 / 15) * (15 / 127), True),  # stored as INT8 with one scale
        (np.arange(16) * 1.01, False),
    ],
)
def test_counts_up(values: object, expected: bool) -> None:
    net = Net()
    net.const("k", list(values))  # type: ignore[call-overload]
    net.output(net.op("Relu", "r", "x"))
    assert counts_up(net.index(), "k") is expected
