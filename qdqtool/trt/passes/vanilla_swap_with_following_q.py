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
from qdqtool.trt.surroundings import readers_of, step_of

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
    unnamed = (SWAPPING,)

    def apply(self, network: Network) -> None:
        todo = deque(network.near(LayerKind.QUANTIZE))
        refused: set[int] = set()
        readers: dict[
            Tensor, tuple[Reader, ...]
        ] = {}  # while nothing moves: of Qs side by side all are the same
        while todo:
            q = todo.popleft()
            source = q.data
            op = source.producer
            if op is None or q.computed_scale:
                continue
            if op.passage is None or op.kind is _CONCATENATION:
                if op.kind in _NO_PASSAGE:
                    q.blocked = NotCommuting(self.name, node_name(op), op.op, node_name(q))
                    self.refuse(q.blocked)
                continue
            if source.only_reader() is not q:
                if not network.refusing:
                    continue
                if source not in readers:
                    readers[source] = readers_of(source)
                self._many(op, q, readers[source], refused)
                continue
            if q.quant is not None and q.quant.per_channel:
                continue
            q.rest_on(op.passage.case)
            self.running(SINGLE, op)
            self.fire(SINGLE, q, SWAPPING, op.name, q.name)
            readers.clear()
            q.moved_past(step_of(op))
            q.blocked = None
            network.swap(op, q)
            todo.append(q)

    def _many(self, op: Layer, q: Layer, readers: tuple[Reader, ...], refused: set[int]) -> None:
        refusal = ManyConsumers(self.name, node_name(op), op.op, node_name(q), readers)
        q.blocked = refusal
        if op.id not in refused:  # said once for all Qs behind it
            refused.add(op.id)
            self.refuse(refusal)
