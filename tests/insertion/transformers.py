"""Small float networks with attention: a vision transformer, and a detector with deformable attention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from tests.insertion.nets import Net

WIDTH, HEADS = 16, 2


class Tokens(Net):
    """Layers on tokens [1, n, channels]."""

    def linear(self, name: str, x: str, cin: int = WIDTH, cout: int = WIDTH) -> str:
        """MatMul and Add, as exporters write a Linear on three dimensions."""
        w = self.const(f"{name}.weight", self.rng.standard_normal((cin, cout)) / np.sqrt(cin))
        out = self.op("MatMul", name, x, w)
        return self.op("Add", f"{name}.add", self.const(f"{name}.bias", self.rng.standard_normal(cout) * 0.1), out)

    def layer_norm(self, name: str, x: str, *, pieces: bool = False, square: str = "Pow", eps: float = 1e-6,
                   width: int = WIDTH) -> str:
        scale = self.const(f"{name}.gamma", self.rng.uniform(0.5, 1.5, width))
        bias = self.const(f"{name}.beta", self.rng.standard_normal(width) * 0.1)
        if not pieces:
            return self.op("LayerNormalization", name, x, scale, bias, axis=-1, epsilon=eps)
        centered = self.op("Sub", f"{name}.sub", x, self.op("ReduceMean", f"{name}.mean", x, axes=[-1]))
        other = centered if square == "Mul" else self.const(f"{name}.two", 2.0)
        squared = self.op(square, f"{name}.square", centered, other)
        variance = self.op("ReduceMean", f"{name}.var", squared, axes=[-1])
        added = self.op("Add", f"{name}.eps", variance, self.const(f"{name}.epsilon", eps))
        divided = self.op("Div", f"{name}.div", centered, self.op("Sqrt", f"{name}.sqrt", added))
        return self.op("Add", f"{name}.shift", self.op("Mul", f"{name}.scale", divided, scale), bias)

    def split_heads(self, name: str, x: str, perm: list[int]) -> str:
        shape = self.const(f"{name}.shape", [0, -1, HEADS, WIDTH // HEADS], np.int64)
        return self.op("Transpose", f"{name}.heads", self.op("Reshape", f"{name}.split", x, shape), perm=perm)

    def attention(self, name: str, x: str, *, masked: bool = False) -> str:
        """Queries times keys, scaled (and masked), Softmax, times values, projected."""
        q, k, v = (self.linear(f"{name}.{part}", x) for part in "qkv")
        q, v = (self.split_heads(f"{name}.{part}", t, [0, 2, 1, 3]) for part, t in (("q", q), ("v", v)))
        k = self.split_heads(f"{name}.k", k, [0, 2, 3, 1])
        scores = self.op("MatMul", f"{name}.qk", q, k)
        scores = self.op("Div", f"{name}.by", scores, self.const(f"{name}.root", (WIDTH / HEADS) ** 0.5))
        if masked:
            scores = self.op("Add", f"{name}.masked", scores, self.const(f"{name}.mask", np.zeros((1, 1, 1, 1))))
        out = self.op("MatMul", f"{name}.av", self.op("Softmax", f"{name}.soft", scores, axis=-1), v)
        out = self.op("Transpose", f"{name}.back", out, perm=[0, 2, 1, 3])
        shape = self.const(f"{name}.join_shape", [0, -1, WIDTH], np.int64)
        return self.linear(f"{name}.out", self.op("Reshape", f"{name}.join", out, shape))

    def block(self, name: str, x: str, **norm: Any) -> str:
        """A pre-norm block; its two sums are the residual stream."""
        x = self.op("Add", f"{name}.res1", x, self.attention(f"{name}.attn", self.layer_norm(f"{name}.ln1", x, **norm)))
        y = self.linear(f"{name}.fc1", self.layer_norm(f"{name}.ln2", x, **norm), WIDTH, 2 * WIDTH)
        y = self.linear(f"{name}.fc2", self.op("Relu", f"{name}.relu", y), 2 * WIDTH, WIDTH)
        return self.op("Add", f"{name}.res2", x, y)

    def embed(self, patch: int) -> str:
        """Patches as tokens."""
        weight = self.const("embed.weight", self.rng.standard_normal((WIDTH, 3, patch, patch)) / (patch * 3))
        x = self.op("Conv", "embed", "x", weight, kernel_shape=[patch] * 2, strides=[patch] * 2)
        shape = self.const("embed.shape", [0, WIDTH, -1], np.int64)
        return self.op("Transpose", "embed.tokens", self.op("Reshape", "embed.flat", x, shape), perm=[0, 2, 1])


@functools.cache
def vit(blocks: int = 2, patch: int = 8, pieces: bool = False, square: str = "Pow") -> onnx.ModelProto:
    """7 products a block (4 projections, 2 of the attention ... 2 of the MLP), a class head; input x [1, 3, 32, 32]."""
    net = Tokens(3, 32)
    x = net.embed(patch)
    for i in range(blocks):
        x = net.block(f"b{i}", x, pieces=pieces, square=square)
    x = net.layer_norm("ln", x, pieces=pieces, square=square)
    pooled = net.op("ReduceMean", "pool", x, axes=[1], keepdims=0)
    weight = net.const("head.weight", net.rng.standard_normal((10, WIDTH)))
    net.output(net.op("Gemm", "head", pooled, weight, net.const("head.bias", np.zeros(10)), transB=1))
    return net.model()


def samples(model: onnx.ModelProto, count: int = 4) -> list[dict[str, npt.NDArray[Any]]]:
    """Random inputs for a model with one input."""
    (value,) = model.graph.input
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    rng = np.random.default_rng(3)
    return [{value.name: rng.random(shape, np.float32)} for _ in range(count)]
