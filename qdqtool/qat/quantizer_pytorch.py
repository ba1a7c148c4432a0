"""pytorch-quantization's quantizer. Importing this needs the package."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # of torch.jit.script, which the package uses
    from pytorch_quantization import nn as quant_nn
    from pytorch_quantization.tensor_quant import QuantDescriptor

from qdqtool.qat.modules import Int8Mixin


class Int8Quantizer(Int8Mixin, quant_nn.TensorQuantizer):  # type: ignore[misc]
    """pytorch-quantization's, which loads its amax on a CPU as well.

    Not named TensorQuantizer: Ultralytics takes every class of that name for a network that ModelOpt converted.
    """


def make_quantizer(axis: int | None) -> Int8Quantizer:
    """A signed 8-bit quantizer with a histogram calibrator (max for weights)."""
    method = "max" if axis is not None else "histogram"
    made = Int8Quantizer(
        QuantDescriptor(num_bits=8, axis=axis if axis is None else (axis,), calib_method=method)
    )
    made.qdq_axis = axis
    return made
