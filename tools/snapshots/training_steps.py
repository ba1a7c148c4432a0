"""Exports of networks with QAT. worker.py runs the exports in the recorded checkout.

The module needs torch.
"""

from typing import Any

import torch
from torch import Tensor, nn

Json = Any


def _convolution(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = _convolution(3, 16), _convolution(16, 16)
        self.b, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.norm(self.b(self.a(x))) + x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2, bias=False)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = nn.functional.silu(self.norm(self.up(nn.functional.silu(self.down(x)))))
        return self.last(torch.cat((up, x), 1))


class Tokens(nn.Module):
    """Linear layers on [N, C, H, W], as in an MLP of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


NETWORKS = {"residual": Residual, "decoder": Decoder, "tokens": Tokens}


def export(network: str, output: str, target: str, backend: str, method: str) -> Json:
    from qdqtool import qat

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = NETWORKS[network]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    batches = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    plan = qat.prepare(model, batches[0], target=target, backend=backend, report=None)
    qat.calibrate(model, batches, method=method)
    exported = qat.export(model, output, batches[0])
    return {
        "convolutions": len(plan.convolutions),
        "summary": exported.summary,
        "findings": [[f.code, f.node] for f in exported.prediction.findings],
    }
