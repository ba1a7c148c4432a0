import functools
from pathlib import Path

import onnx
import pytest

from tests.commands.conftest import Cli
from tools.growth.families import Net


def with_types(model: onnx.ModelProto, **types: list[int]) -> onnx.ModelProto:
    model.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, d) for n, d in types.items()
    )
    return model


def product_of_vectors(net: Net) -> onnx.ModelProto:
    row = net.pair(net.add("Relu", "x"))
    output = net.add("MatMul", row, row)
    return with_types(net.done(output), **{row: [64], output: []})


def product(
    source: list[int], weights: list[int], target: list[int], op: str, net: Net
) -> onnx.ModelProto:
    left, right = net.pair(net.add("Relu", "x")), net.pair(net.add("Tanh", "x"))
    output = net.add(op, left, right)
    return with_types(net.done(output), **{left: source, right: weights, output: target})


def concat_of_scalars(net: Net) -> onnx.ModelProto:
    output = net.add(
        "Concat", net.pair(net.add("Relu", "x")), net.pair(net.add("Tanh", "x")), axis=0
    )
    return with_types(net.done(net.conv(output)), **{output: []})


def product_of_three(net: Net) -> onnx.ModelProto:
    half = net.add("Cast", "x", to=onnx.TensorProto.FLOAT16)
    output = net.add("MatMul", half, half, half)
    return net.done(net.conv(net.add("Cast", output, to=onnx.TensorProto.FLOAT)))


def transpose_of_scalars(net: Net) -> onnx.ModelProto:
    model = net.done(net.conv(net.pair(net.add("Transpose", net.conv("x")))))
    next(n for n in model.graph.node if n.op_type == "Transpose").attribute.add(
        name="perm", type=onnx.AttributeProto.INTS
    )
    return model


GRAPHS = {
    "a product of vectors": product_of_vectors,
    "a Concat of scalars": concat_of_scalars,
    "a product of three": product_of_three,
    "a Transpose of scalars": transpose_of_scalars,
    **{
        f"{op} of {source}, {weights} to {target}": functools.partial(
            product, source, weights, target, op
        )
        for op in ("MatMul", "Gemm", "Conv", "ConvTranspose")
        for source, weights, target in (
            ([], [4, 4], [4]),
            ([8], [8, 8, 1, 1], [1, 8, 4, 4]),
            ([4], [], [4, 4]),
            ([1, 8, 4, 4], [8, 8, 1, 1], []),
        )
    },
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_contradiction_ends_without_traceback(graph: str, current_folder: Path, cli: Cli) -> None:
    onnx.save(GRAPHS[graph](Net()), "m.onnx")
    for command in (
        "predict m.onnx --gpu T4",
        "predict m.onnx --gpu T4 --target rtx1.7",
        "predict m.onnx --target 11",
        "report m.onnx -o out.html --target rtx1.7",
    ):
        code, _ = cli.run(*command.split())
        assert code in (0, 2) and "Traceback" not in cli.err, command
