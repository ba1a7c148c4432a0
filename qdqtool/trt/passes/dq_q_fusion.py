from qdqtool.trt.neighbors import check_equal_scales
from qdqtool.trt.passes._infra import (
    Layer,
    LayerKind,
    Network,
    Pass,
    assumed,
    node_name,
    q_after,
    seen,
)

EQUAL = seen(
    "equal-scales",
    "A DQ and the Q after it are removed if their scales are equal; the name of the Q's output "
    "remains.",
    "bevfusion-camera-orin-trt8502:324",
    "bevfusion-camera-rtx3080ti-trt8600:5260",
    source="the log has one line for the pair; Conv_329 then writes Concat_779_1400_clone_0, the "
    "output of the removed clone",
)
SEVERAL = assumed(
    "several-readers",
    "A DQ with other consumers remains for them.",
    "in both logs the Q is the DQ's only consumer; a conversion from INT8 to INT8 in such a place "
    "would refute it",
)


class DqQFusion(Pass):
    """Removes a Q that requantizes to the scale of the DQ before it.

    A Q that writes a network output remains (assumed). With unequal scales, a requantization
    remains (see RequantizeFusion).
    """

    cases = (EQUAL, SEVERAL)

    def _apply(self, network: Network) -> None:
        for dq in network.layers_to_visit(LayerKind.DEQUANTIZE):
            for q in list(dq.out.consumers):
                if q.kind != LayerKind.QUANTIZE or q.data is not dq.out or q.out.is_output:
                    continue
                if dq.quant is not None and q.quant is not None:
                    self._remove_pair(network, dq, q)

    def _remove_pair(self, network: Network, dq: Layer, q: Layer) -> None:
        different = check_equal_scales(self.name, node_name(q), q.data, (dq, q))
        if different is not None:
            self.refuse(different)
            return
        case = EQUAL if q_after(dq.out) is q else SEVERAL
        self.fire_running(case, dq)
        source, out = dq.data, q.out
        for consumer in out.consumers:
            consumer.add_cases(case, *q.cases, *dq.cases)
        producer = source.producer
        network.remove(q)
        if producer is None or source.is_output:
            network.redirect_consumers(out, source)
        else:
            network.redirect_consumers(source, out)
            network.set_output(producer, out, producer.outputs.index(source))
            if out.shape is None:
                out.shape = source.shape
        if dq.id in network.layers:
            network.remove_if_unused(dq)
