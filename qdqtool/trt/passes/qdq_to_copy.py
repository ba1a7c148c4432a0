"""QDQToCopy."""

import functools
from collections.abc import Callable

from qdqtool.trt.passes._infra import (
    QDQ,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    node_name,
    seen,
    weakest_evidence,
)
from qdqtool.trt.refusals import Reader, Stays
from qdqtool.trt.surroundings import (
    find_consumers,
    find_origin,
    find_weighted_consumers,
    quantizer_scale,
    tensor_size,
)
from qdqtool.trt.trace import SWAP_TYPE
from qdqtool.types import Precision

QUANTIZE = seen(
    "quantize",
    "A Q that nothing absorbed becomes a conversion of the engine, Layer(Reformat): <Q>.",
    "yolo-resnet18-orin-trt8502:5741",
    "resnet18-qat-rtx2000-trt8510:2812",
    "yolov8-orin-trt8412-excerpts:222",
    "bevfusion-camera-orin-trt8502:870",
    "bevfusion-camera-rtx3080ti-trt8600:5806",
    "yolov8n-modelopt-rtx2060-trt1014",
    "small-graphs-orinnano-trt103",
    source="worded in 10.7 as in 8.5 (NVIDIA/TensorRT issue 4320)",
    about=("QuantizeLinear",),
)
DEQUANTIZE = assumed(
    "dequantize",
    "A DQ that nothing absorbed becomes one as well.",
    "the engine line is seen (resnet18-a100-qat-residual, DequantizeLinear_291), the pass line is not",
    about=("DequantizeLinear",),
)
ATTENTION = assumed(
    "attention",
    "A Q between the Softmax and the second MatMul of an attention becomes one alike.",
    "no listing of an INT8 attention is available. Where TensorRT makes one kernel of the whole attention (developer "
    "guide, MHA fusion: Q/DQ in front of the first MatMul, behind the Softmax and behind the second), the Q is in it",
    about=("QuantizeLinear", "Softmax"),
)


class QDQToCopy(Pass):
    """Turns every Q and DQ that nothing absorbed into a conversion of the engine."""

    cases = (QUANTIZE, DEQUANTIZE, ATTENTION)
    anonymous_lines = (SWAP_TYPE,)
    converted_kind = "kQDQ"

    def apply(self, network: Network) -> None:
        layers = network.layers_of_kind(*QDQ)
        left = [layer for layer in layers if layer.region is None]
        for layer in layers:
            if layer.region is not None:  # a kernel of Myelin, or a part of one
                network.set_kind(layer, LayerKind.COPY)
        readers = functools.cache(find_consumers)  # many Qs may read one tensor
        for layer in left:
            self.refuse(self._stays(layer, readers))
        for layer in left:
            quantize = layer.kind == LayerKind.QUANTIZE
            case = ATTENTION if _in_attention(layer) else QUANTIZE if quantize else DEQUANTIZE
            self.fire_running(case, layer)
            self.fire(case, layer, SWAP_TYPE, layer.name, f"{layer.kind} to kQDQ")
            network.set_kind(layer, LayerKind.COPY)

    def _stays(self, layer: Layer, readers: Callable[[Tensor], tuple[Reader, ...]]) -> Stays:
        tensor = layer.data if layer.kind == LayerKind.QUANTIZE else layer.out
        in_attention = _in_attention(layer)
        # DEQUANTIZE is assumed for its line in the log: the conversion is seen in an engine.
        cases = [*layer.cases, *layer.stationary_cases, *[ATTENTION] * in_attention]
        return Stays(
            self.name,
            layer.owner or node_name(layer),
            layer.name,
            layer.kind == LayerKind.QUANTIZE,
            tensor.source,
            quantizer_scale(layer),
            find_origin(layer.data),
            readers(layer.data),
            readers(layer.out),
            layer.path.steps(),
            layer.blocked_by,
            tensor_size(tensor),
            find_weighted_consumers(layer.out),
            layer.paired_q,
            layer.source_scale,
            layer.requantizes,
            _precision(layer),
            in_attention,
            weakest_evidence(cases, self.target),
        )


def _in_attention(layer: Layer) -> bool:
    """Whether a Q quantizes what a Softmax gives to a MatMul of two computed tensors."""
    above = layer.data.producer
    while above is not None and above.kind == LayerKind.SHUFFLE:
        above = above.data.producer
    return (
        layer.kind in (LayerKind.QUANTIZE, LayerKind.COPY)
        and above is not None
        and above.kind == LayerKind.SOFTMAX
        and any(
            r.kind == LayerKind.MATRIX_MULTIPLY and not r.weights.constant
            for r in layer.out.consumers
        )
    )


def _precision(layer: Layer) -> Precision:
    """TensorRT reads uint8, and a type that is not known, as INT8."""
    found = layer.quant.precision if layer.quant is not None else Precision.INT8
    return Precision.INT8 if found in (Precision.UINT8, Precision.UNKNOWN) else found
