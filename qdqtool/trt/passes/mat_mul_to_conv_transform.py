"""MatMulToConvTransform."""

from __future__ import annotations

from dataclasses import replace

from qdqtool.evidence import Case, assumed, documented
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import INSERTED_SHUFFLE, weights_of
from qdqtool.trt.layers import Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of, dq_of
from qdqtool.trt.trace import CONVERT_TYPE

GEMM = weights_of("Gemm").case
MATMUL = assumed(
    "matmul", "A MatMul of a matrix with constant quantized weights becomes one as well; a batched one stays.",
    "as the Gemm; an engine that names such a MatMul as a MatrixMultiply layer would refute it",
)
PLAIN = documented(
    "plain-gemm", "A Gemm with plain constant weights becomes one too, and takes bias and Relu.",
    "engine names of an 8.6.1 build: /classifier.2/Gemm + /classifier.3/Relu, and NoOp reshape_after_/last_layer/Gemm",
)


class MatMulToConvTransform(Pass):
    """Turns a fully connected layer with constant weights into a 1x1 convolution."""

    cases = (GEMM, MATMUL, PLAIN)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.MATRIX_MULTIPLY):
            case = _case(layer)
            if case is None:
                continue
            self.running(case, layer)
            self.fire(case, layer, CONVERT_TYPE, layer.name, "MATRIX_MULTIPLY to CONVOLUTION")
            network.set_kind(layer, LayerKind.CONVOLUTION)
            layer.weights = replace(
                layer.weights, kernel=(1, 1), strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), from_matmul=True,
                inside=case is PLAIN,
            )
            if case is PLAIN:
                constant = constant_of(layer.inputs[1])
                network.drop_input(layer, 1)
                if constant is not None and not constant.out.consumers and not constant.out.is_output:
                    network.remove(constant)
            self._surround(network, layer)

    @staticmethod
    def _surround(network: Network, layer: Layer) -> None:
        sides = ((1, "transpose_before"), (0, "reshape_before"))
        for position, what in sides[2 - len(layer.inputs):]:
            shuffle = Layer(LayerKind.SHUFFLE, f"{what}_{layer.name}")
            shuffle.rank = layer.rank.before(position)
            shuffle.passage = INSERTED_SHUFFLE
            shuffle.shuffling.before_matmul, shuffle.shuffling.moves = True, position == 1
            source = layer.inputs[position]
            between = Tensor(f"{shuffle.name}_out_tensor", source.source, source.elem_type)
            if position == 0 and source.shape is not None:
                between.shape = (*source.shape, 1, 1)
            network.insert_before(layer, position, shuffle, between)
        after = Layer(LayerKind.SHUFFLE, f"reshape_after_{layer.name}")
        after.rank = layer.rank.behind()
        after.passage = INSERTED_SHUFFLE
        after.shuffling.after_matmul = True
        out = layer.out
        raw = Tensor(f"{layer.name}_out_tensor", out.source, out.elem_type)
        network.set_output(layer, raw)
        network.add(after, [raw], [out])


def _case(layer: Layer) -> Case | None:
    """The case of a matrix product, None for one that stays what it is."""
    if not layer.weights.constant or len(layer.inputs) != 2 or layer.in_myelin:
        return None
    if dq_of(layer.inputs[1]) is None:
        plain = layer.op == "Gemm" and constant_of(layer.inputs[1]) is not None and dq_of(layer.data) is None
        return PLAIN if plain else None
    if layer.op != "MatMul":
        return GEMM
    shape = layer.data.shape
    return MATMUL if shape is not None and len(shape) == 2 else None
