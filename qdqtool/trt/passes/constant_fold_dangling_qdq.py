from qdqtool.trt.passes._infra import QDQ, LayerKind, Network, Pass, assumed, constant_before

FOLDED = assumed(
    "dequantized-weights",
    "Quantized weights of a layer that runs in float are dequantized when the engine is built.",
    "logs have the heading 'QDQ graph optimizer constant fold dangling QDQ pass', but no "
    "available log has a line under it; a Reformat layer with such a DQ's name would refute it",
)


class ConstantFoldDanglingQDQ(Pass):
    """Folds each remaining Q or DQ of a constant, such as the weights of a float layer.

    TensorRT's log calls this pass "constant fold dangling QDQ".
    """

    cases = (FOLDED,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(*QDQ):
            constant = constant_before(layer.data)
            if constant is None or layer.out.is_output:
                continue
            for consumer in layer.out.consumers:
                consumer.add_cases(FOLDED)
            if constant.out.single_consumer():
                network.absorb_consumer(constant, layer, constant.name)
            else:
                network.drop_input(layer, 0)
                network.set_kind(layer, LayerKind.CONSTANT)
