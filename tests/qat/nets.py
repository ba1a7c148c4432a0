"""Networks for the tests of training; importing this needs torch and pytorch-quantization."""

from __future__ import annotations

import io

import onnx
import torch
from pytorch_quantization import calib, quant_modules
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import Tensor, nn

from examples import resnet

WIDTH = 16  # of the first stage; the placement does not depend on it, the time does


class ResidualBlock(resnet.BasicBlock):
    """The block as people quantize it by hand, after NVIDIA's example: a quantizer on the skip."""

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
    """ResNet-18 with pytorch-quantization's own modules: ``convolutions``, ``residual`` or ``pool``."""
    quant_modules.initialize()
    try:
        block = resnet.BasicBlock if placement == "convolutions" else ResidualBlock
        model = resnet.ResNet18(10, WIDTH, block)
    finally:
        quant_modules.deactivate()
    if placement != "pool":
        model.avgpool = nn.AdaptiveAvgPool2d(1)
    randomise(model)
    return model.eval()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Statistics of BatchNormalization as after training, so that no two of them are equal."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)


def max_calibrate(model: nn.Module, *batches: Tensor) -> None:
    """The maximum of every quantizer, the way of pytorch-quantization's own guide."""
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


def raw_export(model: nn.Module, sample: Tensor, opset: int = 13) -> onnx.ModelProto:
    """torch's own export, nothing added."""
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        file = io.BytesIO()
        torch.onnx.export(model, (sample,), file, opset_version=opset, dynamo=False)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False
    return onnx.load_from_string(file.getvalue())
