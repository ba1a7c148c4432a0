import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from qdqtool import ConvOutcome, Insertion, Precision, Prediction
from qdqtool.demo.network import YoloBuilder, add_head
from qdqtool.insertion.exclusion_costs import remove_pair
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import ModelInfo

Array = npt.NDArray[Any]


class Net:
    """Network under construction.

    Methods that add nodes return the output tensor. Weights are seeded.
    """

    def __init__(
        self, channels: int = 16, side: int = 8, *, batch: int | str = 1, seed: int = 0
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs = [
            onnx.helper.make_tensor_value_info(
                "x", onnx.TensorProto.FLOAT, [batch, channels, side, side]
            )
        ]
        self.outputs: list[onnx.ValueInfoProto] = []
        self.rng = np.random.default_rng(seed)

    def const(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(self, op: str, name: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        tensors = [f"{name}.out{i}" if i else f"{name}.out" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(op, list(inputs), tensors, name=name, **attributes))
        return tensors if outputs > 1 else tensors[0]

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

    def reshape(self, name: str, tensor: str, *shape: int) -> str:
        return self.op("Reshape", name, tensor, self.const(f"{name}.shape", shape, np.int64))

    def choice(self, name: str, branch: Callable[[str], onnx.GraphProto]) -> str:
        branches = {f"{side}_branch": branch(side) for side in ("then", "else")}
        return self.op("If", name, self.const(f"{name}.condition", True, np.bool_), **branches)

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

    def output(self, *tensors: str, dtype: int = onnx.TensorProto.FLOAT) -> Self:
        for tensor in tensors:
            value = onnx.helper.make_empty_tensor_value_info(tensor)
            value.type.tensor_type.elem_type = dtype
            self.outputs.append(value)
        return self

    def model(self, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
        graph = onnx.helper.make_graph(
            self.nodes, "net", self.inputs, self.outputs, self.initializers
        )
        domains = [onnx.helper.make_opsetid("", opset)]
        inferred = onnx.shape_inference.infer_shapes(
            onnx.helper.make_model(graph, opset_imports=domains, ir_version=ir)
        )
        for value in inferred.graph.output:
            assert value.type.tensor_type.HasField("shape")
        return inferred

    def open_model(self, opset: int = 17) -> onnx.ModelProto:
        graph = onnx.helper.make_graph(
            self.nodes, "net", self.inputs, self.outputs, self.initializers
        )
        domains = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("example", 1)]
        return onnx.shape_inference.infer_shapes(
            onnx.helper.make_model(graph, opset_imports=domains, ir_version=9)
        )

    def index(self) -> Model:
        return Model(self.model())


@functools.cache
def detector(classes: int = 2) -> onnx.ModelProto:
    """Return a small YOLOv8 with its whole head and 31 convolutions.

    The input is ``images`` [1, 3, 64, 64].

    Insertion quantizes 27 convolutions: all but the last of each box branch and the DFL. The model
    is shared between tests, which must not change it.
    """
    net = YoloBuilder(0, "silu")
    x = net.add_conv("/model.1", net.add_conv("/model.0", "images", 3, 8, 3, 2), 8, 16, 3, 2)
    p3 = net.add_c2f("/model.4", net.add_conv("/model.3", x, 16, 16, 3, 2), 16, 32, 1, True)
    p4 = net.add_conv("/model.5", p3, 32, 16, 3, 2)
    p5 = net.add_sppf("/model.9", net.add_conv("/model.7", p4, 16, 32, 3, 2), 32)
    n4 = net.add_conv(
        "/model.12",
        net.add_concat("/model.11/Concat", [net.add_upsample("/model.10", p5), p4]),
        48,
        16,
    )
    add_head(net, [(p3, 32), (n4, 16), (p5, 32)], 64, classes)
    return net.finish(64, classes)


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    return deepcopy(model)


def add_output(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    copy = copy_model(model)
    copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(tensor))
    return copy


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = copy_model(model)
    constants = [
        onnx.helper.make_node("Constant", [], [t.name], f"{t.name}/Constant", value=t)
        for t in copy.graph.initializer
    ]
    nodes = [*constants, *copy.graph.node]
    del copy.graph.initializer[:], copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def images(
    count: int = 4, channels: int = 16, side: int = 8, name: str = "x", seed: int = 1
) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{name: rng.random((1, channels, side, side), np.float32)} for _ in range(count)]


def run(
    model: onnx.ModelProto, feeds: dict[str, Array], outputs: list[str] | None = None
) -> list[Array]:
    """Return the outputs of a model on the CPU, with onnxruntime's rewriting of Q/DQ off."""
    return list(open_session(model.SerializeToString()).run(outputs, feeds))


def assert_same_outputs(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    feeds: dict[str, Array],
    *,
    rtol: float = 1e-7,
    atol: float = 0.0,
) -> None:
    for old, new in zip(run(before, feeds), run(after, feeds), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_allclose(new, old, rtol=rtol, atol=atol)


def wide_samples(count: int) -> Array:
    return np.random.default_rng(3).standard_normal((count, 32, 8, 8)).astype(np.float32)


@functools.lru_cache(4)  # a test runs several samples, often through two models in turn
def open_session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more threads spend most of their time waiting for each other
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def check(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)


def store_as_half(model: onnx.ModelProto, keep: Sequence[str] = ()) -> onnx.ModelProto:
    """Return a float16 copy.

    Inputs and outputs are float16 too, initializers in ``keep`` are not.
    """
    result = copy_model(model)
    for tensor in result.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name not in keep:
            set_value(result, tensor.name, onnx.numpy_helper.to_array(tensor).astype(np.float16))
    for attribute in (a for n in result.graph.node if n.op_type == "Cast" for a in n.attribute):
        attribute.i = onnx.TensorProto.FLOAT16
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    check(result)
    return result


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def nodes_of(model: onnx.ModelProto, *ops: str) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type in ops]


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def value_of(model: onnx.ModelProto, name: str) -> Array:
    return onnx.numpy_helper.to_array(initializer(model, name))


def set_value(model: onnx.ModelProto, name: str, value: Array) -> None:
    initializer(model, name).CopyFrom(onnx.numpy_helper.from_array(value, name))


def one_layer(channels: int = 16, **options: Any) -> onnx.ModelProto:
    net = Net(channels, **options)
    return net.output(net.op("Relu", "r", net.conv("c", "x", channels))).model()


def two_layers(opset: int = 17) -> onnx.ModelProto:
    net = Net()
    return net.output(net.conv("b", net.op("Relu", "relu", net.conv("a", "x")))).model(opset)


def require_prediction(insertion: Insertion) -> Prediction:
    assert insertion.prediction is not None, insertion.warnings
    return insertion.prediction


def chain() -> onnx.ModelProto:
    net, tensor = Net(), "x"
    for name in "abc":
        tensor = net.op("Relu", f"{name}/relu", net.conv(name, tensor))
    return net.output(net.conv("d", tensor)).model()


def prediction(int8: int, int8_to_int8: int, conversions: int | None) -> Prediction:
    outputs = [Precision.INT8] * int8_to_int8 + [Precision.FLOAT] * (int8 - int8_to_int8)
    convolutions = [
        ConvOutcome(i, f"c{i}", "Conv", "INT8", Precision.INT8, [], output)
        for i, output in enumerate(outputs)
    ]
    return Prediction(ModelInfo("", "", 17, 0), "trt8.5", convolutions, conversions=conversions)


def relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    return float(np.sqrt(((actual - expected) ** 2).mean() / expected.var()))


def remove_pairs(model: onnx.ModelProto, *entries: QuantizedTensor) -> onnx.ModelProto:
    for entry in entries:
        model = remove_pair(Model(model), entry).proto
    check(model)
    return model
