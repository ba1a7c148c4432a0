"""Convert INT8 Q/DQ models to FP8 (E4M3FN)."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

FP8 = TensorProto.FLOAT8E4M3FN
LARGEST = 448.0  # the largest number of E4M3FN
OPSET = 19  # the first opset with Q and DQ of FP8; Q and DQ without a zero point need opset 21
_RATIO = 127 / LARGEST  # scale in FP8 divided by the scale in INT8, for the same range
_INTEGERS = (TensorProto.INT8, TensorProto.UINT8)
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


def convert_to_fp8(
    model: onnx.ModelProto, chosen: Callable[[int], bool] = lambda index: True
) -> onnx.ModelProto:
    """Return a copy of a model with FP8 in place of its 8-bit quantizers.

    Places and ranges are the same. Stored integers are rounded to FP8. The opset becomes at least
    19, or 21 if a quantizer without a zero point needs ``output_dtype``. Of the other operators,
    only Reduce operators have a different form in these opsets.

    Args:
        model: Model with INT8 Q/DQ.
        chosen: Function that receives the index of a Q, or of a DQ of stored weights, and returns
            whether to convert the node. Other DQs are converted together with their Q.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    return _Conversion(model).convert(chosen)


class _Conversion:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.constants = {t.name: t for t in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.opset = OPSET
        self.quantized: set[str] = set()  # FP8 tensors
        self.inputs = {v.name: v for v in self.graph.input}

    def convert(self, chosen: Callable[[int], bool]) -> onnx.ModelProto:
        protos = list(self.graph.node)
        for index, node in enumerate(protos):
            if node.op_type not in _QUANTIZERS:
                self._visit_operator(node)
                continue
            if not self._is_8_bit(node):
                continue
            is_q = node.op_type == "QuantizeLinear"
            has_stored = node.input[0] in self.constants or node.input[0] in self.inputs
            is_chosen = chosen(index) if is_q or has_stored else node.input[0] in self.quantized
            if is_chosen:
                self._convert_node(node, is_q, has_stored)
        self._convert_outputs()
        for entry in self.model.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = max(entry.version, self.opset)
        self.model.ir_version = max(self.model.ir_version, 10)
        return self.model

    def _visit_operator(self, node: onnx.NodeProto) -> None:
        if not self.quantized.isdisjoint(node.input[:1]):  # the operator moves FP8 values
            self.quantized.update(node.output)
        if node.op_type.startswith("Reduce") and len(node.input) == 1:
            for axes in [a for a in node.attribute if a.name == "axes"]:
                node.input.append(self._add(numpy_helper.from_array(np.array(axes.ints, np.int64))))
                node.attribute.remove(axes)

    def _is_8_bit(self, node: onnx.NodeProto) -> bool:
        zero_point = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        if zero_point is not None:
            return zero_point.data_type in _INTEGERS
        if node.op_type == "QuantizeLinear":
            return True
        stored = self.constants.get(node.input[0])
        return stored is None or stored.data_type in _INTEGERS

    def _convert_node(self, node: onnx.NodeProto, is_q: bool, has_stored: bool) -> None:
        if is_q:
            self.quantized.add(node.output[0])
        elif has_stored:
            self._convert_stored(node)
        if node.input[1] in self.constants:
            scale = numpy_helper.to_array(self.constants[node.input[1]])
            node.input[1] = self._add(numpy_helper.from_array((scale * _RATIO).astype(scale.dtype)))
        if len(node.input) > 2 and node.input[2]:
            zero_point = numpy_helper.to_array(self.constants[node.input[2]])
            node.input[2] = self._add(to_fp8_tensor(zero_point.astype(np.float32)))
        elif is_q:
            node.attribute.append(helper.make_attribute("output_dtype", FP8))
            self.opset = 21

    def _convert_stored(self, node: onnx.NodeProto) -> None:
        """Convert the stored weights of a DQ, or the network input that it reads."""
        name = node.input[0]
        if name in self.inputs:
            self.inputs[name].type.tensor_type.elem_type = FP8
            return
        values = numpy_helper.to_array(self.constants[name]).astype(np.float32)
        node.input[0] = self._add(to_fp8_tensor(values / _RATIO))

    def _convert_outputs(self) -> None:
        for value in (*self.graph.output, *self.graph.value_info):
            if value.name in self.quantized:
                value.type.tensor_type.elem_type = FP8

    def _add(self, tensor: onnx.TensorProto) -> str:
        tensor.name = f"fp8_{len(self.graph.initializer)}"
        self.graph.initializer.append(tensor)
        return tensor.name


def to_fp8_tensor(values: npt.NDArray[np.float32]) -> onnx.TensorProto:
    """Return numbers rounded to FP8, and limited to 448 in magnitude."""
    limited = np.clip(values, -LARGEST, LARGEST)
    tensor = helper.make_tensor("", FP8, values.shape, limited.reshape(-1).tolist())
    return tensor
