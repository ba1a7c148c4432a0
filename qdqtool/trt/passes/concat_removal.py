from qdqtool.trt.passes._infra import (
    COPY_STOMPING,
    COPY_STRIDING,
    ELIMINATING_CONCAT,
    RETARGETING,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    seen,
)

DIRECT = seen(
    "direct",
    "The inputs of a Concat are written straight into its output.",
    "yolo-resnet18-orin-trt8502:5779",
    "yolov8-orin-trt8412-excerpts:240",
)
RESIZE = seen(
    "resize-copied",
    "The output of a Resize is copied into the Concat, because a Resize does not support striding.",
    "yolo-resnet18-orin-trt8502:5780",
    "bevfusion-camera-orin-trt8502:889",
    "bevfusion-camera-rtx3080ti-trt8600:5825",
    about=("Resize", COPY_STRIDING),
)
DECONVOLUTION = seen(
    "deconvolution-copied",
    "The output of a deconvolution is copied into the Concat.",
    "centerpoint-a100-trt823-fp16:1755",
    about=("ConvTranspose", COPY_STRIDING),
)
SHARED = assumed(
    "shared-copied",
    "The output of a convolution is copied into the Concat if other layers read it as well.",
    "bevfusion-camera-orin-trt8502:888 and bevfusion-camera-rtx3080ti-trt8600:5824 copy all four "
    "inputs of this kind, and retarget the outputs of convolutions that only the Concat reads "
    "(lines 885 and 886); a log that retargets an input that another layer reads as well would "
    "refute it",
    about=("Conv", COPY_STRIDING),
)
STOMPING = assumed(
    "stomping",
    "An input is copied if it is a view of another tensor or was already written into a Concat. "
    "The first input that comes from a network input or a constant, with only conversions and "
    "reshapes between, is copied too.",
    "yolov8-orin-trt8412-excerpts copies an input (line 241) and retargets the next one (242); "
    "builds of 8.5.2 and 8.6.0 copy the first of two quantized network inputs, and retarget the "
    "second one and the output of a convolution; that these are the conditions is assumed",
    about=(COPY_STOMPING,),
)


class ConcatRemoval(Pass):
    """Eliminates a Concat: the producers of the inputs write directly into the output.

    An input is copied if its producer cannot write into the output. TensorRT's log does not name
    this pass.
    """

    cases = (DIRECT, RESIZE, DECONVOLUTION, SHARED, STOMPING)
    anonymous_lines = (ELIMINATING_CONCAT, RETARGETING, COPY_STRIDING, COPY_STOMPING)

    def _apply(self, network: Network) -> None:
        retargeted: set[Tensor] = set()
        for concat in reversed(network.layers_of_kind(LayerKind.CONCATENATION)):
            if concat.in_myelin:
                continue
            self.fire(DIRECT, concat, ELIMINATING_CONCAT, concat.name, logged_pass="")
            concat.is_eliminated = True
            copies = []
            external = next((t for t in concat.inputs if _is_external_tensor(t.producer)), None)
            for tensor in concat.inputs:
                kind, case = _choose_line(tensor, retargeted, external)
                self.fire(case, concat, kind, tensor.name, concat.out.name, logged_pass="")
                if kind == RETARGETING:
                    retargeted.add(tensor)
                    tensor.view_of = concat.out
                else:
                    copies.append((f"{tensor.name} copy", tensor))
            concat.copies = tuple(copies)


def _choose_line(
    tensor: Tensor, retargeted: set[Tensor], external: Tensor | None
) -> tuple[str, Case]:
    """Return the kind of the line that TensorRT logs for an input of a Concat, and the case.

    ``retargeted`` are the tensors that their producers write directly into the output of a Concat.
    ``external`` is the first input that comes from a network input or a constant, if any.
    """
    if tensor.producer_of_kind(LayerKind.RESIZE):
        return COPY_STRIDING, RESIZE
    if tensor.producer_of_kind(LayerKind.DECONVOLUTION):
        return COPY_STRIDING, DECONVOLUTION
    if tensor.producer_of_kind(LayerKind.CONVOLUTION) and len(tensor.consumers) > 1:
        return COPY_STRIDING, SHARED
    producer = tensor.producer
    is_view = producer is not None and producer.is_eliminated
    if is_view or tensor in retargeted or tensor is external:
        return COPY_STOMPING, STOMPING
    return RETARGETING, DIRECT


def _is_external_tensor(producer: Layer | None) -> bool:
    """Return whether a tensor is a network input or a constant, also if converted or reshaped.

    ``producer`` is the layer that writes the tensor; None for a network input.
    """
    while producer is not None and producer.inputs and _keeps_values(producer):
        producer = producer.data.producer
    return producer is None or producer.kind == LayerKind.CONSTANT


def _keeps_values(layer: Layer) -> bool:
    if layer.kind == LayerKind.SHUFFLE:
        return not layer.shuffling.reorders_values
    return layer.kind == LayerKind.COPY
