from qdqtool.reasons import fp8
from qdqtool.reasons.convolutions import Deconvolution3D
from qdqtool.reasons.float_types import FloatTypesDiffer
from qdqtool.reasons.outputs import OutputDifferentScales, UnfusableOutputScale
from qdqtool.trt import fault_checks
from qdqtool.trt.neighbors import explain_float_output, find_int8_obstacle, tensor_size
from qdqtool.trt.passes._infra import (
    FUSING_INTO,
    REMOVING,
    WEIGHTED,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Precision,
    Reason,
    Tensor,
    assumed,
    can_absorb,
    documented,
    dq_before,
    find_case,
    node_name,
    q_after,
    quantized_type,
    seen,
)

CONVOLUTION = find_case("Conv")
DECONVOLUTION_80 = find_case("ConvTranspose")
MATRIX = find_case("MatMul")
DECONVOLUTION = documented(
    "deconvolution-later",
    "A ConvTranspose whose data and weights come from DQs runs in INT8 on TensorRT after 8.0.",
    "developer guide: Deconvolution is quantizable",
    about=("ConvTranspose",),
)
DECONVOLUTION_3D = documented(
    "deconvolution-3d",
    "A ConvTranspose of three spatial dimensions runs in INT8 on TensorRT 8.x if an activation and "
    "a Q follow, else in float. On TensorRT 10 and later, it always runs in float.",
    "NVIDIA names that pattern for 3D (NVIDIA/TensorRT#3412); a user's engines of 10.13 ran such "
    "layers in FP16 (NVIDIA/Model-Optimizer#688). A listing of 10 with such a layer in INT8 would "
    "refute it",
    about=("ConvTranspose",),
)
MIXED_FLOATS = assumed(
    "mixed-floats",
    "Data and weights that are dequantized to different float types are not multiplied in INT8.",
    "ONNX requires one float type for both; TensorRT-RTX 1.7 refuses such a convolution (`input` "
    "and `kernel` must be of same type). The result of a weakly typed 10.x build is unknown",
)
SUM = seen(
    "sum",
    "A sum whose inputs all come from DQs and that only a Q reads runs in INT8.",
    "yolov8-orin-trt8412-excerpts",
    "bev-blackwell-trt10",
    source="seen in the layer listings; the pass's line in the log is assumed",
    about=("Add",),
)
POINTWISE = assumed(
    "pointwise",
    "An elementwise or pointwise layer other than a sum runs in INT8 if its inputs all come from "
    "DQs and only a Q reads it.",
    "as for a sum; NVIDIA documents only that such a layer reads INT8 if it writes INT8",
)
FLOAT_SUM = seen(
    "sum-to-float",
    "A sum whose inputs all come from DQs absorbs the DQs even if it writes float.",
    "small-graphs-orinnano-trt103",
    source="PWN(Add) with two INT8 inputs and a float output, no layer for a DQ",
    about=("Add",),
)
FLOAT_POINTWISE = documented(
    "pointwise-to-float",
    "A pointwise layer other than a sum absorbs the DQs of all its inputs even if it writes float.",
    "NVIDIA/TensorRT issue 2204 (8.4): PWN, INT8 to float, under Q/DQ. If an input is float, the "
    "DQs of the other inputs remain",
)
DIFFERENT = assumed(
    "different-scales",
    "A result that only Qs of different scales read is written as float.",
    "in every log such a result has a float consumer as well",
)
FP8_CONVOLUTION = documented(
    "fp8-convolution",
    "A convolution whose data and weights come from DQs of FP8 computes in FP8, unless its kernel "
    "has more than 32 elements.",
    "NVIDIA/TensorRT issue 3987 (from 10.2 on Hopper, 10.3 on Ada); the limit of the kernel is in "
    "the release notes of 10.16.1 as quoted, and seen on TensorRT-RTX 1.7.1",
    about=("Conv",),
)
FP8_PRODUCT = documented(
    "fp8-product",
    "A matrix product whose inputs come from DQs of FP8 computes in FP8.",
    "release notes of 10.6 (FP8 GEMM and attention)",
    about=("MatMul", "Gemm"),
)
FP8_DECONVOLUTION = assumed(
    "fp8-deconvolution",
    "A ConvTranspose of FP8 data and weights runs in float.",
    "TensorRT-RTX documents that it has no FP8 deconvolution; an FP8 one in the layers of a "
    "TensorRT 10 engine would refute it",
    about=("ConvTranspose",),
)
FP8_KERNEL = documented(
    "fp8-kernel",
    "A convolution of FP8 with more than 32 elements in its kernel runs in float.",
    "release notes of 10.16.1 as quoted, for compute capabilities 8.9, 9.0, 12.0 and 12.1; seen on "
    "TensorRT-RTX 1.7.1. It is assumed for 10.0, 10.3 and 11.0",
    about=("Conv",),
)
FP8_EARLY = documented(
    "fp8-early",
    "TensorRT before 10.2 has no FP8 convolutions.",
    "NVIDIA/TensorRT issue 3987",
    about=("Conv",),
)
FP8_POINTWISE = assumed(
    "fp8-pointwise",
    "A pointwise layer whose inputs all come from DQs of FP8 absorbs these DQs.",
    "as for INT8; a conversion before such a layer in an engine would refute it",
)
FP8_MOVED = assumed(
    "fp8-moved",
    "FP8 Qs and DQs move past the same operators as INT8 Qs and DQs, except MaxPool and Resize.",
    "as seen on TensorRT-RTX 1.7.1 for operators that only move values and for MaxPool; no log of "
    "an FP8 build of TensorRT 10 is available",
)
MIXED_TYPES = assumed(
    "mixed-types",
    "A build fails at a layer with an INT8 and an FP8 input.",
    "TensorRT-RTX 1.7.1 refuses Conv, MatMul and Gemm (CHECK(dtype == W.type())); a TensorRT 10 "
    "engine with such a layer would refute it",
    about=("Conv", "MatMul", "Gemm"),
)
OTHER_TYPE = assumed(
    "other-type",
    "A layer does not absorb the Q after it if the Q quantizes to another 8-bit type.",
    "no kernel that reads INT8 and writes FP8 is known; an engine that shows one would refute it",
)
PRELU = assumed(
    "prelu",
    "A PRelu after a convolution remains a separate layer.",
    "no build shows whether it fuses",
    about=("PRelu",),
)
# Case by type of the reason why a layer with Q/DQ on both inputs runs in float.
_OBSTACLE_CASES: dict[type[Reason], Case] = {
    FloatTypesDiffer: MIXED_FLOATS,
    fp8.MixedOperands: MIXED_TYPES,
    fp8.FloatFp8Deconvolution: FP8_DECONVOLUTION,
    fp8.LargeFp8Kernel: FP8_KERNEL,
    fp8.EarlyFp8Convolution: FP8_EARLY,
}
_POINTWISE_KINDS = (
    LayerKind.ELEMENTWISE,
    LayerKind.POINTWISE,
    LayerKind.ACTIVATION,
    LayerKind.UNARY,
)


class QuantizeDoubleInputNodes(Pass):
    """Makes a layer whose data and weights come from DQs compute in INT8 or FP8.

    The layer absorbs the DQs. If a Q is the single consumer of the result (after BatchNormalization
    and activation were folded), the layer absorbs the Q too and writes INT8. Otherwise the layer
    writes float. The same rules hold for a pointwise layer whose inputs all come from DQs. A Q
    after a pointwise layer with a float input remains (seen after SiLU and Add in a YOLOv8n on
    10.14.1).
    """

    cases = (
        CONVOLUTION,
        DECONVOLUTION_80,
        DECONVOLUTION,
        DECONVOLUTION_3D,
        MIXED_FLOATS,
        MATRIX,
        SUM,
        POINTWISE,
        FLOAT_SUM,
        FLOAT_POINTWISE,
        DIFFERENT,
        FP8_CONVOLUTION,
        FP8_PRODUCT,
        FP8_DECONVOLUTION,
        FP8_KERNEL,
        FP8_EARLY,
        FP8_POINTWISE,
        FP8_MOVED,
        MIXED_TYPES,
        OTHER_TYPE,
        PRELU,
    )
    anonymous_lines = (REMOVING,)

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(*WEIGHTED):
            if not layer.int8 and not layer.in_myelin:
                self._quantize_weighted(network, layer)
        for layer in network.layers_of_kind(*_POINTWISE_KINDS):
            if layer.inputs and not layer.in_myelin:
                self._quantize_pointwise(network, layer)

    def _quantize_weighted(self, network: Network, layer: Layer) -> None:
        obstacle = find_int8_obstacle(layer, self.name, self.target) or self._find_3d_obstacle(
            layer
        )
        if obstacle is not None:
            self.refuse(obstacle)
            case = _OBSTACLE_CASES.get(type(obstacle))
            if case is not None:
                layer.add_cases(case)
            return
        self._absorb_quantizers(network, self._choose_case(layer), layer, layer.inputs[:2])
        if layer.int8_out or q_after(layer.out) is not None:
            return  # _absorb_quantizers has already reported a Q with an unsuitable scale or type
        output = explain_float_output(layer, self.name)
        self.refuse(output)
        if isinstance(output, OutputDifferentScales):
            layer.add_cases(DIFFERENT)
        elif any(consumer.op == "PRelu" for consumer in output.consumers):
            layer.add_cases(PRELU)

    def _find_3d_obstacle(self, layer: Layer) -> Deconvolution3D | None:
        if layer.kind != LayerKind.DECONVOLUTION:
            return None
        obstacle = fault_checks.check_deconvolution_3d(
            self.name,
            node_name(layer),
            layer.weights.kernel,
            self.target.deconvolution_3d_float,
            node_name(layer.data.producer),
            tensor_size(layer.out),
        )
        if obstacle is None:
            return None
        layer.add_cases(DECONVOLUTION_3D)
        has_pattern = layer.fusion.has_activation and can_absorb(q_after(layer.out))
        return None if has_pattern and not self.target.deconvolution_3d_float else obstacle

    def _choose_case(self, layer: Layer) -> Case:
        if quantized_type(dq_before(layer.data)) == Precision.FP8:
            return FP8_CONVOLUTION if layer.op == "Conv" else FP8_PRODUCT
        if layer.kind == LayerKind.DECONVOLUTION:
            return DECONVOLUTION_80 if self.target.has_seen_deconvolution else DECONVOLUTION
        return MATRIX if layer.kind == LayerKind.MATRIX_MULTIPLY else CONVOLUTION

    def _quantize_pointwise(self, network: Network, layer: Layer) -> None:
        dqs = [dq_before(tensor) for tensor in layer.inputs]
        types = set(map(quantized_type, dqs))
        if not all(map(can_absorb, dqs)) or (Precision.FP8 in types and len(types) > 1):
            return
        if q_after(layer.out) is None:
            self.refuse(explain_float_output(layer, self.name))
        case = FP8_POINTWISE if Precision.FP8 in types else _choose_pointwise_case(layer)
        self._absorb_quantizers(network, case, layer, layer.inputs)

    def _absorb_quantizers(
        self, network: Network, case: Case, layer: Layer, inputs: list[Tensor]
    ) -> None:
        dqs = [dq for dq in map(dq_before, inputs) if dq is not None]
        q = q_after(layer.out)
        quantizers = dqs if q is None else [*dqs, q]
        self.fire_running(case, layer)
        layer.quantized_type = quantized_type(dqs[0])
        q = self._find_absorbable_q(layer)
        if q is not None:
            self.fire(case, layer, FUSING_INTO, q.name, layer.name)
        names = " and ".join(dq.name for dq in dqs)
        self.fire(case, layer, FUSING_INTO, f"({names})", layer.name)
        if q is not None:
            self.fire(case, layer, REMOVING, q.name)
            network.absorb_q(layer, q)
        for dq in dict.fromkeys(dqs):
            if network.bypass_dq(dq, layer):
                self.fire(case, layer, REMOVING, dq.name)
        layer.int8 = True
        has_moved = any(quantizer.path.ops for quantizer in quantizers)
        if layer.quantized_type == Precision.FP8 and has_moved:
            layer.add_cases(FP8_MOVED)

    def _find_absorbable_q(self, layer: Layer) -> Layer | None:
        """Return the Q after a layer if the layer can absorb the Q, else None.

        A reason is recorded for a Q of another type or without a single scale.
        """
        q = q_after(layer.out)
        if q is None:
            return None
        name = node_name(q)
        if not can_absorb(q):
            self.refuse(
                UnfusableOutputScale(self.name, node_name(layer), name, q.has_computed_scale)
            )
            return None
        types = layer.quantized_type, quantized_type(q)
        if types[0] != types[1] and Precision.FP8 in types and self.target.has_fp8:
            size = tensor_size(layer.out)
            self.refuse(fp8.OutputTypeDiffers(self.name, node_name(layer), name, types, size))
            layer.add_cases(OTHER_TYPE)
            return None
        return q


def _choose_pointwise_case(layer: Layer) -> Case:
    is_plain_sum = layer.op == "Add" and len(layer.nodes) == 1
    if can_absorb(q_after(layer.out)):
        return SUM if is_plain_sum else POINTWISE
    return FLOAT_SUM if is_plain_sum else FLOAT_POINTWISE
