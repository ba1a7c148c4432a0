"""List of all fixes in the order in which they are tried, with their permitted cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdqtool.findings.rules import attempted_codes
from qdqtool.fixing import compare, pairs, quantizers, weights
from qdqtool.fixing.site import FixCriteria, FixStep
from qdqtool.ir.graph import Model
from qdqtool.reasons import faults, simulation
from qdqtool.reasons.compiler import IntegersLost, ScalesJoined
from qdqtool.reasons.simulation import ScalesAround
from qdqtool.trt.targets import Target

# Permitted growth factors of the outputs' error against the float network. Even an exact rewrite
# may change the last bit of a float, and so a rounded integer. Deep networks amplify that: the
# error then changes by about a tenth.
_EXACT = 1.3
_SHARED = 1.5  # one scale for several tensors: smaller tensors lose resolution
_ONE_BIT = 2.5  # uint8 to int8: the loss of up to one bit doubles the noise

# Codes of fixes that make ranges symmetric, which loses up to one bit.
HALVING_CODES = attempted_codes((simulation.NonzeroZeroPoint, faults.UnsignedZeroPoint))

# Two steps can remove conversions, because a finding may not name the cause of a conversion.
STEPS = (
    FixStep(
        (
            simulation.NonzeroZeroPoint,
            faults.UnsignedZeroPoint,
            faults.ZeroPointMissing,
            faults.ZeroPointCount,
        ),
        _ONE_BIT,
        find=quantizers.find_asymmetric_quantizers,
    ),
    FixStep(
        (faults.ScaleNotPositive,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_nonpositive_scales,
    ),
    FixStep(
        (faults.ScaleImplausible,),
        _EXACT,
        requantizes_weights=True,
        find=quantizers.find_weight_scales,
    ),
    FixStep(
        (IntegersLost, simulation.ActivationPerChannel),
        _ONE_BIT,
        find=quantizers.find_scale_vectors,
    ),
    FixStep((faults.BiasQuantized,), _EXACT, find=weights.find_quantized_biases),
    FixStep(
        (faults.OperatorsOnWeights, faults.MisreadConstant, faults.ParameterIndirect),
        _EXACT,
        find=quantizers.find_computed_constants,
    ),
    FixStep((faults.WeightsStored,), _EXACT, find=weights.find_stored_integers),
    FixStep((simulation.WeightsShared,), _EXACT, find=weights.find_shared_weights),
    FixStep((simulation.BatchNormNotConstant,), _EXACT, find=weights.find_batchnorm_parameters),
    FixStep(
        (simulation.ConvTransposeBatchNorm,), _EXACT, find=weights.find_batchnorms_after_transposed
    ),
    FixStep((simulation.WeightsAxis,), _ONE_BIT, find=weights.find_transposed_weights),
    FixStep((simulation.WeightsNotDequantized,), _ONE_BIT, find=weights.find_float_weights),
    FixStep(
        (faults.WeightsPerTensor,),
        _EXACT,
        requantizes_weights=True,
        find=weights.find_per_tensor_weights,
    ),
    FixStep((faults.ConcatAfterHead,), _EXACT, costs_speed=True, find=pairs.find_pairs_after_head),
    FixStep((faults.HeadQuantized,), _EXACT, costs_speed=True, find=pairs.find_quantized_heads),
    FixStep((faults.ScaleDead,), _ONE_BIT, find=quantizers.find_dead_scales),
    FixStep((simulation.InsideActivation,), _EXACT, find=pairs.find_pairs_inside_activations),
    FixStep((simulation.ResidualBothQuantized,), _EXACT, find=pairs.find_pairs_before_adds),
    FixStep((simulation.PadBeforeConvolution,), _EXACT, find=pairs.find_pairs_after_pads),
    FixStep(
        (
            simulation.ResidualFloat,
            simulation.OutputManyConsumers,
            simulation.ActivationBeforeAdd,
            simulation.AddOutputNotQuantized,
            simulation.RemainingConversion,
        ),
        _SHARED,
        find=pairs.find_float_residuals,
    ),
    FixStep(
        (
            simulation.OutputDifferentScales,
            simulation.ConcatScales,
            ScalesJoined,
            ScalesAround,
            simulation.ScalesDiffer,
            simulation.RemainingConversion,
        ),
        _SHARED,
        find=pairs.find_different_scales,
    ),
    FixStep(
        (faults.WeightScales,),
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
        convert: Function that returns the rewritten model; None if the rewrite does not apply.
    """

    description: str
    convert: Callable[[Model, Target], Model | None]


MODEL_STEPS = (
    ModelStep(
        (faults.LocalFunctions,),
        _EXACT,
        description="functions inlined",
        convert=lambda model, target: model.copy(),  # functions are inlined when a file is read
    ),
    ModelStep(
        (faults.ScaleHalf,),
        _EXACT,
        changes_types=True,
        description="the model is float32",
        convert=quantizers.to_float,
    ),
    ModelStep(
        (faults.DecomposedNorm,),
        _EXACT,
        description=("decomposed layer normalizations written as LayerNormalization"),
        convert=quantizers.to_layer_norm,
    ),
    ModelStep(
        (faults.RemainingFloat,),
        _EXACT,
        changes_types=True,
        rounding=compare.HALF_ROUNDING,
        description="layers that are not quantized are FP16",
        convert=quantizers.to_half,
    ),
)
