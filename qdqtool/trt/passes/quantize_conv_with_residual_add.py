from qdqtool.reasons.fusions import ActivationBeforeAdd
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualBothQuantized, ResidualFloat
from qdqtool.reasons.tensors import ConsumerKind
from qdqtool.trt.neighbors import (
    check_output_scales,
    find_consumers,
    find_int8_obstacle,
    find_origin,
    is_sum,
    quantizer_scale,
    tensor_size,
)
from qdqtool.trt.passes._infra import (
    FUSING,
    FUSING_INTO,
    REMOVING,
    SWAPPING,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Precision,
    Tensor,
    assumed,
    constant_before,
    dq_before,
    node_name,
    q_after,
    quantized_type,
    seen,
    weights_position,
)

QUANTIZED = seen(
    "quantized-residual",
    "A convolution fuses the Add after it (INT8, INT8 -> INT8) if the residual comes from a DQ "
    "and a Q is the single consumer of the sum.",
    "resnet18-qat-rtx2000-trt8510:2619",
    "bevfusion-camera-orin-trt8502:328",
    "bevfusion-camera-rtx3080ti-trt8600:5264",
    "resnet18-a100-qat-residual",
    "mobilenetv2-titanrtx-qat-residual",
    source="the residual's scale may differ from the output's",
)
ACTIVATED = assumed(
    "activated",
    "A convolution with an activation fuses the Add after the activation only on some versions.",
    "reports conflict: in NVIDIA/TensorRT issue 3861 the layers are separate on 8.5 and 10.6; "
    "since 2025-10 ModelOpt quantizes only the residual branch, so that convolution, activation "
    "and Add can fuse on 10.x",
)
FP8 = assumed(
    "fp8",
    "An FP8 convolution fuses the Add after it under the same conditions as an INT8 convolution.",
    "ModelOpt quantizes residual Adds for FP8 as for INT8; an engine with a separate Add would "
    "refute it",
)


class QuantizeConvWithResidualAdd(Pass):
    """Quantizes a convolution together with the residual Add after it.

    The data and weights of the convolution come from DQs. An Add (with its Relu) reads the output
    directly, without a Q/DQ pair between. The other input of the Add, the residual, comes from a
    DQ, and the single consumer of the Add is a Q. The types of data, residual and Q are equal.

    The pass refuses:

    * a float residual (yolo-resnet18-orin-trt8502, resnet18-a100-qat);
    * a sum that is not quantized (resnet18-a100-qat-residual, last block);
    * a Q/DQ pair between convolution and Add, which makes the Add a separate layer
      (yolov8-orin-trt8412-excerpts);
    * an activation between convolution and Add, unless the target fuses such an Add.
    """

    cases = (QUANTIZED, ACTIVATED, FP8)
    anonymous_lines = (SWAPPING, REMOVING)

    def _apply(self, network: Network) -> None:
        for conv, add in network.single_consumer_pairs(LayerKind.CONVOLUTION):
            if weights_position(conv) is None or conv.int8:
                continue
            if add.kind == LayerKind.QUANTIZE:
                self._refuse_two_pairs(conv, add)
            if is_sum(add):
                self._process_add(network, conv, add)

    def _process_add(self, network: Network, conv: Layer, add: Layer) -> None:
        residual = next(t for t in add.inputs if t is not conv.out)
        if conv.fusion.has_activation and dq_before(residual) is not None:
            network.adds_after_activation[node_name(add)] = None
        if conv.fusion.has_activation and not self.target.residual_through_activation:
            self._refuse_activation(conv, add, residual)
            return
        if len(add.inputs) != 2 or add.kind != LayerKind.ELEMENTWISE:
            return
        if find_int8_obstacle(conv, self.name, self.target) is not None:
            return
        self._fuse_if_quantized(network, conv, add, residual)

    def _fuse_if_quantized(
        self, network: Network, conv: Layer, add: Layer, residual: Tensor
    ) -> None:
        dq, q = dq_before(residual), q_after(add.out)
        if dq is None:
            self._refuse_float_residual(conv, add, residual)
        elif q is None:
            self._refuse_float_sum(conv, add, residual)
        elif len({quantized_type(each) for each in (dq_before(conv.data), dq, q)}) == 1:
            self._fuse_residual_add(network, conv, add, dq, q)

    # Reasons ---------------------------------------------------------------------------------

    def _refuse_activation(self, conv: Layer, add: Layer, residual: Tensor) -> None:
        self.refuse(
            ActivationBeforeAdd(
                self.name,
                node_name(conv),
                node_name(add),
                conv.nodes[-1],
                find_origin(residual),
                tensor_size(conv.out),
                find_consumers(add.out),
            )
        )
        conv.add_cases(ACTIVATED)

    def _refuse_two_pairs(self, conv: Layer, q: Layer) -> None:
        if conv.fusion.has_activation:
            # With pairs on both inputs, the Add runs in INT8. Without the pair after the
            # activation, TensorRT might not fuse the Add. So no change is advised.
            return
        dq = q.out.single_consumer(LayerKind.DEQUANTIZE)
        add = dq.out.single_consumer(LayerKind.ELEMENTWISE) if dq is not None else None
        if add is None:
            return
        dqs = [dq_before(tensor) for tensor in add.inputs]
        if None in dqs:
            return
        other = next((d for d in dqs if d is not dq), dq)
        self.refuse(
            ResidualBothQuantized(
                self.name,
                node_name(conv),
                node_name(add),
                node_name(q),
                (quantizer_scale(q), quantizer_scale(other)),
                tensor_size(conv.out),
            )
        )

    def _refuse_float_residual(self, conv: Layer, add: Layer, residual: Tensor) -> None:
        quantizers = [r for r in find_consumers(residual) if r.kind == ConsumerKind.Q]
        self.refuse(
            ResidualFloat(
                self.name,
                node_name(conv),
                node_name(add),
                find_origin(residual),
                find_consumers(add.out),
                tensor_size(conv.out),
                residual.source,
                tuple(quantizers),
            )
        )

    def _refuse_float_sum(self, conv: Layer, add: Layer, residual: Tensor) -> None:
        name, tensor = node_name(conv), add.out.source
        consumers, size = find_consumers(add.out), tensor_size(conv.out)
        different = check_output_scales(self.name, name, tensor, consumers, size)
        if different is not None:
            self.refuse(different)
            return
        origin = find_origin(residual)
        self.refuse(AddOutputNotQuantized(self.name, name, node_name(add), origin, consumers, size))

    # Fusion -----------------------------------------------------------------------------------

    def _fuse_residual_add(
        self, network: Network, conv: Layer, add: Layer, dq: Layer, q: Layer
    ) -> None:
        """Fuse convolution, Add and Q; ``dq`` dequantizes the residual.

        The emitted lines have the order of TensorRT's log, where some of them name other passes.
        """
        case = ACTIVATED if conv.fusion.has_activation else QUANTIZED
        self.fire_running(case, conv)
        self.fire(case, conv, SWAPPING, add.name, q.name)
        self._absorb_pairs_and_weights(network, case, conv, q)
        self.fire(case, conv, FUSING, conv.name, add.name, logged_pass="ConvEltwiseSumFusion")
        residual = dq.data
        if network.bypass_dq(dq, add):
            self.fire(case, conv, REMOVING, dq.name)
        out = q.out
        conv.add_cases(*q.cases)
        network.remove(q)
        network.absorb_consumer(conv, add, f"{conv.name} + {add.name}")
        network.set_output(conv, out)
        conv.residual = residual
        conv.int8 = conv.int8_out = conv.fusion.has_activation = True
        conv.quantized_type = quantized_type(q)
        if conv.quantized_type == Precision.FP8:
            conv.add_cases(FP8)

    def _absorb_pairs_and_weights(
        self, network: Network, case: Case, conv: Layer, q: Layer
    ) -> None:
        position = weights_position(conv)
        assert position is not None
        data_dq, weights_dq = dq_before(conv.data), dq_before(conv.inputs[position])
        assert data_dq is not None and weights_dq is not None
        logged_pass = "QuantizeDoubleInputNodes"
        self.fire(case, conv, FUSING_INTO, q.name, conv.name, logged_pass=logged_pass)
        pair = f"({data_dq.name} and {weights_dq.name})"
        self.fire(case, conv, FUSING_INTO, pair, conv.name, logged_pass=logged_pass)
        self.fire(case, conv, REMOVING, q.name)
        for dq in (data_dq, weights_dq):
            if network.bypass_dq(dq, conv):
                self.fire(case, conv, REMOVING, dq.name)
        weights = constant_before(conv.inputs[position])
        if weights is not None and weights.out.single_consumer():
            self.fire(case, conv, FUSING, weights.name, conv.name, logged_pass="ConstWeightsFusion")
            network.absorb_weights(conv, weights)
