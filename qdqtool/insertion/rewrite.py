"""Puts Q/DQ pairs into a model, named as QAT exports name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.graph import Model, Node
from qdqtool.insertion.placement import Placement, Reader, WeightSite
from qdqtool.insertion.scales import weight_scale
from qdqtool.types import QuantizedTensor

WEIGHT_FORMS = ("float", "int8")


@dataclass(frozen=True)
class ActivationScale:
    """What :func:`rewrite` needs to know of a tensor: its scale, how it was chosen, and its group's number."""

    scale: float
    method: str
    group: int | None


def rewrite(
    model: Model, placement: Placement, scales: Mapping[str, ActivationScale], weights: str = "float"
) -> list[QuantizedTensor]:
    """Inserts Q/DQ pairs into ``model.proto``, in place.

    Every quantized tensor gets one pair, in front of its first reader, that all its quantized readers share; float
    readers and graph outputs keep the tensor itself. Activation scales have rank 0 (TensorRT-RTX takes a scale of shape
    [1] for a per-channel one and runs the convolution in FP32); zero points are int8 zeros.

    Args:
        model: An index over the model to change; it is out of date afterwards.
        placement: What to quantize.
        scales: For each tensor in ``placement.readers``.
        weights: ``float`` stores weights as they are, with Q and DQ; ``int8`` stores them quantized, with DQ alone;
            ``sketch`` gives them scales of 1, for a model that is only simulated.

    Returns:
        What was quantized, in graph order.
    """
    writer = _Writer(model)
    done: set[str] = set()
    by_reader: dict[int, list[tuple[str, Reader]]] = {}
    for tensor, readers in placement.readers.items():
        for reader in readers:
            by_reader.setdefault(reader.node.index, []).append((tensor, reader))
    sites = {site.node.index: site for site in placement.weights}
    nodes: list[onnx.NodeProto] = []
    for node in model.ordered:
        for tensor, reader in by_reader.get(node.index, ()):
            if tensor not in done:
                done.add(tensor)
                nodes.extend(writer.activation(tensor, reader, scales[tensor]))
            node.proto.input[reader.position] = writer.dequantized[tensor]
        if node.index in sites:
            nodes.extend(writer.weight(sites[node.index], weights))
        nodes.append(node.proto)
    del model.proto.graph.node[:]
    model.proto.graph.node.extend(nodes)
    writer.drop_unused_weights()
    return writer.quantized


class _Writer:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.graph = model.proto.graph
        self.quantized: list[QuantizedTensor] = []
        self.dequantized: dict[str, str] = {}
        self.replaced: set[str] = set()
        self.taken = {n.name for n in self.graph.node} | model.producers.keys() | model.initializers.keys()
        self.taken.update(model.inputs)

    def activation(self, tensor: str, reader: Reader, scale: ActivationScale) -> list[onnx.NodeProto]:
        role = "_input_quantizer" if reader.role == "input" else "_residual_quantizer"
        base = self._base(reader.node, role)
        dtype = _float_type(self.model, tensor)
        scale_name = self._constant(f"{base}/scale", np.asarray(scale.scale, np.float32).astype(dtype))
        zero_name = self._constant(f"{base}/zero_point", np.asarray(0, np.int8))
        pair = self._pair(base, tensor, scale_name, zero_name)
        self.dequantized[tensor] = pair[1].output[0]
        self.quantized.append(QuantizedTensor(tensor, scale.scale, scale.method, scale.group, pair[0].name))
        return pair

    def weight(self, site: WeightSite, form: str) -> list[onnx.NodeProto]:
        node, name = site.node, site.tensor
        scale = _sketched(self.model, site) if form == "sketch" else self._scale(site)
        base = self._base(node, "_weight_quantizer")
        scale_name = self._constant(f"{base}/scale", scale)
        zero_name = self._constant(f"{base}/zero_point", np.zeros(scale.shape, np.int8))
        attributes = {} if site.axis is None else {"axis": site.axis}
        if form == "int8":
            value = self.model.constant(name)
            assert value is not None
            source = self._constant(f"{name}_quantized", quantize(value, scale, site.axis))
            self.replaced.add(name)
            dq = self._node("DequantizeLinear", base, [source, scale_name, zero_name], attributes)
            made = [dq]
        else:
            made = self._pair(base, name, scale_name, zero_name, attributes)
        node.proto.input[1] = made[-1].output[0]
        listed: Any = [float(s) for s in scale] if scale.ndim else float(scale)
        self.quantized.append(QuantizedTensor(name, listed, "weights-max", None, made[0].name))
        return made

    def _scale(self, site: WeightSite) -> npt.NDArray[Any]:
        value = self.model.constant(site.tensor)
        assert value is not None
        scale = weight_scale(value, site.axis)
        return round_up_to_half(scale) if value.dtype == np.float16 else scale

    def _pair(
        self, base: str, tensor: str, scale: str, zero: str, attributes: dict[str, Any] | None = None
    ) -> list[onnx.NodeProto]:
        q = self._node("QuantizeLinear", base, [tensor, scale, zero], attributes or {})
        dq = self._node("DequantizeLinear", base, [q.output[0], scale, zero], attributes or {})
        return [q, dq]

    def _node(self, op: str, base: str, inputs: list[str], attributes: dict[str, Any]) -> onnx.NodeProto:
        name = f"{base}/{op}"
        self.taken.update((name, f"{name}_output_0"))
        return helper.make_node(op, inputs, [f"{name}_output_0"], name=name, **attributes)

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        self.taken.add(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _base(self, node: Node, role: str) -> str:
        """``/model.0/conv/_input_quantizer`` for ``/model.0/conv/Conv``; a name that is not taken."""
        folder, slash, last = node.name.rpartition("/")
        options = [f"{node.name}/{role}"]
        # Where a folder holds several such nodes (Conv, Conv_1), only the first is named after the folder.
        if slash and folder and last.startswith(node.op):
            options.insert(0, f"{folder}/{role}")
        number = 0
        for option in options:
            if not self._is_taken(option):
                return option
        while self._is_taken(f"{options[-1]}_{number}"):
            number += 1
        return f"{options[-1]}_{number}"

    def _is_taken(self, base: str) -> bool:
        return any(
            f"{base}/{end}" in self.taken
            for end in ("QuantizeLinear", "DequantizeLinear", "scale", "zero_point", "QuantizeLinear_output_0",
                        "DequantizeLinear_output_0")
        )  # fmt: skip

    def drop_unused_weights(self) -> None:
        """Removes the float weights that were stored as int8, unless something else reads them."""
        read = {t for n in self.graph.node for t in n.input} | set(self.model.outputs)
        for node in self.model.nodes:
            read.update(node.captured)
        unused = self.replaced - read
        if not unused:
            return
        _remove(self.graph.initializer, unused)
        _remove(self.graph.input, unused)
        kept = [n for n in self.graph.node if not (n.op_type == "Constant" and n.output[0] in unused)]
        del self.graph.node[:]
        self.graph.node.extend(kept)


def _sketched(model: Model, site: WeightSite) -> npt.NDArray[Any]:
    """Scales of the right shape and type for weights whose values are not at hand."""
    shape = model.constant_shape(site.tensor) or ()
    count = () if site.axis is None else (shape[site.axis],)
    return np.ones(count, _float_type(model, site.tensor))


def _remove(items: Any, names: set[str]) -> None:
    for i in reversed(range(len(items))):
        if items[i].name in names:
            del items[i]


def _float_type(model: Model, tensor: str) -> type[np.float32] | type[np.float16]:
    return np.float16 if model.elem_type(tensor) == TensorProto.FLOAT16 else np.float32


def quantize(value: npt.NDArray[Any], scale: npt.NDArray[Any], axis: int | None) -> npt.NDArray[np.int8]:
    """QuantizeLinear with zero point 0, as ONNX defines it: round half to even, saturate to [-128, 127]."""
    shaped = scale.astype(np.float32)
    if axis is not None:
        shaped = shaped.reshape([-1 if i == axis else 1 for i in range(value.ndim)])
    codes: npt.NDArray[np.int8] = np.clip(np.rint(value.astype(np.float32) / shaped), -128, 127).astype(np.int8)
    return codes


def round_up_to_half(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """The next FP16 number that is not smaller, so that nothing saturates, and never zero."""
    half = scale.astype(np.float16)
    lower = half.astype(np.float32) < scale
    return np.where(lower, np.nextafter(half, np.float16(np.inf)), half).astype(np.float16)
