from qdqtool.evidence import Evidence
from qdqtool.reasons.fusions import ActivationBeforeAdd, PointwiseReadsOtherTensors
from qdqtool.reasons.tensors import PathStep
from qdqtool.trt.neighbors import find_origin, tensor_size
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    OPERATORS,
    SILU,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    assumed,
    documented,
    node_name,
    seen,
)

POINTWISE = seen(
    "pointwise",
    "A convolution fuses a pointwise layer of several operators, such as SiLU or decomposed GELU.",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="39 convolutions with SiLU write INT8 on 10.14.1; the fused name: NVIDIA/TensorRT "
    "issue 3385 (8.5.2)",
    about=("Sigmoid", "Mul"),
)
DEPTHWISE = assumed(
    "depthwise",
    "A depthwise or grouped convolution fuses an activation other than Relu, Clip and LeakyRelu.",
    "TensorRT prefers a special depthwise kernel and may not fuse the pair (NVIDIA/TensorRT issue "
    "3205)",
)
DECONVOLUTION = assumed(
    "deconvolution",
    "A deconvolution fuses the pointwise layer after it.",
    "as a convolution; a Deconvolution and a PWN layer after it would refute it",
    about=("ConvTranspose",),
)
WITH_ADD = documented(
    "joined-with-add",
    "If the activation after a convolution was already fused with a residual Add, the convolution "
    "does not fuse the activation, and writes float.",
    "NVIDIA/TensorRT issue 2204 (8.4.1): INT8 to float",
    about=("Add",),
)
_ACTIVATION_CASES = {
    operator.name: operator.activation.case
    for operator in OPERATORS.values()
    if operator.activation is not None and operator.name != "Relu"
}


class GenericConvActFusion(Pass):
    """Fuses a convolution and a pointwise layer that reads only the convolution's result."""

    cases = (
        *dict.fromkeys(_ACTIVATION_CASES.values()),
        POINTWISE,
        DEPTHWISE,
        DECONVOLUTION,
        WITH_ADD,
    )

    def _apply(self, network: Network) -> None:
        pairs = network.single_consumer_pairs(*CONVOLVE, consumer_kind=LayerKind.POINTWISE)
        for layer, pointwise in pairs:
            if layer.fusion.has_activation:
                continue
            if len(pointwise.inputs) != 1:
                self._refuse_pointwise(layer, pointwise)
                continue
            last_node = pointwise.nodes[-1] if pointwise.nodes else pointwise.name
            activation = pointwise.acts_as or pointwise.op
            if activation in ("Swish", "Silu"):
                activation = SILU
            self.fuse_consumer(network, _choose_case(layer, pointwise), layer, pointwise)
            layer.fusion.has_activation = layer.fusion.has_pointwise = True
            layer.fusion.activation = PathStep(last_node, activation)

    def _refuse_pointwise(self, layer: Layer, pointwise: Layer) -> None:
        others = tuple(find_origin(t) for t in pointwise.inputs if t is not layer.out)
        node, size = node_name(layer), tensor_size(layer.out)
        if pointwise.activation_and_add is None:
            self.refuse(
                PointwiseReadsOtherTensors(self.name, node, tuple(pointwise.nodes), others, size)
            )
            return
        activation, add = pointwise.activation_and_add
        other = others[0] if others else None
        self.refuse(ActivationBeforeAdd(self.name, node, add, activation, other, size))
        layer.add_cases(WITH_ADD)


def _choose_case(layer: Layer, pointwise: Layer) -> Case:
    single = _ACTIVATION_CASES.get(pointwise.op) if len(pointwise.nodes) == 1 else None
    if layer.kind == LayerKind.DECONVOLUTION:
        return DECONVOLUTION
    if layer.weights.group > 1 and (single is None or single.evidence != Evidence.SEEN):
        return DEPTHWISE
    return single or POINTWISE
