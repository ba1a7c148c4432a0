"""Ranges of activations that other tools wrote: TensorRT, AIMET, PPQ, onnxruntime, Paddle.

The content of a file decides its format, see :data:`_JSON_FORMATS`. Sources: AIMET's encoding
specification 0.6.1, 1.0.0 and 2.0.0; ``ppq/parser/onnx_exporter.py`` and ``ppl.py``;
``write_calibration_table`` and ``save_tensors_data`` of onnxruntime; Paddle2ONNX's
``quantize/other_quantize_processor.cc``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibration.cache import parse_tensorrt_cache
from qdqtool.errors import DataError, shorten_text
from qdqtool.util import limits
from qdqtool.util.files import read_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.text import format_reason

_MAX_INT8 = 127.0
_BITS = 8
_HEX_LINE = re.compile(r"[^\n]{1,65536}: [0-9a-f]{8}")
_NUMBERS = re.compile(r"[-+.\w]+(?:,[-+.\w]+)?")

# Name of a tensor, and its scale for symmetric INT8; None if the entry has no usable scale.
_Entry = tuple[str, float | None]


@dataclass(frozen=True)
class RangeTable:
    """Scales of activations, read from a file of another tool.

    Attributes:
        format: Name of the format, for reports.
        scales: Scale (amax / 127) by tensor name; 0 for a tensor of zeros.
        skipped: Tensors without a usable scale. For example, their entry is not for 8 bits, is for
            a float type, or has a scale for each channel.
    """

    format: str
    scales: dict[str, float]
    skipped: list[str] = field(default_factory=list)


def read_range_table(path: str | os.PathLike[str]) -> RangeTable:
    """Read the ranges of activations that TensorRT or another tool wrote.

    Raises:
        DataError: The file is missing, has an unknown format, or a range is not usable.
    """
    name = os.fspath(path)
    data = read_input(path, limits.LIST_FILE, error=DataError)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "give a text or JSON file with ranges"
        if name.endswith(".flatbuffers"):
            hint = "give the calibration.json next to it"
        raise DataError(
            f"is not a table of ranges, because it is not text; {hint}", name, code="wrong-encoding"
        ) from error
    if text.startswith("TRT-"):
        return RangeTable("TensorRT", parse_tensorrt_cache(text, name))
    if text.lstrip()[:1] in ("{", "["):
        return _read_json_table(text, name)
    return _read_text_table(text, name)


def _read_json_table(text: str, name: str) -> RangeTable:
    try:
        content = parse_json(text, infinities=True)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not valid JSON: {format_reason(error)}; write the file again",
            name,
            code="wrong-format",
        ) from error
    for label, is_format, entries in _JSON_FORMATS:
        if is_format(content):
            try:
                return _make_table(label, entries(content), name)
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                raise DataError(
                    f"is damaged: an entry is not valid in {label}; write the file again",
                    name,
                    code="invalid-line",
                ) from error
    raise _unknown_format_error(name)


def _unknown_format_error(name: str) -> DataError:
    return DataError(
        "is not a table of ranges; give a TensorRT calibration table (first line 'TRT-...'), AIMET "
        "encodings, JSON of PPQ, onnxruntime, MQBench or {tensor: largest value}, or lines "
        "'tensor: largest value'",
        name,
        code="wrong-format",
    )


def _make_table(label: str, entries: Iterator[_Entry], name: str) -> RangeTable:
    """Return a table with the largest scale of each tensor.

    Raises:
        DataError: A scale is negative or not finite.
    """
    table = RangeTable(label, {})
    for tensor, scale in entries:
        if scale is None:
            table.skipped.append(tensor)
            continue
        if not math.isfinite(scale) or scale < 0:
            raise DataError(
                f"scale {scale:g} of tensor '{shorten_text(tensor)}' is not usable; calibrate "
                "again",
                name,
                code="invalid-scale",
                node=tensor,
            )
        table.scales[tensor] = max(scale, table.scales.get(tensor, 0.0))
    return table


def _symmetric_scale(low: float, high: float) -> float:
    """Return the symmetric INT8 scale that covers a range; NaN if the range is not valid."""
    if math.isnan(low) or math.isnan(high) or low > high:
        return math.nan
    return max(abs(low), abs(high)) / _MAX_INT8


def _read_single_number(value: Any) -> float | None:
    """Return the only number in a value; None if a list does not have exactly one entry.

    Args:
        value: Number, list that may be nested, or JSON object with the numbers under ``data``.

    Raises:
        TypeError: The value is not a number.
    """
    for _ in range(3):
        if isinstance(value, Mapping):
            value = value["data"]
        if isinstance(value, list):
            if len(value) != 1:
                return None
            value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)


# Text ---------------------------------------------------------------------------------------------


def _has_any_scale(entries: Iterable[_Entry]) -> bool:
    return any(scale is not None for _, scale in entries)


def _read_text_table(text: str, name: str) -> RangeTable:
    """Read lines ``tensor: range`` of Paddle or ``tensor range`` of onnxruntime.

    For a tensor with a scale for each channel, Paddle writes only the tensor's name.
    """
    lines = list(filter(None, map(str.strip, text.splitlines())))
    if lines and all(map(_HEX_LINE.fullmatch, lines)):
        raise DataError(
            "looks like a TensorRT calibration table without its first line; add a first line such "
            "as 'TRT-8502-EntropyCalibration2'",
            name,
            code="wrong-format",
        )
    entries: list[_Entry] = []
    for number, line in enumerate(lines, 1):
        tensor, numbers = _split_line(line[: limits.NAME])
        if not _NUMBERS.fullmatch(numbers):
            entries.append((line, None))
            continue
        try:
            entries.append((tensor, _parse_scale(numbers)))
        except ValueError:
            if not _has_any_scale(entries):
                raise _unknown_format_error(name) from None
            raise DataError(
                f"line {number} is not 'tensor: largest value'; correct the line",
                name,
                code="invalid-line",
            ) from None
    if not _has_any_scale(entries):
        raise _unknown_format_error(name)
    return _make_table("text", iter(entries), name)


def _parse_scale(numbers: str) -> float:
    """Return the scale for a text that is the largest value, or several values with commas."""
    values = [float(v) for v in numbers.split(",")]
    if len(values) == 1:
        return values[0] / _MAX_INT8
    return _symmetric_scale(min(values), max(values))


def _split_line(line: str) -> tuple[str, str]:
    joined = re.sub(r"\s?,\s?", ",", " ".join(line.split()))
    tensor, separator, numbers = joined.rpartition(" ")
    if not separator:
        tensor, _, numbers = joined.rpartition(":")
    return tensor.removesuffix(":"), numbers if tensor else ""


# AIMET --------------------------------------------------------------------------------------------


def _is_aimet(content: Any) -> bool:
    return isinstance(content, dict) and (
        isinstance(content.get("activation_encodings"), dict | list)
        or (isinstance(content.get("encodings"), list) and "version" in content)
    )


def _aimet_entries(content: Any) -> Iterator[_Entry]:
    """Yield the entries of AIMET's encodings in the versions 0.6.1, 1.0.0 and 2.0.0."""
    if "activation_encodings" not in content:
        for entry in content["encodings"]:
            yield entry["name"], _aimet_scale_2_0_0(entry)
    elif isinstance(content["activation_encodings"], list):
        for entry in content["activation_encodings"]:
            yield entry["name"], _aimet_scale_1_0_0(entry)
    else:
        for name, encodings in content["activation_encodings"].items():
            # A tensor with several encodings has one for each channel, so it has no single scale.
            listed = encodings if isinstance(encodings, list) else list(encodings.values())
            yield name, _aimet_scale_0_6_1(listed[0]) if len(listed) == 1 else None


def _aimet_scale_0_6_1(entry: Mapping[str, Any]) -> float | None:
    if entry.get("dtype", "int") != "int" or int(entry["bitwidth"]) != _BITS:
        return None
    if str(entry.get("is_symmetric")) == "True" and "scale" in entry:
        return float(entry["scale"])
    return _symmetric_scale(float(entry["min"]), float(entry["max"]))


def _aimet_scale_1_0_0(entry: Mapping[str, Any]) -> float | None:
    if str(entry.get("dtype", "INT")).upper() != "INT" or int(entry["bw"]) != _BITS:
        return None
    scale = _read_single_number(entry["scale"])
    if scale is None or entry.get("is_sym"):
        return scale
    offset = _read_single_number(entry["offset"])  # offset of the smallest integer, from -255 to 0
    return None if offset is None else _cover_asymmetric_range(scale, offset, offset + 255)


def _aimet_scale_2_0_0(entry: Mapping[str, Any]) -> float | None:
    low, high = {"int8": (-128, 127), "uint8": (0, 255)}.get(entry["output_dtype"], (0, 0))
    scale = _read_single_number(entry["y_scale"]) if high else None
    zero_point = _read_single_number(entry.get("y_zero_point") or 0)
    if scale is None or zero_point is None:
        return None
    return _cover_asymmetric_range(scale, low - zero_point, high - zero_point)


def _cover_asymmetric_range(scale: float, low: float, high: float) -> float:
    """Return the symmetric INT8 scale that covers the range of an asymmetric quantization.

    Args:
        scale: Scale of the asymmetric quantization.
        low: Smallest integer minus the zero point.
        high: Largest integer minus the zero point.
    """
    if not (math.isfinite(scale) and scale >= 0):
        return scale
    if (low, high) == (-128, 127):
        return scale
    return _symmetric_scale(low * scale, high * scale)


# PPQ ----------------------------------------------------------------------------------------------


def _is_ppq(content: Any) -> bool:
    return isinstance(content, dict) and any(
        isinstance(content.get(key), dict) for key in ("act_quant_info", "quant_info", "configs")
    )


def _ppq_entries(content: Any) -> Iterator[_Entry]:
    """Yield the entries of PPQ's JSON: for TensorRT, for PPL, or with settings per operation."""
    if "act_quant_info" in content:
        for name, value in content["act_quant_info"].items():
            amax = _read_single_number(value)
            yield name, None if amax is None else abs(amax) / _MAX_INT8
    elif "quant_info" in content:
        for name, entry in content["quant_info"].items():
            yield name, _ppq_scale(entry, entry, entry.get("q_min"), entry.get("q_max"))
    else:
        for tensors in content["configs"].values():
            for name, entry in tensors.items():
                numbers = content.get("values", {}).get(str(entry.get("dominator")), entry)
                yield name, _ppq_scale(entry, numbers, entry["quant_min"], entry["quant_max"])


def _ppq_scale(
    entry: Mapping[str, Any], numbers: Mapping[str, Any], low: Any, high: Any
) -> float | None:
    if int(entry["bit_width"]) != _BITS or numbers.get("scale") is None:
        return None
    scale = _read_single_number(numbers["scale"])
    zero_point = _read_single_number(numbers.get("zero_point", numbers.get("offset", 0)))
    if scale is None or zero_point is None:
        return None
    return _cover_asymmetric_range(scale, float(low) - zero_point, float(high) - zero_point)


# onnxruntime --------------------------------------------------------------------------------------


def _is_onnxruntime(content: Any) -> bool:
    entries = content.get("data", content) if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries:
        return False
    first = next((v for k, v in entries.items() if k != "CLS"), None)
    if isinstance(first, list):
        return bool(first) and _is_onnxruntime_limit(first[0])
    return isinstance(first, dict) and first.get("CLS") == "TensorData"


def _is_onnxruntime_limit(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, dict) and "CLS" in value)


def _onnxruntime_entries(content: Any) -> Iterator[_Entry]:
    """Yield the entries of onnxruntime's TensorsData, or of ``{tensor: [low, high]}``."""
    is_tensors_data = content.get("CLS") == "TensorsData"
    for name, entry in (content["data"] if is_tensors_data else content).items():
        if name == "CLS":
            continue
        if isinstance(entry, dict):
            if "lowest" not in entry or "highest" not in entry:
                yield name, None  # calibration with the method Distribution writes no range
                continue
            low, high = _read_single_number(entry["lowest"]), _read_single_number(entry["highest"])
        else:
            low, high = (_read_single_number(value) for value in entry[:2])
        yield name, None if low is None or high is None else _symmetric_scale(low, high)


# MQBench, and plain JSON -------------------------------------------------------------------------

_MQBENCH = ("tensorrt", "ppl", "ppl-cuda", "sophgo_tpu", "vitis")  # keys in clip_ranges.json
_AMAX_KEYS = ("amax", "max_abs", "threshold")
_SCALE_KEYS = ("scale", "step")


def _unwrap_entries(content: Any) -> Any:
    """Return the entries by tensor name. MQBench writes them under the name of a backend."""
    for key in _MQBENCH:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            return content.get("blob_range", content)
    return content


def _is_plain_table(content: Any) -> bool:
    entries = _unwrap_entries(content)
    if not isinstance(entries, dict) or not entries:
        return False
    range_keys = {*_AMAX_KEYS, *_SCALE_KEYS, "min"}
    return all(
        isinstance(entry, int | float)
        or (isinstance(entry, dict) and not range_keys.isdisjoint(entry))
        for entry in entries.values()
    )


def _range_entries(content: Any) -> Iterator[_Entry]:
    """Yield the entries of JSON with largest value, min and max, scale or amax per tensor."""
    for name, entry in _unwrap_entries(content).items():
        if not isinstance(entry, dict):
            value = _read_single_number(entry)
            yield name, None if value is None else value / _MAX_INT8
        elif _read_single_number(entry.get("bit", entry.get("bitwidth", _BITS))) != _BITS:
            yield name, None
        else:
            yield name, _read_scale(entry)


def _read_scale(entry: Mapping[str, Any]) -> float | None:
    for key in _AMAX_KEYS:
        if key in entry:
            value = _read_single_number(entry[key])
            return None if value is None else value / _MAX_INT8
    is_symmetric = _read_single_number(entry.get("zero_point", 0)) == 0
    for key in _SCALE_KEYS:
        if key in entry and is_symmetric:
            return _read_single_number(entry[key])
    if "min" not in entry:
        return None  # the integer type is unknown, so the zero point does not determine the range
    low, high = _read_single_number(entry["min"]), _read_single_number(entry["max"])
    return None if low is None or high is None else _symmetric_scale(low, high)


_JSON_FORMATS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], Iterator[_Entry]]], ...] = (
    ("AIMET encodings", _is_aimet, _aimet_entries),
    ("PPQ JSON", _is_ppq, _ppq_entries),
    ("onnxruntime ranges", _is_onnxruntime, _onnxruntime_entries),
    ("JSON of ranges", _is_plain_table, _range_entries),
)
