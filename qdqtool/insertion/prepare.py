"""What has to be done to a float model before Q/DQ pairs go in.

* The model's own functions are inlined.
* The opset is raised to 13, the first with per-channel Q/DQ (to 19 where Q/DQ have to take FP16).
* Weights computed from constants (Identity, Cast, Transpose, Reshape, ConstantOfShape) become constants, or TensorRT 8
  ends with "Could not fuse 2nd input (kernel weights) of CONVOLUTION".
* Nodes that share a name get names of their own.
* Weights that several nodes share are copied, one for each ("copy the weight for the convs who share the weight").
* BatchNormalization behind a convolution is folded into its weights, so that the weights that are quantized are those
  that TensorRT computes with.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.graph import Model, Node, without_large_weights
from qdqtool.operators import WEIGHTED

MIN_OPSET = 13
HALF_OPSET = 19  # the first whose Q and DQ take FP16 data and scales
_MAX_FILLED = 1 << 28  # elements of a ConstantOfShape, so that a small file cannot ask for any amount of memory
_MIN_IR = {13: 7, 19: 9}
_Array = npt.NDArray[Any]


def prepare(proto: onnx.ModelProto, *, opset: int = MIN_OPSET, path: str = "") -> list[str]:
    """Prepares a float model in place.

    Args:
        proto: The model with all its weights in memory.
        opset: Raise the opset to this when it is lower.
        path: For error messages.

    Returns:
        What was done, one sentence each, to be told to the user.

    Raises:
        ModelError: The opset cannot be raised.
    """
    notes = []
    if proto.functions:
        _inline(proto, path)
        notes.append("the model's own functions were inlined")
    before = _opset(proto)
    if before < opset:
        _raise_opset(proto, opset, path)
        notes.append(f"opset raised from {before} to {opset}")
    proto.ir_version = max(proto.ir_version, _MIN_IR.get(opset, 7))
    renamed = _rename_duplicates(proto)
    if renamed:
        notes.append(f"{renamed} nodes that shared a name were named after their outputs (onnxruntime wants that)")
    sums = [n for n in proto.graph.node if n.op_type == "Sum" and n.domain in ("", "ai.onnx") and len(n.input) == 2]
    for node in sums:
        node.op_type = "Add"
    if sums:
        notes.append(f"{len(sums)} Sum nodes of two inputs were written as Add, which TensorRT fuses")
    editor = _Editor(proto, path)
    for count, what in (
        (editor.fold_constant_weights(), "weights computed from constants were folded"),
        (editor.copy_shared_weights(), "weights shared by several nodes were copied"),
        (editor.fold_batch_normalization(), "BatchNormalization nodes were folded into their convolutions"),
    ):
        if count:
            notes.append(f"{count} {what}")
    return notes


def index_of(proto: onnx.ModelProto, path: str = "") -> Model:
    """An index over a model that is being edited (its hash is not computed)."""
    return Model(proto, path, sha256="edited")


def _inline(proto: onnx.ModelProto, path: str) -> None:
    """Replaces calls of the model's own functions by their nodes; what they hold could not be quantized otherwise."""
    from onnx import inliner

    try:
        inlined = inliner.inline_local_functions(proto)
    except Exception as error:  # C++ again
        reason = " ".join(str(error).split())[:120]
        raise ModelError(f"{path or 'model'}: functions cannot be inlined ({reason}); export without them") from error
    proto.graph.CopyFrom(inlined.graph)
    del proto.functions[:]
    del proto.opset_import[:]
    proto.opset_import.extend(inlined.opset_import)


def _rename_duplicates(proto: onnx.ModelProto) -> int:
    """Gives nodes that share a name the name of their first output, by which all of qdqtool calls them anyway."""
    counts = Counter(n.name for n in proto.graph.node if n.name)
    shared = [n for n in proto.graph.node if counts[n.name] > 1]
    taken = set(counts)
    for node in shared:
        wanted = next((o for o in node.output if o), node.op_type)
        name, number = wanted, 1
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        node.name = name
    return len(shared)


def _opset(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)


def _raise_opset(proto: onnx.ModelProto, opset: int, path: str) -> None:
    from onnx import version_converter

    where = path or "model"
    slim = without_large_weights(proto)
    try:
        converted = version_converter.convert_version(slim, opset)
    except Exception as error:  # the converter raises whatever its C++ meets
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{where}: opset {_opset(proto)} cannot be raised to {opset} ({reason}); export with opset {opset} or newer"
        ) from error
    known = {t.name for t in proto.graph.initializer}
    _restore_names(proto, converted)
    del proto.graph.node[:]
    proto.graph.node.extend(converted.graph.node)
    proto.graph.initializer.extend(t for t in converted.graph.initializer if t.name not in known)
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset


def _restore_names(proto: onnx.ModelProto, converted: onnx.ModelProto) -> None:
    """Puts node names and doc strings back where the converter dropped them."""
    originals = {n.output[0]: n for n in proto.graph.node if n.output}
    for node in converted.graph.node:
        original = originals.get(node.output[0]) if node.output else None
        if original is not None and original.op_type == node.op_type:
            node.name = original.name
            node.doc_string = original.doc_string


class _Editor:
    def __init__(self, proto: onnx.ModelProto, path: str) -> None:
        self.proto = proto
        self.path = path
        self.model = index_of(proto, path)

    def _refresh(self) -> None:
        self.model = index_of(self.proto, self.path)

    def _new_name(self, wanted: str) -> str:
        taken = {t.name for t in self.proto.graph.initializer} | self.model.producers.keys()
        name, number = wanted, 1
        while name in taken or name in self.model.inputs:
            name, number = f"{wanted}_{number}", number + 1
        return name

    def _add_constant(self, name: str, value: _Array) -> str:
        name = self._new_name(name)
        self.proto.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def _remove_nodes(self, indices: set[int]) -> None:
        kept = [n for i, n in enumerate(self.proto.graph.node) if i not in indices]
        del self.proto.graph.node[:]
        self.proto.graph.node.extend(kept)

    def _drop_unused(self, names: set[str]) -> None:
        """Removes initializers and Constant nodes that nothing reads any more."""
        self._refresh()
        unused = {t for t in names if not self.model.readers(t) and not self.model.is_output(t)}
        graph = self.proto.graph
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name in unused:
                del graph.initializer[i]
        for i in reversed(range(len(graph.input))):
            if graph.input[i].name in unused:
                del graph.input[i]
        self._remove_nodes({n.index for n in self.model.nodes if n.op == "Constant" and n.output in unused})
        self._refresh()

    def fold_constant_weights(self) -> int:
        """Replaces weights that are computed from constants by their value."""
        count = 0
        for node in self.model.nodes:
            for position in (1, 2) if node.op in WEIGHTED else (1, 2, 3, 4) if node.op == "BatchNormalization" else ():
                name = node.input(position)
                value = self._computed(name) if name and not self.model.is_constant(name) else None
                if value is not None:
                    node.proto.input[position] = self._add_constant(f"{name}_folded", value)
                    count += 1
        if count:
            self._remove_dead()
        return count

    def _computed(self, tensor: str, depth: int = 0) -> _Array | None:
        value = self.model.constant(tensor)
        if value is not None:
            return value
        node = self.model.producer(tensor)
        if node is None or depth > 8 or node.domain not in ("", "ai.onnx"):
            return None
        source = self._computed(node.input(0), depth + 1) if node.inputs else None
        if source is None:
            return None
        if node.op == "Identity":
            return source
        if node.op == "ConstantOfShape":
            return _filled(source, node.attributes.get("value"))
        if node.op == "Cast":
            return _cast(source, node.integer("to", 0))
        if node.op == "Transpose":
            return np.transpose(source, node.attributes.get("perm"))
        if node.op == "Reshape":
            shape = self.model.constant(node.input(1))
            if shape is None or node.integer("allowzero", 0):
                return None
            wanted = [source.shape[i] if d == 0 else int(d) for i, d in enumerate(shape.reshape(-1))]
            return source.reshape(wanted)
        return None

    def _remove_dead(self) -> None:
        """Removes nodes in front of weights whose results are no longer read, and their constants."""
        while True:
            self._refresh()
            dead = {
                n.index
                for n in self.model.nodes
                if n.op in ("Identity", "Cast", "Transpose", "Reshape", "ConstantOfShape")
                and not self.model.readers(n.output)
                and not self.model.is_output(n.output)
            }
            if not dead:
                return
            names = {t for n in self.model.nodes if n.index in dead for t in n.inputs if self.model.is_constant(t)}
            self._remove_nodes(dead)
            self._drop_unused(names)

    def copy_shared_weights(self) -> int:
        """Gives every weighted node weights of its own."""
        count = 0
        owners: dict[str, int] = {}
        for node in self.model.nodes:
            name = node.input(1)
            if node.op not in WEIGHTED or not name or not self.model.is_constant(name):
                continue
            owner = owners.setdefault(name, node.index)
            others = [r for r in self.model.readers(name) if r.op not in WEIGHTED]
            if owner == node.index and not others:
                continue
            value = self.model.constant(name)
            if value is not None:
                node.proto.input[1] = self._add_constant(f"{name}_copy", value)
                count += 1
        if count:
            self._refresh()
        return count

    def fold_batch_normalization(self) -> int:
        """Folds each BatchNormalization that alone reads a convolution with constant weights."""
        removed: set[int] = set()
        old: set[str] = set()
        for norm in self.model.nodes:
            conv = self.model.producer(norm.input(0))
            if norm.op != "BatchNormalization" or conv is None or not self._foldable(conv, norm):
                continue
            folded = self._fold(conv, norm)
            if folded is None:
                continue
            weight, bias = folded
            old.update((*conv.inputs[1:], *norm.inputs[1:]))
            del conv.proto.input[1:]
            conv.proto.input.extend([self._add_constant(f"{conv.input(1)}_folded", weight)])
            conv.proto.input.extend([self._add_constant(f"{conv.input(1)}_folded_bias", bias)])
            conv.proto.output[0] = norm.output
            removed.add(norm.index)
        if removed:
            self._remove_nodes(removed)
            self._drop_unused({t for t in old if t})
            self._drop_value_info()
        return len(removed)

    def _foldable(self, conv: Node, norm: Node) -> bool:
        model = self.model
        return (
            conv.op in ("Conv", "ConvTranspose")
            and conv.domain in ("", "ai.onnx")
            and len(model.readers(conv.output)) == 1
            and not model.is_output(conv.output)
            and not norm.integer("training_mode", 0)
            and not any(norm.outputs[1:])
            and all(model.is_constant(t) for t in (*conv.inputs[1:], *norm.inputs[1:]) if t)
        )

    def _fold(self, conv: Node, norm: Node) -> tuple[_Array, _Array] | None:
        values = [self.model.constant(t) for t in (conv.input(1), *norm.inputs[1:5])]
        bias = self.model.constant(conv.input(2)) if conv.input(2) else None
        if any(v is None for v in values) or (conv.input(2) and bias is None):
            return None
        weight, gamma, beta, mean, variance = (np.asarray(v) for v in values)
        dtype = weight.dtype
        weight, gamma, beta, mean, variance = (v.astype(np.float64) for v in (weight, gamma, beta, mean, variance))
        with np.errstate(all="ignore"):  # NaN in the result is found and named when the weights are quantized
            factor = gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5)))
            shift = beta + ((0.0 if bias is None else bias.astype(np.float64)) - mean) * factor
        ones = (1,) * (weight.ndim - 2)
        if conv.op == "Conv":
            weight = weight * factor.reshape(-1, 1, *ones)
        else:  # [in, out / groups, ...]: the channels of each group follow one another
            groups = conv.integer("group", 1)
            per_group = factor.reshape(groups, 1, -1)
            shaped = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
            weight = (shaped * per_group[..., None]).reshape(weight.shape)
        return weight.astype(dtype), shift.astype(dtype)

    def _drop_value_info(self) -> None:
        made = self.model.producers.keys() | set(self.model.inputs)
        info = self.proto.graph.value_info
        for i in reversed(range(len(info))):
            if info[i].name not in made and info[i].name not in self.model.initializers:
                del info[i]


def _filled(shape: _Array, value: onnx.TensorProto | None) -> _Array | None:
    fill = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value).reshape(-1)
    dims = [int(d) for d in shape.reshape(-1)]
    if any(d < 0 for d in dims) or math.prod(dims) > _MAX_FILLED or fill.size != 1:
        return None
    return np.full(dims, fill[0], fill.dtype)


def _cast(value: _Array, to: int) -> _Array | None:
    if to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):
        return value.astype(helper.tensor_dtype_to_np_dtype(to))
    return None
