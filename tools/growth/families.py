"""Families of graphs of any size, to measure the growth of cost with the size."""

import zlib
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """Network under construction, with INT8 pairs and convolutions of eight channels."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.functions: list[onnx.FunctionProto] = []
        self._constant("zero", np.int8(0))
        self._constant("w", np.ones((8, 8, 1, 1), np.float32))

    def _constant(self, name: str, value: object) -> str:
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        name = f"n{len(self.nodes)}"
        results = [name, *(f"{name}.{i}" for i in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), results, name=name, **attributes))
        return name

    def pair(self, x: str, scale: float = 0.5) -> str:
        number = self._constant(f"s{scale}", np.float32(scale))
        return self.add(
            "DequantizeLinear", self.add("QuantizeLinear", x, number, "zero"), number, "zero"
        )

    def conv(self, x: str, scale: float = 0.5) -> str:
        return self.add("Conv", self.pair(x, scale), self.pair("w"))

    def done(self, *outputs: str) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 4, 4])]
        values = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, values, list(self.weights.values()))
        opsets = [
            helper.make_opsetid("", 17),
            *(helper.make_opsetid(f.domain, 1) for f in self.functions),
        ]
        return helper.make_model(
            graph, opset_imports=opsets, functions=self.functions, ir_version=8
        )


Family = Callable[[int], onnx.ModelProto]  # returns the model with a number of nodes
Step = Callable[[Net, str], str]  # adds nodes after a tensor, and returns the last tensor


def repeated(step: Step) -> Family:
    """Return the family with a convolution, repeated steps, a pair and a convolution."""

    def build(size: int) -> onnx.ModelProto:
        net = Net()
        tensor = net.conv("x")
        begin = len(net.nodes)
        while len(net.nodes) < begin + size:
            tensor = step(net, tensor)
        return net.done(net.conv(tensor))

    return build


def node(op: str, *others: object, outputs: int = 1, **attributes: object) -> Step:
    def add(net: Net, tensor: str) -> str:
        names = [
            net._constant(f"{op}.{zlib.crc32(np.asarray(value).tobytes())}", value)
            for value in others
        ]
        return net.add(op, tensor, *names, outputs=outputs, **attributes)

    return add


def chain(op: str, *others: object, **attributes: object) -> Family:
    """Return the family with a chain of one operator."""
    return repeated(node(op, *others, **attributes))


def in_turn(*steps: Step) -> Family:
    """Return the family with several steps in turn.

    The last step restores the shape that the tensor had before the first step.
    """

    def add(net: Net, tensor: str) -> str:
        for step in steps:
            tensor = step(net, tensor)
        return tensor

    return repeated(add)


def quantized(*steps: Step) -> Family:
    return in_turn(Net.pair, *steps)


def product(net: Net, tensor: str) -> str:
    return net.add("MatMul", tensor, net.pair(net._constant("w4", np.ones((4, 4), np.float32))))


def gemm(net: Net, tensor: str) -> str:
    return net.add("Gemm", tensor, net.pair(net._constant("w8", np.ones((8, 8), np.float32))))


def deconvolution(net: Net, tensor: str) -> str:
    return net.add("ConvTranspose", tensor, net.pair("w"))


def attention(net: Net, tensor: str) -> str:
    turned = net.pair(net.add("Transpose", tensor, perm=[0, 1, 3, 2]))
    return net.add(
        "MatMul", net.pair(net.add("Softmax", net.add("MatMul", net.pair(tensor), turned))), turned
    )


def resize(by: float) -> Step:
    def add(net: Net, tensor: str) -> str:
        return net.add(
            "Resize", tensor, "", net._constant(f"by {by}", np.array([1, 1, by, by], np.float32))
        )

    return add


def squeeze_excitation(net: Net, tensor: str) -> str:
    return net.add("Mul", tensor, net.add("ReduceMean", tensor, axes=[2, 3]))


def where(net: Net, tensor: str) -> str:
    mask = net._constant("mask", np.ones((1, 8, 4, 4), bool))
    return net.add("Where", mask, tensor, net._constant("one", np.float32(1)))


def reshape_by_shape(net: Net, tensor: str) -> str:
    """Join all but the first two dimensions and restore them, in the form of exporters."""
    shape = net.add("Shape", tensor)
    kept = net.add("Slice", shape, *(net._constant(f"{i}", np.array([i])) for i in (0, 2)))
    joined = net.add(
        "Reshape", tensor, net.add("Concat", kept, net._constant("-1", np.array([-1])), axis=0)
    )
    return net.add("Reshape", joined, shape)


def shape_products(size: int) -> onnx.ModelProto:
    """Return a chain of products of a shape with one.

    Reshapes after a pair consume half of the products.
    """
    net = Net()
    last = net.conv("x")
    shape = net.add("Shape", last)
    for i in range(size // 3):
        shape = net.add("Mul", shape, net._constant("1", np.array([1])))
        last = net.add("Reshape", net.pair(last), shape) if i % 2 else last
    return net.done(net.conv(last))


def _output(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def nested_ifs(size: int) -> onnx.ModelProto:
    """Return groups of eight nested Ifs, with a pair after each group."""
    net = Net()
    last, condition = net.conv("x"), net._constant("c", np.asarray(True))
    for _ in range(size // 18):
        inner = helper.make_node("Relu", [last], ["z"])
        for _ in range(8):
            other = helper.make_graph(
                [helper.make_node("Neg", [last], ["z"])], "b", [], [_output("z")]
            )
            same = helper.make_graph([inner], "a", [], [_output("z")])
            inner = helper.make_node("If", [condition], ["z"], then_branch=same, else_branch=other)
        last = net.pair(net.add("If", condition, **{a.name: a.g for a in inner.attribute}))
    return net.done(net.conv(last))


def loop(net: Net, tensor: str) -> str:
    number, go, on = (
        helper.make_tensor_value_info(name, kind, [])
        for name, kind in (
            ("i", TensorProto.INT64),
            ("go", TensorProto.BOOL),
            ("on", TensorProto.BOOL),
        )
    )
    turn = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["a"], ["b"])]
    body = helper.make_graph(turn, "body", [number, go, _output("a")], [on, _output("b")])
    twice, always = net._constant("twice", np.int64(2)), net._constant("c", np.asarray(True))
    return net.pair(net.add("Loop", twice, always, tensor, body=body))


def function(net: Net, tensor: str) -> str:
    """Call a local function with a pair, a convolution and a Relu."""
    if not net.functions:
        inner = [
            helper.make_node("QuantizeLinear", ["a", "s", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["d"]),
            helper.make_node("Conv", ["d", "w"], ["e"]),
            helper.make_node("Relu", ["e"], ["b"]),
        ]
        inputs = ["a", "s", "zero", "w"]
        opsets = [helper.make_opsetid("", 17)]
        net.functions.append(helper.make_function("own", "Block", inputs, ["b"], inner, opsets))
    scale = net._constant("s0.5", np.float32(0.5))
    return net.add("Block", tensor, scale, "zero", net.pair("w"), domain="own")


def pairs(size: int) -> onnx.ModelProto:
    net = Net()
    last = "x"
    for i in range(size // 2):
        last = net.pair(last, 0.5 + i % 7)
    return net.done(net.conv(last))


def constants(size: int) -> onnx.ModelProto:
    """Return a chain of Identities of a scale. Each becomes a constant with a longer name.

    Pairs consume some of the constants.
    """
    net = Net()
    last, scale = net.conv("x"), "s0.5"
    for i in range(size):
        scale = net.add("Identity", scale)
        if i % 16 == 0:
            last = net.add(
                "DequantizeLinear", net.add("QuantizeLinear", last, scale, "zero"), scale, "zero"
            )
    return net.done(net.conv(last))


def weights(op: str, **attributes: object) -> Family:
    """Return the family with a chain of one operator on a weight.

    Convolutions consume half of the results.
    """

    def build(size: int) -> onnx.ModelProto:
        net = Net()
        last, weight = net.conv("x"), "w"
        shape = net._constant("shape", np.array([8, 8, 1, 1]))
        for i in range(size // 4):
            weight = net.add(op, weight, *([shape] if op == "Reshape" else []), **attributes)
            last = net.add("Conv", net.pair(last), net.pair(weight)) if i % 2 else last
        return net.done(net.conv(last))

    return build


def split_weight(size: int) -> onnx.ModelProto:
    net, count = Net(), size // 5
    last = "x"
    net._constant("all", np.ones((8 * count, 8, 1, 1), np.float32))
    part = net.add("Split", "all", outputs=count, axis=0)
    for i in range(count):
        last = net.add("Conv", net.pair(last), net.pair(f"{part}.{i}" if i else part))
    return net.done(last)


def transposed_weight(size: int) -> onnx.ModelProto:
    """Return Transposes after the pair of a weight. Convolutions consume half of the results."""
    net = Net()
    last, weight = net.conv("x"), net.pair("w")
    for i in range(size // 3):
        weight = net.add("Transpose", weight, perm=[1, 0, 2, 3])
        last = net.add("Conv", net.pair(last), weight) if i % 2 else last
    return net.done(net.conv(last))


def shared_weight(size: int) -> onnx.ModelProto:
    net = Net()
    last, weight = "x", net.pair("w")
    for i in range(size // 4):
        last = net.add("Relu" if i % 2 else "Tanh", net.add("Conv", net.pair(last), weight))
    return net.done(last)


def convolutions(size: int) -> onnx.ModelProto:
    net = Net()
    last = "x"
    for _ in range(size // 6):
        last = net.add("Relu", net.conv(last))
    return net.done(last)


def partly_quantized(size: int) -> onnx.ModelProto:
    """Return convolutions. Every second convolution has no pair, and so a finding."""
    net = Net()
    last = "x"
    for i in range(size // 4):
        last = net.add("Relu", net.conv(last) if i % 2 else net.add("Conv", last, "w"))
    return net.done(last)


def silu(size: int) -> onnx.ModelProto:
    net = Net()
    last = "x"
    for _ in range(size // 7):
        result = net.conv(last)
        last = net.add("Mul", result, net.add("Sigmoid", result))
    return net.done(last)


def residual(size: int) -> onnx.ModelProto:
    net = Net()
    last = net.conv("x")
    for _ in range(size // 6):
        last = net.add("Add", last, net.conv(last))
    return net.done(last)


def pooled_residual(size: int) -> onnx.ModelProto:
    """Return float sums of tensors and their poolings before a float convolution."""
    net = Net()
    last = net.conv("x")
    for _ in range(size // 2):
        last = net.add("Add", last, net.add("MaxPool", last, kernel_shape=[3, 3], pads=[1] * 4))
    return net.done(net.add("Conv", last, "w"))


def mesh(size: int) -> onnx.ModelProto:
    """Return the sum and the product of two tensors at each level, with a pair after the sum."""
    net = Net()
    a = b = net.conv("x")
    for _ in range(size // 4):
        a, b = net.pair(net.add("Add", a, b)), net.add("Mul", a, b)
    return net.done(net.conv(net.add("Add", a, b)))


def split_concat(size: int) -> onnx.ModelProto:
    """Return Splits into halves that a Concat joins, as in ShuffleNet, with a pair at the end."""
    net = Net()
    last = net.conv("x")
    for _ in range(size // 2):
        half = net.add("Split", last, outputs=2, axis=1)
        last = net.add("Concat", half, f"{half}.1", axis=1)
    return net.done(net.conv(last))


def c2f(size: int) -> onnx.ModelProto:
    net = Net()
    last = net.conv("x")
    net._constant("w4", np.ones((4, 4, 1, 1), np.float32))
    net._constant("w12", np.ones((8, 12, 1, 1), np.float32))
    for _ in range(size // 14):
        half = net.add("Split", net.conv(last), outputs=2, axis=1)
        inner = net.add("Conv", net.pair(f"{half}.1"), net.pair("w4"))
        last = net.add(
            "Conv", net.pair(net.add("Concat", half, f"{half}.1", inner, axis=1)), net.pair("w12")
        )
    return net.done(last)


def lattice(size: int) -> onnx.ModelProto:
    """Return a chain of Concats. The inputs of a Concat are the two Concats before."""
    net = Net()
    before, last = net.conv("x"), net.conv("x")
    for _ in range(size):
        before, last = last, net.add("Concat", before, last, axis=3)
    return net.done(net.pair(last))


def diamonds(size: int) -> onnx.ModelProto:
    """Return a chain of Concats of a tensor with itself.

    A Split after each Concat restores the size of the tensor.
    """
    net = Net()
    last = net.conv("x")
    for _ in range(size // 2):
        half = net.add("Split", net.add("Concat", last, last, axis=1), outputs=2, axis=1)
        last = half
    return net.done(net.conv(last))


def concat_of_itself(size: int) -> onnx.ModelProto:
    net = Net()
    last = net.conv("x")
    for _ in range(size):
        last = net.add("Concat", last, last, axis=3)
    return net.done(net.pair(last))


def concat_of_pairs(size: int) -> onnx.ModelProto:
    """Return a chain of Concats that join the Concat before and its pair. The scales change."""
    net = Net()
    last = net.conv("x")
    for i in range(size // 3):
        last = net.add("Concat", net.pair(last, 0.5 + i % 3), last, axis=3)
    return net.done(net.pair(last))


def concat_with_root(size: int) -> onnx.ModelProto:
    net = Net()
    root = last = net.conv("x")
    for _ in range(size):
        last = net.add("Concat", last, root, axis=3)
    return net.done(net.pair(last))


def rolling_concat(size: int) -> onnx.ModelProto:
    """Return a chain of Concats. Each extends the Concat before.

    A convolution with its own scale consumes each Concat.
    """
    net, outputs = Net(), []
    last = net.conv("x")
    for i in range(size // 6):
        last = net.add("Concat", last, "x", axis=3)
        outputs.append(net.conv(last, 0.5 + i % 50))
    return net.done(*outputs)


def dense_net(size: int) -> onnx.ModelProto:
    """Return convolutions. Each consumes the outputs of all convolutions before."""
    net = Net()
    last = net.conv("x")
    for i in range(size // 6):
        width = 8 * (i + 1)
        net._constant(f"w{width}", np.ones((8, width, 1, 1), np.int8))
        number = net._constant("s0.5", np.float32(0.5))
        result = net.add(
            "Conv", net.pair(last), net.add("DequantizeLinear", f"w{width}", number, "zero")
        )
        last = net.add("Concat", last, result, axis=1)
    return net.done(net.pair(last))


def fan_out(size: int, same: bool = False) -> onnx.ModelProto:
    """Return convolutions that consume one tensor, with different scales if `same` is False."""
    net = Net()
    last = net.conv("x")
    ends = [net.conv(last, 0.5 if same else 0.5 + i / 1000) for i in range(size // 5)]
    return net.done(*ends)


def wide_concat(size: int) -> onnx.ModelProto:
    net = Net()
    first = net.conv("x")
    parts = [net.add("Relu", first) for _ in range(size)]
    return net.done(net.pair(net.add("Concat", *parts, axis=3)))


def wide_split(size: int) -> onnx.ModelProto:
    net = Net()
    first = net.add("Concat", *[net.conv("x")] * size, axis=1)
    parts = net.add("Split", first, outputs=size, axis=1)
    ends = [net.pair(parts if i == 0 else f"{parts}.{i}", 0.5 + i % 5) for i in range(size)]
    return net.done(*ends)


def consumed_along(op: str, **attributes: object) -> Family:
    """Return the family with a chain of one operator whose results are quantized.

    A pair with one of thirteen scales consumes each result.
    """

    def build(size: int) -> onnx.ModelProto:
        net, ends = Net(), []
        last = net.conv("x")
        for i in range(size // 4):
            last = net.add(op, last, **attributes)
            ends.append(net.pair(last, 0.5 + i % 13))
        return net.done(*ends)

    return build


def split_joined(size: int) -> onnx.ModelProto:
    """Return Concats of the parts of one Split. Each Concat has a pair with its own scale."""
    net = Net()
    first = net.add("Split", net.conv("x"), outputs=8, axis=1)
    parts = [first, *(f"{first}.{i}" for i in range(1, 8))]
    return net.done(
        *[net.pair(net.add("Concat", *parts, axis=1), 0.5 + i) for i in range(size // 3)]
    )


def crossed_concats(size: int) -> onnx.ModelProto:
    """Return levels of two Concats.

    They join the two Concats of the level before, in both orders.
    """
    net = Net()
    a, b = net.conv("x"), net.conv("x")
    for _ in range(size // 2):
        a, b = net.add("Concat", a, b, axis=3), net.add("Concat", b, a, axis=3)
    return net.done(net.pair(a), net.pair(b, 1.5))


def crossed_concats_with_pairs(size: int) -> onnx.ModelProto:
    """Return the crossed Concats with a pair before one input of each Concat.

    The scales change.
    """
    net = Net()
    a, b = net.conv("x"), net.conv("x")
    for i in range(size // 8):
        a, b = (
            net.add("Concat", net.pair(a, 0.5 + i % 3), b, axis=3),
            net.add("Concat", net.pair(b, 0.5 + i % 5), a, axis=3),
        )
    return net.done(net.pair(a), net.pair(b, 1.5))


def branches(size: int) -> onnx.ModelProto:
    net = Net()
    last = net.conv("x")
    net._constant("c", np.asarray(True))
    for _ in range(size // 3):
        inner = [
            helper.make_graph([helper.make_node(op, [last], ["z"])], "b", [], [_output("z")])
            for op in ("Relu", "Neg")
        ]
        last = net.pair(net.add("If", "c", then_branch=inner[0], else_branch=inner[1]))
    return net.done(net.conv(last))


TO_IMAGE = node("Reshape", np.array([1, 8, 4, 4]))
FAMILIES: dict[str, Family] = {
    "Relu": chain("Relu"),
    "Sigmoid": chain("Sigmoid"),
    "Add": chain("Add", np.ones((1, 8, 1, 1), np.float32)),
    "Mul": chain("Mul", np.ones((1, 8, 1, 1), np.float32)),
    "Transpose": chain("Transpose", perm=[0, 1, 3, 2]),
    "MaxPool": chain("MaxPool", kernel_shape=[1, 1]),
    "Softmax": chain("Softmax"),
    "pairs": pairs,
    "constants": constants,
    "Casts of a weight": weights("Cast", to=TensorProto.FLOAT),
    "Transposes of a weight": weights("Transpose", perm=[1, 0, 2, 3]),
    "Reshapes of a weight": weights("Reshape"),
    "parts of a weight": split_weight,
    "Transposes of a dequantized weight": transposed_weight,
    "one pair of weights": shared_weight,
    "convolutions": convolutions,
    "partly quantized": partly_quantized,
    "SiLU": silu,
    "residual": residual,
    "mesh": mesh,
    "Split and Concat": split_concat,
    "C2f": c2f,
    "lattice": lattice,
    "diamonds": diamonds,
    "Concat of itself": concat_of_itself,
    "Concat with the root": concat_with_root,
    "rolling Concat": rolling_concat,
    "Concat of pairs": concat_of_pairs,
    "DenseNet": dense_net,
    "fan-out": fan_out,
    "fan-out, equal": lambda size: fan_out(size, same=True),
    "wide Concat": wide_concat,
    "wide Split": wide_split,
    "wide Split with own scales": split_joined,
    "crossed Concats": crossed_concats,
    "crossed Concats with pairs": crossed_concats_with_pairs,
    "If": branches,
    "MaxPool, read along": consumed_along("MaxPool", kernel_shape=[1, 1]),
    "Identity": chain("Identity"),
    "Cast": chain("Cast", to=TensorProto.FLOAT),
    "Slice": chain("Slice", np.array([3]), np.array([-5]), np.array([3]), np.array([-1])),
    "Gather": chain("Gather", np.arange(8)[::-1], axis=1),
    "Expand": chain("Expand", np.array([1, 8, 4, 4])),
    "Clip": chain("Clip", np.float32(0), np.float32(6)),
    "PRelu": chain("PRelu", np.ones((8, 1, 1), np.float32)),
    "TopK": chain("TopK", np.array([4]), outputs=2),
    "Flatten": in_turn(node("Flatten"), TO_IMAGE),
    "Tile": chain("Tile", np.ones(4, np.int64)),
    "GridSample": chain("GridSample", np.zeros((1, 4, 4, 2), np.float32)),
    "AveragePool": chain("AveragePool", kernel_shape=[1, 1]),
    "Where": repeated(where),
    "Pad and Slice": in_turn(
        node("Pad", np.array([0, 0, 0, 1] * 2)),
        node("Slice", np.array([1]), np.array([5]), np.array([3])),
    ),
    "Reshape": in_turn(node("Reshape", np.array([1, 8, 16])), TO_IMAGE),
    "Squeeze": in_turn(node("Squeeze", np.array([0])), node("Unsqueeze", np.array([0]))),
    "DepthToSpace": in_turn(node("DepthToSpace", blocksize=2), node("SpaceToDepth", blocksize=2)),
    "Resize": in_turn(resize(2), resize(0.5)),
    "Transposes and Reshapes": in_turn(
        node("Transpose", perm=[0, 2, 3, 1]),
        node("Reshape", np.array([1, 16, 8])),
        node("Transpose", perm=[0, 2, 1]),
        TO_IMAGE,
    ),
    "MatMul": quantized(product),
    "attention": repeated(attention),
    "ConvTranspose": quantized(deconvolution),
    "Gemm": quantized(node("Reshape", np.array([16, 8])), gemm, TO_IMAGE),
    "LayerNormalization": quantized(node("LayerNormalization", np.ones(4, np.float32))),
    "InstanceNormalization": quantized(
        node("InstanceNormalization", *[np.ones(8, np.float32)] * 2)
    ),
    "BatchNormalization": quantized(node("BatchNormalization", *[np.ones(8, np.float32)] * 4)),
    "Einsum": quantized(node("Einsum", np.ones((4, 4), np.float32), equation="bchw,wv->bchv")),
    "ReduceMean": quantized(squeeze_excitation),
    "Shape": repeated(reshape_by_shape),
    "sizes": shape_products,
    "Shapes between pairs": quantized(reshape_by_shape),
    "nested Ifs": nested_ifs,
    "Loops": repeated(loop),
    "functions": repeated(function),
    "pooled residual": pooled_residual,
}
