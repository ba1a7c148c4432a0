"""The ONNX graph behind a build, rebuilt from its parse section.

A log has every node with its operator, inputs and outputs, every shape and type, and no value: no weights, no scales.
Names and topology are exact; attributes that were not printed follow from shapes and are marked in the node's
``doc_string``; scales are invented, and equal only where the log shows that TensorRT took them as equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.records import ParsedNode, ParsedTensor, Shape
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from qdqtool.reconstruct.onnx_attributes import attributes_of

MARK = "inferred from shapes: "
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_TYPES = {
    "FLOAT": TensorProto.FLOAT, "HALF": TensorProto.FLOAT16, "FLOAT16": TensorProto.FLOAT16, "INT8": TensorProto.INT8,
    "UINT8": TensorProto.UINT8, "INT32": TensorProto.INT32, "INT64": TensorProto.INT64, "BOOL": TensorProto.BOOL,
    "BFLOAT16": TensorProto.BFLOAT16, "BF16": TensorProto.BFLOAT16, "DOUBLE": TensorProto.DOUBLE,
}
_MAX_ELEMENTS = 1 << 28


def graph_from_log(build: Build) -> tuple[onnx.ModelProto, list[str]]:
    """Rebuilds the graph.

    Args:
        build: A build with a parse section.

    Returns:
        The model, and what could not be known, one sentence each.

    Raises:
        BuildLogError: The log has no parse section, or one without any tensor.
    """
    nodes = build.parse.nodes
    if not any(node.outputs for node in nodes):
        raise BuildLogError(
            f"{', '.join(build.files) or 'the build'}: no parse section, so that no graph can be rebuilt; "
            "it is printed by 'trtexec --verbose --onnx=...'"
        )
    return _Rebuilder(build).run()


class _Rebuilder:
    def __init__(self, build: Build) -> None:
        self.build = build
        self.nodes = build.parse.nodes
        self.opset = build.parse.opset or 13
        major = (build.tensorrt or build.version_hint or "8").split(".")[0]
        self.narrowed = major.isdecimal() and int(major) < 10  # TensorRT before 10 prints INT64 as INT32
        self.tensors: dict[str, ParsedTensor] = {}
        self.made: set[str] = set()
        self.readers: dict[str, list[ParsedNode]] = {}
        for node in self.nodes:
            for tensor in node.inputs:
                if tensor is not None:
                    self.readers.setdefault(tensor.name, []).append(node)
                if tensor is not None and tensor.shape is not None:
                    self.tensors.setdefault(tensor.name, tensor)
            for tensor in node.outputs:
                if tensor is not None:
                    self.made.add(tensor.name)
                    self.tensors[tensor.name] = tensor
        self.values: dict[str, list[int] | list[float]] = {}
        self.inferred: Counter[str] = Counter()
        self.scales = _scales(build)

    def run(self) -> tuple[onnx.ModelProto, list[str]]:
        listed = self._listed()
        guesses = [attributes_of(node, listed.get(node.name, {})) for node in self.nodes]
        for node, guess in zip(self.nodes, guesses, strict=True):
            for position, value in guess.values.items():
                tensor = node.inputs[position] if position < len(node.inputs) else None
                if tensor is not None:
                    self.values.setdefault(tensor.name, value)
        protos = []
        for node, guess in zip(self.nodes, guesses, strict=True):
            for name in guess.inferred:
                self.inferred[f"{node.op} {name}"] += 1
            protos.append(self._node(node, guess.attributes, guess.inferred))
        initializers = [self._constant(name) for name in self._initializer_names()]
        graph = helper.make_graph(
            protos, "from_log", self._inputs(), self._outputs(), initializers, value_info=list(self._value_infos())
        )
        domains = {node.domain for node in protos if node.domain}
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="qdqtool", ir_version=8)
        model.doc_string = "Rebuilt from a TensorRT build log: zero weights, invented scales."
        return model, self._unknowns()

    def _node(self, node: ParsedNode, attributes: dict[str, Any], inferred: list[str]) -> onnx.NodeProto:
        inputs = [tensor.name if tensor is not None else "" for tensor in node.inputs]
        outputs = [tensor.name if tensor is not None else "" for tensor in node.outputs]
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
        if inferred:
            proto.doc_string = MARK + ", ".join(inferred)
        return proto

    def _axis(self, node: ParsedNode) -> dict[str, Any]:
        scale = node.inputs[1] if len(node.inputs) > 1 else None
        data = node.inputs[0] if node.inputs else None
        if scale is None or data is None or not scale.shape or scale.shape == (1,) or data.shape is None:
            return {}
        if len(data.shape) < 2:
            return {"axis": 0}
        fits = [axis for axis, size in enumerate(data.shape[:2]) if size == scale.shape[0]]
        made = [out.name for out in node.outputs if out is not None]
        transposed = any(reader.op == "ConvTranspose" for name in made for reader in self._readers(name))
        return {"axis": 1 if fits == [1] or (transposed and 1 in fits) else 0}

    def _readers(self, tensor: str, depth: int = 2) -> Iterator[ParsedNode]:
        """Who reads a tensor, through one Q or DQ."""
        for node in self.readers.get(tensor, ()):
            yield node
            if depth > 1 and node.op in (_Q, _DQ):
                for out in node.outputs:
                    if out is not None:
                        yield from self._readers(out.name, depth - 1)

    def _type(self, tensor: ParsedTensor | None, *, quantized: bool = False) -> int:
        if quantized:
            return int(TensorProto.INT8)
        kind = int(_TYPES.get(tensor.dtype if tensor is not None else "", TensorProto.FLOAT))
        return int(TensorProto.INT64) if kind == TensorProto.INT32 and self.narrowed else kind

    def _constant(self, name: str) -> onnx.TensorProto:
        tensor = self.tensors.get(name)
        shape = [d or 0 for d in tensor.shape] if tensor is not None and tensor.shape is not None else []
        count = int(np.prod(shape, dtype=np.float64)) if shape else 1
        if count > _MAX_ELEMENTS:
            raise BuildLogError(f"tensor '{name[:80]}' of the log would have {count} elements; the log is damaged")
        kind = self._type(tensor)
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        array: npt.NDArray[Any] = np.zeros(shape, dtype)
        if name in self.scales:
            array = np.full(shape, self.scales[name], dtype)
        value = self.values.get(name)
        if value is not None and len(value) == count:
            array = np.asarray(value).astype(dtype).reshape(shape)
        return numpy_helper.from_array(array, name)

    def _initializer_names(self) -> list[str]:
        used = {t.name for node in self.nodes for t in node.inputs if t is not None}
        return [name for name in dict.fromkeys(self.build.parse.initializers) if name in used and name not in self.made]

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        if self.build.parse.inputs:
            return [_info(t.name, int(_TYPES.get(t.dtype, TensorProto.FLOAT)),
            t.shape) for t in self.build.parse.inputs]
        constants = set(self.build.parse.initializers)
        free = [name for name in self.tensors if name not in self.made and name not in constants]
        return [_info(name, self._type(self.tensors[name]), self.tensors[name].shape) for name in free]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        names = [name for name in dict.fromkeys(self.build.parse.outputs) if name in self.made]
        if not names:
            used = {t.name for node in self.nodes for t in node.inputs if t is not None}
            names = [t.name for node in self.nodes for t in node.outputs if t is not None and t.name not in used]
        quantized = self._quantized()
        return [
            _info(name, self._type(self.tensors[name], quantized=name in quantized), self.tensors[name].shape)
            for name in names
        ]

    def _quantized(self) -> set[str]:
        return {t.name for node in self.nodes if node.op == _Q for t in node.outputs if t is not None}

    def _value_infos(self) -> Iterator[onnx.ValueInfoProto]:
        quantized = self._quantized()
        outputs = set(self.build.parse.outputs)
        for node in self.nodes:
            for tensor in node.outputs:
                if tensor is None or node.op in ("Constant", "Cast") or tensor.name in outputs or not tensor.name:
                    continue
                if tensor.shape is not None:
                    yield _info(tensor.name, self._type(tensor, quantized=tensor.name in quantized), tensor.shape)

    def _listed(self) -> dict[str, dict[str, Any]]:
        """Node name to the fields of the engine layer that holds it; merged layers are left out."""
        known = self.build.parse.names
        table: dict[str, dict[str, Any]] = {}
        for layer in self.build.layers:
            if "ParameterType" not in layer.extras:
                continue
            fused = layer.fused(known)
            if fused.kind != "layer" or len(fused.alternatives) != 1:
                continue
            fields = dict(layer.extras)
            fields.update({k.removeprefix("Conv"): v for k, v in layer.extras.items() if k.startswith("Conv")})
            for component in fused.bases:
                table.setdefault(component, fields)
        return table

    def _unknowns(self) -> list[str]:
        lines = ["weights and other constants: their values are not in a log; zeros were written"]
        qdq = sum(node.op in (_Q, _DQ) for node in self.nodes)
        if qdq:
            lines.append(
                f"scales of {qdq} Q and DQ: not in a log; invented, and equal only where the log shows that TensorRT "
                "merged Qs or where they read one constant"
            )
        lines += [
            f"{what} of {number} node{'s' if number > 1 else ''}: not printed; inferred from shapes (see doc_string)"
            for what, number in sorted(self.inferred.items())
        ]
        alphas = sum(node.op == "LeakyRelu" for node in self.nodes)
        if alphas:
            lines.append(f"alpha of {alphas} LeakyRelu: not printed; ONNX's default was left")
        others = Counter(node.op for node in self.nodes if not onnx.defs.has(node.op))
        lines += [f"{op} ({number}): no operator of ONNX; put into domain 'unknown'" for op, number in others.items()]
        if self.narrowed and any(t.dtype == "INT32" for t in self.tensors.values()):
            lines.append("integers: TensorRT before 10 prints INT64 as INT32; INT64 was written")
        if not self.build.parse.opset:
            lines.append("opset: not printed; 13 was taken")
        lines += [f"the log: {m}" for m in self.build.missing if m.startswith("parse section")]
        return lines


def _info(name: str, kind: int, shape: Shape | None) -> onnx.ValueInfoProto:
    dims = None if shape is None else [f"{name}_{i}" if d is None else d for i, d in enumerate(shape)]
    return helper.make_tensor_value_info(name, kind, dims)


def _scales(build: Build) -> dict[str, float]:
    """Scale tensor name to an invented value: one for each group that the log shows to be equal."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    scale_of = {
        node.name: node.inputs[1].name for node in build.parse.nodes
        if node.op in (_Q, _DQ) and len(node.inputs) > 1 and node.inputs[1] is not None
    }
    maker = {t.name: node.name for node in build.parse.nodes if node.op == _Q for t in node.outputs if t is not None}
    for node in build.parse.nodes:  # a DQ has its Q's scale
        source = node.inputs[0] if node.inputs else None
        if node.op == _DQ and source is not None and source.name in maker and node.name in scale_of:
            first = scale_of.get(maker[source.name])
            if first is not None:
                parent[root(scale_of[node.name])] = root(first)
    for event in build.trace:
        if event.kind == "Eliminating":
            pair = [scale_of.get(base_name(name)) for name in (event.subject, event.object)]
            if pair[0] is not None and pair[1] is not None:
                parent[root(pair[0])] = root(pair[1])
    numbers: dict[str, int] = {}
    return {
        name: (1.0 + numbers.setdefault(root(name),
        len(numbers)) / 1024) / 64 for name in dict.fromkeys(scale_of.values())
    }
