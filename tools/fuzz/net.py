"""Builder of small Q/DQ graphs. Each call adds a node and infers its output shapes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]


class Net:
    """Graph under construction, with the shapes of its tensors.

    Args:
        opset: Version of the default domain.
        half: Whether float tensors and constants are float16.
        constant_nodes: Whether constants become Constant nodes instead of initializers.
        seed: Seed of the random weights.
    """

    def __init__(
        self, opset: int = 17, half: bool = False, constant_nodes: bool = False, seed: int = 0
    ) -> None:
        self.opset = opset
        self.dtype: Any = np.float16 if half else np.float32
        self.constant_nodes = constant_nodes
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.values: dict[str, onnx.TypeProto] = {}
        self.data: dict[str, onnx.TensorProto] = {}
        self.inputs: list[str] = []
        self._count = 0

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def shape(self, tensor: str) -> Shape:
        return tuple(d.dim_value for d in self.values[tensor].tensor_type.shape.dim)

    def input(self, shape: Sequence[int], elem: int = 0) -> str:
        """Add a graph input of the network's float type, or of ``elem``."""
        name = self.fresh("x")
        self.values[name] = helper.make_tensor_type_proto(
            elem or helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)), list(shape)
        )
        self.inputs.append(name)
        return name

    def const(self, value: npt.ArrayLike, dtype: Any = None, stem: str = "k") -> str:
        """Add a constant. Floats have the network's type if ``dtype`` is None."""
        array = np.asarray(value)
        array = array.astype(dtype or (self.dtype if array.dtype.kind == "f" else array.dtype))
        return self.const_tensor(numpy_helper.from_array(array), stem)

    def const_tensor(self, tensor: onnx.TensorProto, stem: str = "k") -> str:
        name = self.fresh(stem)
        tensor.name = name
        self.values[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        self.data[name] = tensor
        if self.constant_nodes:
            self.nodes.append(
                helper.make_node("Constant", [], [name], name + "/Constant", value=tensor)
            )
        else:
            self.initializers.append(tensor)
        return name

    def op(
        self, kind: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: Any
    ) -> str:
        return self.ops(kind, *inputs, outputs=outputs, name=name, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: Any
    ) -> list[str]:
        name = name or self.fresh(kind)
        out = [f"{name}_y{i}" for i in range(outputs)] if outputs > 1 else [name + "_y"]
        node = helper.make_node(kind, list(inputs), out, name, **attributes)
        self.nodes.append(node)
        schema = onnx.defs.get_schema(kind, self.opset)
        types = {i: self.values[i] for i in inputs if i}
        data = {i: self.data[i] for i in inputs if i in self.data}
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[helper.make_opsetid("", self.opset)]
        )
        self.values.update(inferred)
        return out

    def q(
        self,
        x: str,
        scale: npt.ArrayLike = 0.05,
        axis: int | None = None,
        zero: int | None = 0,
        integer: Any = np.int8,
        name: str = "",
    ) -> str:
        attributes = {} if axis is None else {"axis": axis}
        return self.op(
            "QuantizeLinear", x, *self._params(scale, zero, integer), name=name, **attributes
        )

    def dq(
        self,
        x: str,
        scale: npt.ArrayLike = 0.05,
        axis: int | None = None,
        zero: int | None = 0,
        integer: Any = np.int8,
        name: str = "",
    ) -> str:
        attributes = {} if axis is None else {"axis": axis}
        return self.op(
            "DequantizeLinear", x, *self._params(scale, zero, integer), name=name, **attributes
        )

    def _params(self, scale: npt.ArrayLike, zero: int | None, integer: Any) -> list[str]:
        values = np.asarray(scale, dtype=np.float64)
        names = [self.const(values, stem="s")]
        if zero is not None:
            names.append(self.const(np.full(values.shape, zero, dtype=integer), stem="z"))
        return names

    def qdq(self, x: str, scale: npt.ArrayLike = 0.05, axis: int | None = None) -> str:
        return self.dq(self.q(x, scale, axis), scale, axis)

    def weight(self, shape: Sequence[int], quantized: str = "axis0", name: str = "") -> str:
        """Add a weight constant.

        Args:
            shape: Shape of the weights.
            quantized: ``none``. ``tensor``, ``axis0`` or ``axis1``: float weights with Q and DQ.
                These three with ``-dq``: stored int8 weights with only a DQ. ``shape1``: one scale
                of shape [1].
            name: Name of the constant.
        """
        form = quantized.removesuffix("-dq")
        values = self.random.normal(0, 0.2, tuple(shape))
        if form == "none":
            return self.const(values, stem="w")
        axis = int(form[4]) if form.startswith("axis") else None
        scale: npt.NDArray[Any] = np.asarray(0.01)
        if form == "shape1":
            scale = np.asarray([0.01])
        elif axis is not None:
            scale = self.random.uniform(0.005, 0.02, shape[axis])
        if quantized.endswith("-dq"):
            stored = self.const(
                self.random.integers(-127, 128, tuple(shape)).astype(np.int8), stem="w"
            )
            return self.dq(stored, scale, axis)
        return self.qdq(self.const(values, stem="w"), scale, axis)

    def conv(
        self,
        x: str,
        channels: int,
        k: int = 3,
        stride: int = 1,
        groups: int = 1,
        weights: str = "axis0",
        bias: bool = True,
        dilation: int = 1,
        name: str = "",
    ) -> str:
        shape = self.shape(x)
        rank = len(shape) - 2
        w = self.weight((channels, shape[1] // groups, *(k,) * rank), weights)
        b = [self.const(self.random.normal(0, 1, channels), stem="b")] if bias else []
        pad = (k - 1) * dilation // 2
        return self.op(
            "Conv",
            x,
            w,
            *b,
            name=name or self.fresh("conv"),
            kernel_shape=[k] * rank,
            strides=[stride] * rank,
            pads=[pad] * 2 * rank,
            dilations=[dilation] * rank,
            group=groups,
        )

    def deconv(
        self,
        x: str,
        channels: int,
        k: int = 2,
        groups: int = 1,
        weights: str = "axis1",
        name: str = "",
    ) -> str:
        """Add a ConvTranspose of stride 2 that doubles height and width."""
        w = self.weight((self.shape(x)[1], channels // groups, k, k), weights)
        pad = (k - 2) // 2
        return self.op(
            "ConvTranspose",
            x,
            w,
            name=name or self.fresh("deconv"),
            kernel_shape=[k, k],
            strides=[2, 2],
            pads=[pad, pad, pad, pad],
            group=groups,
        )

    def model(self, *outputs: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_value_info(n, self.values[n]) for n in self.inputs],
            [helper.make_value_info(n, self.values[n]) for n in outputs],
            self.initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        model.ir_version = 8 if self.opset <= 18 else 10
        return model


INT8 = TensorProto.INT8
