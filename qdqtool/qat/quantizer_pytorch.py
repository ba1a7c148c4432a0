"""pytorch-quantization's quantizer. Importing this needs the package."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # about torch.jit.script in the package
    from pytorch_quantization import nn as quant_nn
    from pytorch_quantization.tensor_quant import QuantDescriptor

from qdqtool.qat.modules import Int8Mixin


class PytorchQuantizer(Int8Mixin, quant_nn.TensorQuantizer):  # type: ignore[misc]
    """pytorch-quantization's quantizer that loads its range without a GPU, too.

    The class is not named TensorQuantizer: Ultralytics recognizes networks of ModelOpt by that.
    """


Int8Quantizer = PytorchQuantizer  # name in pickles of version 0.2


def make_quantizer(axis: int | None) -> PytorchQuantizer:
    """Return a signed 8-bit quantizer with a histogram calibrator (max for weights)."""
    kind = {"calib_method": "histogram"} if axis is None else {"axis": (axis,)}
    quantizer = PytorchQuantizer(QuantDescriptor(num_bits=8, **kind))
    quantizer.qdq_axis = axis
    return quantizer
