"""MatMulToConvTransform."""

from __future__ import annotations

from dataclasses import replace

from qdqtool.evidence import assumed, seen
from qdqtool.operators import INSERTED_SHUFFLE, LayerKind
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, dq_of
from qdqtool.trt.trace import CONVERT_TYPE

GEMM = seen(
    "gemm", "A Gemm with quantized constant weights becomes a 1x1 convolution, with reshapes around it.",
    "resnet18-qat-rtx2000-trt8510:2531", "resnet18-a100-qat", "resnet18-a100-qat-residual",
    "resnet18-a100-qat-residual-qgap",
)
MATMUL = assumed(
    "matmul", "A MatMul of a matrix with constant quantized weights becomes one as well; a batched one stays.",
    "as the Gemm; an engine that names such a MatMul as a MatrixMultiply layer would refute it",
)


class MatMulToConvTransform(Pass):
    """Turns a fully connected layer with quantized weights into a 1x1 convolution."""

    cases = (GEMM, MATMUL)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.MATRIX_MULTIPLY):
            if not layer.weights.constant or len(layer.inputs) != 2 or dq_of(layer.inputs[1]) is None:
                continue
            shape = layer.data.shape
            case = GEMM
            if layer.op == "MatMul":
                if shape is None or len(shape) != 2:
                    continue
                case = MATMUL
            self.running(case, layer)
            self.fire(case, layer, CONVERT_TYPE, layer.name, "MATRIX_MULTIPLY to CONVOLUTION")
            network.set_kind(layer, LayerKind.CONVOLUTION)
            layer.weights = replace(
                layer.weights, kernel=(1, 1), strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), from_matmul=True
            )
            self._surround(network, layer)

    @staticmethod
    def _surround(network: Network, layer: Layer) -> None:
        for position, what in ((1, "transpose_before"), (0, "reshape_before")):
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
