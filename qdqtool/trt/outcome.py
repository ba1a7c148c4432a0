"""Reads the answer out of the optimized network: engine layers, conversions, and what became of each convolution.

``simulate`` runs the passes; what comes out has no findings yet (:mod:`qdqtool.prediction` adds them).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

from qdqtool.base.records import replaced
from qdqtool.errors import QdqtoolError
from qdqtool.knowledge.tables import Case
from qdqtool.model.graph import Model, Node
from qdqtool.model.layernorm import NORMALIZES, layer_norms
from qdqtool.model.operators import LayerKind
from qdqtool.model.qdq import is_dq, is_qdq
from qdqtool.model.sizes import is_multiplication
from qdqtool.model.view import View
from qdqtool.trt import importer, pipeline
from qdqtool.trt.importer import is_constant_upstream
from qdqtool.trt.layers import QDQ, Layer, Tensor, float_precision
from qdqtool.trt.network import Network, describe_rules, weakest_evidence
from qdqtool.trt.pipeline import case_id
from qdqtool.trt.targets import Target
from qdqtool.types import (
    CHOICES,
    SILU_ADD,
    Assumption,
    ConvOutcome,
    Counts,
    EngineLayer,
    Evidence,
    ModelInfo,
    MyelinRegion,
    Precision,
    Prediction,
    SiluAdd,
    TensorPrecision,
)

_PASS_THROUGH = (
    LayerKind.PADDING,
    LayerKind.SHUFFLE,
    LayerKind.SLICE,
    LayerKind.CONCATENATION,
    LayerKind.RESIZE,
    LayerKind.IDENTITY,
)
_TYPES = {
    **{kind: kind.title().replace("_", "") for kind in LayerKind},
    LayerKind.ELEMENTWISE: "ElementWise",
    LayerKind.POINTWISE: "PointWise",
    LayerKind.COPY: "Conversion",
}
_OF_THE_MODEL = (*QDQ, LayerKind.SHAPE, LayerKind.OTHER)
# What is asked of nearly every layer: as names of this module, for a member of an enumeration is slow to look up.
_CONSTANT, _COPY, _CONVOLUTION = LayerKind.CONSTANT, LayerKind.COPY, LayerKind.CONVOLUTION
_INT8, _ONLY_INT8, _UNLIKE_INT8 = (
    Precision.INT8,
    frozenset({Precision.INT8}),
    (Precision.FP8, Precision.INT4),
)
KERNEL = "kgen"  # as the engine lists a kernel that Myelin makes of a Q or DQ
_OF_MYELIN = (KERNEL, _TYPES[LayerKind.MATRIX_MULTIPLY])


def _surrounds_product(layer: Layer) -> bool:
    """Whether it is a reshape that 8.x lists around a product that it runs as a convolution; Myelin has none."""
    return (
        layer.kind == LayerKind.SHUFFLE and not layer.nodes and not layer.shuffling.reorders_values
    )


def _integer(layer: Layer) -> Precision:
    """The quantized type that a layer computes in; TensorRT reads UINT8 with zero point 0 as INT8."""
    found = layer.quantized_type
    return found if found in _UNLIKE_INT8 else _INT8


def _type(layer: Layer) -> str:
    """The type that the engine lists; a shuffle that keeps the order of the values moves nothing."""
    if layer.region is not None and layer.kind is _COPY:
        return KERNEL
    if layer.region is not None and layer.kind is _CONVOLUTION:
        return _TYPES[LayerKind.MATRIX_MULTIPLY]
    if layer.kind == LayerKind.SHUFFLE and not layer.shuffling.reorders_values:
        return "NoOp"
    if layer.becomes_copy:
        return "Reformat"
    return layer.op or "Other" if layer.kind in _OF_THE_MODEL else _TYPES[layer.kind]


class Outcome:
    """The engine that an optimized network stands for.

    Attributes:
        layers: Engine layers in execution order; constants and Myelin's interior left out. In a region of 10: a kernel
            for each Q and DQ at its edge and for each product, no reshapes; the rest as the passes leave it.
        convolutions: One entry for each Conv, ConvTranspose, Gemm and MatMul that TensorRT computes.
        conversion_nodes: Names of the Q and DQ that stay.
        float_products: Names of the MatMuls of two computed tensors without Q/DQ, and of products in an Einsum.
    """

    def __init__(self, model: Model, network: Network, target: Target) -> None:
        self._model = model
        self._network = network
        self._target = target
        self._precisions: dict[int, Precision] = {}
        self.layers: list[EngineLayer] = []
        self.conversion_nodes: list[str] = []
        self._by_node: dict[str, Layer] = {}
        self._passed: dict[int, Tensor] = {}  # behind what Myelin fuses, the tensor in front of it
        self._renamed: dict[str, str] = {}  # these, where a network output is behind them
        self._listed_as: dict[int, Precision] = {}  # what is written for a fused Q
        self._proven: dict[
            tuple[tuple[Case, ...], frozenset[Case]], tuple[Evidence, tuple[str, ...]]
        ] = {}
        self._edges: dict[int, TensorPrecision] = {}
        order = network.breadth_first()
        for layer in order:
            for node in layer.nodes:
                self._by_node.setdefault(node, layer)
            for tensor in layer.outputs:
                self._precisions[id(tensor)] = self._written(layer, tensor)
        for layer in order:
            if (
                layer.int8 and layer.inputs
            ):  # also where an operator of unknown types is behind the Q
                self._precisions[id(layer.data)] = _integer(layer)
        self._engine(order)
        self.float_products: list[str] = []
        self.convolutions = [
            c for n in model.nodes if is_multiplication(model, n) and (c := self._convolution(n))
        ]

    # Precisions -----------------------------------------------------------------------------------------------

    def precision(self, tensor: Tensor) -> Precision:
        """The data type of a tensor in the engine."""
        known = self._precisions.get(id(tensor))
        return (
            known
            if known is not None
            else float_precision(tensor.elem_type, self._target.strongly_typed)
        )

    def _written(self, layer: Layer, tensor: Tensor) -> Precision:
        if layer.int8_out:
            return _integer(layer)
        if layer.kind is _COPY:
            if layer.quant is not None and (layer.op == "QuantizeLinear" or layer.requantizes):
                return (
                    layer.quant.precision
                    if layer.quant.precision != Precision.UINT8
                    else Precision.INT8
                )
        elif layer.kind in _PASS_THROUGH or layer.pooling_type == "MAX":
            if {self.precision(t) for t in layer.inputs} == _ONLY_INT8:
                return _INT8
        return float_precision(tensor.elem_type, self._target.strongly_typed)

    # Layers ---------------------------------------------------------------------------------------------------

    def _engine(self, order: list[Layer]) -> None:
        merged: dict[str, EngineLayer] = {}
        kernels = {name for region in self._network.regions for name in region.kernels}
        fused = {
            layer.id: layer
            for layer in order
            if layer.region is not None
            and not layer.in_myelin
            and (
                kernels.isdisjoint(layer.nodes or [layer.owner or layer.name])
                if layer.kind == LayerKind.COPY
                else _surrounds_product(layer)
            )
        }
        for layer in fused.values():
            self._pass_by(layer, fused)
        for layer in order:
            if layer.kind is _CONSTANT or layer.in_myelin or layer.id in fused:
                continue
            if layer.kind is _COPY and layer.region is None:
                self.conversion_nodes.append(layer.name)
            for name, tensor in layer.copies:
                written = TensorPrecision(layer.out.memory.name, self.precision(tensor))
                self.layers.append(EngineLayer(name, "Reformat", [self._edge(tensor)], [written]))
            if layer.is_eliminated:
                continue
            inputs, outputs = (
                [self._edge(t) for t in layer.inputs],
                [self._edge(t) for t in layer.outputs],
            )
            convolution = layer.kind is _CONVOLUTION
            group = layer.fusion.merged_name if convolution else ""
            if group in merged:
                merged[group].outputs.extend(outputs)
                merged[group].nodes.extend(layer.nodes)
                continue
            kind = "ConvActPool" if convolution and layer.fusion.has_pooling else _type(layer)
            name = (
                layer.nodes[0]
                if layer.region is not None and kind in _OF_MYELIN and layer.nodes
                else layer.name
            )
            entry = EngineLayer(group or name, kind, inputs, outputs, list(layer.nodes))
            self.layers.append(entry)
            if group:
                merged[group] = entry
        if self._renamed:
            for entry in self.layers:
                entry.inputs, entry.outputs = (
                    [replace(e, tensor=self._renamed.get(e.tensor, e.tensor)) for e in edges]
                    for edges in (entry.inputs, entry.outputs)
                )

    def _pass_by(self, layer: Layer, fused: Mapping[int, Layer]) -> None:
        """Leaves out of the list what is in a kernel of Myelin's: behind it is what is in front of it.

        A fused Q lets that kernel write INT8, but for one that goes with the DQ behind it into a kernel of floats
        (gemm-mlp-trt10: MulMinMaxRounCastCastMul).
        """
        source = self._passed.get(id(layer.data), layer.data)
        if layer.out.is_output:
            self._renamed[source.memory.name] = layer.out.memory.name
        self._passed[id(layer.out)] = source
        reader = layer.out.single_consumer()
        while reader is not None and reader.id in fused and reader.kind == LayerKind.SHUFFLE:
            reader = reader.out.single_consumer()
        alone = reader is not None and reader.kind == LayerKind.COPY and reader.id not in fused
        quantizes = layer.kind == LayerKind.COPY and layer.op == "QuantizeLinear"
        if quantizes and not alone and len(layer.data.consumers) == 1:
            self._listed_as[id(source)] = self.precision(layer.out)

    def _edge(self, tensor: Tensor) -> TensorPrecision:
        tensor = self._passed.get(id(tensor), tensor)
        found = self._edges.get(id(tensor))
        if found is None:
            written = self._listed_as.get(id(tensor)) or self.precision(tensor)
            found = self._edges[id(tensor)] = TensorPrecision(tensor.memory.name, written)
        return found

    def regions(self) -> list[MyelinRegion]:
        """What Myelin takes, with the Q and DQ that its layers absorbed beside those that it took."""
        regions = []
        types = {c.name: c.is_int8 for c in self.convolutions if c.is_product}
        types.update(dict.fromkeys(self.float_products, False))
        pieces = (
            {p.square.name for p in layer_norms(self._model)} if self._network.regions else set()
        )
        for region in self._network.regions:
            inside = {n: is_qdq(self._node(n)) for n in region.nodes}
            nodes, taken = (
                [n for n, quantizes in inside.items() if quantizes is wanted]
                for wanted in (False, True)
            )
            known = {n: found for n in nodes if (found := self._node(n)) is not None}
            nodes.sort(key=lambda n: known[n].index if n in known else -1)
            ops = [node.op for node in known.values()]
            regions.append(
                replace(
                    region,
                    nodes=nodes,
                    fused=list(dict.fromkeys([*region.fused, *taken])),
                    products=sum(n in types for n in nodes),
                    int8_products=sum(types.get(n, False) for n in nodes),
                    softmaxes=ops.count("Softmax"),
                    norms=sum(op in NORMALIZES for op in ops) + sum(n in pieces for n in nodes),
                )
            )
        return regions

    # Convolutions ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def _varying(self) -> frozenset[str]:
        return View(self._model).varying

    def _convolution(self, node: Node) -> ConvOutcome | None:
        constant = is_constant_upstream(self._model, node.input(1))
        layer = self._by_node.get(node.name)
        if layer is None or not layer.inputs or not (layer.int8 or node.output in self._varying):
            return None  # dead: nothing reads it; or computed from constants alone, while building
        if node.op == "Einsum" or (
            node.op == "MatMul"
            and not constant
            and not any(is_dq(self._model.producer(i)) for i in node.inputs)
        ):
            self.float_products.append(node.name)
            return None
        weights = "constant" if constant else "computed"
        if layer.in_myelin:
            plain = float_precision(self._model.elem_type(node.output), self._target.strongly_typed)
            return ConvOutcome(
                node.index,
                node.name,
                node.op,
                weights,
                plain,
                [plain],
                plain,
                evidence=Evidence.ASSUMED,
                bare=layer.out.source,
            )
        data = self.precision(layer.data)
        compute = _integer(layer) if layer.int8 else data if data.is_float else Precision.FLOAT
        inputs = [compute if layer.int8 else data]
        if layer.residual is not None:
            inputs.append(self.precision(layer.residual))
        evidence, cases = self._proof(layer)
        activation = layer.fusion.activation
        return ConvOutcome(
            node.index,
            node.name,
            node.op,
            weights,
            compute,
            inputs,
            self.precision(layer.out),
            layer=layer.fusion.merged_name or layer.name if layer.region is None else None,
            fused=[n for n in layer.nodes if n != node.name and not is_qdq(self._node(n))],
            evidence=evidence,
            cases=list(cases),
            activation=activation.op if activation is not None else "",
            bare=layer.fusion.tensor_before_activation or layer.out.source,
        )

    def _proof(self, layer: Layer) -> tuple[Evidence, tuple[str, ...]]:
        """How well a layer's outcome is proven, with the conversions in front, and the ids of its cases."""
        own = tuple(layer.cases)
        copies = frozenset(
            case for above in layer.producers if above.kind is _COPY for case in above.cases
        )
        found = self._proven.get((own, copies))
        if found is None:
            found = self._proven[own, copies] = (
                weakest_evidence([*own, *copies], self._target),
                tuple(map(case_id, own)),
            )
        return found

    def _node(self, name: str) -> Node | None:
        try:
            return self._model.node(name)
        except KeyError:
            return None


Assume = Mapping[str, str]
"""Choices by name, such as ``{"silu-add": "fused"}``."""


def simulate(model: Model, target: Target, assume: Assume | None = None) -> Prediction:
    """The prediction of a classic target, without findings.

    Where it rests on a choice on which reports differ, the other choice is simulated as well and reported in
    ``assumptions``; a model without such places is simulated once.

    Args:
        model: The model.
        target: The target; its own default is assumed unless ``assume`` says otherwise.
        assume: Choices by name.

    Raises:
        QdqtoolError: A choice has no such name or value.
    """
    chosen = apply_assumptions(target, assume)
    prediction, places = _once(model, chosen)
    if places:
        value = SiluAdd.FUSED if chosen.residual_through_activation else SiluAdd.APART
        other = next(v for v in SiluAdd if v != value)
        alternative, _ = _once(model, _with(target, other))
        if _visible(alternative) != _visible(prediction):
            given = assume is not None and SILU_ADD in assume
            prediction.assumptions.append(
                Assumption(
                    SILU_ADD,
                    value,
                    {other: _counts(alternative)},
                    places,
                    given,
                    "chosen by the user" if given else target.residual_proof,
                )
            )
    return prediction


def simulate_without_alternatives(model: Model, target: Target) -> Prediction:
    """The prediction of exactly this target: no other choice is looked at."""
    return _once(model, target)[0]


def apply_assumptions(target: Target, assume: Assume | None) -> Target:
    """The target with the user's choices in place of its own.

    Raises:
        QdqtoolError: A choice has no such name or value, or is none on the target.
    """
    for name, value in (assume or {}).items():
        values = CHOICES.get(name)
        if values is None:
            raise QdqtoolError(
                f"nothing is assumed by the name '{name[:40]}'; choose one of {', '.join(CHOICES)}",
                code="unknown-choice",
                parameter="assume",
            )
        if value not in values:
            raise QdqtoolError(
                f"{name} cannot be '{value[:40]}'; choose one of {', '.join(values)}",
                code="unknown-choice",
                parameter="assume",
            )
        if target.is_rtx:
            raise QdqtoolError(
                f"{name} is settled on {target.name}: no pointwise Add joins a convolution there",
                code="option-without-effect",
                parameter="assume",
            )
        target = _with(target, SiluAdd(value))
    return target


def _with(target: Target, value: SiluAdd) -> Target:
    return replaced(target, residual_through_activation=value == SiluAdd.FUSED)


def _once(model: Model, target: Target) -> tuple[Prediction, tuple[str, ...]]:
    network = importer.build(model)
    run = pipeline.run(network, target)
    outcome = Outcome(model, network, target)
    rules = describe_rules((c for layer in network.layers.values() for c in layer.cases), target)
    prediction = Prediction(
        ModelInfo(model.path, model.sha256, model.opset, len(model.nodes)),
        target.name,
        convolutions=outcome.convolutions,
        layers=outcome.layers,
        trace=run.trace,
        refusals=run.refusals,
        conversions=len(outcome.conversion_nodes),
        conversion_nodes=outcome.conversion_nodes,
        target_evidence="; ".join(filter(None, (f"{target.evidence}: {target.proof}", rules))),
        counts=dict(network.counts),
        regions=outcome.regions(),
        float_products=outcome.float_products,
    )
    return prediction, tuple(network.adds_after_activation)


def _counts(prediction: Prediction) -> Counts:
    summary = prediction.summary()
    return Counts(summary["int8"], summary["int8_to_int8"], summary["conversions"])


def _visible(prediction: Prediction) -> object:
    """What users see of it: types and fusions of every convolution, and the conversions."""
    return prediction.conversion_nodes, [
        (c.precision, tuple(c.inputs), c.output, tuple(c.fused)) for c in prediction.convolutions
    ]
