"""Prediction for TensorRT-RTX 1.7, in one forward walk over the graph."""

from typing import Literal

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import describe_model
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.ir.sizes import is_multiplication
from qdqtool.patterns.heads import find_attentions
from qdqtool.patterns.layernorm import NORMALIZATIONS, find_decomposed_layer_norms
from qdqtool.patterns.view import View
from qdqtool.reasons.compiler import CompilerFault, FaultKind, LossCause, is_build_failure
from qdqtool.reasons.finding import Reason
from qdqtool.trt.result import ConvOutcome, MyelinRegion, Prediction
from qdqtool.trt.rtx.compiler_faults import (
    find_compiler_faults,
    find_half_scale_fault,
    find_mixed_types_fault,
)
from qdqtool.trt.rtx.graph_states import GraphStates
from qdqtool.trt.rtx.operands import IntegerState, State, create_integer_loss, resolve_precision
from qdqtool.trt.targets import RTX, Target


def predict_rtx(model: Model, target: Target = RTX) -> Prediction:
    """Predict the precision of each convolution on TensorRT-RTX 1.7.

    If the build fails, ``refusals`` contains the faults (see :func:`build_status`), and the
    convolutions are predicted as if the model had no fault. ``conversions``, and ``layer`` of each
    convolution, are None, because the engine has no named layers. Source: builds with 1.7.1.116 for
    SM80 to SM121, whose results are equal.

    Args:
        model: The model; its weights may be missing.
        target: TensorRT-RTX target with compute capabilities. If one of them is 75, INT8 is
            disabled for all.
    """
    if qdq.uses_fp8(model):
        target = target.for_fp8()
    states = GraphStates(model)
    view = View(model)
    prediction = Prediction(
        describe_model(model),
        target.name,
        target_evidence=f"{target.evidence}: {target.proof}",
        compute_capabilities=target.capability_names,
    )
    prediction.refusals = list(find_compiler_faults(states, target.capabilities))
    for node in model.nodes:
        if node.op == "Conv":
            fault = find_half_scale_fault(states, node, target.capabilities)
            if fault is not None:
                prediction.refusals.append(fault)
        if not is_multiplication(model, node):
            continue
        outcome, reason = _predict_node(states, node, target)
        is_quantized = outcome is not None and outcome.is_quantized
        if not is_quantized and node.output not in view.varying:
            continue  # the compiler computes the node from constants and shapes at build time
        if outcome is None:
            prediction.float_products.append(node.name)
            continue
        prediction.convolutions.append(outcome)
        reason = find_mixed_types_fault(states, node, reason) or reason
        if reason is not None:
            prediction.refusals.append(reason)
    prediction.regions = _describe_regions(view, prediction)
    return prediction


def _describe_regions(view: View, prediction: Prediction) -> list[MyelinRegion]:
    """Return the whole network as one region of Myelin.

    Empty if the network has no attention and no normalization.
    """
    model = view.model
    norms = [
        *(node for node in model.ordered if node.op in NORMALIZATIONS),
        *(norm.square for norm in find_decomposed_layer_norms(model)),
    ]
    softmaxes = [attention.softmax for attention in find_attentions(model)]
    if not norms and not softmaxes:
        return []
    nodes = [node for node in model.nodes if node.output in view.varying]
    summary = prediction.summary()
    first = min([*norms, *softmaxes], key=lambda node: node.index)
    return [
        MyelinRegion(
            first.name,
            first.op,
            [node.name for node in nodes if not qdq.is_qdq(node)],
            [node.name for node in nodes if qdq.is_qdq(node)],
            products=summary["matrix_products"],
            int8_products=summary["matrix_products_int8"],
            fp8_products=summary["matrix_products_fp8"],
            softmaxes=len(softmaxes),
            norms=len(norms),
        )
    ]


def build_status(prediction: Prediction) -> Literal["built", "refused", "crashed"]:
    """Return how the build ends: success, a rejected model, or a compiler crash."""
    faults = [reason for reason in prediction.refusals if is_build_failure(reason)]
    if not faults:
        return "built"
    # The parser stops at the first fault; a crash needs a model that the parser accepts.
    for reason in faults:
        if not isinstance(reason, CompilerFault) or reason.fault != FaultKind.SCALE:
            return "refused"
    return "crashed"


def _predict_node(
    states: GraphStates, node: Node, target: Target
) -> tuple[ConvOutcome | None, Reason | None]:
    """Return the outcome of a multiplication, and the reason if the node runs in float.

    The outcome is None for an Einsum, or a MatMul of computed tensors, without Q/DQ.
    """
    left, right = states.state(node.input(0)), states.state(node.input(1))
    weights = states.constants.with_quantizers
    is_matmul = node.op in ("MatMul", "Einsum")
    is_constant = node.input(1) in weights or (is_matmul and node.input(0) in weights)
    is_plain = node.op == "Einsum" or (node.op == "MatMul" and not is_constant)
    if is_plain and not any(_has_quantizer(state) for state in (left, right)):
        return None, None
    verdict = resolve_precision(states.model, node, left, right, target.capabilities)
    if verdict == Precision.INT8 and not target.has_int8:
        verdict = create_integer_loss(node, LossCause.TURING, None, None)
    float_type = precision_of(states.types.get(node.input(0), 0))
    if not float_type.is_float:
        float_type = Precision.FP32
    precision = output = float_type
    reason: Reason | None = None
    if isinstance(verdict, Precision):
        precision = verdict
        output = _output_type(states, node, precision, float_type)
    else:
        reason = verdict
    outcome = ConvOutcome(
        node.index,
        node.name,
        node.op,
        "constant" if is_constant else "computed",
        precision,
        [precision],
        output,
        evidence=target.evidence,
    )
    return outcome, reason


def _has_quantizer(state: State) -> bool:
    return isinstance(state, IntegerState) or state.reason is not None


def _output_type(
    states: GraphStates, node: Node, precision: Precision, float_type: Precision
) -> Precision:
    """Return the type that a multiplication of integers writes.

    A convolution writes the model's float type if its weights have one scalar scale, else FP32,
    even in an FP16 model. An INT8 matrix product that fuses the Q after it writes INT8.
    """
    left, right = states.state(node.input(0)), states.state(node.input(1))
    assert isinstance(left, IntegerState) and isinstance(right, IntegerState)
    if node.op == "Conv":
        return float_type if right.scalar else Precision.FP32
    is_gemm = node.op in ("Gemm", "MatMul", "Einsum") and not left.axes and not right.axes
    if precision == Precision.INT8 and is_gemm and _fuses_quantizer(states, node):
        return Precision.INT8
    return float_type


def _fuses_quantizer(states: GraphStates, node: Node) -> bool:
    """Return whether an INT8 matrix product without bias fuses the Q after it.

    Only Mul and Div by a scalar, Relu, Transpose, Identity, Reshape and Flatten may be between the
    product and the Q.
    """
    if node.input(2):
        return False
    tensor = node.output
    while not states.model.is_output(tensor):
        consumers = states.motion.consumers.live_consumers(tensor)
        if len(consumers) != 1:
            return False
        consumer = consumers[0]
        if qdq.is_q(consumer):
            return True
        is_factor = consumer.op in ("Mul", "Div") and (
            states.constants.scalar(consumer.input(1)) is not None
        )
        if not is_factor and consumer.op not in (
            "Relu",
            "Reshape",
            "Flatten",
            "Transpose",
            "Identity",
        ):
            return False
        tensor = consumer.output
    return False
