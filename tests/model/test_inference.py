"""Shape inference in bounded memory, without loss of shapes in ordinary networks."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.model import inference
from qdqtool.model.graph import Model
from qdqtool.model.inference import (
    FOLLOWED,
    TYPED_BY_INPUTS,
    Alike,
    grows,
    infer,
    shorten_names,
    stays_small,
)
from tests.growth import FAMILIES, branches
from tests.test_patterns import growth_factor

LONG = 1 << 40


def value_info(name, dims, kind=TensorProto.INT64):
    return helper.make_tensor_value_info(name, kind, dims)


def build_model(
    nodes, inputs, outputs=("y",), initializers=(), functions=(), version=18, stated=()
):
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [value_info(t, None) for t in outputs],
        list(initializers),
        value_info=list(stated),
    )
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def int64(name, *values):
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def if_with(op):
    inner = helper.make_graph([node(op, "x x", "z", axis=0)], "b", [], [value_info("z", None)])
    return helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)


def doubled(op, count, dims, **attributes):
    nodes = [node(op, f"x{i} x{i}", f"x{i + 1}", **attributes) for i in range(count)]
    nodes.append(node("Identity", f"x{count}", "y"))
    return build_model(nodes, [value_info("x0", dims)])


def in_turn(first, second, axes, count):
    nodes = [
        node(op, f"x{i} a", f"x{i + 1}", axes=axes if op == second else [0])
        for i, op in enumerate((first, second) * count)
    ]
    return build_model(
        [*nodes, node("Relu", f"x{2 * count}", "y")],
        [value_info("x0", [1], TensorProto.FLOAT)],
        initializers=[int64("a", 0)],
        version=11,
    )


def slice_of(nodes, *constants):
    return build_model(
        [*nodes, node("Slice", "x b e a d", "y")],
        [value_info("x", [4])],
        initializers=[int64("b", 0), int64("e", 4), int64("a", 0), *constants],
    )


BOMBS = {
    **{
        op: lambda op=op: build_model([node(op, "x x", "y")], [value_info("x", [LONG])])
        for op in ("Add", "Mul", "Sub", "Gather")
    },
    "Concat": lambda: build_model([node("Concat", "x", "y", axis=0)], [value_info("x", [LONG])]),
    "Cast": lambda: build_model(
        [node("Cast", "x", "y", to=TensorProto.INT64)], [value_info("x", [LONG])]
    ),
    "Size": lambda: build_model([node("Size", "x", "y")], [value_info("x", [LONG])]),
    "Slice": lambda: build_model(
        [node("Slice", "x s e", "y")],
        [value_info("x", [LONG])],
        initializers=[int64("s", 0), int64("e", LONG)],
    ),
    "Slice in a step that 32 bits have not": lambda: slice_of([], int64("d", 1 << 31)),
    "Slice backwards in a step that 32 bits have not": lambda: build_model(
        [node("Slice", "x b e a d", "y")],
        [value_info("x", [4])],
        initializers=[int64("b", 3), int64("e", -9), int64("a", 0), int64("d", -1 << 32)],
    ),
    "Slice in a step that is computed": lambda: slice_of(
        [node("Mul", "k k", "d")], int64("k", 46341)
    ),
    "Slice in a function": lambda: build_model(
        [node("F", "x d", "y", domain="own")],
        [value_info("x", [4])],
        initializers=[int64("d", 1 << 31)],
        functions=[
            helper.make_function(
                "own",
                "F",
                ["v", "d"],
                ["y"],
                [
                    *(
                        node("Constant", "", n, value_ints=[v])
                        for n, v in (("b", 0), ("e", 4), ("a", 0))
                    ),
                    node("Slice", "v b e a d", "y"),
                ],
                [helper.make_opsetid("", 18)],
            )
        ],
    ),
    "Unsqueeze": lambda: build_model(
        [node("Unsqueeze", "x a", "y")], [value_info("x", [LONG])], initializers=[int64("a", 0)]
    ),
    "Squeeze": lambda: build_model(
        [node("Squeeze", "x a", "y")], [value_info("x", [LONG])], initializers=[int64("a", 0)]
    ),
    "Expand": lambda: build_model(
        [node("Expand", "x s", "y")], [value_info("x", [1]), value_info("s", [LONG])]
    ),
    "Expand a float": lambda: build_model(
        [node("Expand", "x s", "y")], [value_info("x", [1, 2]), value_info("s", [1 << 28])]
    ),
    "behind Reshape": lambda: build_model(
        [node("Reshape", "x s", "v"), node("Add", "v v", "y")],
        [value_info("x", [1 << 20, 1 << 20])],
        initializers=[int64("s", -1)],
    ),
    "behind Flatten and Squeeze": lambda: build_model(
        [
            node("Flatten", "x", "v", axis=0),
            node("Squeeze", "v a", "w"),
            node("Mul", "w w", "y"),
        ],
        [value_info("x", [1 << 14] * 3)],
        initializers=[int64("a", 0)],
    ),
    "behind ConstantOfShape": lambda: build_model(
        [node("ConstantOfShape", "s", "v"), node("Concat", "v v", "y", axis=0)],
        [],
        initializers=[int64("s", LONG)],
    ),
    "behind Tile": lambda: build_model(
        [node("Tile", "x r", "v"), node("Add", "v v", "y")],
        [value_info("x", [8])],
        initializers=[int64("r", 1 << 30)],
    ),
    "behind Range": lambda: build_model(
        [node("Range", "a b c", "v"), node("Add", "v v", "y")],
        [],
        initializers=[
            helper.make_tensor(n, TensorProto.INT64, [], [v])
            for n, v in (("a", 0), ("b", 1 << 30), ("c", 1))
        ],
    ),
    "behind Pad": lambda: build_model(
        [node("Pad", "x p", "v"), node("Mul", "v v", "y")],
        [value_info("x", [8])],
        initializers=[int64("p", 0, 1 << 30)],
    ),
    "behind Identity with a stated length": lambda: build_model(
        [node("Own", "x", "v", domain="own"), node("Add", "v v", "y")],
        [value_info("x", [1])],
        stated=[value_info("v", [LONG])],
    ),
    "an initializer": lambda: build_model(
        [node("Add", "w w", "y")],
        [],
        initializers=[onnx.TensorProto(name="w", data_type=TensorProto.INT64, dims=[1 << 30])],
    ),
    "Concat of itself": lambda: doubled("Concat", 40, [4], axis=0),
    "Gather of itself": lambda: doubled("Gather", 40, [2, 2, 2, 2]),
    "GatherND of itself": lambda: doubled("GatherND", 40, [2, 2, 2, 2]),
    "in an If": lambda: build_model(
        [if_with("Concat")], [value_info("c", [], TensorProto.BOOL), value_info("x", [LONG])]
    ),
    "in a function": lambda: build_model(
        [node("F", "x", "y", domain="own")],
        [value_info("x", [LONG])],
        functions=[
            helper.make_function(
                "own", "F", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 18)]
            )
        ],
    ),
    # Before opset 13 the attribute's axes count, and a Squeeze keeps what its input does not have.
    "axes in both places": lambda: in_turn("Unsqueeze", "Unsqueeze", list(range(20_000)), 16),
    "axes that are not there": lambda: in_turn("Unsqueeze", "Squeeze", [60_000], 1900),
    "a rank in every node": lambda: build_model(
        [node("Relu", f"x{i}" if i else "x", f"x{i + 1}") for i in range(500)]
        + [node("Relu", "x500", "y")],
        [value_info("x", [1] * 20_000, TensorProto.FLOAT)],
    ),
    **{
        f"a vector of {count} in every node": lambda count=count: (
            build_model(  # too long together, and each
                [node("Add", f"x{i} x{i}" if i else "x x", f"x{i + 1}") for i in range(500)]
                + [node("Add", "x500 x", "y")],
                [value_info("x", [count])],
            )
        )
        for count in (20_000, 60_000)
    },
}


def single_node_model(
    node: onnx.NodeProto, functions: Sequence[onnx.FunctionProto] = ()
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8, 4, 4]) for n in "xo"]
    gain = numpy_helper.from_array(np.ones(4, np.float32), "g")
    graph = helper.make_graph([node], "g", values[:1], values[1:], [gain])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def called_function(
    body: onnx.NodeProto, attribute: str, usual: int | None = None
) -> onnx.FunctionProto:
    """Build a function with one node, which takes an attribute of the function."""
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


# onnx reads 32 bits of an axis, which ended the process, and makes as many entries as a Split has outputs.
ODD = {
    "axis": single_node_model(helper.make_node(*_NORM, axis=1 << 31)),
    "largest axis": single_node_model(helper.make_node(*_NORM, axis=(1 << 63) - 1)),
    "outputs": single_node_model(helper.make_node(*_SPLIT, num_outputs=1 << 25, axis=1)),
    "axis of a function": single_node_model(
        helper.make_node("F", ["x", "g", "g"], ["o", "m", "i"], domain="own", a=1 << 31),
        [called_function(helper.make_node(*_NORM), "axis")],
    ),
    "axis that a function has by default": single_node_model(
        helper.make_node("F", ["x", "g", "g"], ["o", "m", "i"], domain="own"),
        [called_function(helper.make_node(*_NORM), "axis", 1 << 31)],
    ),
    "outputs of a function": single_node_model(
        helper.make_node("F", ["x"], ["o", "p"], domain="own", a=1 << 25),
        [called_function(helper.make_node(*_SPLIT), "num_outputs")],
    ),
}


INFER_ALL = """
import resource
from qdqtool.model.graph import Model
from qdqtool.model.inference import infer
from qdqtool.prediction import predict
from qdqtool.timing.twin import Shapes
from tests.model.test_inference import BOMBS, ODD

def infer_shapes(proto):
    model = Model(proto)
    model.shape("y")
    Shapes(model).get("y")
    infer(proto)

models = {name: build() for name, build in BOMBS.items()}
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
for name, proto in (*models.items(), *ODD.items()):
    (predict if name in ODD else infer_shapes)(proto)
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    assert peak < 300_000, (name, peak)  # kB
    print(name, flush=True)
"""


def test_inference_of_hostile_models_is_bounded() -> None:
    # In a process of its own: onnx could end this one, or take all memory. The time limit is for
    # models that onnx never finishes.
    command = [sys.executable, "-c", INFER_ALL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.split("\n")[:-1] == [*BOMBS, *ODD], run.stderr[-800:]


def dims(value: onnx.TypeProto) -> list[int]:
    return [d.dim_value for d in value.tensor_type.shape.dim]


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """Return a list that gets a copy of every model that onnx infers."""
    models: list[onnx.ModelProto] = []
    infer_shapes = onnx.shape_inference.infer_shapes

    def record(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        models.append(onnx.ModelProto.FromString(proto.SerializeToString()))  # it changes later
        return infer_shapes(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", record)
    return models


FLATTENING = [
    helper.make_function(
        "own",
        f"F{i}",
        ["a"],
        ["b"],
        [node("Flatten", "a", "b", axis=1)],
        [helper.make_opsetid("", 18)],
    )
    for i in range(400)
]


def calling(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Build a model with 400 functions."""
    inputs = [value_info("t0", [2, 3, 4], TensorProto.FLOAT)]
    return build_model(nodes, inputs, ["t400"], functions=FLATTENING)


def test_onnx_does_not_get_many_functions(inferred: list[onnx.ModelProto]) -> None:
    # onnx copies the table of all functions for each call: 4,000 with names of 5,000 letters took
    # minutes.
    calls = [node(f"F{i}", f"t{i}", f"t{i + 1}", domain="own") for i in range(400)]
    assert dims(infer(calling(*calls))["t7"]) == [2, 12]
    assert inferred and not any(model.functions for model in inferred)


def test_onnx_gets_functions_for_few_calls(inferred: list[onnx.ModelProto]) -> None:
    types = infer(calling(node("F0", "t0", "t1", domain="own"), node("Relu", "t1", "t400")))
    assert dims(types["t1"]) == [2, 12] and len(inferred[-1].functions) == 400


def test_onnx_does_not_get_subgraphs_of_large_graph(
    inferred: list[onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    # onnx copies the table of all tensors for each subgraph: 4,000 of 12,000 tensors took ten
    # seconds.
    proto = branches(60)
    with_all, outputs = infer(proto), [n.output[0] for n in proto.graph.node if n.op_type == "If"]
    assert len(outputs) == 20 and all(len(dims(with_all[name])) == 4 for name in outputs)
    inferred.clear()
    monkeypatch.setattr(inference, "SCOPE_ENTRIES", 600)
    types = infer(proto)
    ifs = [sum(n.op_type == "If" and not n.domain for n in m.graph.node) for m in inferred]
    assert set(ifs) == {4}  # of two graphs each, and 60 nodes with three constants
    assert [types[name] for name in outputs[:4]] == [with_all[name] for name in outputs[:4]]
    assert all(n.domain == "" for n in proto.graph.node)


@pytest.mark.parametrize("family", ["Loops", "functions"])
def test_loops_and_functions_do_not_grow(family) -> None:
    # onnx knows no shape of what loops carry. Shapes in functions follow from the arguments of a
    # call.
    assert not grows(FAMILIES[family](200))


def test_slice_with_step_from_attribute_is_inferred() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Constant", "", "d", value_ints=[1]),
        node("Slice", "s b e a d", "p"),
        node("Concat", "p m", "q", axis=0),
        node("Reshape", "x q", "y"),
    ]
    proto = build_model(
        nodes,
        [value_info("x", [2, 3, 4])],
        initializers=[int64("b", 0), int64("e", 1), int64("a", 0), int64("m", 12)],
    )
    assert dims(infer(proto)["y"]) == [2, 12]


def test_squeeze_undoes_unsqueeze(inferred: list[onnx.ModelProto]) -> None:
    # Otherwise parts of a long row would be hidden from onnx, which takes several inferences.
    nodes = [
        node(op, f"x{i} a", f"x{i + 1}") for i, op in enumerate(("Unsqueeze", "Squeeze") * 1000)
    ]
    proto = build_model(
        [*nodes, node("Relu", "x2000", "y")],
        [value_info("x0", [1, 2, 3])],
        initializers=[int64("a", 0)],
    )
    assert dims(infer(proto)["y"]) == [1, 2, 3]
    assert len(inferred) == 1


@pytest.mark.parametrize(
    ("op", "attribute", "version"), [("Unsqueeze", "axes", 11), ("Constant", "value_ints", 18)]
)
def test_growth_depends_on_attributes_of_a_call(op: str, attribute: str, version: int) -> None:
    reads = "a" if op == "Unsqueeze" else ""
    inner = node(op, reads, "b")
    inner.attribute.add(name=attribute, ref_attr_name="ints", type=onnx.AttributeProto.INTS)
    opsets = [helper.make_opsetid("", version)]
    function = helper.make_function("own", "f", ["a"], ["b"], [inner], opsets, ["ints"])
    nodes = [
        node("f", "x", "y", domain="own", ints=list(range(100))),
        *([] if reads else [node("Reshape", "x y", "z")]),
    ]
    inputs = [value_info("x", [2, 3], TensorProto.FLOAT)]
    assert grows(build_model(nodes, inputs, ["z"], functions=[function], version=version))


@pytest.mark.parametrize(
    ("equation", "large"), [("ab->" + "a" * 100, True), ("a" * 100, True), ("ab->ba", False)]
)
def test_einsum_grows_with_letters_of_its_equation(equation: str, large: bool) -> None:
    inputs = [value_info("x", [2, 3], TensorProto.FLOAT)]
    assert grows(build_model([node("Einsum", "x", "y", equation=equation)], inputs)) is large


def test_einsum_in_function_is_bounded() -> None:
    einsum = node("Einsum", "a", "b")
    einsum.attribute.add(name="equation", ref_attr_name="equation", type=onnx.AttributeProto.STRING)
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function("own", "f", ["a"], ["b"], [einsum], opsets, ["equation"])
    call = node("f", "x", "y", domain="own", equation="a->" + "a" * 1000)
    inputs = [value_info("x", [2], TensorProto.FLOAT)]
    proto = build_model([call], inputs, functions=[function])
    proto.graph.output[0].ClearField("type")
    assert len(dims(infer(proto)["y"])) < 100


LONG_NAME = "n" * 100_000


def relus(count: int) -> list[onnx.NodeProto]:
    """Return Relus from x0 to the tensor of the last number."""
    return [node("Relu", f"x{i}", f"x{i + 1}") for i in range(count)]


def test_long_name_of_dimension_is_not_copied() -> None:
    def types(name: str) -> dict[str, onnx.TypeProto]:
        proto = build_model(relus(2000), [value_info("x0", [name, 4])], ["x2000"])
        inferred = infer(proto)
        assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == name
        return {tensor: kind for tensor, kind in inferred.items() if tensor != "x0"}

    long, short = types(LONG_NAME), types("n")
    assert {tensor: dims(kind) for tensor, kind in long.items()} == {
        tensor: dims(kind) for tensor, kind in short.items()
    }
    names = {d.dim_param for kind in long.values() for d in kind.tensor_type.shape.dim}
    assert max(map(len, names)) < 100


def optional() -> onnx.ModelProto:
    """Build a model with a long name in the type of an attribute, and a name of 99 letters."""
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [LONG_NAME, 4])
    nodes = [
        helper.make_node("Optional", [], ["o"], type=kind),
        node("OptionalGetElement", "o", "x0"),
    ]
    return build_model([*nodes, *relus(2000)], [value_info("x", ["m" * 99])])


def test_long_name_in_attribute_is_not_copied() -> None:
    proto = optional()
    types = infer(proto)
    assert {len(dims(types[f"x{i}"])) for i in range(1, 2000)} == {2}
    assert sum(kind.ByteSize() for kind in types.values()) < 1_000_000
    attribute = proto.graph.node[0].attribute[0]
    assert attribute.tp.tensor_type.shape.dim[0].dim_param == LONG_NAME


def test_shorten_names_keeps_names_different() -> None:
    proto = optional()
    shorten_names(proto)
    types = (proto.graph.node[0].attribute[0].tp, proto.graph.input[0].type)
    names = [d.dim_param for kind in types for d in kind.tensor_type.shape.dim]
    assert max(map(len, names)) < 100 and len(set(names)) == 3


SHORT_VECTOR, LONG_VECTOR = (
    helper.make_tensor_type_proto(TensorProto.INT64, [n]) for n in (4, LONG)
)


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "small"),
    [
        ("Expand", {}, SHORT_VECTOR, True),
        ("Expand", {}, LONG_VECTOR, False),
        ("GatherND", {"batch_dims": 0}, SHORT_VECTOR, True),
        ("GatherND", {"batch_dims": -3}, SHORT_VECTOR, False),
    ],
    ids=["short", "long", "GatherND", "negative batch_dims"],
)
def test_output_of_node_stays_small(
    op: str, attributes: dict[str, int], shape: onnx.TypeProto, small: bool
) -> None:
    types = {"x": SHORT_VECTOR, "s": shape}
    assert stays_small(node(op, "x s", "y", **attributes), types, 18) is small


def test_branch_with_operator_that_crashes_onnx_does_not_stay_small() -> None:
    eye = node("EyeLike", "nowhere", "z", dtype=1)
    branch = helper.make_graph([eye], "b", [], [value_info("z", None)])
    types = {"c": helper.make_tensor_type_proto(TensorProto.BOOL, [])}
    assert not stays_small(node("If", "c", "y", then_branch=branch, else_branch=branch), types, 18)


def test_input_of_opaque_type_does_not_stop_inference() -> None:
    opaque = onnx.ValueInfoProto(name="o")
    opaque.type.opaque_type.name = "handle"
    proto = build_model([node("Relu", "x", "y")], [value_info("x", [1, 4]), opaque])
    assert "y" in (infer(proto) or ())


def test_network_of_vectors_keeps_its_shapes() -> None:
    nodes = [
        node("Add", "x x", "a"),
        node("Concat", "a a", "y", axis=0),
        node("Shape", "z", "s"),
        node("Reshape", "z s", "t"),
    ]
    inputs = [value_info("x", [200_000]), value_info("z", [2, 3, 4])]
    proto = build_model(nodes, inputs, outputs=("y", "t"))
    before = proto.SerializeToString()
    types = infer(proto)
    assert dims(types["y"]) == [400_000]
    assert dims(types["t"]) == [2, 3, 4]
    assert proto.SerializeToString() == before


def infer_with_onnx(proto):
    graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    return {v.name: v.type for v in (*graph.value_info, *graph.output)}


def attention_blocks(count, dynamic):
    """Build attention as it is exported with computed shapes: Shape, Gather, Concat, Reshape."""
    values = {"none": 0, "heads": 4, "width": 16, "heads_1": 1, "heads_2": 2}
    weights = [
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
        *(int64(n, v) for n, v in values.items()),
        helper.make_tensor("w", TensorProto.FLOAT, [64, 64], [0.0] * 4096),
        helper.make_tensor("bias", TensorProto.FLOAT, [64], [0.0] * 64),
    ]
    nodes, last = [], "x"
    for i in range(count):
        nodes += [
            node("Shape", last, f"a{i}"),
            node("Gather", f"a{i} zero", f"b{i}", axis=0),
            node("Unsqueeze", f"b{i} none", f"c{i}"),
            node("Slice", f"a{i} heads_1 heads_2", f"d{i}"),
            node("Concat", f"c{i} d{i} heads width", f"e{i}", axis=0),
            node("MatMul", f"{last} w", f"f{i}"),
            node("Add", f"f{i} bias", f"g{i}"),
            node("Reshape", f"g{i} e{i}", f"h{i}"),
            node("Transpose", f"h{i}", f"i{i}", perm=[0, 2, 1, 3]),
            node("Softmax", f"i{i}", f"j{i}"),
            node("Transpose", f"j{i}", f"k{i}", perm=[0, 2, 1, 3]),
            node("Reshape", f"k{i} a{i}", f"l{i}"),
            node("Add", f"{last} l{i}", f"m{i}"),
        ]
        last = f"m{i}"
    nodes.append(node("Identity", last, "y"))
    return build_model(
        nodes,
        [value_info("x", ["n" if dynamic else 2, 8, 64], TensorProto.FLOAT)],
        initializers=weights,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_computed_shapes_are_as_onnx_infers_them(dynamic) -> None:
    proto = attention_blocks(12, dynamic)
    assert len(infer_with_onnx(proto)) > 150
    assert infer(proto) == infer_with_onnx(proto)
    assert not grows(proto)


def infer_vectors(
    schema: onnx.defs.OpSchema, position: int, length: int, data_prop: bool, everywhere: bool
) -> None:
    """Infer a node with a vector at one input, or at all."""
    count = max(min(schema.max_input, 4), schema.min_input, position + 1)
    defaults = {1: 1.0, 2: 0, 3: b"a", 7: [1]}
    attributes = {
        name: defaults[a.type.value]
        for name, a in schema.attributes.items()
        if a.required and a.type.value in defaults
    }
    inputs = [
        value_info(f"x{i}", [length] if everywhere or i == position else [2, 3, 4, 5])
        for i in range(count)
    ]
    names = [v.name for v in inputs]
    tried = helper.make_node(schema.name, names, ["y"], domain=schema.domain, **attributes)
    proto = build_model([tried], inputs, outputs=(), version=max(schema.since_version, 1))
    with contextlib.suppress(Exception):  # it takes no vectors, or other attributes
        onnx.shape_inference.infer_shapes(proto, data_prop=data_prop)


def time_grows(schema: onnx.defs.OpSchema, data_prop: bool) -> bool:
    """Return whether inference takes longer for longer vectors at one of the first inputs."""
    return any(
        growth_factor(
            lambda n: infer_vectors(schema, position, n, data_prop, everywhere),  # noqa: B023
            limit=2,
            longest=1 << 18,
        )
        > 2
        for position in range(min(schema.max_input, 3))
        for everywhere in (False, True)
    )


@pytest.mark.slow
def test_only_listed_operators_propagate_values() -> None:
    # An operator that propagates values makes a dimension for each entry of a vector.
    schemas = [s for s in onnx.defs.get_all_schemas() if not s.domain]
    always = {s.name for s in schemas if time_grows(s, data_prop=False)}
    with_values = {s.name for s in schemas if time_grows(s, data_prop=True)}
    assert "Concat" in with_values
    assert with_values - always <= FOLLOWED
    assert always <= {"Expand"}


# Types of single nodes ------------------------------------------------------------------------------------------------

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


def with_float_outputs(proto):
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


def model_of_one(op, dims, outputs, attributes):
    inputs = [value_info(f"x{i}", d, TensorProto.FLOAT) for i, d in enumerate(dims)]
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, [v.name for v in inputs], names, **attributes)
    return with_float_outputs(
        build_model([node], inputs, names, version=17 if op == "Split" else 18)
    )


@pytest.mark.parametrize("op", sorted(_ALIKE))
def test_types_of_single_node_are_those_of_the_whole_model(op: str) -> None:
    shapes, outputs, attributes = _ALIKE[op]
    proto = model_of_one(op, shapes, outputs, attributes)
    whole = infer(proto)
    inputs = [(TensorProto.FLOAT, tuple(shape)) for shape in shapes]
    assert Alike(proto).outputs(proto.graph.node[0], op, inputs) == [
        (TensorProto.FLOAT, tuple(dims(whole[f"y{i}"]))) for i in range(outputs)
    ]


def test_every_operator_typed_by_inputs_is_compared() -> None:
    assert _ALIKE.keys() == TYPED_BY_INPUTS


def test_equal_nodes_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred: list[str] = []
    infer_node_outputs = onnx.shape_inference.infer_node_outputs

    def record(schema: Any, proto: onnx.NodeProto, *arguments: Any) -> Any:
        inferred.append(proto.name)
        return infer_node_outputs(schema, proto, *arguments)

    monkeypatch.setattr(onnx.shape_inference, "infer_node_outputs", record)
    nodes = [
        node("Relu", "x", "a"),
        node("Relu", "a", "b"),
        node("Concat", "a b", "c", axis=1),
        node("Concat", "a b", "d", axis=2),
        node("Concat", "b a", "y", axis=1),
    ]
    for proto in nodes:
        proto.name = proto.output[0]
    inputs = [value_info("x", _IMAGE, TensorProto.FLOAT)]
    model = Model(with_float_outputs(build_model(nodes, inputs)))
    assert [model.shape(name) for name in "cdy"] == [(2, 12, 9, 10), (2, 6, 18, 10), (2, 12, 9, 10)]
    assert inferred == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ((0, (2, 3)), {}),
        ((1, None), {}),
        ((1, (None, 3)), {}),
        ((1, (1,) * 65), {}),
        ((1, (2, 3)), {"axis": 5}),
    ],
    ids=["no type", "no shape", "open dimension", "rank 65", "axis 5"],
)
def test_unknown_input_or_damaged_node_has_no_type(kind, attributes) -> None:
    proto = model_of_one("Concat", [[2, 3]], 1, {"axis": 1, **attributes})
    assert Alike(proto).outputs(proto.graph.node[0], "Concat", [kind]) is None


def test_function_named_as_operator_has_no_type() -> None:
    proto = model_of_one("Relu", [[2, 3]], 1, {})
    assert Alike(proto).outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) == [(1, (2, 3))]
    proto.functions.add(name="Relu", domain="")
    assert Alike(proto).outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) is None


def test_other_type_in_file_is_left_to_whole_inference() -> None:
    proto = model_of_one("Relu", [[2, 3]], 1, {})
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert Model(proto).type_of("y0") == (TensorProto.FLOAT16, None)
