"""The prediction for TensorRT-RTX 1.7: one walk through the graph, forward."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import precision_of
from qdqtool.ir.sizes import is_multiplication
from qdqtool.patterns.heads import find_attentions
from qdqtool.patterns.layernorm import NORMALIZATIONS, find_decomposed_layer_norms
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import STANDARD
from qdqtool.trt import detect
from qdqtool.trt.rtx.motion import Motion
from qdqtool.trt.rtx.operands import (
    COMPILER,
    NOTHING,
    WIDTH,
    CompilerFault,
    Constants,
    Dequantized,
    Fault,
    Form,
    State,
    Why,
    ends_build,
    judge,
    lost,
)
from qdqtool.trt.targets import RTX, Target
from qdqtool.types import ConvOutcome, ModelInfo, MyelinRegion, Precision, Prediction, Refusal


def predict_rtx(model: Model, target: Target = RTX) -> Prediction:
    """Which convolutions TensorRT-RTX 1.7 computes in INT8.

    What the compiler refuses or crashes on is among the refusals (see :func:`status_of`); the convolutions are listed
    all the same, as they would be without the fault. ``layer`` and ``conversions`` stay None: the compiler has
    no named layers. Source: builds with 1.7.1.116, SM80 to SM121 (the same answer on all of them).

    Args:
        model: The model, weights may be missing.
        target: TensorRT-RTX, and for which compute capabilities it builds; 75 among them takes INT8 from all.
    """
    walk = _Walk(model)
    walk.run()
    view = View(model)
    prediction = Prediction(
        ModelInfo(model.path, model.sha256, model.opset, len(model.nodes)),
        target.name,
        target_evidence=f"{target.evidence}: {target.proof}",
        compute_capabilities=target.capability_names,
    )
    prediction.refusals = list(_refusals(walk, target.capabilities))
    for node in model.nodes:
        if node.op == "Conv":
            prediction.refusals.extend(_half_shape1(walk, node))
        if is_multiplication(model, node):
            outcome, refusal = _outcome(walk, node, target)
            if not (outcome is not None and outcome.is_int8) and node.output not in view.varying:
                continue  # computed from constants and shapes alone, while building
            if outcome is not None:
                prediction.convolutions.append(outcome)
                prediction.refusals.extend([] if refusal is None else [refusal])
            else:
                prediction.float_products.append(node.name)
    prediction.regions = _regions(view, prediction)
    return prediction


def _regions(view: View, prediction: Prediction) -> list[MyelinRegion]:
    """Myelin compiles the whole network; reported where that matters: with attention or a normalization in it."""
    model = view.model
    norms = [n for n in model.ordered if n.op in NORMALIZATIONS] + [
        p.square for p in find_decomposed_layer_norms(model)
    ]
    softmaxes = [a.softmax for a in find_attentions(model)]
    if not norms and not softmaxes:
        return []
    nodes = [n for n in model.nodes if n.output in view.varying]
    s = prediction.summary()
    first = min([*norms, *softmaxes], key=lambda n: n.index)
    return [
        MyelinRegion(
            first.name,
            first.op,
            [n.name for n in nodes if not qdq.is_qdq(n)],
            [n.name for n in nodes if qdq.is_qdq(n)],
            products=s["matrix_products"],
            int8_products=s["matrix_products_int8"],
            softmaxes=len(softmaxes),
            norms=len(norms),
        )
    ]


def status_of(prediction: Prediction) -> Literal["built", "refused", "crashed"]:
    """What becomes of the build as a whole."""
    ended = [r for r in prediction.refusals if ends_build(r)]
    if not ended:
        return "built"
    # The parser stops at the first fault; a crash needs a model that it took.
    return (
        "crashed"
        if all(isinstance(r, CompilerFault) and r.fault == Fault.SCALE for r in ended)
        else "refused"
    )


class _Walk:
    """States and types of all tensors, in one pass over the graph."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = Constants(model)
        self.motion = Motion(model, self.constants)
        self.states: dict[str, State] = {}
        self.types: dict[str, int] = {
            name: model.elem_type(name) for name in (*model.inputs, *model.initializers)
        }

    def run(self) -> None:
        for node in self.model.ordered:
            self._type(node)
            if qdq.is_dq(node):
                self.states[node.output] = self._dequantized(node)
            elif not (
                qdq.is_q(node) or node.op == "Constant" or is_multiplication(self.model, node)
            ):
                state = self.motion.through(node, [self.state(t) for t in node.inputs])
                # All outputs of a Split carry the data, the first of others (indices, masks come second).
                carrying = node.outputs if node.op == "Split" else node.outputs[:1]
                self.states.update(dict.fromkeys(filter(None, carrying), state))

    def state(self, tensor: str) -> State:
        return self.states.get(tensor, NOTHING)

    def _type(self, node: Node) -> None:
        """ONNX types where they are written, else that of the first float input: a DQ makes its scale's type."""
        for output in filter(None, node.outputs):
            known = self.model.elem_type(output)
            if qdq.is_q(node):
                kind = self.types.get(node.input(2), 0) or self.model.elem_type(node.input(2))
                known = kind or node.integer("output_dtype", 0) or onnx.TensorProto.INT8
                known = onnx.TensorProto.INT8 if known == onnx.TensorProto.INT32 else known
            elif qdq.is_dq(node):
                known = (
                    self.model.elem_type(node.input(1)) or self.types.get(node.input(1), 0) or known
                )
            elif node.op == "Cast":
                known = node.integer("to", known)
            elif known in (0, *WIDTH) and node.op != "Constant":
                own = [self.types.get(t, 0) for t in node.inputs if t]
                known = next((t for t in own if t in WIDTH), known)
            self.types[output] = known

    def _dequantized(self, node: Node) -> State:
        params = qdq.read_params(self.model, node)
        shape = self.scale_shape(node) or ()
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
            axis = _axis(self.model, node)
            axes = frozenset({axis % len(data) if data else axis})
        # Scales by block (of a MatMul's weights) do not hinder an INT8 gemm: the compiler takes them into the product.
        width = WIDTH.get(self.types.get(node.output, 0), 32)
        return Dequantized(
            node, self._integer(node, params.precision), not shape, scale, width, width, axes=axes
        )

    def scale_shape(self, node: Node) -> tuple[int, ...] | None:
        """The dimensions of a quantizer's scale; None where they are not known."""
        known = qdq.read_params(self.model, node).scale_shape
        return known if known is not None else self.constants.shape(node.input(1))

    def _integer(self, node: Node, found: Precision) -> Precision:
        """uint8 is imported as int8, and so is a Q to int32; an unknown type is taken for int8."""
        known = precision_of(self.types.get(node.input(0), 0))
        precision = found if found != Precision.UNKNOWN else known
        return (
            Precision.INT8
            if precision in (Precision.UINT8, Precision.INT32, Precision.UNKNOWN)
            else precision
        )


def _outcome(walk: _Walk, node: Node, target: Target) -> tuple[ConvOutcome | None, Refusal | None]:
    left, right = walk.state(node.input(0)), walk.state(node.input(1))
    weights = walk.constants.with_quantizers
    constant = node.input(1) in weights or (
        node.op in ("MatMul", "Einsum") and node.input(0) in weights
    )
    touched = any(isinstance(s, Dequantized) or s.reason is not None for s in (left, right))
    if (node.op == "Einsum" or (node.op == "MatMul" and not constant)) and not touched:
        return None, None
    verdict = judge(walk.model, node, left, right)
    if verdict == Precision.INT8 and not target.has_int8:
        verdict = lost(node, Why.TURING, None, None)
    floating = precision_of(walk.types.get(node.input(0), 0))
    if not floating.is_float:
        floating = Precision.FP32
    multiplied = verdict if isinstance(verdict, Precision) else None
    precision = multiplied or floating
    # An INT8 convolution with scales by channel writes float32 even in a half model; one scale joins the product.
    by_channel = isinstance(right, Dequantized) and not right.scalar
    output = Precision.FP32 if multiplied and node.op == "Conv" and by_channel else floating
    if (
        multiplied == Precision.INT8
        and node.op in ("Gemm", "MatMul", "Einsum")
        and not _axes(left) | _axes(right)
    ):
        output = Precision.INT8 if _writes_integers(walk, node) else output
    outcome = ConvOutcome(
        node.index,
        node.name,
        node.op,
        "constant" if constant else "computed",
        precision,
        [precision],
        output,
        evidence=target.evidence,
    )
    return outcome, None if isinstance(verdict, Precision) else verdict


def _axes(state: State) -> frozenset[int]:
    return state.axes if isinstance(state, Dequantized) else frozenset()


def _writes_integers(walk: _Walk, node: Node) -> bool:
    """Whether an INT8 gemm without bias, with one scale on each side, takes the Q behind it into itself."""
    if node.input(2):
        return False
    tensor = node.output
    while not walk.model.is_output(tensor):
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


# What makes TensorRT-RTX refuse a model or crash on it; each rule was seen in a build --------------------------------


# What OnnxParser.supports_operator() of 1.7.1 answers no to, of all operators in ONNX 1.23.
# Operators without an importer stop at a check of their own, these where a plugin of their name is looked for.
_PLUGINS = frozenset(
    {
        "BitCast",
        "CausalConvWithState",
        "CumProd",
        "DFT",
        "DeformConv",
        "LinearAttention",
        "NonZero",
        "RoiAlign",
        "SwiGLU",
    }
)
UNSUPPORTED = _PLUGINS | frozenset(
    {
        "AffineGrid",
        "Bernoulli",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "CenterCropPad",
        "Col2Im",
        "Compress",
        "ConcatFromSequence",
        "ConvInteger",
        "Det",
        "DynamicQuantizeLinear",
        "ImageDecoder",
        "MatMulInteger",
        "MaxRoiPool",
        "MaxUnpool",
        "MelWeightMatrix",
        "Multinomial",
        "NegativeLogLikelihoodLoss",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "QLinearConv",
        "QLinearMatMul",
        "RegexFullMatch",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SequenceMap",
        "SoftmaxCrossEntropyLoss",
        "SplitToSequence",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
        "Unique",
    }
)
_NO_INPUT = frozenset(
    {
        onnx.TensorProto.INT16,
        onnx.TensorProto.UINT16,
        onnx.TensorProto.UINT32,
        onnx.TensorProto.UINT64,
        onnx.TensorProto.STRING,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
    }
)


def _other(name: str, *taken: object) -> Callable[[Node, int], bool]:
    """Whether an attribute is there with other values than the parser takes."""

    def refused(node: Node, _: int) -> bool:
        value = node.attributes.get(name, taken[0])
        return any(v not in taken for v in (value if isinstance(value, list) else [value]))

    return refused


# What the parser refuses of operators that it has: the operators, the test of a node and the type of its first input,
# and what it is. Source: onnx's node tests and forms of these, built.
_FORMS: tuple[tuple[tuple[str, ...], Callable[[Node, int], bool], Form], ...] = (
    (
        ("BatchNormalization", "LayerNormalization", "MaxPool"),
        lambda node, _: any(node.outputs[1:]),
        Form.OUTPUTS,
    ),
    (("AveragePool", "LpPool", "MaxPool"), _other("dilations", 1), Form.DILATIONS),
    (("BatchNormalization",), _other("training_mode", 0), Form.TRAINING),
    (("LpPool",), _other("p", 2, 1), Form.NORM),
    (("Resize",), _other("antialias", 0), Form.ANTIALIASING),
    (("Resize",), _other("keep_aspect_ratio_policy", "stretch"), Form.ASPECT),
    (
        ("Resize",),
        _other(
            "coordinate_transformation_mode",
            "half_pixel",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
        ),
        Form.COORDINATES,
    ),
    (("ScatterND",), _other("reduction", "none"), Form.REDUCTION_ND),
    (("ScatterElements",), _other("reduction", "none"), Form.REDUCTION),
    (
        ("Einsum",),
        lambda node, _: any(c.isupper() for c in str(node.attributes.get("equation"))),
        Form.CAPITALS,
    ),
    (("Cast",), lambda node, _: node.attributes.get("to") in _NO_INPUT, Form.CAST),
    (
        ("Mod",),
        lambda node, elem: not node.attributes.get("fmod", 0) and elem in WIDTH,
        Form.FLOATS,
    ),
    (
        (
            "Add",
            "Div",
            "Greater",
            "GreaterOrEqual",
            "Less",
            "LessOrEqual",
            "Max",
            "Min",
            "Mul",
            "Sub",
        ),
        lambda _, elem: elem == onnx.TensorProto.UINT8,
        Form.UINT8,
    ),
    (("Relu",), lambda _, elem: elem == onnx.TensorProto.INT32, Form.INT32),
    (("Celu",), lambda _, elem: elem in WIDTH and WIDTH[elem] == 16, Form.HALF),
)
_FORMS_OF = {op: [row for row in _FORMS if op in row[0]] for row in _FORMS for op in row[0]}
# Types of constants that the parser's importInitializers() takes; the rest ends with "cannot be imported".
_BAD_CONSTANTS: dict[int, str] = {
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.FLOAT8E5M2: "float8e5m2",
    onnx.TensorProto.FLOAT8E4M3FNUZ: "float8e4m3fnuz",
    onnx.TensorProto.FLOAT8E5M2FNUZ: "float8e5m2fnuz",
}
_TYPE_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Float",
    onnx.TensorProto.FLOAT16: "Half",
    onnx.TensorProto.BFLOAT16: "BFloat16",
    onnx.TensorProto.INT8: "Int8",
    onnx.TensorProto.UINT8: "UInt8",
    onnx.TensorProto.DOUBLE: "Float",
    onnx.TensorProto.INT32: "Int32",
    onnx.TensorProto.INT64: "Int64",
}


def _refusals(walk: _Walk, sm: tuple[int, ...]) -> Iterator[Refusal]:
    """Every reason for which no engine comes out, in graph order; ``sm`` is 86 for SM86."""
    model = walk.model
    for tensor in model.initializers.values():
        yield from _constant(tensor.name, tensor.data_type)
    for name in model.inputs:
        if model.elem_type(name) in _NO_INPUT:
            kind = onnx.TensorProto.DataType.Name(model.elem_type(name)).lower()
            yield CompilerFault(COMPILER, name, Fault.OPERATOR, (Form.INPUT, kind))
    for node in model.ordered:
        standard = node.domain in STANDARD
        for _, refused, form in _FORMS_OF.get(node.op, ()) if standard else ():
            if refused(node, walk.types.get(node.input(0), 0)):
                yield _fault(node, Fault.OPERATOR, form, node.op)
        if qdq.is_qdq(node):
            yield from _of_pair(walk, node)
        elif (integers := detect.integer_operator(COMPILER, node)) is not None:
            yield integers
        elif node.op in UNSUPPORTED and standard:
            yield _fault(
                node, Fault.OPERATOR, Form.PLUGIN if node.op in _PLUGINS else Form.OPERATOR, node.op
            )
        elif node.op == "NonMaxSuppression":
            yield _fault(node, Fault.NMS)
        elif (
            node.op == "Cast"
            and node.attributes.get("to") == onnx.TensorProto.UINT8
            and (not model.is_output(node.output))
        ):
            yield _fault(node, Fault.OPERATOR, Form.UINT8_BETWEEN, node.op)
        elif node.op == "InstanceNormalization" and _one_value(model, node):
            yield _fault(node, Fault.ONE_VALUE)
        elif node.op in ("Conv", "ConvTranspose"):
            yield from _convolution(walk, node)
        elif node.op == "Constant":
            proto = model.constant_proto(node.output)
            if proto is not None:
                yield from _constant(node.output, proto.data_type)
    yield from detect.stored_read_elsewhere(COMPILER, model)
    yield from _hardware(model, sm)


def _one_value(model: Model, node: Node) -> bool:
    shape = model.shape(node.input(0))
    return shape is not None and all(d == 1 for d in shape[2:])


def _fault(node: Node, fault: Fault, *values: str) -> CompilerFault:
    return CompilerFault(COMPILER, node.name, fault, values)


def _constant(name: str, data_type: int) -> Iterator[Refusal]:
    if data_type in _BAD_CONSTANTS:
        yield CompilerFault(COMPILER, name, Fault.CONSTANT_TYPE, (_BAD_CONSTANTS[data_type],))


def _axis(model: Model, node: Node) -> int:
    """The axis of a quantizer's scales as written, or what the parser takes for it."""
    return node.integer("axis", 1 if model.opset >= 13 else 0)


def _of_pair(walk: _Walk, node: Node) -> list[Refusal]:
    """What is refused of a Q, or of a DQ and not of its Q in the same way."""
    found = list(filter(None, _quantizer(walk, node, node.name)))
    q = walk.model.producer(node.input(0)) if found and qdq.is_dq(node) else None
    if q is None or not qdq.is_q(q):
        return found
    told = list(_quantizer(walk, q, q.name))
    return [
        r
        for r, same in zip(found, filter(None, _quantizer(walk, node, q.name)), strict=True)
        if same not in told
    ]


def _quantizer(walk: _Walk, node: Node, name: str) -> Iterator[Refusal | None]:
    """What is refused of a quantizer, told under a name."""
    source = walk.types.get(node.input(0), 0)
    bias = (
        detect.bias_quantized(COMPILER, name, "", precision_of(source)) if qdq.is_dq(node) else None
    )
    if bias is not None:
        yield bias
        return
    if qdq.is_dq(node) and source == onnx.TensorProto.UINT8 and node.input(0) in walk.model.inputs:
        yield CompilerFault(COMPILER, name, Fault.UINT8_INPUT)
    yield from _scale(walk, node, name)
    yield from _zero_point(walk, node, name)


def _scale(walk: _Walk, node: Node, named: str) -> Iterator[Refusal | None]:
    model, constants, name = walk.model, walk.constants, node.input(1)
    if name not in constants.plain:
        if qdq.is_dq(node):
            maker = model.producer(node.input(0))
            source = (maker if maker is not None and qdq.is_q(maker) else node).input(0)
            fault = Fault.WEIGHTS_SCALE if source in constants.with_quantizers else Fault.SCALE
            yield CompilerFault(COMPILER, named, fault, (name,))
        return
    shape, dims, axis = walk.scale_shape(node), model.shape(node.input(0)), _axis(model, node)
    if shape is not None and 0 in shape:
        yield detect.scale_count(COMPILER, named, 0, axis, dims or (), strict=True)
        return
    scales = qdq.read_params(model, node).scales
    if scales is None and (value := constants.value(name)) is not None:
        scales = qdq.ParameterValues(value.astype(np.float64).reshape(-1))
    yield detect.scale_not_positive(COMPILER, named, scales, allow_infinite=True)
    if shape is None or dims is None or (math.prod(shape) == 1 and len(shape) < 2):
        return
    if len(shape) > 1:
        blocks = bool(node.integer("block_size", 0))
        yield detect.scale_rank(COMPILER, named, shape, blocks, is_accepted=blocks)
        if blocks and axis % max(len(dims), 1) < len(dims) - 2:
            yield CompilerFault(COMPILER, named, Fault.BLOCKS, (str(axis),))
        return
    axis += len(dims) if -len(dims) <= axis < 0 else 0
    yield detect.scale_count(COMPILER, named, shape[0], axis, dims, strict=True)


def _zero_point(walk: _Walk, node: Node, named: str) -> Iterator[Refusal | None]:
    constants, name = walk.constants, node.input(2)
    if not name:
        return
    if name not in constants.plain:
        yield CompilerFault(COMPILER, named, Fault.ZERO_POINT, (name,))
        return
    shape, scales = constants.shape(name), walk.scale_shape(node)
    if shape is not None and scales is not None:
        yield detect.zero_point_count(COMPILER, named, math.prod(scales), math.prod(shape))
    value = constants.value(name)
    if value is not None:
        unsigned = qdq.read_params(walk.model, node).precision == Precision.UINT8
        zeros = qdq.ParameterValues(np.asarray(value).astype(np.float64))
        yield detect.nonzero_zero_point(COMPILER, named, named, zeros, unsigned)


def _convolution(walk: _Walk, node: Node) -> Iterator[Refusal]:
    data, weights = (walk.types.get(t, 0) for t in (node.input(0), node.input(1)))
    kind = "IConvolutionLayer" if node.op == "Conv" else "IDeconvolutionLayer"
    same = data == weights or {data, weights} == {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    if data and weights and not same:
        yield _fault(
            node, Fault.FLOAT_TYPES, kind, *(str(_TYPE_NAMES.get(t, t)) for t in (data, weights))
        )
        return
    if data in _TYPE_NAMES and data not in WIDTH:
        yield _fault(node, Fault.INTEGERS, _TYPE_NAMES[data])
    left, right = walk.state(node.input(0)), walk.state(node.input(1))
    if (
        node.op == "Conv"
        and isinstance(left, Dequantized)
        and isinstance(right, Dequantized)
        and left.precision == Precision.INT8
        and right.precision == Precision.INT4
        and left.scalar
        and not left.axes
    ):
        yield _fault(node, Fault.INT4_WEIGHTS)


def _half_shape1(walk: _Walk, node: Node) -> Iterator[Refusal]:
    """An INT8 Conv of float16 whose weights have one scale of shape [1]: the compiler fails on it.

    One scale for one output channel is fine, and so is float32.
    """
    left, right = walk.state(node.input(0)), walk.state(node.input(1))
    if (
        not isinstance(left, Dequantized)
        or not isinstance(right, Dequantized)
        or right.scalar
        or right.axes
    ):
        return
    shape = walk.model.shape(node.input(1))
    if (
        walk.types.get(node.input(0)) == onnx.TensorProto.FLOAT16
        and shape is not None
        and shape[0] != 1
    ):
        if judge(walk.model, node, left, right) == Precision.INT8:
            yield _fault(node, Fault.HALF_SHAPE1, right.dq.name)


def _hardware(model: Model, sm: tuple[int, ...]) -> Iterator[Refusal]:
    """Types that the compute capability lacks."""
    for node in qdq.quantizers(model):
        precision = qdq.read_params(model, node).precision
        word, least = {Precision.FP8: ("fp8_e4m3", 89), Precision.INT4: ("int4", 80)}.get(
            precision, ("", 0)
        )
        short = [s for s in sm if s < least]
        if short:
            yield _fault(
                node, Fault.HARDWARE_TYPE, word, ", ".join(f"sm{n}" for n in short), str(least)
            )
            return
