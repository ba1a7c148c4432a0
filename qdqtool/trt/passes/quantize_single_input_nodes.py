"""QuantizeSingleInputNodes."""

from qdqtool.model.operators import AVERAGES
from qdqtool.trt.passes._infra import (
    LayerKind,
    Network,
    Pass,
    documented,
    dq_before,
    node_name,
    q_after,
    seen,
)
from qdqtool.trt.refusals import PoolingOneSide, ReduceNotPooling
from qdqtool.trt.surroundings import find_consumers, find_origin, tensor_size
from qdqtool.trt.trace import REMOVING

GLOBAL = seen(
    "global-average",
    "A global average pooling between a DQ and a Q runs in INT8.",
    "resnet18-qat-rtx2000-trt8510:2775",
    "resnet18-a100-qat-residual-qgap",
    source="there is no fusing line",
    about=("GlobalAveragePool",),
)
WINDOW = documented(
    "average-window",
    "An average pooling with a window alike.",
    "developer guide: pooling is quantizable",
    about=("AveragePool",),
)


class QuantizeSingleInputNodes(Pass):
    """Lets an average pooling between a DQ and a Q, single readers, run in INT8.

    With one side only it refuses; the other stays in the engine as a conversion.
    """

    cases = (GLOBAL, WINDOW)
    anonymous_lines = (REMOVING,)

    def apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.REDUCE):
            if layer.op in AVERAGES:
                dq, readers, size = (
                    dq_before(layer.data),
                    find_consumers(layer.out),
                    tensor_size(layer.data),
                )
                self.refuse(
                    ReduceNotPooling(self.name, node_name(layer), node_name(dq), readers, size)
                )
        for layer in network.layers_of_kind(LayerKind.POOLING):
            dq, q = dq_before(layer.data), q_after(layer.out)
            if layer.pooling_type != "AVERAGE" or not (dq or q):
                continue
            if dq is None or q is None:
                origin, readers, size = (
                    find_origin(layer.data),
                    find_consumers(layer.out),
                    tensor_size(layer.data),
                )
                self.refuse(
                    PoolingOneSide(
                        self.name, node_name(layer), dq is not None, origin, readers, size
                    )
                )
                continue
            case = WINDOW if layer.op == "AveragePool" else GLOBAL
            self.fire_running(case, layer)
            self.fire(case, layer, REMOVING, q.name)
            network.absorb_q(layer, q)
            if network.bypass_dq(dq, layer):
                self.fire(case, layer, REMOVING, dq.name)
            layer.int8 = True
