"""Builder of small Q/DQ graphs: one call adds one node, with predictable names.

A convolution called ``c`` has weights ``c.weight``, quantizers ``c.in.Q``, ``c.in.DQ``, ``c.w.Q`` and ``c.w.DQ``; a Q
or DQ called ``n`` has a scale ``n.scale`` and a zero point ``n.zero``; a node called ``n`` writes the tensor ``n:0``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from ml_dtypes import float8_e4m3fn


class Graph:
    """Graph under construction.

    Args:
        opset: Version of the default domain.
        constant_nodes: Whether constants are Constant nodes instead of initializers.
        seed: Seed of the weights.
        half: Whether float tensors are float16.
        fp8: Whether quantizers are FP8 (E4M3FN) unless they name another type; needs opset 19.
    """

    def __init__(
        self,
        opset: int = 13,
        constant_nodes: bool = False,
        seed: int = 0,
        half: bool = False,
        fp8: bool = False,
    ) -> None:
        self.opset, self.fp8 = opset, fp8
        self.constant_nodes, self.random = constant_nodes, np.random.default_rng(seed)
        self.dtype: Any = np.float16 if half else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.channels: dict[str, int] = {}

    def input(self, *shape: int, name: str = "x") -> str:
        elem = onnx.TensorProto.FLOAT16 if self.dtype == np.float16 else onnx.TensorProto.FLOAT
        self.inputs.append(onnx.helper.make_tensor_value_info(name, elem, shape))
        self.channels[name] = shape[1] if len(shape) > 1 else 1
        return name

    def const(self, name: str, value: npt.ArrayLike, dtype: Any = None) -> str:
        array = np.asarray(value, dtype=dtype)
        tensor = onnx.numpy_helper.from_array(
            array.astype(self.dtype) if array.dtype == np.float64 else array, name
        )
        if self.constant_nodes:
            self.nodes.append(
                onnx.helper.make_node("Constant", [], [name], f"{name}/Constant", value=tensor)
            )
        else:
            self.initializers.append(tensor)
        return name

    def ops(
        self, op: str, inputs: Sequence[str], name: str, count: int = 1, **attributes: Any
    ) -> list[str]:
        outputs = [f"{name}:{i}" for i in range(count)]
        self.nodes.append(onnx.helper.make_node(op, list(inputs), outputs, name, **attributes))
        for output in outputs:
            self.channels[output] = self.channels.get(inputs[0], 1) if inputs else 1
        return outputs

    def op(self, op: str, inputs: str | Sequence[str], name: str, **attributes: Any) -> str:
        return self.ops(op, [inputs] if isinstance(inputs, str) else inputs, name, **attributes)[0]

    # Quantizers -----------------------------------------------------------------------------------------------

    def parameters(
        self, name: str, scale: npt.ArrayLike, zero: int | None, integer: Any
    ) -> list[str]:
        values = np.asarray(scale, dtype=self.dtype)
        names = [self.const(f"{name}.scale", values)]
        if zero is not None:
            integer = integer or (float8_e4m3fn if self.fp8 else np.int8)
            names.append(self.const(f"{name}.zero", np.full(values.shape, zero, dtype=integer)))
        return names

    def quantizer(
        self,
        op: str,
        x: str,
        name: str,
        scale: npt.ArrayLike = 0.1,
        axis: int | None = None,
        zero: int | None = 0,
        integer: Any = None,
    ) -> str:
        attributes = {} if axis is None else {"axis": axis}
        return self.op(op, [x, *self.parameters(name, scale, zero, integer)], name, **attributes)

    q = functools.partialmethod(quantizer, "QuantizeLinear")
    dq = functools.partialmethod(quantizer, "DequantizeLinear")

    def pair(
        self,
        x: str,
        stem: str,
        scale: npt.ArrayLike = 0.1,
        axis: int | None = None,
        zero: int | None = 0,
        integer: Any = None,
    ) -> str:
        quantized = self.q(x, f"{stem}.Q", scale, axis, zero, integer)
        return self.dq(quantized, f"{stem}.DQ", scale, axis, zero, integer)

    # Layers ---------------------------------------------------------------------------------------------------

    def weights(
        self, name: str, shape: Sequence[int], form: str, axis: int = 0, parameter: str = "weight"
    ) -> str:
        """Add weights of a kind.

        The kinds are ``float``, ``qdq`` (scale per channel), ``tensor`` (one scale) and ``int8`` (DQ
        only).
        """
        scales = self.random.uniform(0.01, 0.02, shape[axis])
        if form == "int8":
            integers = self.random.integers(-127, 128, tuple(shape))
            stored = self.const(
                f"{name}.{parameter}", integers.astype(float8_e4m3fn if self.fp8 else np.int8)
            )
            return self.dq(stored, f"{name}.w.DQ", scales, axis)
        plain = self.const(f"{name}.{parameter}", self.random.normal(0, 0.3, tuple(shape)))
        if form == "float":
            return plain
        return (
            self.pair(plain, f"{name}.w", scales, axis)
            if form == "qdq"
            else self.pair(plain, f"{name}.w", 0.01)
        )

    def conv(
        self,
        x: str,
        name: str,
        channels: int = 8,
        k: int = 3,
        stride: int = 1,
        groups: int = 1,
        scale: float | None = 0.1,
        weights: str = "qdq",
        bias: bool = False,
        op: str = "Conv",
        **attributes: Any,
    ) -> str:
        """Add a convolution with padding k // 2.

        Its input has a pair of scale ``scale``, unless ``scale`` is None.
        """
        data = x if scale is None else self.pair(x, f"{name}.in", scale)
        from_, to = self.channels.get(x, 1), channels // groups
        shape = (channels, from_ // groups, k, k) if op == "Conv" else (from_, to, k, k)
        inputs = [data, self.weights(name, shape, weights, 0 if op == "Conv" else 1)]
        if bias:
            inputs.append(self.const(f"{name}.bias", self.random.normal(0, 1, channels)))
        out = self.op(
            op,
            inputs,
            name,
            kernel_shape=[k, k],
            strides=[stride] * 2,
            pads=[(k - stride) // 2 if op == "ConvTranspose" else k // 2] * 4,
            group=groups,
            **attributes,
        )
        self.channels[out] = channels
        return out

    def bn(self, x: str, name: str) -> str:
        count = self.channels[x]
        values = {
            "weight": self.random.uniform(0.5, 2, count),
            "bias": self.random.normal(0, 1, count),
            "running_mean": self.random.normal(0, 1, count),
            "running_var": self.random.uniform(0.5, 2, count),
        }
        inputs = [self.const(f"{name}.{n}", v) for n, v in values.items()]
        return self.op("BatchNormalization", [x, *inputs], name)

    def relu(self, x: str, name: str) -> str:
        return self.op("Relu", x, name)

    def silu(self, x: str, name: str) -> str:
        return self.op("Mul", [x, self.op("Sigmoid", x, f"{name}.s")], f"{name}.m")

    def add(self, a: str, b: str, name: str) -> str:
        return self.op("Add", [a, b], name)

    def concat(self, inputs: Sequence[str], name: str, axis: int = 1) -> str:
        out = self.op("Concat", inputs, name, axis=axis)
        if axis == 1:
            self.channels[out] = sum(self.channels.get(i, 1) for i in inputs)
        return out

    def pool(self, x: str, name: str, op: str = "MaxPool", k: int = 2, stride: int = 2) -> str:
        pad = k // 2 if k % 2 else 0
        return self.op(op, x, name, kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4)

    def pad(self, x: str, name: str, mode: str = "constant", value: float | None = None) -> str:
        inputs = [x, self.const(f"{name}.pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))]
        if value is not None:
            inputs.append(self.const(f"{name}.value", np.float32(value)))
        return self.op("Pad", inputs, name, mode=mode)

    def resize(self, x: str, name: str, mode: str = "nearest", factor: float = 2.0) -> str:
        return self.op(
            "Resize",
            [x, "", self.const(f"{name}.scales", np.array([1, 1, factor, factor], np.float32))],
            name,
            mode=mode,
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )

    def slice(self, x: str, name: str, start: int, end: int, axis: int = 1, step: int = 1) -> str:
        values = {"starts": start, "ends": end, "axes": axis, "steps": step}
        inputs = [self.const(f"{name}.{n}", np.array([v], np.int64)) for n, v in values.items()]
        out = self.op("Slice", [x, *inputs], name)
        if axis == 1:
            self.channels[out] = (end - start + step - 1) // step
        return out

    def reshape(self, x: str, name: str, *shape: int) -> str:
        return self.op("Reshape", [x, self.const(f"{name}.shape", np.array(shape, np.int64))], name)

    def gemm(
        self,
        x: str,
        name: str,
        features: int,
        out: int = 4,
        scale: float | None = 0.1,
        weights: str = "qdq",
        bias: bool = True,
    ) -> str:
        data = x if scale is None else self.pair(x, f"{name}.in", scale)
        inputs = [data, self.weights(name, (out, features), weights)]
        if bias:
            inputs.append(self.const(f"{name}.bias", self.random.normal(0, 1, out)))
        return self.op("Gemm", inputs, name, transB=1)

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [onnx.helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = onnx.helper.make_graph(self.nodes, "g", self.inputs, infos, self.initializers)
        domains = {"": self.opset} | {n.domain: 1 for n in self.nodes if n.domain}
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
        model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        del model.graph.output[:]
        model.graph.output.extend(inferred.graph.output)
        return model
