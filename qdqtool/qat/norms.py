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
