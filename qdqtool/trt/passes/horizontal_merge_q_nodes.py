"""HorizontalMergeQNodes."""

from collections import Counter

from qdqtool.trt.passes._infra import (
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
from qdqtool.trt.surroundings import check_equal_scales
from qdqtool.trt.trace import ELIMINATING, REMOVING

EARLIER = seen(
    "earlier-survives",
    "Of equal Qs on a tensor the earlier one survives.",
    "resnet18-qat-rtx2000-trt8510:2541",
    "resnet18-a100-qat",
    "bevfusion-camera-orin-trt8502:267",
    "bevfusion-camera-rtx3080ti-trt8600:5203",
)
LATER = assumed(
    "later-survives",
    "Where the network's tail goes to Myelin, the later one of equal Qs survives.",
    "yolo-resnet18-orin-trt8502 (5 merges); that the new listing behind Myelin is the reason is assumed. It changes "
    "names only",
)
CLONE = seen(
    "clone",
    "A Concat's clone is merged into the Q of the model.",
    "yolov8-orin-trt8412-excerpts:175",
    about=("Concat",),
)
OUTPUT = assumed(
    "network-output",
    "A Q that writes a network output stays; others are merged into it.",
    "an output has a name and memory of its own",
)
UNKNOWN = assumed(
    "unknown-scale", "A scale that is not known counts as different.", "its data is not available"
)


class HorizontalMergeQNodes(Pass):
    """Merges Qs that read the same tensor with the same scale; with different scales both stay."""

    cases = (EARLIER, LATER, CLONE, OUTPUT, UNKNOWN)
    anonymous_lines = (ELIMINATING, REMOVING)

    def apply(self, network: Network) -> None:
        qs = [q for q in network.layers_to_visit(LayerKind.QUANTIZE) if len(q.data.consumers) > 1]
        read = Counter(q.data for q in qs)
        by_tensor: dict[Tensor, list[Layer]] = {}
        for q in sorted(
            (q for q in qs if read[q.data] > 1), key=lambda q: _precedence(q, network.was_relisted)
        ):
            by_tensor.setdefault(q.data, []).append(q)
        for tensor, group in by_tensor.items():
            self._merge(network, tensor, group)

    def _merge(self, network: Network, tensor: Tensor, group: list[Layer]) -> None:
        kept: list[Layer] = []
        known: dict[object, Layer] = {}
        merged: dict[Layer, list[Layer]] = {}
        for q in group:
            key = q.quant.key if q.quant is not None else None
            survivor = known.get(key) if key is not None else None
            if survivor is None or q.out.is_output:
                kept.append(q)
                known.setdefault(key, q)
            else:
                merged.setdefault(survivor, []).append(q)
        for survivor, others in merged.items():
            self._eliminate(network, survivor, others)
        differ = check_equal_scales(self.name, node_name(kept[0]), tensor, kept)
        if differ is not None:
            for q in kept if None in differ.scales else ():
                q.add_cases(UNKNOWN)
            self.refuse(differ)

    def _eliminate(self, network: Network, survivor: Layer, others: list[Layer]) -> None:
        """One heading, then what is eliminated, then what is removed."""
        cases = [_case(survivor, q, network.was_relisted) for q in others]
        self.fire_running(cases[0], survivor)
        for case, q in zip(cases, others, strict=True):
            self.fire(case, survivor, ELIMINATING, q.name, survivor.name)
        for case, q in zip(cases, others, strict=True):
            self.fire(case, survivor, REMOVING, q.name)
            survivor.merge_quantizer(node_name(q), q)
            survivor.add_cases(*q.cases)  # which of them is left depends on the order of the nodes
        network.retarget(others[0].out, survivor.out, *(q.out for q in others[1:]))
        for q in others:
            network.remove(q)
        lists = {id(q.nodes): q.nodes for q in (survivor, *others)}  # copies of one Q share theirs
        survivor.nodes = list(dict.fromkeys(node for nodes in lists.values() for node in nodes))


def _case(survivor: Layer, other: Layer, relisted: bool) -> Case:
    if survivor.out.is_output:
        return OUTPUT
    if other.is_clone and not survivor.is_clone:
        return CLONE
    return LATER if relisted and not survivor.is_clone else EARLIER


def _precedence(q: Layer, relisted: bool) -> tuple[bool, bool, int]:
    return not q.out.is_output, q.is_clone, q.id if q.is_clone or not relisted else -q.id
