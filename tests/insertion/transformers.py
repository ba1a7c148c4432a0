import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from tests.insertion.nets import Net

WIDTH, HEADS = 16, 2


class Tokens(Net):
    def linear(self, name: str, x: str, cin: int = WIDTH, cout: int = WIDTH) -> str:
        w = self.const(f"{name}.weight", self.rng.standard_normal((cin, cout)) / np.sqrt(cin))
        return self.op(
            "Add",
            f"{name}.add",
            self.const(f"{name}.bias", self.rng.standard_normal(cout) * 0.1),
            self.op("MatMul", name, x, w),
        )

    def layer_norm(
        self,
        name: str,
        x: str,
        *,
        pieces: bool = False,
        square: str = "Pow",
        eps: float = 1e-6,
        width: int = WIDTH,
    ) -> str:
        scale = self.const(f"{name}.gamma", self.rng.uniform(0.5, 1.5, width))
        bias = self.const(f"{name}.beta", self.rng.standard_normal(width) * 0.1)
        if not pieces:
            return self.op("LayerNormalization", name, x, scale, bias, axis=-1, epsilon=eps)
        centered = self.op(
            "Sub", f"{name}.sub", x, self.op("ReduceMean", f"{name}.mean", x, axes=[-1])
        )
        other = centered if square == "Mul" else self.const(f"{name}.two", 2.0)
        squared = self.op(square, f"{name}.square", centered, other)
        variance = self.op("ReduceMean", f"{name}.var", squared, axes=[-1])
        added = self.op("Add", f"{name}.eps", variance, self.const(f"{name}.epsilon", eps))
        divided = self.op("Div", f"{name}.div", centered, self.op("Sqrt", f"{name}.sqrt", added))
        return self.op(
            "Add", f"{name}.shift", self.op("Mul", f"{name}.scale", divided, scale), bias
        )

    def split_heads(self, name: str, x: str, perm: list[int]) -> str:
        split = self.reshape(f"{name}.split", x, 0, -1, HEADS, WIDTH // HEADS)
        return self.op("Transpose", f"{name}.heads", split, perm=perm)

    def attention(self, name: str, x: str, *, masked: bool = False) -> str:
        q, k, v = (self.linear(f"{name}.{part}", x) for part in "qkv")
        q, v = (
            self.split_heads(f"{name}.{part}", t, [0, 2, 1, 3]) for part, t in (("q", q), ("v", v))
        )
        k = self.split_heads(f"{name}.k", k, [0, 2, 3, 1])
        scores = self.op("MatMul", f"{name}.qk", q, k)
        scores = self.op(
            "Div", f"{name}.by", scores, self.const(f"{name}.root", (WIDTH / HEADS) ** 0.5)
        )
        if masked:
            scores = self.op(
                "Add", f"{name}.masked", scores, self.const(f"{name}.mask", np.zeros((1, 1, 1, 1)))
            )
        out = self.op(
            "MatMul", f"{name}.av", self.op("Softmax", f"{name}.soft", scores, axis=-1), v
        )
        out = self.op("Transpose", f"{name}.back", out, perm=[0, 2, 1, 3])
        return self.linear(f"{name}.out", self.reshape(f"{name}.join", out, 0, -1, WIDTH))

    def block(self, name: str, x: str, **norm: Any) -> str:
        x = self.op(
            "Add",
            f"{name}.res1",
            x,
            self.attention(f"{name}.attn", self.layer_norm(f"{name}.ln1", x, **norm)),
        )
        y = self.linear(f"{name}.fc1", self.layer_norm(f"{name}.ln2", x, **norm), WIDTH, 2 * WIDTH)
        y = self.linear(f"{name}.fc2", self.op("Relu", f"{name}.relu", y), 2 * WIDTH, WIDTH)
        return self.op("Add", f"{name}.res2", x, y)

    def embed(self, patch: int) -> str:
        weight = self.const(
            "embed.weight", self.rng.standard_normal((WIDTH, 3, patch, patch)) / (patch * 3)
        )
        x = self.op("Conv", "embed", "x", weight, kernel_shape=[patch] * 2, strides=[patch] * 2)
        return self.op(
            "Transpose", "embed.tokens", self.reshape("embed.flat", x, 0, WIDTH, -1), perm=[0, 2, 1]
        )


@functools.cache
def vit(
    blocks: int = 2, patch: int = 8, pieces: bool = False, square: str = "Pow", opset: int = 17
) -> onnx.ModelProto:
    """Return a vision transformer with a class head; input ``x`` [1, 3, 32, 32].

    A block has 4 projections, 2 products of the attention and 2 Linears of the MLP.
    """
    net = Tokens(3, 32)
    x = net.embed(patch)
    for i in range(blocks):
        x = net.block(f"b{i}", x, pieces=pieces, square=square)
    x = net.layer_norm("ln", x, pieces=pieces, square=square)
    pooled = net.op("ReduceMean", "pool", x, axes=[1], keepdims=0)
    head = [
        net.const("head.weight", net.rng.standard_normal((10, WIDTH))),
        net.const("head.bias", np.zeros(10)),
    ]
    return net.output(net.op("Gemm", "head", pooled, *head, transB=1)).model(opset)


def samples(model: onnx.ModelProto, count: int = 4) -> list[dict[str, npt.NDArray[Any]]]:
    (value,) = model.graph.input
    shape = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
    rng = np.random.default_rng(3)
    return [{value.name: rng.random(shape, np.float32)} for _ in range(count)]


class Detr(Tokens):
    QUERIES, POINTS, SIDE = 6, 4, 8

    def mlp(self, name: str, x: str, outputs: int) -> str:
        for i in (0, 1):
            x = self.op("Relu", f"{name}.{i}.relu", self.linear(f"{name}.{i}", x))
        return self.linear(f"{name}.2", x, WIDTH, outputs)

    def part(self, name: str, x: str, start: int, end: int) -> str:
        bounds = [
            self.const(f"{name}.{n}", [v], np.int64)
            for n, v in (("from", start), ("to", end), ("axis", -1))
        ]
        return self.op("Slice", name, x, *bounds)

    def inverse_sigmoid(self, name: str, x: str) -> str:
        low, high, one = (
            self.const(f"{name}.{n}", v) for n, v in (("low", 1e-4), ("high", 0.9999), ("one", 1.0))
        )
        x = self.op("Clip", f"{name}.clip", x, low, high)
        return self.op(
            "Log",
            f"{name}.log",
            self.op("Div", f"{name}.odds", x, self.op("Sub", f"{name}.rest", one, x)),
        )

    def sampled(self, name: str, x: str, points: str, memory: str) -> str:
        n, each = self.QUERIES, WIDTH // HEADS
        value = self.op(
            "Transpose", f"{name}.turned", self.linear(f"{name}.value", memory), perm=[0, 2, 1]
        )
        value = self.reshape(f"{name}.map", value, HEADS, each, self.SIDE, self.SIDE)
        offsets = self.reshape(
            f"{name}.split",
            self.linear(f"{name}.offsets", x, WIDTH, HEADS * self.POINTS * 2),
            n,
            HEADS,
            self.POINTS,
            2,
        )
        center = self.reshape(f"{name}.center", self.part(f"{name}.xy", points, 0, 2), n, 1, 1, 2)
        extent = self.reshape(f"{name}.extent", self.part(f"{name}.wh", points, 2, 4), n, 1, 1, 2)
        places = self.op(
            "Add", f"{name}.places", center, self.op("Mul", f"{name}.scaled", offsets, extent)
        )
        grid = self.op(
            "Sub",
            f"{name}.grid",
            self.op("Mul", f"{name}.twice", places, self.const(f"{name}.two", 2.0)),
            self.const(f"{name}.one", 1.0),
        )
        grid = self.op("Transpose", f"{name}.by_head", grid, perm=[1, 0, 2, 3])
        samples = self.op("GridSample", f"{name}.sample", value, grid, align_corners=0)
        weights = self.reshape(
            f"{name}.weights.split",
            self.linear(f"{name}.weights", x, WIDTH, HEADS * self.POINTS),
            n,
            HEADS,
            self.POINTS,
        )
        weights = self.op(
            "Transpose",
            f"{name}.weights.turned",
            self.op("Softmax", f"{name}.soft", weights, axis=-1),
            perm=[1, 0, 2],
        )
        weights = self.reshape(f"{name}.weights.map", weights, HEADS, 1, n, self.POINTS)
        total = self.op(
            "ReduceSum",
            f"{name}.sum",
            self.op("Mul", f"{name}.weighted", samples, weights),
            self.const(f"{name}.axes", [-1], np.int64),
            keepdims=0,
        )
        total = self.op(
            "Transpose",
            f"{name}.back",
            self.reshape(f"{name}.joined", total, 1, WIDTH, n),
            perm=[0, 2, 1],
        )
        return self.linear(f"{name}.out", total)

    def refined(self, name: str, kind: str, x: str, points: str) -> str:
        """Add new boxes from a decoder layer.

        RT-DETR adds before the sigmoid, DAB-DETR adds in place, RF-DETR scales, D-FINE averages.
        """
        if kind == "rt-detr":
            delta = self.op(
                "Add",
                f"{name}.moved",
                self.mlp(f"{name}.box", x, 4),
                self.inverse_sigmoid(name, points),
            )
            return self.op("Sigmoid", f"{name}.points", delta)
        if kind == "dab-detr":  # adds to the first two, in place
            delta, place = self.mlp(f"{name}.box", x, 4), self.inverse_sigmoid(name, points)
            moved = self.op(
                "Add",
                f"{name}.moved",
                *(
                    self.part(f"{name}.{k}", t, 0, 2)
                    for k, t in (("delta", delta), ("place", place))
                ),
            )
            where = self.const(
                f"{name}.where", np.stack(np.indices((1, self.QUERIES, 2)), -1), np.int64
            )
            return self.op(
                "Sigmoid",
                f"{name}.points",
                self.op("ScatterND", f"{name}.written", delta, where, moved),
            )
        delta = self.mlp(f"{name}.box", x, 4 if kind == "rf-detr" else 4 * 9)
        if kind.startswith("d-fine"):
            bins = self.reshape(f"{name}.bins", delta, 1, -1, 4, 9)
            column = np.linspace(-1, 1, 9).reshape((9, 1) if kind == "d-fine column" else 9)
            w = self.const(f"{name}.project.weight", column**3)
            mean = self.op(
                "MatMul", f"{name}.project", self.op("Softmax", f"{name}.softmax", bins, axis=-1), w
            )
            delta = self.reshape(f"{name}.means", mean, 1, -1, 4)
        size = self.part(f"{name}.size", points, 2, 4)
        moved = self.op("Mul", f"{name}.step", self.part(f"{name}.delta", delta, 0, 2), size)
        middle = self.op("Add", f"{name}.middle", moved, self.part(f"{name}.place", points, 0, 2))
        grown = self.op(
            "Mul",
            f"{name}.grown",
            self.op("Exp", f"{name}.exp", self.part(f"{name}.growth", delta, 2, 4)),
            size,
        )
        return self.op("Concat", f"{name}.points", middle, grown, axis=-1)


@functools.cache
def detr(kind: str, layers: int = 2, classes: int = 5) -> onnx.ModelProto:
    """Return a small RT-DETR, DAB-DETR, RF-DETR or D-FINE; input ``x`` [1, 3, 32, 32].

    It has a query selection, decoder layers, boxes and scores.
    """
    net = Detr(3, 32)
    memory = net.embed(4)
    scores = net.linear("select", memory, WIDTH, classes)
    best = net.op("ReduceMax", "best", scores, axes=[-1], keepdims=0)
    _, chosen = net.op(
        "TopK", "top", best, net.const("k", [net.QUERIES], np.int64), outputs=2, axis=1
    )
    index = net.reshape("index", chosen, net.QUERIES)
    anchors = net.const("anchors", net.rng.standard_normal((1, net.SIDE**2, 4)))
    first = net.op("Add", "anchored", net.mlp("first", memory, 4), anchors)
    points = net.op("Sigmoid", "points", net.op("Gather", "picked", first, index, axis=1))
    x = net.op("Gather", "queries", memory, index, axis=1)
    for i in range(layers):
        place = net.linear(f"d{i}.place.0", points, 4, WIDTH)
        place = net.linear(f"d{i}.place.1", net.op("Relu", f"d{i}.place.relu", place))
        y = net.attention(f"d{i}.attn", net.op("Add", f"d{i}.placed", x, place))
        x = net.layer_norm(f"d{i}.ln1", net.op("Add", f"d{i}.res1", x, y))
        x = net.layer_norm(
            f"d{i}.ln2",
            net.op("Add", f"d{i}.res2", x, net.sampled(f"d{i}.cross", x, points, memory)),
        )
        y = net.op("Relu", f"d{i}.relu", net.linear(f"d{i}.fc1", x, WIDTH, 2 * WIDTH))
        x = net.layer_norm(
            f"d{i}.ln3",
            net.op("Add", f"d{i}.res3", x, net.linear(f"d{i}.fc2", y, 2 * WIDTH, WIDTH)),
        )
        points = net.refined(f"d{i}", kind, x, points)
    scored = net.op("Sigmoid", "probabilities", net.linear("classes", x, WIDTH, classes))
    return net.output(net.op("Concat", "detections", points, scored, axis=-1)).model()
