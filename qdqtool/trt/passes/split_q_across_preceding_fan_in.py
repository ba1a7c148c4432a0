"""SplitQAcrossPrecedingFanIn."""

from collections import deque

from qdqtool.base import budgets
from qdqtool.errors import ModelError
from qdqtool.model.operators import case_of
from qdqtool.trt.layers import Layer, Tensor, can_absorb, dq_before, node_name, q_after, rank_before
from qdqtool.trt.passes._infra import MAX_NAME, Case, LayerKind, Network, Pass, documented
from qdqtool.trt.refusals import ConcatReadElsewhere, ConcatScales, Scale
from qdqtool.trt.surroundings import find_consumers, quantizer_scale, tensor_size, to_step

CONCAT = case_of("Concat")
NESTED = documented(
    "nested",
    "Concat behind Concat nests the suffix, _clone_1_clone_2.",
    "NVIDIA/TensorRT issue 2131 (8.4)",
)


class SplitQAcrossPrecedingFanIn(Pass):
    """Moves the Q behind a Concat to each of the Concat's inputs; logged with one line, no second.

    Any other reader of the Concat: refused.
    """

    cases = (CONCAT, NESTED)

    def apply(self, network: Network) -> None:
        todo = deque(network.layers_to_visit(LayerKind.CONCATENATION))
        while todo:
            concat = todo.popleft()
            q = q_after(concat.out)
            if q is None and network.reports_refusals:
                self._refuse(concat)
            if q is None or not can_absorb(q):
                continue
            network.q_copies += len(concat.inputs)
            limit = max(
                budgets.Q_COPIES, 4 * network.counts["Original"]
            )  # an ordinary large network makes many
            if network.q_copies > limit:
                raise ModelError(
                    f"Concat '{node_name(concat)}': the Q behind it would be copied to more than "
                    f"{limit} tensors, the limit; a Concat of one tensor twice doubles them",
                    code="too-many-copies",
                    node=node_name(concat),
                )
            case = NESTED if q.is_clone else CONCAT
            self.fire_running(case, concat)
            for position in range(len(concat.inputs)):
                self._clone(network, case, concat, q, position)
            network.remove(q)
            network.set_output(concat, q.out)
            inner = dict.fromkeys(
                clone.data.producer_of_kind(LayerKind.CONCATENATION) for clone in concat.producers
            )
            todo.extend(c for c in inner if c is not None and q_after(c.out))

    def _refuse(self, concat: Layer) -> None:
        qs = [r for r in concat.out.consumers if r.kind == LayerKind.QUANTIZE]
        if not qs:
            self._compare(concat)
            return
        refusal = ConcatReadElsewhere(self.name, node_name(concat), find_consumers(concat.out))
        self.refuse(refusal)
        for q in qs:
            q.blocked_by = refusal

    def _compare(self, concat: Layer) -> None:
        """Says which scales the parts of a Concat that a Q went through had, where one differs."""
        moved = [t.producer_of_kind(LayerKind.QUANTIZE) for t in concat.inputs]
        first = next((q for q in moved if q is not None and q.is_clone), None)
        if first is None:
            return
        behind = quantizer_scale(first)
        parts = tuple(behind if q is None else _part_scale(q) for q in moved)
        if any(p is not None and p != behind for p in parts):
            self.refuse(
                ConcatScales(self.name, node_name(concat), parts, behind, tensor_size(concat.out))
            )

    @staticmethod
    def _clone(network: Network, case: Case, concat: Layer, q: Layer, position: int) -> None:
        source = concat.inputs[position]
        clone = Layer(q.kind, f"{q.name[:MAX_NAME]}_clone_{position}", q.op)
        clone.quant, clone.nodes, clone.is_clone = q.quant, q.nodes, True
        clone.rank = rank_before(concat.rank, position)
        clone.path, clone.merged_quantizers = q.path, q.merged_quantizers
        clone.record_move(to_step(concat, position))
        clone.cases = {**q.cases, case: None}
        name = f"{concat.name[:MAX_NAME]}_{source.name[:MAX_NAME]}_clone_{position}"
        out = Tensor(name, source.source, source.elem_type)
        out.shape = source.shape
        network.insert_before(concat, position, clone, out)


def _part_scale(q: Layer) -> Scale:
    """The scale that the tensor under a Concat's Q has besides: of its DQ, or of another Q on it."""
    dq = dq_before(q.data)
    if dq is not None:
        return quantizer_scale(dq)
    other = next((r for r in q.data.consumers if r.kind == LayerKind.QUANTIZE and r is not q), None)
    if other is not None:
        return quantizer_scale(other)
    return quantizer_scale(q) if not q.is_clone or q.merged_quantizers else None
