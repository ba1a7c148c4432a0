"""Conversion of network inputs to int8 or uint8, for applications that feed integers.

* ``int8``: the Q of the input is removed. The application feeds what this Q would compute: ``rint(x
  / scale)`` from -128 to 127. Only a DequantizeLinear remains between the input and the
  convolution, as in ModelOpt's ``--direct_io_types``.
* ``uint8``: the input has pixels from 0 to 255, as a decoder returns them. A Cast converts them to
  float, because TensorRT has UINT8 only for inputs and outputs (since 8.5). The factor of the
  preprocessing (1/255) becomes part of the scale of the first Q, which costs no time. A mean or a
  standard deviation cannot become part of the scale. They become one Mul and one Add.

The application must still reorder the channels, and resize and letterbox the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.number_formats import INT8, NumberFormat
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import PIXEL_FACTOR, set_metadata
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from calibration.options import Preprocess

_MAX_PIXEL = 255.0


def _is_scale_only(preprocess: Preprocess) -> bool:
    return not any(preprocess.mean) and all(s == 1.0 for s in preprocess.std)


def check_pixel_range(name: str, low: float, high: float, preprocess: Preprocess) -> None:
    """Check that calibration values are in the range to which `preprocess` maps pixels.

    Arrays that had another preprocessing fail this check.

    Raises:
        ModelError: `low` or `high` is outside the range to which `preprocess` maps 0 to 255.
    """
    pixels = np.array([[0.0], [_MAX_PIXEL]])
    values = (pixels * preprocess.scale - np.asarray(preprocess.mean)) / np.asarray(preprocess.std)
    least, most = float(values.min()), float(values.max())
    slack = 1e-3 * (most - least)
    if low < least - slack or high > most + slack:
        raise ModelError(
            f"`input_type='uint8'`: the calibration data has values from {low:.6g} to {high:.6g} "
            f"in '{name}', but with the given preprocessing, pixels become {least:.6g} to "
            f"{most:.6g}; give the `scale`, `mean` and `std` of the calibration data",
            code="out-of-range",
            parameter="input_type",
            node=name,
        )


def check_input_type(input_type: str, target: Target, number_format: NumberFormat) -> None:
    """Check that a target accepts inputs of a type.

    Raises:
        QdqtoolError: The target does not accept the type, or the type is not float and the format
            of the pairs is not INT8.
    """
    if input_type != "float" and number_format != INT8:
        raise QdqtoolError(
            f"`input_type={input_type!r}` needs INT8 pairs, but `precision` is "
            f"{number_format.name}. Use `input_type='float'`",
            code="option-conflict",
            parameter="input_type",
        )
    if input_type == "uint8" and not target.uint8_inputs:
        raise QdqtoolError(
            f"`input_type='uint8'`: {target.name} has no UINT8 inputs; use int8, float, or "
            "TensorRT 8.5 or newer",
            code="unsupported",
            parameter="input_type",
        )


def convert_inputs_to_integers(model: Model, input_type: str, preprocess: Preprocess) -> list[Note]:
    """Change the quantized float inputs of a Q/DQ model into integers, in place.

    Args:
        model: A model with pairs of :func:`qdqtool.insertion.rewrite.insert_pairs`.
        input_type: ``int8`` or ``uint8``.
        preprocess: How images become the float inputs.

    Returns:
        A note for each changed input. The note says which values to feed.

    Raises:
        ModelError: No float input is quantized. An input is also an output. For ``int8``: an input
            has float consumers or several scales. For ``uint8``: an input does not have the
            channels of `preprocess`.
    """
    editor = Editor(model)
    notes: list[Note] = []
    for name in model.inputs:
        tensor = _find_float_input(model, name)
        if model.elem_type(tensor) not in QUANTIZABLE or not _find_quantizers(model, tensor):
            continue
        if input_type == "int8":
            notes.append(_convert_to_int8(editor, name, tensor, preprocess))
        else:
            notes.append(_convert_to_uint8(editor, name, tensor, preprocess))
    if not notes:
        raise ModelError(
            f"`input_type={input_type!r}`: no float input of the model is quantized"
            f"{_name_float_consumer(model)}; remove an `exclude` that matches the node that reads "
            "the input, or leave `input_type` out",
            code="option-without-effect",
            parameter="input_type",
        )
    editor.finish()
    return notes


def _name_float_consumer(model: Model) -> str:
    """Return the first node that reads a float input, as the end of a clause; empty if none."""
    for name in model.inputs:
        tensor = _find_float_input(model, name)
        if model.elem_type(tensor) in QUANTIZABLE and model.consumers(tensor):
            return f" ('{model.consumers(tensor)[0].name}' reads '{name}' as float)"
    return ""


def _find_float_input(model: Model, name: str) -> str:
    """Return an input; for a float16 input whose only consumer is a Cast, the Cast's output."""
    consumers = model.consumers(name)
    if model.elem_type(name) != TensorProto.FLOAT16 or model.is_output(name):
        return name
    return consumers[0].output if [n.op for n in consumers] == ["Cast"] else name


def _find_quantizers(model: Model, tensor: str) -> list[Node]:
    consumers = model.consumers(tensor)
    return [n for n in consumers if n.op == "QuantizeLinear" and n.input(0) == tensor]


def _read_scale(model: Model, quantizer: Node) -> float:
    value = model.constant(quantizer.input(1))
    assert value is not None and value.size == 1
    return float(value.reshape(-1)[0])


def _convert_to_int8(editor: Editor, name: str, tensor: str, preprocess: Preprocess) -> Note:
    model = editor.model
    quantizers = _find_quantizers(model, tensor)
    indices = {q.index for q in quantizers}
    others = [n.name for n in model.consumers(tensor) if n.index not in indices]
    scales = {_read_scale(model, q) for q in quantizers}
    if others or len(scales) != 1 or model.is_output(tensor):
        reason = "it is also an output of the model, or has several scales"
        if others:
            reason = f"'{others[0]}' reads it as float"
        raise ModelError(
            f"`input_type='int8'` does not fit input '{name}', because {reason}; use uint8 or "
            "float",
            code="needed-as-float",
            parameter="input_type",
            node=name,
        )
    for quantizer in quantizers:
        editor.redirect_consumers(quantizer.output, name)
        editor.remove(quantizer)
    if tensor != name:
        editor.remove(model.consumers(name)[0])
    editor.set_type([name], TensorProto.INT8)
    scale = scales.pop()
    text = (
        f"input '{name}' is int8: feed rint(x / {scale:.8g}) clipped to -128 ... 127, where x is "
        "the input of the float model"
    )
    if not _is_scale_only(preprocess):
        return Note(text, code="feed-int8", name=name, scale=scale)
    factor = preprocess.scale / scale
    text += f"; from pixels, rint(pixel * {factor:.8g})"
    return Note(text, code="feed-int8-pixels", name=name, scale=scale, factor=factor)


def _convert_to_uint8(editor: Editor, name: str, tensor: str, preprocess: Preprocess) -> Note:
    model = editor.model
    if model.is_output(name):
        raise ModelError(
            f"`input_type='uint8'` does not fit input '{name}', because it is also an output of "
            "the model; leave the option out",
            code="input-is-output",
            parameter="input_type",
            node=name,
        )
    pixels, float_type = tensor, model.elem_type(tensor)
    if tensor == name:  # otherwise the Cast of the float16 input already converts pixels to float
        pixels = editor.unique_name(f"{name}_pixels")
        editor.add_cast(name, pixels, float_type)
    is_scale_only = _is_scale_only(preprocess)
    quantizers: list[Node] = []  # these get scales that include the factor of the preprocessing
    floats: list[Node] = []
    for consumer in model.consumers(tensor):
        is_folded = is_scale_only and consumer.op == "QuantizeLinear"
        (quantizers if is_folded else floats).append(consumer)
    for quantizer in quantizers:
        scale = _read_scale(model, quantizer) / preprocess.scale
        array = np.asarray(scale, helper.tensor_dtype_to_np_dtype(float_type))
        editor.set_input(quantizer, 1, editor.add_constant(f"{quantizer.input(1)}_pixels", array))
    if pixels != tensor:
        editor.redirect_consumers(tensor, pixels, quantizers)
    if floats:
        editor.redirect_consumers(
            tensor, _insert_preprocessing(editor, tensor, pixels, preprocess), floats
        )
    editor.set_type([name], TensorProto.UINT8)
    text = f"input '{name}' is uint8: feed pixels from 0 to 255"
    if quantizers:
        set_metadata(model.proto, PIXEL_FACTOR, repr(float(preprocess.scale)))
    if is_scale_only:
        text += f" (the first scale includes {preprocess.scale:.6g})"
        return Note(text, code="feed-uint8-scaled", name=name, scale=preprocess.scale)
    text += " (the model applies scale, mean and std)"
    return Note(text, code="feed-uint8", name=name)


def _insert_preprocessing(editor: Editor, name: str, pixels: str, preprocess: Preprocess) -> str:
    first = editor.model.consumers(name)[0]
    dtype = helper.tensor_dtype_to_np_dtype(editor.model.elem_type(name))

    def insert(op: str, source: str, suffix: str, value: object) -> str:
        constant = editor.add_constant(f"{name}_{suffix}", np.asarray(value, dtype))
        return editor.insert_node(first, op, f"{name}/{op}", [source, constant])

    if _is_scale_only(preprocess):
        return insert("Mul", pixels, "factor", preprocess.scale)
    rank = len(editor.model.shape(name) or (1, 1, 1, 1))
    shape = (1, -1, *(1,) * (rank - 2))  # broadcasts along the channel axis: [1, channels, 1, 1]
    mean = _to_channel_array(editor.model, name, preprocess.mean)
    std = _to_channel_array(editor.model, name, preprocess.std)
    product = insert("Mul", pixels, "factor", (preprocess.scale / std).reshape(shape))
    return insert("Add", product, "shift", (-mean / std).reshape(shape))


def _to_channel_array(model: Model, name: str, values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return one value if all values are equal, else all values, one for each channel."""
    if len(set(values)) == 1:
        return np.asarray(values[:1], np.float64)
    shape = model.shape(name)
    if shape is None or len(shape) != 4 or shape[1] != len(values):
        raise ModelError(
            f"`input_type='uint8'`: `mean` or `std` differs between channels, but input '{name}' "
            f"is not NCHW with {len(values)} channels; give equal values, or leave `input_type` "
            "out",
            code="wrong-shape",
            parameter="input_type",
            node=name,
        )
    return np.asarray(values, np.float64)
