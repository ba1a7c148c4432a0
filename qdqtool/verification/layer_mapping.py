"""Match the nodes of a model with engine layers by name, and collect printed node names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from qdqtool.buildlog.names import base_name, parse_layer_name
from qdqtool.buildlog.types import Build, BuiltLayer, ParsedNode, Shape
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.patterns.view import View
from qdqtool.util.text import format_shape
from qdqtool.verification.kernels import product_rank

LayerPosition = tuple[BuiltLayer, int]
"""A layer, and the position among the layers that TensorRT merged into it with ``||``."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_/]")
_AUXILIARY_TYPES = (
    "TrainStation",
    "Constant",
    "DeviceToShapeHost",
    "ShapeHostToDevice",
    "signal",
    "wait",
)
_AUXILIARY_NAMES = (
    "reformat-input",
    "reformat-output",
    "reformat-network",
    "station",
    "foreign",
)


def plain_name(name: str) -> str:
    """Return a name in Myelin's spelling, with underscores in place of dots and other signs."""
    return _NOT_PLAIN.sub("_", name)


def is_auxiliary(layer: BuiltLayer) -> bool:
    """Return whether a layer has no counterpart in a prediction.

    Such layers are layout reformats, constants, shape and host layers, and whole Myelin blocks.
    """
    return (
        layer.type in _AUXILIARY_TYPES
        or (layer.type == "Myelin" and layer.name.startswith("{ForeignNode"))
        or parse_layer_name(layer.name).kind in _AUXILIARY_NAMES
    )


def is_multiplication_layer(layer: BuiltLayer) -> bool:
    """Return whether a layer computes a convolution or a matrix product of the model."""
    return product_rank(layer) is not None and not is_auxiliary(layer)


class NodeMapper:
    """Lookup of the engine layers of a node, and of the nodes of an engine layer.

    Args:
        names: Name of each node in the build, by the node's index. Default: the names that
            TensorRT's ONNX parser assigns.

    Attributes:
        layers: Engine layers that compute something, see :func:`is_auxiliary`.
    """

    def __init__(
        self, model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str] | None = None
    ) -> None:
        self._names = names or {n.index: n.parser_name for n in model.nodes}
        self._by_name = {self._names[n.index]: n for n in model.nodes}
        self._by_plain_name = {plain_name(name): n for name, n in self._by_name.items()}
        self.layers = [layer for layer in layers if not is_auxiliary(layer)]
        self._positions: dict[int, list[LayerPosition]] = {}
        # Nodes by the id() of their layer, because layers cannot be hashed.
        self._nodes: dict[int, list[Node]] = {}
        for layer in self.layers:
            self._add_layer(layer)

    def _add_layer(self, layer: BuiltLayer) -> None:
        groups = self._node_groups(layer)
        self._nodes[id(layer)] = [n for group in groups for n in group]
        for position, nodes in enumerate(groups):
            for node in nodes:
                self._positions.setdefault(node.index, []).append((layer, position))

    def find_node(self, name: str) -> Node | None:
        """Return the node that a part of a layer name stands for; None if no node matches.

        The name may have TensorRT's copy suffixes or Myelin's spelling.
        """
        return (
            self._by_name.get(name)
            or self._by_name.get(base_name(name))
            or self._by_plain_name.get(plain_name(name))
        )

    def built_name(self, node: Node) -> str:
        """Return the name that a node of the model has in the build."""
        return self._names[node.index]

    def layer_nodes(self, layer: BuiltLayer) -> list[Node]:
        """Return the ONNX nodes of a layer, in the order in which its name lists them.

        Empty if the layer is not one of `layers`.
        """
        return self._nodes.get(id(layer), [])

    def node_positions(self, node: Node) -> list[LayerPosition]:
        """Return each layer that contains a node, with the node's position in a ``||`` merge.

        Myelin may spread one node over several layers.
        """
        return self._positions.get(node.index, [])

    def find_layer(self, node: Node) -> LayerPosition | None:
        """Return the layer that computes a convolution; None unless exactly one layer qualifies.

        Among several layers, those with the best :func:`product_rank` qualify.
        """
        positions = self.node_positions(node)
        if len(positions) > 1:
            ranks = [product_rank(layer) for layer, _ in positions]
            best = min((rank for rank in ranks if rank is not None), default=None)
            positions = [p for p, rank in zip(positions, ranks, strict=True) if rank == best]
        return positions[0] if len(positions) == 1 else None

    def _node_groups(self, layer: BuiltLayer) -> list[list[Node]]:
        """Return the nodes of a layer, in one group for each layer merged into it with ``||``.

        Without such a merge, there is a single group. Empty for a block of Myelin.
        """
        if layer.onnx_names:
            return [self._find_nodes(layer.onnx_names)]
        fused = parse_layer_name(layer.name)
        if fused.kind == "foreign":
            return []
        return [self._find_nodes(group) for group in fused.alternatives]

    def _find_nodes(self, names: Sequence[str]) -> list[Node]:
        return [node for node in map(self.find_node, names) if node is not None]


class NameConflict(NamedTuple):
    """A name that stands for different nodes in the model and in the build.

    Attributes:
        in_model: Operator of the node, shape of its weights or output, or name of its weights.
        in_build: The same property in the build.
    """

    name: str
    in_model: str
    in_build: str


def collect_printed_names(build: Build) -> set[str]:
    """Return every node name in a build's parse section, layers and pass lines."""
    names: set[str] = set()
    names.update(*(layer.onnx_names for layer in build.layers))
    for node in build.parse.nodes:
        outputs = [f"node_of_{tensor.name}" for tensor in node.outputs if tensor is not None]
        names.update([node.name] if node.name else outputs)
    fused_names = {layer.name for layer in build.layers}
    fused_names.update(name for event in build.trace for name in (event.subject, event.object))
    return names.union(*(parse_layer_name(name).bases for name in fused_names))


def count_named_convolutions(model: Model, build: Build) -> tuple[int, int]:
    """Return the number of convolutions that the build names, and the model's total.

    Every Gemm and MatMul counts as a convolution. If the model has none of these nodes, all nodes
    count.
    """
    names = [n.parser_name for n in model.nodes if n.op in WEIGHTED]
    names = names or [n.parser_name for n in model.nodes]
    printed = collect_printed_names(build)
    plain: set[str] = set()
    if any("_myl" in layer.name for layer in build.layers):
        plain = {plain_name(name) for name in printed}
    named = sum(name in printed or plain_name(name) in plain for name in names)
    return named, len(names)


def find_name_conflicts(view: View, build: Build, mapper: NodeMapper) -> list[NameConflict]:
    """Return the names that stand for different nodes in the model and in the build.

    Exporters that number their nodes give equal names to different nodes of two exports.
    """
    weights = {
        n.index: view.weights(n).source for n in view.nodes_with_weights if view.weights(n).folded
    }
    shapes = {i: tuple(view.model.constant_shape(name) or ()) for i, name in weights.items()}
    conflicts = {conflict.name: conflict for conflict in _find_parse_conflicts(view, build, shapes)}
    for conflict in _find_layer_conflicts(mapper, weights, shapes):
        conflicts.setdefault(conflict.name, conflict)
    return list(conflicts.values())


def _find_parse_conflicts(
    view: View, build: Build, shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[NameConflict]:
    """Yield the conflicts with the parse section. Shapes of weights are given by node index."""
    parsed = {n.name: n for n in build.parse.nodes if n.name}
    for node in view.nodes_with_weights:
        printed = parsed.get(node.parser_name)
        if printed is not None:
            conflict = _compare_parsed_node(node, printed, shapes.get(node.index, ()))
            if conflict is not None:
                yield conflict


def _find_layer_conflicts(
    mapper: NodeMapper, weights: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[NameConflict]:
    """Yield the conflicts of the layers that compute one node with weights.

    Args:
        mapper: The layers and their nodes.
        weights: Names of weights, by node index.
        shapes: Shapes of weights, by node index.
    """
    weight_names = set(weights.values())
    for layer in mapper.layers:
        products = [n for n in mapper.layer_nodes(layer) if n.op in WEIGHTED]
        if len(products) != 1 or product_rank(layer) is None:
            continue
        product = products[0]
        built_weights = [name for name in layer.parse_name().bases if name in weight_names]
        conflict = _compare_layer_shape(
            product, layer, shapes.get(product.index, ())
        ) or _compare_weight_names(product, weights.get(product.index), built_weights)
        if conflict is not None:
            yield conflict


def find_output_conflicts(view: View, build: Build, mapper: NodeMapper) -> list[NameConflict]:
    """Return the convolutions whose output has another shape in the model than in the build.

    Exports of one architecture in two sizes have equal names. Batch sizes are not compared, and
    neither are outputs of unknown shape or of another rank.
    """
    parsed = {n.name: n for n in build.parse.nodes if n.name}
    conflicts: dict[str, NameConflict] = {}
    for node in view.nodes_with_weights:
        printed = parsed.get(node.parser_name)
        if node.op == "Conv" and printed is not None:
            built = [tensor.shape for tensor in printed.outputs if tensor is not None]
            _add_output_conflict(conflicts, node, built, [view.shape(node.outputs[0])])
    for layer in mapper.layers:
        nodes = mapper.layer_nodes(layer)
        products = [n for n in nodes if n.op in WEIGHTED]
        # Metadata does not always name a fused pooling.
        is_convolution = layer.is_convolution and not _has_pooling(layer)
        if is_convolution and [n.op for n in products] == ["Conv"]:
            # The layer may write the output of any fused node, or the buffer of a Concat after it.
            fused = [name for n in nodes for name in n.outputs if name in view.varying]
            tensors = [products[0].outputs[0], *fused, *(t.tensor for t in layer.outputs)]
            built = [tensor.shape for tensor in layer.outputs]
            _add_output_conflict(conflicts, products[0], built, list(map(view.shape, tensors)))
    return list(conflicts.values())


def _has_pooling(layer: BuiltLayer) -> bool:
    return any(
        "pool" in str(kind).lower() for kind in (layer.type, layer.extras.get("ParameterType"))
    )


def _add_output_conflict(
    conflicts: dict[str, NameConflict],
    node: Node,
    built: Sequence[Shape | None],
    expected: Sequence[Shape | None],
) -> None:
    """Add a conflict if a convolution's only output in the build has none of the expected shapes.

    The first expected shape that can be compared represents the model in the conflict.
    """
    shape = built[0] if len(built) == 1 else None
    if not shape or None in shape[1:]:
        return
    known = [e for e in expected if e and None not in e[1:] and len(e) == len(shape)]
    if known and all(e[1:] != shape[1:] for e in known):
        conflict = NameConflict(node.name, format_shape(known[0]), format_shape(shape))
        conflicts.setdefault(node.name, conflict)


def has_shapes(build: Build) -> bool:
    """Return whether a build states the shape of a tensor, or the number of filters of a layer."""
    parsed = (t for node in build.parse.nodes for t in (*node.inputs, *node.outputs))
    return any(
        layer.extras.get("OutMaps")
        or any(t.shape for t in (*layer.inputs, *layer.outputs, *layer.constants))
        for layer in build.layers
    ) or any(tensor is not None and tensor.shape for tensor in parsed)


def _compare_parsed_node(
    node: Node, printed: ParsedNode, shape: tuple[int, ...]
) -> NameConflict | None:
    """Return a conflict if the parse section has another operator or weight shape, else None."""
    if printed.op != node.op:
        return NameConflict(node.name, node.op, printed.op)
    tensor = printed.inputs[1] if len(printed.inputs) > 1 else None
    built = tensor.shape if tensor is not None else None
    if shape and built and None not in built and tuple(built) != shape:
        return NameConflict(node.name, format_shape(shape), format_shape(built))
    return None


def _compare_layer_shape(
    node: Node, layer: BuiltLayer, shape: tuple[int, ...]
) -> NameConflict | None:
    """Return a conflict if the engine layer has another filter count or kernel, else None."""
    filters, kernel = layer.extras.get("OutMaps"), layer.extras.get("Kernel")
    if node.op != "Conv" or len(shape) <= 2 or not filters or not kernel:
        return None
    in_model, in_build = (shape[0], *shape[2:]), (filters, *kernel)
    if in_model == in_build:
        return None
    return NameConflict(node.name, format_shape(in_model), format_shape(in_build))


def _compare_weight_names(
    node: Node, weights: str | None, built_weights: list[str]
) -> NameConflict | None:
    if weights is None or not built_weights or weights in built_weights:
        return None
    return NameConflict(node.name, weights, built_weights[0])
