"""QuantizeDoubleInputNodes."""

from qdqtool.model.operators import case_of
from qdqtool.trt import detect
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor, can_absorb, dq_before, node_name, q_after
from qdqtool.trt.passes._infra import Case, LayerKind, Network, Pass, assumed, documented, seen
from qdqtool.trt.refusals import (
    Deconvolution3D,
    FloatTypesDiffer,
    OutputDifferentScales,
    OutputScale,
    OutsideRules,
)
from qdqtool.trt.surroundings import explain_float_output, find_int8_obstacle, tensor_size
from qdqtool.trt.trace import FUSING_INTO, REMOVING
from qdqtool.types import Precision

CONVOLUTION = case_of("Conv")
DECONVOLUTION_80 = case_of("ConvTranspose")
MATRIX = case_of("MatMul")
DECONVOLUTION = documented(
    "deconvolution-later",
    "The same on TensorRT later than 8.0.",
    "developer guide: Deconvolution is quantizable",
    about=("ConvTranspose",),
)
DECONVOLUTION_3D = documented(
    "deconvolution-3d",
    "A ConvTranspose of three spatial dimensions runs in INT8 where an activation and a Q are behind it, else in "
    "float.",
    "NVIDIA names that pattern for 3D (NVIDIA/TensorRT#3412); a user's engines of 10.13 ran such layers in FP16 "
    "(NVIDIA/Model-Optimizer#688). A listing with an INT8 one and no Q behind it would refute it",
    about=("ConvTranspose",),
)
MIXED_FLOATS = assumed(
    "mixed-floats",
    "Data and weights that are dequantized to different float types are not multiplied in INT8.",
    "ONNX wants one float type for both; TensorRT-RTX 1.7 refuses such a convolution (`input` and `kernel` must be of "
    "same type). What a weakly typed 10.x build makes of it is not known",
)
SUM = seen(
    "sum",
    "A sum whose inputs all come from DQs and that only a Q reads runs in INT8.",
    "yolov8-orin-trt8412-excerpts",
    "bev-blackwell-trt10",
    source="the engine; the pass line for it is assumed",
    about=("Add",),
)
POINTWISE = assumed(
    "pointwise",
    "Another elementwise or pointwise layer alike.",
    "as a sum; documented is only that such a layer takes INT8 if it gives INT8",
)
FLOAT_SUM = seen(
    "sum-to-float",
    "A sum whose inputs all come from DQs reads INT8 whatever it writes: the DQs are inside it.",
    "small-graphs-orinnano-trt103",
    source="PWN(Add) with two INT8 inputs and a float output, no layer for a DQ",
    about=("Add",),
)
FLOAT_POINTWISE = documented(
    "pointwise-to-float",
    "Another pointwise layer alike, of one input or several.",
    "NVIDIA/TensorRT issue 2204 (8.4): PWN, INT8 to float, under Q/DQ. Inputs of which some are float stay as they are",
)
DIFFERENT = assumed(
    "different-scales",
    "A result that only Qs of different scales read is written as float.",
    "in every log such a result has a float reader besides",
)
PRELU = assumed(
    "prelu",
    "A PRelu behind a convolution stays a layer of its own.",
    "no build shows whether it fuses",
    about=("PRelu",),
)
_POINTWISE = (LayerKind.ELEMENTWISE, LayerKind.POINTWISE, LayerKind.ACTIVATION, LayerKind.UNARY)


class QuantizeDoubleInputNodes(Pass):
    """Lets a layer with two quantized inputs compute in INT8.

    The Q behind it (BatchNormalization and activation folded), its only reader, is absorbed first and the output is
    INT8. Any other reader, or a network output: the output is float. So with a pointwise layer all of whose inputs come
    from DQs; a Q behind one that reads floats stays (41 conversions of a YOLOv8n on 10.14.1, those behind SiLU and Add
    among them).
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
        PRELU,
    )
    anonymous_lines = (REMOVING,)

    def apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(*WEIGHTED):
            self._weighted(network, layer)
        for layer in network.layers_of_kind(*_POINTWISE):
            if layer.inputs and not layer.in_myelin:
                self._pointwise(network, layer)

    def _weighted(self, network: Network, layer: Layer) -> None:
        if layer.int8 or layer.in_myelin:
            return
        refused = find_int8_obstacle(layer, self.name, self.target) or self._three_dimensions(layer)
        if refused is not None:
            self.refuse(refused)
            if isinstance(refused, FloatTypesDiffer):
                layer.add_cases(MIXED_FLOATS)
            return
        self._absorb(network, self._case(layer), layer, layer.inputs[:2])
        if layer.int8_out or q_after(layer.out) is not None:
            return  # a Q that is left was refused for its scale
        output = explain_float_output(layer, self.name)
        self.refuse(output)
        if isinstance(output, OutputDifferentScales):
            layer.add_cases(DIFFERENT)
        elif any(r.op == "PRelu" for r in output.readers):
            layer.add_cases(PRELU)

    def _three_dimensions(self, layer: Layer) -> Deconvolution3D | None:
        """Why a ConvTranspose of three spatial dimensions stays float; None for any other layer, and where it does not."""
        if layer.kind != LayerKind.DECONVOLUTION:
            return None
        found = detect.deconvolution_3d(
            self.name,
            node_name(layer),
            layer.weights.kernel,
            node_name(layer.data.producer),
            tensor_size(layer.out),
        )
        if found is None:
            return None
        layer.add_cases(DECONVOLUTION_3D)
        return None if layer.fusion.has_activation and can_absorb(q_after(layer.out)) else found

    def _case(self, layer: Layer) -> Case:
        if layer.kind == LayerKind.DECONVOLUTION:
            return DECONVOLUTION_80 if self.target.deconvolution_seen else DECONVOLUTION
        return MATRIX if layer.kind == LayerKind.MATRIX_MULTIPLY else CONVOLUTION

    def _pointwise(self, network: Network, layer: Layer) -> None:
        if not all(can_absorb(dq_before(t)) for t in layer.inputs):
            return
        plain = layer.op == "Add" and len(layer.nodes) == 1
        behind = can_absorb(q_after(layer.out))
        case = (SUM if plain else POINTWISE) if behind else FLOAT_SUM if plain else FLOAT_POINTWISE
        if q_after(layer.out) is None:
            self.refuse(explain_float_output(layer, self.name))
        self._absorb(network, case, layer, layer.inputs)

    def _absorb(self, network: Network, case: Case, layer: Layer, inputs: list[Tensor]) -> None:
        dqs = [dq for tensor in inputs if (dq := dq_before(tensor)) is not None]
        self.fire_running(case, layer)
        q = q_after(layer.out)
        if q is not None and not can_absorb(q):
            self.refuse(
                OutputScale(self.name, node_name(layer), node_name(q), q.has_computed_scale)
            )
            q = None
        if q is not None:
            self.fire(case, layer, FUSING_INTO, q.name, layer.name)
        self.fire(case, layer, FUSING_INTO, f"({' and '.join(d.name for d in dqs)})", layer.name)
        if q is not None:
            self.fire(case, layer, REMOVING, q.name)
            network.absorb_q(layer, q)
        for dq in dict.fromkeys(dqs):
            if network.bypass_dq(dq, layer):
                self.fire(case, layer, REMOVING, dq.name)
        layer.int8 = True
        if dqs and dqs[0].quant is not None:
            layer.quantized_type = dqs[0].quant.precision
            if layer.quantized_type == Precision.FP8:
                self.refuse(
                    OutsideRules(
                        self.name, node_name(layer), node_name(dqs[0]), layer.quantized_type
                    )
                )
