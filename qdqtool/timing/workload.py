"""Work of the layers of a predicted engine.

Nodes and types come from the simulated engine, shapes from the ONNX model.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from onnx import TensorProto

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import is_qdq, precision_of
from qdqtool.patterns.heads import is_computed_product
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.model_variants import TensorShapes
from qdqtool.timing.regions import RegionNodes, find_region_nodes
from qdqtool.timing.work import (
    LayerWork,
    LayoutChange,
    bytes_per_element,
    find_layout_changes,
    product_work,
)
from qdqtool.trt.result import EngineLayer, Prediction
from qdqtool.trt.targets import target_named


@dataclass(slots=True)
class ExtraKernel:
    """A kernel of the engine that the simulated passes do not list.

    Examples: a change of layout, a reformat at an input or output of the network, a Myelin region.

    Attributes:
        name: Name of the kernel.
        work: Work of the kernel.
        layout_change: Layout change that the kernel performs. None for other kernels.
        activation_of: Layer whose activation the kernel computes. Empty for other kernels.
    """

    name: str
    work: LayerWork
    layout_change: LayoutChange | None = None
    activation_of: str = ""


@dataclass
class EngineWorkload:
    """Work of an engine.

    Attributes:
        layers: Work of each predicted layer, in the prediction's order.
        extras: Kernels that the prediction does not list.
        unknown: Names of layers and nodes with unknown shapes.
    """

    layers: list[LayerWork] = field(default_factory=list)
    extras: list[ExtraKernel] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def all_work(self) -> list[LayerWork]:
        """Work of the layers, then of the extra kernels."""
        return [*self.layers, *(extra.work for extra in self.extras)]


_MAPPING_KINDS = (work.POINTWISE, work.COPY, work.POOL, work.RESIZE, work.SOFTMAX)
_QUANTIZERS_WITH_COPY = 3
_SEPARATE_ACTIVATIONS = ("Sigmoid", "Mish", "HardSwish")


def predict_workload(
    model: Model,
    prediction: Prediction,
    float_type: Precision = Precision.FP16,
    batch: float = 1.0,
    gpu: Gpu | None = None,
) -> EngineWorkload:
    """Return the work of a predicted engine.

    Args:
        model: The model, without symbolic dimensions.
        prediction: Prediction for the model.
        float_type: Type of float layers if the builder chooses: FP16 (``--fp16``) or FP32.
        batch: Batch size to estimate for, divided by the model's batch size.
        gpu: GPU, on which layout changes depend. None: a GPU with TF32, older than Blackwell.
    """
    return _WorkloadBuilder(model, prediction, float_type, batch, gpu).run()


class _WorkloadBuilder:
    def __init__(
        self,
        model: Model,
        prediction: Prediction,
        float_type: Precision,
        batch: float,
        gpu: Gpu | None,
    ) -> None:
        self.model, self.prediction = model, prediction
        self.float_type, self.batch = float_type, batch
        self.has_tf32 = gpu is None or gpu.has_tf32
        self.has_myelin = gpu is not None and gpu.has_fused_conversions
        self.target = target_named(prediction.target)
        self.regions = find_region_nodes(model) if self.target.regions else frozenset()
        self.precisions = {c.name: c.precision for c in prediction.convolutions}
        self.consumers: dict[str, list[EngineLayer]] = defaultdict(list)
        for layer in prediction.layers:
            for edge in layer.inputs:
                self.consumers[edge.tensor].append(layer)
        self.engine_elements: dict[str, float] = {}  # number of elements, by tensor of the engine
        self.fp32_tensors: set[str] = set()  # tensors that are FP32 although floats are FP16
        self.narrowed: dict[str, float] = {}  # number of elements, by tensor reformatted to FP16
        # Output of a separate activation kernel, by the tensor that its convolution writes.
        self.activated: dict[str, str] = {}
        # Inputs that a product in a region already reads, with the type of that product.
        self.read_by_products: set[tuple[str, Precision]] = set()
        self.shapes = TensorShapes(model)
        self.region_nodes = RegionNodes(model, self._shape, float_type)
        self.result = EngineWorkload()

    def run(self) -> EngineWorkload:
        covered: set[str] = set()
        for layer in self.prediction.layers:
            covered.update(layer.nodes)
            layer_work = self._region_work(layer) or self._with_fp32_if_needed(
                layer, self._layer_work(layer)
            )
            if layer_work is None:
                self.result.unknown.append(layer.name)
                layer_work = LayerWork(work.UNKNOWN, self.float_type, self.float_type)
            self.result.layers.append(self._scale_to_batch(layer_work))
        self._write_outputs_in_fp32()
        engine, mapped = self._separate_activations()
        if self.has_myelin:
            self._fuse_conversions(mapped)
        elif not self.target.is_rtx:
            self._add_layout_changes(engine)
        if self.target.reshapes_before_resize:
            self._add_reshapes()
            self._add_copies_for_quantizers()
        self._add_unlisted_nodes(covered)
        self._add_edge_reformats()
        return self.result

    def _write_outputs_in_fp32(self) -> None:
        """Record the network outputs that INT8 convolutions write in FP32.

        These outputs need no reformat. Seen for a U-Net on 10.16.2 and in all recorded logs of
        classifiers.
        """
        for layer, layer_work in zip(self.prediction.layers, self.result.layers, strict=True):
            if layer_work.kind in work.COMPUTING and not layer_work.precision.is_float:
                written = layer_work.written_as == Precision.FP32
                outputs = [e.tensor for e in layer.outputs if self.model.is_output(e.tensor)]
                self.fp32_tensors.update(outputs if written else ())

    def _empty_work(self) -> LayerWork:
        return LayerWork(work.NOTHING, self.float_type, self.float_type)

    def _region_work(self, layer: EngineLayer) -> LayerWork | None:
        """Return the work of a fused attention, or of a layer without weights in a region.

        None for other layers.
        """
        if layer.type == "Reformat" and self._is_concat_copy_in_region(layer):
            return self._empty_work()
        nodes = self._layer_nodes(layer)
        products = [node for node in nodes if is_computed_product(self.model, node)]
        if len(products) > 1:  # a fused attention
            scores, values = products[0], products[-1]
            return self.region_nodes.attention_work(scores, values, self._edge_types(layer)[1])
        if not layer.nodes or not self.regions.issuperset(layer.nodes):
            return None
        if any(node.op in WEIGHTED and self._is_fixed(node.input(1)) for node in nodes):
            return None
        for node in nodes:
            node_work = self.region_nodes.node_work(node)
            if node_work.kind != work.NOTHING:
                return node_work
        return self._empty_work()

    def _is_concat_copy_in_region(self, copy: EngineLayer) -> bool:
        """Return whether a copy belongs to a Concat in a region, where Myelin fuses the copies."""
        concat = self.model.producer(copy.outputs[0].tensor)
        if concat is not None and is_qdq(concat):
            concat = self.model.producer(concat.input(0))
        return concat is not None and concat.name in self.regions

    def _merge_product(self, tensor: str, name: str, product: LayerWork) -> LayerWork:
        """Return the work of a product, with 0 kernels if an earlier kernel also computes it.

        The product then also has 0 bytes to read.

        In a region, one kernel of Myelin computes all products that read one tensor, such as query,
        key and value, or the experts of a mixture. Evidence: on 11.3, a ViTPose with 24 blocks has
        324 to 348 layers.
        """
        if name not in self.regions or product.kind != work.CONV:
            return product
        key = (tensor, product.precision)
        if key in self.read_by_products:
            return replace(product, read=0.0, steps=0.0)
        self.read_by_products.add(key)
        return product

    def _separate_activations(self) -> tuple[list[tuple[EngineLayer, LayerWork]], set[str]]:
        """Add kernels for the activations that TensorRT does not fuse into their convolution.

        An INT8 convolution that writes float does not fuse SiLU. Evidence: YOLOv8n has 93 computing
        layers on 8.6.1 and on 10.14.1. Of these layers, 44 (8.6.1) and 49 (10.14.1) write float,
        although only 25 convolutions write float. Users reported separate activations also on 8.4
        and 8.5 (NVIDIA/TensorRT#2204, #3861).
        If the builder chooses between FP16 and FP32, the convolution writes FP32. FP32 has the
        linear layout, so that no layout change is needed. Evidence: counts on 8.6.1, where 12
        layers write FP32, and 25 reformats do not change the type.

        Returns:
            The engine's layers with their work, and the tensors next to pointwise, copy, pooling,
            resize and softmax kernels.
        """
        engine: list[tuple[EngineLayer, LayerWork]] = []
        mapped: set[str] = set()
        for i, layer in enumerate(self.prediction.layers):
            layer_work = self.result.layers[i]
            if layer_work.kind in _MAPPING_KINDS:
                mapped.update(edge.tensor for edge in (*layer.inputs, *layer.outputs))
            if not self._has_separate_activation(layer, layer_work):
                engine.append((layer, layer_work))
                continue
            convolution = layer_work
            if not self._is_summed(layer) and self._has_open_output(layer):
                convolution = layer_work.with_fp32_output()
            self.result.layers[i] = convolution
            results = []
            for edge in layer.outputs:
                result = replace(edge, tensor=f"{edge.tensor} before its activation")
                results.append(result)
                self.activated[result.tensor] = edge.tensor
                mapped.add(edge.tensor)
            activation = EngineLayer(
                f"PWN after {layer.name}", "PointWise", results, list(layer.outputs)
            )
            activation_work = LayerWork(
                work.POINTWISE,
                convolution.written_as,
                layer_work.written_as,
                read=convolution.written,
                written=layer_work.written,
            )
            self.result.extras.append(
                ExtraKernel(activation.name, activation_work, activation_of=layer.name)
            )
            engine.append((replace(layer, outputs=results), convolution))
            engine.append((activation, activation_work))
        return engine, mapped

    def _has_separate_activation(self, layer: EngineLayer, layer_work: LayerWork) -> bool:
        return (
            layer_work.kind in work.COMPUTING
            and not self.target.is_rtx
            and not layer_work.precision.is_float
            and layer_work.written_as.is_float
            and any(node.op in _SEPARATE_ACTIVATIONS for node in self._layer_nodes(layer))
        )

    def _add_layout_changes(self, engine: list[tuple[EngineLayer, LayerWork]]) -> None:
        outside = [pair for pair in engine if self.regions.isdisjoint(pair[0].nodes)]
        changes = find_layout_changes(
            outside,
            lambda tensor: self._shape(self.activated.get(tensor, tensor)),
            self.model.inputs,
            self.model.outputs,
        )
        for change in changes:
            if change.needs_tf32 and not self.has_tf32:
                continue
            moved = change.elements * bytes_per_element(change.precision)
            self._add_extra(
                f"layout of {self.activated.get(change.tensor, change.tensor)}",
                _make_copy(change.precision, change.channels, moved),
                change,
            )

    def _add_reshapes(self) -> None:
        """Add the reshape before each INT8 Resize whose result is copied into a Concat.

        A U-Net on 10.16.2 has such a kernel in each of its four decoder blocks with a Concat.
        """
        for layer, layer_work in zip(self.prediction.layers, self.result.layers, strict=True):
            if layer.type != "Resize" or layer_work.precision.is_float:
                continue
            consumers = [c for edge in layer.outputs for c in self.consumers[edge.tensor]]
            if any(consumer.type == "Reformat" for consumer in consumers):
                reshape = _make_copy(layer_work.precision, layer_work.channels, layer_work.read)
                self.result.extras.append(ExtraKernel(f"reshape before {layer.name}", reshape))

    def _add_copies_for_quantizers(self) -> None:
        """Add a copy kernel for each float output of a convolution with at least three Qs.

        In a U-Net on 10.16.2, the first Q reads such a tensor in the convolution's layout, and the
        other Qs read a copy. On Blackwell, no copy is added.
        """
        if self.has_myelin:
            return
        for layer, layer_work in zip(self.prediction.layers, self.result.layers, strict=True):
            if layer_work.kind not in work.COMPUTING or not layer_work.written_as.is_float:
                continue
            for edge in layer.outputs:
                quantizers = [c for c in self.consumers[edge.tensor] if c.type == "Conversion"]
                if len(quantizers) >= _QUANTIZERS_WITH_COPY:
                    precision, channels = layer_work.written_as, layer_work.columns
                    copy = _make_copy(precision, channels, layer_work.written)
                    self.result.extras.append(ExtraKernel(f"copy of {edge.tensor}", copy))

    def _has_open_output(self, layer: EngineLayer) -> bool:
        """Return whether the builder can choose FP16 or FP32 for a layer's float output.

        True for TensorRT 8.x if FP16 is allowed. Later versions were seen only strongly typed.
        """
        stored = {self.model.elem_type(edge.tensor) for edge in layer.outputs}
        return (
            not self.target.assumes_8x_cases
            and self.float_type == Precision.FP16
            and stored <= {TensorProto.FLOAT, 0}
        )

    def _is_summed(self, layer: EngineLayer) -> bool:
        """Return whether a layer's only consumer is an Add.

        The Add and the activation are then one kernel.
        """
        consumers = [c for edge in layer.outputs for c in self.consumers[edge.tensor]]
        return len(consumers) == 1 and any(
            node.op in ("Add", "Sum") for node in self._layer_nodes(consumers[0])
        )

    def _fuse_conversions(self, mapped: set[str]) -> None:
        """Remove the work of conversions that Blackwell fuses into neighboring kernels.

        On Blackwell, Myelin compiles the whole network. For example, one kernel contains DQ, DQ,
        Add, ReLU and Q, without layout changes (bev-blackwell-trt10).

        Args:
            mapped: Tensors next to pointwise, copy, pooling, resize and softmax kernels.
        """
        for i, layer in enumerate(self.prediction.layers):
            tensors = {edge.tensor for edge in (*layer.inputs, *layer.outputs)}
            if layer.type == "Conversion" and not tensors.isdisjoint(mapped):
                self.result.layers[i] = self._empty_work()

    def _scale_to_batch(self, layer_work: LayerWork) -> LayerWork:
        if self.batch == 1:
            return layer_work
        return replace(
            layer_work,
            rows=layer_work.rows * self.batch,
            read=layer_work.read * self.batch,
            written=layer_work.written * self.batch,
        )

    def _add_extra(
        self, name: str, kernel_work: LayerWork, change: LayoutChange | None = None
    ) -> None:
        self.result.extras.append(ExtraKernel(name, self._scale_to_batch(kernel_work), change))

    # Types and sizes --------------------------------------------------------------------------

    def _with_fp32_if_needed(
        self, layer: EngineLayer, layer_work: LayerWork | None
    ) -> LayerWork | None:
        """Return the work, with an FP32 output if the layer writes FP32 in an FP16 build.

        None if the work is unknown.

        Convolutions of few channels read INT8 in groups of four channels. Kernels for this layout
        write INT8 or FP32, never FP16. Evidence: every autotuned combination in the logs of
        yolo-resnet18-orin-trt8502, resnet18-qat-rtx2000-trt8510 and
        bevfusion-camera-rtx3080ti-trt8600. Pointwise and pooling layers that read such an output
        compute in FP32. Other consumers get a reformat to FP16, as in the engine of
        resnet18-a100-qat.
        """
        if layer_work is None or not self._is_written_in_fp32(layer, layer_work):
            return layer_work
        for edge in layer.outputs:
            consumers = self.consumers[edge.tensor]
            if all(_has_any_float_kernel(c) or c.type == "Conversion" for c in consumers):
                self.fp32_tensors.add(edge.tensor)
            elif count := self._count_elements(edge.tensor):
                self.narrowed[edge.tensor] = count
        return layer_work.with_fp32_output()

    def _is_written_in_fp32(self, layer: EngineLayer, layer_work: LayerWork) -> bool:
        if self.float_type == Precision.FP32 or not layer_work.written_as.is_float:
            return False
        if layer_work.precision == Precision.INT8 and layer_work.kind in work.COMPUTING:
            if layer_work.channels < work.FEW_CHANNELS:
                return True
        reads_fp32 = any(edge.tensor in self.fp32_tensors for edge in layer.inputs)
        return reads_fp32 and _has_any_float_kernel(layer)

    def _resolve_type(self, precision: Precision, tensor: str = "") -> Precision:
        """Return the type of a tensor in the engine.

        A float input or output of the network has its type in the file. Any other tensor whose
        float type is unknown has the float type of the engine.
        """
        is_edge = tensor and (tensor in self.model.inputs or self.model.is_output(tensor))
        if precision.is_float and is_edge:
            stored = precision_of(self.model.elem_type(tensor))
            return Precision.FP32 if stored == Precision.UNKNOWN else stored
        if precision.is_float and tensor in self.fp32_tensors:
            return Precision.FP32
        is_fixed = precision == Precision.FP32 and self.target.strongly_typed
        is_open = precision in (Precision.FLOAT, Precision.FP32, Precision.UNKNOWN)
        return self.float_type if is_open and not is_fixed else precision

    def _count_elements(self, tensor: str) -> float | None:
        if tensor in self.engine_elements:
            return self.engine_elements[tensor]
        shape = self.shapes.get(tensor)
        return None if shape is None else float(math.prod(shape))

    def _layer_nodes(self, layer: EngineLayer) -> list[Node]:
        """Return the nodes of a layer, except Q and DQ."""
        nodes = map(self.model.find_node, layer.nodes)
        return [node for node in nodes if node is not None and not is_qdq(node)]

    # Layers -----------------------------------------------------------------------------------

    def _count_channels(self, layer: EngineLayer) -> float:
        """Return the channels of a layer's first input; 64 if they are unknown."""
        shape = self._shape(layer.inputs[0].tensor) if layer.inputs else None
        return float(shape[1]) if shape and len(shape) > 2 else 64.0

    def _layer_work(self, layer: EngineLayer) -> LayerWork | None:
        nodes = self._layer_nodes(layer)
        weighted = [node for node in nodes if node.op in WEIGHTED]
        if weighted:
            return self._weighted_work(layer, nodes, weighted)
        input_type, output_type = self._edge_types(layer)
        if _is_view(layer, nodes):
            return LayerWork(work.NOTHING, input_type, output_type)
        default = work.SHUFFLE if layer.type == "Shuffle" else work.POINTWISE
        kind = work.LAYER_KINDS.get(layer.type, default)
        read, written = self._count_moved(layer, nodes, kind)
        if read is None or written is None:
            return None
        return LayerWork(
            kind,
            input_type,
            output_type,
            channels=self._count_channels(layer),
            read=read * bytes_per_element(input_type),
            written=written * bytes_per_element(output_type),
        )

    def _edge_types(self, layer: EngineLayer) -> tuple[Precision, Precision]:
        """Return the types of a layer's first input and first output."""
        input_type, output_type = (
            self._resolve_type(edges[0].precision, edges[0].tensor) if edges else None
            for edges in (layer.inputs, layer.outputs)
        )
        input_type = input_type or self.float_type
        return input_type, output_type or input_type

    def _count_moved(
        self, layer: EngineLayer, nodes: list[Node], kind: str
    ) -> tuple[float | None, float | None]:
        """Return the numbers of elements that a layer without products reads and writes.

        A number is None if a shape that it depends on is unknown.
        """
        if nodes:
            outside = dict.fromkeys(self._outside_inputs(nodes))
            read = self._sum_elements(outside)
            written = self._count_elements(nodes[-1].output)
            if layer.outputs and written is not None:
                self.engine_elements.setdefault(layer.outputs[0].tensor, written)
            if read is not None and written is not None and kind == work.POINTWISE:
                read = min(read, len(outside) * max(written, 1.0))
            return read, written
        sizes = []
        for edge in layer.inputs:
            size = self._count_elements(edge.tensor)
            is_moved = layer.type == "Reformat" or not self.model.is_constant(edge.tensor)
            if size is not None and is_moved:  # a Concat copies constants, too
                sizes.append(size)
        if sizes:
            return sum(sizes), max(sizes)
        is_free = layer.type in ("PointWise", "Scale", "ElementWise")
        return (0.0, 0.0) if is_free else (None, None)

    def _sum_elements(self, tensors: Iterable[str]) -> float | None:
        total = 0.0
        for tensor in tensors:
            size = self._count_elements(tensor)
            if size is None:
                return None
            total += size
        return total

    def _outside_inputs(self, nodes: list[Node]) -> list[str]:
        """Return the tensors that a group of nodes reads and does not produce, except constants."""
        inside = {tensor for node in nodes for tensor in node.outputs}
        return [
            tensor
            for node in nodes
            for tensor in node.inputs
            if tensor and tensor not in inside and not self.model.is_constant(tensor)
        ]

    def _weighted_work(
        self, layer: EngineLayer, nodes: list[Node], weighted: list[Node]
    ) -> LayerWork | None:
        products = []
        for node in weighted:
            product = product_work(node, self._shape)
            if product is None:
                return None
            products.append(product)
        main = products[0]
        input_type, output_type = self._edge_types(layer)
        precision = self._compute_type(weighted[0], input_type)
        columns = sum(product.columns for product in products)
        pool = next((node for node in nodes if node.op in ("MaxPool", "AveragePool")), None)
        pooled = None if pool is None else self._count_elements(pool.output)
        written = sum(pooled or product.written for product in products)
        read = main.read * bytes_per_element(input_type)
        for other in layer.inputs[1:]:
            # A residual, or a bias from an Identity (as torch exports equal biases).
            elements = self._count_elements(other.tensor)
            if elements is None:
                elements = main.written
            other_type = self._resolve_type(other.precision, other.tensor)
            read += min(elements, main.written) * bytes_per_element(other_type)
        for edge in layer.outputs:
            if self.shapes.get(edge.tensor) is None:
                self.engine_elements.setdefault(edge.tensor, written / len(layer.outputs))
        layer_work = replace(
            main,
            precision=precision,
            written_as=output_type,
            columns=columns,
            read=read,
            weights=columns * main.depth * main.groups * bytes_per_element(precision),
            written=written * bytes_per_element(output_type),
        )
        return self._merge_product(layer.inputs[0].tensor, weighted[0].name, layer_work)

    def _compute_type(self, node: Node, input_type: Precision) -> Precision:
        """Return the type in which a convolution computes.

        The type is float if the input is float and only the weights are INT8.
        """
        precision = self.precisions.get(node.name)
        return input_type if precision is None else self._resolve_type(precision)

    def _shape(self, tensor: str) -> tuple[int, ...] | None:
        shape = self.shapes.get(tensor)
        if shape is None:
            producer = self.model.producer(tensor)
            if producer is not None and is_qdq(producer):
                return self._shape(producer.input(0))
        return shape

    # Kernels that the simulation does not list ------------------------------------------------

    def _add_unlisted_nodes(self, covered: set[str]) -> None:
        """Add kernels for the nodes that no predicted layer contains.

        If the target names layers, these nodes are in Myelin's regions. Otherwise, these are all
        nodes.
        """
        chain: list[Node] = []  # nodes that share a pointwise kernel
        outputs: set[str] = set()  # outputs of the nodes in `chain`
        for node in self.model.ordered:
            if (
                node.name in covered
                or node.op in work.FREE_OPERATORS
                or not self._is_computed_in_each_run(node)
            ):
                continue
            joins = self._is_chain_member(node)
            if not joins or outputs.isdisjoint(node.inputs):
                self._add_chain(chain)
                outputs.clear()
            if joins:
                chain.append(node)
                outputs.update(node.outputs)
            else:
                self._add_unlisted_node(node)
        self._add_chain(chain)

    def _is_chain_member(self, node: Node) -> bool:
        if node.op in WEIGHTED or self._is_in_region(node):
            return False
        is_pool = node.op in ("MaxPool", "AveragePool", "Resize")
        return not is_pool and node.op not in work.SEPARATE_OPERATORS

    def _is_in_region(self, node: Node) -> bool:
        is_weighted = node.op in WEIGHTED and self._is_fixed(node.input(1))
        return node.name in self.regions and not is_weighted

    def _add_unlisted_node(self, node: Node) -> None:
        if self._is_in_region(node):
            node_work = self.region_nodes.node_work(node)
            if node_work.kind != work.NOTHING:
                self._add_extra(node.name, node_work)
        elif node.op in WEIGHTED:
            self._add_product(node)
        else:
            self._add_kernel([node], work.SOFTMAX if "oftmax" in node.op else work.POOL)

    def _add_product(self, node: Node) -> None:
        product = product_work(node, self._shape)
        if product is None:
            self._add_unknown_kernel(node.name)
            return
        precision, size = self._compute_type(node, self.float_type), 0.0
        if not self._is_fixed(node.input(1)):
            size = self._count_elements(node.input(1)) or 0.0
        product = replace(
            product,
            precision=precision,
            written_as=self.float_type,
            read=(product.read + size) * bytes_per_element(precision),
            weights=0.0 if size else product.weights * bytes_per_element(precision),
            written=product.written * bytes_per_element(self.float_type),
        )
        self._add_extra(node.name, self._merge_product(node.input(0), node.name, product))

    def _is_computed_in_each_run(self, node: Node) -> bool:
        return (
            not all(self._is_fixed(tensor) for tensor in node.inputs if tensor)
            and self._count_elements(node.output) != 0
        )

    def _is_fixed(self, tensor: str) -> bool:
        """Return whether a tensor is computed only once, from constants and shapes."""
        return self.model.is_constant(tensor) or tensor in self._constants_at_run_time

    @functools.cached_property
    def _constants_at_run_time(self) -> frozenset[str]:
        fixed: set[str] = set()
        for node in self.model.ordered:
            is_fixed = node.op in ("Shape", "Size")
            if not is_fixed and not node.op.startswith("Random") and not node.captured:
                inputs = filter(None, node.inputs)
                is_fixed = all(t in fixed or self.model.is_constant(t) for t in inputs)
            if is_fixed:
                fixed.update(filter(None, node.outputs))
        return frozenset(fixed)

    def _add_chain(self, chain: list[Node]) -> None:
        if chain:
            self._add_kernel(chain, work.POINTWISE)
            chain.clear()

    def _add_unknown_kernel(self, name: str) -> None:
        """Add a minimal kernel for an operator of unknown shapes."""
        self.result.unknown.append(name)
        self._add_extra(name, LayerWork(work.UNKNOWN, self.float_type, self.float_type))

    def _add_kernel(self, nodes: list[Node], kind: str) -> None:
        read = self._sum_elements(self._outside_inputs(nodes))
        written, name = self._count_elements(nodes[-1].output), nodes[-1].name
        if read is None or written is None:
            self._add_unknown_kernel(name)
            return
        size = bytes_per_element(self.float_type)
        kernel = LayerWork(
            kind, self.float_type, self.float_type, read=read * size, written=written * size
        )
        self._add_extra(name, kernel)

    def _add_edge_reformats(self) -> None:
        """Add reformats of FP32 inputs and outputs of a network that is FP16 inside.

        An input that a Q reads, and an output that its layer writes in FP32, need no reformat. FP32
        tensors inside the network with FP16 consumers get a reformat as well.
        """
        if self.float_type == Precision.FP32:
            return
        for tensor, elements in self.narrowed.items():
            self._add_reformat(tensor, elements, Precision.FP32, Precision.FP16)
        first_consumers = {
            layer.inputs[0].tensor: layer for layer in self.prediction.layers if layer.inputs
        }
        for tensor in filter(self._is_fp32, self.model.inputs):
            count, layer = self._count_elements(tensor), first_consumers.get(tensor)
            if count and (layer is None or layer.type != "Conversion"):
                self._add_reformat(tensor, count, Precision.FP32, Precision.FP16)
        for tensor in filter(self._is_fp32, self.model.outputs):
            count = self._count_elements(tensor)
            if count and tensor not in self.fp32_tensors:
                self._add_reformat(tensor, count, Precision.FP16, Precision.FP32)

    def _is_fp32(self, tensor: str) -> bool:
        return self.model.elem_type(tensor) == TensorProto.FLOAT

    @functools.cached_property
    def _layout_kernels(self) -> dict[str, list[ExtraKernel]]:
        """Kernels that change a tensor's layout, by tensor.

        The result is cached, so all layout changes must be added before the first access.
        """
        kernels: dict[str, list[ExtraKernel]] = defaultdict(list)
        for extra in self.result.extras:
            if extra.layout_change is not None:
                kernels[extra.layout_change.tensor].append(extra)
        return kernels

    def _add_reformat(
        self, tensor: str, count: float, read_type: Precision, written_type: Precision
    ) -> None:
        """Add a kernel that changes the float type of a tensor.

        If the tensor also changes its layout, one kernel does both (seen in an FP16 engine on an
        A100).
        """
        channels = 64.0
        changes = self._layout_kernels.get(tensor)
        if changes:
            change = changes.pop(0)
            self.result.extras.remove(change)
            channels = change.work.channels
        reformat = LayerWork(
            work.CONVERSION,
            read_type,
            written_type,
            channels=channels,
            read=bytes_per_element(read_type) * count,
            written=bytes_per_element(written_type) * count,
        )
        self._add_extra(f"reformat of {tensor}", reformat)


def _make_copy(precision: Precision, channels: float, moved: float) -> LayerWork:
    """Return the work of a kernel that reads and writes `moved` bytes of one type."""
    return LayerWork(
        work.REFORMAT, precision, precision, channels=channels, read=moved, written=moved
    )


def _has_any_float_kernel(layer: EngineLayer) -> bool:
    """Return whether a layer has kernels for any float type, and keeps its input's type."""
    return layer.type in ("Pooling", "PointWise", "ElementWise", "Scale", "NoOp", "Shuffle")


def _is_view(layer: EngineLayer, nodes: Iterable[Node]) -> bool:
    if layer.type == "NoOp":
        return True
    return layer.type in ("Shuffle", "Identity") and all(n.op != "Transpose" for n in nodes)
