"""Outcome of a simulation: engine layers, conversions, and the precision of convolutions.

:func:`simulate` runs the passes and reads the outcome from the optimized network. The prediction
that it returns has no findings yet; :mod:`qdqtool.prediction` adds them.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Case, Evidence
from qdqtool.ir.constants import fold_constants
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import describe_model
from qdqtool.ir.operators import LayerKind
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.ir.qdq import is_dq, is_qdq
from qdqtool.ir.sizes import is_multiplication
from qdqtool.patterns.layernorm import NORMALIZATIONS, find_decomposed_layer_norms
from qdqtool.patterns.view import View
from qdqtool.trt import importer, pipeline
from qdqtool.trt.importer import is_constant_upstream
from qdqtool.trt.layers import QDQ, Layer, Tensor, float_precision
from qdqtool.trt.network import Network, describe_rules, weakest_evidence
from qdqtool.trt.pipeline import case_id
from qdqtool.trt.result import (
    Assumption,
    AssumptionCounts,
    ConvOutcome,
    EngineLayer,
    MyelinRegion,
    Prediction,
    TensorPrecision,
)
from qdqtool.trt.targets import Target

Assume = Mapping[str, str]
"""Choices by name, such as ``{"silu-add": "fused"}``."""


# Simulation -----------------------------------------------------------------------------------


SILU_ADD = "silu-add"


class SiluAdd(StrEnum):
    """Fusion of Conv + activation + Add with a quantized residual input: one layer or two."""

    FUSED = "fused"
    APART = "apart"


CHOICES: Mapping[str, tuple[str, ...]] = {SILU_ADD: tuple(SiluAdd)}
"""Values of every assumption that a user can choose, by the name of the assumption."""


def simulate(model: Model, target: Target, assume: Assume | None = None) -> Prediction:
    """Predict the engine of a model for a target other than TensorRT-RTX, without findings.

    Reports differ on whether TensorRT fuses Conv + activation + Add. If the model has such nodes,
    both choices are simulated. If their results differ, ``assumptions`` of the prediction has the
    counts of the other choice.

    Args:
        model: The model.
        target: TensorRT version. The choice of the target applies unless ``assume`` has another.
        assume: Choices by name.

    Raises:
        QdqtoolError: A choice has an unknown name or value, or the model cannot be simulated.
    """
    assumed_target = apply_assumptions(target, assume)
    prediction, places = _simulate(model, assumed_target)
    if places:
        value = SiluAdd.FUSED if assumed_target.residual_through_activation else SiluAdd.APART
        other = next(v for v in SiluAdd if v != value)
        alternative, _ = _simulate(model, _choose_silu_add(target, other))
        if _list_user_visible_results(alternative) != _list_user_visible_results(prediction):
            is_users_choice = assume is not None and SILU_ADD in assume
            proof = "chosen by the user" if is_users_choice else target.residual_proof
            alternatives: dict[str, AssumptionCounts] = {other: _count_results(alternative)}
            prediction.assumptions.append(
                Assumption(SILU_ADD, value, alternatives, places, is_users_choice, proof)
            )
    return prediction


def simulate_without_alternatives(model: Model, target: Target) -> Prediction:
    """Predict the engine without simulating the other choice for Conv + activation + Add."""
    return _simulate(model, target)[0]


def apply_assumptions(target: Target, assume: Assume | None) -> Target:
    """Return the target with the user's choices in place of its default choices.

    Raises:
        QdqtoolError: A choice has an unknown name or value, or has no effect on the target.
    """
    for name, value in (assume or {}).items():
        values = CHOICES.get(name)
        if values is None:
            raise QdqtoolError(
                f"`assume`: unknown assumption '{name[:40]}'. Choose one of {', '.join(CHOICES)}",
                code="unknown-choice",
                parameter="assume",
            )
        if value not in values:
            raise QdqtoolError(
                f"`assume`: {name} cannot be '{value[:40]}'. Choose one of {', '.join(values)}",
                code="unknown-choice",
                parameter="assume",
            )
        if target.is_rtx:
            raise QdqtoolError(
                f"`assume`: {name} has no effect on {target.name}, because this target fuses no "
                "pointwise Add into a convolution. Remove the assumption",
                code="option-without-effect",
                parameter="assume",
            )
        target = _choose_silu_add(target, SiluAdd(value))
    return target


def _choose_silu_add(target: Target, value: SiluAdd) -> Target:
    return replace(target, residual_through_activation=value == SiluAdd.FUSED)


def _simulate(model: Model, target: Target) -> tuple[Prediction, tuple[str, ...]]:
    """Return the prediction, and the ONNX Adds whose fusion depends on the target's choice."""
    folded_model = fold_constants(model)
    network = importer.build(folded_model)
    run = pipeline.run(network, target)
    outcome = Outcome(folded_model, network, target, original_model=model)
    cases = (case for layer in network.layers.values() for case in layer.cases)
    rules = describe_rules(cases, target)
    prediction = Prediction(
        describe_model(model),
        target.name,
        convolutions=outcome.convolutions,
        layers=outcome.layers,
        trace=run.trace,
        refusals=run.reasons,
        conversions=len(outcome.conversion_nodes),
        conversion_nodes=outcome.conversion_nodes,
        target_evidence="; ".join(filter(None, (f"{target.evidence}: {target.proof}", rules))),
        counts=dict(network.counts),
        regions=outcome.describe_regions(),
        float_products=outcome.float_products,
    )
    return prediction, tuple(network.adds_after_activation)


def _count_results(prediction: Prediction) -> AssumptionCounts:
    summary = prediction.summary()
    return AssumptionCounts(
        summary["int8"],
        summary["int8_to_int8"],
        summary["conversions"],
        summary["fp8"],
        summary["fp8_to_fp8"],
        tuple(prediction.conversion_nodes),
    )


def _list_user_visible_results(prediction: Prediction) -> object:
    return prediction.conversion_nodes, [
        (c.precision, tuple(c.inputs), c.output, tuple(c.fused)) for c in prediction.convolutions
    ]


# Engine ---------------------------------------------------------------------------------------

_KINDS_THAT_KEEP_TYPE = (
    LayerKind.PADDING,
    LayerKind.SHUFFLE,
    LayerKind.SLICE,
    LayerKind.CONCATENATION,
    LayerKind.RESIZE,
    LayerKind.IDENTITY,
)
# Layers that read an input and write an output of the network in its type in the model. Before and
# after other layers, TensorRT adds a reformat if the builder chooses another float type for them.
_KINDS_THAT_CHANGE_TYPE = (LayerKind.COPY, LayerKind.IDENTITY)
_KINDS_LISTED_AS_OPERATOR = (*QDQ, LayerKind.SHAPE, LayerKind.OTHER)
_LISTED_TYPES = {
    **{kind: kind.title().replace("_", "") for kind in LayerKind},
    LayerKind.ELEMENTWISE: "ElementWise",
    LayerKind.POINTWISE: "PointWise",
    LayerKind.COPY: "Conversion",
}
KERNEL = "kgen"  # type that the engine lists for a Q or DQ that is a separate kernel of Myelin
_PRODUCT = _LISTED_TYPES[LayerKind.MATRIX_MULTIPLY]
_TYPES_IN_REGIONS = {LayerKind.COPY: KERNEL, LayerKind.CONVOLUTION: _PRODUCT}

# Looking up an enumeration member is slow, and nearly every layer is compared with these members.
_CONSTANT, _COPY, _CONVOLUTION = LayerKind.CONSTANT, LayerKind.COPY, LayerKind.CONVOLUTION
_MERGED_KINDS = (_CONVOLUTION, LayerKind.MATRIX_MULTIPLY)
_INT8, _FP8 = Precision.INT8, Precision.FP8
_ONLY_INT8, _ONLY_FP8 = frozenset({Precision.INT8}), frozenset({Precision.FP8})
_TYPES_UNLIKE_INT8 = (Precision.FP8, Precision.INT4)


class Outcome:
    """Engine layers, conversions and convolutions of an optimized network.

    Attributes:
        layers: Engine layers in execution order. Constants and layers inside Myelin's kernels are
            left out. For a region of Myelin on TensorRT 10, the entries are a kernel for each
            matrix product and for each Q and DQ at the edge of the region, without reshapes.
        convolutions: One entry for each Conv, ConvTranspose, Gemm and MatMul that TensorRT
            computes.
        conversion_nodes: Names of the remaining Q and DQ.
        float_products: Names of the MatMuls of two computed tensors without Q/DQ, and of Einsums.

    Args:
        model: The model after constants were folded.
        network: The optimized network of the model.
        target: TensorRT version.
        original_model: The model before constants were folded. ``convolutions`` has the node
            indices of this model.
    """

    def __init__(
        self, model: Model, network: Network, target: Target, original_model: Model
    ) -> None:
        self._model = model
        self._original_model = original_model
        self._network = network
        self._target = target
        self._precisions: dict[Tensor, Precision] = {}
        self.layers: list[EngineLayer] = []
        self.conversion_nodes: list[str] = []
        self.float_products: list[str] = []
        self._layer_of_node: dict[str, Layer] = {}
        # For layers inside a kernel of Myelin: the tensor before them, by the tensor after them.
        self._sources: dict[Tensor, Tensor] = {}
        # Names of network outputs after fused layers, by the name of the tensor before the layers.
        self._output_names: dict[str, str] = {}
        # Types that kernels write because of a fused Q, by the tensor before the Q.
        self._fused_types: dict[Tensor, Precision] = {}
        self._evidence: dict[tuple[Case, ...], Evidence] = {}  # by the cases that apply to a layer
        order = network.breadth_first()
        self._set_precisions(order)
        self._list_engine(order)
        self.convolutions: list[ConvOutcome] = []
        for node in model.nodes:
            if is_multiplication(model, node):
                convolution = self._describe_convolution(node)
                if convolution is not None:
                    self.convolutions.append(convolution)

    # Precisions -------------------------------------------------------------------------------

    def _set_precisions(self, order: list[Layer]) -> None:
        for layer in order:
            for node in layer.nodes:
                self._layer_of_node.setdefault(node, layer)
            for tensor in layer.outputs:
                self._precisions[tensor] = self._output_precision(layer, tensor)
        for layer in order:
            # An INT8 layer reads INT8 even if an operator with an unknown output type is between
            # the Q and the layer.
            if layer.int8 and layer.inputs:
                self._precisions[layer.data] = _quantized_type(layer)

    def precision(self, tensor: Tensor) -> Precision:
        """Return the data type of a tensor in the engine."""
        precision = self._precisions.get(tensor)
        if precision is not None:
            return precision
        return float_precision(tensor.elem_type, self._target.strongly_typed)

    def _output_precision(self, layer: Layer, tensor: Tensor) -> Precision:
        if layer.int8_out:
            return _quantized_type(layer)
        if layer.kind is _COPY:
            if layer.quant is not None and _is_quantizing(layer):
                is_uint8 = layer.quant.precision == Precision.UINT8
                return _INT8 if is_uint8 else layer.quant.precision
        elif layer.kind in _KINDS_THAT_KEEP_TYPE or layer.pooling_type == "MAX":
            types = {self.precision(t) for t in layer.inputs}
            if types in (_ONLY_INT8, _ONLY_FP8):
                return types.pop()
        return float_precision(tensor.elem_type, self._target.strongly_typed)

    # Layers -----------------------------------------------------------------------------------

    def _list_engine(self, order: list[Layer]) -> None:
        fused = self._layers_in_kernels(order)
        for layer in fused.values():
            self._bypass_fused_layer(layer, fused)
        parallel: dict[str, EngineLayer] = {}
        for layer in order:
            if layer.kind is _CONSTANT or layer.in_myelin or layer.id in fused:
                continue  # the engine does not list such layers
            if layer.kind is _COPY and layer.region is None:
                self.conversion_nodes.append(layer.name)
            for name, tensor in layer.copies:
                written = TensorPrecision(layer.out.memory.name, self.precision(tensor))
                read = self._list_tensor(tensor)
                self.layers.append(EngineLayer(name, "Reformat", [read], [written]))
            if not layer.is_eliminated:
                self._list_layer(layer, parallel)
        self._rename_outputs()

    def _layers_in_kernels(self, order: list[Layer]) -> dict[int, Layer]:
        """Return the layers that are inside a kernel of Myelin, by layer id.

        These are the Q and DQ of a region that are not separate kernels, and the reshapes around
        products.
        """
        own_kernels = {name for region in self._network.regions for name in region.kernels}
        layers = {}
        for layer in order:
            if layer.region is None or layer.in_myelin:
                continue
            if layer.kind == LayerKind.COPY:
                names = layer.nodes or [layer.owner or layer.name]
                is_inside = own_kernels.isdisjoint(names)
            else:
                is_inside = _is_shuffle_inside(layer)
            if is_inside:
                layers[layer.id] = layer
        return layers

    def _bypass_fused_layer(self, layer: Layer, fused: Mapping[int, Layer]) -> None:
        """Connect the consumers of a layer inside a kernel of Myelin to the layer's input.

        The engine does not list such a layer. If the layer is a Q, the kernel before it writes
        INT8. Exception: a Q that is fused with the DQ after it into a kernel that writes float
        (gemm-mlp-trt10: MulMinMaxRounCastCastMul).
        """
        source = self._sources.get(layer.data, layer.data)
        if layer.out.is_output:
            self._output_names[source.memory.name] = layer.out.memory.name
        self._sources[layer.out] = source
        if layer.kind != LayerKind.COPY or layer.op != "QuantizeLinear":
            return
        if len(layer.data.consumers) == 1 and not _precedes_own_kernel(layer, fused):
            self._fused_types[source] = self.precision(layer.out)

    def _list_layer(self, layer: Layer, parallel: dict[str, EngineLayer]) -> None:
        """List an engine layer, or extend the entry of the convolutions merged with the layer.

        ``parallel`` holds the entries of merged convolutions by name.
        """
        changes_type = layer.kind in _KINDS_THAT_CHANGE_TYPE
        inputs = [self._list_tensor(t, is_fixed=changes_type) for t in layer.inputs]
        outputs = [self._list_tensor(t, is_fixed=changes_type) for t in layer.outputs]
        merged_name = layer.fusion.merged_name if layer.kind in _MERGED_KINDS else ""
        if merged_name in parallel:
            parallel[merged_name].outputs.extend(outputs)
            parallel[merged_name].nodes.extend(layer.nodes)
            return
        listed_type = _engine_type(layer)
        name = merged_name or _engine_name(layer, listed_type)
        entry = EngineLayer(name, listed_type, inputs, outputs, list(layer.nodes))
        self.layers.append(entry)
        if merged_name:
            parallel[merged_name] = entry

    def _list_tensor(self, tensor: Tensor, *, is_fixed: bool = False) -> TensorPrecision:
        """Return the name and type of a tensor for the list of engine layers.

        If ``is_fixed`` is set, a float input or output of the network has its type in the model.
        """
        tensor = self._sources.get(tensor, tensor)
        precision = self._fused_types.get(tensor) or self.precision(tensor)
        is_network_edge = tensor.producer is None or tensor.is_output
        if is_fixed and is_network_edge and precision == Precision.FLOAT:
            precision = float_precision(tensor.elem_type, strongly_typed=True)
        return TensorPrecision(tensor.memory.name, precision)

    def _rename_outputs(self) -> None:
        if not self._output_names:
            return
        for layer in self.layers:
            for listed in (*layer.inputs, *layer.outputs):
                listed.tensor = self._output_names.get(listed.tensor, listed.tensor)

    # Myelin -----------------------------------------------------------------------------------

    def describe_regions(self) -> list[MyelinRegion]:
        """Return the regions of Myelin with their nodes, products, Softmaxes and normalizations."""
        if not self._network.regions:
            return []
        types = {c.name: c.precision for c in self.convolutions if c.is_product}
        types.update(dict.fromkeys(self.float_products, Precision.FLOAT))
        squares = {pieces.square.name for pieces in find_decomposed_layer_norms(self._model)}
        return [self._describe_region(region, types, squares) for region in self._network.regions]

    def _describe_region(
        self, region: MyelinRegion, types: Mapping[str, Precision], squares: set[str]
    ) -> MyelinRegion:
        """Return a region of Myelin with its counts.

        ``types`` has the data type of each matrix product of the model, by node name. ``squares``
        has the name of the squaring node of each decomposed LayerNorm.
        """
        names, quantizers = [], []
        indices: dict[str, int] = {}
        ops: list[str] = []
        for name in dict.fromkeys(region.nodes):
            node = self._model.find_node(name)
            if is_qdq(node):
                quantizers.append(name)
                continue
            names.append(name)
            if node is not None:
                indices[name] = node.index
                ops.append(node.op)
        names.sort(key=lambda name: indices.get(name, -1))
        return replace(
            region,
            nodes=names,
            fused=list(dict.fromkeys([*region.fused, *quantizers])),
            kernels=list(dict.fromkeys(region.kernels)),  # the copies of a Q have one name
            products=sum(name in types for name in names),
            int8_products=sum(types.get(name) in BYTES for name in names),
            fp8_products=sum(types.get(name) is Precision.FP8 for name in names),
            softmaxes=ops.count("Softmax"),
            norms=sum(op in NORMALIZATIONS for op in ops) + sum(name in squares for name in names),
        )

    # Convolutions -----------------------------------------------------------------------------

    @functools.cached_property
    def _varying_tensors(self) -> frozenset[str]:
        return View(self._model).varying

    def _describe_convolution(self, node: Node) -> ConvOutcome | None:
        """Return the outcome of a Conv, ConvTranspose, Gemm or MatMul, if it is reported.

        None if the engine does not compute the node. None also for an Einsum and for a MatMul of
        two computed tensors without Q/DQ; their names are added to ``float_products``.
        """
        is_constant = is_constant_upstream(self._model, node.input(1))
        layer = self._layer_of_node.get(node.name)
        if layer is None or not layer.inputs:
            return None  # no network output depends on the node
        if not layer.int8 and node.output not in self._varying_tensors:
            return None  # computed from constants alone while the engine is built
        if self._is_float_product(node, is_constant):
            self.float_products.append(node.name)
            return None
        weights = "constant" if is_constant else "computed"
        if layer.in_myelin:
            return self._describe_in_myelin(node, layer, weights)
        return self._describe_layer(node, layer, weights)

    def _original_index(self, node: Node) -> int:
        """Return the index of a node in the model before constants were folded."""
        original = self._original_model.producer(node.output)
        return node.index if original is None else original.index

    def _describe_in_myelin(self, node: Node, layer: Layer, weights: str) -> ConvOutcome:
        elem_type = self._model.elem_type(node.output)
        precision = float_precision(elem_type, self._target.strongly_typed)
        return ConvOutcome(
            self._original_index(node),
            node.name,
            node.op,
            weights,
            precision,
            [precision],
            precision,
            evidence=Evidence.ASSUMED,
            bare=layer.out.source,
        )

    def _describe_layer(self, node: Node, layer: Layer, weights: str) -> ConvOutcome:
        data = self.precision(layer.data)
        if layer.int8:
            data = precision = _quantized_type(layer)
        else:
            precision = data if data.is_float else Precision.FLOAT
        inputs = [data]
        if layer.residual is not None:
            inputs.append(self.precision(layer.residual))
        fusion = layer.fusion
        name = fusion.merged_name or layer.name
        return ConvOutcome(
            self._original_index(node),
            node.name,
            node.op,
            weights,
            precision,
            inputs,
            self.precision(layer.out),
            layer=name if layer.region is None else None,
            fused=self._fused_nodes(layer, node),
            evidence=self._find_evidence(layer),
            cases=list(map(case_id, layer.cases)),
            activation=fusion.activation.op if fusion.activation is not None else "",
            bare=fusion.tensor_before_activation or layer.out.source,
        )

    def _fused_nodes(self, layer: Layer, node: Node) -> list[str]:
        return [n for n in layer.nodes if n != node.name and not is_qdq(self._model.find_node(n))]

    def _find_evidence(self, layer: Layer) -> Evidence:
        cases = [*layer.cases]
        for producer in layer.producers:
            if producer.kind is _COPY:
                cases += producer.cases
        key = tuple(cases)  # most layers of a network have the same cases
        if key not in self._evidence:
            self._evidence[key] = weakest_evidence(cases, self._target)
        return self._evidence[key]

    def _is_float_product(self, node: Node, has_constant: bool) -> bool:
        if node.op != "MatMul" or has_constant:
            return node.op == "Einsum"
        return not any(is_dq(self._model.producer(tensor)) for tensor in node.inputs)


def _is_quantizing(copy: Layer) -> bool:
    return copy.op == "QuantizeLinear" or copy.requantizes


def _is_shuffle_inside(layer: Layer) -> bool:
    """Return whether a layer is a shuffle that is part of a kernel of Myelin.

    This holds for each reshape that TensorRT inserts around a product, and for another shuffle if a
    layer of a region produces its input. TensorRT 8 has no such regions and lists the reshapes.
    """
    if layer.kind != LayerKind.SHUFFLE:
        return False
    producer = layer.data.producer
    is_in_region = producer is not None and producer.region is not None
    is_reshape = not layer.nodes and not layer.shuffling.reorders_values
    return is_reshape or is_in_region


def _precedes_own_kernel(layer: Layer, fused: Mapping[int, Layer]) -> bool:
    """Return whether the Q or DQ after a layer is a separate kernel.

    Fused reshapes may be between the layer and the Q or DQ.
    """
    consumer = layer.out.single_consumer()
    while consumer is not None and consumer.id in fused and consumer.kind == LayerKind.SHUFFLE:
        consumer = consumer.out.single_consumer()
    return consumer is not None and consumer.kind == LayerKind.COPY and consumer.id not in fused


def _quantized_type(layer: Layer) -> Precision:
    """Return the quantized type in which a layer computes.

    TensorRT reads UINT8 with zero point 0 as INT8.
    """
    quantized_type = layer.quantized_type
    return quantized_type if quantized_type in _TYPES_UNLIKE_INT8 else _INT8


def _engine_name(layer: Layer, listed_type: str) -> str:
    """Return the name that the engine lists; a Myelin kernel has the name of its first node."""
    is_kernel = layer.region is not None and listed_type in (KERNEL, _PRODUCT)
    return layer.nodes[0] if is_kernel and layer.nodes else layer.name


def _engine_type(layer: Layer) -> str:
    if layer.kind is _CONVOLUTION and layer.fusion.has_pooling:
        return "ConvActPool"
    if layer.region is not None and layer.kind in _TYPES_IN_REGIONS:
        return _TYPES_IN_REGIONS[layer.kind]
    if layer.kind == LayerKind.SHUFFLE and not layer.shuffling.reorders_values:
        return "NoOp"
    if layer.becomes_copy:
        return "Reformat"
    if layer.kind in _KINDS_LISTED_AS_OPERATOR:
        return layer.op or "Other"
    return _LISTED_TYPES[layer.kind]
