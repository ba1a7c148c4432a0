"""The ONNX graph behind a build, rebuilt from its parse section.

A log has every node with its operator, inputs and outputs, every shape and type, and no value: no weights, no scales.
Names and topology are exact; attributes that were not printed follow from shapes and are marked in the node's
``doc_string``; scales are invented, and equal only where the log shows that TensorRT took them as equal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.buildlog.layers import int_list
from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.types import Build, ParsedNode, ParsedTensor, Section, Shape, static_shape
from qdqtool.errors import BuildLogError
from qdqtool.util import limits
from qdqtool.util.notes import Note, Remark

MARK = "inferred from shapes: "
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
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
_MAX_RANK = 10
_STRIDES = 64  # that are tried below the one that divides the sizes: a log may state any size


def graph_from_log(build: Build) -> tuple[onnx.ModelProto, list[Note]]:
    """Rebuilds the graph from the parse section: the model, and what could not be known, one sentence each."""
    if not any(node.outputs for node in build.parse.nodes):
        raise BuildLogError(
            "no parse section, so that no graph can be rebuilt; it is printed by "
            "'trtexec --verbose --onnx=...'",
            ", ".join(build.files) or "the build",
            code="no-parse-section",
        )
    return _GraphRebuilder(build).run()


def _present(tensors: Sequence[ParsedTensor | None]) -> list[ParsedTensor]:
    """Those that are set."""
    return [t for t in tensors if t is not None]


class _GraphRebuilder:
    def __init__(self, build: Build) -> None:
        self.build = build
        self.nodes = build.parse.nodes
        self.opset = build.parse.opset or 13
        major = (build.tensorrt or build.version_hint or "8").split(".")[0]
        self.narrowed = (
            major.isdecimal() and int(major) < 10
        )  # TensorRT before 10 prints INT64 as INT32
        self.tensors: dict[str, ParsedTensor] = {}
        self.made: set[str] = set()
        self.quantized: set[str] = set()
        self.read: set[str] = set()
        for node in self.nodes:
            for tensor in _present(node.inputs):
                self.read.add(tensor.name)
                if tensor.shape is not None:
                    self.tensors.setdefault(tensor.name, tensor)
            outputs = {tensor.name: tensor for tensor in _present(node.outputs)}
            self.tensors |= outputs
            self.made.update(outputs)
            self.quantized.update(outputs if node.op == _Q else ())
        direct = {t.name for n in self.nodes if n.op == "ConvTranspose" for t in _present(n.inputs)}
        #: Tensors that a ConvTranspose reads, through one Q or DQ as well.
        self.transposed = direct | {
            t.name
            for n in self.nodes
            if n.op in (_Q, _DQ) and any(out.name in direct for out in _present(n.outputs))
            for t in _present(n.inputs)
        }
        self.values: dict[str, list[int] | list[float]] = {}
        self.scales = _invent_scales(build)
        self._bytes = 0  # of constants

    def run(self) -> tuple[onnx.ModelProto, list[Note]]:
        listed = self._collect_listed_fields()
        guesses = [infer_attributes(node, listed.get(node.name, {})) for node in self.nodes]
        for guess in guesses:
            for position, tensor in enumerate(guess.node.inputs):
                if tensor is not None and position in guess.values:
                    self.values.setdefault(tensor.name, guess.values[position])
        protos = [self._node(guess) for guess in guesses]
        names = [
            name
            for name in dict.fromkeys(self.build.parse.initializers)
            if name in self.read and name not in self.made
        ]
        graph = helper.make_graph(
            protos,
            "from_log",
            self._inputs(),
            self._outputs(),
            [self._constant(name) for name in names],
            value_info=list(self._value_infos()),
        )
        domains = {node.domain for node in protos if node.domain}
        opsets = [
            helper.make_opsetid("", self.opset),
            *(helper.make_opsetid(domain, 1) for domain in sorted(domains)),
        ]
        model = helper.make_model(
            graph, opset_imports=opsets, producer_name="qdqtool", ir_version=8
        )
        model.doc_string = "Rebuilt from a TensorRT build log: zero weights, invented scales."
        return model, self._describe_gaps(
            Counter(f"{g.node.op} {name}" for g in guesses for name in g.inferred)
        )

    def _node(self, guess: InferredAttributes) -> onnx.NodeProto:
        node, attributes = guess.node, guess.attributes
        inputs, outputs = (
            [t.name if t is not None else "" for t in ends] for ends in (node.inputs, node.outputs)
        )
        while inputs and not inputs[-1]:
            inputs.pop()
        if node.op == "Constant":
            attributes = {"value": self._constant(outputs[0])} if outputs else {}
        elif node.op in (_Q, _DQ):
            attributes = self._axis(node)
        elif node.op == "ReduceSum" and self.opset >= 13:
            attributes = {key: value for key, value in attributes.items() if key != "axes"}
        domain = "" if onnx.defs.has(node.op) else "unknown"
        proto = helper.make_node(node.op, inputs, outputs, node.name, domain=domain, **attributes)
        if guess.inferred:
            proto.doc_string = MARK + ", ".join(guess.inferred)
        return proto

    def _axis(self, node: ParsedNode) -> dict[str, Any]:
        data, scale = (*node.inputs, None, None)[:2]
        if (
            scale is None
            or data is None
            or not scale.shape
            or scale.shape == (1,)
            or data.shape is None
        ):
            return {}
        if len(data.shape) < 2:
            return {"axis": 0}
        fits = [axis for axis, size in enumerate(data.shape[:2]) if size == scale.shape[0]]
        transposed = any(out.name in self.transposed for out in _present(node.outputs))
        return {"axis": 1 if fits == [1] or (transposed and 1 in fits) else 0}

    def _type(self, tensor: ParsedTensor | None) -> int:
        kind = _type_of(tensor)
        return int(TensorProto.INT64) if kind == TensorProto.INT32 and self.narrowed else kind

    def _output_info(self, tensor: ParsedTensor) -> onnx.ValueInfoProto:
        kind = int(TensorProto.INT8) if tensor.name in self.quantized else self._type(tensor)
        return _info(tensor.name, kind, tensor.shape)

    def _constant(self, name: str) -> onnx.TensorProto:
        tensor = self.tensors.get(name)
        shape = (
            [d or 0 for d in tensor.shape]
            if tensor is not None and tensor.shape is not None
            else []
        )
        dtype = helper.tensor_dtype_to_np_dtype(self._type(tensor))
        self._bytes += (
            math.prod(d or 1 for d in shape) * dtype.itemsize
        )  # numpy counts past zeros too
        of_log = ", ".join(self.build.files) or "the log"
        if len(shape) > limits.RANK:
            raise BuildLogError(
                f"'{name[:80]}' has {len(shape)} dimensions; the limit is {limits.RANK}",
                of_log,
                code="too-many-dimensions",
                node=name,
            )
        limits.check_size(
            self._bytes,
            limits.LOG_CONSTANTS,
            f"{of_log}: its constants up to '{name[:80]}' of {shape} would take",
            BuildLogError,
        )
        array: npt.NDArray[Any] = np.full(shape, self.scales.get(name, 0), dtype)
        value = self.values.get(name)
        if value is not None and len(value) == array.size:
            array = np.asarray(value).astype(dtype).reshape(shape)
        return numpy_helper.from_array(array, name)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        if self.build.parse.inputs:
            return [_info(t.name, _type_of(t), t.shape) for t in self.build.parse.inputs]
        there = self.made.union(self.build.parse.initializers)
        return [
            _info(name, self._type(tensor), tensor.shape)
            for name, tensor in self.tensors.items()
            if name not in there
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        names = [name for name in dict.fromkeys(self.build.parse.outputs) if name in self.made]
        if not names:
            names = [
                t.name
                for node in self.nodes
                for t in _present(node.outputs)
                if t.name not in self.read
            ]
        return [self._output_info(self.tensors[name]) for name in names]

    def _value_infos(self) -> Iterator[onnx.ValueInfoProto]:
        outputs = {"", *self.build.parse.outputs}
        made = (
            tensor
            for n in self.nodes
            if n.op not in ("Constant", "Cast")
            for tensor in _present(n.outputs)
        )
        return (self._output_info(t) for t in made if t.name not in outputs and t.shape is not None)

    def _collect_listed_fields(self) -> dict[str, dict[str, Any]]:
        """Node name to the fields of the engine layer that holds it; merged layers are left out."""
        known = self.build.parse.names
        table: dict[str, dict[str, Any]] = {}
        for layer in self.build.layers:
            fused = layer.parse_name(known)
            if (
                "ParameterType" in layer.extras
                and fused.kind == "layer"
                and len(fused.alternatives) == 1
            ):
                of_conv = {
                    k.removeprefix("Conv"): v
                    for k, v in layer.extras.items()
                    if k.startswith("Conv")
                }
                for component in fused.bases:
                    table.setdefault(component, layer.extras | of_conv)
        return table

    def _describe_gaps(self, inferred: Counter[str]) -> list[Note]:
        lines = [Remark.CONSTANTS_LACK()]
        if qdq := sum(node.op in (_Q, _DQ) for node in self.nodes):
            lines.append(Remark.SCALES_LACK(count=qdq))
        lines += [
            Remark.ATTRIBUTE_INFERRED(what=what, count=number)
            for what, number in sorted(inferred.items())
        ]
        if alphas := sum(node.op == "LeakyRelu" for node in self.nodes):
            lines.append(Remark.ALPHAS_LACK(count=alphas))
        others = Counter(node.op for node in self.nodes if not onnx.defs.has(node.op))
        lines += [Remark.NO_OPERATOR(op=op, count=number) for op, number in others.items()]
        if self.narrowed and any(t.dtype == "INT32" for t in self.tensors.values()):
            lines.append(Remark.INTEGERS_NARROWED())
        if not self.build.parse.opset:
            lines.append(Remark.OPSET_LACKS())
        lines += [Remark.LOG_LACKS(gap=m) for m in self.build.gaps if m.section == Section.PARSE]
        return lines


def _type_of(tensor: ParsedTensor | None) -> int:
    return int(_TYPES.get(tensor.dtype if tensor is not None else "", TensorProto.FLOAT))


def _info(name: str, kind: int, shape: Shape | None) -> onnx.ValueInfoProto:
    dims = (
        None if shape is None else [f"{name}_{i}" if d is None else d for i, d in enumerate(shape)]
    )
    return helper.make_tensor_value_info(name, kind, dims)


def _invent_scales(build: Build) -> dict[str, float]:
    """Scale tensor name to an invented value: one for each group that the log shows to be equal."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    nodes = [(n, (*n.inputs, None, None)) for n in build.parse.nodes if n.op in (_Q, _DQ)]
    scale_of = {node.name: ends[1].name for node, ends in nodes if ends[1] is not None}
    maker = {
        t.name: node.name for node, _ in nodes if node.op == _Q for t in _present(node.outputs)
    }
    ties = [
        (scale_of.get(node.name), scale_of.get(maker.get(ends[0].name, "")))
        for node, ends in nodes
        if node.op == _DQ and ends[0] is not None
    ]  # a DQ has its Q's scale
    ties += [
        (scale_of.get(base_name(e.subject)), scale_of.get(base_name(e.object)))
        for e in build.trace
        if e.kind == "Eliminating"
    ]
    for one, other in ties:
        if one is not None and other is not None:
            parent[root(one)] = root(other)
    numbers: dict[str, int] = {}
    return {
        name: (1.0 + numbers.setdefault(root(name), len(numbers)) / 1024) / 64
        for name in dict.fromkeys(scale_of.values())
    }


# Attributes and constant values -------------------------------------------------------------------------------------


@dataclass(slots=True)
class InferredAttributes:
    """What is known of a node: what was printed is exact; what follows from shapes need not be what the model had.

    (A 3x3 kernel with stride 2 and padding 1 and a 2x2 kernel with stride 2 halve a map alike.)

    Attributes:
        listed: Fields of the engine layer that absorbed it (``Kernel``, ``Stride``, ...), empty when not listed.
        inferred: Names of the attributes that follow from shapes and were not printed.
        values: Input position to the integers (or floats) of a constant there.
    """

    node: ParsedNode
    listed: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    inferred: list[str] = field(default_factory=list)
    values: dict[int, list[int] | list[float]] = field(default_factory=dict)

    def shape(self, position: int) -> list[int] | None:
        """Shape of an input where all of it is known."""
        return _static_shape(self.node.inputs, position)

    def output_shape(self, position: int = 0) -> list[int] | None:
        """Shape of an output where all of it is known."""
        return _static_shape(self.node.outputs, position)

    @property
    def output(self) -> Shape | None:
        """Shape of the first output, with unknown dimensions."""
        return next(
            (None if tensor is None else tensor.shape for tensor in self.node.outputs), None
        )

    def infer(self, **attributes: Any) -> None:
        """Sets attributes that were not printed."""
        self.attributes.update(attributes)
        self.inferred += attributes

    def infer_window(self, fits: Iterable[tuple[int, int, int]]) -> None:
        """Strides and pads from stride, padding before and padding behind of each axis."""
        rows = list(fits)
        strides, begin, end = ([row[i] for row in rows] for i in range(3))
        self.infer(strides=strides, pads=[*begin, *end])


def infer_attributes(node: ParsedNode, listed: dict[str, Any]) -> InferredAttributes:
    """Attributes of a node and values of its constant inputs; arguments as for :class:`InferredAttributes`."""
    guess = InferredAttributes(node, listed)
    if node.op in _HANDLERS:
        _HANDLERS[node.op](guess)
    return guess


def _static_shape(tensors: Sequence[ParsedTensor | None], position: int) -> list[int] | None:
    tensor = tensors[position] if position < len(tensors) else None
    return None if tensor is None else static_shape(tensor.shape)


def _find_changed_axis(source: Sequence[int], made: Sequence[int], default: int) -> int:
    """The first axis along which two shapes differ."""
    return next((i for i, (a, b) in enumerate(zip(source, made, strict=False)) if a != b), default)


def _window(guess: InferredAttributes, fields: dict[str, Any], kernel: list[int] | None) -> None:
    """Kernel, strides, pads of a convolution or pooling."""
    details, attributes = guess.node.details, guess.attributes
    for attribute, key, name in (
        ("kernel_shape", "kernel", "Kernel"),
        ("strides", "strides", "Stride"),
        ("dilations", "dilations", "Dilation"),
    ):
        value = int_list(details.get(key)) or int_list(fields.get(name))
        if value and not (attribute == "dilations" and guess.node.op != "Conv"):
            attributes[attribute] = value
    before = int_list(details.get("prepadding")) or int_list(fields.get("PrePadding"))
    after = int_list(details.get("postpadding")) or int_list(fields.get("PostPadding"))
    if before is not None and after is not None:
        attributes["pads"] = [*before, *after]
    if kernel:
        attributes["kernel_shape"] = kernel
    if "strides" in attributes and "pads" in attributes:
        return
    source, target = guess.shape(0), guess.output_shape()
    if source is None or target is None or len(source) < 3 or len(source) != len(target):
        guess.inferred.append("strides and pads (defaults; the shapes are not known)")
        return
    edges = list(zip(source[2:], target[2:], strict=True))
    known = [*attributes.get("kernel_shape", ()), *[0] * len(edges)]
    # A usual pooling window: 5 where the size stays (SPPF), 3 where it halves, else the whole stride.
    sizes = [
        size
        or (
            5 if made == given else 3 if made == (given + 1) // 2 else max(1, given // max(1, made))
        )
        for (given, made), size in zip(edges, known, strict=False)
    ]
    if "kernel_shape" not in attributes:
        guess.infer(kernel_shape=sizes)
    guess.infer_window(_fit_window(*edge, size) for edge, size in zip(edges, sizes, strict=True))


def _fit_window(given: int, made: int, size: int) -> tuple[int, int, int]:
    """Stride and padding (before, after) that turn ``given`` into ``made``; the usual ones first."""
    usual = (size - 1) // 2
    nearest = max(1, round(given / max(1, made)))
    near = range(max(1, nearest - _STRIDES), max(nearest + 3, 5))
    for stride in sorted(near, key=lambda s: abs(s - nearest)):
        for low, high in ((usual, usual), (0, 0), (usual, size - 1 - usual), (0, 1)):
            if given + low + high >= size and (given + low + high - size) // stride + 1 == made:
                return stride, low, high
    total = max(0, (made - 1) * nearest + size - given)
    return nearest, total // 2, total - total // 2


def _conv(guess: InferredAttributes) -> None:
    weights, source = guess.shape(1), guess.shape(0)
    _window(guess, guess.listed, weights[2:] if weights else None)
    if (
        weights
        and source
        and min(len(weights), len(source)) > 1
        and weights[1]
        and source[1] % weights[1] == 0
    ):
        guess.attributes["group"] = source[1] // weights[1]


def _conv_transpose(guess: InferredAttributes) -> None:
    weights, source, target = guess.shape(1), guess.shape(0), guess.output_shape()
    if not weights or not source or not target or min(len(weights), len(target)) < 2:
        return
    guess.attributes |= {
        "kernel_shape": weights[2:],
        "group": max(1, target[1] // max(1, weights[1])),
    }
    fits = []
    for given, made, size in zip(source[2:], target[2:], weights[2:], strict=False):
        stride = max(1, round(made / max(1, given)))
        total = max(0, (given - 1) * stride + size - made)
        fits.append((stride, total // 2, total - total // 2))
    guess.infer_window(fits)


def _pool(guess: InferredAttributes) -> None:
    window = {
        k.removeprefix("Pooling"): value
        for k, value in guess.listed.items()
        if k.startswith("Pooling")
    }
    fields = window if "WindowSize" in window else guess.listed
    _window(guess, {**fields, "Kernel": fields.get("WindowSize")}, None)


def _gemm(guess: InferredAttributes) -> None:
    left, right, made = guess.shape(0), guess.shape(1), guess.output_shape()
    if left and right and made and len(right) == 2:
        guess.infer(transB=int(right[0] == made[-1] and right[1] == left[-1]))


def _concat(guess: InferredAttributes) -> None:
    first, made = guess.shape(0), guess.output_shape()
    guess.infer(
        axis=_find_changed_axis(first, made, 0)
        if first and made
        else int(len(guess.output or ()) > 1)
    )


def _transpose(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), guess.output_shape()
    if not source or not made or sorted(source) != sorted(made):
        guess.inferred.append("perm (the reverse, ONNX's default)")
        return
    places: dict[int, list[int]] = {}
    for place in reversed(range(len(source))):
        places.setdefault(source[place], []).append(place)
    guess.attributes["perm"] = [places[size].pop() for size in made]
    guess.inferred.append(
        "perm" if len(set(source)) < len(source) else "perm (the only one that fits)"
    )


def _reduce(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), guess.output_shape()
    if not source or made is None:
        return
    kept = len(source) == len(made)
    axes = (
        [i for i, (a, b) in enumerate(zip(source, made, strict=True)) if a != b]
        if kept
        else _find_dropped_axes(source, made)
    )
    guess.attributes["keepdims"] = int(kept)
    guess.infer(axes=axes or [len(source) - 1])


def _find_dropped_axes(long: list[int], short: list[int]) -> list[int]:
    """Axes of ``long`` that are missing from ``short``: ones before others, later ones before earlier ones."""
    count = len(long) - len(short)
    if not 0 < count <= len(long) <= _MAX_RANK:
        return []
    choices = list(itertools.combinations(reversed(range(len(long))), count))
    for axes in sorted(choices, key=lambda chosen: sum(long[axis] != 1 for axis in chosen)):
        if [size for axis, size in enumerate(long) if axis not in axes] == short:
            return sorted(axes)
    return []


def _cast(guess: InferredAttributes) -> None:
    guess.attributes["to"] = _type_of(next(iter(guess.node.outputs), None))


def _gather(guess: InferredAttributes) -> None:
    if "axis" in guess.node.details:
        guess.attributes["axis"] = int(guess.node.details["axis"])
    else:
        guess.infer(axis=0)


def _resize(guess: InferredAttributes) -> None:
    inputs, details = guess.node.inputs, guess.node.details
    modes = ("mode", "coordinate_transformation_mode")
    guess.attributes |= {key: details[key] for key in modes if isinstance(details.get(key), str)}
    if guess.attributes.get("coordinate_transformation_mode") == "asymmetric":
        guess.infer(nearest_mode="floor")
    source, made = guess.shape(0), guess.output_shape()
    if source and made and len(inputs) > 3:
        guess.values[3] = made
    elif source and made and len(inputs) == 3:
        guess.values[2] = [b / a if a else 1.0 for a, b in zip(source, made, strict=False)]


def _target_shape(guess: InferredAttributes) -> None:
    if guess.output is not None and guess.output.count(None) <= 1:
        guess.values[1] = [-1 if d is None else d for d in guess.output]


def _squeeze(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), guess.output_shape()
    if source is None or made is None:
        return
    axes = (
        _find_dropped_axes(source, made)
        if guess.node.op == "Squeeze"
        else _find_dropped_axes(made, source)
    )
    if len(guess.node.inputs) > 1:
        guess.values[1] = axes
    else:
        guess.attributes["axes"] = axes


def _slice(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), guess.output_shape()
    if not source or not made or len(source) != len(made) or len(guess.node.inputs) < 3:
        return
    if guess.shape(1) in ([1], []):
        axis = _find_changed_axis(source, made, 0)
        guess.values = {1: [0], 2: [made[axis]], 3: [axis], 4: [1]}
        guess.inferred.append("starts (0)")


def _split(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), [guess.output_shape(i) for i in range(len(guess.node.outputs))]
    known = [m for m in made if m is not None]
    if not source or len(known) < len(made) or any(len(m) != len(source) for m in known):
        return
    axis = next(
        (i for i in range(len(source)) if any(m[i] != source[i] for m in known)), len(source) - 1
    )
    guess.infer(axis=axis)
    if len(guess.node.inputs) > 1:
        guess.values[1] = [m[axis] for m in known]


def _topk(guess: InferredAttributes) -> None:
    source, made = guess.shape(0), guess.output_shape()
    if source and made:
        axis = _find_changed_axis(source, made, len(source) - 1)
        guess.infer(axis=axis)
        guess.values[1] = [made[axis]]


_HANDLERS: dict[str, Callable[[InferredAttributes], None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "Gemm": _gemm,
    "Concat": _concat,
    "Transpose": _transpose,
    "ReduceMax": _reduce,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "ReduceMin": _reduce,
    "Cast": _cast,
    "Gather": _gather,
    "Resize": _resize,
    "Reshape": _target_shape,
    "Expand": _target_shape,
    "Squeeze": _squeeze,
    "Unsqueeze": _squeeze,
    "Slice": _slice,
    "Split": _split,
    "TopK": _topk,
}
