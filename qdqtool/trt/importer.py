"""Builds TensorRT's network from an ONNX model, as TensorRT's ONNX parser does, with the parser's names.

Sources: the parse sections of the logs of yolo-resnet18-orin-trt8502 and resnet18-qat-rtx2000-trt8510 (layer
numbers and names come out as logged for every layer that the Q/DQ passes name), and NVIDIA's open-source parser
(``node_of_<output>`` for a node without a name, ``_<n>`` behind a name that is taken).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdqtool.errors import ModelError
from qdqtool.graph import Model, Node
from qdqtool.qdq import is_dq, is_q, read_params
from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.reductions import pooling_of

ACTIVATIONS = {
    "Relu": "RELU",
    "LeakyRelu": "LEAKY_RELU",
    "Sigmoid": "SIGMOID",
    "Tanh": "TANH",
    "Clip": "CLIP",
    "Elu": "ELU",
    "Selu": "SELU",
    "HardSigmoid": "HARD_SIGMOID",
    "Softplus": "SOFTPLUS",
    "Softsign": "SOFTSIGN",
    "ThresholdedRelu": "THRESHOLDED_RELU",
    "Gelu": "GELU",
    "Swish": "SWISH",
    "Mish": "MISH",
}
ELEMENTWISE = {"Add": "SUM", "Mul": "PROD", "Sub": "SUB", "Div": "DIV", "Pow": "POW", "Min": "MIN", "Max": "MAX"}
UNARY = ("Exp", "Log", "Sqrt", "Abs", "Neg", "Reciprocal", "Erf", "Sin", "Cos", "Floor", "Ceil", "Round", "Sign")
SHUFFLES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "DepthToSpace", "SpaceToDepth")
MOVING_SHUFFLES = ("Transpose", "DepthToSpace", "SpaceToDepth")  # the others leave the values in their order
REDUCTIONS = ("GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
SHAPE_OPS = ("Shape", "Size")
_TRANSPARENT = (*SHUFFLES, "Identity", "Cast")


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

    def run(self) -> Network:
        for name in self.model.inputs:
            self.network.inputs.append(self._tensor(name))
        for node in self.model.ordered:
            try:
                self._import(node)
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                where = self.model.path or "model"
                raise ModelError(f"{where}: node '{node.name}' ({node.op}) is damaged: {error}") from error
        for name in self.model.outputs:
            tensor = self._input(name)
            tensor.is_output = True
            self.network.outputs.append(tensor)
        self.network.order()
        return self.network

    # Tensors --------------------------------------------------------------------------------------------------

    def _tensor(self, name: str) -> Tensor:
        if not name:
            raise ValueError("an input or output is missing")
        tensor = self.tensors.get(name)
        if tensor is None:
            tensor = Tensor(name, elem_type=self.model.elem_type(name))
            tensor.shape = self.model.shape(name)
            self.tensors[name] = tensor
        return tensor

    def _input(self, name: str) -> Tensor:
        """The tensor a layer reads; a constant becomes a constant layer when it is first read."""
        if name not in self.tensors and self.model.is_constant(name):
            layer = self._add(net.CONSTANT, name, [], [self._tensor(name)], None)
            layer.attrs["dims"] = self.model.constant_shape(name)
            layer.attrs["elem_type"] = self.model.elem_type(name)
        return self._tensor(name)

    # Layers ---------------------------------------------------------------------------------------------------

    def _unique(self, name: str) -> str:
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._suffix}"
            self._suffix += 1
        self._names.add(candidate)
        return candidate

    def _name(self, node: Node) -> str:
        if node.proto.name:
            return self._unique(node.proto.name)
        return self._unique(f"node_of_{node.output}") if node.output else self._unique(node.name)

    def _unnamed(self, kind: str) -> str:
        return f"(Unnamed Layer* {self.count}) [{kind}]"

    def _add(self, kind: str, name: str, inputs: list[Tensor], outputs: list[Tensor], node: Node | None) -> Layer:
        layer = Layer(kind, name, node.op if node is not None else "")
        if node is not None:
            layer.nodes.append(node.name)
        self.count += 1
        return self.network.add(layer, inputs, outputs)

    def _add_unnamed(self, kind: str, shown: str, inputs: list[Tensor], node: Node | None, **attrs: Any) -> Tensor:
        """Adds a layer that the parser leaves unnamed and returns its output."""
        name = self._unnamed(shown)
        out = Tensor(f"{name}_output")
        if inputs:
            out.elem_type, out.shape = inputs[0].elem_type, inputs[0].shape
        layer = self._add(kind, name, inputs, [out], None)
        if node is not None:
            layer.op = node.op
            layer.attrs["of"] = node.name
        layer.attrs.update(attrs)
        return out

    # Operators ------------------------------------------------------------------------------------------------

    def _import(self, node: Node) -> None:
        if node.op == "Constant" or not any(node.outputs):
            return
        if node.op in SHAPE_OPS or self._only_shapes(node):
            # Shape arithmetic is folded while parsing or runs on the host: it neither reads nor blocks a tensor.
            self._shape_only.update(o for o in node.outputs if o)
            return
        handler = _HANDLERS.get(node.op)
        if handler is not None and node.domain in ("", "ai.onnx", "com.microsoft"):
            handler(self, node)
        elif node.op in ACTIVATIONS:
            self._simple(net.ACTIVATION, node, 1).attrs["activation"] = ACTIVATIONS[node.op]
        elif node.op in ELEMENTWISE and len([i for i in node.inputs if i]) == 2:
            self._elementwise(node)
        elif node.op in UNARY:
            self._simple(net.UNARY, node, 1)
        elif node.op in SHUFFLES:
            layer = self._simple(net.SHUFFLE, node, 1)
            layer.attrs["moves"] = node.op in MOVING_SHUFFLES
            layer.attrs["perm"] = node.attributes.get("perm") if node.op == "Transpose" else None
        elif node.op in REDUCTIONS:
            self._simple(net.REDUCE, node, 1).attrs["as_pooling"] = pooling_of(self.model, node)
        else:
            self._generic(net.OTHER, node)

    def _only_shapes(self, node: Node) -> bool:
        """Whether a node computes on shapes alone: every input is shape arithmetic or a constant, one is shape."""
        names = [i for i in node.inputs if i]
        return (
            not node.captured
            and any(i in self._shape_only for i in names)
            and all(i in self._shape_only or self.model.is_constant(i) for i in names)
        )

    def _generic(self, kind: str, node: Node) -> Layer:
        names = [i for i in (*node.inputs, *node.captured) if i and i not in self._shape_only]
        inputs = [self._input(i) for i in names if not self.model.is_constant(i)]
        name = self._name(node)
        return self._add(kind, name, inputs, [self._tensor(o) for o in node.outputs if o], node)

    def _simple(self, kind: str, node: Node, data_inputs: int) -> Layer:
        """A layer with so many tensor inputs; the others (shapes, bounds) are parameters."""
        inputs = [self._input(node.input(i)) for i in range(data_inputs)]
        return self._add(kind, self._name(node), inputs, [self._tensor(node.output)], node)

    def _elementwise(self, node: Node) -> None:
        rank = max((len(s) for s in (self.model.shape(i) for i in node.inputs) if s is not None), default=0)
        inputs: list[Tensor] = []
        for name in node.inputs:
            tensor = self._input(name)
            dims = self.model.constant_shape(name) if self.model.is_constant(name) else None
            if dims is not None and len(dims) < rank:
                tensor = self._add_unnamed(net.SHUFFLE, "Shuffle", [tensor], None, constant=True)
            inputs.append(tensor)
        layer = self._add(net.ELEMENTWISE, self._name(node), inputs, [self._tensor(node.output)], node)
        layer.attrs["operation"] = ELEMENTWISE[node.op]

    def _quantizer(self, node: Node) -> None:
        x = self._input(node.input(0))
        parameters = [self._input(i) for i in node.inputs[1:] if i and self.model.is_constant(i)]
        computed = [i for i in node.inputs[1:] if i and not self.model.is_constant(i)]
        kind = net.QUANTIZE if is_q(node) else net.DEQUANTIZE
        inputs = [x, *parameters, *(self._input(i) for i in computed)]
        layer = self._add(kind, self._name(node), inputs, [self._tensor(node.output)], node)
        layer.quant = read_params(self.model, node)
        layer.attrs["computed_scale"] = bool(computed)

    def _convolution(self, node: Node) -> None:
        kind = net.CONVOLUTION if node.op == "Conv" else net.DECONVOLUTION
        inputs = [self._input(node.input(0))]
        weights, bias = node.input(1), node.input(2)
        constant = self.model.is_constant(weights)
        if not constant:
            inputs.append(self._input(weights))
        if bias and not self.model.is_constant(bias):
            inputs.append(self._input(bias))
        layer = self._add(kind, self._name(node), inputs, [self._tensor(node.output)], node)
        attributes = node.attributes
        dims = self.model.shape(weights) or ()
        group = node.integer("group", 1)
        kernel = tuple(attributes.get("kernel_shape", ()) or list(dims[2:]))
        layer.attrs.update(
            weights=weights,
            constant_weights=constant,
            kernel=kernel,
            strides=tuple(attributes.get("strides", [1] * len(kernel))),
            pads=tuple(attributes.get("pads", [0] * 2 * len(kernel))),
            auto_pad=str(attributes.get("auto_pad", "NOTSET")),
            dilations=tuple(attributes.get("dilations", [1] * len(kernel))),
            group=group,
            weight_dims=tuple(dims),
            axis=0 if node.op == "Conv" else 1,
            bias_tensor=bool(bias) and not self.model.is_constant(bias),
        )

    def _batch_normalization(self, node: Node) -> None:
        parameters = node.inputs[1:5]
        plain = all(self.model.is_constant(p) for p in parameters)
        if plain:
            self._simple(net.SCALE, node, 1).attrs["per_channel"] = True
            return
        self._decomposed_batch_normalization(node)

    def _decomposed_batch_normalization(self, node: Node) -> None:
        """y = (x - mean) / sqrt(var + epsilon) * scale + bias, when a parameter is not a plain constant."""
        x = self._input(node.input(0))
        constants = {i: self._input(node.input(i)) for i in (1, 2, 3, 4)}
        shuffled = {
            i: self._add_unnamed(net.SHUFFLE, "Shuffle", [constants[i]], None, constant=True) for i in (1, 2, 3, 4)
        }
        epsilon = self._add_unnamed(net.CONSTANT, "Constant", [], None)
        variance = self._add_unnamed(net.ELEMENTWISE, "ElementWise", [shuffled[4], epsilon], None, operation="SUM")
        deviation = self._add_unnamed(net.UNARY, "Unary", [variance], None)
        centred = self._add_unnamed(net.ELEMENTWISE, "ElementWise", [x, shuffled[3]], node, operation="SUB")
        normal = self._add_unnamed(net.ELEMENTWISE, "ElementWise", [centred, deviation], node, operation="DIV")
        scaled = self._add_unnamed(net.ELEMENTWISE, "ElementWise", [shuffled[1], normal], node, operation="PROD")
        for tensor in (centred, normal, scaled):
            tensor.elem_type, tensor.shape = x.elem_type, x.shape
        layer = self._add(
            net.ELEMENTWISE, self._name(node), [scaled, shuffled[2]], [self._tensor(node.output)], node
        )
        layer.attrs.update(operation="SUM", batch_normalization=True)

    def _pool(self, node: Node) -> None:
        layer = self._simple(net.POOLING, node, 1)
        attributes = node.attributes
        kernel = tuple(attributes.get("kernel_shape", ()))
        layer.attrs.update(
            pooling="MAX" if node.op == "MaxPool" else "AVERAGE",
            kernel=kernel,
            strides=tuple(attributes.get("strides", [1] * len(kernel))),
            pads=tuple(attributes.get("pads", [0] * 2 * len(kernel))),
        )

    def _padding(self, node: Node) -> None:
        """A Pad; one with zeros commutes with Q and DQ."""
        layer = self._simple(net.PADDING, node, 1)
        value = self.model.constant(node.input(2)) if node.input(2) else None
        known = value is not None or (not node.input(2) and not node.attributes.get("value"))
        constant = str(node.attributes.get("mode", "constant")) == "constant"
        layer.attrs["zeros"] = constant and known and (value is None or not value.any())

    def _resize(self, node: Node) -> None:
        layer = self._simple(net.RESIZE, node, 1)
        layer.attrs["mode"] = str(node.attributes.get("mode", "nearest"))

    def _concat(self, node: Node) -> None:
        self._add(
            net.CONCATENATION,
            self._name(node),
            [self._input(i) for i in node.inputs if i],
            [self._tensor(node.output)],
            node,
        ).attrs["axis"] = node.integer("axis", 0)

    def _split(self, node: Node) -> None:
        x = self._input(node.input(0))
        for position, output in enumerate(node.outputs):
            if not output:
                continue
            layer = self._add(net.SLICE, self._name(node), [x], [self._tensor(output)], node)
            layer.attrs.update(split=position, strided=False)

    def _slice(self, node: Node) -> None:
        layer = self._simple(net.SLICE, node, 1)
        steps = self.model.constant(node.input(4)) if node.input(4) else None
        layer.attrs["strided"] = steps is not None and bool((steps != 1).any())

    def _gemm(self, node: Node) -> None:
        inputs = [self._input(node.input(0)), self._input(node.input(1))]
        attributes = node.attributes
        bias = node.input(2)
        out = self._tensor(node.output)
        middle = out if not bias else Tensor(f"{node.name}_matmul_output", node.output, out.elem_type)
        layer = self._add(net.MATRIX_MULTIPLY, self._name(node), inputs, [middle], node)
        transposed = bool(attributes.get("transB", 0))
        layer.attrs.update(
            weights=node.input(1),
            constant_weights=constant_behind(self.model, node.input(1)),
            axis=0 if transposed else 1,
            transposed=transposed,
            weight_dims=tuple(self.model.shape(node.input(1)) or ()),
            group=1,
            kernel=(),
        )
        if not bias:
            return
        operand = self._input(bias)
        dims = self.model.shape(bias)
        if dims is None or len(dims) < 2:
            constant = self.model.is_constant(bias)
            operand = self._add_unnamed(net.SHUFFLE, "Shuffle", [operand], None, constant=constant)
        add = self._add(net.ELEMENTWISE, self._unnamed("ElementWise"), [middle, operand], [out], None)
        add.attrs.update(operation="SUM", gemm_bias=True)

    def _matmul(self, node: Node) -> None:
        inputs = [self._input(node.input(0)), self._input(node.input(1))]
        layer = self._add(net.MATRIX_MULTIPLY, self._name(node), inputs, [self._tensor(node.output)], node)
        dims = tuple(self.model.shape(node.input(1)) or ())
        layer.attrs.update(
            weights=node.input(1),
            constant_weights=constant_behind(self.model, node.input(1)),
            axis=max(len(dims) - 1, 0),
            transposed=False,
            weight_dims=dims,
            group=1,
            kernel=(),
        )

    def _softmax(self, node: Node) -> None:
        """A softmax and the shuffle that gives its shape back (both complete 8.5 logs; erased at once)."""
        x, out = self._input(node.input(0)), self._tensor(node.output)
        name = self._name(node)
        middle = Tensor(f"{name}_softmax_output", out.source, out.elem_type)
        middle.shape = out.shape
        self._add(net.SOFTMAX, name, [x], [middle], node)
        shuffle = self._add(net.SHUFFLE, self._unnamed("Shuffle"), [middle], [out], None)
        shuffle.attrs["fused"] = True

    def _identity(self, node: Node) -> None:
        self._simple(net.IDENTITY, node, 1)

    def _hard_swish(self, node: Node) -> None:
        x = self._input(node.input(0))
        gate = self._add_unnamed(net.ACTIVATION, "Activation", [x], node, activation="HARD_SIGMOID")
        layer = self._add(net.ELEMENTWISE, self._name(node), [x, gate], [self._tensor(node.output)], node)
        layer.attrs["operation"] = "PROD"


_HANDLERS: dict[str, Callable[[Importer, Node], None]] = {
    "QuantizeLinear": Importer._quantizer,
    "DequantizeLinear": Importer._quantizer,
    "Conv": Importer._convolution,
    "ConvTranspose": Importer._convolution,
    "BatchNormalization": Importer._batch_normalization,
    "MaxPool": Importer._pool,
    "AveragePool": Importer._pool,
    "Pad": Importer._padding,
    "Resize": Importer._resize,
    "Upsample": Importer._resize,
    "Concat": Importer._concat,
    "Split": Importer._split,
    "Slice": Importer._slice,
    "Softmax": Importer._softmax,
    "LogSoftmax": Importer._softmax,
    "Gemm": Importer._gemm,
    "MatMul": Importer._matmul,
    "Identity": Importer._identity,
    "Cast": Importer._identity,
    "Dropout": Importer._identity,
    "HardSwish": Importer._hard_swish,
}


def constant_behind(model: Model, tensor: str) -> bool:
    """Whether a tensor is a constant, looking through Q, DQ and operators that only reshape or cast."""
    while not model.is_constant(tensor):
        producer = model.producer(tensor)
        if producer is None or not (is_q(producer) or is_dq(producer) or producer.op in _TRANSPARENT):
            return False
        tensor = producer.input(0)
    return True


def build(model: Model) -> Network:
    """TensorRT's network for a model, dead layers removed and ranked in the optimizer's order of visits."""
    return Importer(model).run()
