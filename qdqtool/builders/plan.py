"""From the engine's layers back to the ONNX nodes: in which type each convolution multiplies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qdqtool.builders.result import BuiltNode
from qdqtool.types import Precision

if TYPE_CHECKING:
    from qdqtool.buildlog.types import BuiltLayer
    from qdqtool.graph import Model

FLOAT = Precision.FP32
OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Layer types of Myelin that multiply, the most telling first. A kgen kernel is generated code: small matrix products
# end up in one, among the elementwise work around them.
_MULTIPLY = ("correlation", "deconv", "gemm", "runtime_fusion", "runtime_function")
# The product inside a fused kernel's name, which lists its steps: MulMinMaxRounCastCorrMulAdd.
_PRODUCT = re.compile(r"(?<=[a-z_])(Fc|Gemm|MatMul|MulSum|Conv|Corr)(?=[A-Z_])")


def built_nodes(model: Model, layers: Sequence[BuiltLayer], names: dict[int, str]) -> list[BuiltNode]:
    """One row for each Conv, ConvTranspose, Gemm and MatMul.

    Args:
        model: The model.
        layers: The engine's layers.
        names: Node index to the name that the node had in the build.
    """
    by_node: dict[str, list[BuiltLayer]] = {}
    for layer in layers:
        for name in layer.onnx_names or _components(layer):
            by_node.setdefault(name, []).append(layer)
    multiply = {names[n.index] for n in model.nodes if n.op in OPERATORS}
    # A generated kernel that computes several small products does not tell which of them is in which type.
    crowded = {id(x) for x in layers if x.type == "kgen" and len(multiply.intersection(x.onnx_names)) > 1}
    rows = []
    for node in model.nodes:
        if node.op in OPERATORS:
            own = [x for x in by_node.get(names[node.index], []) if id(x) not in crowded]
            rows.append(_row(node.index, node.name, node.op, own))
    return rows


def _components(layer: BuiltLayer) -> list[str]:
    """ONNX names in a classic layer's fused name."""
    return [*layer.fused().components, layer.name]


def _row(index: int, name: str, op: str, layers: list[BuiltLayer]) -> BuiltNode:
    layer = _choose(layers)
    if layer is None:
        return BuiltNode(index, name, op, Precision.UNKNOWN)
    data = [t.precision for t in layer.inputs]
    # A generated kernel writes what comes of the steps behind the product as well.
    output = Precision.UNKNOWN if layer.type == "kgen" else layer.output_precision
    precision = _multiplies_in(layer)
    return BuiltNode(index, name, op, precision, tuple(data[:1] if layer.constants else data[:2]), output, layer.name)


def _choose(layers: list[BuiltLayer]) -> BuiltLayer | None:
    for kind in _MULTIPLY:
        for layer in layers:
            if layer.type == kind:
                return layer
    classic = [x for x in layers if x.is_convolution or "gemm" in x.type.lower() or "matrix" in x.type.lower()]
    if classic:
        return classic[0]
    generated = [x for x in layers if x.type == "kgen"]
    products = [x for x in generated if _PRODUCT.search(x.name)]
    return products[0] if products else None


def _multiplies_in(layer: BuiltLayer) -> Precision:
    tensors = [t.precision for t in (*layer.inputs, *layer.constants)]
    floats = [p for p in tensors if p.is_float]
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
        return layer.output_precision if layer.output_precision.is_float else (floats or [Precision.UNKNOWN])[0]
    return layer.input_precision


def _integers_arrive(name: str, first: Precision) -> bool:
    """Whether a fused kernel's product takes integers, told from the steps in its name and its first input's type.

    The Cast of a Q follows a Round, or is the first step where the kernel in front has rounded; that of a DQ is
    followed by the Mul with its scale. MulSum is a product of floats, written out.
    """
    product = _PRODUCT.search(name)
    if product is None or product[1] == "MulSum":
        return False
    steps = name[: product.start()].removeprefix("__myl_")
    cast = steps.rfind("Cast")
    if cast < 0:
        return not first.is_float
    before, after = steps[:cast], steps[cast + len("Cast") :]
    return "Mul" not in after and (before.endswith("Roun") or (not before and first == Precision.FP32))


def inspector_json(layers: Sequence[BuiltLayer], bindings: Sequence[str], back: dict[str, str]) -> dict[str, Any]:
    """The layers in the form of TensorRT's engine inspector, ONNX names as the model has them.

    Args:
        layers: The engine's layers.
        bindings: Names of the network's inputs and outputs.
        back: Name in the build to name in the model.
    """
    def tensor(item: Any) -> dict[str, Any]:
        return {"Name": item.tensor, "Dimensions": [-1 if d is None else d for d in item.shape or ()],
                "Datatype": _INSPECTOR.get(item.precision, str(item.precision)), "Format": item.format}

    def listed(layer: BuiltLayer) -> dict[str, Any]:
        return {
            "Name": layer.name,
            "LayerType": layer.type,
            "Inputs": [tensor(t) for t in layer.inputs],
            "Constants": [tensor(t) for t in layer.constants],
            "Outputs": [tensor(t) for t in layer.outputs],
            "TacticName": layer.tactic,
            "Metadata": "".join(f"[ONNX Layer: {back.get(n, n)}]" for n in layer.onnx_names),
        }

    return {"Layers": [listed(x) for x in layers], "Bindings": list(bindings)}


_INSPECTOR = {
    Precision.INT8: "Int8", Precision.FP32: "Float", Precision.FP16: "Half", Precision.BF16: "BFloat16",
    Precision.FP8: "FP8", Precision.INT4: "Int4", Precision.INT32: "Int32", Precision.INT64: "Int64",
    Precision.BOOL: "Bool", Precision.UINT8: "UInt8",
}
