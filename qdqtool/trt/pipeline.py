"""The passes in the order of TensorRT's log, run to a fixpoint, for one target."""

import functools

from qdqtool.errors import QdqtoolError
from qdqtool.knowledge.tables import Case
from qdqtool.model import operators
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


class Order:
    """Not a pass: the layers are ranked anew, where passes have moved many."""


GENERIC = (ConstShuffleFusion, ShuffleShuffleFusion, ShuffleErasure)
INITIALIZERS = (ConstCastFold, ConstQDQInitializersFusion, MyelinOptimization, ConstShuffleFusion)
MOTION = (VanillaSwapWithFollowingQ, HorizontalMergeQNodes, SplitQAcrossPrecedingFanIn, DqQFusion)
QUANTIZATION = (
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
    MOTION,
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
EPILOGUE = (
    ConstantFoldDanglingQDQ,
    RequantizeFusion,
    MyelinRegions,
    QDQToCopy,
    ScaleScaleFusion,
    EltwiseAddToPwn,
)
MERGING = (MergeLayers, SliceRemoval, ConcatRemoval)
PIPELINE: tuple[type[Pass] | type[Order] | tuple[type[Pass], ...], ...] = (
    *GENERIC,
    *INITIALIZERS,
    *QUANTIZATION,
    *EPILOGUE,
    *MERGING,
)
"""What runs, in order. Passes in a tuple run until none of them changes anything; behind a later one that did, the
first begins again: the complete logs show that Qs move and merge until nothing is left to do, then Concats are split,
then DQ and Q cancel.
"""


class PassError(QdqtoolError):
    """A pass failed: a defect of qdqtool, reported with the passes that had run."""


class Run:
    """What the pipeline did to a network: the lines that TensorRT logs for it, and where passes did not fire."""

    def __init__(self, network: Network) -> None:
        self.trace: list[Event] = []
        self.refusals: list[Refusal] = []
        self._network = network
        self._done: list[str] = []

    def run_pass(self, step: Pass) -> list[Refusal]:
        """Runs one pass."""
        try:
            step.run(self._network)
        except (QdqtoolError, MemoryError):
            raise
        except Exception as error:
            before = ", ".join(self._done[-8:]) or "none"
            raise PassError(
                f"pass {step.name} failed ({type(error).__name__}: {error}) after: {before}",
                code="internal",
            ) from error
        self._done.append(step.name)
        self.trace += step.events
        return step.refusals

    def run_loop(self, steps: list[Pass]) -> list[Refusal]:
        """Runs passes to a fixpoint; refusals of the last round only: an earlier one may have been overtaken."""
        network = self._network
        network.focus, network.reports_refusals = None, False
        while True:
            network.edited_tensors = {}
            refusals: list[Refusal] = []
            start = len(self.trace)
            for step in steps:
                before = len(self.trace)
                refusals += self.run_pass(step)
                if len(self.trace) > before and step is not steps[0]:
                    break
            if len(self.trace) > start:
                network.focus, network.reports_refusals = network.edited_tensors, False
            elif network.reports_refusals:
                return refusals
            else:
                network.focus, network.reports_refusals = (
                    None,
                    True,
                )  # nothing more to do near the last edits: a look at all


def run(network: Network, target: Target, last: type[Pass] | None = None) -> Run:
    """Runs every pass over the network, or those up to ``last``.

    Raises:
        PassError: A pass failed.
    """
    result = Run(network)
    for stage in PIPELINE:
        if isinstance(stage, tuple):
            result.refusals += result.run_loop([kind(target) for kind in stage])
        elif issubclass(stage, Pass):
            result.refusals += result.run_pass(stage(target))
        else:
            network.rank_layers()
        if stage is last:
            break
    return result


# Every case that the simulator can rest on, by its id: <pass>/<case>, and <operator>/<case> for operators -------------


def passes() -> tuple[type[Pass], ...]:
    """The passes, each once, in the order of the pipeline."""
    found: dict[type[Pass], None] = {}
    for stage in PIPELINE:
        members = stage if isinstance(stage, tuple) else (stage,)
        found.update(dict.fromkeys(kind for kind in members if issubclass(kind, Pass)))
    return tuple(found)


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by id; a fact of an operator may be a pass's case as well, and goes by the pass's name."""
    return {name: case for case, name in _ids().items()}


@functools.cache
def _ids() -> dict[Case, str]:
    found: dict[Case, str] = {}
    for owner, its in (
        *((kind.__name__, kind.cases) for kind in passes()),
        *((known.name, operators.cases_of(known)) for known in operators.OPERATORS.values()),
        ("Shuffle", (operators.INSERTED_SHUFFLE.case,)),
    ):
        for case in its:
            found.setdefault(case, f"{owner}/{case.name}")
    return found


def case_id(case: Case) -> str:
    """The id of a case.

    Raises:
        KeyError: No pass and no operator has it.
    """
    return _ids()[case]
