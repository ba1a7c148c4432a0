import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.insertion.prepare import raise_opset
from qdqtool.ir.graph import Model
from qdqtool.proto.shapes import (
    NodeTypeCache,
    convert_opset,
    has_sane_attributes,
    infer_node,
    infer_shapes,
    infer_types,
    is_safe_to_infer,
)
from tools.fuzz.grammar import network
from tools.growth.families import FAMILIES

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
IMAGE = (1, 8, 4, 4)


def value(name: str, dims: Any, elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, dims)


def build(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    opset: int = 18,
    functions: tuple[onnx.FunctionProto, ...] = (),
    **constants: Any,
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", None)], stored)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)


def before_slice(
    op: str,
    inputs: str = "x",
    dims: Any = IMAGE,
    opset: int = 17,
    outputs: int = 1,
    **arguments: Any,
) -> onnx.ModelProto:
    """Return a node that reads x, and a Slice that reads the last output of the node.

    Args:
        arguments: Arrays become constants, all others become attributes of the node.
    """
    constants = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
    attributes = {n: v for n, v in arguments.items() if n not in constants}
    names = [*(f"z{i}" for i in range(outputs - 1)), "z"]
    node = helper.make_node(op, inputs.split(" "), names, name="far", **attributes)
    slicing = helper.make_node("Slice", ["z", "begin", "end", "axis"], ["y"])
    ends = {"begin": [0], "end": [3], "axis": [2]}
    return build([node, slicing], [value("x", dims)], opset, **constants, **ends)


def sizes(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


LARGE_KERNEL = np.ones((8, 8, 7, 7), np.float32)

#: Wrong models on which onnx's inference ends the process.
CRASHES = {
    "conv": before_slice("Conv", "x w", w=LARGE_KERNEL),
    "conv-kernel-shape": before_slice("Conv", "x w", w=LARGE_KERNEL, kernel_shape=[7, 7]),
    "conv-transpose": before_slice(
        "ConvTranspose", "x w", w=LARGE_KERNEL[:, :, :1, :1], pads=[9] * 4
    ),
    "max-pool": before_slice("MaxPool", kernel_shape=[9, 9]),
    "average-pool": before_slice("AveragePool", kernel_shape=[9, 9]),
    "pad": before_slice("Pad", "x p", p=sizes(0, 0, -9, 0, 0, 0, 0, 0)),
    "expand": before_slice("Expand", "x p", dims=(1, 8, 1, 4), p=sizes(1, 1, -5, 1)),
    "resize": before_slice("Resize", "x  s", s=np.array([1, 1, -3, 1], np.float32)),
    "resize-old": before_slice("Resize", "x s", opset=10, s=np.array([1, 1, -3, 1], np.float32)),
    "resize-overflow": before_slice(
        "Resize", "x  s", dims=(1, 1, 1 << 29, 4), s=np.array([1, 1, 1e15, 1], np.float32)
    ),
    "split": before_slice("Split", "x p", outputs=2, axis=2, p=sizes(-5, 9)),
    "split-equal": before_slice(
        "Split", dims=(1, 8, 9, 4), opset=18, outputs=8, num_outputs=8, axis=2
    ),
    "top-k": before_slice("TopK", "x p", outputs=2, axis=2, p=sizes(-5)),
    "stated-size": before_slice("Relu", dims=(1, 8, -4, 4)),
    "gather-nd": before_slice("GatherND", "x i", i=np.zeros((1, 1), np.int64), batch_dims=-3),
    "eye-like": before_slice("EyeLike", "nowhere", dtype=1),
}

#: Models that stay in this process.
ORDINARY = {
    "conv": before_slice("Conv", "x w", w=np.ones((8, 8, 3, 3), np.float32), pads=[1] * 4),
    "conv-stride": before_slice("Conv", "x w", w=np.ones((8, 8, 3, 3), np.float32), strides=[2, 2]),
    "max-pool": before_slice("MaxPool", kernel_shape=[5, 5], pads=[2] * 4),
    "max-pool-stride": before_slice("MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "conv-transpose": before_slice(
        "ConvTranspose", "x w", w=np.ones((8, 8, 2, 2), np.float32), strides=[2, 2]
    ),
    "same-padding": before_slice("AveragePool", kernel_shape=[9, 9], auto_pad="SAME_UPPER"),
    "resize": before_slice("Resize", "x  s", s=np.array([1, 1, 2, 2], np.float32)),
    "pad": before_slice("Pad", "x p", p=sizes(0, 0, 1, 1, 0, 0, 1, 1)),
    "split": before_slice("Split", "x p", outputs=2, axis=1, p=sizes(4, 4)),
    "split-many": before_slice(
        "Split", "x p", dims=(1, 99, 4, 4), outputs=99, axis=1, p=sizes(*[1] * 99)
    ),
    "custom-operator": build(
        [helper.make_node("Own", ["x"], ["y"], domain="own")], [value("x", IMAGE)]
    ),
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"functions"}))
def test_is_safe_clears_families_of_networks(family: str) -> None:
    assert is_safe_to_infer(FAMILIES[family](30))


def test_is_safe_clears_random_networks() -> None:
    assert all(is_safe_to_infer(network(seed)) for seed in range(30))


def test_infer_shapes_reports_a_crash_and_infers_the_next_model() -> None:
    with pytest.raises(RuntimeError, match="crashes"):
        infer_shapes(CRASHES["conv"])
    whole = before_slice("Conv", "x w", dims=(1, 8, 9, 9), w=LARGE_KERNEL)
    assert not is_safe_to_infer(whole)
    inferred = {v.name: v.type.tensor_type.shape for v in infer_shapes(whole).graph.value_info}
    assert [d.dim_value for d in inferred["z"].dim] == [1, 8, 3, 3]


@pytest.mark.parametrize("name", ["max-pool", "split-equal"])
def test_model_shape_is_unknown_after_a_crash(name: str) -> None:
    model = CRASHES[name]
    before = model.SerializeToString()
    assert Model(model).shape("y") is None
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[9, 9]),
        helper.make_node("Split", ["x"], ["y"], split="a text"),
    ],
    ids=["max-pool", "split"],
)
def test_raise_opset_reports_a_crash(node: onnx.NodeProto) -> None:
    slicing = helper.make_node("Slice", ["y", "b", "e", "a"], ["z"])
    model = build([node, slicing], [value("x", IMAGE)], 12, b=sizes(0), e=sizes(3), a=sizes(2))
    with pytest.raises(ModelError):
        raise_opset(Model(model), 13)


def test_convert_opset_converts_a_model_again_after_a_change() -> None:
    model = build([helper.make_node("Relu", ["x"], ["y"])], [value("x", IMAGE)], 12)
    first, again = convert_opset(model, 13), convert_opset(model, 13)
    assert first is not again and first == again, "callers change the results"
    model.graph.node[0].op_type = "Sigmoid"
    assert [n.op_type for n in convert_opset(model, 13).graph.node] == ["Sigmoid"]
    assert convert_opset(model, 14).opset_import[0].version == 14


def test_convert_opset_limits_memory() -> None:
    expand = helper.make_node("Expand", ["x", "n"], ["y"])
    model = build([expand], [value("x", IMAGE), value("n", [1 << 28], INT64)], 12)
    with pytest.raises(RuntimeError, match="640 MB"):
        convert_opset(model, 13)


# Memory ------------------------------------------------------------------------------------------

LONG = 1 << 40


def on_vector(
    op: str, inputs: str = "x x", dims: Any = (LONG,), **arguments: Any
) -> onnx.ModelProto:
    constants = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
    attributes = {n: v for n, v in arguments.items() if n not in constants}
    node = helper.make_node(op, inputs.split(), ["y"], **attributes)
    return build([node], [value("x", dims, INT64)], **constants)


def repeated(op: str, count: int, dims: Any, **attributes: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node(op, [f"x{i}", f"x{i}"], [f"x{i + 1}"], **attributes) for i in range(count)
    ]
    return build(
        [*nodes, helper.make_node("Identity", [f"x{count}"], ["y"])], [value("x0", dims, INT64)]
    )


def two_nodes(first: onnx.NodeProto, op: str, dims: Any, **constants: Any) -> onnx.ModelProto:
    second = helper.make_node(
        op, [first.output[0]] * 2, ["y"], **({"axis": 0} if op == "Concat" else {})
    )
    return build([first, second], [value("x", dims, INT64)], **constants)


#: Models of less than 2 KB for which onnx's inference takes all memory, or all time.
BOMBS = {
    **{op.lower(): on_vector(op) for op in ("Add", "Mul", "Sub", "Gather")},
    "concat": on_vector("Concat", "x", axis=0),
    "cast": on_vector("Cast", "x", to=INT64),
    "size": on_vector("Size", "x"),
    "unsqueeze": on_vector("Unsqueeze", "x a", a=sizes(0)),
    "squeeze": on_vector("Squeeze", "x a", a=sizes(0)),
    "slice": on_vector("Slice", "x s e", s=sizes(0), e=sizes(LONG)),
    "slice-step": on_vector(
        "Slice", "x b e a d", (4,), b=sizes(0), e=sizes(4), a=sizes(0), d=sizes(1 << 31)
    ),
    "add-2^25": on_vector("Add", dims=(1 << 25,)),
    "expand": build(
        [helper.make_node("Expand", ["x", "s"], ["y"])],
        [value("x", [1]), value("s", [LONG], INT64)],
    ),
    "reshape": two_nodes(
        helper.make_node("Reshape", ["x", "s"], ["v"]), "Add", (1 << 20, 1 << 20), s=sizes(-1)
    ),
    "constant-of-shape": two_nodes(
        helper.make_node("ConstantOfShape", ["s"], ["v"]), "Concat", (1,), s=sizes(LONG)
    ),
    "tile": two_nodes(helper.make_node("Tile", ["x", "r"], ["v"]), "Add", (8,), r=sizes(1 << 30)),
    "pad": two_nodes(helper.make_node("Pad", ["x", "p"], ["v"]), "Mul", (8,), p=sizes(0, 1 << 30)),
    "concat-of-itself": repeated("Concat", 40, [4], axis=0),
    "gather-of-itself": repeated("Gather", 40, [2, 2, 2, 2]),
    "gather-nd-of-itself": repeated("GatherND", 40, [2, 2, 2, 2]),
    "vectors-in-all-nodes": repeated("Add", 500, [60_000]),
    "function": build(
        [helper.make_node("F", ["x"], ["y"], domain="own")],
        [value("x", [LONG], INT64)],
        functions=(
            helper.make_function(
                "own",
                "F",
                ["a"],
                ["b"],
                [helper.make_node("Add", ["a", "a"], ["b"])],
                [helper.make_opsetid("", 18)],
            ),
        ),
    ),
}


@pytest.mark.parametrize(
    ("model", "is_safe"),
    [
        *(pytest.param(model, False, id=f"crash: {name}") for name, model in CRASHES.items()),
        *(pytest.param(model, False, id=f"memory: {name}") for name, model in BOMBS.items()),
        *(pytest.param(model, True, id=f"ordinary: {name}") for name, model in ORDINARY.items()),
    ],
)
def test_is_safe_to_infer(model: onnx.ModelProto, is_safe: bool) -> None:
    assert is_safe_to_infer(model) is is_safe


def test_infer_types_takes_little_memory(tmp_path: Path) -> None:
    """Infer in a process that is limited to 1 GB; the child process has another limit."""
    paths = [tmp_path / name for name in ("add", "slice-step", "gather-of-itself", "function")]
    for path in paths:
        path.write_bytes(BOMBS[path.name].SerializeToString())
    code = (
        "import resource, sys, onnx; from qdqtool.proto.shapes import infer_types;"
        "from qdqtool.util import limits; limits.ONNX_SECONDS = 1;"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30));"
        "[infer_types(onnx.load(path)) for path in sys.argv[1:]]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], timeout=300, capture_output=True
    )
    assert done.returncode == 0, done.stderr


# Types -------------------------------------------------------------------------------------------


def test_infer_types_follows_computed_shapes() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    types = infer_types(build(nodes, [value("x", (2, 8, 4, 4))], first=sizes(0), rest=sizes(128)))
    assert [d.dim_value for d in types["y"].tensor_type.shape.dim] == [2, 128]


@pytest.mark.parametrize(
    ("op", "outputs", "attributes", "sane"),
    [
        ("Flatten", 1, {"axis": 1}, True),
        ("Flatten", 1, {"axis": 1 << 31}, False),
        ("Constant", 1, {"value_int": 1 << 40}, True),
        ("Split", 2, {"num_outputs": 2}, True),
        ("Split", 2, {"num_outputs": 3}, False),
    ],
)
def test_has_sane_attributes(op: str, outputs: int, attributes: dict[str, int], sane: bool) -> None:
    node = helper.make_node(op, ["x"], [str(i) for i in range(outputs)], **attributes)
    assert has_sane_attributes(node) is sane


def test_infer_node_uses_types_and_values() -> None:
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    types = {"x": value("x", IMAGE).type, "s": value("s", [2], INT64).type}
    values = {"s": numpy_helper.from_array(sizes(4, 32), "s")}
    inferred = infer_node(node, types, 18, values)["y"].tensor_type
    assert [d.dim_value for d in inferred.shape.dim] == [4, 32]
    assert infer_node(helper.make_node("Own", ["x"], ["y"], domain="own"), types, 18, {}) == {}
    assert infer_node(node, {"x": types["x"], "s": value("s", [LONG], INT64).type}, 18, {}) == {}


IMAGE_DIMS, KERNEL, FLAT = [2, 6, 9, 10], [4, 6, 3, 3], [6]
POOLING: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
#: Input dimensions, number of outputs and attributes for each operator that the cache covers.
CACHED: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    **{op: ([IMAGE_DIMS, [6, 1, 1]], 1, {}) for op in ("Add", "Div", "Mul", "Sub")},
    **{
        op: ([IMAGE_DIMS], 1, {})
        for op in (
            "Clip GlobalAveragePool HardSigmoid HardSwish LeakyRelu Relu Sigmoid Softmax Tanh"
        ).split()
    },
    "AveragePool": ([IMAGE_DIMS], 1, POOLING),
    "MaxPool": ([IMAGE_DIMS], 1, POOLING),
    "BatchNormalization": ([IMAGE_DIMS, FLAT, FLAT, FLAT, FLAT], 1, {}),
    "Concat": ([IMAGE_DIMS, IMAGE_DIMS], 1, {"axis": -1}),
    "Conv": ([IMAGE_DIMS, KERNEL], 1, {"strides": [2, 1], "dilations": [1, 2]}),
    "ConvTranspose": ([IMAGE_DIMS, [6, 2, 3, 3]], 1, {"strides": [2, 2], "group": 2}),
    "Flatten": ([IMAGE_DIMS], 1, {"axis": 2}),
    "Gemm": ([[5, 6], [7, 6]], 1, {"transB": 1}),
    "MatMul": ([IMAGE_DIMS, [10, 3]], 1, {}),
    "Split": ([IMAGE_DIMS], 2, {"axis": 1}),
    "Transpose": ([IMAGE_DIMS], 1, {"perm": [0, 2, 3, 1]}),
}


def one_node(
    op: str, dims: list[list[int]], outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    inputs = [value(f"x{i}", d) for i, d in enumerate(dims)]
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, [v.name for v in inputs], names, **attributes)
    graph = helper.make_graph([node], "g", inputs, [value(name, None) for name in names])
    opset = helper.make_opsetid("", 17 if op == "Split" else 18)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)


@pytest.mark.parametrize("op", CACHED)
def test_node_type_cache_agrees_with_inference_of_the_model(op: str) -> None:
    dims, outputs, attributes = CACHED[op]
    proto = one_node(op, dims, outputs, **attributes)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    expected = [(FLOAT, tuple(d.dim_value for d in v.type.tensor_type.shape.dim)) for v in inferred]
    inputs = [(FLOAT, tuple(d)) for d in dims]
    assert NodeTypeCache(proto).infer_outputs(proto.graph.node[0], op, inputs) == expected


@pytest.mark.parametrize(
    "tensor_type",
    [(0, (2, 3)), (1, None), (1, (None, 3)), (1, (1,) * 65)],
    ids=["no-type", "no-shape", "open-dimension", "rank-65"],
)
def test_node_type_cache_needs_complete_types(tensor_type: Any) -> None:
    proto = one_node("Concat", [[2, 3]], axis=1)
    assert NodeTypeCache(proto).infer_outputs(proto.graph.node[0], "Concat", [tensor_type]) is None


def test_node_type_cache_skips_damaged_nodes_and_functions() -> None:
    damaged = one_node("Concat", [[2, 3]], axis=5)
    assert (
        NodeTypeCache(damaged).infer_outputs(damaged.graph.node[0], "Concat", [(1, (2, 3))]) is None
    )
    proto = one_node("Relu", [[2, 3]])
    proto.functions.add(name="Relu", domain="")
    assert NodeTypeCache(proto).infer_outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) is None


def test_model_type_is_inferred_again_if_the_file_contradicts_it() -> None:
    proto = one_node("Relu", [[2, 3]])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert Model(proto).tensor_type("y0") == (TensorProto.FLOAT16, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_onnx_crashes_without_the_check() -> None:
    """The child process is necessary, because onnx crashes on this model."""
    code = "import sys, onnx; onnx.shape_inference.infer_shapes(sys.stdin.buffer.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=CRASHES["conv"].SerializeToString(), capture_output=True
    )
    assert done.returncode < 0


def test_is_safe_refuses_vectors_of_huge_stated_length() -> None:
    """onnx propagates one symbolic entry for each element of a vector."""
    model = build([helper.make_node("Relu", ["x"], ["y"])], [value("x", IMAGE)])
    assert is_safe_to_infer(model)
    model.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.INT32, [1 << 31]))
    assert not is_safe_to_infer(model)
