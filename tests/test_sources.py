"""What a source does, read from its tree."""

import ast

from tests.sources import functions_of, lines_that_edit, walked


def test_what_edits_a_graph() -> None:
    edits = [
        "proto.graph.node.append(x)",
        "nodes = graph.node; nodes.append(x)",
        "del g.initializer[:]",
        "n.input[0] = 'x'",
        "a, n.output[:] = 1, []",
        "put = g.node.extend; put(x)",
        "g.input.extend(x)",
        "(read := n.input)[0] = x; read[1] = x",
        "n = g.node[3]; n.CopyFrom(x)",
        "nodes = g.node; del nodes[3]",
        "[n.CopyFrom(x) for n in g.node]",
        "[n.CopyFrom(x) for i, n in enumerate(g.node)]",
        "g.node[0].input[1] = x",
        "x: list = g.node; x[0] = 1",
        "nodes = g.node; nodes[1:] += x",
    ]
    edits += [
        "def put(new, to): to.append(new)\n    put(x, g.node)",
        "def put(to): to[0] = 1\n    put(to=n.input)",
        "def put(self, to): names = to; del names[:]\n    self.put(g.initializer)",
    ]
    kept = [
        "found[n.input] = 3",
        "self.input = 3",
        "def put(new, to): to.append(new)\n    put(g.node, x)",
        "n = onnx.NodeProto(); n.CopyFrom(x)",
        "t.CopyFrom(x)",
        "found.append(n.output)",
        "[t.CopyFrom(x) for t in g.initializer]",
        "n.input(3)",
    ]
    for source in (*edits, *kept):
        made = walked(ast.parse(f"def f():\n    {source}"))
        assert bool(lines_that_edit(made)) is (source in edits), source
    others = functions_of(walked(ast.parse("def put(to): to.append(1)")))
    gives = walked(ast.parse("def f(): elsewhere.put(g.node)"))
    assert (lines_that_edit(gives), lines_that_edit(gives, others)) == (set(), {("f", 1)})
