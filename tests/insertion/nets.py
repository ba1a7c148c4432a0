"""Small float graphs for the tests of insertion."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from qdqtool.commands import demo_run
from qdqtool.model.graph import Model

Array = npt.NDArray[Any]


class Net:
    """Collects nodes; every method returns the tensor it makes. Weights are random but deterministic."""

    def __init__(
        self, channels: int = 16, side: int = 8, *, batch: int | str = 1, seed: int = 0
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs = [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, channels, side, side])
        ]
        self.outputs: list[onnx.ValueInfoProto] = []
        self.rng = np.random.default_rng(seed)

    def const(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(self, op: str, name: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        made = [f"{name}.out{i}" if i else f"{name}.out" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=name, **attributes))
        return made if outputs > 1 else made[0]

    def conv(
        self,
        name: str,
        tensor: str,
        cin: int = 16,
        cout: int = 16,
        kernel: int = 3,
        *,
        group: int = 1,
        bias: bool = True,
        stride: int = 1,
        weight: str = "",
    ) -> str:
        if not weight:
            shape = (cout, cin // group, kernel, kernel)
            scale = 1.0 / np.sqrt(np.prod(shape[1:]))
            weight = self.const(f"{name}.weight", self.rng.standard_normal(shape) * scale)
        inputs = [tensor, weight]
        if bias:
            inputs.append(self.const(f"{name}.bias", self.rng.standard_normal(cout) * 0.1))
        return self.op(
            "Conv",
            name,
            *inputs,
            kernel_shape=[kernel] * 2,
            pads=[kernel // 2] * 4,
            group=group,
            strides=[stride] * 2,
        )

    def silu(self, name: str, tensor: str) -> str:
        return self.op("Mul", f"{name}/Mul", tensor, self.op("Sigmoid", f"{name}/Sigmoid", tensor))

    def norm(self, name: str, tensor: str, channels: int = 16) -> str:
        r = self.rng
        return self.op(
            "BatchNormalization",
            name,
            tensor,
            self.const(f"{name}.gamma", r.uniform(0.5, 1.5, channels)),
            self.const(f"{name}.beta", r.standard_normal(channels) * 0.2),
            self.const(f"{name}.mean", r.standard_normal(channels) * 0.2),
            self.const(f"{name}.var", r.uniform(0.5, 2.0, channels)),
            epsilon=1e-3,
        )

    def output(self, *tensors: str, dtype: int = TensorProto.FLOAT) -> None:
        for tensor in tensors:
            value = helper.make_empty_tensor_value_info(tensor)
            value.type.tensor_type.elem_type = dtype
            self.outputs.append(value)

    def model(self, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = ir
        inferred = onnx.shape_inference.infer_shapes(model)
        for value in inferred.graph.output:
            assert value.type.tensor_type.HasField("shape")
        return inferred

    def open_model(self, opset: int = 17) -> onnx.ModelProto:
        """With outputs of unknown shape, and maybe operators of the domain ``example``."""
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.initializers)
        domains = [helper.make_opsetid("", opset), helper.make_opsetid("example", 1)]
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=domains, ir_version=9)
        )

    def index(self) -> Model:
        return Model(self.model())


@functools.cache
def detector(classes: int = 2) -> onnx.ModelProto:
    """The kinds of nodes of a YOLOv8 and its whole head, in half of its convolutions; ``images`` [1, 3, 64, 64].

    27 of its 31 convolutions become INT8: not the last ones of the boxes and the DFL. Nobody changes it.
    """
    net = demo_run.YoloBuilder(0, "silu")
    x = net.conv("/model.1", net.conv("/model.0", "images", 3, 8, 3, 2), 8, 16, 3, 2)
    p3 = net.c2f("/model.4", net.conv("/model.3", x, 16, 16, 3, 2), 16, 32, 1, True)
    p4 = net.conv("/model.5", p3, 32, 16, 3, 2)
    p5 = net.sppf("/model.9", net.conv("/model.7", p4, 16, 32, 3, 2), 32)
    n4 = net.conv(
        "/model.12", net.concat("/model.11/Concat", [net.upsample("/model.10", p5), p4]), 48, 16
    )
    demo_run.add_head(net, [(p3, 32), (n4, 16), (p5, 32)], 64, classes)
    return net.finish(64, classes)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with Constant nodes instead of initializers."""
    copy = copied(model)
    constants = copy.graph.initializer
    made = [
        helper.make_node("Constant", [], [t.name], f"{t.name}/Constant", value=t) for t in constants
    ]
    nodes = [*made, *copy.graph.node]
    del copy.graph.initializer[:]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def images(
    count: int = 4, channels: int = 16, side: int = 8, name: str = "x", seed: int = 1
) -> list[dict[str, Array]]:
    """Samples with values of about 0 to 1."""
    rng = np.random.default_rng(seed)
    return [{name: rng.random((1, channels, side, side), np.float32)} for _ in range(count)]


def run(
    model: onnx.ModelProto, feeds: dict[str, Array], outputs: list[str] | None = None
) -> list[Array]:
    """Outputs of a model on the CPU, with onnxruntime's own Q/DQ rewriting switched off."""
    return list(_session(model.SerializeToString()).run(outputs, feeds))


@functools.lru_cache(4)  # most are run with several samples, in turn with another
def _session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        1  # more wait busily for each other, three times as long as a small network takes
    )
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def check(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)


def in_half(model: onnx.ModelProto, keep: Sequence[str] = ()) -> onnx.ModelProto:
    """The same in float16 altogether, inputs and outputs included, but for the initializers to keep."""
    result = copied(model)
    for tensor in result.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in keep:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for attribute in (a for n in result.graph.node if n.op_type == "Cast" for a in n.attribute):
        attribute.i = TensorProto.FLOAT16
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    check(result)
    return result


def nodes_of(model: onnx.ModelProto, *ops: str) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type in ops]


def value_of(model: onnx.ModelProto, name: str) -> Array:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))
