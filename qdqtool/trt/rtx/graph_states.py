"""Data types of tensors on TensorRT-RTX, and the tensors that a DQ's integers reach."""

import math

import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.ir.sizes import is_multiplication
from qdqtool.trt.rtx.motion import IntegerMotion
from qdqtool.trt.rtx.operands import NEVER_QUANTIZED, WIDTH, ConstantTensors, IntegerState, State


class GraphStates:
    """States and types of all tensors, computed in one walk over the graph.

    The state of a tensor is whether the compiler can use the integers of a DQ instead of the
    tensor's values.

    Attributes:
        types: ONNX type of each tensor; 0 if unknown.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = ConstantTensors(model)
        self.motion = IntegerMotion(model, self.constants)
        self.types = {name: model.elem_type(name) for name in (*model.inputs, *model.initializers)}
        self._states: dict[str, State] = {}
        for node in model.ordered:
            for output in filter(None, node.outputs):
                self.types[output] = self._output_type(node, output)
            self._add_states(node)

    def state(self, tensor: str) -> State:
        """Return the state of a tensor.

        ``NEVER_QUANTIZED`` if no DQ is upstream, apart from DQs before a Q or a multiplication.
        """
        return self._states.get(tensor, NEVER_QUANTIZED)

    def _add_states(self, node: Node) -> None:
        if qdq.is_dq(node):
            self._states[node.output] = self._dequantize(node)
        elif not (qdq.is_q(node) or node.op == "Constant" or is_multiplication(self.model, node)):
            state = self.motion.apply(node, [self.state(tensor) for tensor in node.inputs])
            # All outputs of a Split carry data. Of other nodes, only the first output does;
            # further outputs are indices or masks.
            outputs = node.outputs if node.op == "Split" else node.outputs[:1]
            self._states.update(dict.fromkeys(filter(None, outputs), state))

    def _output_type(self, node: Node, output: str) -> int:
        """Return the ONNX type of an output.

        A Q writes its quantized type, a DQ the type of its scale, a Cast the type to which it
        casts. Other operators with a float output, or with an output of unknown type, write the
        type of their first float input.
        """
        stored = self.model.elem_type(output)
        if qdq.is_q(node):
            return self._quantized_type(node)
        if qdq.is_dq(node):
            scale = node.input(1)
            return self.model.elem_type(scale) or self.types.get(scale, 0) or stored
        if node.op == "Cast":
            return node.integer("to", stored)
        if node.op == "Constant" or (stored and stored not in WIDTH):
            return stored
        input_types = (self.types.get(tensor, 0) for tensor in filter(None, node.inputs))
        return next((t for t in input_types if t in WIDTH), stored)

    def _quantized_type(self, q: Node) -> int:
        zero_point = q.input(2)
        kind = (
            self.types.get(zero_point, 0)
            or self.model.elem_type(zero_point)
            or q.integer("output_dtype", 0)
        )
        return onnx.TensorProto.INT8 if kind in (0, onnx.TensorProto.INT32) else kind

    def _scale_axes(self, node: Node) -> frozenset[int]:
        data = self.model.shape(node.input(0)) or self.model.shape(node.output)
        axis = self.scale_axis(node)
        return frozenset({axis % len(data) if data else axis})

    def _dequantize(self, node: Node) -> IntegerState:
        """Return the state of a DQ's output.

        A blocked scale (weights of a MatMul may have one) counts as a scale without axes, because
        blocks do not prevent an INT8 product.
        """
        params = qdq.read_params(self.model, node)
        shape = self.scale_shape(node) or ()
        if len(shape) <= 1 and math.prod(shape) == 1:
            merged = self.motion.consumers.find_merged(node)[-1]
            shape = self.constants.shape(merged.input(1)) or ()
        scale: bytes | int = node.index
        value = params.scale if params.scale is not None else self.constants.value(node.input(1))
        if value is not None:
            scale = value.astype("float32").tobytes()
        axes = self._scale_axes(node) if len(shape) == 1 and shape[0] > 1 else frozenset()
        width = WIDTH.get(self.types.get(node.output, 0), 32)
        return IntegerState(
            node,
            self._integer_type(node, params.precision),
            not shape,
            scale,
            width,
            width,
            axes=axes,
        )

    def scale_shape(self, node: Node) -> tuple[int, ...] | None:
        """Return the shape of a quantizer's scale; None if unknown."""
        shape = qdq.read_params(self.model, node).scale_shape
        return shape if shape is not None else self.constants.shape(node.input(1))

    def scale_axis(self, node: Node) -> int:
        """Return the axis of a quantizer's scales; the default is 1, or 0 before opset 13."""
        return node.integer("axis", 1 if self.model.opset >= 13 else 0)

    def _integer_type(self, node: Node, precision: Precision) -> Precision:
        """Return the type of a DQ's integers.

        TensorRT-RTX imports uint8, and a Q to int32, as int8. An unknown type counts as int8.
        """
        if precision == Precision.UNKNOWN:
            precision = precision_of(self.types.get(node.input(0), 0))
        if precision in (Precision.UINT8, Precision.INT32, Precision.UNKNOWN):
            return Precision.INT8
        return precision
