"""BatchNormalization folded into the weights of the module in front of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


def _fold(conv: nn.Module, norm: nn.Module) -> Tensor | None:
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_mean is None or norm.running_var is None:
        return None
    weight, bias = conv._parameters["weight"], conv._parameters.get("bias")
    assert weight is not None
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    factor = torch.rsqrt(variance + norm.eps)
    shift = -mean * factor if bias is None else (bias.detach().double() - mean) * factor
    if norm.affine:
        gain = norm.weight.detach().double()
        factor, shift = factor * gain, shift * gain + norm.bias.detach().double()
    value = weight.detach().double()
    if isinstance(conv, nn.modules.conv._ConvTransposeNd):  # [in, out / groups, ...]
        split = value.reshape(conv.groups, -1, *value.shape[1:])
        along = factor.reshape(conv.groups, 1, value.shape[1], *(1,) * (value.ndim - 2))
        value = (split * along).reshape(value.shape)
    else:
        value = value * factor.reshape(-1, *(1,) * (value.ndim - 1))
    conv._parameters["weight"] = nn.Parameter(value.to(weight.dtype), requires_grad=False)
    conv._parameters["bias"] = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
    return factor
