"""VanillaSwapWithPreceedingDQ (TensorRT's own spelling)."""

from collections import deque

from qdqtool.base.records import replaced
from qdqtool.model.qdq import QuantParams
from qdqtool.trt.layers import Layer, Tensor, dq_of, next_rank, node_name
from qdqtool.trt.passes._infra import SWAPPING, LayerKind, Network, Pass, assumed, documented, seen
from qdqtool.trt.refusals import ManyConsumers
from qdqtool.trt.surroundings import readers_of, step_of

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
    unnamed = (SWAPPING,)

    def apply(self, network: Network) -> None:
        todo = deque(network.of_kind(LayerKind.DEQUANTIZE))
        while todo:
            dq = todo.popleft()
            op = dq.out.only_reader()
            if op is None:
                if self.target.copies_dq:
                    todo.extend(self._copies(network, dq))
                else:
                    self._fan_out(dq)
                continue
            if not _passes(op) or dq_of(op.data) is not dq:
                continue
            inserted = op.kind == LayerKind.SHUFFLE and op.shuffling.before_matmul
            case = INSERTED if inserted else LISTED
            if dq.quant is not None and dq.quant.axis is not None and not inserted:
                if not _carry_axis(dq, dq.quant, op):
                    continue
                case = PER_CHANNEL
            assert op.passage is not None
            dq.rest_on(op.passage.case)
            self.running(case, dq)
            self.fire(case, op, SWAPPING, dq.name, op.name)
            dq.rest_on(case)
            op.dq_passed = True
            dq.moved_past(step_of(op))
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
            copy.quant, copy.computed_scale, copy.pair, copy.passed = (
                dq.quant,
                dq.computed_scale,
                dq.pair,
                dq.passed,
            )
            copy.nodes, copy.rank = list(dq.nodes), next_rank(dq.rank)
            out = Tensor(f"{dq.out.name}_clone_{number}", dq.out.source, dq.out.elem_type)
            out.shape = dq.out.shape
            network.add(copy, [dq.data], [out])
            network.set_input(op, 0, out)
            copy.rest_on(COPIED)
            made.append(copy)
        if made:
            network.remove_unread(dq)
        return made

    def _fan_out(self, dq: Layer) -> None:
        """Says what a DQ with several readers keeps float; what reads their results rests on an assumption then."""
        held = list(filter(_passes, dq.out.consumers))
        if not held:
            return
        self.refuse(
            ManyConsumers(
                self.name, node_name(dq), dq.op, node_name(dq), readers_of(dq.out, through=False)
            )
        )
        dq.held = (SEVERAL,)
        for op in held:
            for reader in (op, *op.out.consumers):
                reader.rest_on(SEVERAL)


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
