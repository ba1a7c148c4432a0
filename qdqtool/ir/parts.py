"""Mark in the metadata of a model that is a part of another model, without its detection head."""

import onnx

from qdqtool.ir.graph import Model

_KEY = "qdqtool.part"


def mark_part(proto: onnx.ModelProto) -> None:
    """Mark a model whose last convolutions are not those of a detection head, in place."""
    metadata = {p.key: p.value for p in proto.metadata_props}
    onnx.helper.set_model_props(proto, {**metadata, _KEY: "no head"})


def is_marked_part(model: Model) -> bool:
    """Return whether :func:`mark_part` marked a model. The model may be of any origin."""
    return _KEY in model.metadata
