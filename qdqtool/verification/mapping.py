"""From engine layers back to ONNX nodes, for every kind of build: fused names, ``[ONNX Layer: ...]``, Myelin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from qdqtool.buildlog.names import base_name, parts
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import WEIGHTED
from qdqtool.model.view import View

Place = tuple[BuiltLayer, int]
"""A layer, and which of the layers merged into it with ``||``."""

_PLAIN = re.compile(r"[^A-Za-z0-9_/]")
_ASIDE = ("TrainStation", "Constant", "DeviceToShapeHost", "ShapeHostToDevice", "signal", "wait")
# Layer types of Myelin that multiply, the most certain first. A kgen kernel is generated code: small matrix products
# end up in one, among the elementwise work around them.
_MULTIPLY = ("correlation", "deconv", "gemm", "runtime_fusion", "runtime_function")
#: The product inside a fused kernel's name, which lists its steps: MulMinMaxRounCastCorrMulAdd. One of a few columns is
#: written out, a slice, a product and a sum for each.
PRODUCT = re.compile(r"(?<=[a-z_])(Fc|Gemm|MatMul|MulSum|(?:Slic){2,4}(?:Mul){2,4}Add|Conv|Corr)(?=[A-Z_])")
_GENERATED = ("fusion", "kgen")  # a fusion wraps a compiled product (``FcCas`` with a gemm's tactic) or generated code
#: In the name of a kernel that computes a whole attention: queries, keys and values are its inputs.
ATTENTION = "_gemm_mha"


def trt_name(node: Node) -> str:
    """The name that TensorRT's parser gives to a node's layer."""
    return node.proto.name or f"node_of_{node.output}"


class Mapper:
    """Finds the engine layers of a node, and the nodes of an engine layer.

    Attributes:
        known: Every name of the model that a fused layer name may hold.
        layers: Engine layers that compute something: layout reformats, constants and host layers left out.
    """

    def __init__(self, model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str] | None = None) -> None:
        """``names`` maps a node's index to its name in the build, where that is not the one that the parser gives."""
        given = self._given = {n.index: trt_name(n) if names is None else names[n.index] for n in model.nodes}
        self.known = frozenset(
            {*given.values(), *model.initializers, *(o for n in model.nodes if n.op == "Constant" for o in n.outputs)}
        )
        self._by_name = {given[n.index]: n for n in model.nodes}
        self._by_plain = {_PLAIN.sub("_", name): n for name, n in self._by_name.items()}
        self.layers = [layer for layer in layers if not is_aside(layer)]
        self._of_node: dict[int, list[Place]] = {}
        for layer in self.layers:
            for place, nodes in enumerate(self._groups(layer)):
                for node in nodes:
                    self._of_node.setdefault(node.index, []).append((layer, place))

    def node(self, name: str) -> Node | None:
        """The node behind a component of a layer name, Myelin's spelling (dots as underscores) included."""
        found = self._by_name.get(name) or self._by_name.get(base_name(name))
        return found or self._by_plain.get(_PLAIN.sub("_", name))

    def name(self, node: Node) -> str:
        """What the build calls a node."""
        return self._given[node.index]

    def nodes(self, layer: BuiltLayer) -> list[Node]:
        """The ONNX nodes that a layer stands for, in the order of its name."""
        return [n for group in self._groups(layer) for n in group]

    def _groups(self, layer: BuiltLayer) -> list[list[Node]]:
        """The nodes of each layer merged with ``||``; one group otherwise."""
        if layer.onnx_names:
            return [[n for n in map(self.node, layer.onnx_names) if n is not None]]
        fused = parts(layer.name, self.known)
        if fused.kind == "foreign":
            return []
        return [[n for n in map(self.node, group) if n is not None] for group in fused.alternatives]

    def places(self, node: Node) -> list[Place]:
        """Every layer that a node is a part of; Myelin spreads one over several."""
        return self._of_node.get(node.index, [])

    def layer_of(self, node: Node) -> Place | None:
        """The layer that computes a convolution, and its place among merged ones; None where none or several may."""
        found = self.places(node)
        if len(found) > 1:
            ranks = [product_rank(layer) for layer, _ in found]
            best = min((r for r in ranks if r is not None), default=None)
            found = [f for f, rank in zip(found, ranks, strict=True) if rank == best]
        return found[0] if len(found) == 1 else None


def in_myelin(layer: BuiltLayer) -> bool:
    """Whether a layer is a kernel inside Myelin, which names nothing of what it fuses in a classic way."""
    return layer.type in _GENERATED or layer.type in _MULTIPLY


def product_rank(layer: BuiltLayer) -> int | None:
    """How sure a sign of a product a layer is among those of one node, 0 the most; None where it multiplies nothing."""
    if layer.type in _MULTIPLY:
        return _MULTIPLY.index(layer.type)
    kind = layer.type.lower()
    if layer.is_convolution or "gemm" in kind or "matmul" in kind or "matrix" in kind:
        return len(_MULTIPLY)
    return len(_MULTIPLY) + 1 + _GENERATED.index(layer.type) if makes_product(layer) else None


def makes_product(layer: BuiltLayer) -> bool:
    """Whether a generated kernel's name, or a fusion's tactic, names a product inside."""
    if layer.type not in _GENERATED:
        return False
    tactic = layer.tactic if layer.type == "fusion" else ""
    return ATTENTION in layer.name or PRODUCT.search(layer.name) is not None or "gemm" in tactic


def multiplies(layer: BuiltLayer) -> bool:
    """Whether a layer is a convolution or a product, and none that no prediction refers to."""
    return product_rank(layer) is not None and not is_aside(layer)


def is_aside(layer: BuiltLayer) -> bool:
    """A layer that no prediction refers to: layout reformats, constants, shape and host layers, Myelin blocks."""
    if layer.type in _ASIDE or (layer.type == "Myelin" and layer.name.startswith("{ForeignNode")):
        return True
    return parts(layer.name).kind in ("reformat-input", "reformat-output", "reformat-network", "station", "foreign")


def said_names(build: Build, known: frozenset[str]) -> set[str]:
    """Every name of a node that a build prints: parse section, layers and pass lines."""
    said = {n.name for n in build.parse.nodes if n.name}
    said.update(f"node_of_{t.name}" for n in build.parse.nodes if not n.name for t in n.outputs if t is not None)
    for layer in build.layers:
        said.update(layer.onnx_names)
        said.update(parts(layer.name, known).bases)
    for event in build.trace:
        said.update(parts(event.subject, known).bases)
        said.update(parts(event.object, known).bases)
    return said


def common_names(model: Model, build: Build) -> tuple[int, int]:
    """How many of the model's convolutions the build names, and how many there are.

    Models without a convolution are counted by all their nodes.
    """
    wanted = [n for n in model.nodes if n.op in WEIGHTED] or list(model.nodes)
    said = said_names(build, frozenset(trt_name(n) for n in wanted))
    plain = {_PLAIN.sub("_", s) for s in said} if any("_myl" in layer.name for layer in build.layers) else set()
    found = sum(trt_name(n) in said or _PLAIN.sub("_", trt_name(n)) in plain for n in wanted)
    return found, len(wanted)


def contradicted_names(view: View, build: Build) -> list[tuple[str, str, str]]:
    """Names that stand for one node in the model and for another in the build, as numbered names of two exports do.

    Returns:
        The name, what the model has there, what the build has: operator, shape of the weights, or name of the weights.
    """
    found: dict[str, tuple[str, str]] = {}
    parsed = {n.name: n for n in build.parse.nodes if n.name}
    sources = {n.index: view.weights(n).source for n in view.weighted if view.weights(n).folded}
    shapes = {i: tuple(view.model.constant_shape(source) or ()) for i, source in sources.items()}
    owned = set(sources.values())
    for node in view.weighted:
        printed, shape = parsed.get(trt_name(node)), shapes.get(node.index, ())
        if printed is None:
            continue
        if printed.op != node.op:
            found[node.name] = (node.op, printed.op)
            continue
        other = printed.inputs[1].shape if len(printed.inputs) > 1 and printed.inputs[1] is not None else None
        if shape and other and None not in other and tuple(other) != shape:
            found[node.name] = _by_x(shape), _by_x(other)
    mapper = Mapper(view.model, build.layers)
    for layer in mapper.layers:
        nodes = [n for n in mapper.nodes(layer) if n.op in WEIGHTED]
        if len(nodes) != 1 or product_rank(layer) is None or nodes[0].name in found:
            continue
        node, shape = nodes[0], shapes.get(nodes[0].index, ())
        weights = [name for name in layer.fused(mapper.known).bases if name in owned]
        if weights and node.index in sources and sources[node.index] not in weights:
            found[node.name] = sources[node.index], weights[0]
        maps, kernel = layer.extras.get("OutMaps"), layer.extras.get("Kernel")
        if node.op == "Conv" and len(shape) > 2 and maps and kernel and [shape[0], *shape[2:]] != [maps, *kernel]:
            found[node.name] = _by_x((shape[0], *shape[2:])), _by_x((maps, *kernel))
    return [(name, *pair) for name, pair in found.items()]


def _by_x(shape: Iterable[object]) -> str:
    return "x".join(map(str, shape))
