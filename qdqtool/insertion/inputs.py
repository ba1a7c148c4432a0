"""The network's input as integers, so that a deployment need not write floats.

* ``int8``: the first Q goes, and the input holds what it would have made: ``rint(x / scale)`` from -128 to 127. Only a
  DequantizeLinear is left between the input and the convolution, as in ModelOpt's ``--direct_io_types``.
* ``uint8``: the input holds pixels from 0 to 255, as they come from a decoder. A Cast makes them float (TensorRT takes
  UINT8 at the network's boundary only, from 8.5 on), and the factor of the preprocessing (1/255) goes into the scale of
  the first Q, so that it costs nothing. A mean or a deviation cannot go there; they become one Mul and one Add.

The order of channels, the size and the letterbox stay the caller's.

Which tensors the calibration looks at, and what is reported of it, is here as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.insertion.options import CacheOptions, ClusterOptions, ImageOptions
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.scales import (
    LEVELS,
    GroupMember,
    GroupScale,
    ScaleGroup,
    clamp_scale,
    fixed_scale,
)
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.trt.targets import Target
from qdqtool.types import Json
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import said

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.options import Preprocess
    from qdqtool.insertion.result import Insertion


_LEVELS = 255.0


def _plain(preprocess: Preprocess) -> bool:
    """Whether pixels are multiplied by one number and no more."""
    return not any(preprocess.mean) and all(s == 1.0 for s in preprocess.std)


def check_pixels(name: str, low: float, high: float, preprocess: Preprocess) -> None:
    """Whether the calibration data can be pixels under this preprocessing: of arrays nobody says how they were made.

    Raises:
        ModelError: It cannot.
    """
    ends = (
        np.array([[0.0], [_LEVELS]]) * preprocess.scale - np.asarray(preprocess.mean)
    ) / np.asarray(preprocess.std)
    least, most = float(ends.min()), float(ends.max())
    slack = 1e-3 * (most - least)
    if low < least - slack or high > most + slack:
        raise ModelError(
            said(
                "{`input_type`:'uint8'}: the calibration data has values from {low:.6g} to {high:.6g} in "
                "'{name}', and pixels become {least:.6g} to {most:.6g}; give the {`scale`}, {`mean`} and "
                "{`std`} that it was made with",
                low=low,
                high=high,
                name=name,
                least=least,
                most=most,
            ),
            code="out-of-range",
            parameter="input_type",
            node=name,
        )


def check_input_type(kind: str, target: Target) -> None:
    """Before the work: whether a target takes such an input.

    Raises:
        QdqtoolError: It does not.
    """
    if kind == "uint8" and not target.uint8_inputs:
        raise QdqtoolError(
            said(
                "{`input_type`:'uint8'}: {name} has no UINT8 inputs (8.5 has); use int8 or float",
                name=target.name,
            ),
            code="unsupported",
            parameter="input_type",
        )


def change_inputs(model: Model, kind: str, preprocess: Preprocess) -> list[Note]:
    """Turns the float inputs of a model that :func:`qdqtool.insertion.rewrite.insert_pairs` made into integers, in place.

    Returns:
        What to feed, one sentence for each input.

    Raises:
        ModelError: No input is a quantized picture, or floats read it as well (``int8``).
    """
    editor = Editor(model)
    notes: list[Note] = []
    for name in model.inputs:
        tensor = _float_of(model, name)
        quantizers = [
            r for r in model.consumers(tensor) if r.op == "QuantizeLinear" and r.input(0) == tensor
        ]
        if not quantizers or model.elem_type(tensor) not in QUANTIZABLE:
            continue
        if kind == "int8":
            notes.append(_int8(editor, name, tensor, quantizers, preprocess))
        else:
            notes.append(_uint8(editor, name, tensor, preprocess))
    if not notes:
        raise ModelError(
            said(
                "{`input_type`:{kind!r}}: no float input of the model is quantized; leave the option "
                "out",
                kind=kind,
            ),
            code="option-without-effect",
            parameter="input_type",
        )
    editor.finish()
    return notes


def _float_of(model: Model, name: str) -> str:
    """A float16 input's values as float, where a Cast makes them and nothing else reads it; else the input itself."""
    readers = model.consumers(name)
    if model.elem_type(name) != TensorProto.FLOAT16 or len(readers) != 1 or readers[0].op != "Cast":
        return name
    return name if model.is_output(name) else readers[0].output


def _scale_of(model: Model, quantizer: Node) -> float:
    value = model.constant(quantizer.input(1))
    assert value is not None and value.size == 1
    return float(value.reshape(-1)[0])


def _int8(
    editor: Editor, name: str, tensor: str, quantizers: Sequence[Node], preprocess: Preprocess
) -> Note:
    model = editor.model
    others = [
        r.name for r in model.consumers(tensor) if r.index not in {q.index for q in quantizers}
    ]
    scales = {_scale_of(model, q) for q in quantizers}
    if others or len(scales) != 1 or model.is_output(tensor):
        reader = "it is needed as float or with several scales"
        if others:
            reader = said("'{other}' reads it as float", other=others[0])
        raise ModelError(
            said(
                "{`input_type`:'int8'}: input '{name}': {reader}; use uint8 or float",
                name=name,
                reader=reader,
            ),
            code="needed-as-float",
            parameter="input_type",
            node=name,
        )
    for q in quantizers:
        editor.redirect(q.output, name)
        editor.remove(q)
    if tensor != name:
        editor.remove(model.consumers(name)[0])
    editor.set_type([name], TensorProto.INT8)
    scale = scales.pop()
    if _plain(preprocess):
        return Remark.FEED_INT8_PIXELS(name=name, scale=scale, factor=preprocess.scale / scale)
    return Remark.FEED_INT8(name=name, scale=scale)


def _uint8(editor: Editor, name: str, tensor: str, preprocess: Preprocess) -> Note:
    model = editor.model
    if model.is_output(name):
        raise ModelError(
            said(
                "{`input_type`:'uint8'}: input '{name}' is an output as well; leave the option out",
                name=name,
            ),
            code="input-is-output",
            parameter="input_type",
            node=name,
        )
    pixels, kind = tensor, model.elem_type(tensor)
    if tensor == name:  # else the Cast that there is makes float of pixels too
        pixels = editor.unique_name(f"{name}_pixels")
        editor.cast(name, pixels, kind)
    readers = model.consumers(tensor)
    plain = _plain(preprocess)
    folded = [r for r in readers if plain and r.op == "QuantizeLinear"]
    rest = [r for r in readers if r not in folded]
    for q in folded:
        factor = np.asarray(
            _scale_of(model, q) / preprocess.scale, helper.tensor_dtype_to_np_dtype(kind)
        )
        editor.set_input(q, 1, editor.constant(f"{q.input(1)}_pixels", factor))
    if pixels != tensor:
        editor.redirect(tensor, pixels, folded)
    if rest:
        editor.redirect(tensor, _scaled(editor, tensor, pixels, preprocess), rest)
    editor.set_type([name], TensorProto.UINT8)
    return (Remark.FEED_UINT8_SCALED if plain else Remark.FEED_UINT8)(
        name=name, scale=preprocess.scale
    )


def _scaled(editor: Editor, name: str, pixels: str, preprocess: Preprocess) -> str:
    """What the float network takes, made of pixels: one Mul, and an Add where there is a mean."""
    first = editor.model.consumers(name)[0]
    kind = helper.tensor_dtype_to_np_dtype(editor.model.elem_type(name))

    def step(op: str, source: str, what: str, value: object) -> str:
        constant = editor.constant(f"{name}_{what}", np.asarray(value, kind))
        return editor.insert(first, op, f"{name}/{op}", [source, constant])

    if _plain(preprocess):
        return step("Mul", pixels, "factor", preprocess.scale)
    rank = len(editor.model.shape(name) or (1, 1, 1, 1))
    by_channel = (1, -1, *(1,) * (rank - 2))
    mean, std = (_by_channel(editor.model, name, v) for v in (preprocess.mean, preprocess.std))
    multiplied = step("Mul", pixels, "factor", (preprocess.scale / std).reshape(by_channel))
    return step("Add", multiplied, "shift", (-mean / std).reshape(by_channel))


def _by_channel(model: Model, name: str, values: Sequence[float]) -> npt.NDArray[np.float64]:
    """One value where all are the same, else one for each channel of the input."""
    if len(set(values)) == 1:
        return np.asarray(values[:1], np.float64)
    shape = model.shape(name)
    if shape is None or len(shape) != 4 or shape[1] != len(values):
        raise ModelError(
            said(
                "{`input_type`:'uint8'}: input '{name}' has not the {count} channels of {`mean`} and "
                "{`std`}",
                name=name,
                count=len(values),
            ),
            code="wrong-shape",
            parameter="input_type",
            node=name,
        )
    return np.asarray(values, np.float64)


def collect_for(
    model: Model,
    data: object,
    groups: Sequence[ScaleGroup],
    *,
    max_images: int,
    images: ImageOptions | None = None,
    cache: CacheOptions | None = None,
    cluster: ClusterOptions | None = None,
    progress: bool = False,
) -> tuple[Statistics, Json]:
    """Runs the model over the data and returns statistics of the groups' sources, and what to report.

    Raises:
        ModelError: onnxruntime cannot run the model.
        DataError: There is no usable data.
    """
    from calibration import Focus, Preprocess, collect

    if data is None:
        raise DataError(
            said(
                "no calibration data; give a folder of images ({`data`}) or a TensorRT table "
                "({`calib_table`})"
            ),
            code="missing-argument",
            parameter="data",
        )
    images, cache = images or ImageOptions(), cache or CacheOptions()
    cluster = cluster or ClusterOptions()
    tensors = list(dict.fromkeys(t for g in groups for t in g.sources))
    scores = find_class_outputs(model)
    statistics = collect(
        model,
        data,
        tensors,
        cache=cache.calib_cache,
        overwrite_cache=cache.overwrite_cache,
        progress=progress,
        preprocess=images.preprocess or Preprocess(),
        max_images=max_images,
        size=images.size,
        focus=Focus(scores) if scores else None,
        cluster=cluster.cluster,
        mixed_cpus=cluster.mixed_cpus,
    )
    report: Json = {
        "images": statistics.images,
        "data": str(data) if isinstance(data, str | os.PathLike) else "",
        "tensors": len(tensors),
        "focus": list(scores),
        "fingerprint": statistics.fingerprint,
        "cache": os.fspath(cache.calib_cache) if cache.calib_cache is not None else None,
        "skipped": [{"file": name, "reason": reason} for name, reason in statistics.skipped],
        "warnings": list(statistics.warnings),
        "notes": list(statistics.notes),
    }
    return statistics, report


def scales_from_table(
    path: str | os.PathLike[str], groups: Sequence[ScaleGroup]
) -> list[GroupScale]:
    """Scales of all groups from a TensorRT calibration table; a group takes the largest of its tensors' scales.

    Raises:
        DataError: The table cannot be read, or has no entry for a group.
    """
    from calibration.cache import read_tensorrt_cache

    table = read_tensorrt_cache(path)
    result = []
    for group in groups:
        if group.largest is not None:
            result.append(fixed_scale(group, group.largest))
            continue
        known = {t: table[t] for t in group.tensors if table.get(t, 0.0) > 0.0}
        if not known:
            raise DataError(
                f"has no scale for tensor '{group.quantized[0]}'",
                os.fspath(path),
                code="missing-scale",
                parameter="calib_table",
                node=group.quantized[0],
            )
        scale = clamp_scale(max(known.values()))
        members = tuple(
            GroupMember(t, s * LEVELS, 0.0) for t, s in known.items() if t in group.sources
        )
        result.append(GroupScale(group, scale, "table", members))
    return result


def write_table(insertion: Insertion, path: str | os.PathLike[str]) -> None:
    """Writes the activation scales as a TensorRT calibration table (``IInt8Calibrator::readCalibrationCache``).

    Raises:
        QdqtoolError: The file cannot be written.
    """
    from calibration.cache import write_tensorrt_cache

    scales = {q.tensor: q.scale for q in insertion.activations if not isinstance(q.scale, list)}
    write_tensorrt_cache(path, scales)
