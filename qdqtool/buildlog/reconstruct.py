"""Reconstruction of the ONNX graph from the parse section of a build log.

A log has the operator, inputs and outputs of every node, and every shape and type. It has no
values: neither weights nor scales. Names and topology are exact. Attributes that were not printed
are inferred from shapes, and listed in the node's ``doc_string``. Scales are invented. Two scales
are equal only if the log shows that TensorRT treated them as equal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.buildlog.layers import as_int_list
from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.types import Build, ParsedNode, ParsedTensor, Section, Shape, static_shape
from qdqtool.errors import BuildLogError
from qdqtool.util import limits
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

MARK = "inferred from shapes: "
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_QUANTIZERS = (_Q, _DQ)
_TYPES = {
    "FLOAT": TensorProto.FLOAT,
    "HALF": TensorProto.FLOAT16,
    "FLOAT16": TensorProto.FLOAT16,
    "INT8": TensorProto.INT8,
    "UINT8": TensorProto.UINT8,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "BOOL": TensorProto.BOOL,
    "BFLOAT16": TensorProto.BFLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "DOUBLE": TensorProto.DOUBLE,
}


def graph_from_log(build: Build) -> tuple[onnx.ModelProto, list[Note]]:
    """Rebuild the graph of a build from its parse section.

    Returns:
        The model, and notes about everything that is not in the log.

    Raises:
        BuildLogError: The build has no parse section, or its constants are too large.
    """
    if not any(node.outputs for node in build.parse.nodes):
        raise BuildLogError(
            "the log has no parse section, so no graph can be rebuilt; build with 'trtexec "
            "--verbose --onnx=...', which prints this section",
            build.display_name,
            code="no-parse-section",
        )
    return _GraphRebuilder(build).run()


def _list_present(tensors: Sequence[ParsedTensor | None]) -> list[ParsedTensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _tensor_names(tensors: Sequence[ParsedTensor | None]) -> set[str]:
    return {tensor.name for tensor in _list_present(tensors)}


class _GraphRebuilder:
    """Builder of a model from a parse section.

    Attributes:
        prints_int64_as_int32: Whether the log prints INT64 tensors as INT32 (TensorRT before 10).
        tensors: Tensors of known shape, and outputs of nodes, by name.
        outputs: Names of the outputs of nodes.
        inputs: Names of the inputs of nodes.
        quantized: Names of the outputs of Q.
        deconvolution_inputs: Names of the inputs of ConvTranspose, and of the inputs of the Qs and
            DQs that produce these inputs.
        values: Inferred values of constants, by name.
        scales: Invented values of scales, by name.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.nodes = build.parse.nodes
        self.opset = build.parse.opset or 13
        major = (build.tensorrt or build.version_hint or "8").split(".")[0]
        self.prints_int64_as_int32 = major.isdecimal() and int(major) < 10
        self.tensors: dict[str, ParsedTensor] = {}
        self.outputs: set[str] = set()
        self.inputs: set[str] = set()
        self.quantized: set[str] = set()
        for node in self.nodes:
            self._add_tensors(node)
        self.deconvolution_inputs = self._find_deconvolution_inputs()
        self.values: dict[str, list[int] | list[float]] = {}
        self.scales = _invent_scales(build)
        self._constant_bytes = 0

    def _add_tensors(self, node: ParsedNode) -> None:
        for tensor in _list_present(node.inputs):
            self.inputs.add(tensor.name)
            if tensor.shape is not None:
                self.tensors.setdefault(tensor.name, tensor)
        outputs = {tensor.name: tensor for tensor in _list_present(node.outputs)}
        self.tensors.update(outputs)
        self.outputs.update(outputs)
        if node.op == _Q:
            self.quantized.update(outputs)

    def _find_deconvolution_inputs(self) -> set[str]:
        names: set[str] = set()
        for node in reversed(self.nodes):
            is_before = node.op in _QUANTIZERS and names & _tensor_names(node.outputs)
            if is_before or node.op == "ConvTranspose":
                names |= _tensor_names(node.inputs)
        return names

    def run(self) -> tuple[onnx.ModelProto, list[Note]]:
        listed = self._collect_listed_fields()
        nodes = [infer_attributes(node, listed.get(node.name, {})) for node in self.nodes]
        for node in nodes:
            for position, tensor in enumerate(node.parsed.inputs):
                if tensor is not None and position in node.values:
                    self.values.setdefault(tensor.name, node.values[position])
        protos = [self._make_node(node) for node in nodes]
        initializers = dict.fromkeys(self.build.parse.initializers)
        constants = [n for n in initializers if n in self.inputs and n not in self.outputs]
        graph = helper.make_graph(
            protos,
            "from_log",
            self._make_graph_inputs(),
            self._make_graph_outputs(),
            list(map(self._make_constant, constants)),
            value_info=self._make_value_infos(),
        )
        domains = sorted({p.domain for p in protos} - {""})
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(domain, 1) for domain in domains]
        model = helper.make_model(
            graph, opset_imports=opsets, producer_name="qdqtool", ir_version=8
        )
        model.doc_string = "Rebuilt from a TensorRT build log: zero weights, invented scales."
        return model, self._describe_gaps(nodes)

    def _make_node(self, node: InferredAttributes) -> onnx.NodeProto:
        parsed = node.parsed
        inputs = [tensor.name if tensor is not None else "" for tensor in parsed.inputs]
        outputs = [tensor.name if tensor is not None else "" for tensor in parsed.outputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        domain = "" if onnx.defs.has(parsed.op) else "unknown"
        attributes = self._node_attributes(node, outputs)
        proto = helper.make_node(
            parsed.op, inputs, outputs, parsed.name, domain=domain, **attributes
        )
        if node.inferred:
            proto.doc_string = MARK + ", ".join(node.inferred)
        return proto

    def _node_attributes(self, node: InferredAttributes, outputs: list[str]) -> dict[str, Any]:
        op = node.parsed.op
        if op == "Constant":
            return {"value": self._make_constant(outputs[0])} if outputs else {}
        if op in _QUANTIZERS:
            return self._quantization_axis(node.parsed)
        if op == "ReduceSum" and self.opset >= 13:
            return {key: value for key, value in node.attributes.items() if key != "axes"}
        return node.attributes

    def _quantization_axis(self, node: ParsedNode) -> dict[str, int]:
        """Return the axis attribute of a Q or DQ; empty for one scale, or without shapes."""
        data, scale = (*node.inputs, None, None)[:2]
        if data is None or data.shape is None or scale is None:
            return {}
        if not scale.shape or scale.shape == (1,):
            return {}
        axes = [axis for axis, size in enumerate(data.shape[:2]) if size == scale.shape[0]]
        if 1 in axes and self.deconvolution_inputs & _tensor_names(node.outputs):
            return {"axis": 1}
        return {"axis": int(axes == [1])}

    def _onnx_type(self, tensor: ParsedTensor | None) -> int:
        kind = _find_printed_type(tensor)
        if kind == TensorProto.INT32 and self.prints_int64_as_int32:
            return int(TensorProto.INT64)
        return kind

    def _make_output_info(self, tensor: ParsedTensor) -> onnx.ValueInfoProto:
        kind = int(TensorProto.INT8) if tensor.name in self.quantized else self._onnx_type(tensor)
        return _make_value_info(tensor.name, kind, tensor.shape)

    def _make_constant(self, name: str) -> onnx.TensorProto:
        tensor = self.tensors.get(name)
        shape = [size or 0 for size in tensor.shape or ()] if tensor is not None else []
        dtype = helper.tensor_dtype_to_np_dtype(self._onnx_type(tensor))
        # If a dimension is 0, numpy still limits the product of the other dimensions.
        self._constant_bytes += math.prod(size or 1 for size in shape) * dtype.itemsize
        limits.check_size(
            self._constant_bytes,
            limits.LOG_CONSTANTS,
            f"{self.build.display_name}: its constants up to '{name[:80]}' (shape {shape}) would "
            "take",
            BuildLogError,
        )
        array: npt.NDArray[Any] = np.full(shape, self.scales.get(name, 0), dtype)
        value = self.values.get(name)
        if value is not None and len(value) == array.size:
            array = np.asarray(value).astype(dtype).reshape(shape)
        return numpy_helper.from_array(array, name)

    def _make_graph_inputs(self) -> list[onnx.ValueInfoProto]:
        if self.build.parse.inputs:
            return [
                _make_value_info(t.name, _find_printed_type(t), t.shape)
                for t in self.build.parse.inputs
            ]
        produced = self.outputs.union(self.build.parse.initializers)
        return [
            _make_value_info(name, self._onnx_type(tensor), tensor.shape)
            for name, tensor in self.tensors.items()
            if name not in produced
        ]

    def _make_graph_outputs(self) -> list[onnx.ValueInfoProto]:
        names = [name for name in dict.fromkeys(self.build.parse.outputs) if name in self.outputs]
        if not names:
            tensors = itertools.chain.from_iterable(
                _list_present(node.outputs) for node in self.nodes
            )
            names = [tensor.name for tensor in tensors if tensor.name not in self.inputs]
        return [self._make_output_info(self.tensors[name]) for name in names]

    def _make_value_infos(self) -> list[onnx.ValueInfoProto]:
        nodes = [node for node in self.nodes if node.op not in ("Constant", "Cast")]
        tensors = itertools.chain.from_iterable(_list_present(node.outputs) for node in nodes)
        skipped = {"", *self.build.parse.outputs}
        return [
            self._make_output_info(t)
            for t in tensors
            if t.name not in skipped and t.shape is not None
        ]

    def _collect_listed_fields(self) -> dict[str, dict[str, Any]]:
        """Return the listed fields of each node's engine layer, by node name.

        Layers merged with ``||`` are left out, because their fields describe several nodes.
        """
        table: dict[str, dict[str, Any]] = {}
        for layer in self.build.layers:
            name = layer.parse_name()
            is_merged = len(name.alternatives) != 1
            if "ParameterType" not in layer.extras or name.kind != "layer" or is_merged:
                continue
            fields = layer.extras | {
                key.removeprefix("Conv"): value
                for key, value in layer.extras.items()
                if key.startswith("Conv")
            }
            table.update((node, fields) for node in name.bases if node not in table)
        return table

    def _describe_gaps(self, nodes: Sequence[InferredAttributes]) -> list[Note]:
        notes = [
            Note(
                "weights and other constants: not in the log; zeros were written",
                code="constants-lack",
            )
        ]
        ops = Counter(node.op for node in self.nodes)
        if scales := ops[_Q] + ops[_DQ]:
            notes.append(
                Note(
                    f"scales of {scales} Q and DQ: not in the log, so placeholders were written. "
                    "Two scales are equal only in a Q/DQ pair, if TensorRT merged the Qs, or if "
                    "both nodes read the same constant",
                    code="scales-lack",
                    count=scales,
                )
            )
        inferred = Counter(f"{node.parsed.op} {name}" for node in nodes for name in node.inferred)
        for attribute, count in sorted(inferred.items()):
            notes.append(
                Note(
                    f"{attribute} of {format_count(count, 'node')}: not in the log; inferred from "
                    "shapes (see doc_string)",
                    code="attribute-inferred",
                    what=attribute,
                    count=count,
                )
            )
        if alphas := ops["LeakyRelu"]:
            notes.append(
                Note(
                    f"alpha of {format_count(alphas, 'LeakyRelu node')}: not in the log; ONNX's "
                    "default of 0.01 was used",
                    code="alphas-lack",
                )
            )
        return notes + self._describe_graph_gaps(ops)

    def _describe_graph_gaps(self, ops: Counter[str]) -> list[Note]:
        notes = []
        for op, count in ops.items():
            if not onnx.defs.has(op):
                notes.append(
                    Note(
                        f"{op} ({count}): not an ONNX operator, so the nodes have the domain "
                        "'unknown'",
                        code="no-operator",
                    )
                )
        if self.prints_int64_as_int32 and any(t.dtype == "INT32" for t in self.tensors.values()):
            notes.append(
                Note(
                    "integers: TensorRT before 10 prints INT64 as INT32; INT64 was written",
                    code="integers-narrowed",
                )
            )
        if not self.build.parse.opset:
            notes.append(Note("opset: not in the log; 13 was used", code="opset-lacks"))
        gaps = [gap for gap in self.build.gaps if gap.section == Section.PARSE]
        return notes + [Note(f"the log is incomplete: {gap}", code="log-lacks") for gap in gaps]


def _find_printed_type(tensor: ParsedTensor | None) -> int:
    return int(_TYPES.get(tensor.dtype if tensor is not None else "", TensorProto.FLOAT))


def _make_value_info(name: str, kind: int, shape: Shape | None) -> onnx.ValueInfoProto:
    if shape is None:
        return helper.make_tensor_value_info(name, kind, None)
    dims = [f"{name}_{axis}" if size is None else size for axis, size in enumerate(shape)]
    return helper.make_tensor_value_info(name, kind, dims)


def _invent_scales(build: Build) -> dict[str, float]:
    """Invent a value for each scale tensor.

    Two values are equal only if the log shows that the scales are equal.
    """
    quantizers = [node for node in build.parse.nodes if node.op in _QUANTIZERS]
    scale_of_node = {
        node.name: tensors[1].name
        for node in quantizers
        if len(tensors := node.inputs) > 1 and tensors[1] is not None
    }
    parent: dict[str, str] = {}

    def find_root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for first, second in _find_equal_scales(build, quantizers):
        if first in scale_of_node and second in scale_of_node:
            parent[find_root(scale_of_node[first])] = find_root(scale_of_node[second])
    numbers: dict[str, int] = {}
    return {
        name: (1.0 + numbers.setdefault(find_root(name), len(numbers)) / 1024) / 64
        for name in dict.fromkeys(scale_of_node.values())
    }


def _find_equal_scales(build: Build, quantizers: list[ParsedNode]) -> Iterator[tuple[str, str]]:
    """Yield pairs of nodes with equal scales: a Q and its DQ, or two Qs that TensorRT merged."""
    producers = {
        t.name: node.name
        for node in quantizers
        if node.op == _Q
        for t in _list_present(node.outputs)
    }
    for node in quantizers:
        for data in _list_present(node.inputs[:1]):
            if node.op == _DQ and data.name in producers:
                yield node.name, producers[data.name]
    for event in build.trace:
        if event.kind == "Eliminating":
            yield base_name(event.subject), base_name(event.object)


# Attributes and constant values


class _WindowAxis(NamedTuple):
    """Stride and padding of a window along one axis."""

    stride: int
    pad_before: int
    pad_after: int


@dataclass(slots=True)
class InferredAttributes:
    """Attributes and constant inputs of a node.

    Printed attributes are exact. Inferred attributes may differ from the model's. For example,
    both a 3x3 kernel with stride 2 and padding 1 and a 2x2 kernel with stride 2 halve a map.

    Attributes:
        parsed: The node as the parser printed it.
        listed: Fields of the engine layer that absorbed the node (``Kernel``, ``Stride``, ...);
            empty if the listing lacks such a layer.
        attributes: Attributes of the ONNX node.
        inferred: Names of the attributes that were not printed.
        values: Values of constant inputs, by input position.
    """

    parsed: ParsedNode
    listed: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    inferred: list[str] = field(default_factory=list)
    values: dict[int, list[int] | list[float]] = field(default_factory=dict)

    def input_shape(self, position: int) -> list[int] | None:
        """Return the dimensions of an input; None unless all are known."""
        return _read_static_shape(self.parsed.inputs, position)

    def output_shape(self, position: int = 0) -> list[int] | None:
        """Return the dimensions of an output; None unless all are known."""
        return _read_static_shape(self.parsed.outputs, position)

    @property
    def dynamic_output(self) -> Shape | None:
        """Dimensions of the first output, some of which may be None."""
        first = self.parsed.outputs[0] if self.parsed.outputs else None
        return None if first is None else first.shape

    def infer(self, **attributes: Any) -> None:
        """Set attributes that were not printed."""
        self.attributes.update(attributes)
        self.inferred += attributes

    def infer_window(self, axes: Sequence[_WindowAxis]) -> None:
        """Set strides and pads from those of each axis."""
        pads = [axis.pad_before for axis in axes] + [axis.pad_after for axis in axes]
        self.infer(strides=[axis.stride for axis in axes], pads=pads)


def infer_attributes(node: ParsedNode, listed: dict[str, Any]) -> InferredAttributes:
    """Return the attributes and constant inputs of a node.

    Args:
        node: The node as the parser printed it.
        listed: Fields of the engine layer that absorbed the node.
    """
    inferred = InferredAttributes(node, listed)
    if node.op in _RULES:
        _RULES[node.op](inferred)
    return inferred


def _read_static_shape(tensors: Sequence[ParsedTensor | None], position: int) -> list[int] | None:
    tensor = tensors[position] if position < len(tensors) else None
    return None if tensor is None else static_shape(tensor.shape)


def _find_changed_axis(source: Sequence[int], target: Sequence[int], default: int) -> int:
    axes = range(min(len(source), len(target)))
    return next((axis for axis in axes if source[axis] != target[axis]), default)


def _infer_window(
    node: InferredAttributes, fields: dict[str, Any], kernel: list[int] | None
) -> None:
    _read_window(node, fields)
    attributes = node.attributes
    if kernel:
        attributes["kernel_shape"] = kernel
    if "strides" in attributes and "pads" in attributes:
        return
    source, target = node.input_shape(0), node.output_shape()
    if source is None or target is None or len(source) < 3 or len(source) != len(target):
        node.inferred.append("strides and pads (defaults, because the shapes are unknown)")
        return
    edges = list(zip(source[2:], target[2:], strict=True))
    listed_sizes = itertools.chain(attributes.get("kernel_shape", ()), itertools.repeat(0))
    sizes = [
        size or _guess_pooling_window(*edge)
        for edge, size in zip(edges, listed_sizes, strict=False)
    ]
    if "kernel_shape" not in attributes:
        node.infer(kernel_shape=sizes)
    node.infer_window([_fit_window(*edge, size) for edge, size in zip(edges, sizes, strict=True)])


def _read_window(node: InferredAttributes, fields: dict[str, Any]) -> None:
    details = node.parsed.details
    for attribute, detail, listed_field in (
        ("kernel_shape", "kernel", "Kernel"),
        ("strides", "strides", "Stride"),
        ("dilations", "dilations", "Dilation"),
    ):
        value = as_int_list(details.get(detail)) or as_int_list(fields.get(listed_field))
        if value and (attribute != "dilations" or node.parsed.op == "Conv"):
            node.attributes[attribute] = value
    before = as_int_list(details.get("prepadding")) or as_int_list(fields.get("PrePadding"))
    after = as_int_list(details.get("postpadding")) or as_int_list(fields.get("PostPadding"))
    if before is not None and after is not None:
        node.attributes["pads"] = [*before, *after]


def _guess_pooling_window(source: int, target: int) -> int:
    """Return the likely size of a pooling window along one axis.

    The window is 5 wide if the size of the map does not change (SPPF), 3 wide if the size is
    halved, and otherwise as wide as the stride.
    """
    if target == source:
        return 5
    if target == (source + 1) // 2:
        return 3
    return max(1, source // max(1, target))


def _fit_window(source: int, target: int, kernel: int) -> _WindowAxis:
    """Return the stride and the padding that turn size `source` into `target`.

    The padding that keeps the size at stride 1 is preferred.
    """
    stride = max(1, round(source / max(1, target)))
    usual = (kernel - 1) // 2
    if (source + 2 * usual - kernel) // stride + 1 == target:
        return _WindowAxis(stride, usual, usual)
    return _WindowAxis(stride, *_split_padding((target - 1) * stride + kernel - source))


def _split_padding(total: int) -> tuple[int, int]:
    """Return the padding before and after; zeros if the total is negative."""
    before = max(0, total) // 2
    return before, max(0, total) - before


def _infer_conv(node: InferredAttributes) -> None:
    weights, source = node.input_shape(1), node.input_shape(0)
    _infer_window(node, node.listed, weights[2:] if weights else None)
    if not weights or not source or len(weights) < 2 or len(source) < 2:
        return
    if weights[1] and source[1] % weights[1] == 0:
        node.attributes["group"] = source[1] // weights[1]


def _infer_conv_transpose(node: InferredAttributes) -> None:
    weights, source, target = node.input_shape(1), node.input_shape(0), node.output_shape()
    if not weights or not source or not target or min(len(weights), len(target)) < 3:
        return
    node.attributes["kernel_shape"] = weights[2:]
    node.attributes["group"] = max(1, target[1] // max(1, weights[1]))
    axes = []
    for size, output, kernel in zip(source[2:], target[2:], weights[2:], strict=False):
        stride = max(1, round(output / max(1, size)))
        axes.append(_WindowAxis(stride, *_split_padding((size - 1) * stride + kernel - output)))
    node.infer_window(axes)


def _infer_pool(node: InferredAttributes) -> None:
    fields = node.listed
    if "PoolingWindowSize" in fields:
        # The layer fuses the pooling with a convolution. The pooling's fields have a prefix.
        fields = {
            key.removeprefix("Pooling"): value
            for key, value in fields.items()
            if key.startswith("Pooling")
        }
    _infer_window(node, {**fields, "Kernel": fields.get("WindowSize")}, None)


def _infer_gemm(node: InferredAttributes) -> None:
    left, right, target = node.input_shape(0), node.input_shape(1), node.output_shape()
    if left and right and target and len(right) == 2:
        node.infer(transB=int(right[0] == target[-1] and right[1] == left[-1]))


def _infer_concat(node: InferredAttributes) -> None:
    first, target = node.input_shape(0), node.output_shape()
    if first and target:
        node.infer(axis=_find_changed_axis(first, target, 0))
    else:
        node.infer(axis=int(len(node.dynamic_output or ()) > 1))


def _infer_transpose(node: InferredAttributes) -> None:
    source, target = node.input_shape(0), node.output_shape()
    if not source or not target or sorted(source) != sorted(target):
        node.inferred.append("perm (the reverse, ONNX's default)")
        return
    axes_by_size: dict[int, list[int]] = {}
    for axis in reversed(range(len(source))):
        axes_by_size.setdefault(source[axis], []).append(axis)
    node.attributes["perm"] = [axes_by_size[size].pop() for size in target]
    is_unique = len(set(source)) == len(source)
    node.inferred.append(("perm (the only order that fits the shapes)") if is_unique else "perm")


def _infer_reduce(node: InferredAttributes) -> None:
    source, target = node.input_shape(0), node.output_shape()
    if not source or target is None:
        return
    if len(source) == len(target):
        axes = [axis for axis, size in enumerate(source) if size != target[axis]]
    else:
        axes = _find_dropped_axes(source, target)
    node.attributes["keepdims"] = int(len(source) == len(target))
    node.infer(axes=axes or [len(source) - 1])


def _find_dropped_axes(long: list[int], short: list[int]) -> list[int]:
    """Return the axes of `long` that a Squeeze removes to give `short`; empty if none fit.

    Later axes are preferred to earlier axes.
    """
    axes = []
    kept = 0
    for axis, size in enumerate(long):
        if kept < len(short) and size == short[kept]:
            kept += 1
        else:
            axes.append(axis)
    return axes if kept == len(short) else []


def _infer_cast(node: InferredAttributes) -> None:
    outputs = node.parsed.outputs
    node.attributes["to"] = _find_printed_type(outputs[0] if outputs else None)


def _infer_gather(node: InferredAttributes) -> None:
    if "axis" in node.parsed.details:
        node.attributes["axis"] = int(node.parsed.details["axis"])
    else:
        node.infer(axis=0)


def _infer_resize(node: InferredAttributes) -> None:
    details, count = node.parsed.details, len(node.parsed.inputs)
    modes = ("mode", "coordinate_transformation_mode")
    node.attributes.update(
        (key, details[key]) for key in modes if isinstance(details.get(key), str)
    )
    if node.attributes.get("coordinate_transformation_mode") == "asymmetric":
        node.infer(nearest_mode="floor")
    source, target = node.input_shape(0), node.output_shape()
    if not source or not target:
        return
    if count > 3:
        node.values[3] = target
    elif count == 3:
        sizes = zip(source, target, strict=False)
        node.values[2] = [after / before if before else 1.0 for before, after in sizes]


def _infer_target_shape(node: InferredAttributes) -> None:
    shape = node.dynamic_output
    if shape is not None and shape.count(None) <= 1:
        node.values[1] = [-1 if size is None else size for size in shape]


def _infer_squeeze(node: InferredAttributes) -> None:
    source, target = node.input_shape(0), node.output_shape()
    if source is None or target is None:
        return
    if node.parsed.op == "Squeeze":
        axes = _find_dropped_axes(source, target)
    else:
        axes = _find_dropped_axes(target, source)
    if len(node.parsed.inputs) > 1:
        node.values[1] = axes
    else:
        node.attributes["axes"] = axes


def _infer_slice(node: InferredAttributes) -> None:
    source, target = node.input_shape(0), node.output_shape()
    if not source or not target or len(source) != len(target) or len(node.parsed.inputs) < 3:
        return
    if node.input_shape(1) in ([1], []):
        axis = _find_changed_axis(source, target, 0)
        node.values = {1: [0], 2: [target[axis]], 3: [axis], 4: [1]}
        node.inferred.append("starts (0)")


def _infer_split(node: InferredAttributes) -> None:
    source = node.input_shape(0)
    if not source:
        return
    shapes = [node.output_shape(position) for position in range(len(node.parsed.outputs))]
    parts = [shape for shape in shapes if shape is not None and len(shape) == len(source)]
    if len(parts) < len(shapes):
        return
    axes = (_find_changed_axis(source, part, len(source) - 1) for part in parts)
    axis = min(axes, default=len(source) - 1)
    node.infer(axis=axis)
    if len(node.parsed.inputs) > 1:
        node.values[1] = [part[axis] for part in parts]


def _infer_topk(node: InferredAttributes) -> None:
    source, target = node.input_shape(0), node.output_shape()
    if source and target:
        axis = _find_changed_axis(source, target, len(source) - 1)
        node.infer(axis=axis)
        node.values[1] = [target[axis]]


_RULES: dict[str, Callable[[InferredAttributes], None]] = {
    "Conv": _infer_conv,
    "ConvTranspose": _infer_conv_transpose,
    "MaxPool": _infer_pool,
    "AveragePool": _infer_pool,
    "Gemm": _infer_gemm,
    "Concat": _infer_concat,
    "Transpose": _infer_transpose,
    "ReduceMax": _infer_reduce,
    "ReduceMean": _infer_reduce,
    "ReduceSum": _infer_reduce,
    "ReduceMin": _infer_reduce,
    "Cast": _infer_cast,
    "Gather": _infer_gather,
    "Resize": _infer_resize,
    "Reshape": _infer_target_shape,
    "Expand": _infer_target_shape,
    "Squeeze": _infer_squeeze,
    "Unsqueeze": _infer_squeeze,
    "Slice": _infer_slice,
    "Split": _infer_split,
    "TopK": _infer_topk,
}
