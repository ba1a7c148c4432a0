from qdqtool.trt.neighbors import quantizer_scale
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    Layer,
    LayerKind,
    Network,
    Pass,
    documented,
    dq_before,
    node_name,
    quantized_type,
)

INTO = documented(
    "into-convolution",
    "An INT8 convolution fuses the DQ and Q after it, <Conv> + <DQ> + <Q>.",
    "NVIDIA/TensorRT issue 2527, engine names of an 8.5 build",
    about=("Conv",),
)
CONVERSION = documented(
    "conversion",
    "A DQ and Q that are not after an INT8 convolution become one conversion from INT8 to INT8, a "
    "Scale layer.",
    "NVIDIA/TensorRT issue 2527, one layer Int8 to Int8 in the listing of an 8.5 build",
)


class RequantizeFusion(Pass):
    """Fuses a remaining DQ and the Q after it into one requantization.

    Their scales differ or are unknown, except before a network output. TensorRT's name for this
    pass is unknown.
    """

    cases = (INTO, CONVERSION)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for q in network.layers_of_kind(LayerKind.QUANTIZE):
            dq = dq_before(q.data)
            if dq is None or (q.quant is not None and q.quant.is_per_channel):
                continue
            conv = dq.data.producer_of_kind(*CONVOLVE)
            is_chain = dq.data.single_consumer() and dq.out.single_consumer()
            is_same_type = quantized_type(dq) == quantized_type(q)
            if conv is not None and conv.int8_out and is_chain and is_same_type:
                _fuse_into_convolution(network, conv, dq, q)
            else:
                _fuse_into_conversion(network, dq, q)


def _fuse_into_convolution(network: Network, conv: Layer, dq: Layer, q: Layer) -> None:
    network.remove(q)
    network.remove(dq)
    network.set_output(conv, q.out)
    conv.name = f"{conv.name} + {dq.name} + {q.name}"
    conv.nodes += [*dq.nodes, *q.nodes]
    conv.add_cases(INTO, *q.cases)


def _fuse_into_conversion(network: Network, dq: Layer, q: Layer) -> None:
    q.owner = node_name(q)
    q.name = f"{dq.name} + {q.name}"
    q.nodes = [*dq.nodes, *q.nodes]
    network.set_input(q, 0, dq.data)
    q.requantizes = True
    q.paired_q, q.source_scale = dq.paired_q or node_name(dq), quantizer_scale(dq)
    for step in dq.path.latest_steps():
        q.path = q.path.with_step(step)
    q.add_cases(CONVERSION)
    network.remove_if_unused(dq)
    for consumer in q.out.consumers:
        consumer.add_cases(CONVERSION)
