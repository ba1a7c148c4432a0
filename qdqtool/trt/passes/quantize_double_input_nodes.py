"""QuantizeDoubleInputNodes."""

from __future__ import annotations

from qdqtool.evidence import Case, assumed, documented, seen
from qdqtool.operators import LayerKind
from qdqtool.trt.network import WEIGHTED, Layer, Network
from qdqtool.trt.passes._infra import (
    Pass,
    absorb_q,
    can_absorb,
    dq_of,
    drop_reader,
    node_name,
    only_q,
    weights_position,
)
from qdqtool.trt.quantizable import refusal_of
from qdqtool.trt.refusals import OutputDifferentScales, OutputManyConsumers, OutputNotQuantized, OutputScale
from qdqtool.trt.surroundings import elements, readers_of
from qdqtool.trt.trace import FUSING_INTO, REMOVING

CONVOLUTION = seen(
    "convolution", "A convolution whose data and weights come from DQs absorbs them and runs in INT8.",
    "yolo-resnet18-orin-trt8502:5405", "resnet18-qat-rtx2000-trt8510:2699", "yolov8-orin-trt8412-excerpts:194",
    "bevfusion-camera-orin-trt8502:488", "bevfusion-camera-rtx3080ti-trt8600:5424",
)
DECONVOLUTION_80 = seen(
    "deconvolution", "A ConvTranspose whose data and weights come from DQs runs in INT8.",
    "centernet-resnet34-qat-trt80", source="3 of 3",
)
DECONVOLUTION = documented(
    "deconvolution-later", "The same on TensorRT later than 8.0.", "developer guide: Deconvolution is quantizable",
)
MATRIX = documented(
    "matrix-multiply", "A MatMul of two dequantized tensors runs in INT8.",
    "developer guide: MatrixMultiply is quantizable; NVIDIA/TensorRT issue 4322",
)
SUM = seen(
    "sum", "A sum whose inputs all come from DQs and that only a Q reads runs in INT8.",
    "yolov8-orin-trt8412-excerpts", "bev-blackwell-trt10", source="the engine; the pass line for it is assumed",
)
POINTWISE = assumed(
    "pointwise", "Another elementwise or pointwise layer alike.",
    "as a sum; documented is only that such a layer takes INT8 if it gives INT8",
)
DIFFERENT = assumed(
    "different-scales", "A result that only Qs of different scales read is written as float.",
    "in every log such a result has a float reader besides",
)
PRELU = assumed("prelu", "A PRelu behind a convolution stays a layer of its own.", "no build shows whether it fuses")


class QuantizeDoubleInputNodes(Pass):
    """Lets a layer with two quantized inputs compute in INT8.

    The Q behind it (BatchNormalization and activation folded), its only reader, is absorbed first and the output is
    INT8. Any other reader, or a network output: the output is float. A layer without weights takes INT8 only if it
    gives INT8.
    """

    cases = (CONVOLUTION, DECONVOLUTION_80, DECONVOLUTION, MATRIX, SUM, POINTWISE, DIFFERENT, PRELU)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(*WEIGHTED):
            self._weighted(network, layer)
        for layer in network.of_kind(LayerKind.ELEMENTWISE, LayerKind.POINTWISE):
            if len(layer.inputs) >= 2 and not layer.in_myelin:
                self._pointwise(network, layer)

    def _weighted(self, network: Network, layer: Layer) -> None:
        if layer.int8 or layer.in_myelin:
            return
        refused = refusal_of(layer, self.name)
        if refused is not None:
            self.refuse(refused)
            return
        position = weights_position(layer)
        assert position is not None
        self._absorb(network, self._case(layer), layer, (0, position))
        if not layer.int8_out:
            self._explain_output(layer)

    def _case(self, layer: Layer) -> Case:
        if layer.kind == LayerKind.DECONVOLUTION:
            return DECONVOLUTION_80 if self.target.deconvolution_seen else DECONVOLUTION
        return MATRIX if layer.kind == LayerKind.MATRIX_MULTIPLY else CONVOLUTION

    def _pointwise(self, network: Network, layer: Layer) -> None:
        if not all(dq_of(t) for t in layer.inputs):
            return
        if only_q(layer.out) is None:
            readers = readers_of(layer.out)
            size = elements(layer.out)
            self.refuse(OutputNotQuantized(self.name, node_name(layer), layer.out.source, readers, size))
            return
        case = SUM if layer.op == "Add" and len(layer.nodes) == 1 else POINTWISE
        self._absorb(network, case, layer, tuple(range(len(layer.inputs))))

    def _absorb(self, network: Network, case: Case, layer: Layer, positions: tuple[int, ...]) -> None:
        dqs = [dq for dq in (dq_of(layer.inputs[p]) for p in positions) if dq is not None]
        self.running(case, layer)
        q = only_q(layer.out)
        if q is not None and not can_absorb(q):
            self.refuse(OutputScale(self.name, node_name(layer), node_name(q), q.computed_scale))
            q = None
        if q is not None:
            self.fire(case, layer, FUSING_INTO, q.name, layer.name)
        self.fire(case, layer, FUSING_INTO, f"({' and '.join(d.name for d in dqs)})", layer.name)
        if q is not None:
            self.fire(case, layer, REMOVING, q.name)
            absorb_q(network, layer, q)
        for dq in dict.fromkeys(dqs):
            if drop_reader(network, dq, layer):
                self.fire(case, layer, REMOVING, dq.name)
        layer.int8 = True
        if dqs and dqs[0].quant is not None:
            layer.quantized_as = dqs[0].quant.precision

    def _explain_output(self, layer: Layer) -> None:
        if only_q(layer.out) is not None:
            return  # its scale: refused above
        node, tensor, size = node_name(layer), layer.out.source, elements(layer.out)
        qs = [r for r in layer.out.consumers if r.kind == LayerKind.QUANTIZE]
        readers = readers_of(layer.out)
        if not qs:
            self.refuse(OutputNotQuantized(self.name, node, tensor, readers, size))
            if any(r.op == "PRelu" for r in readers):
                layer.rest_on(PRELU)
        elif len(qs) == len(layer.out.consumers) and not layer.out.is_output:
            self.refuse(OutputDifferentScales(self.name, node, tensor, readers, size))
            layer.rest_on(DIFFERENT)
        else:
            self.refuse(OutputManyConsumers(self.name, node, tensor, readers, size))
