"""Preparation of a float model for Q/DQ pairs.

* The opset is raised to 13, the first with per-channel Q/DQ. For Q/DQ of FP16 tensors and for FP8
  it is raised to 19.
* Weights that nodes compute from constants (by reshaping, casts, standardization or normalization)
  become constants. TensorRT 8 rejects computed weights: "Could not fuse 2nd input (kernel weights)
  of CONVOLUTION".
* Einsums that are matrix products become MatMuls (:mod:`qdqtool.insertion.einsum`).
* Nodes that share a name get unique names. Equations of Einsums are written in lower case. A Sum of
  two inputs becomes an Add.
* Weights that several nodes share are copied, so that each node has its own weights.
* A BatchNormalization after a convolution is folded into the weights of the convolution
  (:mod:`qdqtool.insertion.batchnorm`).
"""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import helper

from qdqtool.errors import ModelError
from qdqtool.insertion.batchnorm import fold_batch_normalization
from qdqtool.insertion.einsum import lowercase_equation, replace_einsums
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.patterns.view import View
from qdqtool.proto.shapes import convert_opset
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import DOMAINS, STANDARD
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count_were, format_reason

MIN_OPSET = 13


def prepare_float_model(model: Model, *, opset: int = MIN_OPSET) -> list[Note]:
    """Make the changes that the module's docstring lists to a float model, in place.

    Args:
        model: The model, with all weights in memory.
        opset: Minimum opset; a lower opset is raised to it.

    Returns:
        A note for each kind of change.

    Raises:
        ModelError: The opset cannot be raised, or a node that computes weights from constants is
            invalid.
    """
    notes = []
    opset_before = model.opset
    if opset_before < opset:
        raise_opset(model, opset)
        notes.append(
            Note(
                f"opset raised from {opset_before} to {opset}",
                code="opset-raised",
                before=opset_before,
                after=opset,
            )
        )
    min_ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    model.proto.ir_version = max(model.proto.ir_version, min_ir_version)
    notes += _normalize_nodes(model)
    change = "written as MatMul instead of Einsum, because an Einsum cannot be INT8"
    notes += note_changes("products-written", replace_einsums(model), "matrix product", change)
    change = "computed from constants"
    notes += note_changes("weights-computed", fold_constant_weights(model), "weight tensor", change)
    change = "copied, so that each node has its own weights"
    notes += note_changes("weights-copied", copy_shared_weights(model), "weight tensor", change)
    count = fold_batch_normalization(model)
    change = (
        f"folded into {'the convolution before it' if count == 1 else 'convolutions before them'}"
    )
    notes += note_changes("norms-folded", count, "BatchNormalization node", change)
    return notes


def note_changes(code: str, count: int, subject: str, change: str) -> list[Note]:
    """Return a list with a note such as "2 nodes were renamed"; empty for a count of 0."""
    text = f"{format_count_were(count, subject)} {change}"
    return [Note(text, code=code, count=count)] if count else []


def _normalize_nodes(model: Model) -> list[Note]:
    """Make node names unique, write Einsums in lower case, and replace binary Sums by Adds."""
    editor = Editor(model)
    renamed = _rename_duplicates(editor)
    sums = [n for n in model.nodes if n.op == "Sum" and n.domain in STANDARD and len(n.inputs) == 2]
    for node in sums:
        editor.edit_proto(node).op_type = "Add"
    einsums = [n for n in model.nodes if n.op == "Einsum" and n.domain in DOMAINS]
    lowered = sum(lowercase_equation(editor.edit_proto(n)) for n in einsums)
    if renamed or sums or lowered:
        editor.finish()
    change = "named after an output, because onnxruntime requires unique names"
    notes = note_changes("nodes-named", renamed, "node", change)
    change = "written in lower case, as TensorRT's parser requires"
    notes += note_changes("lower-case", lowered, "Einsum equation", change)
    change = "written as Add, which TensorRT fuses"
    return notes + note_changes("sums-as-adds", len(sums), "two-input Sum", change)


def _rename_duplicates(editor: Editor) -> int:
    """Rename nodes that share a name, and return how many nodes were renamed.

    The new name is the name of the node's first output, with a number if that name is used already.
    """
    nodes = editor.model.nodes
    counts = Counter(n.proto.name for n in nodes if n.proto.name)
    shared = [n for n in nodes if counts[n.proto.name] > 1]
    names = set(counts)
    for node in shared:
        base = next((o for o in node.outputs if o), node.op)
        name, number = base, 1
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.add(name)
        editor.edit_proto(node).name = name
    return len(shared)


def raise_opset(model: Model, opset: int) -> None:
    """Raise the opset in place. The nodes keep their names.

    Raises:
        ModelError: onnx cannot convert the model.
    """
    proto = model.proto
    slim = strip_large_weights(proto)
    try:
        converted = convert_opset(slim, opset)
    except Exception as error:  # the converter raises C++ exceptions of many types
        reason = format_reason(error, first_line=True)
        raise ModelError(
            f"opset {model.opset} cannot be raised to {opset} ({reason}); export with opset "
            f"{opset} or newer",
            model.path or "model",
            code="opset-too-old",
        ) from error
    initializers = {t.name for t in proto.graph.initializer}
    _restore_names_and_docs(proto, converted)
    del proto.graph.node[:]
    proto.graph.node.extend(converted.graph.node)
    proto.graph.initializer.extend(
        tensor for tensor in converted.graph.initializer if tensor.name not in initializers
    )
    for entry in proto.opset_import:
        if entry.domain in STANDARD:
            entry.version = opset
    model.reindex()


def _restore_names_and_docs(proto: onnx.ModelProto, converted: onnx.ModelProto) -> None:
    originals = {next(iter(n.output), ""): n for n in proto.graph.node}
    for node in converted.graph.node:
        original = originals.get(next(iter(node.output), ""))
        if original is not None:
            node.name = original.name
            node.doc_string = original.doc_string


def fold_constant_weights(model: Model) -> int:
    """Store weights and other parameters as constants, in place, if nodes compute them.

    The nodes must compute them from constants alone. The other parameters are biases, and scale,
    bias, mean and variance of a BatchNormalization.

    Returns:
        The number of node inputs that became constants.
    """
    places = _find_computed_weights(model)
    constants = ConstantEvaluator(model)
    values = {t: constants.evaluate(t) for t in dict.fromkeys(node.input(p) for node, p in places)}
    editor = Editor(model)
    count = 0
    for node, position in places:
        name = node.input(position)
        value = values[name]
        if value is not None and value.dtype.kind == "f":
            editor.set_input(node, position, editor.add_constant(f"{name}_folded", value))
            count += 1
    if count:
        editor.finish()
    return count


def _find_computed_weights(model: Model) -> list[tuple[Node, int]]:
    constant_tensors = View(model).constants
    places = []
    for node in model.nodes:
        operator = operator_of(node)
        if operator.weights is not None:
            positions = range(1, 3)
        elif operator.kind == LayerKind.SCALE and node.output not in constant_tensors:
            positions = range(1, 5)
        else:
            continue
        for position in positions:
            tensor = node.input(position)
            if tensor in constant_tensors and not model.is_constant(tensor):
                places.append((node, position))
    return places


def copy_shared_weights(model: Model) -> int:
    """Copy weights that several nodes share, in place, and return the number of copies."""
    editor = Editor(model)
    count = 0
    owners: dict[str, int] = {}
    for node in model.nodes:
        name = node.input(1)
        if operator_of(node).weights is None or not model.is_constant(name):
            continue
        owner = owners.setdefault(name, node.index)
        consumers = model.consumers(name)
        if owner == node.index and all(operator_of(n).weights is not None for n in consumers):
            continue
        value = model.constant(name)
        if value is not None:
            editor.set_input(node, 1, editor.add_constant(f"{name}_copy", value))
            count += 1
    if count:
        editor.finish()
    return count
