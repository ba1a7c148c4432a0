"""ModelOpt's quantizer. Importing this needs nvidia-modelopt."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about missing packages for language models
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

from qdqtool.qat.modules import Int8Mixin


class ModelOptQuantizer(Int8Mixin, TensorQuantizer):  # type: ignore[misc]
    """ModelOpt's quantizer that loads its range from a plain state dict.

    The class is not named TensorQuantizer: Ultralytics recognizes networks of ModelOpt by that.
    """


Int8Quantizer = ModelOptQuantizer  # name in pickles of version 0.2


def make_quantizer(axis: int | None) -> ModelOptQuantizer:
    """Return a signed 8-bit quantizer with ModelOpt's max calibrator.

    Clipped values get no gradient, as in pytorch-quantization. In ModelOpt's default they get one,
    which cost 0.3 mAP in each of three runs with the example detector (ranges by ``mse``).
    """
    config = QuantizerAttributeConfig(num_bits=8, axis=axis, pass_through_bwd=False)
    quantizer = ModelOptQuantizer(config)
    quantizer.qdq_axis = axis
    return quantizer
