from qdqtool.ir.operators import ZERO_PAD
from qdqtool.reasons.fusions import QuantizerAfterPad
from qdqtool.trt.passes._infra import LayerKind, Network, Pass, documented, node_name

PLAIN = documented(
    "pad",
    "A convolution fuses the zero Pad before it, <Pad> + <weights> + <Q> + <Conv>.",
    "engine names in NVIDIA/TensorRT issue 2527; issue 2592: a Q/DQ pair between them keeps the "
    "Pad separate",
)


class PadConvFusion(Pass):
    """Fuses a Pad of zeros and the convolution after it, if no Q/DQ pair is between them.

    TensorRT's name for this pass is unknown.
    """

    cases = (PLAIN,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for pad, conv in network.single_consumer_pairs(LayerKind.PADDING):
            if conv.kind != LayerKind.CONVOLUTION or conv.data is not pad.out:
                continue
            if pad.passage is not ZERO_PAD:
                continue
            if conv.int8 and not pad.dq_moved_past:
                self.refuse(QuantizerAfterPad(self.name, node_name(conv), node_name(pad)))
                continue
            conv.add_cases(PLAIN, *pad.cases)
            conv.name = f"{pad.name} + {conv.name}"
            conv.nodes.extend(pad.nodes)
            conv.fusion.has_padding = True
            network.set_input(conv, 0, pad.data)
            network.remove(pad)
