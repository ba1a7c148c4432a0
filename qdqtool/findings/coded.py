"""The code of a finding, given by the refusal that it reports: nothing else says of what a finding is made.

Also which of them ``fix`` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qdqtool.findings.messages import GpuFact, GpuLacks, floats_of, quantizers_of
from qdqtool.ir.operators import AVERAGES, CUTS, JOINS, OPERATORS, LayerKind
from qdqtool.trt import faults
from qdqtool.trt import refusals as trt
from qdqtool.trt.refusals import (
    ConsumerKind,
    OutputManyConsumers,
    OutputNotQuantized,
    PathStep,
    RemainingConversion,
    TensorConsumer,
)
from qdqtool.trt.rtx.operands import (
    CompilerFault,
    FaultKind,
    IntegersLost,
    LossCause,
    ScalesJoined,
)
from qdqtool.types import Finding, FindingCode, Refusal
from qdqtool.util.records import contents, nearest, once

# What a refusal says -------------------------------------------------------------------------------------------------


def crossed(steps: Sequence[PathStep]) -> PathStep | None:
    """The operator to name where scales differ on the two sides of some: a join first, then a cut."""
    joins = (s for s in steps if s.op in JOINS)
    cuts = (s for s in steps if s.op in CUTS)
    return next(joins, None) or next(cuts, None) or (steps[0] if steps else None)


@once
def crossed_by(readers: Sequence[TensorConsumer]) -> PathStep | None:
    """The same for the Qs that read one tensor."""
    return crossed([s for q in quantizers_of(readers) for s in q.path])


def with_own(r: RemainingConversion) -> list[TensorConsumer]:
    """The Qs that read a requantized tensor, its own included."""
    own = TensorConsumer(ConsumerKind.Q, r.node, "QuantizeLinear", r.passed, r.scale)
    return [*quantizers_of(r.siblings), own]


_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def shared_pool(r: OutputManyConsumers) -> PathStep | None:
    """The pooling in front of all readers, where there is one: no Q moves up past it."""
    shared = r.readers[0].path[0] if r.readers[0].path else None
    if shared is None or any(not x.path or x.path[0].node != shared.node for x in r.readers):
        return None
    known = OPERATORS.get(shared.op)
    if known is None or known.passage is None:
        return None
    return shared if known.kind in _POOLS or shared.op == "GlobalMaxPool" else None


def float_sum(r: OutputManyConsumers) -> TensorConsumer | None:
    """The residual sum that reads a result as float."""
    return next((x for x in floats_of(r.readers) if x.kind == ConsumerKind.SUM), None)


def average_behind(r: OutputNotQuantized) -> TensorConsumer | None:
    """The averaging pooling that alone reads a result."""
    return r.readers[0] if len(r.readers) == 1 and r.readers[0].op in AVERAGES else None


def left_float(r: OutputNotQuantized) -> bool:
    """Whether no convolution lies behind what reads the result: it was left float."""
    return all(x.kind == ConsumerKind.OUTPUT or not x.feeds_weighted for x in r.readers)


def before_norm(r: OutputNotQuantized) -> bool:
    """Whether a LayerNormalization alone reads the result."""
    return len(r.readers) == 1 and r.readers[0].op == "LayerNormalization"


def _silu_is_last(r: OutputNotQuantized) -> bool:
    silu = r.activation is not None and r.activation.op == "SiLU"
    return silu and not (left_float(r) or quantizers_of(r.readers) or before_norm(r))


# Codes ---------------------------------------------------------------------------------------------------------------


class ScalesAround(RemainingConversion):
    """A conversion that is reported for the scales in front of and behind it."""

    @staticmethod
    def of(stays: RemainingConversion) -> ScalesAround:
        """The same conversion, reported so."""
        return ScalesAround(*contents(stays))


class Made(NamedTuple):
    """What a refusal of a class becomes: this code ``when`` that holds.

    ``fix`` takes it where it is ``tried``; where it is ``promised``, findings say that it can be changed by itself.
    """

    code: FindingCode
    when: Callable[[Any], Any] | None = None
    tried: bool = False
    promised: bool = False


def _fixed(code: FindingCode, when: Callable[[Any], Any] | None = None) -> Made:
    return Made(code, when, tried=True, promised=True)


def _tried(code: FindingCode, when: Callable[[Any], Any] | None = None) -> Made:
    """What is kept only where the simulation sees a gain, so that nothing is promised."""
    return Made(code, when, tried=True)


def _scales(steps: Callable[[Any], PathStep | None]) -> tuple[Made, ...]:
    """Of scales that differ, by the operator between them."""
    return (
        _fixed("CONCAT-SCALE", lambda r: (s := steps(r)) is not None and s.op in JOINS),
        _fixed("SPLIT-SCALE", lambda r: (s := steps(r)) is not None and s.op in CUTS),
        _fixed("POOL-SCALE", steps),
        _fixed("SIBLING-SCALE"),
    )


def _because(*reasons: LossCause | FaultKind) -> Callable[[Any], bool]:
    """Whether TensorRT-RTX lost integers, or a build ends, for one of these reasons."""
    return lambda r: (r.why if isinstance(r, IntegersLost) else r.fault) in reasons


def _fact(*facts: GpuFact) -> Callable[[Any], bool]:
    return lambda r: r.fact in facts


MADE: Mapping[type[Refusal], tuple[Made, ...]] = {
    # Quantizers
    faults.TypeUnknown: (Made("QTYPE"),),
    faults.UnsignedZeroPoint: (_fixed("ZP-UINT8"),),
    trt.NonzeroZeroPoint: (_fixed("ZP-NONZERO"),),
    faults.ZeroPointMissing: (_fixed("DQ-3-INPUTS"),),
    faults.ZeroPointCount: (_fixed("ZP-VOLUME"),),
    trt.ScaleComputed: (Made("SCALE-DYNAMIC"),),
    faults.ScaleHalf: (_fixed("SCALE-FP16"),),
    faults.ScaleNotPositive: (_fixed("SCALE-NONPOS"),),
    faults.ScaleDead: (_fixed("SCALE-DEAD"),),
    faults.ScaleRank: (Made("SCALE-RANK"),),
    faults.ScaleCount: (Made("SCALE-COUNT"),),
    faults.AxisOpset: (Made("OPSET-AXIS"),),
    trt.ActivationPerChannel: (_fixed("ACT-PER-CHANNEL"),),
    faults.ActivationScales: (Made("ACT-SCALE"),),
    faults.OutlierScales: (Made("ACT-OUTLIER"),),
    faults.OtherTypes: (Made("FP8-OUTSIDE"),),
    faults.NothingQuantized: (Made("NO-QDQ"),),
    # Weights and biases
    faults.WeightsBehind: (_fixed("W-NONCONST", lambda r: not r.stored), _fixed("WEIGHT-INDIRECT")),
    trt.WeightsNotConstant: (Made("W-NONCONST"),),
    trt.WeightsNotDequantized: (_fixed("W-NO-DQ"),),
    faults.MisreadConstant: (_fixed("WEIGHT-INDIRECT"),),
    faults.WeightsStored: (_fixed("WEIGHT-PREQUANT"),),
    trt.WeightsShared: (_fixed("W-SHARED"),),
    faults.WeightsOutput: (Made("W-Q-OUTPUT"),),
    trt.WeightsAxis: (_fixed("CT-AXIS", lambda r: r.transposed), Made("W-AXIS")),
    faults.WeightScales: (Made("W-SCALE"),),
    faults.WeightsPerTensor: (_fixed("W-PER-TENSOR"),),
    faults.BiasQuantized: (_fixed("BIAS-DQ"),),
    trt.FloatTypesDiffer: (Made("FLOAT-MIXED"),),
    faults.ProductOfActivations: (Made("MATMUL-COMPUTED"),),
    # Inputs
    trt.InputNotDequantized: (
        Made("NOT-QUANTIZED", lambda r: not r.weights_quantized),
        Made("IN-BLOCKED", lambda r: r.dq),
        Made("IN-FLOAT"),
    ),
    trt.InMyelin: (Made("NOT-QUANTIZED"),),
    # Outputs
    trt.BatchNormNotConstant: (_fixed("BN-UNFOLDED"),),
    trt.ConvTransposeBatchNorm: (_fixed("CT-BN"),),
    trt.OutputScale: (Made("OUT-FLOAT"),),
    trt.ActivationJoined: (Made("OUT-FLOAT"),),
    trt.OutputNotQuantized: (
        Made("POOL-FLOAT", average_behind),
        Made("SILU-NO-Q-AFTER", _silu_is_last),
        Made("OUT-FLOAT"),
    ),
    trt.OutputManyConsumers: (
        _fixed("POOL-MIXED", shared_pool),
        _fixed("SKIP-FLOAT", float_sum),
        Made("OUT-MIXED"),
    ),
    trt.OutputDifferentScales: _scales(lambda r: crossed_by(r.readers)),
    trt.ConcatScales: (_fixed("CONCAT-SCALE"),),
    trt.PoolingOneSide: (Made("POOL-FLOAT"),),
    trt.ReduceNotPooling: (Made("POOL-FLOAT"),),
    trt.ResidualFloat: (_fixed("SKIP-FLOAT"),),
    trt.ResidualBothQuantized: (_fixed("ADD-BOTH"),),
    trt.AddOutputNotQuantized: (_tried("ADD-OUT-FLOAT"),),
    trt.ActivationBeforeAdd: (_tried("ADD-ACT"),),
    # Conversions
    trt.RemainingConversion: (
        _tried("CONVERSION", lambda r: not r.quantize or r.requantizes or r.origin.node),
        _tried("INPUT-CONVERSION"),
    ),
    ScalesAround: (
        _fixed("DOUBLE-QDQ", lambda r: r.requantizes and not r.passed),
        *_scales(lambda r: crossed(r.passed) if r.requantizes else crossed_by(r.siblings)),
    ),
    trt.ScalesDiffer: (_fixed("DOUBLE-QDQ"),),
    # Placement and shapes
    trt.InsideActivation: (_fixed("SILU-INNER-Q", lambda r: r.silu), _fixed("ACT-INNER-Q")),
    trt.BehindPad: (_tried("PAD-SPLIT"),),
    faults.ConcatAfterHead: (_fixed("HEAD-CONCAT"),),
    faults.HeadQuantized: (Made("HEAD-SCORE", lambda r: r.branch == "class"), _fixed("HEAD-QUANT")),
    faults.QuantizedStream: (Made("RESIDUAL-STREAM"),),
    faults.GroupedConvolution: (Made("GROUP-SLOW"),),
    faults.ChannelNumbers: (Made("CH-SMALL", lambda r: r.small), Made("CH-ALIGN")),
    faults.DepthwiseSilu: (Made("DW-SILU"),),
    faults.DepthwiseAdd: (Made("DW-ADD"),),
    faults.LargeKernel: (Made("KERNEL-LARGE"),),
    faults.Convolution3D: (Made("CONV3D-INT8"),),
    trt.Deconvolution3D: (Made("CT3D-FLOAT"),),
    faults.FloatDeconvolution: (Made("CT-FLOAT"),),
    # Operators and float types
    faults.IntegerOperator: (Made("QOPERATOR"),),
    faults.UnknownOperator: (Made("PLUGIN-OUTSIDE"),),
    faults.FloatNormalization: (Made("NORM-FLOAT"),),
    faults.DecomposedNorm: (_fixed("NORM-PIECES"),),
    faults.ConstantsInHalf: (Made("CONST-FP16"),),
    faults.FloatEinsum: (Made("EINSUM-FLOAT"),),
    faults.FloatFlag: (Made("FLAG-FP16"),),
    faults.RemainingFloat: (_fixed("FLOAT-FP32"),),
    faults.FusedByMyelin: (Made("MYELIN-REGION"),),
    # TensorRT-RTX
    IntegersLost: (
        Made("POOL-MIXED", _because(LossCause.POOL)),
        _fixed("SCALE-SHAPE1", _because(LossCause.INPUT_SHAPE1)),
        Made("QTYPE", _because(LossCause.TYPES)),
        Made("FLOAT-SM75", _because(LossCause.TURING)),
        Made("W-AXIS", _because(LossCause.WEIGHTS_AXIS)),
        Made("W-AXIS", lambda r: r.weights and r.why in (LossCause.AXIS, LossCause.SUM_AXIS)),
        _fixed(
            "ACT-PER-CHANNEL", _because(LossCause.INPUT_AXIS, LossCause.AXIS, LossCause.SUM_AXIS)
        ),
        Made("W-NO-DQ", lambda r: r.weights),
        Made("IN-BLOCKED"),
    ),
    ScalesJoined: (_fixed("CONCAT-SCALE"),),
    CompilerFault: (
        Made("QTYPE", _because(FaultKind.CONSTANT_TYPE, FaultKind.HARDWARE_TYPE)),
        Made("BUILD-CRASHES", _because(FaultKind.SCALE)),
        Made("SCALE-RANK", _because(FaultKind.BLOCKS)),
        Made("ZP-NONZERO", _because(FaultKind.ZERO_POINT)),
        Made("BUILD-FAILS"),
    ),
    # GPUs
    GpuLacks: (
        Made("GPU-NO-INT8", _fact(GpuFact.NO_INT8)),
        Made("GPU-DP4A", _fact(GpuFact.DP4A_TENSOR, GpuFact.DP4A_FP16, GpuFact.DP4A_FP32)),
        Made("GPU-FUSION", _fact(GpuFact.FUSION)),
        Made("GPU-KERNELS", _fact(GpuFact.KERNELS)),
        Made("GPU-JETSON", _fact(GpuFact.JETSON)),
        Made("GPU-NO-FP16", _fact(GpuFact.NO_FP16)),
        Made("GPU-VERSION"),
    ),
}
"""By the class of a refusal: the codes, the first that holds."""


def code_of(refusal: Refusal) -> FindingCode:
    """The code of a refusal.

    Raises:
        KeyError: Nothing is reported of refusals of its class.
    """
    made = nearest(MADE, type(refusal))
    if made is None:
        raise KeyError(type(refusal))
    return next(m.code for m in made if m.when is None or m.when(refusal))


PROMISED = frozenset(m.code for made in MADE.values() for m in made if m.promised)
"""The codes of findings that ``qdqtool fix`` can change by itself."""
TRIED = frozenset(m.code for made in MADE.values() for m in made if m.tried)
"""Those that it tries to."""


def codes_of(kind: type[Refusal]) -> tuple[FindingCode, ...]:
    """All codes of a class of refusals; none where nothing is reported of them."""
    return tuple(m.code for m in nearest(MADE, kind) or ())


def fixes_of(kinds: Sequence[type[Refusal]]) -> tuple[FindingCode, ...]:
    """The codes that ``fix`` takes of refusals of these classes, in the order of the classes."""
    return tuple(
        dict.fromkeys(m.code for kind in kinds for m in nearest(MADE, kind) or () if m.tried)
    )


def fixed(finding: Finding) -> list[Refusal]:
    """The refusals behind a finding that ``fix`` takes; none for one that no step takes."""
    if finding.code not in TRIED:
        return []
    return [
        r
        for c in finding.causes
        for r in (c.refusal, *c.also)
        if finding.code in fixes_of((type(r),))
    ]
