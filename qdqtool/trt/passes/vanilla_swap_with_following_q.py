"""VanillaSwapWithFollowingQ."""

from collections import deque

from qdqtool.trt.passes._infra import (
    SWAPPING,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    node_name,
    seen,
)
from qdqtool.trt.refusals import ManyConsumers, NotCommuting, Reader
from qdqtool.trt.surroundings import find_consumers, to_step

SINGLE = seen(
    "single-reader",
    "A Q moves up past an operator of TensorRT's list that nothing else reads; the operator runs in "
    "INT8.",
    "yolo-resnet18-orin-trt8502:5229",
    "resnet18-qat-rtx2000-trt8510:2539",
    "yolov8-orin-trt8412-excerpts:173",
    "bevfusion-camera-orin-trt8502:259",
    "bevfusion-camera-rtx3080ti-trt8600:5195",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="which operators: qdqtool.model.operators. Once equal Qs were merged: MaxPool_12 of "
    "resnet18-qat-rtx2000-trt8510 is swapped only then, "
    "/backbone/maxpool/MaxPool of yolo-resnet18-orin-trt8502, which an Add reads as well, never",
)


_CONCATENATION = LayerKind.CONCATENATION
_NO_PASSAGE = (LayerKind.RESIZE, LayerKind.PADDING)  # they may have one, by what they do


class VanillaSwapWithFollowingQ(Pass):
    """Moves a Q backward, past an operator that it passes, so that the operator runs in INT8.

    Tensor names stay with the position: the tensor between both keeps its name and becomes INT8.
    """

    cases = (SINGLE,)
    anonymous_lines = (SWAPPING,)

    def apply(self, network: Network) -> None:
        todo = deque(network.layers_to_visit(LayerKind.QUANTIZE))
        refused: set[int] = set()
        readers: dict[
            Tensor, tuple[Reader, ...]
        ] = {}  # while nothing moves: of Qs side by side all are the same
        while todo:
            q = todo.popleft()
            source = q.data
            op = source.producer
            if op is None or q.has_computed_scale:
                continue
            if op.passage is None or op.kind is _CONCATENATION:
                if op.kind in _NO_PASSAGE:
                    q.blocked_by = NotCommuting(self.name, node_name(op), op.op, node_name(q))
                    self.refuse(q.blocked_by)
                continue
            if source.single_consumer() is not q:
                if not network.reports_refusals:
                    continue
                if source not in readers:
                    readers[source] = find_consumers(source)
                self._many(op, q, readers[source], refused)
                continue
            if q.quant is not None and q.quant.per_channel:
                continue
            q.add_cases(op.passage.case)
            self.fire_running(SINGLE, op)
            self.fire(SINGLE, q, SWAPPING, op.name, q.name)
            readers.clear()
            q.record_move(to_step(op))
            q.blocked_by = None
            network.swap(op, q)
            todo.append(q)

    def _many(self, op: Layer, q: Layer, readers: tuple[Reader, ...], refused: set[int]) -> None:
        refusal = ManyConsumers(self.name, node_name(op), op.op, node_name(q), readers)
        q.blocked_by = refusal
        if op.id not in refused:  # said once for all Qs behind it
            refused.add(op.id)
            self.refuse(refusal)
