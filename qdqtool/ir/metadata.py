"""Metadata that qdqtool writes into models, so that later commands use it.

The metadata of a model may be of any origin, so readers of a key must accept any text.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from qdqtool.ir.graph import Model

COMMON_SCALES = "qdqtool.common-scales"  # scales of quantizers before `fix` set common scales, JSON
INPUT_SIZE = "qdqtool.size"  # height and width that the user gave to `insert` or `tune`
PIXEL_FACTOR = "qdqtool.pixel-factor"  # preprocessing factor in the scale of a uint8 input
PREPROCESS = "qdqtool.preprocess"  # preprocessing of the calibration images, JSON
SMOOTHED = "qdqtool.smoothed"  # tensors whose outliers were moved into weights, one per line
_REFUSED_FIXES = "qdqtool.refused-fixes"  # code and node of findings that `fix` left, one per line
_PART = "qdqtool.part"  # the model is a part of another model, without its detection head
_TUNED_HEAD = "qdqtool.tuned-head"  # nodes of a head that `tune` chose to quantize, one per line


def set_metadata(proto: onnx.ModelProto, key: str, text: str) -> None:
    """Write an entry to the metadata of a model, in place.

    Earlier entries of the key are replaced. An empty text removes them.
    """
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    if text:
        proto.metadata_props.add(key=key, value=text)


def read_smoothed_tensors(model: Model) -> frozenset[str]:
    """Return the tensors whose outliers SmoothQuant moved to weights."""
    return frozenset(model.metadata.get(SMOOTHED, "").splitlines())


def read_tuned_head(model: Model) -> frozenset[str]:
    """Return the nodes of a head that ``tune`` chose to quantize."""
    return frozenset(model.metadata.get(_TUNED_HEAD, "").splitlines())


def record_tuned_head(proto: onnx.ModelProto, nodes: Iterable[str]) -> None:
    """Write the nodes of a head that ``tune`` chose to quantize, if there are any."""
    set_metadata(proto, _TUNED_HEAD, "\n".join(sorted(nodes)))


def read_refused_fixes(model: Model) -> frozenset[tuple[str, str]]:
    """Return code and node of the findings whose fixes ``fix`` refused because of the outputs."""
    lines = (line.partition(" ") for line in model.metadata.get(_REFUSED_FIXES, "").splitlines())
    return frozenset((code, node) for code, _, node in lines)


def record_refused_fixes(proto: onnx.ModelProto, places: Iterable[tuple[str, str]]) -> None:
    """Write code and node of the findings whose fixes the outputs refused, if there are any.

    Earlier entries are replaced.
    """
    lines = sorted(f"{code} {node}" for code, node in places)
    set_metadata(proto, _REFUSED_FIXES, "\n".join(lines))


def mark_part(proto: onnx.ModelProto) -> None:
    """Mark a model whose last convolutions are not those of a detection head, in place."""
    set_metadata(proto, _PART, "no head")


def is_marked_part(model: Model) -> bool:
    """Return whether :func:`mark_part` marked a model."""
    return _PART in model.metadata
