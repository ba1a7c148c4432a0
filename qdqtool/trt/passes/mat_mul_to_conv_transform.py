import math
from dataclasses import replace

from qdqtool.trt.passes._infra import (
    CONVERT_TYPE,
    Case,
    Dims,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    constant_before,
    create_shuffle,
    documented,
    dq_before,
    find_case,
    rank_after,
    rank_before,
)

GEMM = find_case("Gemm")
MATMUL = documented(
    "matmul",
    "A MatMul with constant quantized weights becomes a 1x1 convolution, for data of any rank.",
    "engine listings of users: Layer(CaskConvolution): pfn_layers.0.linear.weight + "
    "pfe_QuantizeLinear_7 + pfe_MatMul_10, which reads Int8(1,10,8000,20) (NVIDIA/TensorRT#2627, "
    "8.4.1), and one that reads a matrix (NVIDIA/TensorRT#3266). Data of four dimensions is "
    "transposed to channels first: the first listing has no shuffle for the model's Transposes "
    "around the MatMul. Data of three dimensions becomes rows, as in float builds "
    "(NVIDIA/TensorRT#3679)",
    about=("MatMul",),
)
PLAIN = documented(
    "plain-gemm",
    "A Gemm with float constant weights becomes a 1x1 convolution, which fuses bias and Relu.",
    "engine names of an 8.6.1 build: /classifier.2/Gemm + /classifier.3/Relu, and NoOp "
    "reshape_after_/last_layer/Gemm",
    about=("Gemm", "Relu"),
)
_IMAGE_RANK = 4
_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


class MatMulToConvTransform(Pass):
    """Turns a fully connected layer with constant weights into a 1x1 convolution."""

    cases = (GEMM, MATMUL, PLAIN)
    anonymous_lines = (CONVERT_TYPE,)

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.MATRIX_MULTIPLY):
            case = _choose_case(layer)
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
            _insert_shuffles(network, layer)


def _choose_case(layer: Layer) -> Case | None:
    if not layer.weights.constant or len(layer.inputs) != 2 or layer.in_myelin:
        return None
    if dq_before(layer.inputs[1]) is None and _weights_transpose(layer) is None:
        return PLAIN if _is_plain_gemm(layer) else None
    if layer.op != "MatMul":
        return GEMM
    return MATMUL if len(layer.weights.dims) == 2 else None


def _is_plain_gemm(layer: Layer) -> bool:
    has_constant_weights = constant_before(layer.inputs[1]) is not None
    return layer.op == "Gemm" and has_constant_weights and dq_before(layer.data) is None


def _weights_transpose(layer: Layer) -> Layer | None:
    """Return the Transpose between the DQ of the weights and a MatMul.

    PyTorch exports linear layers in this form. None for any other form, or if another layer reads
    the Transpose too.
    """
    if layer.op != "MatMul":
        return None
    transpose = layer.inputs[1].producer_of_kind(LayerKind.SHUFFLE)
    if transpose is None or transpose.shuffling.perm != (1, 0):
        return None
    if dq_before(transpose.data) is None or not transpose.out.single_consumer():
        return None
    return transpose


def _insert_shuffles(network: Network, layer: Layer) -> None:
    is_image = len(layer.data.shape or ()) == _IMAGE_RANK
    if len(layer.inputs) > 1:
        _prepare_weights(network, layer)
    shuffle = create_shuffle(f"reshape_before_{layer.name}", rank_before(layer.rank))
    shuffle.shuffling.before_matmul, shuffle.shuffling.reorders_values = True, is_image
    shuffle.shuffling.perm = _TO_CHANNELS_FIRST if is_image else None
    _insert_before(network, layer, 0, shuffle)
    layer.data.shape = _convolution_shape(shuffle.data.shape, is_image)
    after = create_shuffle(f"reshape_after_{layer.name}", rank_after(layer.rank))
    after.shuffling.after_matmul, after.shuffling.reorders_values = True, is_image
    after.shuffling.perm = _TO_CHANNELS_LAST if is_image else None
    out = layer.out
    product = Tensor(f"{layer.name}_out_tensor", out.source, out.elem_type)
    product.shape = _convolution_shape(out.shape, is_image) if is_image else None
    network.set_output(layer, product)
    network.add(after, [product], [out])


def _prepare_weights(network: Network, layer: Layer) -> None:
    """Transpose the weights, or remove the model's own Transpose of the weights.

    Weights before the Transpose already have the order of a convolution: the listing of
    NVIDIA/TensorRT#2627 has no shuffle.
    """
    transpose = _weights_transpose(layer)
    if transpose is not None:
        network.set_input(layer, 1, transpose.data)
        layer.nodes.extend(transpose.nodes)
        network.remove(transpose)
        return
    shuffle = create_shuffle(f"transpose_before_{layer.name}", rank_before(layer.rank, 1))
    shuffle.shuffling.before_matmul = shuffle.shuffling.reorders_values = True
    _insert_before(network, layer, 1, shuffle)


def _insert_before(network: Network, layer: Layer, position: int, shuffle: Layer) -> None:
    source = layer.inputs[position]
    out = Tensor(f"{shuffle.name}_out_tensor", source.source, source.elem_type)
    network.insert_before(layer, position, shuffle, out)


def _convolution_shape(shape: Dims | None, is_image: bool) -> Dims | None:
    """Return the shape of a product's data or result after the change to a convolution.

    An image [n, height, width, channels] becomes [n, channels, height, width]. Other data becomes
    [rows, channels, 1, 1]. None if the shape is unknown.
    """
    if shape is None:
        return None
    if is_image:
        return tuple(shape[i] for i in _TO_CHANNELS_FIRST)
    rows = math.prod(d for d in shape[:-1] if d is not None) if None not in shape[:-1] else None
    return (rows, *shape[-1:], 1, 1)
