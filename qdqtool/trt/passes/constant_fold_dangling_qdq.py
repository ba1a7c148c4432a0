"""The "constant fold dangling QDQ" pass."""

from qdqtool.trt.passes._infra import QDQ, LayerKind, Network, Pass, assumed, constant_before

FOLDED = assumed(
    "dequantized-weights",
    "Quantized weights of a layer that runs in float are dequantized when the engine is built.",
    "the log has a heading for it (QDQ graph optimizer constant fold dangling QDQ pass) and no "
    "available build a case under it; a Reformat layer with such a DQ's name would refute it",
)


class ConstantFoldDanglingQDQ(Pass):
    """Folds a remaining DQ (or Q) of a constant: weights of a layer that runs in float."""

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
