from qdqtool.trt.neighbors import check_equal_scales
from qdqtool.trt.passes._infra import (
    ELIMINATING,
    REMOVING,
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    node_name,
    seen,
)
from qdqtool.trt.targets import Target

EARLIER = seen(
    "earlier-survives",
    "Of several Qs that quantize a tensor with equal scales, the first one remains.",
    "resnet18-qat-rtx2000-trt8510:2541",
    "resnet18-a100-qat",
    "bevfusion-camera-orin-trt8502:267",
    "bevfusion-camera-rtx3080ti-trt8600:5203",
)
LATER = assumed(
    "later-survives",
    "If the network's tail goes to Myelin, the last one of several equal Qs remains.",
    "5 merges in yolo-resnet18-orin-trt8502; the cause is assumed: Myelin makes TensorRT list the "
    "layers in a new order. Only names depend on this case",
)
CLONE = seen(
    "clone",
    "A copy of a Q before a Concat is merged into an equal Q of the model.",
    "yolov8-orin-trt8412-excerpts:175",
    about=("Concat",),
)
OUTPUT = assumed(
    "network-output",
    "A Q that writes a network output remains, and equal Qs are merged into it.",
    "an output has a name and memory of its own",
)
UNKNOWN = assumed(
    "unknown-scale", "A Q with an unknown scale is not merged.", "the data of the scale is missing"
)


APART = seen(
    "beside-float",
    "Equal Qs of the model are not merged if another layer reads the tensor as float. A Concat "
    "counts as such a layer even if its Q is copied to the tensor later. The copies are merged.",
    "unet-resnet50-orinnano-trt10162",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="in the first build, conv1 and the downsample convolution of layer2.0, 3.0 and 4.0 keep "
    "separate Qs, because a Concat reads their input; the second build merges clones of one Q; 8.x "
    "merges all Qs (yolo-resnet18-orin-trt8502)",
)
APART_ELSEWHERE = assumed(
    "beside-float-elsewhere",
    "Also on TensorRT 10.0 to 10.13 and 11, equal Qs are not merged if another layer reads the "
    "tensor as float.",
    "no build of these versions shows such Qs; the measured times of five YOLO11n engines on 10.3 "
    "fit both merged and separate Qs",
)


MAX_MERGED = 64  # maximum number of quantizers that a Q lists as merged into it


class HorizontalMergeQNodes(Pass):
    """Merges Qs of equal scale that read one tensor.

    On some targets, Qs of the model remain separate if another layer reads the tensor as float.
    """

    cases = (EARLIER, LATER, CLONE, OUTPUT, UNKNOWN, APART, APART_ELSEWHERE)
    anonymous_lines = (ELIMINATING, REMOVING)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # Tensors that a layer other than a Q reads, in this round or an earlier one.
        self._read_as_float: set[Tensor] = set()

    def _apply(self, network: Network) -> None:
        quantizers = network.layers_to_visit(LayerKind.QUANTIZE)
        shared = sorted(
            (q for q in quantizers if len(q.data.consumers) > 1),
            key=lambda q: _sort_key(q, network.was_relisted),
        )
        by_tensor: dict[Tensor, list[Layer]] = {}
        for q in shared:
            by_tensor.setdefault(q.data, []).append(q)
        for tensor, group in by_tensor.items():
            if len(tensor.consumers) > len(group) and not self.target.merges_beside_floats:
                self._read_as_float.add(tensor)
            if len(group) > 1:
                self._merge_qs(network, tensor, group)

    def _merge_qs(self, network: Network, tensor: Tensor, group: list[Layer]) -> None:
        remaining: list[Layer] = []
        survivors: dict[object, Layer] = {}  # by scale and zero point
        merged: dict[Layer, list[Layer]] = {}
        for q in group:
            key = q.quant.key if q.quant is not None else None
            survivor = survivors.get(key) if key is not None else None
            is_apart = tensor in self._read_as_float and not q.is_clone
            if survivor is not None and is_apart:
                q.add_cases(APART if self.target.has_seen_merges else APART_ELSEWHERE)
            if survivor is None or q.out.is_output or is_apart:
                remaining.append(q)
                survivors.setdefault(key, q)
            else:
                merged.setdefault(survivor, []).append(q)
        for survivor, others in merged.items():
            self._merge_into_survivor(network, survivor, others)
        self._check_equal_scales(tensor, remaining)

    def _check_equal_scales(self, tensor: Tensor, quantizers: list[Layer]) -> None:
        different = check_equal_scales(self.name, node_name(quantizers[0]), tensor, quantizers)
        if different is not None:
            if None in different.scales:
                for q in quantizers:
                    q.add_cases(UNKNOWN)
            self.refuse(different)

    def _merge_into_survivor(self, network: Network, survivor: Layer, others: list[Layer]) -> None:
        """Merge Qs into another Q of the same tensor, and emit the lines of TensorRT's log.

        TensorRT logs one Running line, then an Eliminating line for each Q, then a Removing line
        for each.
        """
        cases = [_choose_case(survivor, q, network.was_relisted) for q in others]
        self.fire_running(cases[0], survivor)
        for case, q in zip(cases, others, strict=True):
            self.fire(case, survivor, ELIMINATING, q.name, survivor.name)
        for case, q in zip(cases, others, strict=True):
            self.fire(case, survivor, REMOVING, q.name)
            merged = (*survivor.merged_quantizers, (node_name(q), q.path), *q.merged_quantizers)
            survivor.merged_quantizers = merged[:MAX_MERGED]
            # The order of the nodes decides which Q remains. It receives the cases of all merged
            # Qs, so that the evidence does not depend on this order.
            survivor.add_cases(*q.cases)
        network.redirect_consumers(others[0].out, survivor.out, *(q.out for q in others[1:]))
        for q in others:
            network.remove(q)
        survivor.nodes = _collect_nodes([survivor, *others])


def _collect_nodes(quantizers: list[Layer]) -> list[str]:
    """Return the ONNX nodes of Qs, each node once.

    Copies of a Q share one list of nodes, which is read only once to save time.
    """
    lists = {id(q.nodes): q.nodes for q in quantizers}
    nodes: dict[str, None] = {}
    for names in lists.values():
        nodes.update(dict.fromkeys(names))
    return list(nodes)


def _choose_case(survivor: Layer, other: Layer, was_relisted: bool) -> Case:
    if survivor.out.is_output:
        return OUTPUT
    if other.is_clone and not survivor.is_clone:
        return CLONE
    return LATER if was_relisted and not survivor.is_clone else EARLIER


def _sort_key(q: Layer, was_relisted: bool) -> tuple[bool, bool, int]:
    is_later_first = was_relisted and not q.is_clone
    return not q.out.is_output, q.is_clone, -q.id if is_later_first else q.id
