"""HorizontalMergeQNodes."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, node_name, weaken
from qdqtool.trt.trace import ELIMINATING, REMOVING
from qdqtool.types import Evidence


class HorizontalMergeQNodes(Pass):
    """Merges Qs that read the same tensor with the same scale.

    Cases:
        * One Q survives, the readers of the others read it instead. Of two Qs of the model it is the earlier one
          (resnet18-qat-rtx2000-trt8510: 8 merges, resnet18-a100-qat: 3), but the later one in
          yolo-resnet18-orin-trt8502 (5 merges), whose tail goes to Myelin, after which the network is listed anew:
          that this is the reason is assumed. Which one survives changes names only.
        * A Concat's clone is merged into the original Q (yolov8-orin-trt8412-excerpts).
        * Different scales: both stay (yolo-resnet18-orin-trt8502, ``layer2.1/relu_1``).
        * A Q that writes a network output stays; others are merged into it (assumed).
        * A scale that is not known (its data is not at hand) counts as different, and the outcome as assumed.
    """

    def apply(self, network: Network) -> None:
        by_tensor: dict[int, tuple[Tensor, list[Layer]]] = {}
        relisted = network.relisted
        for q in sorted(network.near(net.QUANTIZE), key=lambda q: _precedence(q, relisted)):
            by_tensor.setdefault(id(q.data), (q.data, []))[1].append(q)
        for tensor, group in by_tensor.values():
            if len(group) > 1:
                self._merge(network, tensor, group)

    def _merge(self, network: Network, tensor: Tensor, group: list[Layer]) -> None:
        kept: list[Layer] = []
        known: dict[object, Layer] = {}
        for q in group:
            key = q.quant.key if q.quant is not None else None
            survivor = known.get(key) if key is not None else None
            if survivor is None or q.out.is_output:
                kept.append(q)
                known.setdefault(key, q)
                continue
            self.running(survivor)
            self.event(ELIMINATING, q.name, survivor.name)
            self.event(REMOVING, q.name)
            survivor.nodes.extend(q.nodes)
            network.retarget(q.out, survivor.out)
            network.remove(q)
        if len(kept) > 1 and (len(known) > 1 or None in known):
            scales = tuple(None if k.quant is None or k.quant.scale is None else k.quant.scale.tolist() for k in kept)
            if None in scales:
                for q in kept:
                    weaken(q, Evidence.ASSUMED)
            self.refuse(
                kept[0], "scales-differ", tensor=tensor.source, quantizers=tuple(map(node_name, kept)), scales=scales
            )


def _precedence(q: Layer, relisted: bool) -> tuple[bool, bool, int]:
    clone = bool(q.attrs.get("clone"))
    return not q.out.is_output, clone, q.id if clone or not relisted else -q.id

