from collections import deque

from qdqtool.errors import ModelError
from qdqtool.reasons.conversions import ConcatReadAsFloat
from qdqtool.reasons.scales import ConcatScales
from qdqtool.reasons.tensors import Scale
from qdqtool.trt.neighbors import find_consumers, quantizer_scale, tensor_size, to_step
from qdqtool.trt.passes._infra import (
    MAX_NAME,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    can_absorb,
    documented,
    dq_before,
    find_case,
    node_name,
    q_after,
    rank_before,
)
from qdqtool.util import limits

CONCAT = find_case("Concat")
NESTED = documented(
    "nested",
    "If a Q moves up past two Concats in a row, its copies have nested suffixes, _clone_1_clone_2.",
    "NVIDIA/TensorRT issue 2131 (8.4)",
)


class SplitQAcrossPrecedingFanIn(Pass):
    """Moves the Q after a Concat to each of the Concat's inputs.

    TensorRT logs a single line for each such Q. The pass refuses if the Concat has other consumers.
    """

    cases = (CONCAT, NESTED)

    def _apply(self, network: Network) -> None:
        queue = deque(network.layers_to_visit(LayerKind.CONCATENATION))
        while queue:
            concat = queue.popleft()
            q = q_after(concat.out)
            if q is None and network.reports_reasons:
                self._refuse_concat(concat)
            if q is None or not can_absorb(q):
                continue
            self._split_q(network, concat, q)
            producers = dict.fromkeys(
                clone.data.producer_of_kind(LayerKind.CONCATENATION) for clone in concat.producers
            )
            queue.extend(c for c in producers if c is not None and q_after(c.out))

    def _split_q(self, network: Network, concat: Layer, q: Layer) -> None:
        network.q_copies += len(concat.inputs)
        # Large networks need many copies, so the limit grows with the number of layers.
        limit = max(limits.Q_COPIES, 4 * network.counts["Original"])
        if network.q_copies > limit:
            raise ModelError(
                f"Concat '{node_name(concat)}': TensorRT would copy the Q after this Concat to "
                f"more than {limit} tensors, the limit of the simulation. Remove Concats that "
                "concatenate a tensor with itself: each one doubles the number of copies",
                code="too-many-copies",
                node=node_name(concat),
            )
        case = NESTED if q.is_clone else CONCAT
        self.fire_running(case, concat)
        for position in range(len(concat.inputs)):
            clone = _create_clone(concat, q, position)
            clone.cases = {**q.cases, case: None}
            _insert_clone(network, concat, position, clone)
        network.remove(q)
        network.set_output(concat, q.out)

    def _refuse_concat(self, concat: Layer) -> None:
        quantizers = [q for q in concat.out.consumers if q.kind == LayerKind.QUANTIZE]
        if not quantizers:
            self._compare_scales(concat)
            return
        consumers = find_consumers(concat.out)
        reason = ConcatReadAsFloat(self.name, node_name(concat), consumers)
        self.refuse(reason)
        for q in quantizers:
            q.blocked_by = reason

    def _compare_scales(self, concat: Layer) -> None:
        quantizers = [t.producer_of_kind(LayerKind.QUANTIZE) for t in concat.inputs]
        clones = [q for q in quantizers if q is not None and q.is_clone]
        if not clones:
            return
        after = quantizer_scale(clones[0])
        scales = tuple(after if q is None else _scale_without_clone(q) for q in quantizers)
        if any(scale not in (None, after) for scale in scales):
            name, size = node_name(concat), tensor_size(concat.out)
            self.refuse(ConcatScales(self.name, name, scales, after, size))


def _create_clone(concat: Layer, q: Layer, position: int) -> Layer:
    clone = Layer(q.kind, f"{q.name[:MAX_NAME]}_clone_{position}", q.op)
    clone.quant, clone.nodes, clone.is_clone = q.quant, q.nodes, True
    clone.rank = rank_before(concat.rank, position)
    clone.path, clone.merged_quantizers = q.path, q.merged_quantizers
    clone.record_move(to_step(concat, position))
    return clone


def _insert_clone(network: Network, concat: Layer, position: int, clone: Layer) -> None:
    source = concat.inputs[position]
    name = f"{concat.name[:MAX_NAME]}_{source.name[:MAX_NAME]}_clone_{position}"
    out = Tensor(name, source.source, source.elem_type, source.shape)
    network.insert_before(concat, position, clone, out)


def _scale_without_clone(q: Layer) -> Scale:
    """Return the scale that an input of a Concat has in addition to the scale of the moved Q.

    This is the scale of the DQ that produces the input, or of another Q that reads the input. A Q
    of the model that was merged with the moved Q also counts. None if the input has no such scale.
    ``q`` is the moved Q, between the input and the Concat.
    """
    dq = dq_before(q.data)
    if dq is not None:
        return quantizer_scale(dq)
    for other in q.data.consumers:
        if other.kind == LayerKind.QUANTIZE and other is not q:
            return quantizer_scale(other)
    return quantizer_scale(q) if not q.is_clone or q.merged_quantizers else None
