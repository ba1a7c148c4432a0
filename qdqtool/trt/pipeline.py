"""The passes in the order of TensorRT's log, run to a fixpoint, for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qdqtool.errors import QdqtoolError
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.activation_to_pointwise_conversion import ActivationToPointwiseConversion
from qdqtool.trt.passes.concat_removal import ConcatRemoval
from qdqtool.trt.passes.const_cast_fold import ConstCastFold
from qdqtool.trt.passes.const_elt_fusion import ConstEltFusion
from qdqtool.trt.passes.const_qdq_initializers_fusion import ConstQDQInitializersFusion
from qdqtool.trt.passes.const_shuffle_fusion import ConstShuffleFusion
from qdqtool.trt.passes.const_weights_fusion import ConstWeightsFusion
from qdqtool.trt.passes.const_weights_quantize_fusion import ConstWeightsQuantizeFusion
from qdqtool.trt.passes.constant_fold_dangling_qdq import ConstantFoldDanglingQDQ
from qdqtool.trt.passes.conv_act_pool_fusion import ConvActPoolFusion
from qdqtool.trt.passes.conv_eltwise_sum_fusion import ConvEltwiseSumFusion
from qdqtool.trt.passes.conv_relu_fusion import ConvReluFusion, DeconvReluFusion
from qdqtool.trt.passes.conv_scale_fusion import ConvScaleFusion, DeconvScaleFusion
from qdqtool.trt.passes.dq_q_fusion import DqQFusion
from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from qdqtool.trt.passes.eltwise_add_to_pwn import EltwiseAddToPwn
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.passes.horizontal_merge_q_nodes import HorizontalMergeQNodes
from qdqtool.trt.passes.mat_mul_to_conv_transform import MatMulToConvTransform
from qdqtool.trt.passes.merge_layers import MergeLayers
from qdqtool.trt.passes.myelin import MyelinOptimization
from qdqtool.trt.passes.myelin_regions import MyelinRegions
from qdqtool.trt.passes.pad_conv_fusion import PadConvFusion
from qdqtool.trt.passes.point_wise_fusion import PointWiseFusion
from qdqtool.trt.passes.q_conv_scale_fusion import QConvScaleFusion
from qdqtool.trt.passes.qdq_to_copy import QDQToCopy
from qdqtool.trt.passes.quantize_conv_with_residual_add import QuantizeConvWithResidualAdd
from qdqtool.trt.passes.quantize_double_input_nodes import QuantizeDoubleInputNodes
from qdqtool.trt.passes.quantize_single_input_nodes import QuantizeSingleInputNodes
from qdqtool.trt.passes.reduce_to_pooling_fusion import ReduceToPoolingFusion
from qdqtool.trt.passes.requantize_fusion import RequantizeFusion
from qdqtool.trt.passes.scale_activation_fusion import ScaleActivationFusion
from qdqtool.trt.passes.scale_scale_fusion import ScaleScaleFusion
from qdqtool.trt.passes.shuffle_erasure import ShuffleErasure
from qdqtool.trt.passes.shuffle_shuffle_fusion import ShuffleShuffleFusion
from qdqtool.trt.passes.slice_removal import SliceRemoval
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.passes.squeeze_push_down_join import SqueezePushDownJoin
from qdqtool.trt.passes.vanilla_swap_with_following_q import VanillaSwapWithFollowingQ
from qdqtool.trt.passes.vanilla_swap_with_preceeding_dq import VanillaSwapWithPreceedingDQ
from qdqtool.trt.targets import Target
from qdqtool.types import Event, Refusal


@dataclass(frozen=True)
class Loop:
    """Passes that run until none of them changes anything; behind a later one that did, the first begins again.

    The complete logs show it so: Qs move and merge until nothing is left to do, then Concats are split, then DQ and Q
    cancel.
    """

    passes: Sequence[type[Pass]]


class Order:
    """Not a pass: the layers are ranked anew, where passes have moved many."""


Stage = type[Pass] | Loop | type[Order]


GENERIC = (ConstShuffleFusion, ShuffleShuffleFusion, ShuffleErasure)
INITIALIZERS = (ConstCastFold, ConstQDQInitializersFusion, MyelinOptimization, ConstShuffleFusion)
MOTION = (VanillaSwapWithFollowingQ, HorizontalMergeQNodes, SplitQAcrossPrecedingFanIn, DqQFusion)
QUANTIZATION: tuple[Stage, ...] = (
    EltReluFusion,
    ScaleActivationFusion,
    ReduceToPoolingFusion,
    ConstWeightsQuantizeFusion,
    ConvReluFusion,
    DeconvReluFusion,
    MatMulToConvTransform,
    VanillaSwapWithPreceedingDQ,
    ConstCastFold,
    ConstShuffleFusion,
    ConstEltFusion,
    Loop(MOTION),
    Order,
    ShuffleShuffleFusion,
    ShuffleErasure,
    SqueezePushDownJoin,
    ShuffleShuffleFusion,
    ShuffleErasure,
    ConvReluFusion,
    DeconvReluFusion,
    ConstShuffleFusion,
    ConstEltFusion,
    PointWiseFusion,
    ConvScaleFusion,
    DeconvScaleFusion,
    QConvScaleFusion,
    ActivationToPointwiseConversion,
    GenericConvActFusion,
    QuantizeConvWithResidualAdd,
    QuantizeDoubleInputNodes,
    QuantizeSingleInputNodes,
    ConstWeightsFusion,
    PadConvFusion,
    ConvEltwiseSumFusion,
    ConvActPoolFusion,
)
EPILOGUE = (ConstantFoldDanglingQDQ, RequantizeFusion, MyelinRegions, QDQToCopy, ScaleScaleFusion, EltwiseAddToPwn)
MERGING = (MergeLayers, SliceRemoval, ConcatRemoval)
PIPELINE: tuple[Stage, ...] = (*GENERIC, *INITIALIZERS, *QUANTIZATION, *EPILOGUE, *MERGING)


COUNTED: dict[type[Pass], str] = {MyelinOptimization: "After Myelin optimization"}
"""The number of layers behind a pass, where TensorRT logs it."""


class PassError(QdqtoolError):
    """A pass failed: a defect of qdqtool, reported with the passes that had run."""


@dataclass
class Run:
    """What the pipeline did to a network."""

    trace: list[Event] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def run(network: Network, target: Target) -> Run:
    """Runs every pass over the network.

    A loop's passes report refusals of their last round only: an earlier one may have been overtaken.

    Raises:
        PassError: A pass failed.
    """
    result = Run()
    done: list[str] = []
    for stage in PIPELINE:
        if isinstance(stage, Loop):
            _loop(stage, network, target, result, done)
        elif issubclass(stage, Pass):
            result.refusals.extend(_one(stage(target), network, result, done))
            if stage in COUNTED:
                network.counts[COUNTED[stage]] = len(network.layers)
        else:
            network.order()
    return result


def _one(step: Pass, network: Network, result: Run, done: list[str]) -> list[Refusal]:
    try:
        outcome = step.run(network)
    except (QdqtoolError, MemoryError):
        raise
    except Exception as error:
        before = ", ".join(done[-8:]) or "none"
        raise PassError(f"pass {step.name} failed ({type(error).__name__}: {error}) after: {before}") from error
    done.append(step.name)
    result.trace.extend(outcome.events)
    return outcome.refusals


def _loop(loop: Loop, network: Network, target: Target, result: Run, done: list[str]) -> None:
    steps = [kind(target) for kind in loop.passes]
    network.focus = None
    while True:
        network.touched = {}
        refusals: list[Refusal] = []
        changed = False
        for step in steps:
            before = len(result.trace)
            refusals += _one(step, network, result, done)
            fired = len(result.trace) > before
            changed = changed or fired
            if fired and step is not steps[0]:
                break
        if changed:
            network.focus = network.touched
        elif network.focus is not None:
            network.focus = None  # nothing more to do near the last edits: one look at the whole
        else:
            result.refusals.extend(refusals)
            return
