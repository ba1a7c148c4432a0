"""Cutting a part out of a model."""

import qdqtool
from tests.extraction.networks import residual


def test_nodes_without_a_name_stay_so() -> None:
    """TensorRT makes its own name of such a node's output: that of the part is the same then."""
    model = residual(1)
    for node in model.graph.node:
        node.name = node.name if node.op_type == "Conv" else ""
    whole = qdqtool.predict(model)
    named = [(f.code, f.node) for f in whole.findings if f.node.startswith("node_of_")]
    assert named
    for code, node in named:
        result = qdqtool.extract(model, finding=code)
        assert (code, node) in [(f.code, f.node) for f in result.prediction.findings]
        assert [n.name for n in result.proto.graph.node if n.op_type == "QuantizeLinear"].count(
            ""
        ) > 0
