"""ConvActPoolFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import FUSING


class ConvActPoolFusion(Pass):
    """Joins the stem convolution and the MaxPool behind it.

    Cases:
        * INT8 to INT8 convolution of an image (at most 4 channels), stride 2 -> MaxPool 3x3, stride 2, single reader
          (resnet18-qat-rtx2000-trt8510, resnet18-a100-qat-residual and -qgap).
        * TensorRT 8.0 keeps the pooling apart (centernet-resnet34-qat-trt80).
    """

    def apply(self, network: Network) -> None:
        if not self.target.fuses_stem_pool:
            return
        for conv in network.of_kind(net.CONVOLUTION):
            pool = conv.out.only_reader()
            if not (conv.int8 and conv.int8_out) or pool is None or pool.kind != net.POOLING:
                continue
            if not _is_stem(conv) or not _is_stem_pool(pool):
                continue
            self.running(conv)
            self.event(FUSING, conv.name, pool.name)
            network.absorb_reader(conv, pool, f"{conv.name} + {pool.name}")
            conv.attrs["pooled"] = True


def _is_stem(conv: Layer) -> bool:
    dims = conv.attrs.get("weight_dims", ())
    return (
        len(dims) == 4
        and isinstance(dims[1], int)
        and dims[1] <= 4
        and conv.attrs.get("group") == 1
        and tuple(conv.attrs.get("strides", ())) == (2, 2)
        and not conv.attrs.get("pointwise")
    )


def _is_stem_pool(pool: Layer) -> bool:
    return (
        pool.attrs.get("pooling") == "MAX"
        and tuple(pool.attrs.get("kernel", ())) == (3, 3)
        and tuple(pool.attrs.get("strides", ())) == (2, 2)
    )
