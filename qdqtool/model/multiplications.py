"""How many multiplications an operator takes in onnxruntime, at least one for each element that it reads or writes.

:data:`COUNTERS` names the operators that compute more than that, or that pick some of what they are given. What is
counted may be above what is computed, and below it by a small factor (an Exp counts as a Neg): onnxruntime took .01 to
20 ns of one core for each when that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from qdqtool.errors import ModelError
from qdqtool.model.constants import Constants
from qdqtool.model.graph import Model, Node
from qdqtool.model.subgraphs import DOMAINS

_PASSES = 4  # over the elements, of what normalizes them
_SAMPLED = 12  # for one value between the elements of a map
_FOURIER = 64  # for one element and each bit of their number, where that is no power of two
_STATE = 4  # for one element of the state of a linear attention: decay, reading twice, writing
_DEAR = 32  # a power; an element that is put in a list or looked for in a tree
# Elements along an axis that one between them takes; four in a cubic, each of which takes as long as two others.
_TAPS = {"linear": 2, "bilinear": 2, "cubic": 8, "bicubic": 8}


class _At:
    """What is counted by, of one node.

    Attributes:
        written: Elements of its outputs.
        moved: Elements of its outputs, or of its inputs where those are more.
    """

    def __init__(self, model: Model, node: Node, constants: Constants) -> None:
        self.model, self.node, self.constants = model, node, constants
        self.written = sum(elements(model.shape(t)) for t in node.outputs if t)
        self.moved = max(self.written, sum(elements(model.shape(t)) for t in node.inputs if t))

    def dims(self, position: int) -> list[int]:
        """The dimensions of an input, an open one as 1; none where the shape is not known."""
        return [max(d or 1, 1) for d in self.model.shape(self.node.input(position)) or ()]

    def made(self) -> list[int]:
        """The dimensions of the first output."""
        return [max(d or 1, 1) for d in self.model.shape(self.node.output) or ()]

    def number(self, name: str, default: int) -> int:
        """An attribute that is a positive integer; the default for another."""
        value = self.node.attributes.get(name, default)
        return value if isinstance(value, int) and value > 0 else default

    def word(self, name: str) -> str:
        return str(self.node.attributes.get(name, ""))


def multiplications(model: Model, node: Node, constants: Constants) -> int:
    """One for each element read or written, or for each product that is summed; those of graphs inside apart.

    An open dimension counts as 1, a tensor of unknown shape nothing. ``constants`` are the model's.
    """
    at = _At(model, node, constants)
    if node.domain in DOMAINS and node.op in COUNTERS:
        return COUNTERS[node.op](at)
    return max(at.moved, _by_table(at)) if node.domain == "ai.onnx.ml" else at.moved


def elements(shape: Sequence[int | None] | None) -> int:
    """Elements of a tensor: an open dimension counts as 1, an unknown shape nothing."""
    return 0 if shape is None else math.prod(max(d or 1, 1) for d in shape)


def one_number(value: npt.NDArray[Any] | None) -> int | None:
    """The one integer or truth value of a constant; None for another."""
    if value is None or value.size != 1 or value.dtype.kind not in "biu":
        return None
    return int(value.reshape(-1)[0])


def known_number(constants: Constants, tensor: str) -> int | None:
    """The same of a tensor; None as well where it comes from large weights and the model has none."""
    try:
        return one_number(constants.value(tensor))
    except ModelError:
        return None


def _products(position: int) -> Callable[[_At], int]:
    """Of a convolution whose weights are at an input: so many for each element written."""
    return lambda at: max(at.moved, at.written * math.prod(at.dims(position)[1:]))


def _transposed(at: _At) -> int:
    return max(at.moved, math.prod(at.dims(0)) * math.prod(at.dims(1)[1:]))


def _deformed(at: _At) -> int:
    channels, kernel = at.dims(0)[1:2], at.dims(1)[2:]
    places = at.written // max(1, math.prod(at.dims(1)[:1]))
    return _products(1)(at) + places * math.prod(channels) * math.prod(kernel) * _SAMPLED


def _product(at: _At) -> int:
    return max(at.moved, at.written * math.prod(at.dims(0)[-1:]))


def _general_product(at: _At) -> int:
    first = at.dims(0)
    inner = (
        (first[:1] if at.node.attributes.get("transA", 0) else first[1:]) if len(first) == 2 else ()
    )
    return max(at.moved, at.written * math.prod(inner))


def _summed(at: _At) -> int:
    """An Einsum: two operands after the other, each time for all letters at most."""
    terms = at.word("equation").replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    others = 1
    for position, term in enumerate(terms):
        dims = at.dims(position)
        before, dots, behind = term.partition("...")
        between = len(dims) - len(behind) if dots else len(dims)
        others = max(others, math.prod(dims[len(before) : between]) if dots else 1)
        for letter, size in (
            *zip(before, dims, strict=False),
            *zip(behind, dims[between:], strict=False),
        ):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return max(at.moved, others * math.prod(sizes.values()) * max(1, len(terms) - 1))


def _recurrent(at: _At) -> int:
    """For each step of each sample all weights: those of the input and of the state."""
    weights = math.prod(at.dims(1)) + math.prod(at.dims(2))
    return max(at.moved, math.prod(at.dims(0)[:2]) * weights)


def _attention(at: _At) -> int:
    """Queries by keys, and what comes of that by values."""
    keys = sum(
        math.prod(at.dims(position)[-2:-1]) for position in (1, 4) if at.node.input(position)
    )
    return max(at.moved, (math.prod(at.dims(0)) + math.prod(at.made())) * keys)


def _linear_attention(at: _At) -> int:
    of_head = math.prod(at.dims(0)[-1:]) // at.number("q_num_heads", 1)
    return max(at.moved, max(math.prod(at.dims(2)), math.prod(at.made())) * of_head * _STATE)


def _pooled(at: _At) -> int:
    kernel = at.node.attributes.get("kernel_shape")
    sides = [k for k in kernel if isinstance(k, int) and k > 0] if isinstance(kernel, list) else ()
    return max(at.moved, at.written * math.prod(sides))


def _pooled_regions(at: _At) -> int:
    """Each region may be the whole map, and its parts are read once; or so often as is stated for each part."""
    bins = math.prod(at.made()[2:])
    ratio = at.number("sampling_ratio", 0)
    samples = bins * ratio**2 or math.prod(at.dims(0)[2:])
    return max(at.moved, math.prod(at.made()[:2]) * max(bins, samples) * _SAMPLED)


def _resized(at: _At) -> int:
    """From so many elements each, as many more where it is reduced with antialiasing."""
    before, after = at.dims(0), at.made()
    axes = max(2, sum(a != b for a, b in zip(before, after, strict=False)))
    return int(
        max(at.moved, math.prod(before), math.prod(after)) * _TAPS.get(at.word("mode"), 1) ** axes
    )


def _sampled(at: _At) -> int:
    taps = _TAPS.get(at.word("mode") or "linear", 1)
    return int(max(at.moved, at.written * taps ** max(1, len(at.dims(0)) - 2)))


def _suppressed(at: _At) -> int:
    """Each box with all that were chosen before, for each class."""
    scores = at.dims(1)
    boxes = math.prod(scores[-1:])
    chosen = known_number(at.constants, at.node.input(2))
    return max(
        at.moved, math.prod(scores) * (boxes if chosen is None else max(1, min(chosen, boxes)))
    )


def _by_table(at: _At) -> int:
    """For each row all numbers of the longest attribute: nodes of trees, coefficients, support vectors."""
    attributes = at.node.proto.attribute
    longest = max(
        (max(len(a.ints), len(a.floats), len(a.strings), math.prod(a.t.dims)) for a in attributes),
        default=1,
    )
    return math.prod(at.dims(0)[:1]) * longest


def _passes(at: _At) -> int:
    return at.moved * _PASSES


def _sorted(at: _At) -> int:
    return at.moved * at.moved.bit_length()


def _chosen(at: _At) -> int:
    return at.written


COUNTERS: dict[str, Callable[[_At], int]] = {
    "Conv": _products(1),
    "ConvInteger": _products(1),
    "QLinearConv": _products(3),
    "CausalConvWithState": _products(1),
    "ConvTranspose": _transposed,
    "DeformConv": _deformed,
    "MatMul": _product,
    "MatMulInteger": _product,
    "QLinearMatMul": _product,
    "Gemm": _general_product,
    "Einsum": _summed,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
    "LinearAttention": _linear_attention,
    "AveragePool": _pooled,
    "MaxPool": _pooled,
    "LpPool": lambda at: _pooled(at) * _DEAR,
    "MaxRoiPool": _pooled_regions,
    "RoiAlign": _pooled_regions,
    "LRN": lambda at: at.moved * (at.number("size", 1) + _DEAR),
    "Resize": _resized,
    "Upsample": _resized,
    "GridSample": _sampled,
    **dict.fromkeys(
        (
            "Softmax",
            "LogSoftmax",
            "Hardmax",
            "BatchNormalization",
            "GroupNormalization",
            "LpNormalization",
            "InstanceNormalization",
            "LayerNormalization",
            "MeanVarianceNormalization",
            "RMSNormalization",
            "SoftmaxCrossEntropyLoss",
        ),
        _passes,
    ),
    "TopK": _sorted,
    "Unique": lambda at: _sorted(at) * _DEAR,
    "NonZero": lambda at: at.moved * _DEAR,
    "NonMaxSuppression": _suppressed,
    "DFT": lambda at: _sorted(at) * _FOURIER,
    "STFT": lambda at: 2 * _sorted(at) * _FOURIER,
    "Det": lambda at: at.moved * math.prod(at.dims(0)[-1:]),
    "TfIdfVectorizer": lambda at: (
        at.moved * at.number("max_gram_length", 1) * (1 + at.number("max_skip_count", 0))
    ),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "Shape", "Size", "Slice"), _chosen),
}
