"""A model's nodes, layers, convolutions, findings and log lines, each pointing at the others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.types import Build
from qdqtool.findings.report import title_of
from qdqtool.formats.predict_text import remarks, verdict
from qdqtool.ir.graph import Model
from qdqtool.ir.graph import Node as OnnxNode
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import is_dq, is_q, is_qdq
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.reporting import data
from qdqtool.reporting.options import ReportInputs
from qdqtool.reporting.page import (
    LogNameParser,
    display_message,
    display_name,
    round_digits,
    strip_operator,
)
from qdqtool.timing import gpus, model_variants
from qdqtool.timing.estimate import TimeEstimate, estimate, match_profile_rows
from qdqtool.timing.gpu_checks import gpu_findings
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.work import LayerWork
from qdqtool.timing.workload import predict_workload
from qdqtool.trt import trace
from qdqtool.trt.outcome import apply_assumptions
from qdqtool.trt.pipeline import cases
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import BYTES, EngineLayer, Precision, Prediction
from qdqtool.verification.layer_mapping import trt_name
from qdqtool.verification.result import Verification

MOST_LINES = 60  # of the optimizer's log, for one node
MOST_SERVED = 400  # nodes that one Q or DQ serves; a network has a dozen
MOST_PASSED = 64  # Q and DQ on the way to them
MOST_ATTRIBUTES = 12  # of one node
_LABELS = {
    "kernel_shape": "Kernel",
    "strides": "Stride",
    "group": "Groups",
    "pads": "Padding",
    "dilations": "Dilation",
}


def choose_paint(precision: Precision | str) -> str:
    """How a precision is drawn."""
    value = Precision(precision)
    if value.is_float:
        return data.FLOAT
    return data.INT8 if value in (*BYTES, Precision.FP8, Precision.INT4) else data.OTHER


class ModelCollector:
    """Makes :class:`data.ModelContents` of a subject.

    Attributes:
        model: What is made.
        place: Index of a drawn ONNX node to its place in ``model.nodes``.
    """

    def __init__(self, subject: ReportSubject, label: str) -> None:
        self.subject = subject
        prediction = subject.prediction
        info = prediction.model
        self.model = data.ModelContents(
            label=label,
            path=display_name(info.path),
            sha256=info.sha256,
            opset=info.opset,
            node_count=info.nodes,
            target=subject.target.display_name,
            rules=prediction.target,
            proof=prediction.target_evidence,
            verdict=verdict(prediction),
            counts=prediction.summary(),
            remarks=[display_message(line) for line in remarks(prediction)],
            compute_capabilities=prediction.compute_capabilities,
        )
        self.place: dict[int, int] = {}
        self._case_positions: dict[str, int] = {}
        self._by_name = {n.name: n for n in subject.model.nodes}
        #: Names of the Q and DQ that stay; of a copy that moved (``..._clone_1``) that of the one in the model.
        self.conversion_names = frozenset(
            self._original_name(n) for n in prediction.conversion_nodes
        )

    def run(self) -> data.ModelContents:
        self._nodes()
        self._layers()
        self._convolutions()
        self._findings()
        self._conversions()
        self._lines()
        return self.model

    # Nodes ----------------------------------------------------------------------------------------------------

    def drawn(self) -> list[OnnxNode]:
        """The nodes that are drawn, in topological order."""
        constants = self.subject.view.constants
        return [
            n
            for n in self.subject.model.ordered
            if not is_qdq(n) and n.outputs and not all(not o or o in constants for o in n.outputs)
        ]

    def _nodes(self) -> None:
        index = self.subject.model
        for node in self.drawn():
            self.place[node.index] = len(self.model.nodes)
            self.model.nodes.append(
                data.NodeEntry(
                    name=display_name(node.name),
                    op=display_name(node.op, 60),
                    index=node.index,
                    shape=self.shape(node.output),
                    inputs=[display_name(t) for t in node.inputs if t and not index.is_constant(t)],
                    outputs=[display_name(t) for t in node.outputs if t],
                    scales=self._scales(node),
                    attributes=self._attributes(node),
                )
            )

    def shape(self, tensor: str) -> str:
        """``1x64x80x80``; an empty string where it is not known."""
        shape = self.subject.view.shape(tensor) if tensor else None
        return "x".join("?" if d is None or d < 0 else str(d) for d in shape) if shape else ""

    def _attributes(self, node: OnnxNode) -> list[list[str]]:
        """What a node carries; of a convolution also what ONNX leaves out where it is usual."""
        found: dict[str, Any] = {}
        if node.op in WEIGHTED:
            weights = (
                self.subject.model.constant_shape(self.subject.view.weights(node).source) or ()
            )
            found["Weights shape"] = weights
            if "Conv" in node.op and len(weights) > 2:
                found |= {
                    "kernel_shape": weights[2:],
                    "strides": [1] * (len(weights) - 2),
                    "group": 1,
                }
        with contextlib.suppress(ValueError):  # an attribute of a type that ONNX does not know
            found |= node.attributes
        texts = {
            _LABELS.get(n, n): _format_attribute(value, ", " if n == "pads" else "x")
            for n, value in found.items()
        }
        return [
            [display_name(name, 60), text]
            for name, text in list(texts.items())[:MOST_ATTRIBUTES]
            if text
        ]

    def _scales(self, node: OnnxNode) -> list[data.NodeScale]:
        view, index = self.subject.view, self.subject.model
        found = []
        for position, tensor in enumerate(node.inputs):
            maker = index.producer(tensor)
            if node.op in WEIGHTED and position == 1 and tensor in view.constants:
                quantizer = view.weights(node).first_quantizer
                if quantizer is not None:
                    found.append(self._scale("weights", quantizer))
                continue
            if maker is None or not is_dq(maker) or tensor in view.constants:
                continue
            q = index.producer(maker.input(0))
            where = (
                "input"
                if position == 0
                else "weights"
                if node.op in WEIGHTED and position == 1
                else "other input"
            )
            found.append(self._scale(where, q if q is not None and is_q(q) else maker))
        readers = (r for t in node.outputs if t for r in dict.fromkeys(index.consumers(t)))
        return [*found, *(self._scale("output", r) for r in readers if is_q(r))]

    def _scale(self, where: str, quantizer: OnnxNode) -> data.NodeScale:
        params = self.subject.view.params(quantizer)
        scale, zero = params.scale, params.zero_point
        zeros = (
            "unknown"
            if zero is None
            else "0"
            if not zero.size
            else (str(int(zero[0])) if (zero == zero[0]).all() else "several")
        )
        least = most = None
        if scale is not None and scale.size and np.isfinite(scale).all():
            least, most = round_digits(scale.min(), 6), round_digits(scale.max(), 6)
        return data.NodeScale(
            where,
            display_name(quantizer.input(0)),
            display_name(quantizer.name),
            str(params.precision),
            least,
            most,
            0 if scale is None else int(scale.size),
            zeros,
            self._is_conversion(quantizer),
        )

    def _original_name(self, name: str) -> str:
        """The ONNX name behind a name that TensorRT may have given to a copy."""
        return name if name in self._by_name else base_name(name)

    def _is_conversion(self, quantizer: OnnxNode) -> bool:
        """Whether it, or a DQ that reads it, is a conversion."""
        index = self.subject.model
        return quantizer.name in self.conversion_names or any(
            is_dq(r) and r.name in self.conversion_names for r in index.consumers(quantizer.output)
        )

    def find_nodes(self, names: Iterable[str]) -> list[int]:
        """Drawn nodes by ONNX name; of a Q or DQ those that it serves."""
        found: dict[int, None] = {}
        for name in names:
            node = self._by_name.get(self._original_name(name))
            if node is None:
                continue
            if node.index in self.place:
                found[self.place[node.index]] = None
            elif is_qdq(node):
                found.update(dict.fromkeys(self._find_served_nodes(node)))
        return list(found)

    def find_first_node(self, names: Iterable[str]) -> int:
        """The first of them; -1 for none."""
        return next(iter(self.find_nodes(names)), -1)

    def _find_served_nodes(self, quantizer: OnnxNode) -> list[int]:
        """The drawn nodes that read a Q or DQ; the one that makes what it reads where none does."""
        index = self.subject.model
        found: list[int] = []
        waiting, seen = [quantizer], {quantizer.index}
        while waiting and len(found) < MOST_SERVED:
            for reader in index.consumers(waiting.pop().output)[:MOST_SERVED]:
                if reader.index in self.place:
                    found.append(self.place[reader.index])
                elif is_qdq(reader) and reader.index not in seen and len(seen) < MOST_PASSED:
                    seen.add(reader.index)
                    waiting.append(reader)
        maker = index.producer(quantizer.input(0))
        if not found and maker is not None and maker.index in self.place:
            found.append(self.place[maker.index])
        return found

    # Layers and convolutions ----------------------------------------------------------------------------------

    def _layers(self) -> None:
        subject = self.subject
        layers = subject.prediction.layers
        rows = (
            match_profile_rows(layers, subject.build.profile_rows)
            if subject.build
            else [None] * len(layers)
        )
        for number, (layer, row) in enumerate(zip(layers, rows, strict=True)):
            mine = [
                self.place[n.index]
                for n in map(self._by_name.get, layer.nodes)
                if n is not None and n.index in self.place
            ]
            for place in mine:
                if self.model.nodes[place].layer < 0:
                    self.model.nodes[place].layer = number
            work = subject.work[number] if subject.work else None
            work = None if work is None or work.kind in ("unknown", "nothing") else work
            self.model.layers.append(
                data.LayerEntry(
                    name=display_name(layer.name),
                    title=self._layer_title(layer, mine),
                    type=layer.type,
                    kind=time_kind(layer),
                    precision=str(compute_precision(layer)),
                    inputs=[[display_name(t.tensor), str(t.precision)] for t in layer.inputs],
                    outputs=[[display_name(t.tensor), str(t.precision)] for t in layer.outputs],
                    nodes=mine,
                    findings=[],
                    at=self._main_node(mine) if mine else self.find_first_node(layer.nodes),
                    ms=layer.ms,
                    macs=None if work is None else round(work.macs),
                    bytes=None if work is None else round(work.bytes_moved),
                    measured=None if row is None else round(row.ms, 5),
                )
            )

        several = Counter(layer.title for layer in self.model.layers)
        for (
            made
        ) in self.model.layers:  # a convolution and the addition behind it, both of one module
            if several[made.title] > 1 and made.nodes:
                made.title += f" ({self.model.nodes[self._main_node(made.nodes)].op})"

    def _main_node(self, mine: list[int]) -> int:
        """The node that people know a layer by: its convolution, else its last."""
        return next((p for p in mine if self.model.nodes[p].op in WEIGHTED), mine[-1])

    def _layer_title(self, layer: EngineLayer, mine: list[int]) -> str:
        if not mine:
            return display_name(layer.name)
        node = self.model.nodes[self._main_node(mine)]
        weighted = sum(self.model.nodes[p].op in WEIGHTED for p in mine)
        return strip_operator(node.name, node.op) + (f" (+{weighted - 1})" if weighted > 1 else "")

    def _convolutions(self) -> None:
        layer_place: dict[str, int] = {}
        for number, layer in enumerate(self.subject.prediction.layers):
            layer_place.setdefault(layer.name, number)
        for conv in self.subject.prediction.convolutions:
            node = self.place.get(conv.index, -1)
            at = layer_place.get(conv.layer or "", -1)
            if node >= 0:
                self.model.nodes[node].conv = len(self.model.convs)
                if at >= 0:
                    self.model.nodes[node].layer = at
            self.model.convs.append(
                data.ConvolutionEntry(
                    node,
                    display_name(conv.name),
                    conv.op,
                    conv.weights,
                    str(conv.precision),
                    [str(p) for p in conv.inputs],
                    str(conv.output),
                    str(conv.evidence),
                    at,
                    [display_name(n) for n in conv.fused],
                    list(conv.findings),
                    [self._add_case(name) for name in conv.cases],
                )
            )
            if conv.layer:  # a node that its layer lists under another name
                for place in self.find_nodes(conv.fused):
                    if self.model.nodes[place].layer < 0:
                        self.model.nodes[place].layer = at

    def _add_case(self, name: str) -> int:
        if name not in self._case_positions:
            self._case_positions[name] = len(self.model.cases)
            case = cases().get(name)
            self.model.cases.append(
                data.CaseEntry(name, "assumed", "", [], "")
                if case is None
                else data.CaseEntry(
                    name, str(case.evidence), case.says, list(case.builds), case.source
                )
            )
        return self._case_positions[name]

    # Findings, conversions, lines -----------------------------------------------------------------------------

    def _findings(self) -> None:
        by_conv = {
            c.name: self.place.get(c.index, -1) for c in self.subject.prediction.convolutions
        }
        for finding in self.subject.prediction.findings:
            at = self.find_nodes([finding.node])
            concerned = [p for p in (by_conv.get(n, -1) for n in finding.convolutions) if p >= 0]
            nodes = list(dict.fromkeys([*at, *concerned]))
            for place in nodes:
                node = self.model.nodes[place]
                node.findings.append(finding.id)
                if node.layer >= 0 and finding.id not in self.model.layers[node.layer].findings:
                    self.model.layers[node.layer].findings.append(finding.id)
            self.model.findings.append(
                data.FindingEntry(
                    finding.id,
                    finding.code,
                    title_of(finding.code),
                    str(finding.severity),
                    display_name(finding.node),
                    display_message(finding.message),
                    display_message(finding.fix),
                    str(finding.evidence),
                    nodes[0] if nodes else -1,
                    nodes,
                    finding.values,
                    finding.saves_ms,
                    finding.automatic,
                )
            )

    def _conversions(self) -> None:
        layers = [
            (i, one)
            for i, one in enumerate(self.subject.prediction.layers)
            if one.type == "Conversion"
        ]
        by_node = {name: i for i, one in layers for name in one.nodes} | {
            one.name: i for i, one in layers
        }  # clones
        found: dict[str, list[int]] = {}
        for finding in self.subject.prediction.findings:
            found.setdefault(finding.node, []).append(finding.id)
        for name in self.subject.prediction.conversion_nodes:
            layer = by_node.get(name, -1)
            row = self.model.layers[layer] if layer >= 0 else None
            tensor, from_ = row.inputs[0] if row and row.inputs else ("", "")
            self.model.conversions.append(
                data.ConversionEntry(
                    display_name(name),
                    self.find_first_node([name]),
                    layer,
                    from_,
                    row.outputs[0][1] if row and row.outputs else "",
                    tensor,
                    sorted(i for n in {name, self._original_name(name)} for i in found.get(n, ())),
                    row.ms if row else None,
                    row.measured if row else None,
                )
            )

    def _lines(self) -> None:
        """Each line of the log belongs to the nodes that it names; of a Q or DQ to those that it serves."""
        index = self.subject.model
        by_trt = {trt_name(n): n.name for n in index.nodes}
        owner: dict[str, list[int]] = {}
        for node in (n for n in index.nodes if n.op in WEIGHTED and n.index in self.place):
            source = self.subject.view.weights(node).source
            owner.setdefault(source, []).append(self.place[node.index])
        spoken = LogNameParser([*by_trt, *owner])
        for event in self.subject.prediction.trace:
            if event.kind == trace.RUNNING:
                continue
            names = dict.fromkeys([*spoken.parse(event.subject), *spoken.parse(event.object)])
            places = dict.fromkeys(
                p for n in names for p in (*owner.get(n, ()), *self.find_nodes([by_trt.get(n, n)]))
            )
            wanted = [p for p in places if len(self.model.nodes[p].lines) < MOST_LINES]
            if not wanted:
                continue
            for place in wanted:
                self.model.nodes[place].lines.append(len(self.model.lines))
            text = trace.render(event)
            if event.pass_name and not text.startswith(event.pass_name):
                text = f"{event.pass_name}: {text}"
            self.model.lines.append(
                data.TraceLine(
                    display_name(text, 700), self._add_case(event.case) if event.case else -1
                )
            )


def _format_attribute(value: Any, joint: str) -> str:
    """An attribute's value; an empty string of tensors and graphs."""
    if isinstance(value, str):
        return display_name(value, 80)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        return display_name(joint.join(_format_attribute(v, joint) for v in value[:16]), 80)
    return ""


def time_kind(layer: EngineLayer) -> str:
    """``conversion``, ``copy``, ``int8`` or ``float``: how a layer's time is counted."""
    if layer.type == "Conversion":
        return "conversion"
    if layer.type in ("Reformat", "NoOp"):
        return "copy"
    return data.INT8 if choose_paint(compute_precision(layer)) == data.INT8 else data.FLOAT


def compute_precision(layer: EngineLayer) -> Precision:
    """The data type of the layer's data input; of its output where it has none."""
    ends = layer.inputs or layer.outputs
    return ends[0].precision if ends else Precision.UNKNOWN


# The model as it is looked at ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReportSubject:
    """A model with what is known about it.

    Attributes:
        model: The index of the ONNX model.
        prediction: What TensorRT makes of it; findings and layers carry times where a GPU is known.
        target: Which TensorRT, as it builds for that GPU.
        time: The estimate, None without a GPU.
        verification: The prediction compared with a build, None without one.
        build: The build.
        work: What each predicted layer compute_precision and moves, in the prediction's order; empty where layers have no names.
    """

    model: Model
    prediction: Prediction
    target: Target
    time: TimeEstimate | None = None
    verification: Verification | None = None
    build: Build | None = None
    work: list[LayerWork] = field(default_factory=list)
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.model)


def analyze_model(
    source: ModelSource | Model,
    inputs: ReportInputs,
    gpu: Gpu | None,
    build: Build | None,
    settled: Target | None = None,
) -> ReportSubject:
    """Predict for a model, verify it if there is a build, and estimate the time if there is a GPU.

    ``settled`` is the target as it builds for the GPU, if that is known.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build is of another model.
    """
    model = load(source)
    verification = None
    if build is not None:
        from qdqtool.verification.api import verify_model

        verification, on = verify_model(model, build, inputs.target, inputs.gpu)
        assert verification.prediction is not None
        prediction = verification.prediction
    else:
        on = settled or target_named(inputs.target or DEFAULT_TARGET)
        on = on if settled or gpu is None else on.with_capability(gpu.cc, gpu.name)
        prediction = predict(model, on, assume=inputs.assume)
    time = None
    if gpu is not None:
        gpu = gpus.restrict_to_target(on, gpu)
        from qdqtool.verification.times import float_precision, is_cuda_graph

        float_type = float_precision(build) if build else gpu.float_type
        settled_on = apply_assumptions(on, inputs.assume)
        graph = build is not None and is_cuda_graph(build)
        time = estimate(model, prediction, gpu, settled_on, float_type=float_type, cuda_graph=graph)
        prediction.time = time.as_json()
        prediction.compute_capabilities = on.capability_names or [gpu.cc]
        prediction.findings += gpu_findings(prediction, gpu, model)
    subject = ReportSubject(model, prediction, on, time, verification, build)
    subject.work = _work(subject)
    return subject


def _work(subject: ReportSubject) -> list[LayerWork]:
    """The work of the layers: what the estimate used, or the same in FP16 where nobody asked for a time."""
    layers = subject.prediction.layers
    workload = subject.time.workload if subject.time is not None else None
    if workload is None:
        shaped, _ = model_variants.resolve_inputs(subject.model, 1)
        workload = predict_workload(shaped, subject.prediction)
    return workload.layers if len(workload.layers) == len(layers) else []


def choose_gpu(build: Build | None, options: GpuOptions) -> Gpu | None:
    """Return the GPU that was named, or that the build ran on.

    Raises:
        QdqtoolError: It is unknown.
    """
    if build is not None:
        from qdqtool.timing.built_engine import find_build_gpu

        return find_build_gpu(build, options.gpu, options.clock)
    return gpus.choose_gpu(options.gpu, options.clock) if options.gpu is not None else None
