"""Choice of the image preprocessing for a run, and its record in the model's metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from qdqtool.insertion.options import ImageOptions
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import PREPROCESS, set_metadata
from qdqtool.util.json_text import Json

if TYPE_CHECKING:
    import onnx


def resolve_images(model: Model, images: ImageOptions) -> tuple[ImageOptions, str]:
    """Return the preprocessing and size that a run uses, and the origin of the preprocessing.

    :class:`calibration.presets.PreprocessChoice` describes the origins.

    Raises:
        DataError: The preprocessing is unknown, or the model does not accept the size.
    """
    from calibration.presets import choose_preprocess
    from calibration.session import choose_size

    choice = choose_preprocess(model.metadata, images.preprocess)
    return ImageOptions(choice.preprocess, choose_size(model, images.size)), choice.origin


def record_preprocess(proto: onnx.ModelProto, used: Json) -> None:
    """Write the preprocessing into a model's metadata, so that later runs use it."""
    set_metadata(proto, PREPROCESS, json.dumps(used))
