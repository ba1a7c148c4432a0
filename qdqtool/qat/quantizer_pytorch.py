"""Quantizer of pytorch-quantization; importing this module needs the package."""

import warnings

with warnings.catch_warnings():
    # The package uses torch.jit.script, which is deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    from pytorch_quantization import nn as quant_nn
    from pytorch_quantization.tensor_quant import QuantDescriptor

from qdqtool.qat.modules import Int8Mixin


class PytorchQuantizer(Int8Mixin, quant_nn.TensorQuantizer):  # type: ignore[misc]
    """Quantizer of pytorch-quantization that also loads its range without a GPU.

    The class is not named TensorQuantizer, because Ultralytics recognizes ModelOpt by that name.
    """


Int8Quantizer = PytorchQuantizer  # pickles of version 0.2 contain this name


def make_quantizer(axis: int | None) -> PytorchQuantizer:
    """Return a signed 8-bit quantizer of pytorch-quantization.

    Args:
        axis: Channel axis, with a max calibrator; None for one range for all channels, with a
            histogram calibrator.
    """
    kind = {"calib_method": "histogram"} if axis is None else {"axis": (axis,)}
    quantizer = PytorchQuantizer(QuantDescriptor(num_bits=8, **kind))
    quantizer.qdq_axis = axis
    return quantizer
