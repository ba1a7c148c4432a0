"""QuantizeConvWithResidualAdd."""

from qdqtool.trt import refusals
from qdqtool.trt.layers import (
    Layer,
    Tensor,
    constant_before,
    dq_before,
    node_name,
    q_after,
    weights_position,
)
from qdqtool.trt.passes._infra import (
    FUSING,
    FUSING_INTO,
    REMOVING,
    SWAPPING,
    LayerKind,
    Network,
    Pass,
    assumed,
    seen,
)
from qdqtool.trt.refusals import ReaderKind
from qdqtool.trt.surroundings import (
    check_output_scales,
    find_consumers,
    find_int8_obstacle,
    find_origin,
    is_sum,
    quantizer_scale,
    tensor_size,
)

QUANTIZED = seen(
    "quantized-residual",
    "A convolution takes the Add behind it, INT8, INT8 -> INT8, if the residual comes from a DQ "
    "and the sum goes to a Q alone.",
    "resnet18-qat-rtx2000-trt8510:2619",
    "bevfusion-camera-orin-trt8502:328",
    "bevfusion-camera-rtx3080ti-trt8600:5264",
    "resnet18-a100-qat-residual",
    "mobilenetv2-titanrtx-qat-residual",
    source="the residual's scale may differ from the output's",
)
ACTIVATED = assumed(
    "activated",
    "What an activation between convolution and Add makes of the fusion.",
    "reports conflict: NVIDIA/TensorRT issue 3861 sees them apart on 8.5 and 10.6, ModelOpt quantizes the residual "
    "branch only since 2025-10, so that convolution, activation and Add can fuse on 10.x",
)


class QuantizeConvWithResidualAdd(Pass):
    """Quantizes a convolution together with the residual Add that it feeds.

    Both inputs from DQs; the output goes straight to an Add (with its Relu), no Q between; the Add's other input is a
    DQ; the Add's only reader is a Q. Refused: the residual is float (yolo-resnet18-orin-trt8502, resnet18-a100-qat);
    the sum is not quantized (resnet18-a100-qat-residual, last block); Q/DQ on the convolution's side as well, which
    leaves the Add a layer of its own (yolov8-orin-trt8412-excerpts); an activation between convolution and Add, unless
    the target says that it fuses.
    """

    cases = (QUANTIZED, ACTIVATED)
    anonymous_lines = (SWAPPING, REMOVING)

    def apply(self, network: Network) -> None:
        if not network.has(LayerKind.ELEMENTWISE, LayerKind.POINTWISE):
            return
        for conv, add in network.single_consumer_pairs(LayerKind.CONVOLUTION):
            position = weights_position(conv)
            if position is None or conv.int8:
                continue
            if add.kind == LayerKind.QUANTIZE:
                self._both(conv, add)
            if not is_sum(add):
                continue
            other = next(t for t in add.inputs if t is not conv.out)
            dq, q, by = dq_before(other), q_after(add.out), (self.name, node_name(conv))
            if (
                self._held_apart(network, conv, add, other)
                or len(add.inputs) != 2
                or add.kind != LayerKind.ELEMENTWISE
            ):
                continue
            if find_int8_obstacle(conv, self.name, self.target) is not None:
                continue
            if dq is not None and q is not None:
                self._fuse(network, conv, position, add, dq, q)
                continue
            size, readers = tensor_size(conv.out), find_consumers(add.out)
            if dq is None:
                quantizers = tuple(r for r in find_consumers(other) if r.kind == ReaderKind.Q)
                self.refuse(
                    refusals.ResidualFloat(
                        *by,
                        node_name(add),
                        find_origin(other),
                        readers,
                        size,
                        other.source,
                        quantizers,
                    )
                )
            else:
                self.refuse(
                    check_output_scales(*by, add.out.source, readers, size)
                    or refusals.AddOutputNotQuantized(
                        *by, node_name(add), find_origin(other), readers, size
                    )
                )

    def _held_apart(self, network: Network, conv: Layer, add: Layer, other: Tensor) -> bool:
        """Whether an activation between them keeps a convolution and an Add apart on the target."""
        if conv.fusion.has_activation and dq_before(other) is not None:
            network.adds_after_activation[node_name(add)] = None
        apart = conv.fusion.has_activation and not self.target.residual_through_activation
        if apart:
            self.refuse(
                refusals.ActivationBeforeAdd(
                    self.name,
                    node_name(conv),
                    node_name(add),
                    conv.nodes[-1],
                    find_origin(other),
                    tensor_size(conv.out),
                    find_consumers(add.out),
                )
            )
            conv.add_cases(ACTIVATED)
        return apart

    def _both(self, conv: Layer, q: Layer) -> None:
        if conv.fusion.has_activation:
            return  # whether the Add could be joined is not known: both pairs let it run in INT8 by itself
        dq = q.out.single_consumer(LayerKind.DEQUANTIZE)
        add = dq.out.single_consumer(LayerKind.ELEMENTWISE) if dq is not None else None
        if add is not None and all(map(dq_before, add.inputs)):
            other = next((d for d in map(dq_before, add.inputs) if d is not dq), dq)
            self.refuse(
                refusals.ResidualBothQuantized(
                    self.name,
                    node_name(conv),
                    node_name(add),
                    node_name(q),
                    (quantizer_scale(q), quantizer_scale(other)),
                    tensor_size(conv.out),
                )
            )

    def _fuse(
        self, network: Network, conv: Layer, position: int, add: Layer, dq: Layer, q: Layer
    ) -> None:
        case = ACTIVATED if conv.fusion.has_activation else QUANTIZED
        conv_dq, weight_dq = dq_before(conv.data), dq_before(conv.inputs[position])
        assert conv_dq is not None and weight_dq is not None
        self.fire_running(case, conv)
        self.fire(case, conv, SWAPPING, add.name, q.name)
        self.fire(case, conv, FUSING_INTO, q.name, conv.name, by="QuantizeDoubleInputNodes")
        pair = f"({conv_dq.name} and {weight_dq.name})"
        self.fire(case, conv, FUSING_INTO, pair, conv.name, by="QuantizeDoubleInputNodes")
        self.fire(case, conv, REMOVING, q.name)
        residual = dq.data
        for used in (conv_dq, weight_dq):
            if network.bypass_dq(used, conv):
                self.fire(case, conv, REMOVING, used.name)
        weights = constant_before(conv.inputs[position])
        if weights is not None and weights.out.single_consumer():
            self.fire(case, conv, FUSING, weights.name, conv.name, by="ConstWeightsFusion")
            network.absorb_weights(conv, weights)
        self.fire(case, conv, FUSING, conv.name, add.name, by="ConvEltwiseSumFusion")
        if network.bypass_dq(dq, add):
            self.fire(case, conv, REMOVING, dq.name)
        q_out = q.out
        conv.add_cases(*q.cases)
        network.remove(q)
        network.absorb_consumer(conv, add, f"{conv.name} + {add.name}")
        network.set_output(conv, q_out)
        conv.residual = residual
        conv.int8 = conv.int8_out = conv.fusion.has_activation = True
