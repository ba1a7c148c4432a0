from collections import deque
from dataclasses import replace

from qdqtool.reasons.conversions import ManyConsumers
from qdqtool.trt.neighbors import find_consumers, to_step
from qdqtool.trt.passes._infra import (
    SWAPPING,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    documented,
    dq_before,
    is_computed_in_float,
    next_rank,
    node_name,
    seen,
)

INSERTED = seen(
    "inserted-shuffle",
    "A DQ of data or weights moves down past the shuffles that TensorRT inserts around a Gemm.",
    "resnet18-qat-rtx2000-trt8510:2533",
    "resnet18-qat-rtx2000-trt8510:2535",
    about=("Gemm",),
)
LISTED = documented(
    "listed",
    "A DQ with one consumer moves down past an operator that a Q can pass.",
    "developer guide: DQ moves forward over commuting layers; not seen in a log",
)
PER_CHANNEL = assumed(
    "per-channel",
    "A DQ with a scale for each channel moves down past a Transpose; the axis of its scales "
    "changes with the permutation.",
    "TensorFlow's exports of weights; a convolution that is float after such a Transpose "
    "would refute it",
    about=("Transpose",),
)
COPIED = documented(
    "copied",
    "A DQ with several consumers is copied for each operator that it passes.",
    "an 11.1 build in which a DQ feeds a MaxPool and a network output runs the pooling in INT8",
)
REQUANTIZED = seen(
    "requantized",
    "A DQ that has moved past an operator is copied for each of several Qs after it.",
    "unet-resnet50-orinnano-trt10162",
    source="the pairs <DQ>_clone_0 + <Q> and <DQ>_clone_1 + <Q> after the MaxPool",
)
REQUANTIZED_ELSEWHERE = assumed(
    "requantized-elsewhere",
    "Also on TensorRT 10.0 to 10.13 and 11, a DQ that has moved past an operator is copied for "
    "each of several Qs after it.",
    "no build of these versions shows several Qs after such an operator",
)
SEVERAL = assumed(
    "several-readers",
    "A DQ with several consumers does not move, and is not copied for each of them.",
    "a log in which one DQ is swapped with several operators would refute it",
)


class VanillaSwapWithPreceedingDQ(Pass):
    """Moves a DQ down past operators that it can pass, so that these operators run in INT8.

    The name has TensorRT's spelling.
    """

    cases = (
        INSERTED,
        LISTED,
        PER_CHANNEL,
        COPIED,
        REQUANTIZED,
        REQUANTIZED_ELSEWHERE,
        SEVERAL,
    )
    anonymous_lines = (SWAPPING,)

    def _apply(self, network: Network) -> None:
        queue = deque(network.layers_of_kind(LayerKind.DEQUANTIZE))
        while queue:
            dq = queue.popleft()
            op = dq.out.single_consumer()
            if op is None:
                if self.target.copies_moved_dq and dq.path.ops and _feeds_only_quantizers(dq):
                    is_seen = self.target.has_seen_merges
                    copied = REQUANTIZED if is_seen else REQUANTIZED_ELSEWHERE
                    self._copy_dq(network, copied, dq, list(dq.out.consumers))
                elif self.target.copies_dq:
                    operators = list(filter(_can_pass, dq.out.consumers))
                    queue.extend(self._copy_dq(network, COPIED, dq, operators))
                else:
                    self._refuse_dq(dq)
            elif _can_pass(op) and dq_before(op.data) is dq and not is_computed_in_float(op, dq):
                case = _choose_case(dq, op)
                if case is not None:
                    self._swap_with_dq(network, case, dq, op)
                    queue.append(dq)

    def _swap_with_dq(self, network: Network, case: Case, dq: Layer, op: Layer) -> None:
        assert op.passage is not None
        if case is PER_CHANNEL and dq.quant is not None and dq.quant.axis is not None:
            dq.quant = replace(dq.quant, axis=_axis_after(dq.quant.axis, op))
        dq.add_cases(op.passage.case)
        self.fire_running(case, dq)
        self.fire(case, op, SWAPPING, dq.name, op.name)
        dq.add_cases(case)
        op.dq_moved_past = True
        dq.record_move(to_step(op))
        network.exchange(dq, op)
        op.out.shape = dq.out.shape
        dq.rank = next_rank(op.rank)

    @staticmethod
    def _copy_dq(network: Network, case: Case, dq: Layer, operators: list[Layer]) -> list[Layer]:
        """Insert a copy of a shared DQ before each of some consumers; return the copies.

        A DQ with a scale for each channel is not copied. Consumers that do not read the DQ as data
        receive no copy; in the case ``COPIED``, neither do consumers with several inputs.
        """
        copies: list[Layer] = []
        if dq.quant is not None and dq.quant.is_per_channel:
            return copies
        for number, op in enumerate(operators):
            if op.data is not dq.out or (case is COPIED and len(op.inputs) != 1):
                continue
            copy = Layer(LayerKind.DEQUANTIZE, f"{dq.name}_clone_{number}", dq.op)
            copy.quant, copy.has_computed_scale = dq.quant, dq.has_computed_scale
            copy.paired_q, copy.path = dq.paired_q, dq.path
            copy.nodes, copy.rank = list(dq.nodes), next_rank(dq.rank)
            out = Tensor(f"{dq.out.name}_clone_{number}", dq.out.source, dq.out.elem_type)
            out.shape = dq.out.shape
            network.add(copy, [dq.data], [out])
            network.set_input(op, 0, out)
            copy.add_cases(*dq.cases, case)
            if case is not COPIED:
                op.add_cases(case)
            copies.append(copy)
        if copies:
            network.remove_if_unused(dq)
        return copies

    def _refuse_dq(self, dq: Layer) -> None:
        """Record that a DQ does not move, although it could pass some of its consumers.

        The case ``SEVERAL`` is recorded with these consumers and the layers after them, because
        their outcome depends on the case.
        """
        operators = list(filter(_can_pass, dq.out.consumers))
        if not operators:
            return
        name, consumers = node_name(dq), find_consumers(dq.out, through=False)
        self.refuse(ManyConsumers(self.name, name, dq.op, name, consumers))
        dq.stationary_cases = (SEVERAL,)
        for op in operators:
            for layer in (op, *op.out.consumers):
                layer.add_cases(SEVERAL)


def _feeds_only_quantizers(dq: Layer) -> bool:
    consumers = dq.out.consumers
    return len(consumers) > 1 and all(c.kind == LayerKind.QUANTIZE for c in consumers)


def _can_pass(op: Layer) -> bool:
    return (
        op.passage is not None
        and op.kind != LayerKind.CONCATENATION
        and (op.kind != LayerKind.SHUFFLE or not op.shuffling.after_matmul)
    )


def _choose_case(dq: Layer, op: Layer) -> Case | None:
    """Return the case of a move; None if the axis of the scales after the move is unknown."""
    if op.kind == LayerKind.SHUFFLE and op.shuffling.before_matmul:
        return INSERTED
    if dq.quant is None or dq.quant.axis is None:
        return LISTED
    return PER_CHANNEL if _axis_after(dq.quant.axis, op) is not None else None


def _axis_after(axis: int, op: Layer) -> int | None:
    """Return the axis of the channels after an Identity, Cast or Transpose.

    None for other operators and for an unknown permutation.
    """
    if op.kind == LayerKind.IDENTITY:
        return axis
    perm = op.shuffling.perm if op.kind == LayerKind.SHUFFLE else None
    if not perm or axis % len(perm) not in perm:
        return None
    return perm.index(axis % len(perm))
