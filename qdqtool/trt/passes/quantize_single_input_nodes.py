from qdqtool.ir.operators import AVERAGES
from qdqtool.reasons.outputs import PoolingQuantizedOnOneSide, ReduceNotPooling
from qdqtool.trt.neighbors import find_consumers, find_origin, tensor_size
from qdqtool.trt.passes._infra import (
    REMOVING,
    Layer,
    LayerKind,
    Network,
    Pass,
    Precision,
    assumed,
    documented,
    dq_before,
    node_name,
    q_after,
    quantized_type,
    seen,
)

GLOBAL = seen(
    "global-average",
    "A global average pooling between a DQ and a Q runs in INT8.",
    "resnet18-qat-rtx2000-trt8510:2775",
    "resnet18-a100-qat-residual-qgap",
    source="the log has no line for the fusion",
    about=("GlobalAveragePool",),
)
WINDOW = documented(
    "average-window",
    "An average pooling with a window runs in INT8 between a DQ and a Q.",
    "developer guide: pooling is quantizable",
    about=("AveragePool",),
)
FP8 = assumed(
    "fp8",
    "An average pooling between a DQ and a Q of FP8 runs in float, and both quantizers remain.",
    "TensorRT-RTX 1.7.1 computes poolings of FP8 in float; an FP8 pooling in an engine would "
    "refute it",
    about=("AveragePool", "GlobalAveragePool"),
)


class QuantizeSingleInputNodes(Pass):
    """Makes an average pooling between a DQ and a Q run in INT8.

    The Q must be the single consumer of the pooling. If only the DQ or only the Q is present, the
    pass refuses, and the quantizer that is present remains as a conversion. Poolings of FP8 remain
    float.
    """

    cases = (GLOBAL, WINDOW, FP8)
    anonymous_lines = (REMOVING,)

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.REDUCE):
            if layer.op in AVERAGES:
                dq_name = node_name(dq_before(layer.data))
                consumers, size = find_consumers(layer.out), tensor_size(layer.data)
                name = node_name(layer)
                self.refuse(ReduceNotPooling(self.name, name, dq_name, consumers, size))
        for layer in network.layers_of_kind(LayerKind.POOLING):
            if layer.pooling_type == "AVERAGE":
                self._quantize_pooling(network, layer)

    def _quantize_pooling(self, network: Network, layer: Layer) -> None:
        dq, q = dq_before(layer.data), q_after(layer.out)
        if dq is None and q is None:
            return
        if Precision.FP8 in (quantized_type(dq), quantized_type(q)):
            layer.add_cases(FP8)
            return
        if dq is None or q is None:
            origin, consumers = find_origin(layer.data), find_consumers(layer.out)
            name, size = node_name(layer), tensor_size(layer.data)
            self.refuse(
                PoolingQuantizedOnOneSide(self.name, name, dq is not None, origin, consumers, size)
            )
            return
        case = WINDOW if layer.op == "AveragePool" else GLOBAL
        self.fire_running(case, layer)
        self.fire(case, layer, REMOVING, q.name)
        network.absorb_q(layer, q)
        if network.bypass_dq(dq, layer):
            self.fire(case, layer, REMOVING, dq.name)
        layer.int8 = True
