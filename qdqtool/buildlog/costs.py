"""Memory, operations and time of each engine layer.

Definitions follow TREx (NVIDIA's TensorRT engine explorer, up to TensorRT 11.0): the bytes of a
layer are the bytes of input tensors, weights (without bias) and output tensors. Each element counts
once at its own width, and a vectorized layout counts without padding. Operations are
multiply-accumulates (MACs); arithmetic intensity is MACs per byte.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from qdqtool.buildlog.build_status import is_implicit_int8
from qdqtool.buildlog.layers import as_int_list, find_precision
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, ParsedNode, static_shape
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import Precision
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_shape, keep_end

_MAX_MACS = 1 << 80  # a larger number means a damaged file
_MAX_WEIGHTS = 1 << 48
_PRODUCTS = ("conv", "gemm", "matmul")
ENGINE_SCHEMA = "qdqtool/engine/1"


@dataclass(slots=True)
class LayerCost:
    """Layer of an engine and its cost.

    Each number of bytes is None if a shape is unknown or dynamic.

    Attributes:
        index: Position of the layer in the engine.
        macs: Multiply-accumulates; None if weights or shapes are unknown, 0 for layers that are
            neither convolutions nor matrix products.
        ms: Average milliseconds, None without a profile.
        share: Share of the total time in the profile, 0 to 1; None without a profile.
        expected_ms: Estimated milliseconds on the GPU, None if unknown.
        best_ms: Time at the GPU's peak rates in milliseconds, None if unknown.
    """

    layer: BuiltLayer
    index: int
    macs: int | None = None
    input_bytes: int | None = None
    weight_bytes: int | None = None
    output_bytes: int | None = None
    ms: float | None = None
    share: float | None = None
    expected_ms: float | None = None
    best_ms: float | None = None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.layer.name

    @property
    def precision(self) -> Precision:
        """Precision of the first input; of the first output if the layer has no inputs."""
        return self.layer.input_precision if self.layer.inputs else self.layer.output_precision

    @property
    def total_bytes(self) -> int | None:
        """Bytes of inputs, weights and outputs; None if any of them is unknown."""
        if self.input_bytes is None or self.output_bytes is None or self.weight_bytes is None:
            return None
        return self.input_bytes + self.weight_bytes + self.output_bytes

    @property
    def times_expected(self) -> float | None:
        """Measured time divided by the expected time; None if either is unknown."""
        return self.ms / self.expected_ms if self.ms is not None and self.expected_ms else None

    @property
    def intensity(self) -> float | None:
        """MACs per byte; None if MACs or bytes are unknown, or bytes are 0."""
        total = self.total_bytes
        return None if self.macs is None or not total else self.macs / total

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "index": self.index,
            **to_json_fields(self.layer, "name", "type", "kind"),
            "precision": str(self.precision),
            **to_json_fields(self.layer, "inputs", "outputs"),
            **to_json_fields(self, "macs", "input_bytes", "weight_bytes", "output_bytes"),
            "bytes": self.total_bytes,
            **to_json_fields(
                self, "intensity", "ms", "share", "expected_ms", "best_ms", "times_expected"
            ),
        }


@dataclass(slots=True)
class LayerTotals:
    """Sums over a group of layers.

    Attributes:
        unknown: Number of layers whose bytes or MACs are unknown.
    """

    layers: int = 0
    macs: int = 0
    bytes: int = 0
    ms: float = 0.0
    unknown: int = 0

    def add(self, cost: LayerCost) -> None:
        """Add a layer to the sums."""
        self.layers += 1
        self.macs += cost.macs or 0
        self.bytes += cost.total_bytes or 0
        self.ms += cost.ms or 0.0
        self.unknown += cost.macs is None or cost.total_bytes is None

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return to_json_fields(self)


_GROUPS: dict[str, Callable[[LayerCost], str]] = {
    "kind": lambda row: str(row.layer.kind),
    "precision": lambda row: str(row.precision),
    "type": lambda row: row.layer.type or "unknown",
}
_SORT_KEYS: dict[str, Callable[[LayerCost], str | float]] = {
    "order": lambda row: row.index,
    "name": lambda row: row.name,
    "type": lambda row: row.layer.type,
    "ms": lambda row: -(row.ms or 0.0),
    "macs": lambda row: -(row.macs or 0),
    "bytes": lambda row: -(row.total_bytes or 0),
    "intensity": lambda row: -(row.intensity or 0.0),
}


@dataclass(slots=True)
class EngineReport:
    """Layers of an engine with their costs, in the order of the engine.

    Attributes:
        unmatched: Names in the profile that no layer has.
        gpu: GPU for which the layer times are estimated; None without estimates.
    """

    build: Build
    rows: list[LayerCost] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    gpu: str | None = None

    @property
    def implicit_int8(self) -> bool:
        """Whether INT8 comes from a calibration table or dynamic ranges instead of Q/DQ."""
        return is_implicit_int8(self.build)

    @property
    def has_times(self) -> bool:
        """Whether the time of at least one layer is known."""
        return any(row.ms is not None for row in self.rows)

    @property
    def total_ms(self) -> float:
        """Sum of the known times of layers."""
        return sum(row.ms or 0.0 for row in self.rows)

    def totals(self, key: str) -> dict[str, LayerTotals]:
        """Return sums over layers grouped by `key`, the most expensive group first.

        Args:
            key: ``precision``, ``type`` or ``kind``.
        """
        table: dict[str, LayerTotals] = defaultdict(LayerTotals)
        for row in self.rows:
            table[_GROUPS[key](row)].add(row)

        def rank(group: str) -> tuple[float, int, int, str]:
            total = table[group]
            return -total.ms, -total.bytes, -total.layers, group

        return {group: table[group] for group in sorted(table, key=rank)}

    def sorted_rows(self, key: str) -> list[LayerCost]:
        """Return the layers sorted by a key.

        Args:
            key: ``order``, ``name``, ``type``, or ``ms``, ``macs``, ``bytes``, ``intensity``
                (largest first).
        """
        return sorted(self.rows, key=_SORT_KEYS[key])

    def as_json(self) -> Json:
        """Return the JSON output of ``qdqtool engine``."""
        totals = {
            key: {group: total.as_json() for group, total in self.totals(key).items()}
            for key in _GROUPS
        }
        return {
            "schema": ENGINE_SCHEMA,
            **to_json_fields(self, "build"),
            "bindings": list(self.build.bindings),
            "total_ms": self.total_ms if self.has_times else None,
            "totals": totals,
            "layers": [row.as_json() for row in self.rows],
            **to_json_fields(self, "unmatched", "gpu", "implicit_int8"),
        }


def analyze(build: Build) -> EngineReport:
    """Compute the cost of every layer of a build, with times if the build has a profile."""
    report = EngineReport(build)
    nodes = {node.name: node for node in build.parse.nodes if node.op in WEIGHTED}
    times: dict[str, deque[float]] = defaultdict(deque)
    for row in build.profile_rows:
        times[row.name].append(row.average_ms)
    total = sum(row.average_ms for row in build.profile_rows)
    for index, layer in enumerate(build.layers):
        bases = layer.parse_name().bases if nodes else []
        parsed_weights = _count_parsed_weights([nodes[name] for name in bases if name in nodes])
        cost = LayerCost(
            layer,
            index,
            _count_macs(layer, parsed_weights),
            _count_bytes(layer.inputs),
            _count_weight_bytes(layer, parsed_weights),
            _count_bytes(layer.outputs),
        )
        if times.get(layer.name):
            cost.ms = times[layer.name].popleft()
            cost.share = cost.ms / total if total else None
        report.rows.append(cost)
    for name, remaining in times.items():
        report.unmatched += [name] * len(remaining)
    return report


def _count_bytes(tensors: Iterable[BuiltTensor]) -> int | None:
    total = 0.0
    for tensor in tensors:
        if tensor.elements is None or tensor.precision.width is None:
            return None
        total += tensor.elements * tensor.precision.width
    return math.ceil(total)


def _has_weights(layer: BuiltLayer) -> bool:
    return layer.is_convolution or "gemm" in layer.type.lower() or "MatrixMultiply" in layer.type


def _compute_weight_bytes(count: int, precision: Precision) -> int:
    return math.ceil(count * (precision.width or 4.0))


def _count_weight_bytes(layer: BuiltLayer, parsed_weights: int | None) -> int | None:
    listed = _find_listed_weights(layer)
    if listed is not None:
        return _compute_weight_bytes(*listed)
    if layer.constants and _has_weights(layer):
        # Skip biases, which have one dimension.
        return _count_bytes(c for c in layer.constants if c.shape is not None and len(c.shape) > 1)
    if parsed_weights is not None:
        return _compute_weight_bytes(parsed_weights, layer.input_precision)
    return None if layer.is_convolution else 0


def _find_listed_weights(layer: BuiltLayer) -> tuple[int, Precision] | None:
    # A convolution that is fused with a pooling has the field ConvWeights.
    for key in ("Weights", "ConvWeights"):
        weights = layer.extras.get(key)
        if isinstance(weights, dict):
            count = weights.get("Count")
            if isinstance(count, int) and not isinstance(count, bool) and 0 < count < _MAX_WEIGHTS:
                return count, find_precision(str(weights.get("Type", "")))
    return None


def _count_parsed_weights(nodes: list[ParsedNode]) -> int | None:
    total = 0
    for node in nodes:
        weights = node.inputs[1] if len(node.inputs) > 1 else None
        shape = None if weights is None else static_shape(weights.shape)
        count = 0 if shape is None else math.prod(shape)
        if not 0 < count < _MAX_WEIGHTS:
            return None
        total += count
    return total or None


def _count_macs(layer: BuiltLayer, parsed_weights: int | None) -> int | None:
    if not _has_weights(layer):
        return 0
    source = static_shape(layer.inputs[0].shape) if layer.inputs else None
    target = static_shape(layer.outputs[0].shape) if layer.outputs else None
    if source is None or target is None:
        return None
    if layer.is_convolution and len(source) >= 3:
        macs = _count_convolution_macs(layer, parsed_weights, source, target)
    else:
        macs = _count_product_macs(source, target)
    return macs if macs is not None and 0 <= macs < _MAX_MACS else None


def _count_product_macs(source: list[int], target: list[int]) -> int | None:
    if len(source) < 2 or len(target) < 2:
        return None
    # A matrix product sums over the last dimension of its input. If the weights are the left
    # operand, the product sums over the second to last dimension. Then only this dimension differs
    # between input and output.
    is_left = source[-1] == target[-1] and source[-2] != target[-2]
    return math.prod(target) * source[-2 if is_left else -1]


def _count_convolution_macs(
    layer: BuiltLayer, parsed_weights: int | None, source: list[int], target: list[int]
) -> int | None:
    weights = _count_convolution_weights(layer, parsed_weights, source[1])
    if weights is None or len(target) < 3:
        return None
    if layer.is_deconvolution:
        # Each input element is multiplied by every weight of its channel.
        return math.prod(source) // max(1, source[1]) * weights
    positions = _count_positions_before_pooling(layer.extras, source)
    if positions is not None:
        return target[0] * positions * weights
    if "pool" in layer.type.lower():
        # The listing lacks the shape between the convolution and the pooling fused after it.
        return None
    return math.prod(target) // max(1, target[1]) * weights


def _count_convolution_weights(
    layer: BuiltLayer, parsed_weights: int | None, channels: int
) -> int | None:
    listed = _find_listed_weights(layer)
    if listed is not None:
        return listed[0]
    for constant in layer.constants:
        if len(constant.shape or ()) >= 4 and constant.elements:
            return constant.elements
    if parsed_weights is not None:
        return parsed_weights
    kernel = as_int_list(layer.extras.get("Kernel"), 1)
    maps, groups = layer.extras.get("OutMaps"), layer.extras.get("Groups", 1)
    if kernel is None or not isinstance(maps, int) or not isinstance(groups, int):
        return None
    return math.prod(kernel) * maps * channels // max(1, groups)


def _count_positions_before_pooling(extras: dict[str, Any], source: list[int]) -> int | None:
    """Return height x width of a convolution's output before the pooling fused after it.

    None if the layer has no fields of a fused convolution (``ConvKernel``, ``ConvStride``, ...).
    """
    kernel = as_int_list(extras.get("ConvKernel"), 1)
    stride = as_int_list(extras.get("ConvStride"), 1)
    before = as_int_list(extras.get("ConvPrePadding"), 0)
    after = as_int_list(extras.get("ConvPostPadding"), 0)
    if kernel is None or stride is None or before is None or after is None:
        return None
    axes = zip(source[2:], kernel, stride, before, after, strict=False)
    return math.prod(
        (size + low + high - window) // step + 1 for size, window, step, low, high in axes
    )


# Display names of layers and tensors


def layer_title(row: LayerCost) -> str:
    """Return a short display name: of a layer's main node, or of a reformat, copy, Q or DQ."""
    name = row.layer.parse_name()
    if name.kind.startswith("reformat"):
        return f"reformat {keep_end(name.subject, 26)}"
    if name.kind == "copy":
        return f"copy {keep_end(name.subject, 30)}"
    if row.layer.is_qdq:
        owner, _, op = row.layer.name.rpartition("/")
        if not owner:
            return row.layer.name
        return f"{'DQ' if op.startswith('D') else 'Q'} {keep_end(owner, 33)}"
    merged = len(name.alternatives) - 1
    extra = f"  (+{merged})" if merged > 0 else ""
    return keep_end(main_node(row), 36 - len(extra)) + extra


def main_node(row: LayerCost) -> str:
    """Return the name of the ONNX node in a layer that is named like a convolution or product.

    Without such a node, return the last node of the layer, or else the layer's name.
    """
    groups = row.layer.parse_name().alternatives
    # If several layers are merged, use the nodes of the first.
    names = row.layer.onnx_names if len(groups) < 2 else []
    names = names or next(iter(groups), []) or [row.layer.name]
    nodes = [n for n in reversed(names) if not n.endswith("weight") and "uantizeLinear" not in n]
    for product in _PRODUCTS:
        for node in nodes:
            if product in node.rsplit("/", 1)[-1].lower():
                return node
    return names[-1]


def format_tensor(tensor: BuiltTensor) -> str:
    """Format shape, precision and vector width as ``1x64x80x80 INT8:32``."""
    shape = format_shape(tensor.shape or ())
    vector = f":{tensor.vector}" if tensor.vector > 1 else ""
    return f"{shape} {tensor.precision}{vector}".strip()
