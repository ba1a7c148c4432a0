"""Translation of an ONNX model to the network that TensorRT's ONNX parser would create.

Layers get the parser's names. Sources: NVIDIA's open-source parser (``node_of_<output>`` for a node
without a name, ``_<n>`` after a name that is in use), and the logs of yolo-resnet18-orin-trt8502
and resnet18-qat-rtx2000-trt8510. Names and numbers agree with these logs for each layer that a Q/DQ
pass names.
"""

from collections.abc import Callable

from qdqtool.errors import ModelError
from qdqtool.ir import operators
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import CONVOLVE, LayerKind
from qdqtool.ir.qdq import read_params
from qdqtool.patterns.heads import find_dfl
from qdqtool.trt.layers import QDQ, Layer, LayerWeights, PoolingWindow, Tensor
from qdqtool.trt.network import Network

# Looking up an enumeration member is slow, and every node is compared with these members.
_QUANTIZE, _SHAPE = LayerKind.QUANTIZE, LayerKind.SHAPE


def build(model: Model) -> Network:
    """Translate a model to TensorRT's network, before any optimizer pass.

    Layers that no network output depends on are removed. The remaining layers are ranked in the
    order in which the optimizer visits them.

    Raises:
        ModelError: A node is damaged.
    """
    return Importer(model).run()


class Importer:
    """Translates one model; see :func:`build`.

    Attributes:
        model: The model.
        network: The network under construction.
        tensors: Tensors by their ONNX names.
        layer_number: TensorRT's running layer number, which names unnamed layers.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.network = Network()
        self.tensors: dict[str, Tensor] = {}
        self.layer_number = 0
        self._names: set[str] = set()
        self._suffix = 0
        self._shape_tensors: set[str] = set()  # ONNX tensors that nodes compute from shapes
        self._dfl = find_dfl(model)

    def run(self) -> Network:
        """Translate the whole model, and return the network."""
        for name in self.model.inputs:
            self.network.inputs.append(self._create_tensor(name))
        for node in self.model.ordered:
            try:
                self._import_node(node)
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                raise ModelError(
                    f"node '{node.name}' ({node.op}) is damaged: {error}. Export the model again",
                    self.model.path or "model",
                    code="node-damaged",
                    node=node.name,
                ) from error
        for name in self.model.outputs:
            tensor = self._find_input_tensor(name)
            tensor.is_output = True
            self.network.outputs.append(tensor)
        self.network.counts["Original"] = len(self.network.layers)
        self.network.remove_dead()
        self.network.rank_layers()
        return self.network

    # Tensors ----------------------------------------------------------------------------------

    def _create_tensor(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            if not name:
                raise ValueError("an input or output is missing")
            elem_type, shape = self.model.tensor_type(name)
            tensor = self.tensors[name] = Tensor(name, elem_type=elem_type, shape=shape)
        return tensor

    def _find_input_tensor(self, name: str) -> Tensor:
        """Return the network's tensor for an ONNX tensor that a layer reads.

        The first call for a constant also adds the constant layer to the network.
        """
        tensor = self.tensors.get(name)
        if tensor is not None:
            return tensor
        if self.model.is_constant(name):
            layer = self._add_layer(LayerKind.CONSTANT, name, [], [self._create_tensor(name)], None)
            layer.dims = self.model.constant_shape(name)
        return self._create_tensor(name)

    # Layers -----------------------------------------------------------------------------------

    def _unique_name(self, node: Node) -> str:
        name = self.model.function_node_names.get(node.name) or node.proto.name
        name = name or (f"node_of_{node.output}" if node.output else node.name)
        unique = name
        while unique in self._names:
            unique = f"{name}_{self._suffix}"
            self._suffix += 1
        self._names.add(unique)
        return unique

    def _default_layer_name(self, label: str) -> str:
        """Return the name that TensorRT gives the next layer if the parser does not name it."""
        return f"(Unnamed Layer* {self.layer_number}) [{label}]"

    def _add_layer(
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
            layer.passage = operators.find_passage(self.model, node)
        self.layer_number += 1
        return self.network.add(layer, inputs, outputs)

    def _add_node(
        self, node: Node, inputs: list[Tensor], kind: LayerKind | None = None, operation: str = ""
    ) -> Layer:
        """Add the layer that computes the only output of a node.

        By default, the kind of the layer is that of the node's operator. ``operation`` is
        TensorRT's operation of an elementwise layer.
        """
        kind = kind or operators.operator_of(node).kind
        name = self._unique_name(node)
        layer = self._add_layer(kind, name, inputs, [self._create_tensor(node.output)], node)
        layer.operation = operation
        return layer

    def _add_unnamed(
        self,
        kind: LayerKind,
        label: str,
        inputs: list[Tensor],
        owner: Node | None = None,
        operation: str = "",
    ) -> Tensor:
        """Add a layer that the parser gives no name, and return its output.

        The output has the type and shape of the first input. ``label`` is the kind as TensorRT
        writes it in the layer's name. ``owner`` is the node that the layer belongs to, if any.
        """
        name = self._default_layer_name(label)
        out = Tensor(f"{name}_output")
        if inputs:
            out.elem_type, out.shape = inputs[0].elem_type, inputs[0].shape
        layer = self._add_layer(kind, name, inputs, [out], None)
        if owner is not None:
            layer.op, layer.owner = owner.op, owner.name
        layer.operation = operation
        return out

    def _add_shuffle(self, tensor: Tensor) -> Tensor:
        return self._add_unnamed(LayerKind.SHUFFLE, "Shuffle", [tensor])

    def _add_elementwise(self, operation: str, inputs: list[Tensor], owner: Node | None) -> Tensor:
        return self._add_unnamed(LayerKind.ELEMENTWISE, "ElementWise", inputs, owner, operation)

    # Operators --------------------------------------------------------------------------------

    def _import_node(self, node: Node) -> None:
        if node.op == "Constant" or not any(node.outputs):
            return
        operator = operators.operator_of(node)
        if operator.kind is _SHAPE or self._computes_on_shapes(node):
            # Shape arithmetic is folded while parsing, or runs on the host. It does not count as a
            # consumer when the optimizer moves or fuses a Q or DQ.
            self._shape_tensors.update(name for name in node.outputs if name)
            return
        if self._is_removable_cast(node):
            # ModelOpt writes Casts of FP32 to FP32 before Qs. In a build with 16 of them, the Casts
            # take no time, and as many conversions remain as without Casts
            # (unet-resnet50-orinnano-trt10162).
            self.tensors[node.output] = self._find_input_tensor(node.input(0))
            return
        _HANDLERS.get(operator.kind, Importer._import_other)(self, node)

    def _is_removable_cast(self, node: Node) -> bool:
        return (
            operators.is_no_op_cast(self.model, node)
            and not self.model.is_output(node.output)
            and not self.model.is_constant(node.input(0))
        )

    def _computes_on_shapes(self, node: Node) -> bool:
        return (
            not node.captured
            and not self._shape_tensors.isdisjoint(node.inputs)
            and all(
                name in self._shape_tensors or self.model.is_constant(name)
                for name in node.inputs
                if name
            )
        )

    def _import_other(self, node: Node) -> None:
        """Add a layer for an operator without a special import rule.

        The layer reads all inputs of the node except constants and shape tensors.
        """
        names = node.consumed_tensors
        inputs = [
            self._find_input_tensor(name)
            for name in names
            if name not in self._shape_tensors and not self.model.is_constant(name)
        ]
        name = self._unique_name(node)
        outputs = [self._create_tensor(output) for output in node.outputs if output]
        self._add_layer(LayerKind.OTHER, name, inputs, outputs, node)

    def _import_simple(self, node: Node) -> Layer:
        """Add a layer that reads only the node's first input; other inputs are parameters."""
        return self._add_node(node, [self._find_input_tensor(node.input(0))])

    def _import_resize(self, node: Node) -> None:
        if self.model.is_constant(node.input(3)):
            # A constant size uses up one of TensorRT's layer numbers, although TensorRT creates no
            # layer for it (seen in both builds of BEVFusion).
            self.layer_number += 1
        self._import_simple(node)

    def _import_activation(self, node: Node) -> None:
        activation = operators.operator_of(node).activation
        assert activation is not None
        if activation.type != "HARD_SWISH":
            self._import_simple(node).activation = activation.type
            return
        x = self._find_input_tensor(node.input(0))
        gate = self._add_unnamed(LayerKind.ACTIVATION, "Activation", [x], node)
        assert gate.producer is not None
        gate.producer.activation = "HARD_SIGMOID"
        self._add_node(node, [x, gate], LayerKind.ELEMENTWISE, "PROD")

    def _import_shuffle(self, node: Node) -> None:
        shuffling = self._import_simple(node).shuffling
        shuffling.reorders_values = operators.operator_of(node).moves
        perm = node.attributes.get("perm") if node.op == "Transpose" else None
        shuffling.perm = tuple(perm) if perm is not None else None

    def _import_reduce(self, node: Node) -> None:
        self._import_simple(node).possible_pooling = operators.pooling_type(self.model, node)

    def _import_elementwise(self, node: Node) -> None:
        if len([name for name in node.inputs if name]) != 2:
            self._import_other(node)
            return
        shapes = [self.model.shape(name) for name in node.inputs]
        rank = max(len(shape or ()) for shape in shapes)
        inputs: list[Tensor] = []
        for name in node.inputs:
            tensor = self._find_input_tensor(name)
            dims = self.model.constant_shape(name)
            if dims is not None and len(dims) < rank:
                tensor = self._add_shuffle(tensor)
            inputs.append(tensor)
        self._add_node(node, inputs, operation=operators.operator_of(node).operation)

    def _import_quantizer(self, node: Node) -> None:
        x = self._find_input_tensor(node.input(0))
        names = [name for name in node.inputs[1:] if name]
        computed = [name for name in names if not self.model.is_constant(name)]
        constants = [name for name in names if self.model.is_constant(name)]
        layer = self._add_node(
            node,
            [x, *map(self._find_input_tensor, constants), *map(self._find_input_tensor, computed)],
        )
        layer.quant = read_params(self.model, node)
        if x.producer is not None and x.producer.kind is _QUANTIZE:
            layer.paired_q = x.producer.nodes[0]
        layer.has_computed_scale = bool(computed)

    def _import_convolution(self, node: Node) -> None:
        weights, bias = node.input(1), node.input(2)
        is_constant = self.model.is_constant(weights)
        names = [node.input(0)]
        if not is_constant:
            names.append(weights)
        if bias and not self.model.is_constant(bias):
            names.append(bias)
        layer = self._add_node(node, [self._find_input_tensor(name) for name in names])
        attributes = node.attributes
        dims = self.model.shape(weights) or ()
        group = node.integer("group", 1)
        kernel = tuple(attributes.get("kernel_shape", ()) or list(dims[2:]))
        strides, pads = _strides_and_pads(node, kernel)
        layer.weights = LayerWeights(
            name=weights,
            constant=is_constant,
            in_layer=is_constant,
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

    def _import_batch_normalization(self, node: Node) -> None:
        """Add one SCALE layer, or several layers if a parameter is not a plain constant.

        The parser then decomposes the operator into ``(x - mean) / sqrt(var + epsilon) * scale +
        bias``.
        """
        if all(self.model.is_constant(name) for name in node.inputs[1:5]):
            self._import_simple(node)
            return
        x = self._find_input_tensor(node.input(0))
        parameters = [self._find_input_tensor(node.input(i)) for i in (1, 2, 3, 4)]
        scale, bias, mean, var = (self._add_shuffle(tensor) for tensor in parameters)
        epsilon = self._add_unnamed(LayerKind.CONSTANT, "Constant", [])
        variance = self._add_elementwise("SUM", [var, epsilon], None)
        deviation = self._add_unnamed(LayerKind.UNARY, "Unary", [variance])
        centered = self._add_elementwise("SUB", [x, mean], node)
        normalized = self._add_elementwise("DIV", [centered, deviation], node)
        scaled = self._add_elementwise("PROD", [scale, normalized], node)
        for tensor in (centered, normalized, scaled):
            tensor.elem_type, tensor.shape = x.elem_type, x.shape
        self._add_node(node, [scaled, bias], LayerKind.ELEMENTWISE, "SUM")

    def _import_pooling(self, node: Node) -> None:
        kernel = tuple(node.attributes.get("kernel_shape", ()))
        pooling_type = "AVERAGE" if operators.operator_of(node).averages else "MAX"
        strides, pads = _strides_and_pads(node, kernel)
        layer = self._import_simple(node)
        layer.window = PoolingWindow(pooling_type, kernel, strides, pads)

    def _import_concat(self, node: Node) -> None:
        node.integer("axis", 0)  # raises if the attribute is damaged
        self._add_node(node, [self._find_input_tensor(name) for name in node.inputs if name])

    def _import_slice(self, node: Node) -> None:
        if len(node.outputs) > 1 or node.op == "Split":
            x = self._find_input_tensor(node.input(0))
            starts = self._split_starts(node)
            for position, output in enumerate(node.outputs):
                if output:
                    name = self._unique_name(node)
                    part = self._add_layer(
                        LayerKind.SLICE, name, [x], [self._create_tensor(output)], node
                    )
                    part.part_of_split = starts.get(position)
            return
        layer = self._import_simple(node)
        if node.op == "Tile":
            layer.has_steps = True  # the output of a Tile cannot be a view of its input
        elif node.input(4):
            steps = self.model.constant(node.input(4))
            layer.has_steps = steps is not None and bool((steps != 1).any())

    def _split_starts(self, node: Node) -> dict[int, tuple[int, int]]:
        """Return the axis and first index of each output of a Split; empty if unknown."""
        shape = self.model.shape(node.input(0))
        if node.op != "Split" or not shape:
            return {}
        axis = node.integer("axis", 0)
        axis += len(shape) if axis < 0 else 0
        starts, start = {}, 0
        for position, output in enumerate(node.outputs):
            starts[position] = (axis, start)
            part = self.model.shape(output) if output else None
            size = part[axis] if part is not None and 0 <= axis < len(part) else None
            if size is None:
                return {}
            start += size
        return starts

    def _import_matrix_product(self, node: Node) -> None:
        inputs = [self._find_input_tensor(node.input(0)), self._find_input_tensor(node.input(1))]
        bias = node.input(2) if node.op == "Gemm" else ""
        product = out = self._create_tensor(node.output)
        if bias:
            product = Tensor(f"{node.name}_matmul_output", node.output, out.elem_type)
        name = self._unique_name(node)
        layer = self._add_layer(LayerKind.MATRIX_MULTIPLY, name, inputs, [product], node)
        dims = tuple(self.model.shape(node.input(1)) or ())
        layer.weights = LayerWeights(
            node.input(1),
            is_constant_upstream(self.model, node.input(1)),
            in_layer=False,
            dims=dims,
            axis=operators.output_axis(node, len(dims)) or 0,
            dfl=node.index in self._dfl,
        )
        if bias:
            operand = self._find_input_tensor(bias)
            if len(self.model.shape(bias) or ()) < 2:
                operand = self._add_shuffle(operand)
            name = self._default_layer_name("ElementWise")
            add = self._add_layer(LayerKind.ELEMENTWISE, name, [product, operand], [out], None)
            add.operation = "SUM"

    def _import_softmax(self, node: Node) -> None:
        """Add a softmax, and a shuffle that restores the shape of the input.

        Both complete logs of TensorRT 8.5 show this shuffle, which ShuffleErasure removes.
        """
        x, out = self._find_input_tensor(node.input(0)), self._create_tensor(node.output)
        name = self._unique_name(node)
        softmax = Tensor(f"{name}_softmax_output", out.source, out.elem_type, out.shape)
        self._add_layer(LayerKind.SOFTMAX, name, [x], [softmax], node)
        name = self._default_layer_name("Shuffle")
        shuffle = self._add_layer(LayerKind.SHUFFLE, name, [softmax], [out], None)
        shuffle.shuffling.may_be_identity = True


def _strides_and_pads(
    node: Node, kernel: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    strides = node.attributes.get("strides", [1] * len(kernel))
    return tuple(strides), tuple(node.attributes.get("pads", [0] * 2 * len(kernel)))


_HANDLERS: dict[LayerKind, Callable[[Importer, Node], object]] = {
    **dict.fromkeys(QDQ, Importer._import_quantizer),
    **dict.fromkeys(CONVOLVE, Importer._import_convolution),
    LayerKind.MATRIX_MULTIPLY: Importer._import_matrix_product,
    LayerKind.SCALE: Importer._import_batch_normalization,
    LayerKind.ACTIVATION: Importer._import_activation,
    LayerKind.ELEMENTWISE: Importer._import_elementwise,
    LayerKind.POOLING: Importer._import_pooling,
    LayerKind.REDUCE: Importer._import_reduce,
    LayerKind.SHUFFLE: Importer._import_shuffle,
    LayerKind.SLICE: Importer._import_slice,
    LayerKind.CONCATENATION: Importer._import_concat,
    LayerKind.RESIZE: Importer._import_resize,
    LayerKind.SOFTMAX: Importer._import_softmax,
    LayerKind.UNARY: Importer._import_simple,
    LayerKind.PADDING: Importer._import_simple,
    LayerKind.IDENTITY: Importer._import_simple,
}


_TRANSPARENT = (*QDQ, LayerKind.SHUFFLE, LayerKind.IDENTITY)


def is_constant_upstream(model: Model, tensor: str) -> bool:
    """Return whether a tensor is a constant, possibly after Q, DQ, shuffles and casts."""
    cache: dict[str, bool] = model.cache.setdefault("constants upstream", {})
    path: list[str] = []
    while tensor not in cache:
        path.append(tensor)
        producer = model.producer(tensor)
        is_constant = model.is_constant(tensor)
        if (
            is_constant
            or producer is None
            or operators.operator_of(producer).kind not in _TRANSPARENT
        ):
            cache[tensor] = is_constant
            break
        tensor = producer.input(0)
    result = cache[tensor]
    cache.update(dict.fromkeys(path, result))
    return result
