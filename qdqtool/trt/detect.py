"""Looking for faults of quantizers, weights and operators: one function each, which gives the fault's record or None.

Checks of the model, passes, the rules of TensorRT-RTX and placements all ask these of what they see: ``looked`` says
who asks, ``node`` what the record is about. Where targets differ, the one who asks says so by an argument.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import LayerKind, operator_of
from qdqtool.model.qdq import ParameterValues, QuantParams
from qdqtool.model.subgraphs import DOMAINS, INNER_DOMAINS
from qdqtool.trt import faults, refusals
from qdqtool.trt.refusals import Size
from qdqtool.types import Precision

_NAMED = 5  # channels

# Quantizers -----------------------------------------------------------------------------------------------------


def nonzero_zero_point(
    looked: str, node: str, dq: str, zeros: ParameterValues | None, unsigned: bool = False
) -> refusals.NonzeroZeroPoint | None:
    """A zero point that is not 0."""
    if zeros is None or zeros.is_zero:
        return None
    values = np.nan_to_num(zeros.values)
    return refusals.NonzeroZeroPoint(
        looked, node, dq, (int(values.min()), int(values.max())), unsigned
    )


def zero_point_count(
    looked: str, node: str, scales: int, zeros: int
) -> faults.ZeroPointCount | None:
    """Other numbers of scales and zero points."""
    return faults.ZeroPointCount(looked, node, scales, zeros) if scales != zeros else None


def scale_computed(
    looked: str, node: str, quantizer: str, computed: bool, tensor: str = ""
) -> refusals.ScaleComputed | None:
    """A scale or zero point that is computed at run time."""
    return refusals.ScaleComputed(looked, node, quantizer, tensor) if computed else None


def scale_not_positive(
    looked: str, node: str, scales: ParameterValues | None, infinite: bool = False
) -> faults.ScaleNotPositive | None:
    """A scale that is zero, negative or no number; ``infinite``: whether one without end is taken."""
    if scales is None or scales.is_positive:
        return None
    values = scales.values
    places = np.flatnonzero(~((values > 0) & (infinite | np.isfinite(values))))
    if not places.size:
        return None
    channels = tuple(int(i) for i in places[:_NAMED])
    return faults.ScaleNotPositive(
        looked, node, float(values[places[0]]), places.size, values.size, channels
    )


def scale_rank(
    looked: str, node: str, shape: Sequence[int], blocked: bool, taken: bool
) -> faults.ScaleRank | None:
    """A scale of several dimensions; ``blocked`` where that means blocks, ``taken`` where the target takes this one."""
    return (
        faults.ScaleRank(looked, node, tuple(shape), blocked)
        if len(shape) > 1 and not taken
        else None
    )


def scale_count(
    looked: str, node: str, count: int, axis: int, shape: Sequence[int | None], strict: bool = False
) -> faults.ScaleCount | None:
    """Another number of scales than the axis is long; ``strict``: also no scale, and an axis that there is not."""
    there = count > 0 and -len(shape) <= axis < len(shape)
    if (shape[axis] in (None, count)) if there else not strict:
        return None
    return faults.ScaleCount(looked, node, count, axis, tuple(shape))


def activation_per_channel(
    looked: str, node: str, dq: str, params: QuantParams | None
) -> refusals.ActivationPerChannel | None:
    """One scale for each channel, of what is no weight."""
    if params is None or not params.per_channel:
        return None
    return refusals.ActivationPerChannel(looked, node, dq, params.summary)


# Weights and biases ---------------------------------------------------------------------------------------------


def weights_not_constant(
    looked: str, node: str, weight: str, constant: bool, sparse: bool = False
) -> refusals.WeightsNotConstant | None:
    """Weights that are computed at run time, or stored as a sparse tensor."""
    return None if constant else refusals.WeightsNotConstant(looked, node, weight, sparse)


def weights_shared(
    looked: str,
    node: str,
    weight: str,
    readers: tuple[str, ...],
    output: bool = False,
    more: int = 0,
) -> refusals.WeightsShared | None:
    """Quantized weights that several read, and ``more`` of these; ``output``: or one, and the network's user."""
    return (
        refusals.WeightsShared(looked, node, weight, readers, more)
        if len(readers) > 1 or output
        else None
    )


def weights_axis(
    looked: str,
    node: str,
    quantizer: str,
    params: QuantParams,
    axis: int | None,
    expected: int,
    shape: Sequence[int | None],
    transposed: bool,
    proven: bool = True,
) -> refusals.WeightsAxis | None:
    """Weights quantized along another axis than ``expected``, that of the outputs.

    ``proven``: whether a ConvTranspose is known to take that one.
    """
    if axis is None:
        return None
    axis %= len(shape) or 4
    if axis == expected and (proven or not transposed):
        return None
    known = tuple(d or 0 for d in shape)
    return refusals.WeightsAxis(
        looked, node, quantizer, axis, expected, transposed, params.has_axis, known
    )


def stored_read_elsewhere(looked: str, model: Model) -> Iterator[faults.StoredReadElsewhere]:
    """What reads stored integers and is no DQ."""
    for node, tensor in qdq.find_misread_constants(model):
        yield faults.StoredReadElsewhere(looked, node.name, node.op, tensor)


def bias_quantized(
    looked: str, node: str, convolution: str, precision: Precision, bias: bool = False
) -> faults.BiasQuantized | None:
    """A bias behind a DQ: what is int32 is one, else where it stands (``bias``) says so."""
    return (
        faults.BiasQuantized(looked, node, convolution, precision)
        if bias or precision == Precision.INT32
        else None
    )


def float_types_differ(
    looked: str, node: str, floats: tuple[Precision, Precision], dq: str = "", weight_dq: str = ""
) -> refusals.FloatTypesDiffer | None:
    """Data and weights of float types that differ."""
    if floats[0] == floats[1] or not (floats[0].is_float and floats[1].is_float):
        return None
    return refusals.FloatTypesDiffer(looked, node, dq, weight_dq, floats)


# Operators ------------------------------------------------------------------------------------------------------


def integer_operator(looked: str, node: Node) -> faults.IntegerOperator | None:
    """An operator of onnxruntime's integer formats."""
    return faults.IntegerOperator(looked, node.name, node.op) if computes_integers(node) else None


def computes_integers(node: Node) -> bool:
    """Whether an operator is one of onnxruntime's integer formats."""
    return (node.domain in DOMAINS or node.domain.startswith(INNER_DOMAINS)) and (
        node.op.startswith(("QLinear", "DynamicQuantize"))
        or node.op.endswith("Integer")
        or node.op == "QGemm"
    )


def deconvolution_float(looked: str, node: Node) -> faults.DeconvolutionFloat | None:
    """A ConvTranspose, on a target that computes it in float."""
    return (
        faults.DeconvolutionFloat(looked, node.name)
        if operator_of(node).kind == LayerKind.DECONVOLUTION
        else None
    )


def deconvolution_3d(
    looked: str, node: str, kernel: Sequence[object], dq: str = "", size: Size | None = None
) -> refusals.Deconvolution3D | None:
    """A ConvTranspose of three spatial dimensions; ``kernel`` is its extent in each."""
    return refusals.Deconvolution3D(looked, node, dq, size) if len(kernel) == 3 else None
