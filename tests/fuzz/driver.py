"""Builds random networks, predicts them, and holds one against the other."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper

from qdqtool.builders.child import Child
from qdqtool.builders.run import build_with, log_names, read_log
from qdqtool.model import modelfile
from qdqtool.rtx.predict import predict_rtx, status_of
from qdqtool.verification.build_model import BuiltModel, compare, mapped, status_agrees

TIMEOUT = 60.0
SM = (86,)


@dataclass
class Answer:
    """One network.

    Attributes:
        convolutions: Convolutions that both sides speak of (1 for a wrong status).
        wrong: (name, predicted, built) of each that disagrees; the name is empty for the status.
        absent: Convolutions without a layer of their own.
        status: What the compiler made of the model.
    """

    convolutions: int
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    absent: int = 0
    status: str = "built"


class Lab:
    """Compiles models in one child process, which is replaced when it dies."""

    def __init__(self) -> None:
        self.child = Child()
        self._folder = tempfile.TemporaryDirectory(prefix="qdqtool-fuzz-")
        self.work = Path(self._folder.name)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()
        self._folder.cleanup()

    def build(self, proto: onnx.ModelProto) -> BuiltModel:
        """Builds a model with TensorRT-RTX for SM86."""
        path = self.work / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        (self.work / "build.log").unlink(missing_ok=True)
        result = build_with(self.child, path, self.work, "tensorrt-rtx", SM, TIMEOUT)
        model = modelfile.load(proto)
        read_log(model, log_names(model), self.work, result)
        return mapped(result)

    def answer(self, proto: onnx.ModelProto) -> Answer:
        """Predicts and builds."""
        model = modelfile.load(proto)
        prediction = predict_rtx(model)
        result = self.build(proto)
        if not status_agrees(prediction, result):
            return Answer(1, [("", status_of(prediction), f"{result.status}: {result.message}")], 0, result.status)
        if result.status != "built":
            return Answer(1, [], 0, result.status)
        pairs = compare(prediction, result)
        told = [p for p in pairs if p.built is not None]
        wrong = [(p.predicted.name, str(p.predicted.precision), f"{p.built.precision} writing {p.built.output}")
                 for p in told if p.built is not None and not p.same_precision]
        return Answer(len(told), wrong, len(pairs) - len(told), "built")


def run(seeds: Iterator[int], make: Callable[[int], onnx.ModelProto], lab: Lab) -> Iterator[tuple[int, Answer]]:
    """Yields the answer for each seed."""
    for seed in seeds:
        yield seed, lab.answer(make(seed))


# Prints a network as a test case: a function that builds it with :class:`tests.fuzz.net.Net`.

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
