"""Graphs inside nodes."""

from __future__ import annotations

from onnx import helper

from qdqtool.functions import _nodes
from qdqtool.subgraphs import inner_graphs


def test_every_depth_once_in_order() -> None:
    deep = helper.make_graph([], "deep", [], [])
    loop = helper.make_node("Loop", [], [], body=deep)
    then, otherwise = helper.make_graph([loop], "then", [], []), helper.make_graph([], "else", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)
    several = helper.make_node("Own", [], [], domain="own", graphs=[deep, otherwise])
    nodes = [helper.make_node("Relu", ["x"], ["c"]), branch, several]
    names = [g.name for g in inner_graphs(nodes)]
    assert sorted(names[:3]) == ["deep", "else", "then"] and names.index("then") + 1 == names.index("deep")
    assert names[3:] == ["deep", "else"]
    # Calls of functions are counted over the same nodes, none of them twice.
    counted = [n.op_type for n in _nodes([helper.make_node("Own", [], [], domain="own", graphs=[then])])]
    assert counted == ["Own", "Loop"]
