"""Prints a network as a test case: a function that builds it with :class:`tests.fuzz.net.Net`."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper, numpy_helper

_SMALL = 16  # elements; larger constants are drawn at random in the case


def as_case(proto: onnx.ModelProto, name: str, note: str = "") -> str:
    """Python source of a function that makes the network again (large constants with other values)."""
    opset = proto.opset_import[0].version
    variables: dict[str, str] = {"": '""'}
    lines = [f"def {name}() -> onnx.ModelProto:", f'    """{note}"""', f"    net = Net(opset={opset})"]

    def define(tensor: str, text: str) -> None:
        variables[tensor] = f"t{len(variables)}"
        lines.append(f"    {variables[tensor]} = {text}")

    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = tuple(d.dim_value for d in kind.shape.dim)
        define(value.name, f"net.input({shape}, TensorProto.{onnx.TensorProto.DataType.Name(kind.elem_type)})")
    for tensor in proto.graph.initializer:
        define(tensor.name, _constant(tensor))
    for node in proto.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            define(node.output[0], _constant(attributes["value"]))
            continue
        arguments = [repr(node.op_type), *(variables[i] for i in node.input)]
        arguments += [f"{k}={_literal(v)}" for k, v in attributes.items()]
        if len(node.output) > 1:
            arguments.append(f"outputs={len(node.output)}")
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            arguments.append(f"name={node.name!r}")
        if len(node.output) == 1:
            define(node.output[0], f"net.op({', '.join(arguments)})")
        else:
            for output in node.output:
                variables[output] = f"t{len(variables)}"
            lines.append(f"    {', '.join(variables[o] for o in node.output)} = net.ops({', '.join(arguments)})")
    outputs = ", ".join(variables[o.name] for o in proto.graph.output)
    return "\n".join([*lines, f"    return net.model({outputs})", ""])


def _literal(value: Any) -> str:
    return repr(value.decode()) if isinstance(value, bytes) else repr(value)


def _constant(tensor: onnx.TensorProto) -> str:
    array = numpy_helper.to_array(tensor)
    if array.size <= _SMALL:
        return f"net.const(np.array({array.tolist()!r}, np.{array.dtype}), np.{array.dtype})"
    if array.dtype.kind == "f":
        return f"net.const(net.random.normal(0, 0.2, {array.shape}), np.{array.dtype})"
    return f"net.const(net.random.integers(-100, 100, {array.shape}).astype(np.{array.dtype}), np.{array.dtype})"
