"""Name the float type of an engine in the messages of findings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqtool.formats.verdicts import name_float_type
from qdqtool.ir.precision import Precision
from qdqtool.trt.result import Prediction

if TYPE_CHECKING:
    from qdqtool.timing.results import TimeEstimate

# Findings on the types in the model, or on the flags of the builder.
_OTHER_TYPES = ("BIAS-DQ", "CONST-FP16", "FLAG-FP16", "FLOAT-BF16", "FLOAT-FP32", "FLOAT-MIXED")
_FLOAT = (
    r"float\b(?! (?:image|input|model|network|scale|tensor|type|value|weight)s?\b)"
    r"(?=[.,;:()]*(?:\s|$))"
)
_OPTION_VALUE = r"(--[a-z][a-z-]*[ =])float\b"
_HIDDEN_VALUE = "\0"  # stands for the value "float" of an option while phrases are replaced
# Phrases on the types of layers and of their inputs and outputs. "The float model" is a file.
_PHRASES = (
    (rf"\b(as|be|in|instead of|is|writes?|wrote) {_FLOAT}", r"\1 {}"),
    (rf"\b(leaves?|left|remains?|stays?) {_FLOAT}", r"\1 in {}"),
    (rf"\b([Kk]eep|[Ll]eave|[Ll]eaving)((?: [^\s,;]+){{1,7}}) {_FLOAT}", r"\1\2 in {}"),
    (r"\bfloat (attention|consumers?|output|pooling)\b", r"{} \1"),
)


def find_float_type(
    prediction: Prediction,
    *,
    half: bool = True,
    times: Sequence[TimeEstimate] = (),
    outputs: bool = True,
) -> Precision | None:
    """Return the type of all layers that are not quantized; None if there are several types.

    The type is also None if an estimate uses FP32 for layers that may run in FP16.

    Args:
        prediction: The prediction.
        half: Whether the builder may use FP16.
        times: Estimated time on each GPU.
        outputs: Whether the float outputs of quantized layers count too. TensorRT-RTX writes FP32
            there, although float layers are FP16.
    """
    types = prediction.float_types(outputs=outputs)
    several = len(types) > 1 or any(time.fp32_layers for time in times)
    return None if several else name_float_type(prediction, half=half)


def can_use_fp16(times: Sequence[TimeEstimate]) -> bool:
    """Return whether the estimates permit FP16 on all GPUs for which an engine can be built."""
    built = [time for time in times if time.is_supported] or times
    return all(time.float_type == Precision.FP16 for time in built)


def name_floats(text: str, code: str, float_type: Precision | None) -> str:
    """Write the float type of the engine in place of the word "float".

    Values of options, such as ``--head float``, are not changed.

    Args:
        text: Title, message or fix of a finding.
        code: Code of the finding. The text of a code on the types in the model is not changed.
        float_type: Type of the layers that are not quantized. None: the text is not changed.
    """
    if float_type is None or code in _OTHER_TYPES or "float" not in text:
        return text
    text = re.sub(_OPTION_VALUE, rf"\1{_HIDDEN_VALUE}", text)
    for pattern, replacement in _PHRASES:
        text = re.sub(pattern, replacement.format(float_type), text)
    return text.replace(_HIDDEN_VALUE, "float")
