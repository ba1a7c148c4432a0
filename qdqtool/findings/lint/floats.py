"""Checks of the layers without Q/DQ: values outside the range of FP16, and FP32 layers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.findings.build_methods import FloatFlag
from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.ir.qdq import find_bfloat16
from qdqtool.patterns.half import find_fp16_nodes
from qdqtool.patterns.layernorm import (
    computes_in_fp16,
    find_decomposed_layer_norms,
    find_sums_of_squares,
    layer_norm_inputs,
)
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.attention import DecomposedNorm
from qdqtool.reasons.float_types import ConstantsBeyondFp16, RemainingFloat, UnsupportedBfloat16
from qdqtool.trt.result import ConvOutcome
from qdqtool.trt.targets import target_named

_FP16_MAX = 65504.0
_FP16_MIN = 6e-8  # the smallest subnormal number
_FP16_MIN_NORMAL = 2.0**-14
_MAX_CONSTANT_VALUES = 1 << 20  # larger constants are not checked; attention masks are smaller
_MAX_LISTED = 3


def check_fp16_limits(view: View, report: FindingReport) -> None:
    """Add findings on values of a Q/DQ model that FP16 cannot represent.

    On strongly typed targets, only nodes that are FP16 in the file are checked.
    """
    if not qdq.is_quantized(view.model):
        return
    check_decomposed_norms(view, report)
    if not target_named(report.target).strongly_typed:
        _check_constants(view, report)


def check_decomposed_norms(view: View, report: FindingReport) -> None:
    """Add a finding for each decomposed LayerNorm or sum of squares that may run in FP16."""
    target, model = target_named(report.target), view.model
    norms = find_decomposed_layer_norms(model)
    for norm in norms:
        if not target.strongly_typed or computes_in_fp16(model, (norm.square, norm.mean)):
            exact = target.layer_normalization and layer_norm_inputs(model, norm) is not None
            fault = DecomposedNorm(MODEL_CHECK, norm.square.name, exact, model.opset)
            report.add(fault, automatic=exact)
    for square, *others in find_sums_of_squares(model, norms):
        if not target.strongly_typed or computes_in_fp16(model, (square, *others)):
            fault = DecomposedNorm(MODEL_CHECK, square.name, False, model.opset, square.op)
            report.add(fault, automatic=False)


def _float32_constants(model: Model, tensors: Sequence[str]) -> list[npt.NDArray[Any]]:
    values = [model.constant(tensor) for tensor in tensors]
    return [
        value
        for value in values
        if value is not None and value.dtype == np.float32 and value.size <= _MAX_CONSTANT_VALUES
    ]


def _check_constants(view: View, report: FindingReport) -> None:
    """Add a finding on constant operands of arithmetic that FP16 cannot represent.

    Weights are left out, because TensorRT itself reports them.
    """
    lost: list[tuple[str, float]] = []
    imprecise: list[tuple[str, float]] = []
    counts: Counter[str] = Counter()
    for node in view.model.nodes:
        for value in _float32_constants(view.model, _arithmetic_operands(node)):
            sizes = np.abs(value[np.isfinite(value) & (value != 0)])
            problem = _find_fp16_problem(node, sizes, value.size == 1)
            if not problem:
                continue
            counts[problem] += 1
            size = float(sizes.max() if problem == "large" else sizes.min())
            (imprecise if problem == "denormal" else lost).append((node.name, size))
    constants = lost or imprecise
    if constants:
        numbers = counts["large"], counts["small"], counts["denormal"]
        fault = ConstantsBeyondFp16(
            MODEL_CHECK, constants[0][0], tuple(constants[:_MAX_LISTED]), *numbers
        )
        report.add(fault, gains=bool(lost))


def _find_fp16_problem(node: Node, sizes: npt.NDArray[np.float32], is_scalar: bool) -> str:
    """Return the problem of an operand in FP16: ``large``, ``small``, ``denormal``, or empty.

    `sizes` are the magnitudes of the finite values other than 0. A large bound of a Clip, Min or
    Max causes no problem. A small value is a problem only if it is a scalar, such as an epsilon.
    """
    if (sizes > _FP16_MAX).any() and operator_of(node).operation not in ("MIN", "MAX"):
        return "large"
    if not is_scalar or not (sizes < _FP16_MIN_NORMAL).any():
        return ""
    return "small" if (sizes < _FP16_MIN).any() else "denormal"


def _arithmetic_operands(node: Node) -> tuple[str, ...]:
    if node.domain not in DOMAINS:
        return ()
    if node.op == "Where":
        return tuple(node.inputs[1:3])
    return tuple(node.inputs) if operator_of(node).kind == LayerKind.ELEMENTWISE else ()


def check_bfloat16(view: View, report: FindingReport) -> None:
    """Add a finding if the model has bfloat16 that the target's parser cannot read."""
    if report.tensorrt.has_bfloat16:
        return
    tensor = find_bfloat16(view.model)
    if tensor:
        report.add(UnsupportedBfloat16(MODEL_CHECK, "", tensor))


def check_float_types(
    view: View, report: FindingReport, outcomes: Mapping[str, ConvOutcome]
) -> None:
    """Add a finding on the float types of the layers without Q/DQ.

    On weakly typed targets, it names the flag that allows FP16. On strongly typed targets, it
    reports layers that are FP32 in the file, unless the file has FP16 layers too.

    Args:
        view: The model.
        report: Report to which the finding is added.
        outcomes: Predicted outcomes by name. They tell which layers read or write float.
    """
    if not view.fully_quantized_nodes:
        return
    if not target_named(report.target).strongly_typed:
        if not report.has_code("FP8-WEAK"):  # FP8 models are built without precision flags
            report.add(FloatFlag(MODEL_CHECK, "", bool(find_bfloat16(view.model))))
        return
    _check_remaining_float(view, report, outcomes)


def _check_remaining_float(
    view: View, report: FindingReport, outcomes: Mapping[str, ConvOutcome]
) -> None:
    weighted = [n for n in view.nodes_with_weights if n.output in view.varying]
    types = {n.index: _compute_type(view, n) for n in weighted}
    if onnx.TensorProto.FLOAT not in types.values() or onnx.TensorProto.FLOAT16 in types.values():
        return  # if the file has both types, the FP32 layers are intended
    fp16_nodes = find_fp16_nodes(view.model)
    float32 = [
        n for n in weighted if n.index in fp16_nodes and types[n.index] == onnx.TensorProto.FLOAT
    ]
    if float32:
        in_engine = [n for n in float32 if _has_float_side(outcomes.get(n.name))]
        report.add(_describe_remaining_float(view, weighted, in_engine))


def _has_float_side(outcome: ConvOutcome | None) -> bool:
    """Return whether a layer reads or writes float in the engine; True if this is unknown."""
    return outcome is None or any(t.is_float for t in (*outcome.inputs, outcome.output))


def _describe_remaining_float(
    view: View, weighted: Sequence[Node], float32: Sequence[Node]
) -> RemainingFloat:
    products = sum(operator_of(n).kind == LayerKind.MATRIX_MULTIPLY for n in weighted)
    quantized = sum(n.index in view.fully_quantized_nodes for n in weighted)
    return RemainingFloat(
        MODEL_CHECK,
        "",
        len(float32),
        len(weighted),
        float32[0].name if float32 else "",
        products,
        quantized=quantized,
    )


def _compute_type(view: View, conv: Node) -> int:
    pair = qdq.find_pair(view.model, conv.input(0))
    if pair is not None:
        return view.params(pair[0]).scale_type
    return view.model.elem_type(conv.input(1))
