"""The prediction for TensorRT-RTX 1.7: one walk through the graph, forward."""

from __future__ import annotations

import math
from typing import Literal

import onnx

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import attentions
from qdqtool.model.layernorm import NORMALIZES, layer_norms
from qdqtool.model.operators import WEIGHTED
from qdqtool.model.qdq import precision_of
from qdqtool.model.view import View
from qdqtool.rtx.motion import Motion
from qdqtool.rtx.operands import Constants, Verdict, judge
from qdqtool.rtx.records import (
    COMPILER,
    NOTHING,
    WIDTH,
    CompilerFault,
    Dequantized,
    Fault,
    Float,
    IntegersLost,
    State,
    Why,
    ends_build,
)
from qdqtool.rtx.refusals import half_shape1, refusals
from qdqtool.types import ConvOutcome, Evidence, ModelInfo, MyelinRegion, Precision, Prediction, Refusal

DEFAULT_SM = (86,)


def predict_rtx(model: Model, target: str = "rtx1.7", sm: tuple[int, ...] = DEFAULT_SM) -> Prediction:
    """Which convolutions TensorRT-RTX 1.7 computes in INT8.

    What the compiler refuses or crashes on is among the refusals (see :func:`status_of`); the convolutions are listed
    all the same, as they would be without the fault. ``layer`` and ``conversions`` stay None: the compiler has
    no named layers. Source: builds with 1.7.1.116, SM80 to SM121 (the same answer on all of them).

    Args:
        model: The model, weights may be missing.
        target: Name to put into the result.
        sm: Compute capabilities of the build; 75 among them takes INT8 from all.
    """
    walk = _Walk(model)
    walk.run()
    prediction = Prediction(ModelInfo(model.path, model.sha256, model.opset, len(model.nodes)), target,
                            target_evidence="rules from builds with TensorRT-RTX 1.7.1.116")
    prediction.refusals = list(refusals(model, walk.constants, walk.types, walk.states, sm))
    for node in model.nodes:
        if node.op == "Conv":
            prediction.refusals.extend(half_shape1(model, walk.types, walk.states, node))
        if node.op in WEIGHTED:
            outcome, refusal = _outcome(model, walk, node, sm)
            if outcome is not None:
                prediction.convolutions.append(outcome)
                prediction.refusals.extend([] if refusal is None else [refusal])
            else:
                prediction.float_products.append(node.name)
    if prediction.float_products:  # not what depends on constants and shapes alone, which is computed while building
        varying = View(model).varying
        prediction.float_products = [n for n in prediction.float_products if model.node(n).output in varying]
    prediction.regions = _regions(model, prediction)
    return prediction


def _regions(model: Model, prediction: Prediction) -> list[MyelinRegion]:
    """Myelin compiles the whole network; reported where that matters: with attention or a normalization in it."""
    norms = [n for n in model.ordered if n.op in NORMALIZES] + [p.square for p in layer_norms(model)]
    softmaxes = [a.softmax for a in attentions(model)]
    if not norms and not softmaxes:
        return []
    varying = View(model).varying
    nodes = [n for n in model.nodes if n.output in varying]
    s = prediction.summary()
    first = min([*norms, *softmaxes], key=lambda n: n.index)
    return [MyelinRegion(
        first.name, first.op, [n.name for n in nodes if not qdq.is_qdq(n)], [n.name for n in nodes if qdq.is_qdq(n)],
        products=s["matrix_products"], int8_products=s["matrix_products_int8"], softmaxes=len(softmaxes),
        norms=len(norms),
    )]  # fmt: skip


def status_of(prediction: Prediction) -> Literal["built", "refused", "crashed"]:
    """What becomes of the build as a whole."""
    faults = [r for r in prediction.refusals if ends_build(r)]
    if not faults:
        return "built"
    # The parser stops at the first fault; a crash needs a model that it took.
    return "crashed" if all(isinstance(r, CompilerFault) and r.fault == Fault.SCALE for r in faults) else "refused"


class _Walk:
    """States and types of all tensors, in one pass over the graph."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = Constants(model)
        self.motion = Motion(model, self.constants)
        self.states: dict[str, State] = {}
        self.types: dict[str, int] = {name: model.elem_type(name) for name in (*model.inputs, *model.initializers)}

    def run(self) -> None:
        for node in self.model.ordered:
            self._type(node)
            if qdq.is_dq(node):
                self.states[node.output] = self._dequantized(node)
            elif not qdq.is_q(node) and node.op not in WEIGHTED and node.op != "Constant":
                state = self.motion.through(node, [self.state(t) for t in node.inputs])
                for output in self._carrying(node):
                    self.states[output] = state

    def state(self, tensor: str) -> State:
        return self.states.get(tensor, NOTHING)

    def _carrying(self, node: Node) -> tuple[str, ...]:
        """Outputs that carry the data: all of a Split, the first of others (indices, masks come second)."""
        outputs = node.outputs if node.op == "Split" else node.outputs[:1]
        return tuple(o for o in outputs if o)

    def _type(self, node: Node) -> None:
        """ONNX types where they are written, else that of the first float input: a DQ makes its scale's type."""
        for output in node.outputs:
            if not output:
                continue
            known = self.model.elem_type(output)
            if qdq.is_q(node):
                kind = self.types.get(node.input(2), 0) or self.model.elem_type(node.input(2))
                known = kind or node.integer("output_dtype", 0) or onnx.TensorProto.INT8
            elif qdq.is_dq(node):
                known = self.model.elem_type(node.input(1)) or self.types.get(node.input(1), 0) or known
            elif node.op == "Cast":
                known = node.integer("to", known)
            elif known in (0, *WIDTH) and node.op != "Constant":
                own = [self.types.get(t, 0) for t in node.inputs if t]
                known = next((t for t in own if t in WIDTH), known)
            self.types[output] = known

    def _dequantized(self, node: Node) -> State:
        params = qdq.read_params(self.model, node)
        shape = params.scale_shape if params.scale_shape is not None else self.constants.shape(node.input(1))
        if shape is None:
            shape = ()
        if len(shape) <= 1 and math.prod(shape) == 1:
            kept = self.motion.sharing.merged(node)[-1]
            shape = self.constants.shape(kept.input(1)) or ()
        scale: bytes | int = node.index
        value = params.scale if params.scale is not None else self.constants.value(node.input(1))
        if value is not None:
            scale = value.astype("float32").tobytes()
        data = self.model.shape(node.input(0)) or self.model.shape(node.output)
        axes: frozenset[int] = frozenset()
        if len(shape) == 1 and shape[0] > 1:
            axis = node.integer("axis", 1)
            axes = frozenset({axis % len(data) if data else axis})
        # Scales by block (of a MatMul's weights) do not hinder an INT8 gemm: the compiler takes them into the product.
        width = WIDTH.get(self.types.get(node.output, 0), 32)
        return Dequantized(node, self._integer(node, params.precision), not shape, scale, width, width, axes=axes)

    def _integer(self, node: Node, found: Precision) -> Precision:
        """uint8 is imported as int8; an unknown type is taken for int8."""
        known = precision_of(self.types.get(node.input(0), 0))
        precision = found if found != Precision.UNKNOWN else known
        return Precision.INT8 if precision in (Precision.UINT8, Precision.UNKNOWN) else precision


def _outcome(
    model: Model, walk: _Walk, node: Node, sm: tuple[int, ...]
) -> tuple[ConvOutcome | None, Refusal | None]:
    left, right = walk.state(node.input(0)), walk.state(node.input(1))
    constants = walk.constants
    constant = constants.is_weight(node.input(1)) or (node.op == "MatMul" and constants.is_weight(node.input(0)))
    touched = any(isinstance(s, Dequantized) or s.reason is not None for s in (left, right))
    if node.op == "MatMul" and not constant and not touched:
        return None, None
    verdict = judge(model, node, left, right)
    if verdict.precision == Precision.INT8 and 75 in sm:
        verdict = Verdict(None, IntegersLost(COMPILER, node.name, Why.TURING, None))
    floating = precision_of(walk.types.get(node.input(0), 0))
    if not floating.is_float:
        floating = Precision.FP32
    precision = verdict.precision or floating
    # An INT8 convolution with scales by channel writes float32 even in a half model; one scale joins the product.
    by_channel = isinstance(right, Dequantized) and not right.scalar
    output = Precision.FP32 if verdict.precision and node.op == "Conv" and by_channel else floating
    if verdict.precision == Precision.INT8 and node.op in ("Gemm", "MatMul") and not _axes(left) | _axes(right):
        output = Precision.INT8 if _writes_integers(model, walk, node) else output
    outcome = ConvOutcome(node.index, node.name, node.op, "constant" if constant else "computed", precision,
                          [precision], output, evidence=Evidence.SEEN)
    return outcome, verdict.refusal


def _axes(state: State) -> frozenset[int]:
    return state.axes if isinstance(state, Dequantized) else frozenset()


def _writes_integers(model: Model, walk: _Walk, node: Node) -> bool:
    """Whether an INT8 gemm without bias, with one scale on each side, takes the Q behind it into itself."""
    if node.input(2):
        return False
    tensor = node.output
    while not model.is_output(tensor):
        readers = walk.motion.sharing.readers(tensor)
        if len(readers) != 1:
            return False
        reader = readers[0]
        if qdq.is_q(reader):
            return True
        factor = reader.op in ("Mul", "Div") and walk.constants.scalar(reader.input(1)) is not None
        if not factor and reader.op not in ("Relu", "Reshape", "Flatten", "Transpose", "Identity"):
            return False
        tensor = reader.output
    return False


__all__ = ["DEFAULT_SM", "Float", "predict_rtx", "status_of"]
