"""Order of the passes as in TensorRT's log, and the runner that applies them to a network."""

import functools
from collections.abc import Iterable

from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Case
from qdqtool.ir import operators
from qdqtool.ir.operators import OPERATORS
from qdqtool.reasons.finding import Reason
from qdqtool.trt.network import Network
from qdqtool.trt.passes import (
    activation_to_pointwise_conversion,
    concat_removal,
    const_cast_fold,
    const_elt_fusion,
    const_qdq_initializers_fusion,
    const_shuffle_fusion,
    const_weights_fusion,
    const_weights_quantize_fusion,
    constant_fold_dangling_qdq,
    conv_act_pool_fusion,
    conv_eltwise_sum_fusion,
    conv_relu_fusion,
    conv_scale_fusion,
    dq_q_fusion,
    elt_relu_fusion,
    eltwise_add_to_pwn,
    generic_conv_act_fusion,
    horizontal_merge_q_nodes,
    mat_mul_to_conv_transform,
    merge_layers,
    myelin,
    myelin_regions,
    pad_conv_fusion,
    point_wise_fusion,
    q_conv_scale_fusion,
    qdq_to_copy,
    quantize_conv_with_residual_add,
    quantize_double_input_nodes,
    quantize_single_input_nodes,
    quantized_relu_fusion,
    reduce_to_pooling_fusion,
    requantize_fusion,
    scale_activation_fusion,
    scale_scale_fusion,
    shuffle_erasure,
    shuffle_shuffle_fusion,
    slice_removal,
    split_q_across_preceding_fan_in,
    squeeze_push_down_join,
    vanilla_swap_with_following_q,
    vanilla_swap_with_preceeding_dq,
)
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.targets import Target
from qdqtool.trt.trace import Event


class RankLayers:
    """Stage (not a pass) that ranks the layers again after passes have moved many layers."""


GENERIC = (
    const_shuffle_fusion.ConstShuffleFusion,
    shuffle_shuffle_fusion.ShuffleShuffleFusion,
    shuffle_erasure.ShuffleErasure,
)
INITIALIZERS = (
    const_cast_fold.ConstCastFold,
    const_qdq_initializers_fusion.ConstQDQInitializersFusion,
    myelin.MyelinOptimization,
    const_shuffle_fusion.ConstShuffleFusion,
)
MOTION = (
    vanilla_swap_with_following_q.VanillaSwapWithFollowingQ,
    horizontal_merge_q_nodes.HorizontalMergeQNodes,
    split_q_across_preceding_fan_in.SplitQAcrossPrecedingFanIn,
    dq_q_fusion.DqQFusion,
)
QUANTIZATION = (
    elt_relu_fusion.EltReluFusion,
    scale_activation_fusion.ScaleActivationFusion,
    reduce_to_pooling_fusion.ReduceToPoolingFusion,
    const_weights_quantize_fusion.ConstWeightsQuantizeFusion,
    conv_relu_fusion.ConvReluFusion,
    conv_relu_fusion.DeconvReluFusion,
    mat_mul_to_conv_transform.MatMulToConvTransform,
    vanilla_swap_with_preceeding_dq.VanillaSwapWithPreceedingDQ,
    const_cast_fold.ConstCastFold,
    const_shuffle_fusion.ConstShuffleFusion,
    const_elt_fusion.ConstEltFusion,
    MOTION,
    RankLayers,
    shuffle_shuffle_fusion.ShuffleShuffleFusion,
    shuffle_erasure.ShuffleErasure,
    squeeze_push_down_join.SqueezePushDownJoin,
    shuffle_shuffle_fusion.ShuffleShuffleFusion,
    shuffle_erasure.ShuffleErasure,
    conv_relu_fusion.ConvReluFusion,
    conv_relu_fusion.DeconvReluFusion,
    const_shuffle_fusion.ConstShuffleFusion,
    const_elt_fusion.ConstEltFusion,
    point_wise_fusion.PointWiseFusion,
    conv_scale_fusion.ConvScaleFusion,
    conv_scale_fusion.DeconvScaleFusion,
    q_conv_scale_fusion.QConvScaleFusion,
    activation_to_pointwise_conversion.ActivationToPointwiseConversion,
    generic_conv_act_fusion.GenericConvActFusion,
    quantize_conv_with_residual_add.QuantizeConvWithResidualAdd,
    quantize_double_input_nodes.QuantizeDoubleInputNodes,
    quantize_single_input_nodes.QuantizeSingleInputNodes,
    const_weights_fusion.ConstWeightsFusion,
    pad_conv_fusion.PadConvFusion,
    quantized_relu_fusion.QuantizedReluFusion,
    conv_eltwise_sum_fusion.ConvEltwiseSumFusion,
    conv_act_pool_fusion.ConvActPoolFusion,
)
EPILOGUE = (
    constant_fold_dangling_qdq.ConstantFoldDanglingQDQ,
    requantize_fusion.RequantizeFusion,
    myelin_regions.MyelinRegions,
    qdq_to_copy.QDQToCopy,
    scale_scale_fusion.ScaleScaleFusion,
    eltwise_add_to_pwn.EltwiseAddToPwn,
)
MERGING = (merge_layers.MergeLayers, slice_removal.SliceRemoval, concat_removal.ConcatRemoval)
PIPELINE: tuple[type[Pass] | type[RankLayers] | tuple[type[Pass], ...], ...] = (
    *GENERIC,
    *INITIALIZERS,
    *QUANTIZATION,
    *EPILOGUE,
    *MERGING,
)
"""Stages in the order in which they run.

A tuple of passes is a loop. If a pass other than the first changes the network, the loop restarts
at the first pass. The loop ends when no pass changes anything. The complete logs show this order:
Qs move and merge until no move is possible, then Qs are split across Concats, then DQs and Qs
cancel out.
"""


class PassError(QdqtoolError):
    """A pass failed, which is a defect of qdqtool. The message names the passes that ran last."""


class PipelineRun:
    """A run of passes over a network.

    Attributes:
        trace: Lines that TensorRT logs for the run.
        reasons: Reasons why passes left layers unchanged.
    """

    def __init__(self, network: Network) -> None:
        self.trace: list[Event] = []
        self.reasons: list[Reason] = []
        self._network = network
        self._completed: list[str] = []

    def run_pass(self, step: Pass) -> list[Reason]:
        """Run one pass and return its reasons.

        Raises:
            PassError: The pass failed.
        """
        try:
            step.run(self._network)
        except (QdqtoolError, MemoryError):
            raise
        except Exception as error:
            before = ", ".join(self._completed[-8:]) or "none"
            raise PassError(
                f"pass {step.name} failed ({type(error).__name__}: {error}). Please report this "
                f"message. Passes before it: {before}",
                code="internal",
            ) from error
        self._completed.append(step.name)
        self.trace += step.events
        return step.reasons

    def run_loop(self, steps: list[Pass]) -> list[Reason]:
        """Run passes in rounds until no pass changes anything; return the last round's reasons.

        A round ends at the first change by a pass other than the first pass. The first round visits
        all tensors. The next rounds visit only edited tensors, to save time. When a round changes
        nothing, a last round visits all tensors again and reports reasons, because reasons of
        earlier rounds may no longer hold.
        """
        network = self._network
        network.focus, network.reports_reasons = None, False
        while True:
            network.edited_tensors = {}
            start = len(self.trace)
            reasons: list[Reason] = []
            for step in steps:
                before = len(self.trace)
                reasons += self.run_pass(step)
                if len(self.trace) > before and step is not steps[0]:
                    break
            if len(self.trace) > start:
                network.focus, network.reports_reasons = network.edited_tensors, False
            elif network.reports_reasons:
                return reasons
            else:
                network.focus, network.reports_reasons = None, True


def run(network: Network, target: Target, last: type[Pass] | None = None) -> PipelineRun:
    """Run the pipeline over a network.

    All passes run, or the passes up to ``last``.

    Raises:
        PassError: A pass failed.
        ModelError: The network exceeds a limit of the simulation.
    """
    pipeline_run = PipelineRun(network)
    for stage in PIPELINE:
        if isinstance(stage, tuple):
            passes_of_loop = [pass_type(target) for pass_type in stage]
            pipeline_run.reasons += pipeline_run.run_loop(passes_of_loop)
        elif issubclass(stage, Pass):
            pipeline_run.reasons += pipeline_run.run_pass(stage(target))
        else:
            network.rank_layers()
        if stage is last:
            break
    return pipeline_run


def passes() -> tuple[type[Pass], ...]:
    """Return the passes, each once, in the order of the pipeline."""
    pass_types: dict[type[Pass], None] = {}
    for stage in PIPELINE:
        members = stage if isinstance(stage, tuple) else (stage,)
        pass_types.update(dict.fromkeys(member for member in members if issubclass(member, Pass)))
    return tuple(pass_types)


@functools.cache
def cases() -> dict[str, Case]:
    """Return all cases (known behaviors) of passes and operators by id.

    An id is ``<pass>/<case>``, or ``<operator>/<case>`` for a case of an operator. If a pass and an
    operator share a case, the id contains the pass.
    """
    return {case_id: case for case, case_id in _case_ids().items()}


@functools.cache
def _case_ids() -> dict[Case, str]:
    owners: list[tuple[str, Iterable[Case]]] = [
        *((pass_type.__name__, pass_type.cases) for pass_type in passes()),
        *((operator.name, operator.cases) for operator in OPERATORS.values()),
        ("Shuffle", (operators.INSERTED_SHUFFLE.case,)),
    ]
    ids: dict[Case, str] = {}
    for owner, owned in owners:
        for case in owned:
            ids.setdefault(case, f"{owner}/{case.name}")
    return ids


def case_id(case: Case) -> str:
    """Return the id of a case.

    Raises:
        KeyError: No pass and no operator has the case.
    """
    return _case_ids()[case]
