"""Stated types that contradict the nodes, and nodes that read too much or too little, end in no traceback."""

import onnx
import pytest
from onnx import TensorProto, helper

from qdqtool.commands.cli import run
from tools.growth.families import Net


def _state(model: onnx.ModelProto, **types: list[int]) -> onnx.ModelProto:
    model.graph.value_info.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in types.items()
    )
    return model


def _product_of_vectors() -> onnx.ModelProto:
    net = Net()
    row = net.pair(net.add("Relu", "x"))
    made = net.add("MatMul", row, row)
    return _state(net.done(made), **{row: [64], made: []})


def _products(source: list[int], weights: list[int], target: list[int], op: str) -> onnx.ModelProto:
    net = Net()
    left, right = net.pair(net.add("Relu", "x")), net.pair(net.add("Tanh", "x"))
    made = net.add(op, left, right)
    return _state(net.done(made), **{left: source, right: weights, made: target})


def _concat_of_scalars() -> onnx.ModelProto:
    net = Net()
    made = net.add("Concat", net.pair(net.add("Relu", "x")), net.pair(net.add("Tanh", "x")), axis=0)
    return _state(net.done(net.conv(made)), **{made: []})


def _product_of_three() -> onnx.ModelProto:
    net = Net()
    half = net.add("Cast", "x", to=TensorProto.FLOAT16)
    made = net.add("MatMul", half, half, half)
    return net.done(net.conv(net.add("Cast", made, to=TensorProto.FLOAT)))


def _transpose_of_scalars() -> onnx.ModelProto:
    net = Net()
    model = net.done(net.conv(net.pair(net.add("Transpose", net.conv("x")))))
    node = next(n for n in model.graph.node if n.op_type == "Transpose")
    node.attribute.add(name="perm", type=onnx.AttributeProto.INTS)
    return model


GRAPHS = {
    "a product of vectors": _product_of_vectors,
    "a Concat of scalars": _concat_of_scalars,
    "a product of three": _product_of_three,
    "a Transpose of scalars": _transpose_of_scalars,
    **{
        f"{op} of {source}, {weights} to {target}": lambda op=op, source=source, weights=weights, target=target: (
            _products(source, weights, target, op)
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
def test_contradictions(
    graph, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(GRAPHS[graph](), "m.onnx")
    for command in (
        "predict m.onnx --gpu T4",
        "predict m.onnx --gpu T4 --target rtx1.7",
        "predict m.onnx --target 11",
        "report m.onnx -o out.html --target rtx1.7",
    ):
        assert run(command.split()) in (0, 2), command
        assert "internal error" not in capsys.readouterr().err, command
