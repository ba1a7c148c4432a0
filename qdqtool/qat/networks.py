"""What users hand over: wrappers, heads with an export mode, branches that merge, BatchNormalization."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qdqtool.errors import QdqtoolError

# Networks that deploy as one convolution what trains as several call it by one of these: YOLOv7/9 and Ultralytics,
# RepVGG and YOLOv6, timm and MobileOne.
_MERGERS = ("fuse_convs", "switch_to_deploy", "reparameterize")


def is_ultralytics_model(model: object) -> bool:
    """Whether it is Ultralytics' wrapper (``YOLO``, ``RTDETR`` ...); never imports Ultralytics."""
    room = sys.modules.get("ultralytics.engine.model")
    return room is not None and isinstance(model, room.Model)


def unwrap(model: Any) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel, torch.compile, Ultralytics' wrapper or EMA.

    Raises:
        QdqtoolError: There is no network inside.
    """
    while True:
        if isinstance(model, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif is_ultralytics_model(model):
            inner = model.model
            if not isinstance(inner, nn.Module):
                raise QdqtoolError(
                    f"{type(model).__name__}('{inner}'): is an exported model; give the .pt checkpoint",
                    code="exported-model",
                    parameter="model",
                )
            model = inner
        elif not isinstance(model, nn.Module) and isinstance(
            getattr(model, "ema", None), nn.Module
        ):
            model = model.ema
        elif isinstance(model, nn.Module):
            return model
        else:
            raise QdqtoolError(
                f"give a torch.nn.Module (or Ultralytics' YOLO), not {type(model).__name__}",
                code="wrong-type",
                parameter="model",
            )


def check_not_wrapped(model: Any) -> None:
    """Quantizers go in before the network is wrapped.

    Raises:
        QdqtoolError: It is wrapped in DataParallel, DistributedDataParallel or torch.compile.
    """
    for kind in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel):
        if isinstance(model, kind):
            raise QdqtoolError(
                f"prepare the network inside {kind.__name__} (its .module) and wrap it afterwards",
                code="wrapped-network",
                parameter="model",
            )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise QdqtoolError(
            "prepare the network before torch.compile, and compile it afterwards",
            code="wrapped-network",
            parameter="model",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise QdqtoolError(
            "a TorchScript module has no layers to replace; prepare the network it came from",
            code="torchscript-module",
            parameter="model",
        )


@contextmanager
def override_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object have other values for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def switch_heads_to_export(model: nn.Module) -> Iterator[None]:
    """Switches heads with an export mode to it and back: they then return results only, not the raw maps for losses.

    Ultralytics' heads and those of YOLOv5, v6 and v7 have an attribute ``export``; Ultralytics' also a ``format``, and
    a ``shape`` that says for which size their anchors were made: it is forgotten, before and after.
    """
    before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        if module.__dict__.get("export", getattr(type(module), "export", None)) is not False:
            continue
        switched = {
            n: v
            for n, v in (("export", True), ("format", "onnx"), ("shape", None))
            if hasattr(module, n) and not isinstance(getattr(type(module), n, None), property)
        }
        # Anchors are made for another size meanwhile: the shape stays None.
        own = {
            n: None if n == "shape" else module.__dict__[n]
            for n in switched
            if n in module.__dict__
        }
        before.append((module.__dict__, switched, own))
        module.__dict__.update(switched)
    try:
        yield
    finally:
        for attributes, switched, own in before:
            for name in switched.keys() - {"shape"}:
                attributes.pop(name, None)
            attributes.update(own)


def can_merge_branches(model: nn.Module) -> bool:
    """Whether :func:`merge_branches` would find anything."""
    return any(name and _merger(module) is not None for name, module in model.named_modules())


def _merger(module: nn.Module) -> str | None:
    if _convolutions(module) < 2:
        return None
    if type(module).__name__ == "RepVGGDW" and hasattr(module, "conv1"):
        return "fuse"
    return next((m for m in _MERGERS if callable(getattr(module, m, None))), None)


def merge_branches(model: nn.Module) -> list[str]:
    """Merges parallel branches into the one convolution that they are at inference, in place.

    A quantizer on each of the branches is not what TensorRT runs: their sum has no INT8 form, and every branch costs
    conversions. Networks that have such blocks bring the method that merges them.

    Returns:
        The names of the merged modules.
    """
    merged: list[str] = []
    for name, module in list(model.named_modules()):
        before, merger = _convolutions(module), _merger(module)
        if merger is None or not name or any(name.startswith(f"{m}.") for m in merged):
            continue
        trainable = [p.requires_grad for p in module.parameters()]
        with torch.no_grad():
            getattr(module, merger)()
        if callable(getattr(module, "forward_fuse", None)):
            module.forward = module.forward_fuse
        if _convolutions(module) >= before:
            continue
        for parameter in module.parameters():
            parameter.requires_grad_(any(trainable))
        merged.append(name)
    return merged


def _convolutions(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())


def copy_network(model: nn.Module) -> nn.Module:
    """A deep copy; results of the last run that a module keeps (RAFT its correlations), which torch would not copy,
    are copied without what they were computed from.
    """
    memo: dict[int, Any] = {}
    known: set[int] = set()
    waiting: list[Any] = [vars(m) for m in model.modules()]
    while waiting:
        item = waiting.pop()
        if id(item) in known or isinstance(item, (nn.Module, type)):
            continue
        known.add(id(item))
        if isinstance(item, torch.Tensor):
            if not item.is_leaf:
                memo[id(item)] = item.detach().clone()
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend(item)
        elif hasattr(item, "__dict__") and type(item).__module__.split(".")[0] != "torch":
            waiting.append(vars(item))
    return copy.deepcopy(model, memo)


# Where Ultralytics would drop quantizers without a word -------------------------------------------------------------

_MARK = "_qdqtool_guarded"


def guard_ultralytics() -> None:
    """Lets Ultralytics say where it would drop quantizers without a word, and what to do instead.

    ``yolo.train()`` builds a new network and copies the weights that it knows; exporters for other formats than ONNX do
    not know quantizers. The method of theirs that each goes through is wrapped once a network of theirs has quantizers;
    nothing changes for networks without.
    """
    tasks, exporter = (
        sys.modules.get("ultralytics.nn.tasks"),
        sys.modules.get("ultralytics.engine.exporter"),
    )
    if tasks is not None:
        _wrap(tasks.BaseModel, "load", _check_load)
    if exporter is not None:
        _wrap(exporter.Exporter, "__call__", _check_export)


def count_quantizers(network: Any) -> int:
    """How many places of a network have a quantizer of ours; of pickles and copies as well."""
    if not isinstance(network, nn.Module):
        return 0
    quantizing: list[Any] = [m for m in network.modules() if hasattr(m, "qdq_calls")]
    return sum(
        len(m.qdq_calls) + (m.qdq_input is not None) + (m.qdq_weight is not None)
        for m in quantizing
    )


def _wrap(owner: type, name: str, check: Callable[..., None]) -> None:
    original = owner.__dict__.get(name)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(guarded, _MARK, True)
    setattr(owner, name, guarded)


def _check_load(network: Any, weights: Any = None, *args: Any, **kwargs: Any) -> None:
    source = (weights.get("ema") or weights.get("model")) if isinstance(weights, dict) else weights
    lost = count_quantizers(source)
    if lost and not count_quantizers(network):
        raise QdqtoolError(
            f"Ultralytics builds a new network here, without the {lost} quantizers; train with "
            "yolo.train(trainer=qdqtool.qat.ultralytics.Trainer, ...), which keeps them",
            code="quantizers-lost",
            parameter="weights",
        )


def _check_export(exporter: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    kind = str(getattr(exporter.args, "format", "")).lower()
    if kind != "onnx" and count_quantizers(model):
        raise QdqtoolError(
            f"format='{kind}' loses or ignores the quantizers; write the Q/DQ model with "
            "qdqtool.qat.export(yolo, 'model_qdq.onnx') and build that (trtexec --onnx=model_qdq.onnx --int8 --fp16)",
            code="quantizers-lost",
            parameter="format",
        )


# Whether BatchNormalization goes on learning, and how it is folded away ----------------------------------------------

# Off: statistics go on as in the training that they come from. Frozen ones are those of the float network, and boxes
# became less exact with them (docs/qat.md). Batches too small for statistics are the reason to freeze.
FREEZE_NORMS = False


def freeze_batch_norms(model: nn.Module) -> None:
    """BatchNormalization keeps its statistics until the training mode is set again."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def is_untrained(model: nn.Module) -> bool:
    """Whether no BatchNormalization has statistics of any data; their count of batches does not get into an EMA."""
    norms = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    return bool(norms) and all(
        not m.running_mean.any() and bool((m.running_var == 1).all()) for m in norms
    )


# Folded into the weights of the module in front of it ---------------------------------------------------------------


def fold_batch_norms(model: nn.Module, norms: dict[str, str]) -> dict[str, Tensor]:
    """Folds in place; the BatchNormalization modules become Identity.

    Args:
        model: In evaluation mode.
        norms: From the name of a BatchNormalization to that of the convolution that alone feeds it; one that is gone
            was folded by somebody else.

    Returns:
        From a convolution's name to the factors, [channels], that its output channels were multiplied by.
    """
    factors: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for norm_name, conv_name in norms.items():
        norm: Any = modules.get(norm_name)
        conv, factor = modules.get(conv_name), norm_factor(norm)
        if conv is None or factor is None:
            continue
        factors[conv_name] = factor
        weight, bias = conv._parameters["weight"], conv._parameters.get("bias")
        assert weight is not None
        mean = norm.running_mean.double()
        shift = (-mean if bias is None else bias.detach().double() - mean) * factor
        shift = shift + norm.bias.detach().double() if norm.affine else shift
        value = weight.detach().double() * align_with_outputs(conv, factor)
        conv._parameters["weight"] = nn.Parameter(value.to(weight.dtype), requires_grad=False)
        conv._parameters["bias"] = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
        parent, _, child = norm_name.rpartition(".")
        modules[parent]._modules[child] = nn.Identity()
    return factors


def norm_factor(norm: nn.Module | None) -> Tensor | None:
    """What BatchNormalization multiplies the channels by in evaluation, float64 [channels]; None for other modules."""
    if (
        not isinstance(norm, nn.modules.batchnorm._BatchNorm)
        or norm.running_mean is None
        or norm.running_var is None
    ):
        return None
    factor = torch.rsqrt(norm.running_var.double() + norm.eps)
    return factor * norm.weight.detach().double() if norm.affine else factor


def align_with_outputs(conv: nn.Module, factor: Tensor) -> Tensor:
    """The factors [channels] in a shape that multiplies a module's weights along their output channels."""
    weight = conv._parameters["weight"]
    assert weight is not None
    if not isinstance(conv, nn.modules.conv._ConvTransposeNd):
        return factor.reshape(-1, *(1,) * (weight.ndim - 1))
    # [in, out / groups, ...]: the inputs of a group, one group after the other.
    of_groups = factor.reshape(conv.groups, weight.shape[1]).repeat_interleave(
        weight.shape[0] // conv.groups, 0
    )
    return of_groups.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))
