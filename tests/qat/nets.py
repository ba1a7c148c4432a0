import inspect
import types
from typing import Any

import torch
from pytorch_quantization import calib, nn as quant_nn, quant_modules
from pytorch_quantization.nn.modules import _utils
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import Tensor, nn

from examples import resnet
from qdqtool import qat
from qdqtool.qat.modules import read_amax

# pytorch-quantization reads the source lines of the whole stack to name its caller, which takes
# 0.1 s for each module.
_utils.inspect = types.SimpleNamespace(stack=lambda: inspect.stack(0)[1:])

WIDTH = 16  # channels of the first stage; a small number saves time, the placement is the same


class ResidualBlock(resnet.BasicBlock):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, stride)
        self.residual_quantizer = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=8))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.residual_quantizer(identity)
        return self.relu(out)


def handmade(placement: str) -> nn.Module:
    """Return a ResNet-18 with pytorch-quantization's own modules.

    Args:
        placement: ``convolutions``, ``residual`` or ``pool``.
    """
    quant_modules.initialize()
    try:
        block = resnet.BasicBlock if placement == "convolutions" else ResidualBlock
        model = resnet.ResNet18(10, WIDTH, block)
    finally:
        quant_modules.deactivate()
    if placement != "pool":
        model.avgpool = nn.AdaptiveAvgPool2d(1)
    return randomise(model).eval()


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return model


def resnet18(width: int = WIDTH) -> nn.Module:
    return randomise(resnet.ResNet18(10, width))


def prepared(model: nn.Module, sample: object, **options: object) -> nn.Module:
    qat.prepare(model, sample, report=None, **options)  # type: ignore[arg-type]
    return model


def ready(model: nn.Module, sample: object, **options: object) -> nn.Module:
    qat.calibrate(prepared(model, sample, **options), [sample])
    return model


def evaluate(model: nn.Module, *arguments: object) -> Any:
    with torch.no_grad():
        return model.eval()(*arguments)


def range_of(model: nn.Module, name: str) -> float:
    return float(read_amax(model.get_submodule(name)))


def float_weights(convolution: nn.Module) -> Tensor:
    return dict(convolution.named_parameters(recurse=False))["weight"].detach()


def max_calibrate(model: nn.Module, *batches: Tensor) -> None:
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    for q in quantizers:
        q._calibrator = calib.MaxCalibrator(8, q.axis, False)
        q.disable_quant()
        q.enable_calib()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for q in quantizers:
        q.load_calib_amax()
        q.enable_quant()
        q.disable_calib()


def conv(inputs: int = 16, outputs: int = 16, kernel: int = 3, **options: object) -> nn.Conv2d:
    options["padding"] = kernel // 2
    return nn.Conv2d(inputs, outputs, kernel, **options)  # type: ignore[arg-type]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.last = conv(), conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.both(x))
        return self.last(torch.relu(self.both(x) * 2))


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Conv2d(16, 32, 4, 4), nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        for _ in range(2):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x.mean(1)
        for _ in range(2):
            x = torch.relu(self.both(x))
        return x


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = conv(), nn.Linear(16, 5), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x)).mean((2, 3))
        return self.classes(x), self.boxes(x)


class SkipSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x) + x)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            SkipSequential(conv(), nn.BatchNorm2d(16), nn.ReLU(), conv()) for _ in range(2)
        )
        self.last = conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(x)))


class UpAndDown(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.down = conv(16, 32, stride=2)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2, groups=groups, bias=False)
        self.bn, self.last = nn.BatchNorm2d(16), conv(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat((torch.relu(self.bn(self.up(torch.relu(self.down(x))))), x), 1))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.randn(16, 1, 1, 1))  # too small for fast INT8 kernels
        self.reflecting, self.named, self.last = conv(padding_mode="reflect"), conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.conv2d(x, self.free, groups=16))
        x = torch.relu(self.reflecting(x))
        x = torch.relu(self.named(input=x))
        return self.last(x)


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(), conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + torch.zeros_like(x)
        x = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(x) + x))
