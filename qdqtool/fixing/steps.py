"""List of all fixes in the order in which they are tried, with their permitted cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdqtool.findings.rules import attempted_codes
from qdqtool.fixing import pairs, quantizers, weights
from qdqtool.fixing.outputs import HALF_ROUNDING
from qdqtool.fixing.site import FixCriteria, FixStep
from qdqtool.ir.graph import Model
from qdqtool.reasons.attention import DecomposedNorm
from qdqtool.reasons.compiler import IntegersLost, IntegersLostAtJoin
from qdqtool.reasons.conversions import ConversionBetweenScales, RemainingConversion
from qdqtool.reasons.float_types import RemainingFloat
from qdqtool.reasons.fusions import (
    ActivationBeforeAdd,
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
    QuantizerAfterPad,
    QuantizerInsideActivation,
)
from qdqtool.reasons.heads import ConcatAfterHead, QuantizedHead
from qdqtool.reasons.operators import LocalFunctions
from qdqtool.reasons.outputs import OutputDifferentScales, OutputMixedConsumers
from qdqtool.reasons.quantizers import (
    NonzeroZeroPoint,
    ParameterIndirect,
    UnsignedZeroPoint,
    ZeroPointCount,
    ZeroPointMissing,
)
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualBothQuantized, ResidualFloat
from qdqtool.reasons.scales import (
    ActivationPerChannel,
    ConcatScales,
    Float16Scale,
    ScaleDead,
    ScaleImplausible,
    ScaleNotPositive,
    ScalesDiffer,
)
from qdqtool.reasons.weights import (
    BiasQuantized,
    MisreadConstant,
    OperatorsOnWeights,
    WeightsAxis,
    WeightScales,
    WeightsNotDequantized,
    WeightsPerTensor,
    WeightsShared,
    WeightsStoredAsIntegers,
)
from qdqtool.trt.targets import Target

# Permitted growth factors of the output errors against the float network. Even an exact rewrite may
# change the last bit of a float, and thereby a rounded integer. Deep networks amplify such changes,
# which may change the error by a tenth.
_EXACT = 1.3
_SHARED = 1.5  # one scale for several tensors costs the smaller tensors resolution
_ONE_BIT = 2.5  # uint8 to int8 loses up to one bit, which doubles the error

# Codes of the fixes that make ranges symmetric, which loses up to one bit.
HALVING_CODES = attempted_codes((NonzeroZeroPoint, UnsignedZeroPoint))

# Two steps have the reason RemainingConversion, because the reason does not show which of the two
# steps removes the conversion.
STEPS = (
    FixStep(
        (
            NonzeroZeroPoint,
            UnsignedZeroPoint,
            ZeroPointMissing,
            ZeroPointCount,
        ),
        _ONE_BIT,
        find=quantizers.find_asymmetric_quantizers,
    ),
    FixStep(
        (OperatorsOnWeights, MisreadConstant, ParameterIndirect),
        _EXACT,
        find=quantizers.find_computed_constants,
    ),
    FixStep(
        (ScaleNotPositive,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_nonpositive_scales,
    ),
    FixStep(
        (ScaleImplausible,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_weight_scales,
    ),
    FixStep(
        (IntegersLost, ActivationPerChannel),
        _ONE_BIT,
        find=quantizers.find_scale_vectors,
    ),
    FixStep((BiasQuantized,), _EXACT, find=weights.find_quantized_biases),
    FixStep((WeightsStoredAsIntegers,), _EXACT, find=weights.find_stored_integers),
    FixStep((WeightsShared,), _EXACT, find=weights.find_shared_weights),
    FixStep((BatchNormNotConstant,), _EXACT, find=weights.find_batchnorm_parameters),
    FixStep((ConvTransposeBatchNorm,), _EXACT, find=weights.find_batchnorms_after_transposed),
    FixStep((WeightsAxis,), _ONE_BIT, find=weights.find_transposed_weights),
    FixStep((WeightsNotDequantized,), _ONE_BIT, find=weights.find_float_weights),
    FixStep(
        (WeightsPerTensor,),
        _EXACT,
        requantizes_weights=True,
        find=weights.find_per_tensor_weights,
    ),
    FixStep((ConcatAfterHead,), _EXACT, costs_speed=True, find=pairs.find_pairs_after_head),
    FixStep((QuantizedHead,), _EXACT, costs_speed=True, find=pairs.find_quantized_heads),
    FixStep((ScaleDead,), _ONE_BIT, find=quantizers.find_dead_scales),
    FixStep((QuantizerInsideActivation,), _EXACT, find=pairs.find_pairs_inside_activations),
    FixStep((ResidualBothQuantized,), _EXACT, find=pairs.find_pairs_before_adds),
    FixStep((QuantizerAfterPad,), _EXACT, find=pairs.find_pairs_after_pads),
    FixStep(
        (
            ResidualFloat,
            OutputMixedConsumers,
            ActivationBeforeAdd,
            AddOutputNotQuantized,
            RemainingConversion,
        ),
        _SHARED,
        find=pairs.find_float_residuals,
    ),
    FixStep(
        (
            OutputDifferentScales,
            ConcatScales,
            IntegersLostAtJoin,
            ConversionBetweenScales,
            ScalesDiffer,
            RemainingConversion,
        ),
        _SHARED,
        find=pairs.find_different_scales,
    ),
    FixStep(
        (WeightScales,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_weight_scales,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelStep(FixCriteria):
    """Rewrite of the whole model.

    Attributes:
        description: Description of the change.
        convert: Function that returns the rewritten model, or None if the rewrite does not apply.
    """

    description: str
    convert: Callable[[Model, Target], Model | None]


MODEL_STEPS = (
    ModelStep(
        (LocalFunctions,),
        _EXACT,
        description="functions inlined",
        convert=lambda model, target: model.copy(),  # reading the file inlined the functions
    ),
    ModelStep(
        (Float16Scale,),
        _EXACT,
        changes_types=True,
        description="the model is float32",
        convert=quantizers.to_float32,
    ),
    ModelStep(
        (DecomposedNorm,),
        _EXACT,
        description=("decomposed layer normalizations written as LayerNormalization"),
        convert=quantizers.to_layer_norm,
    ),
    ModelStep(
        (RemainingFloat,),
        _EXACT,
        changes_types=True,
        rounding=HALF_ROUNDING,
        description="layers that are not quantized are FP16",
        convert=quantizers.to_fp16_layers,
    ),
)
