from collections import deque

from qdqtool.ir.operators import QPassage
from qdqtool.reasons.conversions import ManyConsumers, OperatorNotCommuting
from qdqtool.reasons.tensors import TensorConsumer
from qdqtool.trt.neighbors import find_consumers, to_step
from qdqtool.trt.passes._infra import (
    SWAPPING,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    can_absorb,
    is_computed_in_float,
    node_name,
    seen,
)
from qdqtool.trt.targets import Target

SINGLE = seen(
    "single-reader",
    "A Q moves up past an operator that it can pass if no other layer reads the operator's "
    "output; the operator then runs in INT8.",
    "yolo-resnet18-orin-trt8502:5229",
    "resnet18-qat-rtx2000-trt8510:2539",
    "yolov8-orin-trt8412-excerpts:173",
    "bevfusion-camera-orin-trt8502:259",
    "bevfusion-camera-rtx3080ti-trt8600:5195",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="qdqtool.ir.operators lists the operators. MaxPool_12 of resnet18-qat-rtx2000-trt8510 "
    "is swapped only after equal Qs were merged; /backbone/maxpool/MaxPool of "
    "yolo-resnet18-orin-trt8502 is never swapped, because an Add reads it as well",
)


_CONCATENATION = LayerKind.CONCATENATION  # looking up enumeration members is slow
# Kinds of operators whose attributes decide whether a Q can move past them.
_KINDS_WITH_OPTIONAL_PASSAGE = (LayerKind.RESIZE, LayerKind.PADDING)


class VanillaSwapWithFollowingQ(Pass):
    """Moves a Q up past operators that it can pass, so that these operators run in INT8.

    Tensor names stay at their position in the network: the tensor between operator and Q keeps its
    name and becomes INT8.
    """

    cases = (SINGLE,)
    anonymous_lines = (SWAPPING,)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # Consumers by tensor. Several Qs after one operator need the same list; a move of a Q makes
        # all lists invalid.
        self._consumers: dict[Tensor, tuple[TensorConsumer, ...]] = {}
        # Ids of operators that were reported because a Q is not their only consumer.
        self._refused: set[int] = set()

    def _apply(self, network: Network) -> None:
        self._consumers, self._refused = {}, set()
        queue = deque(network.layers_to_visit(LayerKind.QUANTIZE))
        while queue:
            q = queue.popleft()
            op = q.data.producer
            if op is None or q.has_computed_scale:
                continue
            if op.passage is None or op.kind is _CONCATENATION or is_computed_in_float(op, q):
                self._refuse_operator(op, q)
            elif q.data.single_consumer() is not q:
                if network.reports_reasons:
                    self._refuse_consumers(op, q)
            elif can_absorb(q):
                self._swap_with_q(network, op, q, op.passage)
                queue.append(q)

    def _swap_with_q(self, network: Network, op: Layer, q: Layer, passage: QPassage) -> None:
        q.add_cases(passage.case)
        self.fire_running(SINGLE, op)
        self.fire(SINGLE, q, SWAPPING, op.name, q.name)
        self._consumers.clear()
        q.record_move(to_step(op))
        q.blocked_by = None
        network.swap(op, q)

    def _refuse_operator(self, op: Layer, q: Layer) -> None:
        if op.kind in _KINDS_WITH_OPTIONAL_PASSAGE or op.passage is not None:
            q.blocked_by = OperatorNotCommuting(self.name, node_name(op), op.op, node_name(q))
            self.refuse(q.blocked_by)

    def _refuse_consumers(self, op: Layer, q: Layer) -> None:
        source = q.data
        if source not in self._consumers:
            self._consumers[source] = find_consumers(source)
        consumers = self._consumers[source]
        q.blocked_by = ManyConsumers(self.name, node_name(op), op.op, node_name(q), consumers)
        if op.id not in self._refused:  # one reason for all Qs after an operator
            self._refused.add(op.id)
            self.refuse(q.blocked_by)
