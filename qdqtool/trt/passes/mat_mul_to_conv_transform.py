"""MatMulToConvTransform."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, dq_of, weaken
from qdqtool.trt.trace import CONVERT_TYPE
from qdqtool.types import Evidence


class MatMulToConvTransform(Pass):
    """Turns a fully connected layer with quantized weights into a 1x1 convolution.

    Cases:
        * Gemm of two matrices, weights constant behind Q and DQ: MATRIX_MULTIPLY to CONVOLUTION, with
          ``reshape_before_``, ``transpose_before_`` and ``reshape_after_`` shuffles around it
          (resnet18-qat-rtx2000-trt8510; the engines of resnet18-a100-qat* name the same layers).
        * MatMul of a matrix with constant quantized weights alike (assumed). A batched MatMul stays as it is.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.MATRIX_MULTIPLY):
            if not layer.attrs.get("constant_weights") or len(layer.inputs) != 2 or dq_of(layer.inputs[1]) is None:
                continue
            shape = layer.data.shape
            if layer.op == "MatMul":
                if shape is None or len(shape) != 2:
                    continue
                weaken(layer, Evidence.ASSUMED)
            self.running(layer)
            self.event(CONVERT_TYPE, layer.name, "MATRIX_MULTIPLY to CONVOLUTION")
            network.set_kind(layer, net.CONVOLUTION)
            layer.attrs.update(kernel=(1, 1), strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), from_matmul=True)
            self._surround(network, layer)

    @staticmethod
    def _surround(network: Network, layer: Layer) -> None:
        for position, what in ((1, "transpose_before"), (0, "reshape_before")):
            shuffle = Layer(net.SHUFFLE, f"{what}_{layer.name}")
            shuffle.rank = (layer.rank[0] - 0.25, position)
            shuffle.attrs.update(inserted=True, moves=position == 1)
            source = layer.inputs[position]
            between = Tensor(f"{shuffle.name}_out_tensor", source.source, source.elem_type)
            if position == 0 and source.shape is not None:
                between.shape = (*source.shape, 1, 1)
            network.insert_before(layer, position, shuffle, between)
        after = Layer(net.SHUFFLE, f"reshape_after_{layer.name}")
        after.rank = (layer.rank[0] + 0.25, 0)
        after.attrs["squeeze_after"] = True
        out = layer.out
        raw = Tensor(f"{layer.name}_out_tensor", out.source, out.elem_type)
        network.set_output(layer, raw)
        network.add(after, [raw], [out])
