"""QuantizeSingleInputNodes."""

from qdqtool.model.operators import AVERAGES
from qdqtool.trt.passes._infra import (
    LayerKind,
    Network,
    Pass,
    documented,
    dq_of,
    node_name,
    only_q,
    seen,
)
from qdqtool.trt.refusals import PoolingOneSide, ReduceNotPooling
from qdqtool.trt.surroundings import elements, origin_of, readers_of
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
    unnamed = (REMOVING,)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.REDUCE):
            if layer.op in AVERAGES:
                dq, readers, size = dq_of(layer.data), readers_of(layer.out), elements(layer.data)
                self.refuse(
                    ReduceNotPooling(self.name, node_name(layer), node_name(dq), readers, size)
                )
        for layer in network.of_kind(LayerKind.POOLING):
            dq, q = dq_of(layer.data), only_q(layer.out)
            if layer.pools != "AVERAGE" or not (dq or q):
                continue
            if dq is None or q is None:
                origin, readers, size = (
                    origin_of(layer.data),
                    readers_of(layer.out),
                    elements(layer.data),
                )
                self.refuse(
                    PoolingOneSide(
                        self.name, node_name(layer), dq is not None, origin, readers, size
                    )
                )
                continue
            case = WINDOW if layer.op == "AveragePool" else GLOBAL
            self.running(case, layer)
            self.fire(case, layer, REMOVING, q.name)
            network.absorb_q(layer, q)
            if network.drop_reader(dq, layer):
                self.fire(case, layer, REMOVING, dq.name)
            layer.int8 = True
