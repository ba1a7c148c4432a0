"""Naive placement: quantizers on input, weights and output of every convolution.

The last convolutions of the head and the DFL are quantized too. The quantizer of an output is
between the convolution and its BatchNormalization. Skip connections remain float, and no tensors
share a scale. Calibration, fine-tuning and export are the same as with `qdqtool.qat`, so that only
the places of the quantizers differ.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import onnx
import torch
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.tensor_quant import (
    QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL,
    QuantDescriptor,
)
from torch import Tensor, nn

from calibration import TensorStatistics, amax_of


class NaiveConv2d(quant_nn.QuantConv2d):
    """Convolution of pytorch-quantization with an additional quantizer on its output."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            quant_desc_input=QuantDescriptor(num_bits=8),
            quant_desc_weight=QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL,
        )
        self.weight, self.bias = conv.weight, conv.bias
        self._output_quantizer = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=8))

    def forward(self, x: Tensor) -> Tensor:
        return self._output_quantizer(super().forward(x))


def prepare_naive(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Conv2d:
                setattr(module, name, NaiveConv2d(child))


def _activation_quantizers(model: nn.Module) -> Iterable[quant_nn.TensorQuantizer]:
    return (
        m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer) and m.axis is None
    )


def calibrate_naive(model: nn.Module, batches: Iterable[Tensor], method: str) -> None:
    """Compute a range for each quantizer, from the same statistics as `qdqtool.qat`."""
    statistics: dict[int, TensorStatistics] = defaultdict(TensorStatistics)

    def collect(quantizer: nn.Module, inputs: tuple[Any, ...]) -> None:
        statistics[id(quantizer)].add(inputs[0].numpy())

    hooks = [q.register_forward_pre_hook(collect) for q in _activation_quantizers(model)]
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    model.eval()
    for quantizer in quantizers:
        quantizer.disable()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for quantizer in quantizers:
        quantizer.enable()
    for hook in hooks:
        hook.remove()
    for quantizer in _activation_quantizers(model):
        quantizer.amax = amax_of(statistics[id(quantizer)], method)


def export_naive(model: nn.Module, path: str, sample: Tensor) -> None:
    """Fix the ranges of the weights, and export with torch, as pytorch-quantization does."""
    for module in model.modules():
        if isinstance(module, NaiveConv2d):
            amax = module.weight.detach().abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-8)
            module._weight_quantizer.register_buffer("_amax", amax)
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        file = io.BytesIO()
        torch.onnx.export(model.eval(), (sample,), file, opset_version=17, dynamo=False)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False
    onnx.save(onnx.load_from_string(file.getvalue()), path)
