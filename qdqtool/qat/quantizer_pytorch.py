"""pytorch-quantization's quantizer. Importing this needs the package."""

from __future__ import annotations

from pytorch_quantization import nn as quant_nn
from pytorch_quantization.tensor_quant import QuantDescriptor

from qdqtool.qat.backends import LoadsAmax


class TensorQuantizer(LoadsAmax, quant_nn.TensorQuantizer):  # type: ignore[misc]
    """pytorch-quantization's, which loads its amax on a CPU as well."""


def make(axis: int | None) -> TensorQuantizer:
    """A signed 8-bit quantizer with a histogram calibrator (max for weights)."""
    method = "max" if axis is not None else "histogram"
    return TensorQuantizer(QuantDescriptor(num_bits=8, axis=axis if axis is None else (axis,), calib_method=method))
