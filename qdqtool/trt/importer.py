"""Builds TensorRT's network from an ONNX model, as TensorRT's ONNX parser does, with the parser's names.

Sources: the parse sections of the logs of yolo-resnet18-orin-trt8502 and resnet18-qat-rtx2000-trt8510 (layer
numbers and names come out as logged for every layer that the Q/DQ passes name), and NVIDIA's open-source parser
(``node_of_<output>`` for a node without a name, ``_<n>`` behind a name that is taken).
"""

from collections.abc import Callable

from qdqtool.errors import ModelError
from qdqtool.model import operators
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import find_dfl
from qdqtool.model.operators import CONVOLVE, LayerKind
from qdqtool.model.qdq import read_params
from qdqtool.trt.layers import QDQ, Layer, LayerWeights, PoolingWindow, Tensor
from qdqtool.trt.network import Network

_QUANTIZE, _SHAPE = (
    LayerKind.QUANTIZE,
    LayerKind.SHAPE,
)  # a member of an enumeration is slow to look up


class Importer:
    """Translates one model; :func:`build` is the way in."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.network = Network()
        self.tensors: dict[str, Tensor] = {}
        self.count = 0  # TensorRT's running layer number, which names unnamed layers
        self._names: set[str] = set()
        self._suffix = 0
        self._shape_only: set[str] = set()
        self._dfl = find_dfl(model)

    def run(self) -> Network:
        for name in self.model.inputs:
            self.network.inputs.append(self._tensor(name))
        for node in self.model.ordered:
            try:
                self._import(node)
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                raise ModelError(
                    f"node '{node.name}' ({node.op}) is damaged: {error}",
                    self.model.path or "model",
                    code="node-damaged",
                    node=node.name,
                ) from error
        for name in self.model.outputs:
            tensor = self._input(name)
            tensor.is_output = True
            self.network.outputs.append(tensor)
        self.network.counts["Original"] = len(self.network.layers)
        self.network.remove_dead()
        self.network.rank_layers()
        return self.network

    # Tensors --------------------------------------------------------------------------------------------------

    def _tensor(self, name: str) -> Tensor:
        found = self.tensors.get(name)
        if found is None:
            if not name:
                raise ValueError("an input or output is missing")
            kind, shape = self.model.type_of(name)
            found = self.tensors[name] = Tensor(name, elem_type=kind)
            found.shape = shape
        return found

    def _input(self, name: str) -> Tensor:
        """The tensor a layer reads; a constant becomes a constant layer when it is first read."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        if self.model.is_constant(name):
            layer = self._add(LayerKind.CONSTANT, name, [], [self._tensor(name)], None)
            layer.dims = self.model.constant_shape(name)
        return self._tensor(name)

    # Layers ---------------------------------------------------------------------------------------------------

    def _name(self, node: Node) -> str:
        given = node.proto.name
        if given == node.name:  # that text, not another one like it
            given = node.name
        name = given or (f"node_of_{node.output}" if node.output else node.name)
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._suffix}"
            self._suffix += 1
        self._names.add(candidate)
        return candidate

    def _unnamed(self, kind: str) -> str:
        return f"(Unnamed Layer* {self.count}) [{kind}]"

    def _add(
        self,
        kind: LayerKind,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        node: Node | None,
    ) -> Layer:
        layer = Layer(kind, name, node.op if node is not None else "")
        if node is not None:
            layer.nodes.append(node.name)
            passage = operators.passage(self.model, node)
            if passage is not None:
                layer.passage = passage
        self.count += 1
        return self.network.add(layer, inputs, outputs)

    def _layer(
        self, node: Node, inputs: list[Tensor], kind: LayerKind | None = None, operation: str = ""
    ) -> Layer:
        """The layer that computes a node's only output; of the operator's own kind, if no other is named."""
        kind = kind or operators.of(node).kind
        layer = self._add(kind, self._name(node), inputs, [self._tensor(node.output)], node)
        if operation:
            layer.operation = operation
        return layer

    def _add_unnamed(
        self,
        kind: LayerKind,
        shown: str,
        inputs: list[Tensor],
        node: Node | None = None,
        operation: str = "",
    ) -> Tensor:
        """Adds a layer that the parser leaves unnamed and returns its output; ``node`` is what it belongs to."""
        name = self._unnamed(shown)
        out = Tensor(f"{name}_output")
        if inputs:
            out.elem_type, out.shape = inputs[0].elem_type, inputs[0].shape
        layer = self._add(kind, name, inputs, [out], None)
        if node is not None:
            layer.op, layer.owner = node.op, node.name
        layer.operation = operation
        return out

    # Operators ------------------------------------------------------------------------------------------------

    def _import(self, node: Node) -> None:
        if node.op == "Constant" or not any(node.outputs):
            return
        known = operators.of(node)
        if known.kind is _SHAPE or self._only_shapes(node):
            # Shape arithmetic is folded while parsing or runs on the host: it neither reads nor blocks a tensor.
            self._shape_only.update(o for o in node.outputs if o)
            return
        _HANDLERS.get(known.kind, Importer._generic)(self, node)

    def _only_shapes(self, node: Node) -> bool:
        """Whether a node computes on shapes alone: every input is shape arithmetic or a constant, one is shape."""
        if self._shape_only.isdisjoint(node.inputs):
            return False
        names = [i for i in node.inputs if i]
        return not node.captured and all(
            i in self._shape_only or self.model.is_constant(i) for i in names
        )

    def _generic(self, node: Node) -> None:
        """A layer that no rule is about: all its tensors are inputs."""
        names = [i for i in (*node.inputs, *node.captured) if i and i not in self._shape_only]
        inputs = [self._input(i) for i in names if not self.model.is_constant(i)]
        name = self._name(node)
        self._add(LayerKind.OTHER, name, inputs, [self._tensor(o) for o in node.outputs if o], node)

    def _simple(self, node: Node) -> Layer:
        """A layer with one tensor input; the others (shapes, bounds) are parameters."""
        return self._layer(node, [self._input(node.input(0))])

    def _resize(self, node: Node) -> None:
        """A Resize; a size given as a constant takes a number and is no layer in the end (both BEVFusion builds)."""
        if self.model.is_constant(node.input(3)):
            self.count += 1
        self._simple(node)

    def _activation(self, node: Node) -> None:
        known = operators.of(node).activation
        assert known is not None
        if known.type != "HARD_SWISH":
            self._simple(node).activation = known.type
            return
        x = self._input(node.input(0))
        gate = self._add_unnamed(LayerKind.ACTIVATION, "Activation", [x], node)
        assert gate.producer is not None
        gate.producer.activation = "HARD_SIGMOID"
        self._layer(node, [x, gate], LayerKind.ELEMENTWISE, "PROD")

    def _shuffle(self, node: Node) -> None:
        shuffling = self._simple(node).shuffling
        shuffling.reorders_values = operators.of(node).moves
        perm = node.attributes.get("perm") if node.op == "Transpose" else None
        shuffling.perm = tuple(perm) if perm is not None else None

    def _reduce(self, node: Node) -> None:
        self._simple(node).possible_pooling = operators.pooling_of(self.model, node)

    def _elementwise(self, node: Node) -> None:
        if len([i for i in node.inputs if i]) != 2:
            self._generic(node)
            return
        rank = max(
            (len(s) for s in (self.model.shape(i) for i in node.inputs) if s is not None), default=0
        )
        inputs: list[Tensor] = []
        for name in node.inputs:
            tensor = self._input(name)
            dims = self.model.constant_shape(name) if self.model.is_constant(name) else None
            if dims is not None and len(dims) < rank:
                tensor = self._add_unnamed(LayerKind.SHUFFLE, "Shuffle", [tensor])
            inputs.append(tensor)
        self._layer(node, inputs, operation=operators.of(node).operation)

    def _quantizer(self, node: Node) -> None:
        x = self._input(node.input(0))
        parameters: list[str] = []
        computed: list[str] = []
        for name in filter(None, node.inputs[1:]):
            (parameters if self.model.is_constant(name) else computed).append(name)
        layer = self._layer(node, [x, *map(self._input, parameters), *map(self._input, computed)])
        layer.quant = read_params(self.model, node)
        above = x.producer
        if above is not None and above.kind is _QUANTIZE:
            layer.paired_q = above.nodes[0]
        if computed:
            layer.has_computed_scale = True

    def _convolution(self, node: Node) -> None:
        weights, bias = node.input(1), node.input(2)
        constant = self.model.is_constant(weights)
        computed = [i for i in (weights, *filter(None, [bias])) if not self.model.is_constant(i)]
        layer = self._layer(node, [self._input(i) for i in (node.input(0), *computed)])
        attributes = node.attributes
        dims = self.model.shape(weights) or ()
        group = node.integer("group", 1)
        kernel = tuple(attributes.get("kernel_shape", ()) or list(dims[2:]))
        strides, pads = _strides_and_pads(node, kernel)
        layer.weights = LayerWeights(
            name=weights,
            constant=constant,
            in_layer=constant,
            dims=tuple(dims),
            axis=operators.output_axis(node, len(dims)) or 0,
            kernel=kernel,
            strides=strides,
            pads=pads,
            dilations=tuple(attributes.get("dilations", [1] * len(kernel))),
            group=group,
            auto_pad=str(attributes.get("auto_pad", "NOTSET")),
            dfl=node.index in self._dfl,
        )

    def _batch_normalization(self, node: Node) -> None:
        """y = (x - mean) / sqrt(var + epsilon) * scale + bias, in pieces when a parameter is not a plain constant."""
        if all(self.model.is_constant(p) for p in node.inputs[1:5]):
            self._simple(node)
            return
        x = self._input(node.input(0))
        constants = [self._input(node.input(i)) for i in (1, 2, 3, 4)]
        scale, bias, mean, var = (
            self._add_unnamed(LayerKind.SHUFFLE, "Shuffle", [c]) for c in constants
        )
        epsilon = self._add_unnamed(LayerKind.CONSTANT, "Constant", [])
        variance = self._add_unnamed(
            LayerKind.ELEMENTWISE, "ElementWise", [var, epsilon], None, "SUM"
        )
        deviation = self._add_unnamed(LayerKind.UNARY, "Unary", [variance])
        centred = self._add_unnamed(LayerKind.ELEMENTWISE, "ElementWise", [x, mean], node, "SUB")
        normal = self._add_unnamed(
            LayerKind.ELEMENTWISE, "ElementWise", [centred, deviation], node, "DIV"
        )
        scaled = self._add_unnamed(
            LayerKind.ELEMENTWISE, "ElementWise", [scale, normal], node, "PROD"
        )
        for tensor in (centred, normal, scaled):
            tensor.elem_type, tensor.shape = x.elem_type, x.shape
        self._layer(node, [scaled, bias], LayerKind.ELEMENTWISE, "SUM")

    def _pool(self, node: Node) -> None:
        kernel = tuple(node.attributes.get("kernel_shape", ()))
        kind = "AVERAGE" if operators.of(node).averages else "MAX"
        self._simple(node).window = PoolingWindow(kind, kernel, *_strides_and_pads(node, kernel))

    def _concat(self, node: Node) -> None:
        node.integer("axis", 0)  # a damaged one is reported here
        self._layer(node, [self._input(i) for i in node.inputs if i])

    def _slice(self, node: Node) -> None:
        """A Slice, or one for each part of a Split."""
        if len(node.outputs) > 1 or node.op == "Split":
            x = self._input(node.input(0))
            for output in node.outputs:
                if output:
                    self._add(LayerKind.SLICE, self._name(node), [x], [self._tensor(output)], node)
            return
        layer = self._simple(node)
        steps = self.model.constant(node.input(4)) if node.op != "Tile" and node.input(4) else None
        # A Tile repeats its input, so that it is no view of it.
        layer.has_steps = node.op == "Tile" or (steps is not None and bool((steps != 1).any()))

    def _matrix(self, node: Node) -> None:
        """A product, and behind a Gemm's the sum with its bias."""
        inputs = [self._input(node.input(0)), self._input(node.input(1))]
        bias = node.input(2) if node.op == "Gemm" else ""
        out = self._tensor(node.output)
        middle = (
            out if not bias else Tensor(f"{node.name}_matmul_output", node.output, out.elem_type)
        )
        layer = self._add(LayerKind.MATRIX_MULTIPLY, self._name(node), inputs, [middle], node)
        dims = tuple(self.model.shape(node.input(1)) or ())
        layer.weights = LayerWeights(
            node.input(1),
            constant_behind(self.model, node.input(1)),
            in_layer=False,
            dims=dims,
            axis=operators.output_axis(node, len(dims)) or 0,
            dfl=node.index in self._dfl,
        )
        if bias:
            operand = self._input(bias)
            if len(self.model.shape(bias) or ()) < 2:
                operand = self._add_unnamed(LayerKind.SHUFFLE, "Shuffle", [operand])
            add = self._add(
                LayerKind.ELEMENTWISE, self._unnamed("ElementWise"), [middle, operand], [out], None
            )
            add.operation = "SUM"

    def _softmax(self, node: Node) -> None:
        """A softmax and the shuffle that gives its shape back (both complete 8.5 logs; erased at once)."""
        x, out = self._input(node.input(0)), self._tensor(node.output)
        name = self._name(node)
        middle = Tensor(f"{name}_softmax_output", out.source, out.elem_type)
        middle.shape = out.shape
        self._add(LayerKind.SOFTMAX, name, [x], [middle], node)
        shuffle = self._add(LayerKind.SHUFFLE, self._unnamed("Shuffle"), [middle], [out], None)
        shuffle.shuffling.may_be_identity = True


def _strides_and_pads(
    node: Node, kernel: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    given = node.attributes
    return tuple(given.get("strides", [1] * len(kernel))), tuple(
        given.get("pads", [0] * 2 * len(kernel))
    )


_HANDLERS: dict[LayerKind, Callable[[Importer, Node], object]] = {
    **dict.fromkeys(QDQ, Importer._quantizer),
    **dict.fromkeys(CONVOLVE, Importer._convolution),
    LayerKind.MATRIX_MULTIPLY: Importer._matrix,
    LayerKind.SCALE: Importer._batch_normalization,
    LayerKind.ACTIVATION: Importer._activation,
    LayerKind.ELEMENTWISE: Importer._elementwise,
    LayerKind.POOLING: Importer._pool,
    LayerKind.REDUCE: Importer._reduce,
    LayerKind.SHUFFLE: Importer._shuffle,
    LayerKind.SLICE: Importer._slice,
    LayerKind.CONCATENATION: Importer._concat,
    LayerKind.RESIZE: Importer._resize,
    LayerKind.SOFTMAX: Importer._softmax,
    **dict.fromkeys((LayerKind.UNARY, LayerKind.PADDING, LayerKind.IDENTITY), Importer._simple),
}


_PASSED = (*QDQ, LayerKind.SHUFFLE, LayerKind.IDENTITY)


def constant_behind(model: Model, tensor: str) -> bool:
    """Whether a tensor is a constant, looking through Q, DQ and operators that only reshape or cast."""
    known: dict[str, bool] = model.memory.setdefault("constants behind", {})
    way: list[str] = []
    while tensor not in known:
        way.append(tensor)
        producer = model.producer(tensor)
        if (
            model.is_constant(tensor)
            or producer is None
            or operators.of(producer).kind not in _PASSED
        ):
            known[tensor] = model.is_constant(tensor)
            break
        tensor = producer.input(0)
    found = known[tensor]
    known.update(dict.fromkeys(way, found))
    return found


def build(model: Model) -> Network:
    """TensorRT's network for a model, dead layers removed and ranked in the optimizer's order of visits."""
    return Importer(model).run()
