"""Random Q/DQ graphs for property tests.

The graphs have every operator of the passes, with pairs in usual and unusual places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st

from tests.trt.builder import Graph

Shape = tuple[int, ...]
SCALES = (0.05, 0.1)
WEIGHTS = ("qdq", "qdq", "tensor", "int8", "float")


@dataclass
class Sketch:
    """Graph under construction.

    Attributes:
        graph: Nodes.
        draw: Hypothesis's function.
        shapes: Shapes of the tensors that another node may read.
        ends: Tensors of integers, which may only be network outputs.
    """

    graph: Graph
    draw: Callable[[st.SearchStrategy[Any]], Any]
    shapes: dict[str, Shape] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    count: int = 0

    def choose(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def pick(self) -> str:
        tensors = [t for t, s in self.shapes.items() if len(s) == 4]
        return str(tensors[-1] if self.draw(st.booleans()) else self.choose(*tensors))

    def make(self, tensor: str, shape: Shape) -> None:
        self.shapes[tensor] = shape
        self.graph.channels[tensor] = shape[1]

    def maybe_pair(self, tensor: str) -> str:
        if not self.draw(st.booleans()):
            return tensor
        out = self.graph.pair(tensor, self.name("pair"), self.choose(*SCALES))
        self.make(out, self.shapes[tensor])
        return out


Step = Callable[[Sketch, str, Shape], None]
"""Adds nodes to a sketch after a tensor of a shape."""


def _conv(s: Sketch, x: str, shape: Shape) -> None:
    depthwise = s.choose(False, False, True)
    channels = shape[1] if depthwise else s.choose(4, 8)
    k, stride = s.choose(1, 3), s.choose(1, 1, 2)
    out = s.graph.conv(
        x,
        s.name("conv"),
        channels,
        k,
        stride,
        shape[1] if depthwise else 1,
        s.choose(*SCALES, None),
        s.choose(*WEIGHTS),
        bias=s.choose(False, True),
    )
    size = tuple((d + 2 * (k // 2) - k) // stride + 1 for d in shape[2:])
    s.make(out, (shape[0], channels, *size))
    _tail(s, out)


def _tail(s: Sketch, x: str) -> None:
    shape = s.shapes[x]
    if s.draw(st.booleans()):
        x = s.graph.bn(x, s.name("bn"))
        s.make(x, shape)
    kind = s.choose("Relu", "LeakyRelu", "silu", "Clip", "")
    if kind == "silu":
        s.make(s.graph.silu(x, s.name("silu")), shape)
    elif kind:
        s.make(s.graph.op(kind, x, s.name(kind)), shape)


def _activation(s: Sketch, x: str, shape: Shape) -> None:
    kind = s.choose("Relu", "LeakyRelu", "Sigmoid", "Neg", "Softmax")
    s.make(s.graph.op(kind, x, s.name(kind)), shape)


def _pair(s: Sketch, x: str, shape: Shape) -> None:
    s.make(s.graph.pair(x, s.name("pair"), s.choose(*SCALES)), shape)


def _lone_q(s: Sketch, x: str, shape: Shape) -> None:
    quantized = s.graph.q(x, s.name("q"), s.choose(*SCALES))
    if s.draw(st.booleans()):
        s.ends.append(quantized)
    else:
        s.make(s.graph.dq(quantized, s.name("dq"), s.choose(*SCALES)), shape)


def _add(s: Sketch, a: str, shape: Shape) -> None:
    b = str(s.choose(*[t for t, other in s.shapes.items() if other == shape]))
    a, b = s.maybe_pair(a), s.maybe_pair(b)
    out = s.graph.op(s.choose("Add", "Add", "Mul"), [a, b], s.name("add"))
    s.make(out, shape)
    if s.draw(st.booleans()):
        s.make(s.graph.relu(out, s.name("relu")), shape)


def _constant(s: Sketch, x: str, shape: Shape) -> None:
    dims = s.choose((), (1, shape[1], 1, 1), (shape[1], 1, 1))
    constant = s.graph.const(s.name("k"), s.graph.random.uniform(0.5, 2, dims))
    s.make(s.graph.op(s.choose("Add", "Mul", "Sub", "Div"), [x, constant], s.name("const")), shape)


def _concat(s: Sketch, a: str, shape: Shape) -> None:
    fitting = [
        t for t, d in s.shapes.items() if len(d) == 4 and d[0] == shape[0] and d[2:] == shape[2:]
    ]
    parts = [a, *s.draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))]
    total = sum(s.shapes[t][1] for t in parts)
    if total > 32:
        return
    out = s.graph.concat(parts, s.name("cat"))
    s.make(out, (shape[0], total, *shape[2:]))
    s.maybe_pair(out)


def _join(s: Sketch, x: str, shape: Shape) -> None:
    other = s.choose(*(t for t, dims in s.shapes.items() if dims == shape))
    s.make(s.graph.concat([x, other], s.name("cat")), (shape[0], 2 * shape[1], *shape[2:]))


def _split(s: Sketch, x: str, shape: Shape) -> None:
    for part in (
        s.graph.ops("Split", [x], s.name("split"), count=2, axis=1) if shape[1] % 2 == 0 else ()
    ):
        s.make(part, (shape[0], shape[1] // 2, *shape[2:]))


def _slice(s: Sketch, x: str, shape: Shape) -> None:
    if shape[1] < 2:
        return
    step = s.choose(1, 1, 2)
    end = shape[1] // 2 * step if step == 1 else shape[1]
    out = s.graph.slice(x, s.name("slice"), 0, end, step=step)
    s.make(out, (shape[0], (end + step - 1) // step, *shape[2:]))


def _pool(s: Sketch, x: str, shape: Shape) -> None:
    op = s.choose("MaxPool", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
    if op.startswith("Global"):
        s.make(s.graph.op(op, x, s.name("gap")), (*shape[:2], 1, 1))
        return
    k, stride = s.choose((2, 2), (3, 1), (3, 2))
    if min(shape[2:]) < k:
        return
    size = tuple((d + 2 * (k // 2 if k % 2 else 0) - k) // stride + 1 for d in shape[2:])
    s.make(s.graph.pool(x, s.name("pool"), op, k, stride), (*shape[:2], *size))


def _resize(s: Sketch, x: str, shape: Shape) -> None:
    if max(shape[2:]) <= 8:
        out = s.graph.resize(x, s.name("resize"), s.choose("nearest", "nearest", "linear"))
        s.make(out, (*shape[:2], shape[2] * 2, shape[3] * 2))


def _shuffle(s: Sketch, x: str, shape: Shape) -> None:
    n, c, h, w = shape
    kind = s.choose("Transpose", "Reshape", "Identity", "Dropout")
    if kind == "Transpose":
        s.make(s.graph.op("Transpose", x, s.name("Transpose"), perm=[0, 1, 3, 2]), (n, c, w, h))
    elif kind == "Reshape":
        s.make(s.graph.reshape(x, s.name("reshape_before"), n, c, w * h, 1), (n, c, w * h, 1))
    else:
        s.make(s.graph.op(kind, x, s.name("same")), (n, c, h, w))


def _padding(s: Sketch, x: str, shape: Shape) -> None:
    if min(shape[2:]) >= 2 and max(shape[2:]) <= 8:
        out = s.graph.pad(x, s.name("pad"), s.choose("constant", "constant", "reflect"))
        s.make(out, (*shape[:2], shape[2] + 2, shape[3] + 2))


def _gemm(s: Sketch, x: str, shape: Shape) -> None:
    out = s.graph.gemm(
        s.graph.op("Flatten", x, s.name("flat")),
        s.name("gemm"),
        int(np.prod(shape[1:])),
        4,
        s.choose(*SCALES, None),
        s.choose(*WEIGHTS),
        s.choose(False, True),
    )
    s.make(out, (shape[0], 4))


def _moved(s: Sketch, x: str) -> str:
    """Add an operator that a Q may or may not move up past, if one fits; return its output."""
    count = len(s.shapes)
    s.choose(_padding, _pool, _slice, _split, _resize, _shuffle, _join)(s, x, s.shapes[x])
    return x if len(s.shapes) == count else list(s.shapes)[-1]


def _fork(s: Sketch, x: str, shape: Shape) -> None:
    if shape[1] > 16:
        return
    out = s.graph.conv(x, s.name("stem"), 4, 1, 1, 1, s.choose(*SCALES), "qdq")
    s.make(out, (shape[0], 4, *shape[2:]))
    if s.draw(st.booleans()):
        out = s.graph.relu(out, s.name("relu"))
        s.make(out, (shape[0], 4, *shape[2:]))
    for _ in range(s.choose(2, 2, 3)):
        end = out
        for _ in range(s.choose(0, 1, 1, 2)):
            end = _moved(s, end)
        branch = s.graph.conv(end, s.name("branch"), 4, 1, 1, 1, s.choose(*SCALES, None), "qdq")
        s.make(branch, (s.shapes[end][0], 4, *s.shapes[end][2:]))


STEPS = (
    _conv,
    _conv,
    _conv,
    _activation,
    _pair,
    _lone_q,
    _add,
    _add,
    _constant,
    _concat,
    _split,
    _slice,
    _pool,
    _resize,
    _shuffle,
    _padding,
    _gemm,
)


FORKS = (_fork, _fork, _fork, *STEPS)


@st.composite
def models(draw: st.DrawFn, max_steps: int = 12, steps: Sequence[Step] = STEPS) -> onnx.ModelProto:
    """Draw a valid model with one to four outputs. ``FORKS`` gives many tensors two scales."""
    graph = Graph(constant_nodes=draw(st.booleans()), seed=draw(st.integers(0, 3)))
    sketch = Sketch(graph, draw)
    sketch.make(graph.input(1, 4, 8, 8), (1, 4, 8, 8))
    if draw(st.booleans()):
        sketch.make(graph.input(1, 4, 8, 8, name="y"), (1, 4, 8, 8))
    for move in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=max_steps)):
        x = sketch.pick()
        move(sketch, x, sketch.shapes[x])
    read = {i for node in graph.nodes for i in node.input}
    computed = [t for t in sketch.shapes if t not in ("x", "y")]
    outputs = dict.fromkeys([*[t for t in computed if t not in read][-3:], *sketch.ends[:2]])
    if computed and draw(st.booleans()):
        outputs[draw(st.sampled_from(computed))] = None
    if not outputs:
        outputs[graph.relu("x", "only")] = None
    return graph.model(*outputs)
