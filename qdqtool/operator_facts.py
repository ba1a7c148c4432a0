"""What :mod:`qdqtool.operators` can state about an operator, and the kinds of TensorRT's layers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from qdqtool.evidence import Case
from qdqtool.graph import Model, Node
from qdqtool.records import record


class LayerKind(StrEnum):
    """Kinds of layers, with TensorRT's own names where its log prints them."""

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
    COPY = "COPY"  # kQDQ: a Q or DQ that stays in the engine
    SHAPE = "SHAPE"  # folded while parsing, or on the host: neither reads nor blocks a tensor
    OTHER = "OTHER"


@record
class QPassage:
    """A Q moves up past the operator, and a DQ down.

    Attributes:
        case: How well that is known.
        exact: Whether quantizing before or after gives the same numbers; if not, they differ by a step at most
            (TensorRT goes by its list of operators, not by exactness).
        when: The condition on the node; None for always.
        condition: The condition in words, for explanations.
        otherwise: Looked at where the condition is not met: another form of the operator, with evidence of its own.
    """

    case: Case
    exact: bool = True
    when: Callable[[Model, Node], bool] | None = None
    condition: str = ""
    otherwise: QPassage | None = None


@record
class Activation:
    """A pointwise function of one tensor that a convolution takes into its layer.

    Attributes:
        type: TensorRT's activation type, as in its API.
        case: How well the fusion behind a quantized convolution is known.
        gate: Whether ``x * gate(x)`` is an activation as well (SiLU, HardSwish written out).
    """

    type: str
    case: Case
    gate: bool = False


@record
class Weights:
    """The operator multiplies with weights, its second input, and computes in INT8 where both are quantized.

    Attributes:
        case: How well INT8 is known for it.
        output_axis: The axis of the weights along which the outputs lie, from the node and the weights' rank.
    """

    case: Case
    output_axis: Callable[[Node, int], int]


@record
class Operator:
    """What is known about one ONNX operator.

    Attributes:
        name: The operator's ONNX name.
        kind: The layer that TensorRT's parser makes of it.
        passage: Whether a Q moves up past it; None: it does not.
        joins: All inputs are parts of the output (Concat): a Q behind it goes to each of them.
        cuts: Each output is a part of the input (Split, Slice).
        activation: Set for a pointwise function that a convolution takes in.
        weights: Set for what computes in INT8 with quantized weights.
        operation: TensorRT's elementwise operation, for two operands.
        averages: It mixes values: INT8 only between a DQ and a Q (the average poolings).
        moves: A shuffle that changes the order of the values (the others only name the dimensions anew).
        myelin: Only Myelin runs it; what is connected with it at the network's end goes there too.
    """

    name: str
    kind: LayerKind = LayerKind.OTHER
    passage: QPassage | None = None
    joins: bool = False
    cuts: bool = False
    activation: Activation | None = None
    weights: Weights | None = None
    operation: str = ""
    averages: bool = False
    moves: bool = False
    myelin: bool = False
