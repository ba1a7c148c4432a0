"""GenericConvActFusion."""

from qdqtool.model.operators import CONVOLVE, OPERATORS
from qdqtool.trt.layers import SILU, Layer, node_name
from qdqtool.trt.passes._infra import Case, LayerKind, Network, Pass, assumed, documented, seen
from qdqtool.trt.refusals import ActivationBeforeAdd, ActivationJoined, Step
from qdqtool.trt.surroundings import find_origin, tensor_size
from qdqtool.types import Evidence

POINTWISE = seen(
    "pointwise",
    "A convolution takes several pointwise functions of its result as one (SiLU, GELU written out ...).",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="39 convolutions with SiLU write INT8 on 10.14.1; the fused name: NVIDIA/TensorRT issue 3385 (8.5.2)",
    about=("Sigmoid", "Mul"),
)
DEPTHWISE = assumed(
    "depthwise",
    "A depthwise or grouped convolution takes an activation other than Relu, Clip and LeakyRelu.",
    "NVIDIA prefers its own depthwise kernel and may leave the pair apart (NVIDIA/TensorRT issue 3205)",
)
DECONVOLUTION = assumed(
    "deconvolution",
    "A deconvolution takes a pointwise function of its result.",
    "as a convolution; a Deconvolution and a PWN layer behind it would refute it",
    about=("ConvTranspose",),
)
WITH_ADD = documented(
    "joined-with-add",
    "An activation that was joined with a residual Add is not taken: the convolution writes float.",
    "NVIDIA/TensorRT issue 2204 (8.4.1): INT8 to float",
    about=("Add",),
)
_SINGLE = {
    op.name: op.activation.case
    for op in OPERATORS.values()
    if op.activation is not None and op.name != "Relu"
}


class GenericConvActFusion(Pass):
    """Joins a convolution and a pointwise layer that reads nothing else."""

    cases = (*dict.fromkeys(_SINGLE.values()), POINTWISE, DEPTHWISE, DECONVOLUTION, WITH_ADD)

    def apply(self, network: Network) -> None:
        for layer, pointwise in network.single_consumer_pairs(
            *CONVOLVE, consumer_kind=LayerKind.POINTWISE
        ):
            if layer.fusion.has_activation:
                continue
            if len(pointwise.inputs) != 1:
                self._refuse(layer, pointwise)
                continue
            last = pointwise.nodes[-1] if pointwise.nodes else pointwise.name
            acts_as = pointwise.acts_as or pointwise.op
            self.fuse_consumer(network, _case(layer, pointwise), layer, pointwise)
            layer.fusion.has_activation = layer.fusion.has_pointwise = True
            layer.fusion.activation = Step(last, SILU if acts_as in ("Swish", "Silu") else acts_as)

    def _refuse(self, layer: Layer, pointwise: Layer) -> None:
        others = tuple(find_origin(t) for t in pointwise.inputs if t is not layer.out)
        node, size = node_name(layer), tensor_size(layer.out)
        if pointwise.activation_and_add is None:
            self.refuse(ActivationJoined(self.name, node, tuple(pointwise.nodes), others, size))
            return
        activation, add = pointwise.activation_and_add
        self.refuse(
            ActivationBeforeAdd(
                self.name, node, add, activation, others[0] if others else None, size
            )
        )
        layer.add_cases(WITH_ADD)


def _case(layer: Layer, pointwise: Layer) -> Case:
    single = _SINGLE.get(pointwise.op) if len(pointwise.nodes) == 1 else None
    if layer.kind == LayerKind.DECONVOLUTION:
        return DECONVOLUTION
    if layer.weights.group > 1 and (single is None or single.evidence != Evidence.SEEN):
        return DEPTHWISE
    return single or POINTWISE
