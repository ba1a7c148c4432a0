"""What has to be done to a float model before Q/DQ pairs go in.

* The model's own functions are inlined.
* The opset is raised to 13, the first with per-channel Q/DQ (to 19 where Q/DQ have to take FP16).
* Weights computed from constants (moved, cast, standardized, normalized) become constants, or TensorRT 8 ends with
  "Could not fuse 2nd input (kernel weights) of CONVOLUTION".
* Products that an Einsum computes become MatMuls, where the sizes show that these compute the same.
* Nodes that share a name get names of their own; equations of Einsum get lower case.
* Weights that several nodes share are copied, one for each ("copy the weight for the convs who share the weight").
* BatchNormalization behind a convolution is folded into its weights, so that the weights that are quantized are those
  that TensorRT computes with.
"""

from __future__ import annotations

import functools
import math
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from qdqtool.errors import ModelError
from qdqtool.findings.left_float import Unwritten
from qdqtool.insertion.structure import is_convolution
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of, output_axis
from qdqtool.ir.sizes import Contraction, contraction
from qdqtool.patterns.view import View
from qdqtool.proto.shapes import convert_opset, infer_types
from qdqtool.proto.slim import without_large_weights
from qdqtool.proto.subgraphs import DOMAINS, STANDARD
from qdqtool.util.notes import Note, Remark
from qdqtool.util.text import reason_of

_Floats = npt.NDArray[np.float64]
_TEXTS = "OSU"  # kinds of numpy types


def fold_batch_normalization(model: Model) -> int:
    """Folds each BatchNormalization that alone reads a convolution with constant weights, in place."""
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        conv = model.producer(norm.input(0))
        if (
            operator_of(norm).kind != LayerKind.SCALE
            or conv is None
            or not _foldable(model, conv, norm)
        ):
            continue
        folded = _fold(model, conv, norm)
        if folded is None:
            continue
        _set_weights(editor, conv, "folded", folded)
        editor.set_output(conv, 0, norm.output)
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def _set_weights(editor: Editor, conv: Node, suffix: str, values: tuple[_Array, _Array]) -> None:
    for position, (value, end) in enumerate(zip(values, ("", "_bias"), strict=True), 1):
        editor.set_input(conv, position, editor.constant(f"{conv.input(1)}_{suffix}{end}", value))


def _foldable(model: Model, conv: Node, norm: Node) -> bool:
    return (
        is_convolution(conv)
        and len(model.consumers(conv.output)) == 1
        and not model.is_output(conv.output)
        and not norm.integer("training_mode", 0)
        and not any(norm.outputs[1:])
    )


def _fold(model: Model, conv: Node, norm: Node) -> tuple[_Array, _Array] | None:
    constants, parameters = _constants(model, conv), _parameters(model, norm)
    if constants is None or parameters is None:
        return None
    (weight, bias), (factor, beta, mean) = constants, parameters
    if _output_channels(conv, weight) != len(factor) or (
        bias is not None and bias.shape != factor.shape
    ):
        return None
    dtype = weight.dtype
    weight = weight.astype(np.float64)
    with np.errstate(
        all="ignore"
    ):  # NaN in the result is found and named when the weights are quantized
        shift = beta + ((0.0 if bias is None else bias.astype(np.float64)) - mean) * factor
    ones = (1,) * (weight.ndim - 2)
    if output_axis(conv, weight.ndim) == 0:
        factors = factor[:, None]
    else:  # [in, out / groups, ...]: the channels of each group follow one another
        groups = conv.integer("group", 1)
        factors = factor.reshape(groups, -1).repeat(weight.shape[0] // groups, axis=0)
    return (weight * factors.reshape(*factors.shape, *ones)).astype(dtype), shift.astype(dtype)


def _output_channels(conv: Node, weight: _Array) -> int | None:
    """How many there are; None for weights that no convolution can have."""
    if weight.ndim < 3 or weight.dtype.kind in _TEXTS:
        return None
    first, second = int(weight.shape[0]), int(weight.shape[1])
    if output_axis(conv, weight.ndim) == 0:
        return first
    groups = conv.integer("group", 1)
    return second * groups if groups > 0 and first % groups == 0 else None


def fold_leading(model: Model) -> int:
    """Folds, in place, each BatchNormalization that convolutions with constant weights alone read; returns how many."""
    editor = Editor(model)
    count = 0
    for norm in model.nodes:
        if operator_of(norm).kind != LayerKind.SCALE or norm.integer("training_mode", 0):
            continue
        readers = model.consumers(norm.output)
        if not readers or model.is_output(norm.output) or any(norm.outputs[1:]):
            continue
        parameters = _parameters(model, norm)
        if parameters is None:
            continue
        factor, beta, mean = parameters
        with np.errstate(all="ignore"):
            shift = beta - mean * factor
        if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
            continue
        folded = [_folded(model, conv, factor, shift) for conv in readers]
        if any(f is None for f in folded):
            continue
        for conv, values in zip(readers, folded, strict=True):
            assert values is not None
            editor.set_input(conv, 0, norm.input(0))
            _set_weights(editor, conv, "folded_norm", values)
        editor.remove(norm)
        count += 1
    if count:
        editor.finish()
    return count


def _folded(
    model: Model, conv: Node, factor: _Floats, shift: _Floats
) -> tuple[_Array, _Array] | None:
    """New weights and bias; None where folding is not exact, or something other than the data is not constant."""
    if operator_of(conv).kind != LayerKind.CONVOLUTION:
        return None
    constants = _constants(model, conv)
    if constants is None or constants[0].dtype.kind != "f" or constants[0].ndim < 3:
        return None
    weight, bias = constants
    pads = conv.attributes.get("pads", [])
    padded = not isinstance(pads, list) or any(pads)
    padded = padded or conv.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    groups = conv.integer("group", 1)
    if (
        (padded and shift.any())
        or weight.shape[1] * groups != len(factor)
        or weight.shape[0] % groups
    ):
        return None
    out = weight.shape[0] // groups
    channels = (
        np.arange(len(factor)).reshape(groups, -1).repeat(out, axis=0)
    )  # [out, in of its group]
    wide = weight.astype(np.float64).reshape(*weight.shape[:2], -1)
    moved = (wide * shift[channels][..., None]).sum(axis=(1, 2))
    new_bias = moved if bias is None else moved + bias.astype(np.float64)
    new_weight = (wide * factor[channels][..., None]).reshape(weight.shape)
    return new_weight.astype(weight.dtype), new_bias.astype(weight.dtype)


def _parameters(model: Model, norm: Node) -> tuple[_Floats, _Floats, _Floats] | None:
    """Factor, beta and mean of each channel, maybe not finite; None when they are computed, or no such numbers."""
    values = [
        v
        for t in norm.inputs[1:]
        if (v := model.constant(t)) is not None and v.dtype.kind not in _TEXTS
    ]
    if (
        len(values) != 4
        or len(norm.inputs) != 5
        or {v.shape for v in values} != {(values[0].size,)}
    ):
        return None
    gamma, beta, mean, variance = (v.astype(np.float64) for v in values)
    with np.errstate(all="ignore"):
        return gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5))), beta, mean


def _constants(model: Model, conv: Node) -> tuple[_Array, _Array | None] | None:
    """Weights and bias, if it has one; None when they are computed."""
    weight = model.constant(conv.input(1))
    bias = model.constant(conv.input(2)) if conv.input(2) else None
    return None if weight is None or (conv.input(2) and bias is None) else (weight, bias)


MIN_OPSET = 13
_Array = npt.NDArray[Any]


def prepare(model: Model, *, opset: int = MIN_OPSET) -> list[Note]:
    """Prepares a float model in place, which has all its weights in memory; an opset that is lower is raised.

    Returns:
        What was done, one sentence each, for the user.

    Raises:
        ModelError: The opset cannot be raised, or weights are reshaped or transposed to what they cannot be.
    """
    notes = []
    proto = model.proto
    if proto.functions:
        _inline(model)
        notes.append(Remark.INLINED())
    before = model.opset
    if before < opset:
        raise_opset(model, opset)
        notes.append(Remark.OPSET_RAISED(before=before, after=opset))
    proto.ir_version = max(
        proto.ir_version, helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    )
    editor = Editor(model)
    renamed = _rename_duplicates(editor)
    if renamed:
        notes.append(Remark.NODES_NAMED(count=renamed))
    sums = [n for n in model.nodes if n.op == "Sum" and n.domain in STANDARD and len(n.inputs) == 2]
    for node in sums:
        editor.edit_proto(node).op_type = "Add"
    lowered = sum(
        _lower_letters(editor.edit_proto(n))
        for n in model.nodes
        if n.op == "Einsum" and n.domain in DOMAINS
    )
    if renamed or sums or lowered:
        editor.finish()
    if lowered:
        notes.append(Remark.LOWER_CASE(count=lowered))
    if sums:
        notes.append(Remark.SUMS_AS_ADDS(count=len(sums)))
    for step, remark in (
        (write_products, Remark.PRODUCTS_WRITTEN),
        (fold_constant_weights, Remark.WEIGHTS_COMPUTED),
        (copy_shared_weights, Remark.WEIGHTS_COPIED),
        (fold_batch_normalization, Remark.NORMS_FOLDED),
    ):
        if count := step(model):
            notes.append(remark(count=count))
    return notes


def _lower_letters(node: onnx.NodeProto) -> bool:
    """Writes an Einsum's equation without capitals, which ONNX does not have and exporters write; whether it did."""
    for attribute in node.attribute:
        equation = attribute.s.decode("utf-8", "replace")
        letters = [c for c in dict.fromkeys(equation) if c.isalpha()]
        free = [c for c in string.ascii_lowercase if c not in letters]
        changed = {ord(c): free.pop(0) for c in letters if c.isupper() and len(free)}
        if (
            attribute.name == "equation" and changed and "->" in equation
        ):  # without, letters are sorted
            attribute.s = equation.translate(changed).encode()
            return True
    return False


class _Operand(NamedTuple):
    """An operand of a MatMul: which of the Einsum's, its axes in their new order, and its shape then (None: as is)."""

    position: int
    axes: str
    shape: list[int] | None


class _Product(NamedTuple):
    """A MatMul that computes what an Einsum does: its operands, and its result's axes and shape (None: as is)."""

    operands: tuple[_Operand, _Operand]
    axes: str
    shape: list[int] | None


class Products:
    """Finds the MatMul that computes exactly what an Einsum does, for tensors that are not empty."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._view = View(model)

    def find(self, node: Node, known: Contraction) -> _Product | Unwritten:
        """The MatMul with the fewest Transposes and Reshapes around it, or why there is none."""
        model = self._model
        shapes = [
            model.shape(t) or (None,) * len(a)
            for t, a in zip(node.inputs, known.operands, strict=True)
        ]
        if not known.exact or any(
            len(s) != len(a) for s, a in zip(shapes, known.operands, strict=True)
        ):
            return Unwritten.RANK
        if not all(known.free):
            return Unwritten.VECTOR
        if not all(
            self._is_same(node, *(a.index(c) for a in known.operands)) for c in known.summed
        ):
            return Unwritten.SUMMED
        sizes = {
            c: n
            for s, a in zip(shapes, known.operands, strict=True)
            for c, n in zip(a, s, strict=True)
        }
        constants = [t in self._view.constants for t in node.inputs]
        orders = [o for o in ((0, 1), (1, 0)) if constants[o[1]] or not any(constants)]
        found = [
            p
            for o in orders
            for a in known.operands
            if (p := _product(known, o, "".join(c for c in a if c in known.summed), sizes))
            is not None
        ]

        def moves(product: _Product) -> tuple[int, int]:
            ways = [
                (known.operands[o.position], o.axes, o.shape)
                for o in product.operands
                if not constants[o.position]
            ] + [(known.result, product.axes, product.shape)]
            return sum(a != b for a, b, _ in ways), sum(s is not None for _, _, s in ways)

        return min(found, key=moves, default=Unwritten.SIZES)

    def _is_same(self, node: Node, left: int, right: int) -> bool:
        """Whether an axis of a node's first input always has the size of one of its second."""
        places = tuple(zip(node.inputs, (left, right), strict=True))
        known = [(self._model.shape(t) or {a: None})[a] for t, a in places]
        if None not in known:
            return known[0] == known[1]
        return any(
            len({n or names.get(p) or p for n, p in zip(known, places, strict=True)}) == 1
            for names in self._names
        )

    @functools.cached_property
    def _names(self) -> tuple[Mapping[tuple[str, int], str | int], ...]:
        """Sizes by tensor and axis, those not known by a name: as the file states them, and as the inputs' lead to."""
        slim = without_large_weights(self._model.proto)
        inputs = {v.name: v.type for v in slim.graph.input}
        stated = inputs | {v.name: v.type for v in slim.graph.value_info}
        del slim.graph.value_info[:]
        slim.graph.value_info.extend(_settled(slim, inputs | (infer_types(slim) or {})))
        return tuple(
            {
                (t, axis): size
                for t, kind in types.items()
                for axis, size in enumerate(_sizes(kind))
                if size
            }
            for types in (stated, inputs | (infer_types(slim) or {}))
        )


def _sizes(kind: onnx.TypeProto) -> list[str | int]:
    """Each size, or its name; an empty one where it has none."""
    return [d.dim_value or d.dim_param for d in kind.tensor_type.shape.dim]


def _settled(
    proto: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]
) -> list[onnx.ValueInfoProto]:
    """Results of Reshapes with a single new name, of a size that follows from the number of elements."""
    found = []
    for node in proto.graph.node:
        ends = [
            types[t]
            for t in (*node.input[:1], *node.output[:1])
            if t in types and types[t].tensor_type.HasField("shape")
        ]
        if node.op_type != "Reshape" or node.domain not in DOMAINS or len(ends) < 2:
            continue
        before, after = map(_sizes, ends)
        known = [math.prod(n for n in s if isinstance(n, int)) for s in (before, after)]
        names = [Counter(n for n in s if isinstance(n, str)) for s in (before, after)]
        new = names[1] - names[0]
        if (
            new.total() == 1
            and names[1] - new == names[0]
            and "" not in before
            and known[0] % known[1] == 0
        ):
            kind = onnx.TypeProto()
            kind.CopyFrom(ends[1])
            kind.tensor_type.shape.dim[after.index(next(iter(new)))].dim_value = (
                known[0] // known[1]
            )
            found.append(onnx.ValueInfoProto(name=node.output[0], type=kind))
    return found


def _product(
    known: Contraction, order: tuple[int, int], summed: str, sizes: Mapping[str, int | None]
) -> _Product | None:
    """The MatMul of two operands in that order; None where sizes that are not known would have to be stated."""
    rows, columns = (known.free[p] for p in order)
    outer, inner = rows[:-1] + known.batch, rows[-1]
    joined, across = len(summed) > 1, len(columns) > 1
    depth, width = (
        None
        if None in (extents := [sizes[c] for c in axes])
        else math.prod(n or 0 for n in extents)
        for axes in (summed, columns)
    )
    shapes = (
        _shape(len(outer) + 1, [depth]) if joined else [],
        _shape(len(known.batch) + (not joined), [depth] * joined + [width])
        if joined or across
        else [],
        _shape(len(outer) + 1, [sizes[c] for c in columns]) if across else [],
    )
    if None in shapes:
        return None
    left, right, made = (s or None for s in shapes)
    return _Product(
        (
            _Operand(order[0], outer + inner + summed, left),
            _Operand(order[1], known.batch + summed + columns, right),
        ),
        outer + inner + columns,
        made,
    )


def _shape(kept: int, sizes: list[int | None]) -> list[int] | None:
    """What a Reshape is told that keeps the first axes; None where it cannot be."""
    if sizes.count(None) > 1 or 0 in sizes:
        return None
    return [0] * kept + [-1 if n is None else n for n in sizes]


def write_products(model: Model) -> int:
    """Writes each Einsum of varying data as the MatMul that computes the same, in place; returns how many.

    The node stays, as the MatMul or the last of what stands behind it. Weights become the second operand, of two
    dimensions where the Einsum has no other axis of both.
    """
    editor, products, varying, count = Editor(model), Products(model), View(model).varying, 0
    for node in model.nodes:
        known = contraction(model, node)
        found = products.find(node, known) if known is not None and node.output in varying else None
        if known is None or not isinstance(found, _Product):
            continue
        operands = [_moved(editor, node, o, known.operands[o.position]) for o in found.operands]
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("MatMul", operands, {})]
        if found.shape is not None:
            steps.append(
                (
                    "Reshape",
                    [editor.constant(f"{node.name}/shape", np.array(found.shape, np.int64))],
                    {},
                )
            )
        if found.axes != known.result:
            steps.append(("Transpose", [], {"perm": [found.axes.index(c) for c in known.result]}))
        made: list[str] = []
        for op, inputs, attributes in steps[:-1]:
            made = [editor.insert(node, op, f"{node.name}/{op}", made + inputs, attributes)]
        op, inputs, attributes = steps[-1]
        editor.rewrite(node, op, made + inputs, attributes)
        count += 1
    if count:
        editor.finish()
    return count


def _moved(editor: Editor, node: Node, operand: _Operand, axes: str) -> str:
    """An operand with its axes in another order and then of another shape; a constant is written so."""
    tensor, perm, shape = (
        node.input(operand.position),
        [axes.index(c) for c in operand.axes],
        operand.shape,
    )
    turned = perm != sorted(perm)
    value = editor.model.constant(tensor) if turned or shape is not None else None
    if value is not None:
        value = value.transpose(perm)
        if shape is not None:
            value = value.reshape([n or value.shape[i] for i, n in enumerate(shape)])
        return editor.constant(f"{tensor}_turned", np.ascontiguousarray(value))
    if turned:
        tensor = editor.insert(
            node, "Transpose", f"{node.name}/Transpose", [tensor], {"perm": perm}
        )
    if shape is None:
        return tensor
    stated = editor.constant(f"{node.name}/shape", np.array(shape, np.int64))
    return editor.insert(node, "Reshape", f"{node.name}/Reshape", [tensor, stated])


def _inline(model: Model) -> None:
    """Replaces calls of the model's own functions by their nodes; what they hold could not be quantized otherwise."""
    from onnx import inliner

    proto = model.proto
    try:
        inlined = inliner.inline_local_functions(proto)
    except Exception as error:  # C++ again
        reason = " ".join(str(error).split())[:120]
        raise ModelError(
            f"functions cannot be inlined ({reason}); export without them",
            model.path or "model",
            code="functions-not-inlined",
        ) from error
    proto.graph.CopyFrom(inlined.graph)
    del proto.functions[:]
    del proto.opset_import[:]
    proto.opset_import.extend(inlined.opset_import)
    model.reindex()


def _rename_duplicates(editor: Editor) -> int:
    """Gives nodes that share a name the name of their first output, by which all of qdqtool calls them anyway."""
    nodes = editor.model.nodes
    counts = Counter(n.proto.name for n in nodes if n.proto.name)
    shared = [n for n in nodes if counts[n.proto.name] > 1]
    taken = set(counts)
    for node in shared:
        wanted = next((o for o in node.outputs if o), node.op)
        name, number = wanted, 1
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        editor.edit_proto(node).name = name
    return len(shared)


def raise_opset(model: Model, opset: int) -> None:
    """Raises the opset in place; names of nodes stay.

    Raises:
        ModelError: onnx cannot convert it.
    """
    proto = model.proto
    slim = without_large_weights(proto)
    try:
        converted = convert_opset(slim, opset)
    except Exception as error:  # the converter raises whatever its C++ meets
        reason = reason_of(error, first_line=True)
        raise ModelError(
            f"opset {model.opset} cannot be raised to {opset} ({reason}); export with opset {opset} or "
            "newer",
            model.path or "model",
            code="opset-too-old",
        ) from error
    known = {t.name for t in proto.graph.initializer}
    _restore_names(proto, converted)
    del proto.graph.node[:]
    proto.graph.node.extend(converted.graph.node)
    proto.graph.initializer.extend(t for t in converted.graph.initializer if t.name not in known)
    for entry in proto.opset_import:
        if entry.domain in STANDARD:
            entry.version = opset
    model.reindex()


def _restore_names(proto: onnx.ModelProto, converted: onnx.ModelProto) -> None:
    """Puts node names and doc strings back where the converter dropped them."""
    originals = {next(iter(n.output), ""): n for n in proto.graph.node}
    for node in converted.graph.node:
        original = originals.get(next(iter(node.output), ""))
        if original is not None:
            node.name = original.name
            node.doc_string = original.doc_string


def fold_constant_weights(model: Model) -> int:
    """Replaces weights that are computed from constants by their value, in place; returns how many."""
    fixed = View(model).constants
    places: list[tuple[Node, int]] = []
    for node in model.nodes:
        known = operator_of(node)
        positions = (
            (1, 2)
            if known.weights is not None
            else (1, 2, 3, 4)
            if known.kind == LayerKind.SCALE
            else ()
        )
        if known.weights is None and node.output in fixed:  # of a node that goes itself
            continue
        places += [
            (node, p)
            for p in positions
            if node.input(p) in fixed and not model.is_constant(node.input(p))
        ]
    constants = ConstantEvaluator(model)
    values = {t: constants.evaluate(t) for t in dict.fromkeys(node.input(p) for node, p in places)}
    editor = Editor(model)
    count = 0
    for node, position in places:
        name = node.input(position)
        value = values[name]
        if value is not None and value.dtype.kind == "f":
            editor.set_input(node, position, editor.constant(f"{name}_folded", value))
            count += 1
    if count:
        editor.finish()
    return count


def copy_shared_weights(model: Model) -> int:
    """Gives every weighted node weights of its own, in place; returns how many were copied."""
    editor = Editor(model)
    count = 0
    owners: dict[str, int] = {}
    for node in model.nodes:
        name = node.input(1)
        if operator_of(node).weights is None or not model.is_constant(name):
            continue
        owner = owners.setdefault(name, node.index)
        if owner == node.index and all(
            operator_of(r).weights is not None for r in model.consumers(name)
        ):
            continue
        value = model.constant(name)
        if value is not None:
            editor.set_input(node, 1, editor.constant(f"{name}_copy", value))
            count += 1
    if count:
        editor.finish()
    return count
