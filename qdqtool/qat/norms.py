"""Whether BatchNormalization goes on learning while a network trains with quantizers: one default for every way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Off: statistics go on as in the training that they come from. Frozen ones are those of the float network, and boxes
# became less exact with them (docs/qat.md). Batches too small for statistics are the reason to freeze.
FREEZE_NORMS = False


def freeze(model: nn.Module) -> None:
    """BatchNormalization keeps its statistics until the training mode is set again."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def untrained(model: nn.Module) -> bool:
    """Whether no BatchNormalization has statistics of any data; their count of batches does not get into an EMA."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    return bool(norms) and all(not m.running_mean.any() and bool((m.running_var == 1).all()) for m in norms)


# Folded into the weights of the module in front of it ---------------------------------------------------------------



def fold_norms(model: nn.Module, norms: dict[str, str]) -> dict[str, Tensor]:
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
        norm, conv = modules.get(norm_name), modules.get(conv_name)
        factor = None if norm is None or conv is None else _fold(conv, norm)
        if factor is None:
            continue
        factors[conv_name] = factor
        parent, _, child = norm_name.rpartition(".")
        modules[parent]._modules[child] = nn.Identity()
    return factors


def factor_of(norm: nn.Module | None) -> Tensor | None:
    """What BatchNormalization multiplies the channels by in evaluation, float64 [channels]; None for other modules."""
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_mean is None or norm.running_var is None:
        return None
    factor = torch.rsqrt(norm.running_var.double() + norm.eps)
    return factor * norm.weight.detach().double() if norm.affine else factor


def along_outputs(conv: nn.Module, factor: Tensor) -> Tensor:
    """The factors [channels] in a shape that multiplies a module's weights along their output channels."""
    weight = conv._parameters["weight"]
    assert weight is not None
    if not isinstance(conv, nn.modules.conv._ConvTransposeNd):
        return factor.reshape(-1, *(1,) * (weight.ndim - 1))
    # [in, out / groups, ...]: the inputs of a group, one group after the other.
    of_groups = factor.reshape(conv.groups, weight.shape[1]).repeat_interleave(weight.shape[0] // conv.groups, 0)
    return of_groups.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))


def _fold(conv: nn.Module, norm: nn.Module) -> Tensor | None:
    factor = factor_of(norm)
    if factor is None:
        return None
    weight, bias = conv._parameters["weight"], conv._parameters.get("bias")
    assert weight is not None
    found: Any = norm
    mean = found.running_mean.double()
    shift = -mean * factor if bias is None else (bias.detach().double() - mean) * factor
    if found.affine:
        shift = shift + found.bias.detach().double()
    value = weight.detach().double() * along_outputs(conv, factor)
    conv._parameters["weight"] = nn.Parameter(value.to(weight.dtype), requires_grad=False)
    conv._parameters["bias"] = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
    return factor
