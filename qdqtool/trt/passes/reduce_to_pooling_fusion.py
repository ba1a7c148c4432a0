from qdqtool.trt.passes._infra import (
    SWAP_TYPE,
    LayerKind,
    Network,
    Pass,
    PoolingWindow,
    assumed,
    documented,
    seen,
)

AVERAGE = seen(
    "global-average",
    "A GlobalAveragePool becomes a pooling.",
    "resnet18-qat-rtx2000-trt8510:2487",
    about=("GlobalAveragePool",),
)
MAXIMUM = assumed(
    "global-max",
    "A GlobalMaxPool becomes a pooling.",
    "as GlobalAveragePool; a REDUCE layer would refute it",
    about=("GlobalMaxPool",),
)
MEAN = assumed(
    "mean",
    "A ReduceMean over height and width that keeps the reduced dimensions becomes a pooling. Other "
    "ReduceMeans remain.",
    "developer guide, Reduce fusion; not seen with Q/DQ",
    about=("ReduceMean",),
)
REDUCE_MAX = documented(
    "reduce-max",
    "A ReduceMax over width, height or both that keeps the reduced dimensions becomes a pooling.",
    "the engine listed in NVIDIA/TensorRT issue 2627 (8.4.1): Layer(CudnnPooling): "
    "pfe_ReduceMax_15, over the width",
    about=("ReduceMax",),
)
_CASES = {"GlobalAveragePool": AVERAGE, "GlobalMaxPool": MAXIMUM, "ReduceMax": REDUCE_MAX}


class ReduceToPoolingFusion(Pass):
    """Turns a mean or maximum over height, width or both into a pooling."""

    cases = (AVERAGE, MAXIMUM, MEAN, REDUCE_MAX)
    anonymous_lines = (SWAP_TYPE,)
    converted_kind = "REDUCE"

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.REDUCE):
            if layer.possible_pooling is not None and not layer.in_myelin:
                layer.window = PoolingWindow(layer.possible_pooling)
                self.convert_kind(network, _CASES.get(layer.op, MEAN), layer, LayerKind.POOLING)
