"""Whether a build took its INT8 from a calibration table (implicit quantization) and not from Q/DQ nodes."""

from __future__ import annotations

from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.types import Precision

IMPLICIT = (
    "an implicit-INT8 build: a calibration table or dynamic ranges chose what runs in INT8, no Q/DQ node is in it; "
    "the rules for Q/DQ do not apply"
)
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_SAID = ("Missing scale and zero-point for tensor", "Calibrator is not being used. Users must provide dynamic range")


def implicit_int8(build: Build) -> bool:
    """True where the build has INT8 layers or says that it lacks ranges, and nothing of it names a Q or DQ.

    With Q/DQ, the Q of its weights is in the name of every INT8 convolution (``weights + Q + Conv``), and in the parse
    section. Where a listing alone is available, Qs with names of the user's own would be taken for none.
    """
    if build.is_rtx or any(event.pass_name.startswith(("Quantize", "QDQ", "ConstQDQ")) for event in build.trace):
        return False
    if any(node.op in _QUANTIZERS for node in build.parse.nodes) or any(map(_names_quantizer, build.layers)):
        return False
    if any(message.text.startswith(_SAID) for message in build.messages):
        return True
    return any(
        layer.is_convolution and layer.input_precision == Precision.INT8 and layer.type[:1].isupper()  # not in Myelin
        for layer in build.layers
    )


def _names_quantizer(layer: BuiltLayer) -> bool:
    return layer.origin == "QDQ" or "uantize" in layer.name or any("uantize" in name for name in layer.onnx_names)
