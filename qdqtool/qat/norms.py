"""Whether BatchNormalization goes on learning while a network trains with quantizers: one default for every way."""

from __future__ import annotations

from torch import nn

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
