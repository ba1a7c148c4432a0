"""ModelOpt's quantizer. Importing this needs nvidia-modelopt."""

from __future__ import annotations

from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer as _TensorQuantizer

from qdqtool.qat.backends import LoadsAmax


class TensorQuantizer(LoadsAmax, _TensorQuantizer):  # type: ignore[misc]
    """ModelOpt's, which loads its amax without ModelOpt's own restore."""


def make(axis: int | None) -> TensorQuantizer:
    """A signed 8-bit quantizer with ModelOpt's max calibrator.

    No gradient goes through clipped values, as in pytorch-quantization. ModelOpt's default lets it through; on the
    example detector, whose ranges are chosen by least squared error, that cost 0.3 mAP in each of three seeds.
    """
    return TensorQuantizer(QuantizerAttributeConfig(num_bits=8, axis=axis, pass_through_bwd=False))
