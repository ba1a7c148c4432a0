"""List of all fixes in the order in which they are tried, with their permitted cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdqtool.findings.rules import attempted_codes
from qdqtool.fixing import pairs, quantizers, weights
from qdqtool.fixing.site import HALF_ROUNDING, FixCriteria, FixStep
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
from qdqtool.reasons.heads import QuantizedHead, ResultAfterHead
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
        requires="a scale and a zero point that are constants, and 8-bit integers",
    ),
    FixStep(
        (OperatorsOnWeights, MisreadConstant, ParameterIndirect),
        _EXACT,
        find=quantizers.find_computed_constants,
        requires="values that depend only on constants, not on an input of the network",
    ),
    FixStep(
        (ScaleNotPositive,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_nonpositive_scales,
        requires="float weights before the Q, or a negative scale (not 0 or NaN)",
    ),
    FixStep(
        (ScaleImplausible,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_weight_scales,
        requires="constant, finite float weights, and a scale for the tensor or for each channel",
    ),
    FixStep(
        (IntegersLost, ActivationPerChannel),
        _ONE_BIT,
        find=quantizers.find_scale_vectors,
        requires="a Q and a DQ with scales that are constants",
    ),
    FixStep(
        (BiasQuantized,),
        _EXACT,
        find=weights.find_quantized_biases,
        requires="a constant bias, and a DQ that is not an output or read in a subgraph",
    ),
    FixStep(
        (WeightsStoredAsIntegers,),
        _EXACT,
        find=weights.find_stored_integers,
        requires="INT8 weights and scales that are constants",
    ),
    FixStep(
        (WeightsShared,),
        _EXACT,
        find=weights.find_shared_weights,
        requires="constant weights that no node changes after their Q and DQ",
    ),
    FixStep(
        (BatchNormNotConstant,),
        _EXACT,
        find=weights.find_batchnorm_parameters,
        requires="parameters that depend only on constants",
    ),
    FixStep(
        (ConvTransposeBatchNorm,),
        _EXACT,
        find=weights.find_batchnorms_after_transposed,
        requires=(
            "a ConvTranspose without groups that only the BatchNormalization reads, symmetric "
            "weights, and constant parameters"
        ),
    ),
    FixStep(
        (WeightsAxis,),
        _ONE_BIT,
        requantizes_weights=True,
        find=weights.find_transposed_weights,
        requires="constant, finite INT8 weights that no node changes after their Q and DQ",
    ),
    FixStep(
        (WeightsNotDequantized,),
        _ONE_BIT,
        find=weights.find_float_weights,
        requires="constant, finite weights without a DQ, which have two dimensions or more",
    ),
    FixStep(
        (WeightsPerTensor,),
        _EXACT,
        requantizes_weights=True,
        find=weights.find_per_tensor_weights,
        requires="float weights with a Q and a DQ whose values are not rounded",
    ),
    FixStep(
        (ResultAfterHead,),
        _EXACT,
        costs_speed=True,
        find=pairs.find_pairs_after_head,
        requires="Q/DQ pairs that no layer with weights reads",
    ),
    FixStep(
        (QuantizedHead,),
        _EXACT,
        costs_speed=True,
        find=pairs.find_quantized_heads,
        requires="a Q/DQ pair at the input, and weights that no node changes after their DQ",
    ),
    FixStep(
        (ScaleDead,),
        _ONE_BIT,
        find=quantizers.find_dead_scales,
        requires="an operator with bounded results, or a Q that no layer with weights reads",
    ),
    FixStep((ResidualBothQuantized,), _EXACT, find=pairs.find_pairs_before_adds),
    FixStep(
        (QuantizerAfterPad,),
        _EXACT,
        find=pairs.find_pairs_after_pads,
        requires="a Pad with zeros or copies before the Q, which only the convolution reads",
    ),
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
        requires="an Add with a float input that a Q with one scale already reads",
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
        shares_scales=True,
        find=pairs.find_different_scales,
        requires="symmetric INT8 or FP8 quantizers with different, constant scales per tensor",
    ),
    # A pair that moves keeps its scale. After the common scales, it needs none of them.
    FixStep(
        (QuantizerInsideActivation,),
        _EXACT,
        find=pairs.find_pairs_inside_activations,
        requires="an activation that reads the Q/DQ pair",
    ),
    FixStep(
        (WeightScales,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_weight_scales,
        requires="constant, finite float weights, and a scale for the tensor or for each channel",
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
        rounding=HALF_ROUNDING,
        description="the model is float32",
        convert=quantizers.to_float32,
        requires="a model with FLOAT16 tensors",
    ),
    ModelStep(
        (DecomposedNorm,),
        _EXACT,
        description=("decomposed layer normalizations written as LayerNormalization"),
        convert=quantizers.to_layer_norm,
        requires="a decomposed LayerNorm that a LayerNormalization can replace exactly",
    ),
    ModelStep(
        (RemainingFloat,),
        _EXACT,
        changes_types=True,
        rounding=HALF_ROUNDING,
        description="layers that are not quantized are FP16",
        convert=quantizers.to_fp16_layers,
        requires="a strongly typed target, and a layer that can compute in FP16",
    ),
)
