from qdqtool.trt.passes._infra import (
    ELIMINATING_SLICE,
    REPLACING_SLICE,
    LayerKind,
    Network,
    Pass,
    assumed,
    seen,
)

VIEW = seen(
    "view",
    "A Slice with steps of 1 becomes a view of the tensor that it is cut from.",
    "yolov8-orin-trt8412-excerpts:237",
    "bevfusion-camera-orin-trt8502:882",
    "bevfusion-camera-rtx3080ti-trt8600:5818",
    about=(ELIMINATING_SLICE,),
)

COPY = assumed(
    "copy",
    "A Slice becomes a copy if a Softmax reads it.",
    "bevfusion-camera-orin-trt8502:881 and bevfusion-camera-rtx3080ti-trt8600:5817: Slice_895 "
    "before a Softmax is copied, Slice_901 of the same tensor before a Transpose is a view. That "
    "the consumer decides is the simplest rule that fits; a Softmax that reads a view, or a copy "
    "before another consumer, would refute it",
    about=(REPLACING_SLICE,),
)


class SliceRemoval(Pass):
    """Turns a Slice into a view of its input, or into a copy before a Softmax.

    A Slice with a step of more than 1, or of a network input, remains a layer (assumed). TensorRT's
    log does not name this pass.
    """

    cases = (VIEW, COPY)
    anonymous_lines = (ELIMINATING_SLICE, REPLACING_SLICE)

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.SLICE):
            if layer.has_steps or layer.in_myelin or layer.data.producer is None:
                continue
            source, view = layer.data.name, layer.out.name
            if any(consumer.kind == LayerKind.SOFTMAX for consumer in layer.out.consumers):
                self.fire(
                    COPY, layer, REPLACING_SLICE, layer.name, f"{source} to {view}", logged_pass=""
                )
                layer.becomes_copy = True
                continue
            target = f"{view} from {view} to {source}"
            self.fire(VIEW, layer, ELIMINATING_SLICE, layer.name, target, logged_pass="")
            layer.is_eliminated = True
            layer.out.view_of = layer.data
