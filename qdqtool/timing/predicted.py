"""The work of the layers of a predicted engine: a simulation gives nodes and types, the ONNX model the shapes."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from onnx import TensorProto

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import is_qdq, precision_of
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.twin import Shapes
from qdqtool.timing.work import (
    Reformat,
    Work,
    product_of,
    reformats_of,
    region_nodes,
    width,
    work_in_region,
)
from qdqtool.trt.targets import target_named
from qdqtool.types import EngineLayer, Precision, Prediction


@dataclass(slots=True)
class Extra:
    """A kernel that the simulation does not list: a change of layout, a reformat at the edge, a Myelin region.

    ``reformat`` is the change of layout that it is, if it is one; ``behind`` the layer whose activation it computes.
    """

    name: str
    work: Work
    reformat: Reformat | None = None
    behind: str = ""


@dataclass
class Workload:
    """What an engine does."""

    layers: list[Work] = field(
        default_factory=list
    )  # the work of each predicted layer, in the prediction's order
    extras: list[Extra] = field(default_factory=list)  # kernels beside them
    # names of layers whose shapes are not known: they count as nothing but a kernel's floor
    unknown: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Work]:
        return [*self.layers, *(e.work for e in self.extras)]


_MAPPING = (work.POINTWISE, work.COPY, work.POOL, work.RESIZE, work.SOFTMAX)


def workload_of(
    model: Model,
    prediction: Prediction,
    plain: Precision = Precision.FP16,
    batch: float = 1.0,
    gpu: Gpu | None = None,
) -> Workload:
    """The work of a predicted engine of a model whose shapes have no symbolic dimensions.

    ``plain`` is what the builder takes for a float: FP16 (``--fp16`` given) or FP32; ``batch`` is a factor on the
    model's own. The GPU decides about changes of layout; None is one with TF32 before Blackwell.
    """
    return _Reader(model, prediction, plain, batch, gpu).run()


class _Reader:
    def __init__(
        self, model: Model, prediction: Prediction, plain: Precision, batch: float, gpu: Gpu | None
    ) -> None:
        self.model, self.prediction, self.plain, self.batch = model, prediction, plain, batch
        self.tf32 = gpu is None or gpu.has_tf32
        self.myelin = gpu is not None and gpu.fuses_conversions
        self.target = target_named(prediction.target)
        self.regions = region_nodes(model) if self.target.regions else frozenset()
        self.by_name = {n.name: n for n in model.nodes}
        self.outcomes = {c.name: c.precision for c in prediction.convolutions}
        self.readers: dict[str, list[EngineLayer]] = defaultdict(list)
        for layer in prediction.layers:
            for edge in layer.inputs:
                self.readers[edge.tensor].append(layer)
        self.made: dict[str, float] = {}  # elements of tensors that only the engine has
        self.wide: set[str] = set()  # tensors that are FP32 though floats are FP16
        self.narrowed: dict[str, float] = {}  # elements of FP32 tensors that get a reformat to FP16
        self.shapes = Shapes(model)
        self.result = Workload()
        self.twins: dict[
            str, str
        ] = {}  # results that an activation of its own maps on: the tensor behind it

    def run(self) -> Workload:
        covered: set[str] = set()
        for layer in self.prediction.layers:
            covered.update(layer.nodes)
            found = self._regional(layer) or self._wide(layer, self._layer(layer))
            if found is None:
                self.result.unknown.append(layer.name)
                found = Work(work.UNKNOWN, self.plain, self.plain)
            self.result.layers.append(self._scaled(found))
        self._apart()
        self._rest(covered)
        self._edges()
        return self.result

    def _regional(self, layer: EngineLayer) -> Work | None:
        """The work of a layer that lies in one of Myelin's regions and has no weights; None for others."""
        if not layer.nodes or not self.regions.issuperset(layer.nodes):
            return None
        nodes = self._nodes(layer)
        if any(n.op in WEIGHTED and self._fixed_behind(n.input(1)) for n in nodes):
            return None
        made = [work_in_region(self.model, n, self._shape, self.plain) for n in nodes]
        return next(
            (w for w in made if w.kind != work.NOTHING), Work(work.NOTHING, self.plain, self.plain)
        )

    def _apart(self) -> None:
        """Activations that the convolution's kernel does not take in, and changes of layout.

        An INT8 convolution that writes a float leaves SiLU to a kernel of its own: YOLOv8n has 93 layers that compute
        on 8.6.1 and on 10.14.1, of which 44 and 49 write floats and only 25 are convolutions that do; users saw the
        same on 8.4 and 8.5 (NVIDIA/TensorRT#2204, #3861). Where the builder chooses the width of floats the convolution
        writes FP32, which is linear, so that nothing has to change the layout (12 layers that write FP32 and 25
        reformats that convert nothing on 8.6.1; inferred from these counts).
        """
        pairs = list(zip(self.prediction.layers, self.result.layers, strict=True))
        mapping = {
            edge.tensor
            for layer, one in pairs
            if one.kind in _MAPPING
            for edge in (*layer.inputs, *layer.outputs)
        }
        found: list[tuple[EngineLayer, Work]] = []
        for number, (layer, one) in enumerate(pairs):
            nodes = self._nodes(layer) if one.kind in work.COMPUTING else []
            to_float = (
                one.written_as.is_float and not one.precision.is_float and not self.target.is_rtx
            )
            if not to_float or not any(n.op in ("Sigmoid", "Mish", "HardSwish") for n in nodes):
                found.append((layer, one))
                continue
            made = [
                replace(edge, tensor=f"{edge.tensor} before its activation")
                for edge in layer.outputs
            ]
            self.twins.update(
                (new.tensor, edge.tensor) for new, edge in zip(made, layer.outputs, strict=True)
            )
            mapping.update(edge.tensor for edge in layer.outputs)
            first = (
                one.writing_fp32() if not self._goes_to_sum(layer) and self._is_open(layer) else one
            )
            self.result.layers[number] = first
            own = EngineLayer(f"PWN behind {layer.name}", "PointWise", made, list(layer.outputs))
            mapped = Work(
                work.POINTWISE,
                first.written_as,
                one.written_as,
                read=first.written,
                written=one.written,
            )
            self.result.extras.append(Extra(own.name, mapped, behind=layer.name))
            found += [(replace(layer, outputs=made), first), (own, mapped)]
        if self.myelin:
            self._fuse_conversions(mapping)
        if self.target.is_rtx or self.myelin:
            return
        found = [pair for pair in found if self.regions.isdisjoint(pair[0].nodes)]
        for change in reformats_of(
            found,
            lambda tensor: self._shape(self.twins.get(tensor, tensor)),
            self.model.inputs,
            self.model.outputs,
        ):
            if change.needs_tf32 and not self.tf32:
                continue
            moved = change.elements * width(change.precision)
            self._extra(
                f"layout of {self.twins.get(change.tensor, change.tensor)}",
                Work(
                    work.REFORMAT,
                    change.precision,
                    change.precision,
                    channels=change.channels,
                    read=moved,
                    written=moved,
                ),
                change,
            )

    def _is_open(self, layer: EngineLayer) -> bool:
        """Whether the builder chooses the width of what a layer writes: on 8.x; 10 is known by typed builds."""
        stored = {self.model.elem_type(edge.tensor) for edge in layer.outputs}
        return (
            not self.target.assumes_8x_cases
            and self.plain == Precision.FP16
            and stored <= {TensorProto.FLOAT, 0}
        )

    def _goes_to_sum(self, layer: EngineLayer) -> bool:
        """Whether an Add alone reads a layer's result: activation and sum are one kernel."""
        readers = [r for edge in layer.outputs for r in self.readers[edge.tensor]]
        return len(readers) == 1 and any(n.op in ("Add", "Sum") for n in self._nodes(readers[0]))

    def _fuse_conversions(self, mapping: set[str]) -> None:
        """Takes a conversion into the kernel beside it that maps or copies values (``mapping`` has its tensors).

        On Blackwell Myelin takes the whole network: one kernel holds DQ, DQ, Add, ReLU and Q, and there are no changes
        of layout (the engine of bev-blackwell-trt10).
        """
        for i, layer in enumerate(self.prediction.layers):
            if layer.type == "Conversion" and any(
                e.tensor in mapping for e in (*layer.inputs, *layer.outputs)
            ):
                self.result.layers[i] = Work(work.NOTHING, self.plain, self.plain)

    def _scaled(self, found: Work) -> Work:
        b = self.batch
        return (
            found
            if b == 1
            else replace(found, rows=found.rows * b, read=found.read * b, written=found.written * b)
        )

    def _extra(self, name: str, found: Work, reformat: Reformat | None = None) -> None:
        self.result.extras.append(Extra(name, self._scaled(found), reformat))

    # Types and sizes ------------------------------------------------------------------------------------------

    def _wide(self, layer: EngineLayer, found: Work | None) -> Work | None:
        """A layer's work with an output in FP32 where the builder has no kernel that writes FP16.

        Kernels for INT8 in groups of four channels, which a convolution of few channels takes, write INT8 or FP32 and
        never FP16 (every combination that is autotuned in the logs of yolo-resnet18-orin-trt8502,
        resnet18-qat-rtx2000-trt8510 and bevfusion-camera-rtx3080ti-trt8600). What only maps or pools values goes on in
        FP32; other readers of a float get a reformat to FP16 (as in the engine of resnet18-a100-qat).
        """
        if self.plain == Precision.FP32 or found is None or not found.written_as.is_float:
            return found
        integer = found.precision == Precision.INT8
        by_fours = integer and found.kind in work.COMPUTING and found.channels < work.FEW_CHANNELS
        if not by_fours and not (
            self._goes_on(layer) and any(t.tensor in self.wide for t in layer.inputs)
        ):
            return found
        for edge in layer.outputs:
            if all(
                self._goes_on(reader) or reader.type == "Conversion"
                for reader in self.readers[edge.tensor]
            ):
                self.wide.add(edge.tensor)
            elif count := self._elements(edge.tensor):
                self.narrowed[edge.tensor] = count
        return found.writing_fp32()

    def _goes_on(self, layer: EngineLayer) -> bool:
        """Whether a layer computes in whatever float it reads."""
        return layer.type in ("Pooling", "PointWise", "ElementWise", "Scale", "NoOp", "Shuffle")

    def _type(self, precision: Precision, tensor: str = "") -> Precision:
        if (
            tensor
            and precision.is_float
            and (tensor in self.model.inputs or self.model.is_output(tensor))
        ):
            stored = precision_of(self.model.elem_type(tensor))
            return Precision.FP32 if stored == Precision.UNKNOWN else stored
        if tensor in self.wide and precision.is_float:
            return Precision.FP32
        fixed = precision == Precision.FP32 and self.target.strongly_typed
        is_open = precision in (Precision.FLOAT, Precision.FP32, Precision.UNKNOWN)
        return self.plain if is_open and not fixed else precision

    def _elements(self, tensor: str) -> float | None:
        if tensor in self.made:
            return self.made[tensor]
        shape = self.shapes.get(tensor)
        return None if shape is None else float(math.prod(shape))

    def _nodes(self, layer: EngineLayer) -> list[Node]:
        named = (self.by_name.get(name) for name in layer.nodes)
        return [node for node in named if node is not None and not is_qdq(node)]

    # Layers ---------------------------------------------------------------------------------------------------

    def _layer(self, layer: EngineLayer) -> Work | None:
        nodes = self._nodes(layer)
        weighted = [n for n in nodes if n.op in WEIGHTED]
        if weighted:
            return self._weighted(layer, nodes, weighted)
        low, high = self._ends(layer)
        still = layer.type in ("Shuffle", "Identity") and not any(
            n.op == "Transpose" for n in nodes
        )
        if still or layer.type == "NoOp":
            return Work(work.NOTHING, low, high)
        kind = work.KINDS.get(
            layer.type, work.SHUFFLE if layer.type == "Shuffle" else work.POINTWISE
        )
        read, written = self._moved(layer, nodes, kind)
        if read is None or written is None:
            return None
        shape = self._shape(layer.inputs[0].tensor) if layer.inputs else None
        channels = float(shape[1]) if shape and len(shape) > 2 else 64.0
        return Work(
            kind,
            low,
            high,
            channels=channels,
            read=read * width(low),
            written=written * width(high),
        )

    def _ends(self, layer: EngineLayer) -> tuple[Precision, Precision]:
        low, high = (
            self._type(edges[0].precision, edges[0].tensor) if edges else None
            for edges in (layer.inputs, layer.outputs)
        )
        return low or self.plain, high or low or self.plain

    def _moved(
        self, layer: EngineLayer, nodes: list[Node], kind: str
    ) -> tuple[float | None, float | None]:
        """Elements read and written by a layer that only moves or maps values."""
        if nodes:
            outside = dict.fromkeys(self._outside(nodes))
            sizes = [self._elements(t) for t in outside]
            last = self._elements(nodes[-1].output)
            read = None if None in sizes else sum(filter(None, sizes))
            if layer.outputs and last is not None:
                self.made.setdefault(layer.outputs[0].tensor, last)
            if read is not None and last is not None and kind == work.POINTWISE:
                read = min(read, len(outside) * max(last, 1.0))
            return read, last
        sizes = [
            self._elements(t.tensor) for t in layer.inputs if not self.model.is_constant(t.tensor)
        ]
        known = [s for s in sizes if s is not None]
        if not known:
            return (
                (0.0, 0.0) if layer.type in ("PointWise", "Scale", "ElementWise") else (None, None)
            )
        return sum(known), max(known)

    def _outside(self, nodes: list[Node]) -> list[str]:
        """What nodes read that none of them makes, constants apart."""
        inside = {t for n in nodes for t in n.outputs}
        return [
            t
            for n in nodes
            for t in n.inputs
            if t and t not in inside and not self.model.is_constant(t)
        ]

    def _weighted(self, layer: EngineLayer, nodes: list[Node], weighted: list[Node]) -> Work | None:
        parts = [p for n in weighted if (p := product_of(n, self._shape)) is not None]
        if len(parts) < len(weighted):
            return None
        main = parts[0]
        low, high = self._ends(layer)
        precision = self._computes(weighted[0], low)
        columns = sum(p.columns for p in parts)
        pool = next((n for n in nodes if n.op in ("MaxPool", "AveragePool")), None)
        pooled = None if pool is None else self._elements(pool.output)
        written = sum(pooled or p.written for p in parts)
        read = main.read * width(low)
        if len(layer.inputs) > 1:
            residual = layer.inputs[1]
            read += main.written * width(self._type(residual.precision, residual.tensor))
        for edge in layer.outputs:
            if self.shapes.get(edge.tensor) is None:
                self.made.setdefault(edge.tensor, written / len(layer.outputs))
        weights = columns * main.depth * main.groups * width(precision)
        return replace(
            main,
            precision=precision,
            written_as=high,
            columns=columns,
            read=read,
            weights=weights,
            written=written * width(high),
        )

    def _computes(self, node: Node, low: Precision) -> Precision:
        """The type that a convolution computes in; a float input that INT8 weights meet stays float."""
        outcome = self.outcomes.get(node.name)
        return low if outcome is None else self._type(outcome)

    def _shape(self, tensor: str) -> tuple[int, ...] | None:
        shape = self.shapes.get(tensor)
        if shape is None:
            producer = self.model.producer(tensor)
            if producer is not None and is_qdq(producer):
                return self._shape(producer.input(0))
        return shape

    # What the simulation does not list ------------------------------------------------------------------------

    def _rest(self, covered: set[str]) -> None:
        """Nodes of no layer: Myelin's regions, or, on a target without named layers, everything."""
        left = [
            n
            for n in self.model.ordered
            if n.name not in covered and n.op not in work.FREE and self._runs(n)
        ]
        chain: list[Node] = []
        made: set[str] = set()  # by the chain
        for node in left:
            if node.name in self.regions and not (
                node.op in WEIGHTED and self._fixed_behind(node.input(1))
            ):
                self._flush(chain)
                found = work_in_region(self.model, node, self._shape, self.plain)
                if found.kind != work.NOTHING:
                    self._extra(node.name, found)
            elif node.op in WEIGHTED:
                self._flush(chain)
                product = product_of(node, self._shape)
                if product is None:
                    self.result.unknown.append(node.name)
                    continue
                kind = self._computes(node, self.plain)
                second = (
                    0.0
                    if self._fixed_behind(node.input(1))
                    else (self._elements(node.input(1)) or 0.0)
                )
                self._extra(
                    node.name,
                    replace(
                        product,
                        precision=kind,
                        written_as=self.plain,
                        read=(product.read + second) * width(kind),
                        weights=0.0 if second else product.weights * width(kind),
                        written=product.written * width(self.plain),
                    ),
                )
            elif node.op in work.HEAVY or node.op in ("MaxPool", "AveragePool", "Resize"):
                self._flush(chain)
                self._region([node], work.SOFTMAX if "oftmax" in node.op else work.POOL)
            else:
                if made.isdisjoint(node.inputs):
                    self._flush(chain)
                if not chain:
                    made = set()
                chain.append(node)
                made.update(node.outputs)
        self._flush(chain)

    def _runs(self, node: Node) -> bool:
        return any(not self._fixed_behind(t) for t in node.inputs if t) and bool(
            self._elements(node.output) != 0
        )

    def _fixed_behind(self, tensor: str) -> bool:
        """Whether a tensor is computed before the network runs: from constants and shapes alone."""
        return self.model.is_constant(tensor) or tensor in self._static

    @functools.cached_property
    def _static(self) -> frozenset[str]:
        found: set[str] = set()
        for node in self.model.ordered:
            if node.op in ("Shape", "Size") or (
                not node.op.startswith("Random")
                and not node.captured
                and all(t in found or self.model.is_constant(t) for t in node.inputs if t)
            ):
                found.update(t for t in node.outputs if t)
        return frozenset(found)

    def _flush(self, chain: list[Node]) -> None:
        if chain:
            self._region(chain, work.POINTWISE)
            chain.clear()

    def _region(self, nodes: list[Node], kind: str) -> None:
        sizes = [self._elements(t) for t in self._outside(nodes)]
        last, name = self._elements(nodes[-1].output), nodes[-1].name
        if last is None or None in sizes:
            self.result.unknown.append(name)
            self._extra(name, Work(work.UNKNOWN, self.plain, self.plain))
            return
        size = width(self.plain)
        read = sum(filter(None, sizes)) * size
        self._extra(name, Work(kind, self.plain, self.plain, read=read, written=last * size))

    def _edges(self) -> None:
        """Reformats between the FP32 of the network's edge and the FP16 inside (seen in FP16 engines: one each)."""
        if self.plain == Precision.FP32:
            return
        for tensor, elements in self.narrowed.items():
            self._edge(tensor, elements, Precision.FP32, Precision.FP16)
        readers = {
            layer.inputs[0].tensor: layer for layer in self.prediction.layers if layer.inputs
        }
        for tensor in self.model.inputs:
            count, layer = self._elements(tensor), readers.get(tensor)
            stored = self.model.elem_type(tensor)
            if (
                count
                and stored == TensorProto.FLOAT
                and (layer is None or layer.type != "Conversion")
            ):
                self._edge(tensor, count, Precision.FP32, Precision.FP16)
        for tensor in self.model.outputs:
            count = self._elements(tensor)
            if (
                count
                and self.model.elem_type(tensor) == TensorProto.FLOAT
                and tensor not in self.wide
            ):
                self._edge(tensor, count, Precision.FP16, Precision.FP32)

    @functools.cached_property
    def _changes(self) -> dict[str, list[Extra]]:
        """The changes of layout by tensor, once all are known."""
        found: dict[str, list[Extra]] = defaultdict(list)
        for extra in self.result.extras:
            if extra.reformat is not None:
                found[extra.reformat.tensor].append(extra)
        return found

    def _edge(self, tensor: str, count: float, read: Precision, written: Precision) -> None:
        """A change of float width; one kernel with the change of layout where there is one (FP16 engine on an A100)."""
        moved = {"read": width(read) * count, "written": width(written) * count}
        changes = self._changes.get(tensor)
        channels = 64.0
        if changes:
            self.result.extras.remove(joined := changes.pop(0))
            channels = joined.work.channels
        self._extra(
            f"reformat of {tensor}",
            Work(work.CONVERSION, read, written, channels=channels, **moved),
        )
