"""Checks for unsupported or unquantized operators, and convolutions that are slow in INT8."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx

from qdqtool.findings.lint import fp8
from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.branches import has_nested_quantizers
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLUTIONS, CONVOLVE, LayerKind, operator_of
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import is_dq
from qdqtool.ir.sizes import find_contraction
from qdqtool.patterns.fake_quantizers import (
    ATEN,
    FakeQuantizer,
    QuantizerForm,
    find_aten_nodes,
    find_fake_quantizers,
    find_nested_quantizers,
)
from qdqtool.patterns.heads import INT8_HEAD_SIZES, is_computed_product
from qdqtool.patterns.view import ChannelCounts, View
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.attention import AttentionHead, FloatEinsum, FloatNormalization
from qdqtool.reasons.convolutions import (
    Convolution3D,
    DepthwiseAdd,
    DepthwiseSilu,
    GroupedConvolution,
    LargeKernel,
    SlowChannelCounts,
)
from qdqtool.reasons.operators import (
    AtenNodes,
    FloatOperator,
    LocalFunctions,
    RuntimeOperators,
    UnknownOperator,
)
from qdqtool.reasons.quantizers import FakeQuantizers, NothingQuantized, UncoveredTypes
from qdqtool.trt import fault_checks
from qdqtool.trt.layers import SILU
from qdqtool.trt.result import ConvOutcome
from qdqtool.trt.targets import target_named

_MIN_LARGE_KERNEL = 14  # smallest usual patch of a vision transformer; detectors use at most 7x7
_RUNTIME = ("com.microsoft", "com.ms.")  # domains of onnxruntime
# Operators without INT8 in TensorRT's support matrix.
_FLOAT_ONLY = ("LSTM", "GRU", "RNN", "DeformConv", "GridSample")
# Operators that TensorRT-RTX 1.7.1 imports. For MatMulNBits it requires FP16 data.
_IMPORTED_BY_RTX = ("GroupQueryAttention", "MatMulNBits", "RotaryEmbedding")
_REPORTED = (ATEN, *_RUNTIME)  # domains whose operators are reported by other findings
_WEIGHT_ONLY = ("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized", "QMoE")
# Types in the names of special quantizer operators (ModelOpt, domain trt).
_TYPES_IN_NAMES = ("FP4", "INT4")


def run(view: View, report: FindingReport) -> None:
    """Add the findings on operators and unsupported types, and one if quantizers are missing."""
    other_types = _find_other_types(view)
    reported = {node.index for group in other_types.values() for node in group}
    unknown = _check_nodes(view, report, reported)
    if other_types:
        _report_other_types(view, report, other_types)
    _report_unknown(view, report, unknown)
    if not other_types and not any(f.code == "FAKE-QUANT" for f in report.findings):
        _check_missing_quantizers(view, report)


def _check_nodes(view: View, report: FindingReport, reported: set[int]) -> dict[str, list[Node]]:
    """Check each node that is not reported yet, and return those of unknown operators."""
    unknown: dict[str, list[Node]] = defaultdict(list)
    kinds = {(node.op, node.domain): node for node in view.model.nodes}
    plain = {kind for kind, node in kinds.items() if _needs_no_check(node)}
    quantized = view.fully_quantized_nodes
    for node in view.model.nodes:
        if node.index in reported:
            continue
        if (node.op, node.domain) in plain:
            if node.index in quantized and operator_of(node).kind in CONVOLVE:
                _check_convolution(view, report, node)
        elif _is_unknown(node):
            unknown[node.op].append(node)
        else:
            _check_special_operator(view, report, node)
    return unknown


def _report_unknown(
    view: View, report: FindingReport, unknown: Mapping[str, Sequence[Node]]
) -> None:
    fakes = {n.index for fake in find_fake_quantizers(view.model) for n in fake.nodes}
    aten = find_aten_nodes(view.model)
    if aten:
        operator = str(aten[0].attributes.get("operator", aten[0].op))
        report.add(AtenNodes(MODEL_CHECK, aten[0].name, operator, len(aten) - 1))
    _report_runtime_operators(view, report)
    for op, group in unknown.items():
        nodes = [n for n in group if n.index not in fakes and not n.domain.startswith(_REPORTED)]
        if nodes:
            report.add(UnknownOperator(MODEL_CHECK, nodes[0].name, op, len(nodes) - 1))


def _report_runtime_operators(view: View, report: FindingReport) -> None:
    nodes = [
        node
        for node in view.model.nodes
        if node.domain.startswith(_RUNTIME)
        and not (report.tensorrt.is_rtx and node.op in _IMPORTED_BY_RTX)
        and not (fault_checks.computes_integers(node) or onnx.defs.has(node.op))
        and not node.op.endswith(("QuantizeLinear", "DequantizeLinear"))
    ]
    if nodes:
        ops = tuple(dict.fromkeys(node.op for node in nodes))
        packs_weights = ops[0].startswith(_WEIGHT_ONLY)
        report.add(RuntimeOperators(MODEL_CHECK, nodes[0].name, ops, len(nodes), packs_weights))


def report_fake_quantizers(model: Model, report: FindingReport) -> None:
    """Report fake quantizers, with one finding for each form.

    Args:
        model: The model before constants are folded. Constants may have fake quantizers, too.
        report: Report to which the findings are added.
    """
    groups: dict[QuantizerForm, list[FakeQuantizer]] = defaultdict(list)
    for fake in (*find_fake_quantizers(model), *find_nested_quantizers(model)):
        groups[fake.form].append(fake)
    for form, fakes in groups.items():
        others = [fake for fake in fakes if fake.problem]
        fault = FakeQuantizers(
            MODEL_CHECK,
            fakes[0].name,
            form.value,
            len(fakes),
            len(fakes) - len(others),
            others[0].problem if others else "",
            others[0].name if others else "",
        )
        is_fatal = form != QuantizerForm.DECOMPOSED
        report.add(fault, fatal=is_fatal, automatic=fault.exact > 0)


def check_functions(view: View, report: FindingReport) -> None:
    """Add a finding if the model has functions that the target's parser does not inline."""
    functions = view.model.inlined_functions
    if functions and not report.tensorrt.has_local_functions:
        report.add(LocalFunctions(MODEL_CHECK, "", functions))


def _check_missing_quantizers(view: View, report: FindingReport) -> None:
    if not qdq.is_quantized(view.model):
        floats = [n for n in view.nodes_with_weights if view.weights(n).folded]
        if floats and not any(fault_checks.computes_integers(n) for n in view.model.nodes):
            nested = has_nested_quantizers(view.model)
            report.add(NothingQuantized(MODEL_CHECK, "", len(floats), nested))


def _report_other_types(
    view: View, report: FindingReport, quantizers: Mapping[str, Sequence[Node]]
) -> None:
    nodes = [n for group in quantizers.values() for n in group]
    kinds = tuple((kind, len(group)) for kind, group in quantizers.items())
    report.add(
        UncoveredTypes(MODEL_CHECK, nodes[0].name, kinds),
        node="",
        convolutions=[c for n in nodes for c in view.consuming_convolutions(n)],
    )


def _check_special_operator(view: View, report: FindingReport, node: Node) -> None:
    integers = fault_checks.check_integer_operator(MODEL_CHECK, node)
    if integers is not None:
        report.add(integers)
    elif _is_normalization(node) and qdq.find_pair(view.model, node.input(0)) is not None:
        report.add(
            FloatNormalization(MODEL_CHECK, node.name, node.op),
            values=view.element_count(node.input(0)),
        )
    elif node.op in _FLOAT_ONLY and _has_quantized_input(view, node):
        report.add(FloatOperator(MODEL_CHECK, node.name, node.op))
    elif find_contraction(view.model, node) is not None and not target_named(report.target).is_rtx:
        _check_einsum(view, report, node)


def _has_quantized_input(view: View, node: Node) -> bool:
    return any(qdq.find_pair(view.model, tensor) is not None for tensor in node.inputs if tensor)


def check_attention(view: View, report: FindingReport, outcomes: Mapping[str, ConvOutcome]) -> None:
    """Add a finding for each attention with Q/DQ that TensorRT does not fuse into one kernel.

    In INT8, this depends on the head size. In FP8, the attention is fused if the simulation fuses
    the Softmax.
    """
    for node in view.model.nodes:
        size = _head_size(view.model, node) if node.op == "MatMul" else None
        if not size or not is_computed_product(view.model, node):
            continue
        outcome = outcomes.get(node.name)
        if outcome is not None and outcome.is_fp8:
            kind = Precision.FP8
            is_fused = any(view.model.node(name).op == "Softmax" for name in outcome.fused)
        else:
            kind, is_fused = Precision.INT8, size in INT8_HEAD_SIZES
        if not is_fused:
            report.add(AttentionHead(MODEL_CHECK, node.name, size, kind), convolutions=[node.name])


def _head_size(model: Model, product: Node) -> int | None:
    """Return the head size of a quantized product of queries and keys; None for others."""
    shape, consumers = model.shape(product.input(0)), model.consumers(product.output)
    is_quantized = all(is_dq(model.producer(tensor)) for tensor in product.inputs)
    is_score = any(c.op in ("Softmax", "Mul", "Div", "Add") for c in consumers)
    return shape[-1] if shape and is_quantized and is_score else None


def _is_unknown(node: Node) -> bool:
    return (
        operator_of(node).name == ""
        and not fault_checks.computes_integers(node)
        and (node.domain not in DOMAINS or not onnx.defs.has(node.op))
    )


def _needs_no_check(node: Node) -> bool:
    """Return whether no check of this module applies to a node, except those of convolutions."""
    return (
        operator_of(node).name != ""
        and node.op != "Einsum"
        and not (fault_checks.computes_integers(node) or _is_normalization(node))
    )


def _check_einsum(view: View, report: FindingReport, node: Node) -> None:
    quantized = [qdq.find_pair(view.model, t) is not None for t in node.inputs]
    weights = any(t in view.constants for t in node.inputs)
    if any(quantized) or (weights and qdq.is_quantized(view.model)):
        report.add(
            FloatEinsum(MODEL_CHECK, node.name, str(node.attributes["equation"]), all(quantized))
        )


def _is_normalization(node: Node) -> bool:
    return operator_of(node).kind == LayerKind.SOFTMAX or (
        node.op.endswith("Normalization") and node.op != "BatchNormalization"
    )


def _find_other_types(view: View) -> dict[str, list[Node]]:
    """Return the quantizers of types that the prediction does not cover, by type."""
    other_types: dict[str, list[Node]] = defaultdict(list)
    has_int4 = any(view.params(node).precision == Precision.INT4 for node in view.quantizers)
    kinds = {node.op: node for node in view.model.nodes}
    if not has_int4 and not any(map(_find_type_in_name, kinds.values())):
        return other_types
    for node in view.model.nodes:
        if qdq.is_qdq(node):
            if view.params(node).precision == Precision.INT4:
                other_types[Precision.INT4].append(node)
        elif precision := _find_type_in_name(node):
            other_types[precision].append(node)
    return other_types


def _find_type_in_name(node: Node) -> str:
    """Return the type in the name of a special quantizer operator, else an empty text."""
    if node.op.endswith(("QuantizeLinear", "DequantizeLinear")):
        return next((t for t in _TYPES_IN_NAMES if t in node.op.upper()), "")
    return ""


def _check_convolution(view: View, report: FindingReport, conv: Node) -> None:
    """Report an INT8 convolution whose form is known to fail in builds or to run in float."""
    shape, attribute = view.weight_shape(conv), conv.attributes.get("kernel_shape")
    kernel = (
        tuple(shape[2:])
        if shape is not None
        else tuple(attribute)
        if isinstance(attribute, (list, tuple))
        else ()
    )
    if fp8.is_fp8(view, conv):
        return
    if operator_of(conv).kind == LayerKind.DECONVOLUTION:
        is_float = report.tensorrt.deconvolution_3d_float
        fault = fault_checks.check_deconvolution_3d(MODEL_CHECK, conv.name, kernel, is_float)
        if fault is not None:
            report.add(fault, convolutions=[conv.name])
        return
    if len(kernel) == 3:
        report.add(Convolution3D(MODEL_CHECK, conv.name), convolutions=[conv.name])
    if (large := find_large_kernel(MODEL_CHECK, conv, kernel)) is not None:
        report.add(large, convolutions=[conv.name])


# Convolutions that `insert` leaves float because their builds failed ------------------------------


def find_large_kernel(pass_name: str, conv: Node, kernel: Sequence[int]) -> LargeKernel | None:
    """Return the fault of a convolution with a very large kernel, else None."""
    return (
        LargeKernel(pass_name, conv.name, tuple(kernel))
        if min(kernel, default=0) >= _MIN_LARGE_KERNEL
        else None
    )


def find_depthwise_faults(
    pass_name: str, conv: Node, activation: str, consumers: Sequence[Node], last: bool = False
) -> Iterator[DepthwiseSilu | DepthwiseAdd]:
    """Yield the faults of a depthwise convolution.

    Args:
        pass_name: Name of the calling check or pass.
        conv: The convolution.
        activation: Activation that is fused into the convolution's layer.
        consumers: Consumers of the convolution's output before the activation.
        last: Whether no layer with weights is downstream.
    """
    if activation == SILU:
        yield DepthwiseSilu(pass_name, conv.name, last)
    if {n.op for n in consumers} == {"Add"}:
        yield DepthwiseAdd(pass_name, conv.name, consumers[0].name)


# Shapes of convolutions ---------------------------------------------------------------------------


def check_shapes(view: View, report: FindingReport, outcomes: Mapping[str, ConvOutcome]) -> None:
    """Add findings on shapes of quantized convolutions that are slow or fail in INT8."""
    for conv in view.nodes_with_weights:
        if conv.index in view.fully_quantized_nodes and conv.op in CONVOLUTIONS:
            _check_convolution_shape(view, report, conv, outcomes.get(conv.name))


def _check_depthwise(view: View, report: FindingReport, conv: Node, outcome: ConvOutcome) -> None:
    consumers, last = view.model.consumers(outcome.bare), conv.index not in view.feeds_weighted
    # Builds with SiLU are known to fail. For other gated activations, no failure is known.
    has_sigmoid = any(view.model.node(name).op == "Sigmoid" for name in outcome.fused)
    activation = outcome.activation if has_sigmoid else ""
    for form in find_depthwise_faults(MODEL_CHECK, conv, activation, consumers, last):
        report.add(form, convolutions=[conv.name])


def _check_convolution_shape(
    view: View, report: FindingReport, conv: Node, outcome: ConvOutcome | None
) -> None:
    channels = view.channels(conv)
    if channels is None:
        return
    inputs, groups = channels.inputs, channels.groups
    if fp8.is_fp8(view, conv):
        is_computed = outcome is not None and outcome.is_fp8
        if is_computed and not fp8.check_fp8_channels(report, conv, channels):
            _check_channels(view, report, conv, channels)
        return
    if groups > 1 and groups == inputs and outcome is not None:
        _check_depthwise(view, report, conv, outcome)
    elif 1 < groups != inputs:
        report.add(
            GroupedConvolution(MODEL_CHECK, conv.name, groups, inputs // groups),
            convolutions=[conv.name],
        )
    _check_channels(view, report, conv, channels)


def _check_channels(view: View, report: FindingReport, conv: Node, channels: ChannelCounts) -> None:
    """Report channel counts that are not multiples of 16, except that of the network's input."""
    stem = view.model.producer(conv.input(0)) is not None and _reads_network_input(view, conv)
    inputs, outputs = channels.inputs, channels.outputs
    counted = (outputs,) if stem else (inputs, outputs)
    small, odd = min(counted) < 16, tuple(c for c in counted if c % 16)
    if small or odd:
        fault = SlowChannelCounts(MODEL_CHECK, conv.name, inputs, outputs, odd, small)
        report.add(fault, convolutions=[conv.name])


_INPUT_CONVERSIONS = ("Cast", "Mul", "Div", "Add", "Sub")


def _reads_network_input(view: View, conv: Node) -> bool:
    pair = qdq.find_pair(view.model, conv.input(0))
    if pair is None:
        return False
    # An FP16 model with an FP32 input begins with a Cast. A model whose input is pixels begins with
    # their conversion.
    tensor = (pair[1] or pair[0]).input(0)
    return view.find_network_input(tensor, _INPUT_CONVERSIONS) is not None
