"""In which type each convolution of an engine multiplies, and what it writes: classic layers and Myelin kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdqtool.buildlog.types import BuiltLayer
from qdqtool.model.graph import Model
from qdqtool.model.operators import WEIGHTED
from qdqtool.types import Json, Precision
from qdqtool.verification.mapping import ATTENTION, PRODUCT, Mapper, product_rank

FLOAT = Precision.FP32
_SHORTENED = re.compile("(Cas|Rou)[tn]")  # 10.3 shortens the names of steps to three letters, other versions to four


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """What the compiler made of one Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        index: Place of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm`` or ``MatMul``.
        precision: The data type it multiplies in; UNKNOWN where the plan has no layer of its own for it (removed, or
            merged with an equal node).
        inputs: Types that its layer reads: the data input, and the second one where that is no constant.
        output: Type that its layer writes.
        layer: The engine layer's name; None where there is none.
    """

    index: int
    name: str
    op: str
    precision: Precision
    inputs: tuple[Precision, ...] = ()
    output: Precision = Precision.UNKNOWN
    layer: str | None = None

    def as_json(self) -> Json:
        return {
            "index": self.index,
            "name": self.name,
            "op": self.op,
            "precision": str(self.precision),
            "inputs": [str(p) for p in self.inputs],
            "output": str(self.output),
            "layer": self.layer,
        }


def built_nodes(model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str]) -> list[BuiltNode]:
    """One row for each Conv, ConvTranspose, Gemm and MatMul.

    Args:
        model: The model.
        layers: The engine's layers.
        names: Node index to the name that the node had in the build.
    """
    mapper = Mapper(model, layers, names)
    products = [n for n in model.nodes if n.op in WEIGHTED]
    inside = Counter(id(layer) for n in products for layer in {id(x): x for x, _ in mapper.places(n)}.values())
    # A generated kernel that computes several small products does not say which of them is in which type.
    crowded = {id(x) for x in layers if x.type == "kgen" and inside[id(x)] > 1 and ATTENTION not in x.name}
    return [
        _row(n.index, n.name, n.op, [layer for layer, _ in mapper.places(n) if id(layer) not in crowded])
        for n in products
    ]


def _row(index: int, name: str, op: str, layers: list[BuiltLayer]) -> BuiltNode:
    layer = _choose(layers)
    if layer is None:
        return BuiltNode(index, name, op, Precision.UNKNOWN)
    data = [t.precision for t in layer.inputs]
    precision, output = computes_in(layer), writes(layer)
    return BuiltNode(index, name, op, precision, tuple(data[:1] if layer.constants else data[:2]), output, layer.name)


def writes(layer: BuiltLayer) -> Precision:
    """What a product's layer writes; a generated kernel writes what comes of the steps behind the product as well."""
    return Precision.UNKNOWN if layer.type == "kgen" or _widened(layer) else layer.output_precision


def _widened(layer: BuiltLayer) -> bool:
    """Whether a Cast to another float follows the product in a fused kernel: what it writes is not the product's."""
    product = PRODUCT.search(layer.name) if layer.type in ("runtime_fusion", "kgen") else None
    return product is not None and layer.name.startswith("Cast", product.end())


def _choose(layers: list[BuiltLayer]) -> BuiltLayer | None:
    """The layer that multiplies; the first of the most certain kind."""
    multiplying = [x for x in layers if product_rank(x) is not None]
    return min(multiplying, key=lambda x: product_rank(x) or 0, default=None)


def computes_in(layer: BuiltLayer) -> Precision:
    """The type in which a layer multiplies; of a classic layer that of its data input."""
    tensors = [t.precision for t in (*layer.inputs, *layer.constants)]
    floats = [p for p in tensors if p.is_float]
    if ATTENTION in layer.name:  # both of its products, where queries, keys and values (behind masks) have one type
        kinds = {t.precision for t in layer.inputs[-3:]}
        return kinds.pop() if len(kinds) == 1 else Precision.UNKNOWN
    if layer.type in ("correlation", "deconv", "gemm"):
        # Weights are the first constant, or the second input; a fused residual is a float input behind them.
        others = [t.precision for t in (*layer.inputs[1:2], *layer.constants[:1])]
        if not layer.inputs:
            others = [t.precision for t in layer.constants[1:2]]
        if tensors and not tensors[0].is_float and (tensors[0] in others or Precision.INT4 in others):
            return tensors[0]
        return next((p for p in tensors[:2] if p.is_float), layer.output_precision)
    if layer.type in ("runtime_fusion", "runtime_function", "kgen"):
        stored = [p for p in tensors if p in (Precision.INT8, Precision.FP8)]
        if stored and _integers_arrive(layer.name, (tensors or [FLOAT])[0]):
            return stored[0]
        if _widened(layer) and Precision.FP16 in floats:
            return Precision.FP16
        return layer.output_precision if layer.output_precision.is_float else (floats or [Precision.UNKNOWN])[0]
    return layer.input_precision


def _integers_arrive(name: str, first: Precision) -> bool:
    """Whether a fused kernel's product takes integers, read from the steps in its name and its first input's type.

    The Cast of a Q follows a Round, or is the first step where the kernel in front has rounded; that of a DQ is
    followed by the Mul with its scale. MulSum and slices are products of floats, written out.
    """
    product = PRODUCT.search(name)
    if product is None or product[1].startswith(("MulSum", "Slic")):
        return False
    steps = _SHORTENED.sub(r"\1", name[: product.start()].removeprefix("__myl_"))
    cast = steps.rfind("Cas")
    if cast < 0:
        return not first.is_float
    before, after = steps[:cast], steps[cast + len("Cas") :]
    return "Mul" not in after and (before.endswith("Rou") or (not before and first == Precision.FP32))
