"""On random Q/DQ networks a fix never makes anything worse, and what it writes is valid."""

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.fixing.api import fix
from tests.trt.builder import Graph

SCALES = (0.02, 0.05, 0.05, 0.11)
BLOCKS = ("plain", "residual", "concat", "pool", "silu", "split")


@st.composite
def networks(draw):
    """Two to four blocks of eight channels with pairs, scales and activations at random."""
    g = Graph(seed=draw(st.integers(0, 99)))
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "stem", 8), "stem.r")
    for i, kind in enumerate(draw(st.lists(st.sampled_from(BLOCKS), min_size=2, max_size=4))):
        def scale():
            return draw(st.sampled_from(SCALES))

        def maybe(tensor, name):
            return g.pair(tensor, name, scale()) if draw(st.booleans()) else tensor

        y = g.conv(x, f"{i}a", 8, scale=scale())
        if kind == "plain":
            x = g.relu(maybe(y, f"{i}p"), f"{i}r")
        elif kind == "residual":
            y = g.conv(g.relu(y, f"{i}r"), f"{i}b", 8, scale=scale())
            x = g.relu(g.add(maybe(y, f"{i}y"), maybe(x, f"{i}x"), f"{i}s"), f"{i}rs")
        elif kind == "concat":
            both = g.concat([maybe(g.relu(y, f"{i}r"), f"{i}y"), maybe(x, f"{i}x")], f"{i}c")
            x = g.relu(g.conv(both, f"{i}b", 8, scale=scale()), f"{i}rb")
        elif kind == "pool":
            x = g.pool(maybe(g.relu(y, f"{i}r"), f"{i}y"), f"{i}m", k=3, stride=1)
        elif kind == "silu":
            inner = maybe(y, f"{i}y")
            x = g.op("Mul", [inner, g.op("Sigmoid", inner, f"{i}g")], f"{i}m")
        else:
            y = g.relu(y, f"{i}r")
            parts = [g.slice(y, f"{i}l", 0, 4), g.slice(y, f"{i}h", 4, 8)]
            x = g.concat([maybe(parts[0], f"{i}q"), parts[1]], f"{i}c")
    return g.model(g.conv(x, "last", 8, scale=draw(st.sampled_from(SCALES))))


def worth(prediction):
    summary = prediction.summary()
    errors = sum(f.severity == "error" for f in prediction.findings)
    return -errors, summary["int8"], summary["int8_to_int8"], -summary["conversions"]


@given(networks())
def test_never_worse_and_valid(proto):
    before = proto.SerializeToString(deterministic=True)
    fixed = fix(proto, "trt8.5")
    assert proto.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(fixed.proto, full_check=True)
    assert all(b >= a for a, b in zip(worth(fixed.before), worth(fixed.after), strict=True))
    assert [i.name for i in fixed.proto.graph.input] == [i.name for i in proto.graph.input]
    assert [o.name for o in fixed.proto.graph.output] == [o.name for o in proto.graph.output]
    assert all(c.why_not for c in fixed.refused) and not any(c.why_not for c in fixed.applied)
    if fixed.noise_before is not None:
        assert np.isfinite(fixed.noise_after)
    again = fix(fixed.proto, "trt8.5")
    assert worth(again.after) >= worth(fixed.after)
    assert fix(proto, "trt8.5").proto.SerializeToString(deterministic=True) == fixed.proto.SerializeToString(
        deterministic=True
    )
