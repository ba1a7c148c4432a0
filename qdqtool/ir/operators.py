"""Facts about ONNX operators, in one table.

The table contains the layer that TensorRT's parser creates, whether a Q moves past the operator,
whether the operator has weights, and whether it is an activation. A :class:`Case` is the evidence
for a fact. The importer, placement, scale groups and fixes use this table, so they need no lists of
operators. TensorRT-RTX is another compiler. Its rules are in ``qdqtool/trt/rtx``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from qdqtool.evidence import Case, assumed, documented, seen
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import precision_of
from qdqtool.proto.subgraphs import DOMAINS


class LayerKind(StrEnum):
    """Kinds of layers. The names are those of TensorRT's log if the log prints the kind."""

    CONSTANT = "CONSTANT"
    QUANTIZE = "QUANTIZE"
    DEQUANTIZE = "DEQUANTIZE"
    CONVOLUTION = "CONVOLUTION"
    DECONVOLUTION = "DECONVOLUTION"
    MATRIX_MULTIPLY = "MATRIX_MULTIPLY"
    SCALE = "SCALE"
    ACTIVATION = "ACTIVATION"
    ELEMENTWISE = "ELEMENTWISE"
    UNARY = "UNARY"
    POINTWISE = "POINTWISE"
    POOLING = "POOLING"
    REDUCE = "REDUCE"
    PADDING = "PADDING"
    SHUFFLE = "SHUFFLE"
    SLICE = "SLICE"
    CONCATENATION = "CONCATENATION"
    RESIZE = "RESIZE"
    SOFTMAX = "SOFTMAX"
    IDENTITY = "IDENTITY"
    COPY = "COPY"  # a Q or DQ that remains in the engine (kQDQ)
    SHAPE = "SHAPE"  # folded while parsing, or run on the host, so that it does not affect fusions
    OTHER = "OTHER"


class QPassage(NamedTuple):
    """Rule that a Q can move upstream past an operator, and a DQ downstream past it.

    Attributes:
        case: Evidence.
        exact: Whether quantizing before the operator gives the same numbers as quantizing after it.
            Otherwise the numbers differ by at most one step. TensorRT moves the Q in both cases.
        when: Condition on the node; None for always.
        otherwise: Passage that applies to other forms of the operator, if the condition is not met.
    """

    case: Case
    exact: bool = True
    when: Callable[[Model, Node], bool] | None = None
    otherwise: QPassage | None = None


class ActivationFunction(NamedTuple):
    """Pointwise function of one tensor that TensorRT fuses into a convolution.

    Attributes:
        type: TensorRT's activation type, as in its API.
        case: Evidence for the fusion into a quantized convolution.
        gate: Whether ``x * gate(x)`` is an activation as well (decomposed SiLU, HardSwish).
    """

    type: str
    case: Case
    gate: bool = False


class WeightUse(NamedTuple):
    """Use of an operator's second input as weights.

    The operator runs in INT8 if both inputs are quantized.

    Attributes:
        case: Evidence that the operator runs in INT8.
        output_axis: Function that returns the axis of output channels, from the node and the rank
            of the weights.
    """

    case: Case
    output_axis: Callable[[Node, int], int]


class Operator(NamedTuple):
    """Facts about one ONNX operator.

    Attributes:
        name: ONNX name.
        kind: Layer that TensorRT's parser creates for the operator.
        passage: Rule by which a Q moves up past the operator; None if a Q cannot.
        joins: Whether all inputs are parts of the output (Concat). A Q after the operator moves to
            each input.
        cuts: Whether each output is a part of the input (Split, Slice).
        activation: Set for a pointwise function that TensorRT fuses into a convolution.
        weights: Set for an operator that runs in INT8 with quantized weights.
        operation: TensorRT's name of an elementwise operation with two operands, else empty.
        averages: Whether the operator averages values. Average poolings run in INT8 only between a
            DQ and a Q.
        moves: Whether a shuffle changes the order of the values, not only the dimensions.
        myelin: Whether only Myelin, TensorRT's second compiler, has kernels for the operator. At
            the network's end, Myelin then also runs the connected layers.
    """

    name: str
    kind: LayerKind = LayerKind.OTHER
    passage: QPassage | None = None
    joins: bool = False
    cuts: bool = False
    activation: ActivationFunction | None = None
    weights: WeightUse | None = None
    operation: str = ""
    averages: bool = False
    moves: bool = False
    myelin: bool = False

    @property
    def cases(self) -> tuple[Case, ...]:
        """Evidence for all facts about the operator."""
        otherwise = self.passage and self.passage.otherwise
        facts = (self.passage, otherwise, self.activation, self.weights)
        return tuple(fact.case for fact in facts if fact is not None)


YOLO = "yolo-resnet18-orin-trt8502"
RESNET = "resnet18-qat-rtx2000-trt8510"
YOLOV8 = "yolov8-orin-trt8412-excerpts"
YOLOV8N = "yolov8n-modelopt-rtx2060-trt1014"  # the rules reproduce this build's layer counts
BEV_ORIN = "bevfusion-camera-orin-trt8502"
BEV_86 = "bevfusion-camera-rtx3080ti-trt8600"
MOBILENET = "mobilenetv2-titanrtx-qat-residual"


# Operators that a Q passes -----------------------------------------------------------------------

_GUIDE = "developer guide, Q/DQ propagation: operators that commute with quantization"


def _passage_from_guide(name: str) -> QPassage:
    return QPassage(documented(f"q-past-{name.lower()}", f"A Q moves up past {name}.", _GUIDE))


def _padding_value(model: Model, node: Node) -> float | None:
    """Return the constant that a Pad inserts; None if unknown or if the Pad copies values."""
    if str(node.attributes.get("mode", "constant")) != "constant":
        return None
    if not node.input(2):
        return None if node.attributes.get("value") else 0.0
    value = model.constant(node.input(2))
    if value is None:
        return None
    return float(value.flat[0]) if value.size else 0.0


def pads_below_range(model: Model, node: Node) -> bool:
    """Return whether the range of a Pad's output need not include the inserted value.

    This holds for minus infinity, and for a negative value if only maximum poolings read the
    output. When quantized, the value saturates and is never the maximum.
    """
    if operator_of(node).kind != LayerKind.PADDING:
        return False
    value = _padding_value(model, node)
    if value is None or value >= 0:
        return False
    return value == -math.inf or all(c.op == "MaxPool" for c in model.consumers(node.output))


_RESIZE = QPassage(
    seen(
        "q-past-resize",
        "A Q moves up past a Resize, nearest or linear.",
        f"{YOLO}:5229",
        f"{BEV_ORIN}:263",
        f"{BEV_86}:5199",
        YOLOV8N,
        source="linear: Resize_724 and Resize_766 of the BEVFusion camera network, "
        "where numbers change by a step",
    ),
    exact=False,
    when=lambda model, node: str(node.attributes.get("mode", "nearest")) != "cubic",
    otherwise=QPassage(
        assumed(
            "q-past-cubic-resize",
            "A Q moves up past a cubic Resize.",
            "TensorRT has one layer for all modes; a log in which a Q remains after a cubic Resize "
            "would refute it",
        ),
        exact=False,
    ),
)
ZERO_PAD = QPassage(
    documented(
        "q-past-zero-pad",
        "A Q moves up past a Pad with zeros.",
        "a published engine of a TensorFlow ResNet-50 runs the Pad before its MaxPool in INT8",
    ),
    when=lambda model, node: _padding_value(model, node) == 0,
    otherwise=QPassage(
        assumed(
            "q-past-copying-pad",
            "A Q moves up past a Pad that reflects, repeats or wraps.",
            "TensorRT's parser makes a Slice layer of it, its values are only copied, and a Q "
            "passes slices; a log in which a Q remains after such a Pad would refute it",
        ),
        when=lambda model, node: (
            str(node.attributes.get("mode", "constant")) in ("reflect", "edge", "wrap")
        ),
    ),
)

INSERTED_SHUFFLE = QPassage(
    seen(
        "q-past-inserted-shuffle",
        "A DQ moves down, and a Q up, past a shuffle that TensorRT inserted itself.",
        f"{RESNET}:2533",
        f"{RESNET}:2535",
    )
)

# Operators that a convolution absorbs ------------------------------------------------------------

_POINTWISE = documented(
    "activation-pointwise",
    "A quantized convolution absorbs the activation after it.",
    "developer guide, fusions: pointwise operations after a convolution; the names of fused SiLU "
    "in NVIDIA/TensorRT issue 3385 (8.5.2 with Q/DQ)",
    about=("Sigmoid",),
)


def _activation_operator(
    name: str, kind: str, case: Case = _POINTWISE, *, gate: bool = False
) -> Operator:
    return Operator(name, LayerKind.ACTIVATION, activation=ActivationFunction(kind, case, gate))


# Weights -----------------------------------------------------------------------------------------

_INT8_CONV = seen(
    "int8-convolution",
    "A convolution whose data and weights come from DQs absorbs them and runs in INT8.",
    f"{YOLO}:5405",
    f"{RESNET}:2699",
    f"{YOLOV8}:191",
    f"{BEV_ORIN}:488",
    f"{BEV_86}:5424",
    YOLOV8N,
    "small-graphs-orinnano-trt103",
    about=("Conv",),
)
_INT8_DECONV = seen(
    "int8-deconvolution",
    "A ConvTranspose with quantized input and weights computes in INT8.",
    "centernet-resnet34-qat-trt80",
    about=("ConvTranspose",),
)
_INT8_GEMM = seen(
    "int8-fully-connected",
    "A Gemm with quantized input and weights becomes a 1x1 convolution in INT8.",
    f"{RESNET}:2531",
    "resnet18-a100-qat",
    "resnet18-a100-qat-residual",
    "resnet18-a100-qat-residual-qgap",
    MOBILENET,
    about=("Gemm",),
)
_INT8_MATMUL = documented(
    "int8-matmul",
    "A MatMul with two quantized inputs computes in INT8.",
    "developer guide: MatrixMultiply is quantizable; NVIDIA/TensorRT issue 4322 shows the Myelin "
    "kernel",
    about=("MatMul",),
)

_TABLE: tuple[Operator, ...] = (
    Operator("QuantizeLinear", LayerKind.QUANTIZE),
    Operator("DequantizeLinear", LayerKind.DEQUANTIZE),
    Operator("Conv", LayerKind.CONVOLUTION, weights=WeightUse(_INT8_CONV, lambda node, rank: 0)),
    Operator(
        "ConvTranspose",
        LayerKind.DECONVOLUTION,
        weights=WeightUse(_INT8_DECONV, lambda node, rank: 1),
    ),
    Operator(
        "Gemm",
        LayerKind.MATRIX_MULTIPLY,
        weights=WeightUse(_INT8_GEMM, lambda node, rank: 0 if node.integer("transB", 0) else 1),
    ),
    Operator(
        "MatMul",
        LayerKind.MATRIX_MULTIPLY,
        weights=WeightUse(_INT8_MATMUL, lambda node, rank: max(rank - 1, 0)),
    ),
    Operator("BatchNormalization", LayerKind.SCALE),
    # Activations
    _activation_operator(
        "Relu",
        "RELU",
        seen(
            "activation-relu",
            "A convolution absorbs the Relu that is its only consumer, <Conv> + <Relu>.",
            f"{YOLOV8}:161",
            f"{BEV_ORIN}:175",
            f"{BEV_86}:5111",
            "centernet-resnet34-qat-trt80",
            "centerpoint-a100-trt823-fp16:1640",
        ),
    ),
    _activation_operator(
        "LeakyRelu",
        "LEAKY_RELU",
        seen(
            "activation-leaky-relu",
            "A convolution absorbs the LeakyRelu after it before Qs are absorbed, <Conv> + "
            "PWN(...).",
            f"{YOLO}:5365",
            about=("LeakyRelu",),
        ),
    ),
    _activation_operator(
        "Clip",
        "CLIP",
        seen(
            "activation-clip",
            "A convolution, depthwise or not, absorbs the Clip after it.",
            MOBILENET,
            about=("Clip",),
        ),
    ),
    _activation_operator("Sigmoid", "SIGMOID", gate=True),
    _activation_operator("HardSigmoid", "HARD_SIGMOID", gate=True),
    *(
        _activation_operator(name, kind)
        for name, kind in (
            ("Tanh", "TANH"),
            ("Elu", "ELU"),
            ("Selu", "SELU"),
            ("Celu", "CELU"),
            ("Softplus", "SOFTPLUS"),
            ("Softsign", "SOFTSIGN"),
            ("ThresholdedRelu", "THRESHOLDED_RELU"),
            ("Gelu", "GELU_ERF"),
            ("Swish", "SWISH"),
            ("Silu", "SWISH"),
            ("Mish", "MISH"),
            ("HardSwish", "HARD_SWISH"),
        )
    ),
    # The parser creates an IParametricReLULayer; no build shows that a convolution absorbs it.
    Operator("PRelu"),
    # Elementwise
    *(
        Operator(name, LayerKind.ELEMENTWISE, operation=operation)
        for name, operation in (
            ("Add", "SUM"),
            ("Sum", "SUM"),
            ("Mul", "PROD"),
            ("Sub", "SUB"),
            ("Div", "DIV"),
            ("Pow", "POW"),
            ("Min", "MIN"),
            ("Max", "MAX"),
        )
    ),
    *(
        Operator(name, LayerKind.UNARY)
        for name in (
            "Exp",
            "Log",
            "Sqrt",
            "Abs",
            "Neg",
            "Reciprocal",
            "Erf",
            "Sin",
            "Cos",
            "Floor",
            "Ceil",
            "Round",
            "Sign",
        )
    ),
    # Poolings and reductions
    Operator(
        "MaxPool",
        LayerKind.POOLING,
        passage=QPassage(
            seen(
                "q-past-maxpool",
                "A Q moves up past a MaxPool.",
                f"{RESNET}:2565",
                f"{BEV_ORIN}:319",
                f"{BEV_86}:5255",
            )
        ),
    ),
    Operator("AveragePool", LayerKind.POOLING, averages=True),
    Operator("GlobalAveragePool", LayerKind.REDUCE, averages=True),
    Operator(
        "GlobalMaxPool",
        LayerKind.REDUCE,
        passage=QPassage(
            assumed(
                "q-past-globalmaxpool",
                "A Q moves up past a GlobalMaxPool.",
                "it becomes a max pooling, as GlobalAveragePool becomes an average one; a log in "
                "which a Q remains after it would refute it",
            ),
        ),
    ),
    Operator("ReduceMean", LayerKind.REDUCE, averages=True),
    *(
        Operator(name, LayerKind.REDUCE)
        for name in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
    ),
    # Operators that move values
    Operator("Pad", LayerKind.PADDING, passage=ZERO_PAD),
    Operator("Resize", LayerKind.RESIZE, passage=_RESIZE),
    Operator("Upsample", LayerKind.RESIZE, passage=_RESIZE),
    Operator(
        "Concat",
        LayerKind.CONCATENATION,
        joins=True,
        passage=QPassage(
            seen(
                "q-past-concat",
                "A Q that is the only consumer of a Concat moves to each input as <Q>_clone_<i>; "
                "the Concat runs in INT8.",
                f"{YOLO}:5227",
                f"{YOLOV8}:167",
                f"{BEV_ORIN}:321",
                f"{BEV_86}:5257",
                YOLOV8N,
            )
        ),
    ),
    Operator(
        "Slice",
        LayerKind.SLICE,
        cuts=True,
        passage=QPassage(
            seen(
                "q-past-slice",
                "A Q moves up past a Slice.",
                f"{YOLOV8}:173",
            )
        ),
    ),
    Operator("Split", LayerKind.SLICE, cuts=True, passage=_passage_from_guide("Split")),
    # The engine of NVIDIA/TensorRT issue 2627 (8.4.1) has a Tile as Layer(Slice) in float.
    Operator("Tile", LayerKind.SLICE),
    Operator(
        "Flatten",
        LayerKind.SHUFFLE,
        passage=QPassage(
            seen(
                "q-past-flatten",
                "A Q moves up past a Flatten.",
                f"{RESNET}:2539",
            )
        ),
    ),
    Operator(
        "Reshape",
        LayerKind.SHUFFLE,
        passage=QPassage(
            seen(
                "q-past-reshape",
                "A Q moves up past a Reshape.",
                f"{BEV_ORIN}:259",
                f"{BEV_86}:5195",
            )
        ),
    ),
    Operator("Transpose", LayerKind.SHUFFLE, moves=True, passage=_passage_from_guide("Transpose")),
    *(
        Operator(name, LayerKind.SHUFFLE, passage=_passage_from_guide(name))
        for name in ("Squeeze", "Unsqueeze")
    ),
    Operator(
        "DepthToSpace", LayerKind.SHUFFLE, moves=True, passage=_passage_from_guide("DepthToSpace")
    ),
    Operator(
        "SpaceToDepth", LayerKind.SHUFFLE, moves=True, passage=_passage_from_guide("SpaceToDepth")
    ),
    *(
        Operator(name, LayerKind.IDENTITY, passage=_passage_from_guide(name))
        for name in ("Identity", "Dropout")
    ),
    Operator(
        "Cast",
        LayerKind.IDENTITY,
        passage=QPassage(
            assumed(
                "q-past-cast",
                "A Q moves up past a Cast between float types.",
                "the parser makes an Identity layer of it; a log of a half-precision export would "
                "show it",
            ),
            when=lambda model, node: all(
                precision_of(model.elem_type(t)).is_float for t in (node.input(0), node.output)
            ),
        ),
    ),
    # All others
    Operator("Softmax", LayerKind.SOFTMAX),
    Operator("LogSoftmax", LayerKind.SOFTMAX),
    Operator("Shape", LayerKind.SHAPE),
    Operator("Size", LayerKind.SHAPE),
    *(
        Operator(name, myelin=True)
        for name in (
            "ArgMax",
            "ArgMin",
            "Compress",
            "CumSum",
            "Einsum",
            "Expand",
            "Gather",
            "GatherElements",
            "GatherND",
            "If",
            "LayerNormalization",
            "Loop",
            "NonZero",
            "OneHot",
            "Range",
            "RoiAlign",
            "Scan",
            "ScatterElements",
            "ScatterND",
            "TopK",
            "Unique",
            "Where",
        )
    ),
)

OPERATORS: dict[str, Operator] = {op.name: op for op in _TABLE}

WEIGHTED = tuple(op.name for op in _TABLE if op.weights is not None)
"""Operators that compute in INT8 with quantized weights."""

CONVOLVE = (LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION)
AVERAGES = tuple(op.name for op in _TABLE if op.averages)
CONVOLUTIONS = tuple(op.name for op in _TABLE if op.kind in CONVOLVE)
SUMS = tuple(op.name for op in _TABLE if op.operation == "SUM")
CUTS = tuple(op.name for op in _TABLE if op.cuts)
JOINS = tuple(op.name for op in _TABLE if op.joins)

POOLINGS_AND_RESIZES = tuple(
    op.name for op in _TABLE if op.passage and op.kind in (LayerKind.POOLING, LayerKind.RESIZE)
)
"""Operators that a Q passes and that change height and width: max poolings and resizes."""
GATES = tuple(op.name for op in _TABLE if op.activation is not None and op.activation.gate)
"""Activations g for which ``x * g(x)`` is one activation, as SiLU."""

_REARRANGING = (LayerKind.SHUFFLE, LayerKind.IDENTITY)
REARRANGING = tuple(op.name for op in _TABLE if op.kind in _REARRANGING)
"""Operators that only change order, shape or float type."""
_POINTWISE_KINDS = (LayerKind.ACTIVATION, LayerKind.ELEMENTWISE, LayerKind.UNARY)
_UNKNOWN = Operator("")


def operator_of(node: Node | None) -> Operator:
    """Return the facts about a node's operator; empty facts if the table lacks the operator."""
    if node is None or node.domain not in DOMAINS:
        return _UNKNOWN
    return OPERATORS.get(node.op, _UNKNOWN)


def find_case(name: str) -> Case:
    """Return the evidence that a Q can move past an operator.

    Without such evidence, return the evidence that a convolution absorbs the operator as its
    activation, else that the operator runs in INT8 with quantized weights.
    """
    return OPERATORS[name].cases[0]


def find_passage(model: Model, node: Node | None) -> QPassage | None:
    """Return the rule by which a Q moves past a node; None if no rule fits the node."""
    candidate = operator_of(node).passage
    while (
        candidate is not None
        and node is not None
        and candidate.when is not None
        and not candidate.when(model, node)
    ):
        candidate = candidate.otherwise
    return candidate


def commuting_inputs(model: Model, node: Node | None) -> tuple[str, ...]:
    """Return the inputs that a Q after a node moves to.

    For a Concat, these are all inputs. For other operators, this is the first input. Empty if a Q
    cannot pass the node.
    """
    if node is None or find_passage(model, node) is None:
        return ()
    return tuple(t for t in node.inputs if t) if operator_of(node).joins else node.inputs[:1]


def output_axis(node: Node, rank: int) -> int | None:
    """Return the axis of output channels of a node's weights; None without weights."""
    weights = operator_of(node).weights
    return None if weights is None else weights.output_axis(node, rank)


def weight_scale_axis(node: Node, rank: int, transposed_per_channel: bool) -> int | None:
    """Return the axis of a node's weights along which scales differ; None for one scale.

    This is the output axis (NVIDIA's rule of one scale per output channel). A ConvTranspose gets a
    single scale if the target is not known to support one scale per output channel
    (``Target.transposed_per_channel``). A grouped ConvTranspose gets a single scale as well,
    because axis 1 of its weights counts the channels of one group only.
    """
    if operator_of(node).kind == LayerKind.DECONVOLUTION and (
        not transposed_per_channel or node.integer("group", 1) != 1
    ):
        return None
    return output_axis(node, rank)


def needs_own_dq(node: Node | None) -> bool:
    """Return whether a node absorbs a DQ only if the DQ has no other consumer.

    TensorRT inserts a shuffle before a matrix product. Before TensorRT 11, a DQ moves past the
    shuffle only if the DQ has a single consumer
    (:class:`qdqtool.trt.passes.vanilla_swap_with_preceeding_dq.VanillaSwapWithPreceedingDQ`).
    """
    return operator_of(node).kind == LayerKind.MATRIX_MULTIPLY


def is_pointwise(node: Node | None) -> bool:
    """Return whether a node computes each value from input values at the same position.

    TensorRT fuses pointwise nodes into a PWN layer.
    """
    return operator_of(node).kind in _POINTWISE_KINDS


def rearranges(node: Node | None) -> bool:
    """Return whether a node only changes order, shape or type, as Reshape and Cast do."""
    return operator_of(node).kind in _REARRANGING


def is_no_op_cast(model: Model, node: Node | None) -> bool:
    """Return whether a node is a Cast to the type that its input already has."""
    if node is None or node.op != "Cast":
        return False
    elem_type = model.elem_type(node.output)
    return elem_type != 0 and elem_type == model.elem_type(node.input(0))


def is_run_time(model: Model, tensor: str) -> bool:
    """Return whether a tensor is neither a constant nor only a moved or cast constant.

    A constant operand (of a Div, Sub, Pow, Mul or Add) is not a layer's input: TensorRT fuses it
    into the PWN (an engine lists ``PWN(Constant + [Shuffle], Pow)``).
    """
    while tensor and not model.is_constant(tensor):
        producer = model.producer(tensor)
        if not rearranges(producer) or producer is None or not producer.inputs:
            return True
        tensor = producer.input(0)
    return False


_GLOBAL_POOLINGS = {"GlobalAveragePool": "AVERAGE", "GlobalMaxPool": "MAX"}


def pooling_type(model: Model, node: Node) -> str | None:
    """Return the type of the pooling that TensorRT replaces a reduction with.

    ``AVERAGE`` or ``MAX``; None if TensorRT keeps the reduction.

    A build shows this for GlobalAveragePool (resnet18-qat-rtx2000-trt8510). NVIDIA's guide
    documents the same for a Reduce that averages over H and W and keeps its dimensions, as
    ReduceMean with ``keepdims=1`` does. A ReduceMax over the width alone was a pooling in a user's
    engine. Reductions with ``keepdims=0`` or over other axes are kept.
    """
    if node.op in _GLOBAL_POOLINGS:
        return _GLOBAL_POOLINGS[node.op]
    if node.op in ("ReduceMean", "ReduceMax") and node.integer("keepdims", 1):
        return _reduction_type(model, node)
    return None


def _reduction_type(model: Model, node: Node) -> str | None:
    shape, stated_axes = model.shape(node.input(0)), reduction_axes(model, node)
    if not shape or stated_axes is None:
        return None
    axes = sorted(axis % len(shape) for axis in stated_axes)
    spatial = list(range(2, len(shape)))
    if node.op == "ReduceMean":
        return "AVERAGE" if spatial and axes == spatial else None
    return "MAX" if axes and len(spatial) == 2 and set(axes) <= set(spatial) else None


def reduction_axes(model: Model, node: Node) -> list[int] | None:
    """Return a reduction's axes as written, possibly negative; None if unknown or not stated."""
    if node.input(1):
        value = model.constant(node.input(1))
        if value is None or value.dtype.kind != "i":
            return None
        return [int(axis) for axis in value.reshape(-1)]
    axes = node.attributes.get("axes")
    if isinstance(axes, list) and all(isinstance(axis, int) for axis in axes):
        return axes
    return None


def is_sum(node: Node | None) -> bool:
    """Return whether a node adds tensors, such as a residual or a bias."""
    return operator_of(node).operation == "SUM"
