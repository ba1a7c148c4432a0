"""Data types of convolutions and matrix products in an engine listing.

Myelin compiles products into kernels whose names list their steps, such as
MulMinMaxRounCastCorrMulAdd. The type in which such a kernel multiplies follows from its name, its
tactic and the types of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qdqtool.buildlog.types import BuiltLayer
from qdqtool.ir.precision import Precision

# Layer types of Myelin that may multiply, the most certain first.
_MULTIPLY = ("correlation", "deconv", "gemm", "runtime_fusion", "runtime_function")
SINGLE_PRODUCT = ("correlation", "deconv", "gemm")
_COMPILED = ("runtime_fusion", "runtime_function", "kgen")
# Layer types that multiply only if their name or tactic says so. A "kgen" kernel is generated code:
# elementwise work, and small matrix products next to it. A "fusion" wraps a compiled product (FcCas
# with the tactic of a gemm) or generated code.
_GENERATED = ("fusion", "kgen")
ABBREVIATED = "Etc"  # ends the step list in names of generated kernels with many steps
# Step of a fused kernel's name that is a matrix product or convolution. Myelin writes a product
# with few columns as slices, multiplications and an addition.
PRODUCT = re.compile(
    r"(?<=[a-z_])(Fc|Gemm|MatMul|MulSum|(?:Slic){2,4}(?:Mul){2,4}Add|Conv|Corr|Deco)(?=[A-Z_])"
)
# Part of the name of a kernel that computes a whole attention from queries, keys and values, such
# as _gemm_mha_v2, or _gemv_mha_v1 for one query.
ATTENTION = "_mha_v"
# TensorRT 10.3 shortens the names of steps to three letters, other versions to four.
_FOURTH_LETTER = re.compile("(Cas|Rou)[tn]")


def is_myelin_kernel(layer: BuiltLayer) -> bool:
    """Return whether a layer is a Myelin kernel, whose name does not list the fused nodes."""
    return layer.type in _GENERATED or layer.type in _MULTIPLY


def product_rank(layer: BuiltLayer) -> int | None:
    """Return a rank for how likely a layer multiplies: 0 is most likely, None means never."""
    if layer.type in _MULTIPLY:
        return _MULTIPLY.index(layer.type)
    kind = layer.type.lower()
    if layer.is_convolution or any(word in kind for word in ("gemm", "matmul", "matrix")):
        return len(_MULTIPLY)
    if layer.type not in _GENERATED:
        return None
    # The name of a generated kernel, or the tactic of a fusion, contains the product.
    tactic = layer.tactic if layer.type == "fusion" else ""
    has_product = ATTENTION in layer.name or PRODUCT.search(layer.name) or "gemm" in tactic
    return len(_MULTIPLY) + 1 + _GENERATED.index(layer.type) if has_product else None


def none_if_unknown(precision: Precision) -> Precision | None:
    """Return the precision, or None for UNKNOWN."""
    return None if precision == Precision.UNKNOWN else precision


def output_precision(layer: BuiltLayer) -> Precision:
    """Return the type that a layer's product writes; UNKNOWN if later steps hide the type."""
    if layer.type == "kgen" or _has_cast_after_product(layer):
        return Precision.UNKNOWN
    return layer.output_precision


def compute_precision(layer: BuiltLayer) -> Precision:
    """Return the type in which a layer multiplies; UNKNOWN if the listing does not show it."""
    if ATTENTION in layer.name:
        return _attention_precision(layer)
    if layer.type in SINGLE_PRODUCT:
        return _single_product_precision(layer)
    if layer.type in _COMPILED:
        return _fused_kernel_precision(layer)
    return layer.input_precision


def _attention_precision(layer: BuiltLayer) -> Precision:
    """Return the common type of queries, keys and values; UNKNOWN if their types differ."""
    kinds = set([t.precision for t in layer.inputs if t.precision != Precision.BOOL][-3:])
    return kinds.pop() if len(kinds) == 1 else Precision.UNKNOWN


def _single_product_precision(layer: BuiltLayer) -> Precision:
    # Weights are the first constant or the second input. A fused residual is a later float input.
    weights = [*layer.inputs[1:2], *layer.constants[:1]] if layer.inputs else layer.constants[1:2]
    types = [t.precision for t in (*layer.inputs, *layer.constants)]
    weight_types = [t.precision for t in weights]
    if types and not types[0].is_float:
        if types[0] in weight_types or Precision.INT4 in weight_types:
            return types[0]
    return next((p for p in types[:2] if p.is_float), layer.output_precision)


def _fused_kernel_precision(layer: BuiltLayer) -> Precision:
    types = [t.precision for t in (*layer.inputs, *layer.constants)]
    floats = [p for p in types if p.is_float]
    stored = [p for p in types if p in (Precision.INT8, Precision.FP8)]
    if stored and ABBREVIATED in layer.name and PRODUCT.search(layer.name) is None:
        return Precision.UNKNOWN
    if stored and _has_integer_operands(layer.name, types[0]):
        return stored[0]
    if _has_cast_after_product(layer):
        if len(set(floats)) == 1:
            return floats[0]
        if Precision.FP16 in floats and _casts_product_directly(layer):
            return Precision.FP16
    return _float_kernel_precision(layer, floats)


def _float_kernel_precision(layer: BuiltLayer, floats: Sequence[Precision]) -> Precision:
    if len({t.precision for t in layer.outputs}) > 1:
        # Some outputs belong to other nodes, and the listing does not say which.
        return floats[0] if len(set(floats)) == 1 else Precision.UNKNOWN
    if layer.output_precision.is_float:
        return layer.output_precision
    return floats[0] if floats else Precision.UNKNOWN


def _has_cast_after_product(layer: BuiltLayer) -> bool:
    """Return whether a fused kernel casts its result after the product.

    Examples: FcAddCast is a Gemm with bias and the Cast to FP32 after it, DecoAddMulCast a
    ConvTranspose with bias and the Q of FP8 after it.
    """
    return "Cast" in _steps_after_product(layer)


def _casts_product_directly(layer: BuiltLayer) -> bool:
    return _steps_after_product(layer).startswith("Cast")


def _steps_after_product(layer: BuiltLayer) -> str:
    product = PRODUCT.search(layer.name) if layer.type in ("runtime_fusion", "kgen") else None
    return layer.name[product.end() :] if product is not None else ""


def _has_integer_operands(name: str, first_input: Precision) -> bool:
    """Return whether the product of a fused kernel multiplies integers.

    Operands are integers after the Cast of a Q, and floats after the Cast of a DQ. The Cast of a Q
    follows a Round, or is the first step if the previous kernel has rounded. After the Cast of a DQ
    comes the Mul with the scale. MulSum and slices stand for products of floats.
    """
    product = PRODUCT.search(name)
    if product is None or product[1].startswith(("MulSum", "Slic")):
        return False
    steps = _FOURTH_LETTER.sub(r"\1", name[: product.start()].removeprefix("__myl_"))
    before, cast, after = steps.rpartition("Cas")
    if not cast:
        return not first_input.is_float
    return "Mul" not in after and (
        before.endswith("Rou") or (not before and first_input == Precision.FP32)
    )
