import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from qdqtool.errors import ModelError
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import is_dq, is_q
from qdqtool.proto.subgraphs import rename_tensors
from tests.errors import has
from tests.trt.builder import Graph


def network(seed: int) -> onnx.ModelProto:
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


def describe(model: Model) -> dict[str, object]:
    tensors = sorted(
        {t for n in model.nodes for t in (*n.inputs, *n.outputs) if t} | set(model.inputs)
    )
    constants = {t: model.constant(t) for t in tensors}
    return {
        "nodes": [
            [
                getattr(n, field)
                for field in ("index", "name", "op", "domain", "inputs", "outputs", "captured")
            ]
            for n in model.nodes
        ],
        "messages": [n.proto.SerializeToString() for n in model.nodes],
        "attributes": [sorted(n.attributes) for n in model.nodes],
        "ordered": [n.index for n in model.ordered],
        "producers": {t: n.index for t, n in model.producers.items()},
        "consumers": {
            t: [n.index for n in nodes] for t, nodes in model.consumers_by_tensor.items()
        },
        "by name": [model.node(n.name).index for n in model.nodes],
        "initializers": {t: p.SerializeToString() for t, p in model.initializers.items()},
        "inputs": model.inputs,
        "outputs": model.outputs,
        "constants": {t: None if v is None else v.tolist() for t, v in constants.items()},
        "types": {t: (model.elem_type(t), model.shape(t)) for t in tensors},
    }


def edit(model: Model, draw: st.DrawFn) -> None:
    editor = Editor(model)
    tensors = sorted(t for t in (*model.producers, *model.inputs) if not model.is_constant(t))

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(
                ("pair", "cast", "redirect", "bypass", "constant", "parameters", "relu", "rename")
            )
        )
        node = draw(st.sampled_from([n for n in model.nodes if not editor.is_removed(n)]))
        if kind == "pair" and node.inputs and not model.is_constant(node.input(0)):
            insert_pair(editor, node)
        elif kind == "cast":
            name = editor.unique_name(f"{node.output}_half")
            editor.add_cast(node.output, name, onnx.TensorProto.FLOAT16, node)
            editor.set_input(
                node, 0, editor.insert_node(node, "Cast", "back", [node.input(0)], {"to": 1})
            )
        elif kind == "redirect":
            editor.redirect_consumers(node.output, draw(st.sampled_from(tensors)))
        elif kind == "bypass" and is_q(node):
            editor.remove_pairs(
                node,
                [n for n in model.consumers(node.output) if is_dq(n) and not editor.is_removed(n)],
            )
        elif kind == "constant" and model.initializers:
            name = draw(st.sampled_from(sorted(model.initializers)))
            value = model.constant(name)
            editor.set_constant(name, value[::-1] if value.ndim else value + value)
        elif kind == "parameters" and is_q(node):
            editor.set_quantizer(
                node, np.array(0.25), np.zeros((), draw(st.sampled_from((np.int8, np.uint8))))
            )
        elif kind == "relu":
            editor.set_input(node, 0, editor.insert_node(node, "Relu", "same", [node.input(0)]))
        elif kind == "rename" and not model.is_output(node.output):
            editor.redirect_consumers(node.output, fresh := editor.unique_name("renamed"))
            editor.set_output(node, 0, fresh)
    editor.finish()


@given(st.data(), st.integers(0, 3), st.booleans())
def test_index_after_edits_is_that_of_the_message(
    data: st.DataObject, seed: int, with_types: bool
) -> None:
    model = Model(network(seed))
    for _ in range(data.draw(st.integers(1, 4))):
        if with_types:
            model.shape("end:0")  # infers all types, which edits have to keep
        try:
            edit(model, data.draw)
        except ModelError:  # a cycle, or two producers of one tensor
            return
        assert describe(model) == describe(Model(model.proto))


def insert_pair(editor: Editor, node: Node) -> None:
    constants = [editor.add_constant("s", np.float32(0.5)), editor.add_constant("z", np.int8(0))]
    q = editor.insert_node(node, "QuantizeLinear", "Q", [node.input(0), *constants])
    editor.set_input(node, 0, editor.insert_node(node, "DequantizeLinear", "DQ", [q, *constants]))


def finish(editor: Editor) -> onnx.ModelProto:
    proto = editor.finish().proto
    onnx.checker.check_model(proto, full_check=True)
    return proto


def without_pairs(model: Model, stems: str) -> onnx.ModelProto:
    editor = Editor(model.copy())
    for stem in stems:
        assert editor.remove_pairs(model.node(f"{stem}.Q"), [model.node(f"{stem}.DQ")])
    return finish(editor)


def test_edited_model_has_no_hash() -> None:
    model = Model(network(0))
    editor = Editor(model)
    insert_pair(editor, model.node("stem.r"))
    assert editor.finish().sha256 == "edited"


def test_bypass_of_pair_keeps_network_output(g: Graph) -> None:
    y = g.relu(g.input(1, 4), "r")
    proto = without_pairs(Model(g.model(g.relu(y, "other"), g.pair(y, "a"))), "a")
    assert [o.name for o in proto.graph.output] == ["other:0", "a.DQ:0"]
    assert [list(n.input) for n in proto.graph.node] == [["x"], ["a.DQ:0"]]


def test_bypass_of_pair_between_network_input_and_output_is_impossible(g: Graph) -> None:
    model = Model(g.model(g.pair(g.input(1, 4), "a")))
    assert not Editor(model.copy()).remove_pairs(model.node("a.Q"), [model.node("a.DQ")])


def test_editing_a_copy_keeps_the_original() -> None:
    model = Model(network(0))
    before = describe(model), model.proto.SerializeToString()
    copy = model.copy()
    assert describe(copy) == before[0]
    editor = Editor(copy)
    assert editor.remove_pairs(copy.node("p.Q"), [copy.node("p.DQ")])
    assert editor.finish() is copy and "p.Q:0" not in copy.producers
    assert (describe(model), model.proto.SerializeToString()) == before


def test_replace_constants_of_a_copy_keeps_types_of_original() -> None:
    model = Model(two_pairs())
    copy, name = model.copy(), "spare"
    before = model.tensor_type(name)
    (stored,) = (t for t in copy.proto.graph.initializer if t.name == name)
    stored.CopyFrom(onnx.numpy_helper.from_array(np.zeros((2, 3), np.int8), name))
    copy.replace_constants((), {name: stored})
    assert copy.tensor_type(name) == (onnx.TensorProto.INT8, (2, 3))
    assert model.tensor_type(name) == before == (onnx.TensorProto.FLOAT, ())


def test_edit_that_makes_a_cycle_or_a_second_producer_is_an_error() -> None:
    editor = Editor(Model(network(0)))
    editor.set_input(editor.model.node("p.Q"), 0, "end:0")
    with pytest.raises(ModelError, check=has("cycle")):
        editor.finish()
    editor = Editor(Model(network(0)))
    editor.set_output(editor.model.node("stem.r"), 0, "sum:0")
    with pytest.raises(ModelError, check=has("duplicate", node="sum:0")) as caught:
        editor.finish()
    assert "'sum'" in str(caught.value) and "'stem.r'" in str(caught.value)


def model_with_branches() -> tuple[Model, str]:
    """Replace a DQ by an If whose branches read the input of its Q; return this input too."""
    model = Model(two_pairs())
    editor, dq, source = Editor(model), model.node("a.DQ"), model.node("a.Q").input(0)
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", [source], ["in"])],
        "branch",
        [],
        [onnx.ValueInfoProto(name="in")],
    )
    condition = editor.add_constant("yes", np.array(True))
    editor.rewrite(dq, "If", [condition], {"then_branch": branch, "else_branch": branch})
    return editor.finish(), source


def test_tensor_read_by_new_branch_stays() -> None:
    model, source = model_with_branches()
    assert [n.name for n in model.nodes] == ["r", "a.DQ", "b.Q", "b.DQ", "end"]
    assert "a.Q.scale" not in model.initializers
    assert {n.op for n in model.consumers(source)} == {"If"}


def test_rename_includes_branches() -> None:
    model, source = model_with_branches()
    nodes = model.proto.graph.node
    rename_tensors(nodes, {source: "new", "in": "inner"})
    branch = nodes[1].attribute[0].g
    assert (nodes[0].output[0], branch.node[0].input[0]) == ("new", "new")
    assert (branch.node[0].output[0], branch.output[0].name) == ("inner", "inner")


def two_pairs() -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.input(1, 4, 4, 4), "r")
    g.const("spare", np.float32(1))
    return g.model(g.relu(g.pair(g.pair(x, "a", 0.1), "b", 0.2), "end"))


@pytest.mark.parametrize(
    ("stems", "nodes"),
    [
        ("a", ["r", "b.Q", "b.DQ", "end"]),
        ("b", ["r", "a.Q", "a.DQ", "end"]),
        ("ab", ["r", "end"]),
        ("ba", ["r", "end"]),
    ],
)
def test_bypass_removes_pairs_and_their_constants(stems: str, nodes: list[str]) -> None:
    proto = without_pairs(Model(two_pairs()), stems)
    assert [n.name for n in proto.graph.node] == nodes
    names = {t.name for t in proto.graph.initializer}
    assert {stem for stem in "ab" if f"{stem}.Q.scale" in names} == set("ab") - set(stems)
    assert "spare" in names, "nothing read it before the edit either"


@pytest.mark.parametrize(
    ("name", "source", "consumer", "order"),
    [
        # An early node reads the output of a node that is inserted after it.
        ("late", "r:0", "a.Q", ["r", "late", "a.Q"]),
        ("r", "b.DQ:0", "end", ["b.DQ", "r_1", "end"]),
    ],
)
def test_inserted_node_is_sorted_and_gets_unique_name(
    name: str, source: str, consumer: str, order: list[str]
) -> None:
    model = Model(two_pairs())
    editor = Editor(model.copy())
    output = editor.insert_node(model.node("end"), "Relu", name, [source])
    editor.set_input(model.node(consumer), 0, output)
    assert [n.name for n in finish(editor).graph.node if n.name in order] == order


def test_set_quantizer_keeps_float16() -> None:
    g = Graph(opset=19, half=True)
    model = Model(g.model(g.pair(g.input(1, 4), "a", 0.1)))
    editor = Editor(model.copy())
    editor.set_quantizer(model.node("a.Q"), np.array(0.5), np.zeros((), np.int8))
    edited = editor.finish()
    scale = edited.node("a.Q").input(1)
    assert edited.elem_type(scale) == onnx.TensorProto.FLOAT16 and edited.constant(scale) == 0.5
