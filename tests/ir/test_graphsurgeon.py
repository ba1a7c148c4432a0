import functools
from collections.abc import Callable
from typing import Any

import onnx
import onnx_graphsurgeon
import pytest

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.ir.graphsurgeon import from_graphsurgeon, to_graphsurgeon
from tests.errors import has
from tests.trt.builder import Graph


def model() -> onnx.ModelProto:
    g = Graph()
    proto = g.model(g.conv(g.pair(g.input(1, 16, 8, 8), "p"), "c", 16))
    onnx.helper.set_model_props(proto, {"stride": "32", "names": "{0: 'person'}"})
    return proto


def test_graph_has_nodes_and_metadata_of_the_model() -> None:
    proto = model()
    graph = to_graphsurgeon(proto)
    assert [node.name for node in graph.nodes] == [node.name for node in proto.graph.node]
    assert graph.metadata_props == {"stride": "32", "names": "{0: 'person'}"}
    again = from_graphsurgeon(graph).metadata_props
    assert {entry.key: entry.value for entry in again} == graph.metadata_props


def test_edits_of_the_graph_do_not_change_the_model() -> None:
    proto = model()
    before = proto.SerializeToString()
    to_graphsurgeon(proto).nodes[0].name = "renamed"
    assert proto.SerializeToString() == before


def test_graph_is_predicted_as_its_model() -> None:
    graph, proto = (qdqtool.predict(m, target="trt10") for m in (to_graphsurgeon(model()), model()))
    assert graph.summary() == proto.summary()


@pytest.mark.parametrize("function", [qdqtool.fix, functools.partial(qdqtool.extract, node="c")])
def test_results_return_graphs(function: Callable[..., Any]) -> None:
    result = function(model(), target="trt8.5")
    assert isinstance(graph := result.to_graphsurgeon(), onnx_graphsurgeon.Graph)
    assert len(graph.nodes) == len(result.proto.graph.node)


def test_graph_that_cannot_be_exported_is_an_error() -> None:
    graph = to_graphsurgeon(model())
    graph.inputs[0].dtype = None
    with pytest.raises(ModelError, check=has("export-failed")):
        qdqtool.predict(graph)
