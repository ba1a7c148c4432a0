"""SplitQAcrossPrecedingFanIn."""

from __future__ import annotations

from collections import deque

from qdqtool.evidence import Case, documented, seen
from qdqtool.operators import LayerKind
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, can_absorb, node_name, only_q
from qdqtool.trt.refusals import ConcatReadElsewhere
from qdqtool.trt.surroundings import readers_of, step_of

MAX_NAME = 4000  # characters; bounds what a hostile nest of concatenations can take

CONCAT = seen(
    "concat", "A Q that alone reads a Concat goes to each of its inputs as <Q>_clone_<i>; the Concat runs in INT8.",
    "yolo-resnet18-orin-trt8502:5227", "yolov8-orin-trt8412-excerpts:167", "bevfusion-camera-orin-trt8502:321",
    "bevfusion-camera-rtx3080ti-trt8600:5257",
)
NESTED = documented(
    "nested", "Concat behind Concat nests the suffix, _clone_1_clone_2.", "NVIDIA/TensorRT issue 2131 (8.4)",
)


class SplitQAcrossPrecedingFanIn(Pass):
    """Moves the Q behind a Concat to each of the Concat's inputs; logged with one line, no second.

    Any other reader of the Concat: refused.
    """

    cases = (CONCAT, NESTED)

    def apply(self, network: Network) -> None:
        todo = deque(network.near(LayerKind.CONCATENATION))
        while todo:
            concat = todo.popleft()
            q = only_q(concat.out)
            if q is None:
                self._refuse(concat)
                continue
            if not can_absorb(q):
                continue
            case = NESTED if q.clone else CONCAT
            self.running(case, concat)
            for position in range(len(concat.inputs)):
                self._clone(network, case, concat, q, position)
            out = q.out
            network.remove(q)
            network.set_output(concat, out)
            clones = [t.producer for t in concat.inputs if t.producer is not None]
            inner = dict.fromkeys(c.data.producer for c in clones)
            todo.extend(c for c in inner if c is not None and c.kind == LayerKind.CONCATENATION and only_q(c.out))

    def _refuse(self, concat: Layer) -> None:
        qs = [r for r in concat.out.consumers if r.kind == LayerKind.QUANTIZE]
        if not qs:
            return
        refusal = ConcatReadElsewhere(self.name, node_name(concat), readers_of(concat.out))
        self.refuse(refusal)
        for q in qs:
            q.blocked = refusal

    @staticmethod
    def _clone(network: Network, case: Case, concat: Layer, q: Layer, position: int) -> None:
        source = concat.inputs[position]
        clone = Layer(LayerKind.QUANTIZE, f"{q.name[:MAX_NAME]}_clone_{position}", q.op)
        clone.quant, clone.nodes, clone.clone = q.quant, list(q.nodes), True
        clone.rank = concat.rank.before(position)
        clone.passed = (*q.passed, step_of(concat, position))
        clone.cases = {**q.cases, case: None}
        out = Tensor(f"{concat.name}_{source.name}_clone_{position}", source.source, source.elem_type)
        out.shape = source.shape
        network.insert_before(concat, position, clone, out)
