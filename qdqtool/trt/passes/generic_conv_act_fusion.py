"""GenericConvActFusion."""

from __future__ import annotations

from qdqtool.evidence import Case, assumed, documented, seen
from qdqtool.operators import LayerKind
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, node_name
from qdqtool.trt.refusals import ActivationBeforeAdd
from qdqtool.trt.surroundings import elements
from qdqtool.trt.trace import FUSING

LEAKY = seen(
    "leaky-relu", "A convolution takes the LeakyRelu behind it, <Conv> + PWN(...), before Qs are absorbed.",
    "yolo-resnet18-orin-trt8502:5365",
)
CLIP = seen("clip", "A convolution, depthwise or not, takes the Clip behind it.", "mobilenetv2-titanrtx-qat-residual")
POINTWISE = documented(
    "pointwise", "A convolution takes another pointwise function of its result (SiLU, GELU ...).",
    "the fused name is seen with Q/DQ (NVIDIA/TensorRT issue 3385, 8.5.2), the INT8 output behind it is documented",
)
DEPTHWISE = assumed(
    "depthwise", "A depthwise or grouped convolution takes SiLU.",
    "NVIDIA prefers its own depthwise kernel and may leave the pair apart (NVIDIA/TensorRT issue 3205)",
)
DECONVOLUTION = assumed("deconvolution", "A deconvolution takes a pointwise function of its result.",
                        "as a convolution; a Deconvolution and a PWN layer behind it would refute it")
WITH_ADD = documented(
    "joined-with-add", "An activation that was joined with a residual Add is not taken: the convolution writes float.",
    "NVIDIA/TensorRT issue 2204 (8.4.1): INT8 to float",
)
_SEEN = {"LeakyRelu": LEAKY, "Clip": CLIP}


class GenericConvActFusion(Pass):
    """Joins a convolution and a pointwise layer that reads nothing else."""

    cases = (LEAKY, CLIP, POINTWISE, DEPTHWISE, DECONVOLUTION, WITH_ADD)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION):
            pointwise = layer.out.only_reader()
            if pointwise is None or pointwise.kind != LayerKind.POINTWISE or layer.fusion.activated:
                continue
            if len(pointwise.inputs) != 1:
                self._refuse(layer, pointwise)
                continue
            case = _case(layer, pointwise)
            self.running(case, layer)
            self.fire(case, layer, FUSING, layer.name, pointwise.name)
            network.absorb_reader(layer, pointwise, f"{layer.name} + {pointwise.name}")
            layer.fusion.activated = True
            layer.fusion.pointwise = True

    def _refuse(self, layer: Layer, pointwise: Layer) -> None:
        self.refuse(ActivationBeforeAdd(
            self.name, node_name(layer), pointwise.nodes[-1] if pointwise.nodes else pointwise.name,
            node_name(pointwise), elements=elements(layer.out),
        ))
        layer.rest_on(WITH_ADD)


def _case(layer: Layer, pointwise: Layer) -> Case:
    single = _SEEN.get(pointwise.op) if len(pointwise.nodes) == 1 else None
    if layer.kind == LayerKind.DECONVOLUTION:
        return DECONVOLUTION
    if single is not None:
        return single
    return DEPTHWISE if layer.weights.group > 1 else POINTWISE
