"""Small models on which onnx's shape inference crashes or takes all memory, and others."""

from typing import Any

import numpy as np
import onnx

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
IMAGE = (1, 8, 4, 4)


def value(name: str, dims: Any, elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, elem_type, dims)


def build(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    opset: int = 18,
    functions: tuple[onnx.FunctionProto, ...] = (),
    **constants: Any,
) -> onnx.ModelProto:
    stored = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [value("y", None)], stored)
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("own", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)


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
    node = onnx.helper.make_node(op, inputs.split(" "), names, name="far", **attributes)
    slicing = onnx.helper.make_node("Slice", ["z", "begin", "end", "axis"], ["y"])
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
        [onnx.helper.make_node("Own", ["x"], ["y"], domain="own")], [value("x", IMAGE)]
    ),
}


LONG = 1 << 40


def on_vector(
    op: str, inputs: str = "x x", dims: Any = (LONG,), **arguments: Any
) -> onnx.ModelProto:
    constants = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
    attributes = {n: v for n, v in arguments.items() if n not in constants}
    node = onnx.helper.make_node(op, inputs.split(), ["y"], **attributes)
    return build([node], [value("x", dims, INT64)], **constants)


def repeated(op: str, count: int, dims: Any, **attributes: Any) -> onnx.ModelProto:
    nodes = [
        onnx.helper.make_node(op, [f"x{i}", f"x{i}"], [f"x{i + 1}"], **attributes)
        for i in range(count)
    ]
    return build(
        [*nodes, onnx.helper.make_node("Identity", [f"x{count}"], ["y"])],
        [value("x0", dims, INT64)],
    )


def two_nodes(first: onnx.NodeProto, op: str, dims: Any, **constants: Any) -> onnx.ModelProto:
    second = onnx.helper.make_node(
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
        [onnx.helper.make_node("Expand", ["x", "s"], ["y"])],
        [value("x", [1]), value("s", [LONG], INT64)],
    ),
    "reshape": two_nodes(
        onnx.helper.make_node("Reshape", ["x", "s"], ["v"]), "Add", (1 << 20, 1 << 20), s=sizes(-1)
    ),
    "constant-of-shape": two_nodes(
        onnx.helper.make_node("ConstantOfShape", ["s"], ["v"]), "Concat", (1,), s=sizes(LONG)
    ),
    "tile": two_nodes(
        onnx.helper.make_node("Tile", ["x", "r"], ["v"]), "Add", (8,), r=sizes(1 << 30)
    ),
    "pad": two_nodes(
        onnx.helper.make_node("Pad", ["x", "p"], ["v"]), "Mul", (8,), p=sizes(0, 1 << 30)
    ),
    "concat-of-itself": repeated("Concat", 40, [4], axis=0),
    "gather-of-itself": repeated("Gather", 40, [2, 2, 2, 2]),
    "gather-nd-of-itself": repeated("GatherND", 40, [2, 2, 2, 2]),
    "vectors-in-all-nodes": repeated("Add", 500, [60_000]),
    "function": build(
        [onnx.helper.make_node("F", ["x"], ["y"], domain="own")],
        [value("x", [LONG], INT64)],
        functions=(
            onnx.helper.make_function(
                "own",
                "F",
                ["a"],
                ["b"],
                [onnx.helper.make_node("Add", ["a", "a"], ["b"])],
                [onnx.helper.make_opsetid("", 18)],
            ),
        ),
    ),
}
