"""ModelOpt's quantizer. Importing this needs nvidia-modelopt."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages for language models that it would use
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

from qdqtool.qat.modules import Int8Mixin


class Int8Quantizer(Int8Mixin, TensorQuantizer):  # type: ignore[misc]
    """ModelOpt's, which loads its amax without ModelOpt's own restore.

    Not named TensorQuantizer: Ultralytics takes every class of that name for a network that ModelOpt converted.
    """


def make_quantizer(axis: int | None) -> Int8Quantizer:
    """A signed 8-bit quantizer with ModelOpt's max calibrator.

    No gradient goes through clipped values, as in pytorch-quantization. ModelOpt's default lets it through; on the
    example detector, whose ranges are chosen by least squared error, that cost 0.3 mAP in each of three seeds.
    """
    made = Int8Quantizer(QuantizerAttributeConfig(num_bits=8, axis=axis, pass_through_bwd=False))
    made.qdq_axis = axis
    return made
