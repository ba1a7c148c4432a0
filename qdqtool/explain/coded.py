"""The code of a finding, given by the refusal that it reports: nothing else says of what a finding is made.

Also which of them ``fix`` takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qdqtool.base.records import once
from qdqtool.explain.messages import floats_of, quantizers_of
from qdqtool.model.operators import AVERAGES, CUTS, JOINS, OPERATORS, LayerKind
from qdqtool.trt.refusals import OutputManyConsumers, OutputNotQuantized, Reader, ReaderKind, Stays, Step
from qdqtool.types import Finding, FindingCode, Refusal

# What a refusal says -------------------------------------------------------------------------------------------------


def crossed(steps: Sequence[Step]) -> Step | None:
    """The operator to name where scales differ on the two sides of some: a join first, then a cut."""
    joins = (s for s in steps if s.op in JOINS)
    cuts = (s for s in steps if s.op in CUTS)
    return next(joins, None) or next(cuts, None) or (steps[0] if steps else None)


@once
def crossed_by(readers: Sequence[Reader]) -> Step | None:
    """The same for the Qs that read one tensor."""
    return crossed([s for q in quantizers_of(readers) for s in q.path])


def with_own(r: Stays) -> list[Reader]:
    """The Qs that read a requantized tensor, its own included."""
    own = Reader(ReaderKind.Q, r.node, "QuantizeLinear", r.passed, r.scale)
    return [*quantizers_of(r.siblings), own]


_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def shared_pool(r: OutputManyConsumers) -> Step | None:
    """The pooling in front of all readers, where there is one: no Q moves up past it."""
    shared = r.readers[0].path[0] if r.readers[0].path else None
    if shared is None or any(not x.path or x.path[0].node != shared.node for x in r.readers):
        return None
    known = OPERATORS.get(shared.op)
    if known is None or known.passage is None:
        return None
    return shared if known.kind in _POOLS or shared.op == "GlobalMaxPool" else None


def float_sum(r: OutputManyConsumers) -> Reader | None:
    """The residual sum that reads a result as float."""
    return next((x for x in floats_of(r.readers) if x.kind == ReaderKind.SUM), None)


def average_behind(r: OutputNotQuantized) -> Reader | None:
    """The averaging pooling that alone reads a result."""
    return r.readers[0] if len(r.readers) == 1 and r.readers[0].op in AVERAGES else None


def left_float(r: OutputNotQuantized) -> bool:
    """Whether no convolution lies behind what reads the result: it was left float."""
    return all(x.kind == ReaderKind.OUTPUT or not x.feeds_weighted for x in r.readers)


def before_norm(r: OutputNotQuantized) -> bool:
    """Whether a LayerNormalization alone reads the result."""
    return len(r.readers) == 1 and r.readers[0].op == "LayerNormalization"


def _silu_is_last(r: OutputNotQuantized) -> bool:
    silu = r.activation is not None and r.activation.op == "SiLU"
    return silu and not (left_float(r) or quantizers_of(r.readers) or before_norm(r))


# Codes ---------------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """What a refusal of a class becomes: this code ``when`` that holds, which ``fix`` takes where it is ``fixed``."""

    code: FindingCode
    when: Callable[[Any], Any] | None = None
    fixed: bool = False


def _fixed(code: FindingCode, when: Callable[[Any], Any] | None = None) -> Made:
    return Made(code, when, fixed=True)


def _scales(steps: Callable[[Any], Step | None], *first: Made) -> tuple[Made, ...]:
    """Of scales that differ, by the operator between them."""
    return (
        *first, _fixed("CONCAT-SCALE", lambda r: (s := steps(r)) is not None and s.op in JOINS),
        _fixed("SPLIT-SCALE", lambda r: (s := steps(r)) is not None and s.op in CUTS),
        _fixed("POOL-SCALE", steps), _fixed("SIBLING-SCALE"),
    )


def _because(*names: str) -> Callable[[Any], bool]:
    """Whether TensorRT-RTX lost integers, or a build ends, for one of these reasons."""
    return lambda r: (r.why if hasattr(r, "why") else r.fault).name in names


def _fact(*names: str) -> Callable[[Any], bool]:
    return lambda r: r.fact.name in names


SCALES_OF_STAYS = "Stays, for its scales"
MADE: Mapping[str, tuple[Made, ...]] = {
    # Quantizers
    "TypeUnknown": (Made("QTYPE"),),
    "UnsignedZeroPoint": (_fixed("ZP-UINT8"),),
    "NonzeroZeroPoint": (_fixed("ZP-NONZERO"),),
    "ZeroPointMissing": (_fixed("DQ-3-INPUTS"),),
    "ZeroPointCount": (_fixed("ZP-VOLUME"),),
    "ScaleComputed": (Made("SCALE-DYNAMIC"),),
    "ScaleHalf": (_fixed("SCALE-FP16"),),
    "ScaleNotPositive": (_fixed("SCALE-NONPOS"),),
    "ScaleRank": (Made("SCALE-RANK"),),
    "ScaleCount": (Made("SCALE-COUNT"),),
    "AxisOpset": (Made("OPSET-AXIS"),),
    "ActivationPerChannel": (_fixed("ACT-PER-CHANNEL"),),
    "ActivationScales": (Made("ACT-SCALE"),),
    "OutlierScales": (Made("ACT-OUTLIER"),),
    "OtherTypes": (Made("FP8-OUTSIDE"),),
    "NothingQuantized": (Made("NO-QDQ"),),
    # Weights and biases
    "WeightsBehind": (_fixed("WEIGHT-INDIRECT", lambda r: r.stored), _fixed("W-NONCONST")),
    "WeightsNotConstant": (Made("W-NONCONST"),),
    "WeightsNotDequantized": (_fixed("W-NO-DQ"),),
    "StoredReadElsewhere": (_fixed("WEIGHT-INDIRECT"),),
    "WeightsStored": (_fixed("WEIGHT-PREQUANT"),),
    "WeightsShared": (_fixed("W-SHARED"),),
    "WeightsOutput": (Made("W-Q-OUTPUT"),),
    "WeightsAxis": (_fixed("CT-AXIS", lambda r: r.transposed), Made("W-AXIS")),
    "WeightScales": (Made("W-SCALE"),),
    "BiasQuantized": (_fixed("BIAS-DQ"),),
    "FloatTypesDiffer": (Made("FLOAT-MIXED"),),
    "ProductOfActivations": (Made("MATMUL-COMPUTED"),),
    # Inputs
    "InputNotDequantized": (
        Made("NOT-QUANTIZED", lambda r: not r.weights_quantized), Made("IN-BLOCKED", lambda r: r.dq), Made("IN-FLOAT")),
    "InMyelin": (Made("FLOAT-OTHER", lambda r: r.data_quantized and r.weights_quantized), Made("NOT-QUANTIZED")),
    # Outputs
    "BatchNormNotConstant": (_fixed("BN-UNFOLDED"),),
    "ConvTransposeBatchNorm": (_fixed("CT-BN"),),
    "OutputScale": (Made("OUT-FLOAT"),),
    "ActivationJoined": (Made("OUT-FLOAT"),),
    "OutputNotQuantized": (
        Made("POOL-FLOAT", average_behind), Made("SILU-NO-Q-AFTER", _silu_is_last), Made("OUT-FLOAT")),
    "OutputManyConsumers": (
        _fixed("POOL-MIXED", shared_pool), _fixed("SKIP-FLOAT", float_sum), Made("OUT-MIXED")),
    "OutputDifferentScales": _scales(lambda r: crossed_by(r.readers)),
    "ConcatScales": (_fixed("CONCAT-SCALE"),),
    "PoolingOneSide": (Made("POOL-FLOAT"),),
    "ReduceNotPooling": (Made("POOL-FLOAT"),),
    "ResidualFloat": (_fixed("SKIP-FLOAT"),),
    "ResidualBothQuantized": (_fixed("ADD-BOTH"),),
    "AddOutputNotQuantized": (_fixed("ADD-OUT-FLOAT"),),
    "ActivationBeforeAdd": (_fixed("ADD-ACT"),),
    # Conversions
    "Stays": (
        _fixed("INPUT-CONVERSION",
               lambda r: r.quantize and not r.requantizes and not r.origin.node), _fixed("CONVERSION")),
    SCALES_OF_STAYS: _scales(
        lambda r: crossed(r.passed) if r.requantizes else crossed_by(r.siblings),
        _fixed("DOUBLE-QDQ", lambda r: r.requantizes and not r.passed)),
    "ScalesDiffer": (_fixed("DOUBLE-QDQ"),),
    # Placement and shapes
    "InsideActivation": (_fixed("SILU-INNER-Q", lambda r: r.silu), _fixed("ACT-INNER-Q")),
    "BehindPad": (_fixed("PAD-SPLIT"),),
    "JoinedBehindHead": (_fixed("HEAD-CONCAT"),),
    "HeadQuantized": (Made("HEAD-SCORE", lambda r: r.branch == "class"), _fixed("HEAD-QUANT")),
    "QuantizedStream": (Made("RESIDUAL-STREAM"),),
    "Grouped": (Made("GROUP-SLOW"),),
    "Channels": (Made("CH-SMALL", lambda r: r.small), Made("CH-ALIGN")),
    "DepthwiseSilu": (Made("DW-SILU"),),
    "DepthwiseAdd": (Made("DW-ADD"),),
    "LargeKernel": (Made("KERNEL-LARGE"),),
    "Convolution3D": (Made("CONV3D-INT8"),),
    "Deconvolution3D": (Made("CT3D-FLOAT"),),
    "DeconvolutionFloat": (Made("CT-FLOAT"),),
    # Operators and float types
    "IntegerOperator": (Made("QOPERATOR"),),
    "UnknownOperator": (Made("PLUGIN-OUTSIDE"),),
    "NormalizationFloat": (Made("NORM-FLOAT"),),
    "NormInPieces": (_fixed("NORM-PIECES"),),
    "ConstantsInHalf": (Made("CONST-FP16"),),
    "EinsumFloat": (Made("EINSUM-FLOAT"),),
    "FloatFlag": (Made("FLAG-FP16"),),
    "FloatStays": (_fixed("FLOAT-FP32"),),
    "TakenByMyelin": (Made("MYELIN-REGION"),),
    # TensorRT-RTX
    "IntegersLost": (
        Made("POOL-MIXED", _because("POOL")), _fixed("CONCAT-SCALE", _because("JOIN_SCALE")),
        _fixed("SCALE-SHAPE1", _because("INPUT_SHAPE1")), Made("QTYPE", _because("TYPES")),
        Made("FLOAT-SM75", _because("TURING")), Made("W-AXIS", _because("WEIGHTS_AXIS")),
        Made("W-AXIS", lambda r: r.weights and r.why.name in ("AXIS", "SUM_AXIS")),
        _fixed("ACT-PER-CHANNEL", _because("INPUT_AXIS", "AXIS", "SUM_AXIS")),
        Made("W-NO-DQ", lambda r: r.weights), Made("IN-BLOCKED")),
    "CompilerFault": (
        Made("QTYPE", _because("CONSTANT_TYPE", "HARDWARE_TYPE")), Made("BUILD-CRASHES", _because("SCALE")),
        Made("SCALE-RANK", _because("BLOCKS")), Made("ZP-NONZERO", _because("ZERO_POINT")), Made("BUILD-FAILS")),
    # GPUs
    "GpuLacks": (
        Made("GPU-NO-INT8", _fact("NO_INT8")), Made("GPU-DP4A", _fact("DP4A_TENSOR", "DP4A_FP16", "DP4A_FP32")),
        Made("GPU-FUSION", _fact("FUSION")), Made("GPU-KERNELS", _fact("KERNELS")),
        Made("GPU-JETSON", _fact("JETSON")), Made("GPU-NO-FP16", _fact("NO_FP16")), Made("GPU-VERSION")),
}
"""By the name of a refusal's class, for those of other targets need not be loaded: the codes, the first that holds."""


def code_of(refusal: Refusal, scales: bool = False) -> FindingCode:
    """The code of a refusal; with ``scales`` of what a conversion says of the scales in front of and behind it.

    Raises:
        KeyError: Nothing is reported of refusals of its class.
    """
    made = MADE[SCALES_OF_STAYS if scales and isinstance(refusal, Stays) else type(refusal).__name__]
    return next(m.code for m in made if m.when is None or m.when(refusal))


def _fixes() -> dict[FindingCode, frozenset[str]]:
    found: dict[FindingCode, set[str]] = defaultdict(set)
    for kind, made in MADE.items():
        for m in made:
            if m.fixed:
                found[m.code].add(kind.partition(",")[0])
    return {code: frozenset(kinds) for code, kinds in found.items()}


FIXES = _fixes()
"""The refusals that ``fix`` takes, by code: names of their classes."""


def fixed(finding: Finding) -> list[Refusal]:
    """The refusals behind a finding that ``fix`` takes; none for one that no step takes."""
    taken = FIXES.get(finding.code, ())
    return [r for c in finding.causes for r in (c.refusal, *c.also) if type(r).__name__ in taken]
