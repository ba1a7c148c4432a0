"""A small detector in the style of YOLOv8: C2f, SPPF, PAN, and a head with DFL.

The detector has two levels (strides 8 and 16) and few channels, so the training on a CPU takes only
minutes. It has all structures of the large networks that are important for quantization: SiLU,
residual Adds after an activation, Split and Concat in C2f, chained MaxPools, nearest upsampling,
and a head whose box branch ends in a distribution over bins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BINS = 8
STRIDES = (8, 16)


class Conv(nn.Module):
    """Convolution, BatchNormalization, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    """Two 3x3 convolutions, with a skip connection if `skip` is set."""

    def __init__(self, channels: int, skip: bool) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels, 3)
        self.cv2 = Conv(channels, channels, 3)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.skip else y


class C2f(nn.Module):
    """Bottlenecks on half of the channels. Their inputs and outputs are concatenated."""

    def __init__(self, inputs: int, outputs: int, count: int = 1, skip: bool = False) -> None:
        super().__init__()
        self.half = outputs // 2
        self.cv1 = Conv(inputs, outputs)
        self.cv2 = Conv((2 + count) * self.half, outputs)
        self.m = nn.ModuleList(Bottleneck(self.half, skip) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).split((self.half, self.half), 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Three 5x5 MaxPools in series. Their input and all outputs are concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels // 2)
        self.cv2 = Conv(channels * 2, channels)
        self.m = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        y = self.m(x)
        z = self.m(y)
        return self.cv2(torch.cat((x, y, z, self.m(z)), 1))


class DFL(nn.Module):
    """Mean of the distribution of each box side over the bins, as a fixed 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(BINS, dtype=torch.float).view(1, BINS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, cells = x.shape
        return self.conv(x.view(n, 4, BINS, cells).transpose(2, 1).softmax(1)).view(n, 4, cells)


class Detect(nn.Module):
    """Boxes and class scores of every cell.

    The output in training mode is raw values, [N, 4 * BINS + classes, cells]. The output in
    evaluation mode is boxes (x1, y1, x2, y2 in pixels) and scores, [N, 4 + classes, cells].
    """

    def __init__(self, classes: int, channels: tuple[int, ...], size: int, width: int = 32) -> None:
        super().__init__()
        self.classes = classes
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(c, width, 3), Conv(width, width, 3), nn.Conv2d(width, 4 * BINS, 1))
            for c in channels
        )
        self.cv3 = nn.ModuleList(
            nn.Sequential(Conv(c, width, 3), Conv(width, width, 3), nn.Conv2d(width, classes, 1))
            for c in channels
        )
        self.dfl = DFL()
        for branch in self.cv3:
            nn.init.constant_(branch[-1].bias, -4.0)
        points, strides = cells(size)
        self.register_buffer("points", points, persistent=False)
        self.register_buffer("strides", strides, persistent=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        raw = torch.cat(
            [
                torch.cat((self.cv2[i](x), self.cv3[i](x)), 1).flatten(2)
                for i, x in enumerate(features)
            ],
            2,
        )
        if self.training:
            return raw
        boxes, scores = raw.split((4 * BINS, self.classes), 1)
        left_top, right_bottom = self.dfl(boxes).chunk(2, 1)
        corners = torch.cat((self.points - left_top, self.points + right_bottom), 1) * self.strides
        return torch.cat((corners, scores.sigmoid()), 1)


def cells(size: int) -> tuple[Tensor, Tensor]:
    """Return the cells of all levels.

    Returns:
        Centers in strides, [1, 2, cells], and strides in pixels, [1, 1, cells].
    """
    points, strides = [], []
    for stride in STRIDES:
        n = size // stride
        ys, xs = torch.meshgrid(torch.arange(n) + 0.5, torch.arange(n) + 0.5, indexing="ij")
        points.append(torch.stack((xs.flatten(), ys.flatten())))
        strides.append(torch.full((1, n * n), float(stride)))
    return torch.cat(points, 1)[None], torch.cat(strides, 1)[None]


class Detector(nn.Module):
    """Network from images [N, 3, size, size], 0 to 1, to the outputs of :class:`Detect`."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.stem = Conv(3, 16, 3, 2)
        self.down2 = Conv(16, 32, 3, 2)
        self.stage2 = C2f(32, 32, 1, skip=True)
        self.down3 = Conv(32, 64, 3, 2)
        self.stage3 = C2f(64, 64, 1, skip=True)
        self.down4 = Conv(64, 96, 3, 2)
        self.stage4 = C2f(96, 96, 1, skip=True)
        self.sppf = SPPF(96)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.top_down = C2f(96 + 64, 64)
        self.down = Conv(64, 64, 3, 2)
        self.bottom_up = C2f(64 + 96, 96)
        self.detect = Detect(classes, (64, 96), size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.down3(self.stage2(self.down2(self.stem(x)))))
        deep = self.sppf(self.stage4(self.down4(x)))
        fine = self.top_down(torch.cat((self.up(deep), x), 1))
        coarse = self.bottom_up(torch.cat((self.down(fine), deep), 1))
        return self.detect([fine, coarse])
