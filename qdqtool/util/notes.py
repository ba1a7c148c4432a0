"""Notes and warnings of results.

A note is a string that can be printed. Programs and tests read its code and its values, never its text::

    Note(f"{cache}: resumed after {images} images", code="resumed", cache=cache, images=images)

A parameter of the library is written in backticks (`` `clock` ``, `` `clock=1200` ``). The command line prints the
option of that name instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Self

from qdqtool.errors import QdqtoolError
from qdqtool.util.said import Said


class Note(Said):
    """A note or a warning of a result.

    Attributes:
        code: Identifier of the note, such as ``"resumed"``; empty for a text of a file or a user.
        values: Values in the text, by name.
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, text: str = "", *, code: str = "", **values: Any) -> Self:
        note = super().__new__(cls, text)
        note.code = code
        note.values = values
        return note

    def __init__(self, text: str = "", *, code: str = "", **values: Any) -> None:
        pass

    @classmethod
    def from_error(cls, error: Exception) -> Self:
        """Return the message of an error as a note with the code of the error."""
        code = error.code if isinstance(error, QdqtoolError) else ""
        return cls(str(error), code=code)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_note, (str(self), self.__dict__)


def _restore_note(text: str, attributes: dict[str, Any]) -> Note:
    note = Note(text)
    note.__dict__.update(attributes)
    return note


class Remark(Enum):
    """Templates of all notes; calling one with values returns the note."""

    # Images and ranges
    ALWAYS_ZERO = "'{tensor}' is zero on all calibration data; its scale is meaningless"

    # The float model, prepared
    WIDENED = (
        "float16 widened to float32, because {target} takes no FP16 scales; allow FP16 in the"
        " builder instead"
    )
    INLINED = "the model's own functions were inlined"
    OPSET_RAISED = "opset raised from {before} to {after}"
    NODES_NAMED = (
        "{count:were node} named after an output, because onnxruntime requires unique names"
    )
    LOWER_CASE = "{count:were Einsum equation} written in lower case, as TensorRT's parser requires"
    SUMS_AS_ADDS = "{count:were two-input Sum} written as Add, which TensorRT fuses"
    PRODUCTS_WRITTEN = (
        "{count:were matrix product} written as MatMul instead of Einsum, so that it can be INT8"
    )
    WEIGHTS_COMPUTED = "{count:were weight tensor} computed from constants"
    WEIGHTS_COPIED = "{count:were weight tensor} copied for nodes that shared one"
    NORMS_FOLDED = "{count:were BatchNormalization node} folded into a convolution before it"
    NORMS_FOLDED_BEHIND = (
        "{count:were BatchNormalization node} folded into the convolutions after it"
    )
    INT8_WEIGHTS_UNREAD = "{target} cannot read int8 weights; use {`weights`:'float'}"

    # Placement
    NO_ATTENTION = (
        "{`attention`:'int8'} has no effect: no Softmax is between two MatMuls of computed tensors"
    )
    NO_RESIDUAL = (
        "{`residual`:'{residual}'} has no effect: no Add follows a convolution and is "
        "quantized next"
    )
    NO_LINEAR = "{`smooth`:{alpha:g}} has no effect: no Linear is quantized"
    NONE_SMOOTHED = (
        "{`smooth`:{alpha:g}} has no effect: none of {tensors} inputs of quantized Linears "
        "can be smoothed: {reasons:joined , }{further}"
    )
    TOO_LARGE_TO_SMOOTH = (
        "{`smooth`:{alpha:g}} has no effect: values or constants are not finite, or too large"
        " for FP16"
    )
    SMOOTHED = (
        "{`smooth`:{alpha:g}}: activation scales of {linears} Linears were moved into their "
        "weights, at {places} places"
    )
    SMOOTHED_IN_PART = SMOOTHED + "; not possible for {reasons:joined , }{further}"
    FEED_INT8 = (
        "input '{name}' is int8: feed rint(x / {scale:.8g}) clipped to -128 ... 127, where x "
        "is the input of the float model"
    )
    FEED_INT8_PIXELS = FEED_INT8 + "; from pixels, rint(pixel * {factor:.8g})"
    FEED_UINT8 = (
        "input '{name}' is uint8: feed pixels from 0 to 255 (the model applies scale, mean and std)"
    )
    FEED_UINT8_SCALED = (
        "input '{name}' is uint8: feed pixels from 0 to 255 (the first scale includes {scale:.6g})"
    )
    OF_FINDING = "{code}: {finding.message}"
    OF_FINDING_TO_FIX = OF_FINDING + " {finding.fix}"
    OF_FINDINGS_TO_FIX = OF_FINDING + " (and {more} more) {finding.fix}"
    OF_ALL_TO_FIX = OF_FINDING + " The same holds for {more} more. {finding.fix}"

    # The remainder in FP16
    HALF_BY_DEFAULT = (
        "everything that is not quantized is FP16, except inputs and outputs: {target} "
        "computes in the types of the file ({`high_precision`:'fp32'} keeps FP32)"
    )
    HALF_IMPOSSIBLE = (
        "everything that is not quantized stays FP32 and runs in FP32 on {target}: {error}"
    )
    STAY_FP32 = (
        "{count} tensors, their producers and their consumers stay FP32, because the largest "
        "value is close to FP16's limit of 65504: {kept:each %s (%.4g)}"
    )
    NORMS_WRITTEN = (
        "{count} decomposed normalizations were replaced by LayerNormalization, because FP16 "
        "cannot hold their squares"
    )
    NORMS_STAY_FP32 = (
        "{count} decomposed normalizations stay FP32 ({first} first): FP16 cannot hold their "
        "squares, and no LayerNormalization computes the same"
    )
    SQUARES_STAY_FP32 = "{count} other sums of squares stay FP32 ({first} first)"
    NOT_LOOKED_AT = (
        "tensors without Q/DQ were not checked for values that FP16 cannot hold: {error}"
    )
    SCALES_RAISED = (
        "the scales of {count} tensors were raised to the smallest that FP16 holds "
        "({least:.3g}), that of {tensor} {factor:.3g} times ({`high_precision`:'fp32'} keeps "
        "them)"
    )

    # Accuracy
    LOSSES_NOT_MEASURED = "the causes of accuracy loss were not measured: {error}"
    AGREEMENT_NOT_MEASURED = "agreement with the float model was not measured: {error}"
    HALF_DIFFERS = (
        "INT8 activations change the outputs by {int8:.1%}, together with FP16 by {half:.0%}:"
        " compare with {`high_precision`:'fp32'}"
    )
    NOT_PREDICTED = "not predicted: {error}"

    # verify and compare
    BUILT_BEFORE = "the build was made when this demo was written, not on this machine"

    # A line of a log
    PASS_UNKNOWN = (
        "{name} is a pass that no available build shows; qdqtool does not simulate it. Please"
        " report a log that contains it."
    )
    PASSES_SHARE_LINE = (
        "Several passes print this line: it belongs to the pass of the last 'Running: ...' "
        "line above it."
    )

    def __call__(self, **values: Any) -> Note:
        note = Note().saying(self.value, values)
        note.code = self.name.lower().replace("_", "-")
        return note


def note_codes(notes: Iterable[str]) -> list[str]:
    """Return the code of each note, an empty string for a plain string."""
    return [note.code if isinstance(note, Note) else "" for note in notes]
