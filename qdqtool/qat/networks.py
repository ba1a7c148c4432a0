"""Functions for torch networks: unwrap, switch heads to export mode, merge branches, copy."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qdqtool.errors import QdqtoolError

# Names of methods of blocks that merge parallel branches into one convolution for deployment: of
# YOLOv7, YOLOv9 and Ultralytics; of RepVGG and YOLOv6; of timm and MobileOne.
_MERGE_METHODS = ("fuse_convs", "switch_to_deploy", "reparameterize")
_EXPORT_MODE = {"export": True, "format": "onnx", "shape": None}


def is_ultralytics_model(model: object) -> bool:
    """Return whether a model is Ultralytics' wrapper, such as ``YOLO``, without an import."""
    module = sys.modules.get("ultralytics.engine.model")
    return module is not None and isinstance(model, module.Model)


def unwrap_network(model: Any) -> nn.Module:
    """Return the network inside wrappers, or the network itself if it has no wrapper.

    Wrappers are DataParallel, DistributedDataParallel, torch.compile, and Ultralytics' ``YOLO`` and
    EMA.

    Raises:
        QdqtoolError: The object is neither a network nor a wrapper of a network, or is Ultralytics'
            wrapper of an exported model.
    """
    while True:
        if isinstance(model, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif is_ultralytics_model(model):  # checked before nn.Module, which is a base class
            if not isinstance(model.model, nn.Module):
                raise QdqtoolError(
                    f"{type(model).__name__}('{model.model}') is an exported model, which cannot "
                    "be trained; give the .pt checkpoint",
                    code="exported-model",
                    parameter="model",
                )
            model = model.model
        elif isinstance(model, nn.Module):
            return model
        elif isinstance(getattr(model, "ema", None), nn.Module):
            model = model.ema
        else:
            raise QdqtoolError(
                f"give a torch.nn.Module (or Ultralytics' YOLO), not {type(model).__name__}",
                code="wrong-type",
                parameter="model",
            )


def check_not_wrapped(model: Any) -> None:
    """Check that a network is not wrapped. Quantizers must be inserted before wrapping.

    Raises:
        QdqtoolError: The network is wrapped in DataParallel, DistributedDataParallel or
            torch.compile, or is a TorchScript module.
    """
    for kind in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel):
        if isinstance(model, kind):
            raise QdqtoolError(
                f"the network is wrapped in {kind.__name__}: prepare its `.module`, and wrap the "
                "prepared network",
                code="wrapped-network",
                parameter="model",
            )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise QdqtoolError(
            "the network is compiled; prepare the original network, and compile the prepared one",
            code="wrapped-network",
            parameter="model",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise QdqtoolError(
            "a TorchScript module has no layers that can be replaced; prepare the original network",
            code="torchscript-module",
            parameter="model",
        )


@contextmanager
def override_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object until the context ends, then restore their values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _is_settable(module: nn.Module, name: str) -> bool:
    return hasattr(module, name) and not isinstance(getattr(type(module), name, None), property)


@contextmanager
def switch_heads_to_export(model: nn.Module) -> Iterator[None]:
    """Switch detection heads to their export mode until the context ends.

    In export mode, a head returns only detections, and no feature maps for a loss. The heads of
    Ultralytics and of YOLOv5, v6 and v7 have an attribute ``export``. The heads of Ultralytics also
    have an attribute ``format``, and ``shape`` with the input size of their anchors.
    """
    before: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = []
    for module in model.modules():
        kind, attributes = type(module), module.__dict__
        if attributes.get("export", getattr(kind, "export", None)) is not False:
            continue
        names = [name for name in _EXPORT_MODE if _is_settable(module, name)]
        before.append((attributes, names, {n: attributes[n] for n in names if n in attributes}))
        attributes.update({n: _EXPORT_MODE[n] for n in names})
    try:
        yield
    finally:
        for attributes, names, own in before:
            for name in names:
                attributes.pop(name, None)
            # The head computes anchors again if it has no shape. This is necessary because the
            # export may have used another input size.
            attributes.update(own | ({"shape": None} if "shape" in own else {}))


def can_merge_branches(model: nn.Module) -> bool:
    """Return whether a network has modules that :func:`merge_branches` tries to merge."""
    return any(name and _find_merge_method(module) for name, module in model.named_modules())


def _find_merge_method(module: nn.Module) -> str | None:
    if _count_convolutions(module) < 2:
        return None
    if type(module).__name__ == "RepVGGDW" and hasattr(module, "conv1"):
        return "fuse"
    return next((m for m in _MERGE_METHODS if callable(getattr(module, m, None))), None)


def merge_branches(model: nn.Module) -> list[str]:
    """Merge the parallel branches of each block into one convolution, in place.

    Methods of the blocks themselves merge the branches. Quantized branches would be slow, because
    TensorRT has no INT8 kernel for their sum, and every branch needs conversions.

    Returns:
        Names of the merged modules.
    """
    merged: list[str] = []
    for name, module in list(model.named_modules()):
        before, method = _count_convolutions(module), _find_merge_method(module)
        if method is None or not name or any(name.startswith(f"{m}.") for m in merged):
            continue
        is_trainable = any(p.requires_grad for p in module.parameters())
        with torch.no_grad():
            getattr(module, method)()
        if callable(getattr(module, "forward_fuse", None)):
            module.forward = module.forward_fuse
        if _count_convolutions(module) < before:
            for parameter in module.parameters():
                parameter.requires_grad_(is_trainable)
            merged.append(name)
    return merged


def _count_convolutions(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())


def copy_network(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network, even if the network stores results of its last run.

    torch cannot copy tensors that have a gradient function. Networks such as RAFT store such
    tensors. In the copy, they are detached.
    """
    memo = {id(t): t.detach().clone() for t in _find_tensors(model) if not t.is_leaf}
    return copy.deepcopy(model, memo)


def _find_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of all modules, also in nested containers and objects."""
    visited: set[int] = set()
    pending: list[Any] = [vars(m) for m in model.modules()]
    while pending:
        item = pending.pop()
        if id(item) in visited or isinstance(item, (nn.Module, type)):
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            pending.extend(item)
        elif hasattr(item, "__dict__") and type(item).__module__.split(".")[0] != "torch":
            pending.append(vars(item))
