"""Shape inference in bounded memory: what can grow is not asked of onnx, and ordinary networks lose no shape."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.model import apart
from qdqtool.model.graph import Model
from qdqtool.model.inference import FOLLOWED, Alike, grows, infer, shorten_names, stays_small
from tools.growth.families import FAMILIES, branches

LONG = 1 << 40


def _value(name, dims, kind=TensorProto.INT64):
    return helper.make_tensor_value_info(name, kind, dims)


def _model(nodes, inputs, outputs=("y",), initializers=(), functions=(), version=18, value_info=()):
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [_value(t, None) for t in outputs],
        list(initializers),
        value_info=list(value_info),
    )
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def _node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def _int64(name, *values):
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def _inner(op):
    inner = helper.make_graph([_node(op, "x x", "z", axis=0)], "b", [], [_value("z", None)])
    return helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)


def _doubled(op, count, dims, **attributes):
    nodes = [_node(op, f"x{i} x{i}", f"x{i + 1}", **attributes) for i in range(count)]
    nodes.append(_node("Identity", f"x{count}", "y"))
    return _model(nodes, [_value("x0", dims)])


def _turns(first, second, axes, count):
    nodes = [
        _node(op, f"x{i} a", f"x{i + 1}", axes=axes if op == second else [0])
        for i, op in enumerate((first, second) * count)
    ]
    return _model(
        [*nodes, _node("Relu", f"x{2 * count}", "y")],
        [_value("x0", [1], TensorProto.FLOAT)],
        initializers=[_int64("a", 0)],
        version=11,
    )


def _sliced(nodes, *constants):
    return _model(
        [*nodes, _node("Slice", "x b e a d", "y")],
        [_value("x", [4])],
        initializers=[_int64("b", 0), _int64("e", 4), _int64("a", 0), *constants],
    )


BOMBS = {
    **{
        op: lambda op=op: _model([_node(op, "x x", "y")], [_value("x", [LONG])])
        for op in ("Add", "Mul", "Sub", "Gather")
    },
    "Concat": lambda: _model([_node("Concat", "x", "y", axis=0)], [_value("x", [LONG])]),
    "Cast": lambda: _model([_node("Cast", "x", "y", to=TensorProto.INT64)], [_value("x", [LONG])]),
    "Size": lambda: _model([_node("Size", "x", "y")], [_value("x", [LONG])]),
    "Slice": lambda: _model(
        [_node("Slice", "x s e", "y")],
        [_value("x", [LONG])],
        initializers=[_int64("s", 0), _int64("e", LONG)],
    ),
    "Slice in a step that 32 bits have not": lambda: _sliced([], _int64("d", 1 << 31)),
    "Slice backwards in a step that 32 bits have not": lambda: _model(
        [_node("Slice", "x b e a d", "y")],
        [_value("x", [4])],
        initializers=[_int64("b", 3), _int64("e", -9), _int64("a", 0), _int64("d", -1 << 32)],
    ),
    "Slice in a step that is computed": lambda: _sliced(
        [_node("Mul", "k k", "d")], _int64("k", 46341)
    ),
    "Slice in a function": lambda: _model(
        [_node("F", "x d", "y", domain="own")],
        [_value("x", [4])],
        initializers=[_int64("d", 1 << 31)],
        functions=[
            helper.make_function(
                "own",
                "F",
                ["v", "d"],
                ["y"],
                [
                    *(
                        _node("Constant", "", n, value_ints=[v])
                        for n, v in (("b", 0), ("e", 4), ("a", 0))
                    ),
                    _node("Slice", "v b e a d", "y"),
                ],
                [helper.make_opsetid("", 18)],
            )
        ],
    ),
    "Unsqueeze": lambda: _model(
        [_node("Unsqueeze", "x a", "y")], [_value("x", [LONG])], initializers=[_int64("a", 0)]
    ),
    "Squeeze": lambda: _model(
        [_node("Squeeze", "x a", "y")], [_value("x", [LONG])], initializers=[_int64("a", 0)]
    ),
    "Expand": lambda: _model(
        [_node("Expand", "x s", "y")], [_value("x", [1]), _value("s", [LONG])]
    ),
    "Expand a float": lambda: _model(
        [_node("Expand", "x s", "y")], [_value("x", [1, 2]), _value("s", [1 << 28])]
    ),
    "behind Reshape": lambda: _model(
        [_node("Reshape", "x s", "v"), _node("Add", "v v", "y")],
        [_value("x", [1 << 20, 1 << 20])],
        initializers=[_int64("s", -1)],
    ),
    "behind Flatten and Squeeze": lambda: _model(
        [
            _node("Flatten", "x", "v", axis=0),
            _node("Squeeze", "v a", "w"),
            _node("Mul", "w w", "y"),
        ],
        [_value("x", [1 << 14] * 3)],
        initializers=[_int64("a", 0)],
    ),
    "behind ConstantOfShape": lambda: _model(
        [_node("ConstantOfShape", "s", "v"), _node("Concat", "v v", "y", axis=0)],
        [],
        initializers=[_int64("s", LONG)],
    ),
    "behind Tile": lambda: _model(
        [_node("Tile", "x r", "v"), _node("Add", "v v", "y")],
        [_value("x", [8])],
        initializers=[_int64("r", 1 << 30)],
    ),
    "behind Range": lambda: _model(
        [_node("Range", "a b c", "v"), _node("Add", "v v", "y")],
        [],
        initializers=[
            helper.make_tensor(n, TensorProto.INT64, [], [v])
            for n, v in (("a", 0), ("b", 1 << 30), ("c", 1))
        ],
    ),
    "behind Pad": lambda: _model(
        [_node("Pad", "x p", "v"), _node("Mul", "v v", "y")],
        [_value("x", [8])],
        initializers=[_int64("p", 0, 1 << 30)],
    ),
    "behind Identity with a stated length": lambda: _model(
        [_node("Own", "x", "v", domain="own"), _node("Add", "v v", "y")],
        [_value("x", [1])],
        value_info=[_value("v", [LONG])],
    ),
    "an initializer": lambda: _model(
        [_node("Add", "w w", "y")],
        [],
        initializers=[onnx.TensorProto(name="w", data_type=TensorProto.INT64, dims=[1 << 30])],
    ),
    "Concat of itself": lambda: _doubled("Concat", 40, [4], axis=0),
    "Gather of itself": lambda: _doubled("Gather", 40, [2, 2, 2, 2]),
    "GatherND of itself": lambda: _doubled("GatherND", 40, [2, 2, 2, 2]),
    "in an If": lambda: _model(
        [_inner("Concat")], [_value("c", [], TensorProto.BOOL), _value("x", [LONG])]
    ),
    "in a function": lambda: _model(
        [_node("F", "x", "y", domain="own")],
        [_value("x", [LONG])],
        functions=[
            helper.make_function(
                "own", "F", ["a"], ["b"], [_node("Add", "a a", "b")], [helper.make_opsetid("", 18)]
            )
        ],
    ),
    # Before opset 13 the attribute's axes count, and a Squeeze keeps what its input does not have.
    "axes in both places": lambda: _turns("Unsqueeze", "Unsqueeze", list(range(20_000)), 16),
    "axes that are not there": lambda: _turns("Unsqueeze", "Squeeze", [60_000], 1900),
    "a rank in every node": lambda: _model(
        [_node("Relu", f"x{i}" if i else "x", f"x{i + 1}") for i in range(500)]
        + [_node("Relu", "x500", "y")],
        [_value("x", [1] * 20_000, TensorProto.FLOAT)],
    ),
    **{
        f"a vector of {count} in every node": lambda count=count: (
            _model(  # too long together, and each
                [_node("Add", f"x{i} x{i}" if i else "x x", f"x{i + 1}") for i in range(500)]
                + [_node("Add", "x500 x", "y")],
                [_value("x", [count])],
            )
        )
        for count in (20_000, 60_000)
    },
}


def _odd_model(
    node: onnx.NodeProto, functions: Sequence[onnx.FunctionProto] = ()
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8, 4, 4]) for n in "xo"]
    gain = numpy_helper.from_array(np.ones(4, np.float32), "g")
    graph = helper.make_graph([node], "g", values[:1], values[1:], [gain])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def _called(body: onnx.NodeProto, attribute: str, usual: int | None = None) -> onnx.FunctionProto:
    """A function that hands its attribute, which may have a default, to the one node in it."""
    body.attribute.add(name=attribute, ref_attr_name="a", type=onnx.AttributeProto.INT)
    opsets = [helper.make_opsetid("", 18)]
    if usual is None:
        return helper.make_function("own", "F", body.input, body.output, [body], opsets, ["a"])
    return helper.make_function(
        "own",
        "F",
        body.input,
        body.output,
        [body],
        opsets,
        attribute_protos=[helper.make_attribute("a", usual)],
    )


_NORM = ("LayerNormalization", ["x", "g", "g"], ["o", "m", "i"])
_SPLIT = ("Split", ["x"], ["o", "p"])


#: It died of the axis (it reads 32 bits of it), and made as many entries as a Split states outputs.
ODD = {
    "axis": _odd_model(helper.make_node(*_NORM, axis=1 << 31)),
    "largest axis": _odd_model(helper.make_node(*_NORM, axis=(1 << 63) - 1)),
    "outputs": _odd_model(helper.make_node(*_SPLIT, num_outputs=1 << 25, axis=1)),
    "axis of a function": _odd_model(
        helper.make_node("F", ["x", "g", "g"], ["o", "m", "i"], domain="own", a=1 << 31),
        [_called(helper.make_node(*_NORM), "axis")],
    ),
    "axis that a function has by default": _odd_model(
        helper.make_node("F", ["x", "g", "g"], ["o", "m", "i"], domain="own"),
        [_called(helper.make_node(*_NORM), "axis", 1 << 31)],
    ),
    "outputs of a function": _odd_model(
        helper.make_node("F", ["x"], ["o", "p"], domain="own", a=1 << 25),
        [_called(helper.make_node(*_SPLIT), "num_outputs")],
    ),
}


def test_what_is_bounded_and_attributes_that_onnx_reads_wrongly():
    """In a process with little memory, as that of the test might be ended."""
    code = (
        "import resource, time; from tests.model.test_inference import BOMBS, ODD;"
        "from qdqtool.model.graph import Model; from qdqtool.model.inference import infer;"
        "from qdqtool.prediction import predict; from qdqtool.timing.twin import Shapes;"
        "protos = {name: make() for name, make in BOMBS.items()};"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "def of_shapes(proto): model = Model(proto); model.shape('y'); Shapes(model).get('y'); infer(proto)\n"
        "for name, proto in (*protos.items(), *ODD.items()):\n"
        "    begin = time.process_time(); (predict if name in ODD else of_shapes)(proto)\n"
        "    assert time.process_time() - begin < 8, (name, time.process_time() - begin)\n"
        "    peak = int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "    assert peak < 300_000, (name, peak)  # kB\n"
        "    print(name, flush=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.split("\n")[:-1] == [*BOMBS, *ODD], run.stderr[-800:]


def test_many_functions_are_not_looked_up_by_onnx_at_each_call(monkeypatch):
    """It copies the table of all for each: of 4,000 with names of 5,000 letters a prediction took minutes."""
    functions = [
        helper.make_function(
            "own",
            f"F{i}",
            ["a"],
            ["b"],
            [helper.make_node("Flatten", ["a"], ["b"], axis=1)],
            [helper.make_opsetid("", 18)],
        )
        for i in range(400)
    ]
    nodes = [helper.make_node(f"F{i}", [f"t{i}"], [f"t{i + 1}"], domain="own") for i in range(400)]

    def model(*nodes):
        return _model(
            nodes, [_value("t0", [2, 3, 4], TensorProto.FLOAT)], ["t400"], functions=functions
        )

    given = []
    whole = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(
        onnx.shape_inference,
        "infer_shapes",
        lambda proto, **how: given.append(len(proto.functions)) or whole(proto, **how),
    )
    found = infer(model(*nodes))
    assert given and not any(given)
    assert [d.dim_value for d in found["t7"].tensor_type.shape.dim] == [2, 12]
    few = infer(model(nodes[0], helper.make_node("Relu", ["t1"], ["t400"])))
    assert given[-1] == 400 and [d.dim_value for d in few["t1"].tensor_type.shape.dim] == [2, 12]


def test_subgraphs_are_kept_from_onnx_where_the_tables_of_tensors_are_large(monkeypatch):
    """For each it copies the table of all tensors around it: 4,000 of 12,000 tensors took ten seconds."""
    proto = branches(60)
    kept, ends = infer(proto), [n.output[0] for n in proto.graph.node if n.op_type == "If"]
    assert len(ends) == 20 and all(len(kept[end].tensor_type.shape.dim) == 4 for end in ends)
    given = []
    whole = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(
        onnx.shape_inference,
        "infer_shapes",
        lambda proto, **how: (
            given.append(sum(n.op_type == "If" and not n.domain for n in proto.graph.node))
            or whole(proto, **how)
        ),
    )
    monkeypatch.setattr("qdqtool.model.inference._SCOPES", 600)
    found = infer(proto)
    assert set(given) == {4}  # of two graphs each, and 60 nodes with three constants
    assert [found[end] for end in ends[:4]] == [kept[end] for end in ends[:4]]
    assert all(n.domain == "" for n in proto.graph.node)


@pytest.mark.parametrize("family", ["Loops", "functions"])
def test_what_loops_hand_on_and_functions_make_stays_small(family):
    """Of the first onnx knows no shape; the second follows from that of what a call reads."""
    assert not grows(FAMILIES[family](200))


def test_a_slice_is_followed_whose_step_is_a_list_of_an_attribute():
    nodes = [
        _node("Shape", "x", "s"),
        _node("Constant", "", "d", value_ints=[1]),
        _node("Slice", "s b e a d", "p"),
        _node("Concat", "p m", "q", axis=0),
        _node("Reshape", "x q", "y"),
    ]
    proto = _model(
        nodes,
        [_value("x", [2, 3, 4])],
        initializers=[_int64("b", 0), _int64("e", 1), _int64("a", 0), _int64("m", 12)],
    )
    assert [d.dim_value for d in infer(proto)["y"].tensor_type.shape.dim] == [2, 12]


def test_what_a_squeeze_removes_is_not_there_any_more(monkeypatch):
    """So that nothing is hidden of rows of them, and onnx is asked once."""
    asked = []
    infers = apart.infer_shapes
    monkeypatch.setattr(
        apart, "infer_shapes", lambda *given, **how: asked.append(1) or infers(*given, **how)
    )
    nodes = [
        _node(op, f"x{i} a", f"x{i + 1}") for i, op in enumerate(("Unsqueeze", "Squeeze") * 1000)
    ]
    proto = _model(
        [*nodes, _node("Relu", "x2000", "y")],
        [_value("x0", [1, 2, 3])],
        initializers=[_int64("a", 0)],
    )
    assert [d.dim_value for d in infer(proto)["y"].tensor_type.shape.dim] == [1, 2, 3] and len(
        asked
    ) == 1


def test_each_call_states_the_attributes_of_a_function():
    """So that what the function makes is as large as a call says."""

    def called(op, name, count, inputs, version):
        inner = _node(op, " ".join(["a"][:inputs]), "b")
        inner.attribute.add(name=name, ref_attr_name="told", type=onnx.AttributeProto.INTS)
        made = [
            helper.make_function(
                "own", "f", ["a"], ["b"], [inner], [helper.make_opsetid("", version)], ["told"]
            )
        ]
        call, last = (
            _node("f", "x", "y", domain="own", told=list(range(count))),
            _node("Reshape", "x y", "z"),
        )
        nodes = [call] if inputs else [call, last]
        return _model(
            nodes, [_value("x", [2, 3], TensorProto.FLOAT)], ["z"], functions=made, version=version
        )

    assert grows(called("Unsqueeze", "axes", 100, 1, 11)) and grows(
        called("Constant", "value_ints", 100, 0, 18)
    )


def test_an_einsum_has_a_dimension_for_each_letter():
    def einsum(equation):
        return _model(
            [_node("Einsum", "x", "y", equation=equation)], [_value("x", [2, 3], TensorProto.FLOAT)]
        )

    assert grows(einsum("ab->" + "a" * 100)) and grows(einsum("a" * 100))
    assert not grows(einsum("ab->ba"))
    node = _node("Einsum", "a", "b")
    node.attribute.add(name="equation", ref_attr_name="equation", type=onnx.AttributeProto.STRING)
    function = helper.make_function(
        "own", "f", ["a"], ["b"], [node], [helper.make_opsetid("", 18)], ["equation"]
    )
    call = _node("f", "x", "y", domain="own", equation="a->" + "a" * 1000)
    proto = _model([call], [_value("x", [2], TensorProto.FLOAT)], functions=[function])
    proto.graph.output[0].ClearField("type")
    assert len(infer(proto)["y"].tensor_type.shape.dim) < 100


def test_names_of_dimensions_and_types_are_not_copied():
    def types(name):
        proto = _model(
            [_node("Relu", f"x{i}" if i else "x", f"x{i + 1}") for i in range(2000)]
            + [_node("Relu", "x2000", "y")],
            [_value("x", [name, 4])],
        )
        found = infer(proto)
        assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == name
        return found

    found = types("n" * 100_000)
    assert (
        max(len(d.dim_param) for k, t in found.items() if k != "x" for d in t.tensor_type.shape.dim)
        < 100
    )
    assert {k: len(t.tensor_type.shape.dim) for k, t in found.items()} == {
        k: len(t.tensor_type.shape.dim) for k, t in types("n").items()
    }
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n" * 100_000, 4])
    nodes = [
        helper.make_node("Optional", [], ["o"], type=kind),
        _node("OptionalGetElement", "o", "x0"),
    ]
    proto = _model(
        [*nodes, *(_node("Relu", f"x{i}", f"x{i + 1}") for i in range(2000))],
        [_value("x", ["m" * 99])],
    )
    found = infer(proto)
    assert {len(found[f"x{i}"].tensor_type.shape.dim) for i in range(1, 2000)} == {2}
    assert sum(v.ByteSize() for v in found.values()) < 1_000_000
    assert nodes[0].attribute[0].tp.tensor_type.shape.dim[0].dim_param == "n" * 100_000
    shorten_names(proto)
    dims = [
        d.dim_param
        for d in (
            *proto.graph.node[0].attribute[0].tp.tensor_type.shape.dim,
            *proto.graph.input[0].type.tensor_type.shape.dim,
        )
    ]
    assert max(map(len, dims)) < 100 and len(set(dims)) == 3


def test_shapes_of_one_node_and_of_vectors():
    long, short = (helper.make_tensor_type_proto(TensorProto.INT64, [n]) for n in (LONG, 4))
    node = _node("Expand", "x s", "y")
    assert stays_small(node, {"x": short, "s": short}, 18)
    assert not stays_small(node, {"x": short, "s": long}, 18)
    assert stays_small(_node("GatherND", "x s", "y", batch_dims=0), {"x": short, "s": short}, 18)
    assert not stays_small(
        _node("GatherND", "x s", "y", batch_dims=-3), {"x": short, "s": short}, 18
    )
    inner = helper.make_graph(
        [_node("EyeLike", "nowhere", "z", dtype=1)], "b", [], [_value("z", None)]
    )
    assert not stays_small(
        _node("If", "c", "y", then_branch=inner, else_branch=inner),
        {"c": helper.make_tensor_type_proto(TensorProto.BOOL, [])},
        18,
    )
    value = onnx.ValueInfoProto(name="o")
    value.type.opaque_type.name = "handle"
    assert "y" in (infer(_model([_node("Relu", "x", "y")], [_value("x", [1, 4]), value])) or ())
    # A one-dimensional network keeps its shapes; so does what stands beside it
    nodes = [
        _node("Add", "x x", "a"),
        _node("Concat", "a a", "y", axis=0),
        _node("Shape", "z", "s"),
        _node("Reshape", "z s", "t"),
    ]
    proto = _model(nodes, [_value("x", [200_000]), _value("z", [2, 3, 4])], outputs=("y", "t"))
    before = onnx.ModelProto()
    before.CopyFrom(proto)
    found = infer(proto)
    assert [d.dim_value for d in found["y"].tensor_type.shape.dim] == [400_000]
    assert [d.dim_value for d in found["t"].tensor_type.shape.dim] == [2, 3, 4]
    assert proto == before


def _plain(proto):
    found = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    return {v.name: v.type for v in (*found.value_info, *found.output)}


def _blocks(count, dynamic):
    """Attention as it is exported with computed shapes: Reshape to dimensions that Shape, Gather and Concat make."""
    values = {"none": 0, "heads": 4, "width": 16, "heads_1": 1, "heads_2": 2}
    weights = [
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
        *(_int64(n, v) for n, v in values.items()),
        helper.make_tensor("w", TensorProto.FLOAT, [64, 64], [0.0] * 4096),
        helper.make_tensor("bias", TensorProto.FLOAT, [64], [0.0] * 64),
    ]
    nodes, last = [], "x"
    for i in range(count):
        nodes += [
            _node("Shape", last, f"a{i}"),
            _node("Gather", f"a{i} zero", f"b{i}", axis=0),
            _node("Unsqueeze", f"b{i} none", f"c{i}"),
            _node("Slice", f"a{i} heads_1 heads_2", f"d{i}"),
            _node("Concat", f"c{i} d{i} heads width", f"e{i}", axis=0),
            _node("MatMul", f"{last} w", f"f{i}"),
            _node("Add", f"f{i} bias", f"g{i}"),
            _node("Reshape", f"g{i} e{i}", f"h{i}"),
            _node("Transpose", f"h{i}", f"i{i}", perm=[0, 2, 1, 3]),
            _node("Softmax", f"i{i}", f"j{i}"),
            _node("Transpose", f"j{i}", f"k{i}", perm=[0, 2, 1, 3]),
            _node("Reshape", f"k{i} a{i}", f"l{i}"),
            _node("Add", f"{last} l{i}", f"m{i}"),
        ]
        last = f"m{i}"
    nodes.append(_node("Identity", last, "y"))
    return _model(
        nodes,
        [_value("x", ["n" if dynamic else 2, 8, 64], TensorProto.FLOAT)],
        initializers=weights,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_computed_shapes_are_as_onnx_infers_them(dynamic):
    proto = _blocks(12, dynamic)
    assert len(_plain(proto)) > 150
    assert infer(proto) == _plain(proto)
    assert not grows(proto)


def _trial(schema, position, length, follow):
    """Processor time of one node's inference with a vector at one input, and then at all."""
    count = max(min(schema.max_input, 4), schema.min_input, position + 1)
    least = {1: 1.0, 2: 0, 3: b"a", 7: [1]}
    attributes = {
        n: least[a.type.value]
        for n, a in schema.attributes.items()
        if a.required and a.type.value in least
    }
    taken = []
    for everywhere in (False, True):
        inputs = [
            _value(f"x{i}", [length] if everywhere or i == position else [2, 3, 4, 5])
            for i in range(count)
        ]
        node = helper.make_node(
            schema.name, [v.name for v in inputs], ["y"], domain=schema.domain, **attributes
        )
        proto = _model([node], inputs, outputs=(), version=max(schema.since_version, 1))
        begin = time.process_time()
        with contextlib.suppress(Exception):  # it takes no vectors, or other attributes
            onnx.shape_inference.infer_shapes(proto, data_prop=follow)
        taken.append(time.process_time() - begin)
    return max(taken)


@pytest.mark.slow
def test_no_other_operator_makes_a_dimension_for_each_entry():
    """Tries every operator: the lists in the code are those of the onnx that is installed."""
    follows, always = set(), set()
    for schema in onnx.defs.get_all_schemas():
        if schema.domain:
            continue
        for position in range(min(schema.max_input, 3)):
            for follow, found in ((True, follows), (False, always)):
                # These dimensions take 10 ms and more; the best of several trials, as the machine may be busy.
                trials = 1 if follow and schema.name in FOLLOWED else 4
                if schema.name not in found and all(
                    _trial(schema, position, 1 << 18, follow) > 0.004 for _ in range(trials)
                ):
                    found.add(schema.name)
    assert "Concat" in follows
    assert follows - always <= FOLLOWED
    assert always <= {"Expand"}


# Nodes that are alike ------------------------------------------------------------------------------------------------

_IMAGE, _KERNEL, _FLAT = [2, 6, 9, 10], [4, 6, 3, 3], [6]
_ALIKE: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    **{op: ([_IMAGE, [6, 1, 1]], 1, {}) for op in ("Add", "Div", "Mul", "Sub")},
    **{
        op: ([_IMAGE], 1, {})
        for op in (
            "GlobalAveragePool",
            "HardSigmoid",
            "HardSwish",
            "LeakyRelu",
            "Relu",
            "Sigmoid",
            "Softmax",
            "Tanh",
            "Clip",
        )
    },
    **{
        op: ([_IMAGE], 1, {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]})
        for op in ("AveragePool", "MaxPool")
    },
    "BatchNormalization": ([_IMAGE, _FLAT, _FLAT, _FLAT, _FLAT], 1, {}),
    "Concat": ([_IMAGE, _IMAGE], 1, {"axis": -1}),
    "Conv": ([_IMAGE, _KERNEL], 1, {"strides": [2, 1], "dilations": [1, 2]}),
    "ConvTranspose": ([_IMAGE, [6, 2, 3, 3]], 1, {"strides": [2, 2], "group": 2}),
    "Flatten": ([_IMAGE], 1, {"axis": 2}),
    "Gemm": ([[5, 6], [7, 6]], 1, {"transB": 1}),
    "MatMul": ([_IMAGE, [10, 3]], 1, {}),
    "Split": ([_IMAGE], 2, {"axis": 1}),
    "Transpose": ([_IMAGE], 1, {"perm": [0, 2, 3, 1]}),
}


def _typed(proto):
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


def _of_one(op, dims, outputs, attributes):
    inputs = [_value(f"x{i}", d, TensorProto.FLOAT) for i, d in enumerate(dims)]
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, [v.name for v in inputs], names, **attributes)
    return _typed(_model([node], inputs, names, version=17 if op == "Split" else 18))


@pytest.mark.parametrize("op", sorted(_ALIKE))
def test_the_types_of_nodes_that_are_alike_are_those_of_the_whole_model(op):
    dims, outputs, attributes = _ALIKE[op]
    proto = _of_one(op, dims, outputs, attributes)
    whole = infer(proto)
    found = Alike(proto).outputs(
        proto.graph.node[0], op, [(TensorProto.FLOAT, tuple(d)) for d in dims]
    )
    assert found == [
        (TensorProto.FLOAT, tuple(d.dim_value for d in whole[f"y{i}"].tensor_type.shape.dim))
        for i in range(outputs)
    ]


def test_every_operator_whose_types_follow_from_those_that_it_reads_is_compared():
    assert _ALIKE.keys() == Alike(_of_one("Relu", [_IMAGE], 1, {}))._operators


def test_onnx_is_asked_once_for_nodes_that_are_alike(monkeypatch):
    asked, ask = [], onnx.shape_inference.infer_node_outputs
    monkeypatch.setattr(
        onnx.shape_inference, "infer_node_outputs", lambda *a: asked.append(a[1].name) or ask(*a)
    )
    names = [
        _node("Relu", "x", "a"),
        _node("Relu", "a", "b"),
        _node("Concat", "a b", "c", axis=1),
        _node("Concat", "a b", "d", axis=2),
        _node("Concat", "b a", "y", axis=1),
    ]
    for node in names:
        node.name = node.output[0]
    model = Model(_typed(_model(names, [_value("x", _IMAGE, TensorProto.FLOAT)])))
    assert (model.shape("c"), model.shape("d"), model.shape("y")) == (
        (2, 12, 9, 10),
        (2, 6, 18, 10),
        (2, 12, 9, 10),
    )
    assert asked == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ((0, (2, 3)), {}),
        ((1, None), {}),
        ((1, (None, 3)), {}),
        ((1, (1,) * 65), {}),
        ((1, (2, 3)), {"axis": 5}),
    ],
)
def test_what_is_not_wholly_known_or_damaged_has_no_type_of_its_own(kind, attributes):
    proto = _of_one("Concat", [[2, 3]], 1, {"axis": 1, **attributes})
    assert Alike(proto).outputs(proto.graph.node[0], "Concat", [kind]) is None


def test_a_function_of_the_model_in_place_of_an_operator_is_not_taken_for_it():
    proto = _of_one("Relu", [[2, 3]], 1, {})
    assert Alike(proto).outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) == [(1, (2, 3))]
    proto.functions.add(name="Relu", domain="")
    assert Alike(proto).outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) is None


def test_a_type_that_the_file_states_otherwise_is_left_to_the_whole_inference():
    proto = _of_one("Relu", [[2, 3]], 1, {})
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert Model(proto).type_of("y0") == (TensorProto.FLOAT16, None)
