"""Checks for faults of quantizers, weights and operators, one function per fault.

A check returns a reason (a record of `qdqtool.reasons`) if the fault is present, else None.

These functions are called by the checks of the model, by the passes, by the prediction for
TensorRT-RTX, and by the insertion of Q/DQ. ``pass_name`` is the name of the calling pass or check,
``node`` the node that the reason is about. If a fault depends on the target, an argument states
what the target accepts.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import ParameterValues, QuantParams
from qdqtool.proto.subgraphs import DOMAINS, INNER_DOMAINS
from qdqtool.reasons import fp8
from qdqtool.reasons.convolutions import Deconvolution3D, FloatDeconvolution
from qdqtool.reasons.float_types import FloatTypesDiffer
from qdqtool.reasons.operators import IntegerOperator
from qdqtool.reasons.quantizers import NonzeroZeroPoint, ZeroPointCount
from qdqtool.reasons.scales import (
    ActivationPerChannel,
    ScaleComputed,
    ScaleCount,
    ScaleImplausible,
    ScaleNotPositive,
    ScaleOwner,
    ScaleRank,
)
from qdqtool.reasons.tensors import TensorSize
from qdqtool.reasons.weights import (
    BiasQuantized,
    MisreadConstant,
    WeightsAxis,
    WeightsNotConstant,
    WeightsShared,
)

MAX_CHANNELS = 5  # maximum number of channels that a reason lists
# Maximum number of elements of a convolution kernel in FP8. Seen on TensorRT-RTX 1.7.1, SM89 and
# SM120, with an exception for depthwise convolutions on SM120. The release notes of TensorRT
# 10.16.1 name the same limit for compute capabilities 8.9, 9.0, 12.0 and 12.1.
MAX_FP8_KERNEL = 32
# Minimum number of input and output channels of a convolution that is faster in FP8 than in FP16
# on every GPU (ModelOpt pull request 1083).
_MIN_FP8_CHANNELS = 17
# An attention with heads of at most this size runs in FP16. Sources: a build of TensorRT-RTX 1.7.1
# with head size 8, and ModelOpt.
_FP16_HEAD = 8
_MAX_FP8_SEQUENCE = 3072  # maximum number of keys; release notes of TensorRT 10.6


def is_slow_fp8_convolution(channels: Iterable[int], groups: int) -> bool:
    """Return whether a convolution is slower in FP8 than in FP16 on some GPUs.

    Args:
        channels: Known numbers of input channels (of a group) and output channels.
        groups: Number of groups.
    """
    return groups > 1 or any(count < _MIN_FP8_CHANNELS for count in channels)


def fuses_fp8_attention(head: int | None, sequence: int | None, max_head: int) -> bool:
    """Return whether an attention with Q/DQ of FP8 becomes one kernel.

    Args:
        head: Head size; None if unknown.
        sequence: Number of keys; None if unknown.
        max_head: Largest head size that the target fuses.
    """
    if head is None or sequence is None:
        return False
    return _FP16_HEAD < head <= max_head and sequence <= _MAX_FP8_SEQUENCE


LARGEST_SCALE = 1024.0  # largest plausible scale: about 2 * 65504 / 127, with FP16's maximum
_INT8_MAX = 127.0
# A scale is too small if the largest weight exceeds its range by more than this factor.
_MAX_WEIGHT_RATIO = 1000.0
_MIN_WEIGHT_RATIO = 30.0  # limit for all channels if one channel exceeds _MAX_WEIGHT_RATIO
# A channel is dead if its largest weight is below this fraction of the median over all channels.
_MAX_DEAD_RANGE = 0.02
_MAX_DEAD_WEIGHT = 1e-5  # weights up to this magnitude may have the minimum scale of a tool
_UNUSED_SCALE = 1e-20  # smaller than the minimum scale of any tool
# Maximum ratio between neighbors in the sorted activation scales of a calibrated network. Networks
# with random weights have ratios of at most 8.
_MAX_SCALE_STEP = 30.0
SMALLEST_SCALE = 2.0**-23  # scale that torch gives to a tensor of zeros (epsilon of its observers)

# Quantizers -----------------------------------------------------------------------------------


def check_zero_points(
    pass_name: str,
    node: str,
    dq: str,
    zeros: ParameterValues | None,
    unsigned: bool = False,
    tensor: str = "",
) -> NonzeroZeroPoint | None:
    """Return a reason if a zero point is not 0; None if the zero points are unknown."""
    if zeros is None or zeros.is_zero:
        return None
    values = np.nan_to_num(zeros.values)
    limits = int(values.min()), int(values.max())
    return NonzeroZeroPoint(pass_name, node, dq, limits, unsigned, tensor)


def check_zero_point_count(
    pass_name: str, node: str, scales: int, zeros: int
) -> ZeroPointCount | None:
    """Return a reason if the numbers of scales and zero points differ."""
    return ZeroPointCount(pass_name, node, scales, zeros) if scales != zeros else None


def check_scale_constant(
    pass_name: str, node: str, quantizer: str, computed: bool, tensor: str = ""
) -> ScaleComputed | None:
    """Return a reason if a scale or zero point is computed at run time (``computed``)."""
    return ScaleComputed(pass_name, node, quantizer, tensor) if computed else None


def check_scale_positive(
    pass_name: str,
    model: Model,
    node: Node,
    scales: ParameterValues | None,
    allow_infinite: bool = False,
) -> ScaleNotPositive | None:
    """Return a reason if a scale is zero, negative, not a number, or infinite.

    ``scales`` is None if unknown. ``allow_infinite`` states whether the target accepts an infinite
    scale.
    """
    if scales is None or scales.is_positive:
        return None
    values = scales.values
    places = np.flatnonzero(~((values > 0) & (allow_infinite | np.isfinite(values))))
    if not places.size:
        return None
    channels = tuple(int(i) for i in places[:MAX_CHANNELS])
    bad = values[places]
    is_finite = bool(np.isfinite(bad).all())
    return ScaleNotPositive(
        pass_name,
        node.name,
        float(bad[0]),
        places.size,
        values.size,
        channels,
        owner=find_scale_owner(model, node),
        is_finite=is_finite,
        is_negative=is_finite and bool((bad < 0).all()),
        is_half=model.elem_type(node.input(1)) == onnx.TensorProto.FLOAT16,
    )


def find_scale_owner(model: Model, node: Node) -> ScaleOwner:
    """Return what a Q or DQ quantizes: an activation, weights (finite or not) or integers.

    Weights whose data is missing count as integers.
    """
    quantizer = node
    producer = model.producer(node.input(0))
    if qdq.is_dq(node) and producer is not None and qdq.is_q(producer):
        quantizer = producer
    tensor = quantizer.input(0)
    if not model.is_constant(tensor):
        return ScaleOwner.ACTIVATION
    weights = model.constant(tensor)
    if weights is None or qdq.is_dq(quantizer):
        return ScaleOwner.INTEGERS
    is_finite = bool(np.isfinite(weights.astype(np.float32)).all())
    return ScaleOwner.WEIGHTS if is_finite else ScaleOwner.BROKEN_WEIGHTS


def check_scale_plausible(
    pass_name: str,
    model: Model,
    node: Node,
    scales: ParameterValues | None,
    includes_infinity: bool = False,
    limit: float = SMALLEST_SCALE,
) -> ScaleImplausible | None:
    """Return a reason if a positive scale is too large or too small for any calibration.

    A scale of weights is compared with the weights, because a channel of zeros may have any scale.
    ``scales`` is None if unknown, and ``limit`` the result of :func:`find_implausible_limit`. Set
    ``includes_infinity`` if the target accepts infinite scales, because
    :func:`check_scale_positive` then does not report them.
    """
    if scales is None or not scales.values.size:
        return None
    values = scales.values
    large = (values > LARGEST_SCALE) & (includes_infinity | np.isfinite(values))
    bad = large | ((values > 0) & (values <= SMALLEST_SCALE))
    if not bad.any():
        return None
    owner = find_scale_owner(model, node)
    if owner == ScaleOwner.WEIGHTS:
        maxima = np.broadcast_to(_compute_weight_maxima(model, node, values.size), values.shape)
        bad &= find_extreme_scales(values, maxima)
        if bad.any():
            return create_weight_scale_fault(
                pass_name, node.name, values[bad], maxima[bad], values.size
            )
        return None
    if owner == ScaleOwner.ACTIVATION:
        bad &= large | (values <= limit)
    elif not _has_tiny_scales(model, node, values):
        bad = large
    if not bad.any():
        return None
    return _create_scale_fault(pass_name, node.name, values[bad], values.size, owner)


def find_implausible_limit(scales: Iterable[float]) -> float:
    """Return the largest scale of an activation that is too small for any calibration.

    In untrained networks, the scales may shrink gradually from layer to layer, down to
    1e-13; the result is then 0. A scale that no calibration has set is much smaller than all
    others. ``scales`` are the scales of all activations of the network.
    """
    ordered = sorted({s for s in scales if 0 < s < math.inf}, reverse=True)
    if not ordered or ordered[0] <= SMALLEST_SCALE:
        return SMALLEST_SCALE
    for larger, scale in itertools.pairwise(ordered):
        if scale <= SMALLEST_SCALE and larger > _MAX_SCALE_STEP * scale:
            return scale
    return 0.0


def create_weight_scale_fault(
    pass_name: str,
    node: str,
    scales: npt.NDArray[np.float64],
    largest: npt.NDArray[np.float64],
    count: int,
) -> ScaleImplausible:
    """Return the reason for extreme scales of weights.

    ``scales`` are the extreme ones of the ``count`` scales of a quantizer, and ``largest`` is the
    largest magnitude of the weights of each; both are [scales].
    """
    owner = ScaleOwner.WEIGHTS
    return _create_scale_fault(pass_name, node, scales, count, owner, float(largest.max()))


def _create_scale_fault(
    pass_name: str,
    node: str,
    scales: npt.NDArray[np.float64],
    count: int,
    owner: ScaleOwner,
    largest: float | None = None,
) -> ScaleImplausible:
    return ScaleImplausible(pass_name, node, float(scales[0]), scales.size, count, owner, largest)


def find_extreme_scales(
    scales: npt.NDArray[np.float64], largest: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the scales for which nearly all weights are clipped or rounded to 0.

    Weights that are nearly zero may have any scale.

    Args:
        scales: Positive scales, [channels].
        largest: Largest magnitude of the weights of each scale, [channels].
    """
    with np.errstate(all="ignore"):
        ratios = largest / (_INT8_MAX * scales)
    typical = float(np.sort(largest)[largest.size // 2]) if largest.size else 0.0
    is_dead = largest < _MAX_DEAD_RANGE * typical
    saturates, vanishes = ratios > _MAX_WEIGHT_RATIO, 2 * largest < scales
    if saturates.any():  # the cause probably affects the other channels too, but less
        saturates = ratios > _MIN_WEIGHT_RATIO
    return (largest > _MAX_DEAD_WEIGHT) & (scales > 0) & (saturates | (vanishes & ~is_dead))


def compute_channel_maxima(value: npt.NDArray[Any], axis: int | None) -> npt.NDArray[np.float64]:
    """Return the largest magnitude of each channel, or of the whole array if `axis` is None."""
    if axis is None:
        return np.asarray([np.abs(value).max(initial=0.0)], np.float64)
    others = tuple(i for i in range(value.ndim) if i != axis % value.ndim)
    return np.asarray(np.abs(value).max(axis=others, initial=0.0), np.float64)


def _compute_weight_maxima(model: Model, node: Node, count: int) -> npt.NDArray[np.float64]:
    """Return the largest magnitude of the weights of each scale, [scales].

    A single 0 if the weights are unknown or their channels do not match the scales.
    """
    producer = model.producer(node.input(0))
    tensor = producer.input(0) if producer is not None and qdq.is_dq(node) else node.input(0)
    value, params = model.constant(tensor), qdq.read_params(model, node)
    axis = None if count == 1 else params.axis
    if value is None or (axis is not None and not -value.ndim <= axis < value.ndim):
        return np.zeros(1)
    maxima = compute_channel_maxima(value, axis)
    return maxima if maxima.size == count else np.zeros(1)


def _has_tiny_scales(model: Model, node: Node, scales: npt.NDArray[np.float64]) -> bool:
    """Return whether all scales are too small and the stored integers are not all 0.

    If the integers are unknown, return whether all scales are smaller than any tool writes.
    """
    if not (scales <= SMALLEST_SCALE).all():
        return False
    stored = model.constant(node.input(0))
    return bool((scales < _UNUSED_SCALE).all() if stored is None else np.any(stored))


def check_scale_rank(
    pass_name: str, node: str, shape: Sequence[int], blocked: bool, is_accepted: bool
) -> ScaleRank | None:
    """Return a reason if a scale has two or more dimensions and the target rejects it.

    ``blocked`` states whether the target reads the scale as one scale per block.
    """
    if len(shape) < 2 or is_accepted:
        return None
    return ScaleRank(pass_name, node, tuple(shape), blocked)


def check_scale_count(
    pass_name: str,
    node: str,
    count: int,
    axis: int,
    shape: Sequence[int | None],
    strict: bool = False,
) -> ScaleCount | None:
    """Return a reason if the number of scales differs from the length of their axis.

    ``shape`` is the shape of the quantized tensor, and ``axis`` may be negative. If ``strict``, a
    missing scale, or an axis that the tensor lacks, is also a fault.
    """
    if count > 0 and -len(shape) <= axis < len(shape):
        fits = shape[axis] in (None, count)
    else:
        fits = not strict
    return None if fits else ScaleCount(pass_name, node, count, axis, tuple(shape))


def check_activation_per_tensor(
    pass_name: str, node: str, dq: str, params: QuantParams | None
) -> ActivationPerChannel | None:
    """Return a reason if an activation has one scale for each channel."""
    if params is None or not params.is_per_channel:
        return None
    return ActivationPerChannel(pass_name, node, dq, params.summary)


# Weights and biases ---------------------------------------------------------------------------


def check_weights_constant(
    pass_name: str, node: str, weight: str, constant: bool, sparse: bool = False
) -> WeightsNotConstant | None:
    """Return a reason if weights are computed at run time, or stored as a sparse tensor."""
    return None if constant else WeightsNotConstant(pass_name, node, weight, sparse)


def check_weights_shared(
    pass_name: str,
    node: str,
    weight: str,
    consumers: tuple[str, ...],
    is_output: bool = False,
    more: int = 0,
) -> WeightsShared | None:
    """Return a reason if quantized weights have several consumers, or are a network output.

    ``node`` is one of the convolutions that read the weights. ``more`` is the number of consumers
    that ``consumers`` omits.
    """
    if len(consumers) < 2 and not is_output:
        return None
    return WeightsShared(pass_name, node, weight, consumers, more)


def check_weights_axis(
    pass_name: str,
    node: str,
    quantizer: str,
    params: QuantParams,
    axis: int | None,
    expected: int,
    shape: Sequence[int | None],
    transposed: bool,
    is_proven: bool = True,
) -> WeightsAxis | None:
    """Return a reason unless the target is known to accept the axis of weight scales.

    The axis has to be ``expected``, the axis of the output channels. It is None for a single scale,
    which is accepted. For a ConvTranspose (``transposed``), ``is_proven`` states whether the target
    is known to accept ``expected``. ``shape`` is the shape of the weights.
    """
    if axis is None:
        return None
    axis %= len(shape) or 4
    if axis == expected and (is_proven or not transposed):
        return None
    known_shape = tuple(d or 0 for d in shape)
    return WeightsAxis(
        pass_name, node, quantizer, axis, expected, transposed, params.has_axis, known_shape
    )


def check_misread_constants(
    pass_name: str, model: Model, folds_identities: bool = False
) -> Iterator[MisreadConstant]:
    """Yield a reason for each node that reads stored integers but is not a DQ.

    ``folds_identities`` states whether the target accepts Identities before a zero point.
    """
    for node, tensor in qdq.find_misread_constants(model):
        quantizer, is_identity = qdq.find_parameter_consumer(model, node) or (None, False)
        if not (is_identity and folds_identities):
            name = "" if quantizer is None else quantizer.name
            yield MisreadConstant(pass_name, node.name, node.op, tensor, name)


def check_bias(
    pass_name: str, node: str, convolution: str, precision: Precision, is_bias: bool = False
) -> BiasQuantized | None:
    """Return a reason if the DQ before a convolution dequantizes the bias.

    ``precision`` is the type of the DQ's input. A DQ of INT32 always dequantizes the bias. For
    other types, ``is_bias`` states whether the DQ dequantizes the bias.
    """
    if not is_bias and precision != Precision.INT32:
        return None
    return BiasQuantized(pass_name, node, convolution, precision)


def check_float_types(
    pass_name: str,
    node: str,
    floats: tuple[Precision, Precision],
    dq: str = "",
    weight_dq: str = "",
) -> FloatTypesDiffer | None:
    """Return a reason if the DQs of data and weights write different float types."""
    if floats[0] == floats[1] or not (floats[0].is_float and floats[1].is_float):
        return None
    return FloatTypesDiffer(pass_name, node, dq, weight_dq, floats)


# Operators ------------------------------------------------------------------------------------


def check_integer_operator(pass_name: str, node: Node) -> IntegerOperator | None:
    """Return a reason if a node has an integer operator of onnxruntime, such as QLinearConv."""
    return IntegerOperator(pass_name, node.name, node.op) if computes_integers(node) else None


def computes_integers(node: Node) -> bool:
    """Return whether a node is QLinear..., DynamicQuantize..., ...Integer or QGemm."""
    if node.domain not in DOMAINS and not node.domain.startswith(INNER_DOMAINS):
        return False
    if node.op.startswith(("QLinear", "DynamicQuantize")):
        return True
    return node.op.endswith("Integer") or node.op == "QGemm"


def check_deconvolution(pass_name: str, node: Node) -> FloatDeconvolution | None:
    """Return a reason if a node is a ConvTranspose.

    Call this function only for a target that computes every ConvTranspose in float.
    """
    if operator_of(node).kind != LayerKind.DECONVOLUTION:
        return None
    return FloatDeconvolution(pass_name, node.name)


def check_fp8_kernel_size(
    pass_name: str, node: str, kernel: Sequence[int], size: TensorSize | None = None
) -> fp8.LargeFp8Kernel | None:
    """Return a reason if the kernel of a Conv has too many elements for FP8."""
    if math.prod(kernel) <= MAX_FP8_KERNEL:
        return None
    return fp8.LargeFp8Kernel(pass_name, node, tuple(kernel), size)


def check_fp8_zero_point(
    pass_name: str, node: str, zeros: ParameterValues | None
) -> fp8.NonzeroFp8ZeroPoint | None:
    """Return a reason if the zero point of an FP8 quantizer is not 0."""
    if zeros is None or zeros.is_zero:
        return None
    limits = float(np.nanmin(zeros.values)), float(np.nanmax(zeros.values))
    return fp8.NonzeroFp8ZeroPoint(pass_name, node, limits)


def check_deconvolution_3d(
    pass_name: str,
    node: str,
    kernel: Sequence[object],
    is_float: bool,
    dq: str = "",
    size: TensorSize | None = None,
) -> Deconvolution3D | None:
    """Return a reason if the kernel of a ConvTranspose has three spatial dimensions.

    ``is_float`` states whether the target runs the node in float regardless of the nodes after it.
    ``dq`` is the DQ of the node's data, and ``size`` the size of its output.
    """
    return Deconvolution3D(pass_name, node, dq, is_float, size) if len(kernel) == 3 else None
