"""What of a detection head to leave float so that boxes survive INT8 (the head: :mod:`qdqtool.model.heads`).

Measured on two trained models, quantizing the DFL and the box outputs costs 0.06 to 0.10 mAP50-95, quantizing the
class outputs as well costs 0.005; hence the default ``box``.

A network without a DFL that ends in two or more bare convolutions is taken for a detector of another kind (YOLOv5,
CenterNet, SSD). Boxes and scores cannot be distinguished there: ``box`` leaves all of its last convolutions float, as
NVIDIA's cuDLA-samples and Ultralytics do.

In a DETR, what makes boxes, reference points and sampling offsets stays float, with the MLPs in front and the Linears
that read such points (:mod:`qdqtool.model.heads`): a step of INT8 is a 127th of the picture there. ``float``
leaves the scores float as well, those that queries are selected by included.
"""

from __future__ import annotations

from qdqtool.insertion.options import Placing, choices_of
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_coordinates, find_head
from qdqtool.model.operators import LayerKind, of

HEADS = choices_of(Placing, "head")
_DETECTOR = 2  # last convolutions that make a network without a DFL a detector


def float_nodes(model: Model, choice: str) -> dict[int, str]:
    """Nodes that the head preset leaves float, with the reason; ``choice`` is one of :data:`HEADS`."""
    if choice == "none":
        return {}
    head = find_head(model)
    result = dict.fromkeys(head.boxes, "box output of a YOLOv8-style head (`head='none'` quantizes it)")
    result.update(dict.fromkeys(head.dfl, "DFL: expected value over the box bins (`head='none'` quantizes it)"))
    places = find_coordinates(model, head.finals)
    result.update(dict.fromkeys(places.makers, "makes boxes or sampling points (`head='none'` quantizes it)"))
    result.update(dict.fromkeys(places.mlps, "MLP of a box output (`head='none'` quantizes it)"))
    result.update(dict.fromkeys(places.readers, "reads reference points (`head='none'` quantizes it)"))
    if choice == "box" and not head.dfl:
        ends = [i for i in sorted(head.finals) if of(model.nodes[i]).kind == LayerKind.CONVOLUTION]
        if len(ends) >= _DETECTOR:
            result.update(dict.fromkeys(ends, "last convolution of a detection head (`head='none'` quantizes it)"))
    if choice == "float":
        for index in sorted((head.finals | places.scores) - result.keys()):
            selects = index in places.scores - head.finals
            what = "scores by which queries are selected" if selects else "last convolution before an output"
            result[index] = f"{what} (`head='float'`)"
    return result
