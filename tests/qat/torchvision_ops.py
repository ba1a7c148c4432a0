"""torchvision next to a CPU build of torch.

A torchvision for CUDA builds of torch does not work with a CPU build of torch. Its compiled
operators do not load, and the import fails where torchvision registers shapes for them. Ultralytics
imports torchvision for transforms, and for ``nms`` on few boxes. This module defines ``nms`` in
plain torch (greedy, exact) before the import, so that the Python part of torchvision imports.
Nothing is defined if torchvision works by itself.
"""

import functools
import importlib.util

_LIBRARIES: list[object] = []


@functools.cache
def usable_torchvision() -> bool:
    """Define the operators that a mismatched build lacks; return whether torchvision imports."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    if "+cpu" in torch.__version__ or torch.version.cuda is None:
        _define()
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def _define() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # torchvision defined them itself
            return
    library.impl("nms", _nms, "CPU")
    _LIBRARIES.append(library)  # operators live as long as their library


def _nms(boxes: object, scores: object, threshold: float) -> object:
    import torch

    assert isinstance(boxes, torch.Tensor) and isinstance(scores, torch.Tensor)
    order = scores.argsort(descending=True, stable=True)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    kept: list[int] = []
    while order.numel():
        best, rest = order[0], order[1:]
        kept.append(int(best))
        low = torch.maximum(boxes[rest, :2], boxes[best, :2])
        inner = (torch.minimum(boxes[rest, 2:], boxes[best, 2:]) - low).clamp(min=0).prod(1)
        order = rest[inner / (areas[rest] + areas[best] - inner) <= threshold]
    return torch.tensor(kept, dtype=torch.int64)
