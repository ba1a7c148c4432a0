"""Conversion from and to graphs of onnx-graphsurgeon.

onnx-graphsurgeon drops the metadata of a model, such as YOLO's class names and strides. Graphs
of :func:`to_graphsurgeon` have the metadata as the attribute ``metadata_props``, which
:func:`from_graphsurgeon` reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import onnx

from qdqtool.errors import ModelError
from qdqtool.util.text import format_reason

if TYPE_CHECKING:
    import onnx_graphsurgeon


def is_graphsurgeon(source: object) -> bool:
    """Return whether an object is from onnx-graphsurgeon, without importing the package."""
    return type(source).__module__.partition(".")[0] == "onnx_graphsurgeon"


def from_graphsurgeon(graph: onnx_graphsurgeon.Graph) -> onnx.ModelProto:
    """Convert an onnx-graphsurgeon graph to an ONNX model.

    Raises:
        ModelError: onnx-graphsurgeon cannot export the graph.
    """
    import onnx_graphsurgeon

    with quiet_graphsurgeon():
        try:
            proto: onnx.ModelProto = onnx_graphsurgeon.export_onnx(graph)
        except Exception as error:  # graphsurgeon raises errors of many classes
            raise ModelError(
                f"onnx-graphsurgeon cannot export the graph: {format_reason(error)}; correct the "
                "graph",
                code="export-failed",
            ) from error
    metadata = vars(graph).get("metadata_props")  # getattr would log a missing attribute to stdout
    if metadata:
        onnx.helper.set_model_props(proto, dict(metadata))
    return proto


def to_graphsurgeon(proto: onnx.ModelProto) -> onnx_graphsurgeon.Graph:
    """Convert a model to an onnx-graphsurgeon graph, which shares no data with the model.

    The graph has the model's metadata as the attribute ``metadata_props``. Copies of the graph
    lack this attribute.
    """
    import onnx_graphsurgeon

    with quiet_graphsurgeon():
        graph: Any = onnx_graphsurgeon.import_onnx(deepcopy(proto))
    graph.metadata_props = {entry.key: entry.value for entry in proto.metadata_props}
    return graph


@contextlib.contextmanager
def quiet_graphsurgeon() -> Iterator[None]:
    """Suppress output of onnx-graphsurgeon on stdout. Its exceptions are not affected."""
    from onnx_graphsurgeon.logger import G_LOGGER

    before = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.CRITICAL + 1
    try:
        yield
    finally:
        G_LOGGER.severity = before
