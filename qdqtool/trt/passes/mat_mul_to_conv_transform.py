"""MatMulToConvTransform."""

import math
from dataclasses import replace

from qdqtool.model.operators import case_of
from qdqtool.trt.layers import (
    Dims,
    Layer,
    Tensor,
    constant_before,
    create_shuffle,
    dq_before,
    rank_after,
    rank_before,
)
from qdqtool.trt.passes._infra import Case, LayerKind, Network, Pass, documented
from qdqtool.trt.trace import CONVERT_TYPE

GEMM = case_of("Gemm")
MATMUL = documented(
    "matmul",
    "A MatMul with constant quantized weights becomes one as well, whatever the rank of its data.",
    "engines that users list: Layer(CaskConvolution): pfn_layers.0.linear.weight + pfe_QuantizeLinear_7 + "
    "pfe_MatMul_10, of Int8(1,10,8000,20) (NVIDIA/TensorRT#2627, 8.4.1), and a matrix (NVIDIA/TensorRT#3266). Data of "
    "four dimensions is turned to channels first: that excerpt has no shuffle for the model's own Transposes around. "
    "Data of three becomes rows, as in float (NVIDIA/TensorRT#3679)",
    about=("MatMul",),
)
PLAIN = documented(
    "plain-gemm",
    "A Gemm with plain constant weights becomes one too, and takes bias and Relu.",
    "engine names of an 8.6.1 build: /classifier.2/Gemm + /classifier.3/Relu, and NoOp reshape_after_/last_layer/Gemm",
    about=("Gemm", "Relu"),
)
_IMAGE_RANK = 4
_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


class MatMulToConvTransform(Pass):
    """Turns a fully connected layer with constant weights into a 1x1 convolution."""

    cases = (GEMM, MATMUL, PLAIN)
    anonymous_lines = (CONVERT_TYPE,)

    def apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.MATRIX_MULTIPLY):
            case = _case(layer)
            if case is None:
                continue
            self.fire_running(case, layer)
            self.fire(case, layer, CONVERT_TYPE, layer.name, "MATRIX_MULTIPLY to CONVOLUTION")
            network.set_kind(layer, LayerKind.CONVOLUTION)
            layer.weights = replace(
                layer.weights,
                kernel=(1, 1),
                strides=(1, 1),
                pads=(0, 0, 0, 0),
                dilations=(1, 1),
                from_matmul=True,
                in_layer=case is PLAIN,
            )
            if case is PLAIN:
                constant = constant_before(layer.inputs[1])
                network.drop_input(layer, 1)
                if constant is not None:
                    network.remove_if_unused(constant)
            self._surround(network, layer)

    @staticmethod
    def _surround(network: Network, layer: Layer) -> None:
        images = len(layer.data.shape or ()) == _IMAGE_RANK
        sides = ((1, "transpose_before"), (0, "reshape_before"))
        for position, what in sides[2 - len(layer.inputs) :]:
            turn = _turn_of(layer) if position == 1 else None
            if (
                turn is not None
            ):  # it gives a convolution's order already: the listing of #2627 has no shuffle
                network.set_input(layer, 1, turn.data)
                layer.nodes.extend(turn.nodes)
                network.remove(turn)
                continue
            shuffle = create_shuffle(f"{what}_{layer.name}", rank_before(layer.rank, position))
            shuffle.shuffling.before_matmul, shuffle.shuffling.reorders_values = (
                True,
                position == 1 or images,
            )
            source = layer.inputs[position]
            between = Tensor(f"{shuffle.name}_out_tensor", source.source, source.elem_type)
            if position == 0:
                shuffle.shuffling.perm = _TO_CHANNELS_FIRST if images else None
                between.shape = _rows(source.shape, images)
            network.insert_before(layer, position, shuffle, between)
        after = create_shuffle(f"reshape_after_{layer.name}", rank_after(layer.rank))
        after.shuffling.after_matmul, after.shuffling.reorders_values = True, images
        after.shuffling.perm = _TO_CHANNELS_LAST if images else None
        out = layer.out
        raw = Tensor(f"{layer.name}_out_tensor", out.source, out.elem_type)
        raw.shape = _rows(out.shape, images) if images else None
        network.set_output(layer, raw)
        network.add(after, [raw], [out])


def _rows(shape: Dims | None, images: bool) -> Dims | None:
    """The shape that a convolution reads: the last dimension as channels, those in front as an image or as rows."""
    if shape is None:
        return None
    if images:
        return tuple(shape[i] for i in _TO_CHANNELS_FIRST)
    rows = math.prod(d for d in shape[:-1] if d is not None) if None not in shape[:-1] else None
    return (rows, *shape[-1:], 1, 1)


def _turn_of(layer: Layer) -> Layer | None:
    """The Transpose that alone is between a MatMul and the DQ of its weights: a linear layer as PyTorch exports."""
    turn = layer.inputs[1].producer_of_kind(LayerKind.SHUFFLE) if layer.op == "MatMul" else None
    if turn is None or turn.shuffling.perm != (1, 0) or dq_before(turn.data) is None:
        return None
    return turn if turn.out.single_consumer() else None


def _case(layer: Layer) -> Case | None:
    """The case of a matrix product, None for one that stays what it is."""
    if not layer.weights.constant or len(layer.inputs) != 2 or layer.in_myelin:
        return None
    if dq_before(layer.inputs[1]) is None and _turn_of(layer) is None:
        plain = (
            layer.op == "Gemm"
            and constant_before(layer.inputs[1]) is not None
            and dq_before(layer.data) is None
        )
        return PLAIN if plain else None
    if layer.op != "MatMul":
        return GEMM
    return MATMUL if len(layer.weights.dims) == 2 else None
