import qdqtool
from tests.extraction.networks import residual


def test_cut_leaves_nodes_without_a_name() -> None:
    model = residual(1)
    for node in model.graph.node:
        node.name = node.name if node.op_type == "Conv" else ""
    whole = qdqtool.predict(model)
    places = [(f.code, f.node) for f in whole.findings if f.node.startswith("node_of_")]
    assert places
    for place in places:
        result = qdqtool.extract(model, finding=place[0])
        assert place in [(f.code, f.node) for f in result.prediction.findings]
        assert "" in {n.name for n in result.proto.graph.node if n.op_type == "QuantizeLinear"}
