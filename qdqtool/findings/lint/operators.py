"""Operators that a target does not take or quantize, and shapes of convolutions that INT8 kernels dislike."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import CONVOLUTIONS, CONVOLVE, LayerKind, operator_of
from qdqtool.ir.sizes import contraction
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.reasons import faults
from qdqtool.reasons.faults import CHECK
from qdqtool.trt import fault_checks
from qdqtool.trt.layers import SILU
from qdqtool.trt.targets import target_named
from qdqtool.types import ConvOutcome, Precision

_OTHER_TYPES = (Precision.FP8, Precision.INT4)
_LARGE_KERNEL = 14  # the smallest usual patch of a vision transformer; detectors have 7 at most
_TYPES_IN_NAMES = (
    "FP8",
    "FP4",
    "INT4",
)  # of quantizers that are operators of their own (ModelOpt's, domain trt)


def run(view: View, report: FindingReport) -> None:
    """Adds findings about operators."""
    outside: dict[str, list[Node]] = defaultdict(list)
    unknown: dict[str, list[Node]] = defaultdict(list)
    plain: dict[tuple[str, str], bool] = {}
    quantized = view.fully_quantized_nodes
    for node in view.model.nodes:
        kind = node.op, node.domain
        if kind not in plain:
            plain[kind] = _is_plain(node)
        if plain[kind]:
            if node.index in quantized and operator_of(node).kind in CONVOLVE:
                _convolution(view, report, node)
            continue
        if qdq.is_qdq(node):
            if (precision := view.params(node).precision) in _OTHER_TYPES:
                outside[precision].append(node)
        elif (integers := fault_checks.integer_operator(CHECK, node)) is not None:
            report.add(integers)
        elif named := _other_type(node):
            outside[named].append(node)
        elif operator_of(node).name == "" and (
            node.domain not in DOMAINS or not onnx.defs.has(node.op)
        ):
            unknown[node.op].append(node)
        elif _normalizes(node) and qdq.find_pair(view.model, node.input(0)) is not None:
            report.add(
                faults.FloatNormalization(CHECK, node.name, node.op),
                values=view.element_count(node.input(0)),
            )
        elif contraction(view.model, node) is not None and not target_named(report.target).is_rtx:
            _einsum(view, report, node)
    if outside:
        nodes = [n for same in outside.values() for n in same]
        kinds = tuple((kind, len(same)) for kind, same in outside.items())
        report.add(
            faults.OtherTypes(CHECK, nodes[0].name, kinds),
            "",
            [c for n in nodes for c in view.consuming_convolutions(n)],
        )
    for op, nodes in unknown.items():
        report.add(faults.UnknownOperator(CHECK, nodes[0].name, op, len(nodes) - 1))
    if not outside and not qdq.is_quantized(view.model):
        floats = [n for n in view.nodes_with_weights if view.weights(n).folded]
        if floats and not any(fault_checks.computes_integers(n) for n in view.model.nodes):
            report.add(faults.NothingQuantized(CHECK, "", len(floats)))


def _is_plain(node: Node) -> bool:
    """Whether nothing is asked of the nodes of an operator, whatever they read, but the form of a convolution."""
    return (
        operator_of(node).name != ""
        and node.op not in (qdq.Q, qdq.DQ, "Einsum")
        and not (fault_checks.computes_integers(node) or _normalizes(node))
    )


def _einsum(view: View, report: FindingReport, node: Node) -> None:
    """A product that would be INT8 as a MatMul: behind a DQ, or of weights in a model with Q/DQ."""
    read = [qdq.find_pair(view.model, t) is not None for t in node.inputs]
    weights = any(t in view.constants for t in node.inputs)
    if any(read) or (weights and qdq.is_quantized(view.model)):
        report.add(
            faults.FloatEinsum(CHECK, node.name, str(node.attributes["equation"]), all(read))
        )


def _normalizes(node: Node) -> bool:
    named = node.op.endswith("Normalization") and node.op != "BatchNormalization"
    return named or operator_of(node).kind == LayerKind.SOFTMAX


def _other_type(node: Node) -> str:
    """``FP8`` for a quantizer of that type that is an operator of its own, ``""`` for everything else."""
    if node.op.endswith(("QuantizeLinear", "DequantizeLinear")):
        return next((t for t in _TYPES_IN_NAMES if t in node.op.upper()), "")
    return ""


def _convolution(view: View, report: FindingReport, conv: Node) -> None:
    """Quantized convolutions of forms that users' builds did not take, or left float."""
    shape, stated, concerned = (
        view.weight_shape(conv),
        conv.attributes.get("kernel_shape"),
        [conv.name],
    )
    kernel = (
        tuple(shape[2:])
        if shape is not None
        else tuple(stated)
        if isinstance(stated, (list, tuple))
        else ()
    )
    if operator_of(conv).kind == LayerKind.DECONVOLUTION:
        if (found := fault_checks.deconvolution_3d(CHECK, conv.name, kernel)) is not None:
            report.add(found, convolutions=concerned)
        return
    if len(kernel) == 3:
        report.add(faults.Convolution3D(CHECK, conv.name), convolutions=concerned)
    if (large := large_kernel(CHECK, conv, kernel)) is not None:
        report.add(large, convolutions=concerned)


# Forms that placement leaves float where builds failed on them --------------------------------------------------------


def large_kernel(looked: str, conv: Node, kernel: Sequence[int]) -> faults.LargeKernel | None:
    """A patch embedding; ``kernel`` is its extent, ``looked`` says who asks."""
    return (
        faults.LargeKernel(looked, conv.name, tuple(kernel))
        if min(kernel, default=0) >= _LARGE_KERNEL
        else None
    )


def depthwise(
    looked: str, conv: Node, activation: str, readers: Sequence[Node], last: bool = False
) -> Iterator[faults.DepthwiseSilu | faults.DepthwiseAdd]:
    """Forms of a depthwise convolution; ``activation`` is what its layer took in, ``readers`` those in front of it."""
    if activation == SILU:
        yield faults.DepthwiseSilu(looked, conv.name, last)
    if {n.op for n in readers} == {"Add"}:
        yield faults.DepthwiseAdd(looked, conv.name, readers[0].name)


# Shapes of convolutions -----------------------------------------------------------------------------------------------


def shapes(view: View, report: FindingReport, outcomes: Mapping[str, ConvOutcome]) -> None:
    """Adds findings about shapes of quantized convolutions that INT8 kernels dislike."""
    for conv in view.nodes_with_weights:
        if conv.index in view.fully_quantized_nodes and conv.op in CONVOLUTIONS:
            _shape(view, report, conv, outcomes.get(conv.name))


def _shape(view: View, report: FindingReport, conv: Node, outcome: ConvOutcome | None) -> None:
    known = view.channels(conv)
    if known is None:
        return
    inputs, outputs, groups = known
    if groups > 1 and groups == inputs and outcome is not None:
        readers, last = view.model.consumers(outcome.bare), conv.index not in view.feeds_weighted
        # builds were seen to fail on the SiLU alone, not on other gates
        seen = any(view.model.node(name).op == "Sigmoid" for name in outcome.fused)
        for form in depthwise(CHECK, conv, outcome.activation if seen else "", readers, last):
            report.add(form, convolutions=[conv.name])
    elif 1 < groups != inputs:
        report.add(
            faults.GroupedConvolution(CHECK, conv.name, groups, inputs // groups),
            convolutions=[conv.name],
        )
    stem = view.model.producer(conv.input(0)) is not None and _reads_network_input(view, conv)
    counted = (outputs,) if stem else (inputs, outputs)
    small, odd = min(counted) < 16, tuple(c for c in counted if c % 16)
    if small or odd:
        found = faults.ChannelNumbers(CHECK, conv.name, inputs, outputs, odd, small)
        report.add(found, convolutions=[conv.name])


def _reads_network_input(view: View, conv: Node) -> bool:
    found = qdq.find_pair(view.model, conv.input(0))
    if found is None:
        return False
    tensor = (found[1] or found[0]).input(0)
    cast = view.model.producer(tensor)  # a model in FP16 whose input is FP32
    return (
        cast.input(0) if cast is not None and cast.op == "Cast" else tensor
    ) in view.model.inputs
