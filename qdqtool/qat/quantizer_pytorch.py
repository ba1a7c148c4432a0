"""Quantizer of pytorch-quantization. The import of this module needs the package."""

import warnings

with warnings.catch_warnings():
    # The package uses torch.jit.script, which is deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    from pytorch_quantization import nn as quant_nn
    from pytorch_quantization.tensor_quant import QuantDescriptor

from qdqtool.qat.modules import Int8Mixin


class PytorchQuantizer(Int8Mixin, quant_nn.TensorQuantizer):  # type: ignore[misc]
    """Quantizer of pytorch-quantization that can load its range without a GPU.

    The name of the class is not TensorQuantizer, because Ultralytics recognizes ModelOpt by this
    name.
    """


Int8Quantizer = PytorchQuantizer  # name in pickles of version 0.2


def make_quantizer(axis: int | None) -> PytorchQuantizer:
    """Return a signed 8-bit quantizer of pytorch-quantization.

    Args:
        axis: Channel axis of a quantizer with a max calibrator. None for a quantizer that has one
            range for all channels and a histogram calibrator.
    """
    kind = {"calib_method": "histogram"} if axis is None else {"axis": (axis,)}
    quantizer = PytorchQuantizer(QuantDescriptor(num_bits=8, **kind))
    quantizer.qdq_axis = axis
    return quantizer
