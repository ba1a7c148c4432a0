from qdqtool.trt.passes._infra import Layer, LayerKind, Network, Pass, assumed, seen

PLAIN = seen(
    "single-reader",
    "Constant weights with a Q are quantized when the engine is built, <weights> + <Q>.",
    "yolo-resnet18-orin-trt8502:5108",
    "resnet18-qat-rtx2000-trt8510:2489",
    "yolov8-orin-trt8412-excerpts:155",
    "bevfusion-camera-orin-trt8502:49",
    "bevfusion-camera-rtx3080ti-trt8600:4985",
    "centernet-resnet34-qat-trt80",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="TensorRT 8.0 appends _quantize_scale_node to the Q's name",
)
SHARED = assumed(
    "several-readers",
    "A constant that several Qs read is quantized for each of them.",
    "one Q is seen for each constant in every log; an error about shared weights would refute it",
)


class ConstWeightsQuantizeFusion(Pass):
    """Quantizes constant weights at build time."""

    cases = (PLAIN, SHARED)

    def _apply(self, network: Network) -> None:
        for constant in network.layers_of_kind(LayerKind.CONSTANT):
            weights = constant.out
            for q in list(weights.consumers):
                if q.kind != LayerKind.QUANTIZE or q.data is not weights:
                    continue
                is_single = weights.single_consumer() is q
                self.fire_fusing(PLAIN if is_single else SHARED, q, constant, q)
                name = f"{constant.name} + {q.name}{self.target.quantize_suffix}"
                if is_single:
                    network.absorb_consumer(constant, q, name)
                else:
                    self._replace_q(network, q, constant, name)

    @staticmethod
    def _replace_q(network: Network, q: Layer, constant: Layer, name: str) -> None:
        quantized = Layer(LayerKind.CONSTANT, name)
        quantized.rank = constant.rank
        quantized.dims = constant.dims
        quantized.cases = dict(q.cases)
        quantized.nodes = list(q.nodes)
        network.remove(q)
        network.add(quantized, [], q.outputs)
