"""VanillaSwapWithPreceedingDQ (TensorRT's own spelling)."""

from collections import deque

from qdqtool.base.records import replaced
from qdqtool.model.qdq import QuantParams
from qdqtool.trt.layers import Layer, Tensor, dq_before, next_rank, node_name
from qdqtool.trt.passes._infra import SWAPPING, LayerKind, Network, Pass, assumed, documented, seen
from qdqtool.trt.refusals import ManyConsumers
from qdqtool.trt.surroundings import find_consumers, to_step

INSERTED = seen(
    "inserted-shuffle",
    "A DQ moves down past the shuffles inserted around a Gemm, on weights and data.",
    "resnet18-qat-rtx2000-trt8510:2533",
    "resnet18-qat-rtx2000-trt8510:2535",
    about=("Gemm",),
)
LISTED = documented(
    "listed",
    "A DQ with one reader moves down past an operator that a Q passes.",
    "developer guide: DQ moves forward over commuting layers; not seen in a log",
)
PER_CHANNEL = assumed(
    "per-channel",
    "A DQ with a scale for each channel moves past a Transpose, which says where the channels went.",
    "TensorFlow's exports of weights; a convolution that stays float behind such a Transpose would refute it",
    about=("Transpose",),
)
COPIED = documented(
    "copied",
    "A DQ with several readers is copied for each operator that it passes.",
    "an 11.1 build in which a DQ feeds a MaxPool and a network output runs the pooling in INT8",
)
SEVERAL = assumed(
    "several-readers",
    "A DQ with several readers stays and is not copied for each.",
    "a log in which one DQ is swapped with several operators would refute it",
)


class VanillaSwapWithPreceedingDQ(Pass):
    """Moves a DQ forward, past an operator that it passes, so that the operator runs in INT8."""

    cases = (INSERTED, LISTED, PER_CHANNEL, COPIED, SEVERAL)
    anonymous_lines = (SWAPPING,)

    def apply(self, network: Network) -> None:
        todo = deque(network.layers_of_kind(LayerKind.DEQUANTIZE))
        while todo:
            dq = todo.popleft()
            op = dq.out.single_consumer()
            if op is None:
                if self.target.copies_dq:
                    todo.extend(self._copies(network, dq))
                else:
                    self._fan_out(dq)
                continue
            if not _passes(op) or dq_before(op.data) is not dq:
                continue
            inserted = op.kind == LayerKind.SHUFFLE and op.shuffling.before_matmul
            case = INSERTED if inserted else LISTED
            if dq.quant is not None and dq.quant.axis is not None and not inserted:
                if not _carry_axis(dq, dq.quant, op):
                    continue
                case = PER_CHANNEL
            assert op.passage is not None
            dq.add_cases(op.passage.case)
            self.fire_running(case, dq)
            self.fire(case, op, SWAPPING, dq.name, op.name)
            dq.add_cases(case)
            op.dq_moved_past = True
            dq.record_move(to_step(op))
            network.exchange(dq, op)
            op.out.shape = dq.out.shape
            dq.rank = next_rank(op.rank)
            todo.append(dq)

    @staticmethod
    def _copies(network: Network, dq: Layer) -> list[Layer]:
        """A DQ of its own for each operator that reads a shared one and that it can pass."""
        made: list[Layer] = []
        per_channel = dq.quant is not None and dq.quant.per_channel
        for number, op in enumerate(list(filter(_passes, dq.out.consumers))):
            if per_channel or len(op.inputs) != 1:
                continue
            copy = Layer(LayerKind.DEQUANTIZE, f"{dq.name}_clone_{number}", dq.op)
            copy.quant, copy.has_computed_scale, copy.paired_q, copy.path = (
                dq.quant,
                dq.has_computed_scale,
                dq.paired_q,
                dq.path,
            )
            copy.nodes, copy.rank = list(dq.nodes), next_rank(dq.rank)
            out = Tensor(f"{dq.out.name}_clone_{number}", dq.out.source, dq.out.elem_type)
            out.shape = dq.out.shape
            network.add(copy, [dq.data], [out])
            network.set_input(op, 0, out)
            copy.add_cases(COPIED)
            made.append(copy)
        if made:
            network.remove_if_unused(dq)
        return made

    def _fan_out(self, dq: Layer) -> None:
        """Says what a DQ with several readers keeps float; what reads their results rests on an assumption then."""
        held = list(filter(_passes, dq.out.consumers))
        if not held:
            return
        self.refuse(
            ManyConsumers(
                self.name,
                node_name(dq),
                dq.op,
                node_name(dq),
                find_consumers(dq.out, through=False),
            )
        )
        dq.stationary_cases = (SEVERAL,)
        for op in held:
            for reader in (op, *op.out.consumers):
                reader.add_cases(SEVERAL)


def _passes(op: Layer) -> bool:
    behind_product = op.kind == LayerKind.SHUFFLE and op.shuffling.after_matmul
    return op.passage is not None and op.kind != LayerKind.CONCATENATION and not behind_product


def _carry_axis(dq: Layer, quant: QuantParams, op: Layer) -> bool:
    """Gives the DQ the axis that its channels have behind a Transpose; False where that is not known."""
    if op.kind == LayerKind.IDENTITY:
        return True
    perm = op.shuffling.perm if op.kind == LayerKind.SHUFFLE else None
    if not perm or quant.axis is None:
        return False
    axis = quant.axis % len(perm)
    if axis not in perm:
        return False
    dq.quant = replaced(quant, axis=list(perm).index(axis))
    return True
