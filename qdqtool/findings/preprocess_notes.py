"""Notes and warnings on the image preprocessing of a run."""

from __future__ import annotations

from calibration.presets import note_preprocess, note_unused_preprocess
from qdqtool.ir.graph import Model
from qdqtool.patterns.network_kind import warn_preprocess
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note


def describe_preprocess(model: Model, used: Json | None, origin: str, data: object) -> list[Note]:
    """Return notes on the preprocessing of a run, and warnings if it does not fit the network.

    Args:
        model: The network, with or without Q/DQ.
        used: The preprocessing, as in the JSON of the run, to which the origin is added. None if
            the calibration data are arrays.
        origin: Origin of the preprocessing, see :class:`calibration.presets.PreprocessChoice`.
        data: The calibration data.
    """
    if used is None:
        return note_unused_preprocess(origin, data)
    used["origin"] = origin
    return [note_preprocess(used), *warn_preprocess(model, used)]
