"""Random networks of detector blocks, with Q/DQ at places where tools and users put them."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import onnx

from tools.fuzz.fp8 import convert_to_fp8
from tools.fuzz.moves import add_random_operator
from tools.fuzz.net import Net

SCALES = (0.02, 0.05, 0.1)
ACTIVATIONS = ("silu", "relu", "hardswish", "leaky", "clip", "none")
I64 = np.int64


class Grammar:
    """Builder of one random network.

    Args:
        seed: Seed; equal seeds give equal networks.
        types: Types of the quantizers: ``int8``, ``fp8``, or ``mixed``.
    """

    def __init__(self, seed: int, types: str = "int8") -> None:
        self.r = random.Random(seed)
        self.types = types
        half = self.r.random() < 0.15
        opset = self.r.choice((19, 20, 21) if half else (13, 14, 15, 16, 17, 17, 17, 18, 19, 21))
        if types != "int8":
            opset = max(opset, 19)
        self.net = Net(opset, half, self.r.random() < 0.2, seed)
        self.style = self.r.choice(("all", "all", "inherit", "mixed", "mixed", "sparse"))
        self.activation = self.r.choice(ACTIVATIONS)
        self.batch_norm = self.r.random() < 0.25
        self.weights_form = self.r.choice(
            ("axis0", "axis0", "axis0-dq", "tensor", "tensor-dq", "shape1", "any")
        )
        self.one_scale = self.r.random() < 0.4
        self.outputs: list[str] = []

    # Q/DQ -----------------------------------------------------------------------------

    def scale(self) -> float:
        return SCALES[0] if self.one_scale and self.r.random() < 0.9 else self.r.choice(SCALES)

    def pair(self, x: str) -> str:
        """Add a Q/DQ pair in a form that exporters write."""
        net, r = self.net, self.r
        roll = r.random()
        if roll < 0.03:
            return net.qdq(x, [self.scale()], r.choice((0, 1, None)))
        if roll < 0.05:
            axis = min(1, len(net.shape(x)) - 1)
            return net.qdq(x, np.full(net.shape(x)[axis], self.scale()), axis)
        if roll < 0.10:
            zero = None if r.random() < 0.5 else 0
            q = net.q(x, self.scale(), zero=zero, integer=np.uint8)
            return net.dq(q, self.scale(), zero=zero, integer=np.uint8)
        if roll < 0.14:
            return net.dq(net.q(x, self.scale()), self.scale())  # two scales, which may differ
        if roll < 0.18:
            return net.qdq(net.qdq(x, self.scale()), self.scale())
        if roll < 0.22:
            q = net.q(x, s := self.scale())
            if r.random() < 0.5:
                self.outputs.append(net.op("Relu", net.dq(q, s)))
            return net.dq(q, s)
        return net.qdq(x, self.scale())

    def maybe(self, x: str, chance: float) -> str:
        return self.pair(x) if self.r.random() < chance else x

    def own(self, x: str) -> str:
        """Quantize the input of a convolution with a probability from the network's style."""
        chance = {"all": 0.97, "inherit": 0.35, "mixed": 0.6, "sparse": 0.25}[self.style]
        return self.maybe(x, chance)

    def weights(self) -> str:
        r = self.r
        bare = {"all": 0.02, "inherit": 0.04, "mixed": 0.2, "sparse": 0.3}[self.style]
        if r.random() < bare:
            return "none"
        if self.weights_form != "any" and r.random() < 0.9:
            return self.weights_form
        return r.choice(("axis0", "axis0-dq", "tensor", "tensor-dq", "shape1", "axis1"))

    # nodes ----------------------------------------------------------------------------

    def conv(
        self,
        x: str,
        channels: int,
        k: int = 3,
        stride: int = 1,
        groups: int = 1,
        plain: bool = False,
    ) -> str:
        net, r = self.net, self.r
        y = net.conv(self.own(x), channels, k, stride, groups, self.weights(), r.random() < 0.8)
        if plain:
            return y
        if self.batch_norm and r.random() < 0.7:
            params = [net.const(np.linspace(0.5, 1.5, channels)) for _ in range(4)]
            y = net.op("BatchNormalization", self.maybe(y, 0.05), *params)
        return self.activate(y)

    def activate(self, x: str) -> str:
        net, r = self.net, self.r
        kind = self.activation if r.random() < 0.8 else r.choice(ACTIVATIONS)
        x = self.maybe(x, 0.04)
        if kind == "silu":
            return net.op("Mul", x, self.maybe(net.op("Sigmoid", x), 0.04))
        if kind == "relu":
            return net.op("Relu", x)
        if kind == "hardswish" and net.opset >= 14:
            return net.op("HardSwish", x)
        if kind == "hardswish":
            return net.op("Mul", x, net.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))
        if kind == "leaky":
            return net.op("LeakyRelu", x, alpha=0.1)
        if kind == "clip":
            return net.op("Clip", x, net.const(0.0), net.const(6.0))
        return x

    def resize(self, x: str, factor: float = 2.0) -> str:
        net, r = self.net, self.r
        scales = net.const(np.array([1, 1, factor, factor]), np.float32)
        mode = r.choice(("nearest", "nearest", "linear"))
        extra = (
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            if mode == "nearest"
            else {}
        )
        return net.op("Resize", x, "", scales, mode=mode, **extra)

    def concat(self, *xs: str, axis: int = 1) -> str:
        """Add a Concat whose inputs have pairs with one scale or several scales, or no pairs."""
        roll = self.r.random()
        if roll < 0.25:
            s = self.scale()
            xs = tuple(self.net.qdq(x, s) for x in xs)
        elif roll < 0.5:
            xs = tuple(self.maybe(x, 0.8) for x in xs)
        return self.net.op("Concat", *xs, axis=axis)

    def split(self, x: str) -> list[str]:
        net = self.net
        half = net.shape(x)[1] // 2
        if self.r.random() < 0.6:
            return net.ops("Split", x, net.const(np.array([half, half], I64)), outputs=2, axis=1)
        cut = [net.const(np.array([v], I64)) for v in (0, half, 2 * half, 1)]
        return [
            net.op("Slice", x, cut[0], cut[1], cut[3]),
            net.op("Slice", x, cut[1], cut[2], cut[3]),
        ]

    # blocks ---------------------------------------------------------------------------

    def block_conv(self, x: str) -> str:
        return self.conv(
            x, self.r.choice((4, 7, 8, 16)), self.r.choice((1, 3, 3, 5)), self.r.choice((1, 1, 2))
        )

    def block_residual(self, x: str) -> str:
        x = self.maybe(x, 0.3)
        c = self.net.shape(x)[1]
        y = self.conv(self.conv(x, c), c, plain=self.r.random() < 0.5)
        y = self.net.op("Add", *self.r.sample([self.maybe(x, 0.4), self.maybe(y, 0.3)], 2))
        return self.activate(y) if self.r.random() < 0.5 else y

    def block_c2f(self, x: str) -> str:
        parts = self.split(self.maybe(self.conv(x, 8, 1), 0.4))
        for _ in range(self.r.choice((1, 2))):
            y = self.conv(self.conv(parts[-1], 4), 4)
            parts.append(self.net.op("Add", self.maybe(parts[-1], 0.3), self.maybe(y, 0.2)))
        return self.conv(self.concat(*parts), 8, 1)

    def block_sppf(self, x: str) -> str:
        parts = [self.maybe(self.conv(x, 4, 1), 0.5)]
        for _ in range(3):
            pooled = self.net.op(
                "MaxPool", parts[-1], kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1]
            )
            parts.append(self.maybe(pooled, 0.15))
        return self.conv(self.concat(*parts), 8, 1)

    def block_pan(self, x: str) -> str:
        low = self.conv(x, 8, 3, 2)
        size = self.net.shape(x)[2:]
        up = self.resize(self.maybe(low, 0.5))
        if self.net.shape(up)[2:] != size:
            return low
        y = self.conv(self.concat(up, self.maybe(x, 0.4)), 8)
        down = self.conv(y, 8, 3, 2)
        return self.conv(self.concat(down, low), 8, self.r.choice((1, 3)))

    def block_depthwise(self, x: str) -> str:
        c = self.net.shape(x)[1]
        return self.conv(self.conv(x, c * self.r.choice((1, 1, 2)), 3, 1, c), 8, 1)

    def block_grouped(self, x: str) -> str:
        c = self.net.shape(x)[1]
        groups = self.r.choice([g for g in (1, 2, 4) if c % g == 0])
        return self.conv(x, groups * self.r.choice((2, 4)), 3, 1, groups)

    def block_deconv(self, x: str) -> str:
        form = self.r.choice(("none", "tensor", "axis1", "axis1-dq", "axis0"))
        return self.conv(
            self.net.deconv(self.own(x), 4, self.r.choice((2, 4)), weights=form), 8, 3, 2
        )

    def block_se(self, x: str) -> str:
        net = self.net
        x = self.maybe(x, 0.4)
        c = net.shape(x)[1]
        pooled = net.op("GlobalAveragePool", x) if self.r.random() < 0.7 else self.mean(x)
        gate = net.op(
            "Sigmoid",
            self.conv(net.op("Relu", self.conv(pooled, 4, 1, plain=True)), c, 1, plain=True),
        )
        return net.op("Mul", x, self.maybe(gate, 0.3))

    def mean(self, x: str) -> str:
        if self.net.opset >= 18:
            return self.net.op("ReduceMean", x, self.net.const(np.array([2, 3], I64)), keepdims=1)
        return self.net.op("ReduceMean", x, axes=[2, 3], keepdims=1)

    def block_shuffle(self, x: str) -> str:
        net = self.net
        n, c, h, w = net.shape(x)
        if c % 2:
            return self.block_conv(x)
        y = net.op("Reshape", self.maybe(x, 0.5), net.const(np.array([n, 2, c // 2, h, w], I64)))
        y = net.op("Transpose", y, perm=[0, 2, 1, 3, 4])
        return self.conv(
            net.op("Reshape", y, net.const(np.array([n, c, h, w], I64))), 8, self.r.choice((1, 3))
        )

    def block_moves(self, x: str) -> str:
        """Add operators between a pair and a convolution that has no pair at its input."""
        x = self.pair(x)
        for _ in range(self.r.choice((1, 1, 1, 2, 2, 3))):
            x = add_random_operator(self.net, self.r, x)
            if self.r.random() < 0.3:  # another consumer
                other = self.r.choice(("float", "pair", "Q", "conv"))
                if other == "conv" and len(self.net.shape(x)) == 4:
                    self.outputs.append(self.net.conv(x, 4, 1, weights="axis0"))
                elif other == "Q":
                    self.outputs.append(self.net.q(x, self.scale()))
                else:
                    self.outputs.append(self.net.op("Relu", self.pair(x) if other == "pair" else x))
        if len(self.net.shape(x)) != 4:
            return self.net.op("Relu", x)
        return self.net.conv(x, 8, self.r.choice((1, 3)), weights=self.weights())

    def block_dfl(self, x: str) -> str:
        net = self.net
        n, c, h, w = net.shape(x)
        y = net.op("Reshape", x, net.const(np.array([n, 1, c, h * w], I64)))
        y = net.op("Softmax", net.op("Transpose", y, perm=[0, 2, 1, 3]), axis=1)
        y = net.conv(self.own(y), 1, 1, weights=self.weights(), bias=False)
        self.outputs.append(net.op("Reshape", y, net.const(np.array([n, h * w], I64))))
        return x

    def block_attention(self, x: str) -> str:
        net = self.net
        n, _, h, w = net.shape(x)
        q, k, v = (
            net.op(
                "Reshape",
                self.maybe(self.conv(x, 8, 1, plain=True), 0.4),
                net.const(np.array([n, 2, 4, h * w], I64)),
            )
            for _ in range(3)
        )
        scores = net.op(
            "MatMul", net.op("Transpose", self.maybe(q, 0.5), perm=[0, 1, 3, 2]), self.maybe(k, 0.5)
        )
        scores = net.op("Softmax", net.op("Mul", scores, net.const(0.5)), axis=-1)
        mixed = net.op(
            "MatMul",
            self.maybe(v, 0.5),
            net.op("Transpose", self.maybe(scores, 0.5), perm=[0, 1, 3, 2]),
        )
        return self.conv(net.op("Reshape", mixed, net.const(np.array([n, 8, h, w], I64))), 8, 1)

    def block_transformer(self, x: str) -> str:
        """Add patches, attention of one head and an MLP on tokens [N, patches, 8], as in ViT."""
        net, r = self.net, self.r
        patch = r.choice((2, 4))
        weight = net.weight((8, net.shape(x)[1], patch, patch), self.weights())
        y = net.op("Conv", self.own(x), weight, name=net.fresh("conv"), strides=[patch, patch])
        n, c, h, w = net.shape(y)
        tokens = net.op(
            "Transpose", net.op("Reshape", y, net.const(np.array([n, c, -1], I64))), perm=[0, 2, 1]
        )
        tokens = net.op("Add", tokens, net.const(net.random.normal(0, 1, net.shape(tokens))))

        def linear(x: str, outputs: int) -> str:
            product = net.op(
                "MatMul",
                self.own(x),
                net.weight(
                    (net.shape(x)[-1], outputs), r.choice(("none", "tensor", "axis1", "axis1-dq"))
                ),
            )
            return net.op("Add", product, net.const(np.linspace(-1, 1, outputs)))

        def norm(x: str) -> str:
            ones, zeros = net.const(np.ones(c)), net.const(np.zeros(c))
            return net.op("LayerNormalization", x, ones, zeros, axis=-1) if net.opset >= 17 else x

        q, k, v = (self.maybe(linear(norm(tokens), c), 0.4) for _ in range(3))
        scores = net.op(
            "Softmax", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1])), axis=-1
        )
        tokens = net.op("Add", tokens, linear(net.op("MatMul", self.maybe(scores, 0.4), v), c))
        inner = linear(norm(tokens), 16)
        gate = net.op("Add", net.op("Erf", net.op("Mul", inner, net.const(0.7))), net.const(1.0))
        tokens = net.op("Add", tokens, linear(self.maybe(net.op("Mul", inner, gate), 0.3), c))
        return net.op(
            "Reshape",
            net.op("Transpose", tokens, perm=[0, 2, 1]),
            net.const(np.array([n, c, h, w], I64)),
        )

    def block_gemm(self, x: str) -> str:
        net, r = self.net, self.r
        y = self.maybe(x, 0.4)
        if r.random() < 0.5:
            y = self.maybe(net.op("GlobalAveragePool", y), 0.3)
        y = net.op("Flatten", y)
        width = net.shape(y)[1]
        form = r.choice(("none", "tensor", "axis0", "axis0", "axis0-dq", "axis1"))
        if r.random() < 0.6:
            z = net.op(
                "Gemm",
                self.own(y),
                net.weight((16, width), form),
                net.const(np.linspace(-1, 1, 16)),
                transB=1,
            )
        else:
            z = net.op("MatMul", self.own(y), net.weight((width, 16), form))
        self.outputs.append(z if r.random() < 0.5 else net.op("Softmax", z, axis=-1))
        return x

    def network(self) -> onnx.ModelProto:
        net, r = self.net, self.r
        size = r.choice((8, 12, 16))
        x = net.input((1, r.choice((3, 4, 8)), size, size))
        blocks: Sequence[Callable[[str], str]] = (
            self.block_conv,
            self.block_residual,
            self.block_c2f,
            self.block_sppf,
            self.block_pan,
            self.block_depthwise,
            self.block_grouped,
            self.block_deconv,
            self.block_se,
            self.block_shuffle,
            self.block_moves,
            self.block_moves,
            self.block_moves,
            self.block_dfl,
            self.block_attention,
            self.block_gemm,
            self.block_transformer,
        )
        for _ in range(r.choice((1, 2, 3, 4))):
            block = r.choice(blocks)
            if len(net.shape(x)) != 4 or min(net.shape(x)[2:]) < 4 or max(net.shape(x)) > 40:
                break
            x = block(x)
        roll = r.random()
        if roll < 0.1:
            x = self.net.q(x, self.scale()) if r.random() < 0.5 else self.pair(x)
        return net.model(x, *dict.fromkeys(o for o in self.outputs if o != x))


def network(seed: int, types: str = "int8") -> onnx.ModelProto:
    """Return the random network of a seed.

    Args:
        seed: The seed.
        types: Types of the quantizers: ``int8``, ``fp8``, or ``mixed`` (one type before a random
            node, the other type after this node).
    """
    grammar = Grammar(seed, types)
    model = grammar.network()
    if types == "fp8":
        return convert_to_fp8(model)
    if types == "mixed":
        place, is_first = grammar.r.randrange(len(model.graph.node)), grammar.r.random() < 0.5
        return convert_to_fp8(model, lambda index: (index < place) == is_first)
    return model
