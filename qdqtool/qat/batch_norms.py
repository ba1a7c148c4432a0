"""BatchNormalization: frozen statistics in training, and folding into weights."""

from typing import Any

import torch
from torch import Tensor, nn

# By default, training updates the statistics of BatchNormalization. In tests, boxes were less
# accurate with frozen statistics of the float network (docs/qat.md). Frozen statistics help if
# batches are too small for good statistics.
FREEZE_NORMS = False


def freeze_batch_norms(model: nn.Module) -> None:
    """Freeze the statistics of BatchNormalization until ``model.train()`` is called again."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def is_untrained(model: nn.Module) -> bool:
    """Return whether every BatchNormalization still has its initial mean and variance.

    The attribute `num_batches_tracked` is not used, because EMA copies do not update it. False for
    a network without BatchNormalization.
    """
    norms = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    return bool(norms) and all(
        not m.running_mean.any() and bool((m.running_var == 1).all()) for m in norms
    )


def fold_batch_norms(model: nn.Module, norms: dict[str, str]) -> dict[str, Tensor]:
    """Fold each BatchNormalization into the convolution before it, in place.

    Each folded BatchNormalization is replaced by an Identity.

    Args:
        model: Network in evaluation mode.
        norms: For the name of each BatchNormalization, the name of the convolution before it.
            Names of other modules, and a BatchNormalization without statistics, are skipped.

    Returns:
        Factors of the output channels, of shape [channels], by name of the convolution.
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
        if norm.affine:
            shift = shift + norm.bias.detach().double()
        folded = weight.detach().double() * align_with_outputs(conv, factor)
        conv._parameters["weight"] = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
        conv._parameters["bias"] = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
        parent, _, child = norm_name.rpartition(".")
        modules[parent]._modules[child] = nn.Identity()
    return factors


def norm_factor(norm: nn.Module | None) -> Tensor | None:
    """Return the factor of each channel of a BatchNormalization in evaluation mode.

    Returns:
        float64 factors of shape [channels]. None for other modules, and for a BatchNormalization
        without statistics.
    """
    if (
        not isinstance(norm, nn.modules.batchnorm._BatchNorm)
        or norm.running_mean is None
        or norm.running_var is None
    ):
        return None
    factor = torch.rsqrt(norm.running_var.double() + norm.eps)
    return factor * norm.weight.detach().double() if norm.affine else factor


def align_with_outputs(conv: nn.Module, factor: Tensor) -> Tensor:
    """Reshape factors of output channels so that they broadcast to a convolution's weights."""
    weight = conv._parameters["weight"]
    assert weight is not None
    if not isinstance(conv, nn.modules.conv._ConvTransposeNd):
        return factor.reshape(-1, *(1,) * (weight.ndim - 1))
    # The weights have shape [inputs, outputs / groups, ...]. The inputs of a group are consecutive.
    grouped = factor.reshape(conv.groups, weight.shape[1])
    per_input = grouped.repeat_interleave(weight.shape[0] // conv.groups, 0)
    return per_input.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))
