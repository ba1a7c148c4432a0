import functools
from collections.abc import Callable

from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.reasons.tensors import TensorConsumer
from qdqtool.trt.neighbors import (
    find_consumers,
    find_origin,
    find_weighted_consumers,
    quantizer_scale,
    tensor_size,
)
from qdqtool.trt.passes._infra import (
    QDQ,
    SWAP_TYPE,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Precision,
    Tensor,
    assumed,
    node_name,
    quantized_type,
    seen,
    weakest_evidence,
)

QUANTIZE = seen(
    "quantize",
    "A Q that no layer has absorbed becomes a conversion of the engine, Layer(Reformat): <Q>.",
    "yolo-resnet18-orin-trt8502:5741",
    "resnet18-qat-rtx2000-trt8510:2812",
    "yolov8-orin-trt8412-excerpts:222",
    "bevfusion-camera-orin-trt8502:870",
    "bevfusion-camera-rtx3080ti-trt8600:5806",
    "yolov8n-modelopt-rtx2060-trt1014",
    "small-graphs-orinnano-trt103",
    source="the line has the same wording in 10.7 (NVIDIA/TensorRT issue 4320) as in 8.5",
    about=("QuantizeLinear",),
)
DEQUANTIZE = assumed(
    "dequantize",
    "A DQ that no layer has absorbed becomes a conversion of the engine.",
    "an engine lists such a layer (resnet18-a100-qat-residual, DequantizeLinear_291), but no log "
    "has the line of the pass",
    about=("DequantizeLinear",),
)
ATTENTION = assumed(
    "attention",
    "A Q between the Softmax and the second MatMul of an attention becomes a conversion.",
    "no listing of an INT8 attention is available. If TensorRT fuses the whole attention into one "
    "kernel (developer guide, MHA fusion: Q/DQ before the first MatMul, after the Softmax and "
    "after the second MatMul), the kernel contains the Q",
    about=("QuantizeLinear", "Softmax"),
)


class QDQToCopy(Pass):
    """Turns every remaining Q and DQ outside Myelin's kernels into a conversion of the engine."""

    cases = (QUANTIZE, DEQUANTIZE, ATTENTION)
    anonymous_lines = (SWAP_TYPE,)
    converted_kind = "kQDQ"

    def _apply(self, network: Network) -> None:
        remaining = []
        for layer in network.layers_of_kind(*QDQ):
            if layer.region is None:
                remaining.append(layer)
            else:  # Myelin runs the Q or DQ in a kernel, so it is not a conversion
                network.set_kind(layer, LayerKind.COPY)
        find = functools.cache(find_consumers)  # many Qs may read one tensor
        for layer in remaining:
            self.refuse(self._describe_conversion(layer, find))
        for layer in remaining:
            case = _choose_case(layer)
            self.fire_running(case, layer)
            self.fire(case, layer, SWAP_TYPE, layer.name, f"{layer.kind} to kQDQ")
            network.set_kind(layer, LayerKind.COPY)

    def _describe_conversion(
        self, layer: Layer, find: Callable[[Tensor], tuple[TensorConsumer, ...]]
    ) -> RemainingConversion:
        """Describe a Q or DQ that remains as a conversion, with its producer and consumers.

        ``find`` returns the consumers of a tensor.
        """
        is_q = layer.kind == LayerKind.QUANTIZE
        tensor = layer.data if is_q else layer.out
        is_in_attention = _is_in_attention(layer)
        # DEQUANTIZE is left out, because it would weaken the evidence: no log contains its line,
        # but the layers of an engine confirm the conversion.
        cases = [*layer.cases, *layer.stationary_cases]
        if is_in_attention:
            cases.append(ATTENTION)
        return RemainingConversion(
            self.name,
            layer.owner or node_name(layer),
            layer.name,
            is_q,
            tensor.source,
            quantizer_scale(layer),
            find_origin(layer.data),
            find(layer.data),
            find(layer.out),
            layer.path.steps(),
            layer.blocked_by,
            tensor_size(tensor),
            find_weighted_consumers(layer.out),
            layer.paired_q,
            layer.source_scale,
            layer.requantizes,
            _named_type(layer),
            is_in_attention,
            weakest_evidence(cases, self.target),
        )


def _named_type(layer: Layer) -> Precision:
    """Return the quantized type of a Q or DQ; UNKNOWN if TensorRT lacks it (FP8 E5M2)."""
    quant = layer.quant
    if quant is not None and quant.precision == Precision.UNKNOWN and quant.has_zero_point:
        return Precision.UNKNOWN
    return quantized_type(layer)


def _choose_case(layer: Layer) -> Case:
    if _is_in_attention(layer):
        return ATTENTION
    return QUANTIZE if layer.kind == LayerKind.QUANTIZE else DEQUANTIZE


def _is_in_attention(layer: Layer) -> bool:
    if layer.kind not in (LayerKind.QUANTIZE, LayerKind.COPY):
        return False
    producer = layer.data.producer
    while producer is not None and producer.kind == LayerKind.SHUFFLE:
        producer = producer.data.producer
    if producer is None or producer.kind != LayerKind.SOFTMAX:
        return False
    products = [c for c in layer.out.consumers if c.kind == LayerKind.MATRIX_MULTIPLY]
    return any(not product.weights.constant for product in products)
