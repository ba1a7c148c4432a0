"""Checks of FP8 quantizers, and of convolutions that are slow in FP8."""

from collections.abc import Collection

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.precision import Precision
from qdqtool.patterns.view import ChannelCounts, View
from qdqtool.reasons import MODEL_CHECK, fp8
from qdqtool.trt.fault_checks import is_slow_fp8_convolution


def run(view: View, report: FindingReport) -> None:
    """Add findings on FP8 quantizers that the target or some of its GPUs do not support.

    There is also a finding if the network is weakly typed, or if only FP8 makes it strongly typed.
    """
    nodes = view.fp8_quantizers
    if not nodes:
        return
    target, first = report.tensorrt, nodes[0].name
    if not target.has_fp8:
        fault = fp8.Fp8Unsupported(MODEL_CHECK, first, target.display_name, len(nodes))
        report.add(fault, convolutions=_find_consuming_convolutions(view, nodes))
        return
    if not target.strongly_typed or target.is_typed_for_fp8:
        report.add(
            fp8.WeaklyTypedFp8(MODEL_CHECK, first, len(nodes), target.strongly_typed), node=""
        )
    convolutions = _find_fp8_convolutions(view)
    if target.needs_hopper_for_fp8 and not target.has_named_capability and convolutions:
        version = target.version_name
        hopper = fp8.HopperOnlyFp8(MODEL_CHECK, convolutions[0], version, len(convolutions))
        report.add(hopper, convolutions=convolutions)


def _find_consuming_convolutions(view: View, nodes: Collection[Node]) -> list[str]:
    return list(dict.fromkeys(c for node in nodes for c in view.consuming_convolutions(node)))


def _find_fp8_convolutions(view: View) -> list[str]:
    quantized = view.fully_quantized_nodes
    convolutions = (n for n in view.nodes_with_weights if n.index in quantized and n.op == "Conv")
    return [conv.name for conv in convolutions if is_fp8(view, conv)]


def is_fp8(view: View, conv: Node) -> bool:
    """Return whether the data input of a convolution is the output of an FP8 DQ."""
    pair = qdq.find_pair(view.model, conv.input(0)) if view.fp8_quantizers else None
    return pair is not None and view.params(pair[0]).precision == Precision.FP8


def check_fp8_channels(report: FindingReport, conv: Node, channels: ChannelCounts) -> bool:
    """Report an FP8 convolution whose numbers of channels or groups have no fast kernel.

    Returns whether it was reported.

    Args:
        report: Receives the finding.
        conv: A Conv with FP8 data and weights.
        channels: Channels and groups of the convolution.
    """
    of_group, outputs = channels.inputs // channels.groups, channels.outputs
    is_slow = is_slow_fp8_convolution((of_group, outputs), channels.groups)
    if is_slow:
        fault = fp8.SlowFp8Convolution(MODEL_CHECK, conv.name, of_group, outputs, channels.groups)
        report.add(fault, convolutions=[conv.name])
    return is_slow
