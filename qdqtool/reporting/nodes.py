"""Analyze a model, and collect its nodes, layers, convolutions, findings and log lines.

The collected entries refer to each other by positions in lists (see :mod:`qdqtool.reporting.data`).
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.buildlog.names import base_name, parse_layer_name
from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.findings.report import list_shown_findings, title_of
from qdqtool.fixing.rehearsal import rehearse
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import as_options
from qdqtool.formats.time_text import (
    describe_included_saving,
    describe_request_cost,
    describe_slower_fix,
)
from qdqtool.formats.verdicts import (
    count_conversions,
    describe_moved_quantizer,
    overall_verdict,
    remarks,
    verdict,
)
from qdqtool.gpu_prediction import add_fix_savings, predict_without_gpu
from qdqtool.ir.graph import Model, Node as OnnxNode
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.ir.qdq import find_first_quantizer, is_dq, is_q, is_qdq
from qdqtool.patterns.view import View
from qdqtool.prediction import add_findings, choose_typing, predict
from qdqtool.reasons.finding import split_fixable
from qdqtool.reasons.gpus import GpuLimit
from qdqtool.reporting import data
from qdqtool.reporting.options import ReportInputs
from qdqtool.reporting.page import (
    display_message,
    display_name,
    round_digits,
    strip_operator,
)
from qdqtool.timing import gpus, model_variants
from qdqtool.timing.built_engine import find_build_gpu
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpu_checks import gpu_findings
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.results import TimeEstimate
from qdqtool.timing.savings import mark_included_savings
from qdqtool.timing.time_calibration import match_profile_rows
from qdqtool.timing.work import LayerWork
from qdqtool.timing.workload import predict_workload
from qdqtool.trt import trace
from qdqtool.trt.outcome import apply_assumptions
from qdqtool.trt.pipeline import cases
from qdqtool.trt.result import ConvOutcome, EngineLayer, Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.trt.trace import Event
from qdqtool.verification.api import verify_model
from qdqtool.verification.result import Verification
from qdqtool.verification.times import float_layer_precision, is_timed_as_cuda_graph

MAX_NODE_LINES = 60  # maximum number of optimizer log lines per node
MAX_CONSUMERS = 400  # maximum number of consumers listed for one Q or DQ; a dozen is usual
MAX_QUANTIZERS_PASSED = 64  # maximum number of Q and DQ between a quantizer and its consumers
MAX_ATTRIBUTES = 12  # maximum number of attributes per node
_ATTRIBUTE_LABELS = {
    "kernel_shape": "Kernel",
    "strides": "Stride",
    "group": "Groups",
    "pads": "Padding",
    "dilations": "Dilation",
}


def choose_paint(precision: Precision | str) -> str:
    """Return the color class of a precision: ``int8``, ``float`` or ``other``."""
    value = Precision(precision)
    if value.is_float:
        return data.FLOAT
    return data.INT8 if value in (*BYTES, Precision.FP8, Precision.INT4) else data.OTHER


class ModelCollector:
    """Collects the contents of the page about one model.

    Attributes:
        model: Contents collected so far.
        engine: Prediction of the layers and data types that the page shows.
        positions: Position in ``model.nodes`` of each drawn node, by the node's index in the graph.
        conversion_names: Names of the Q and DQ in the model that are conversions at run time. If
            TensorRT's copy (``..._clone_1``) is the conversion, the name of the original Q or DQ.
    """

    def __init__(self, subject: ReportSubject, label: str) -> None:
        self.subject = subject
        prediction = subject.prediction
        model_info = prediction.model
        half = subject.build is None or float_layer_precision(subject.build) != Precision.FP32
        times = [subject.time] if subject.time is not None and subject.build is None else []
        headline = overall_verdict(prediction, subject.time, half=half)
        count, dependence = count_conversions(prediction)
        self._float_type = find_float_type(prediction, half=half, times=times)
        self.model = data.ModelContents(
            label=label,
            path=display_name(model_info.path),
            sha256=model_info.sha256,
            opset=model_info.opset,
            node_count=model_info.nodes,
            target=subject.target.title,
            rules=prediction.target,
            proof=prediction.target_evidence,
            headline=headline.text,
            tone=headline.style.name.lower(),
            rejection=prediction.rejection,
            verdict=verdict(prediction, half=half, times=times),
            counts=prediction.summary(),
            counts_without_errors=None if subject.engine is None else subject.engine.summary(),
            conversion_count=None if prediction.conversions is None else count,
            conversion_range_reason=dependence,
            remarks=[display_message(line) for line in remarks(prediction)],
            compute_capabilities=prediction.compute_capabilities,
        )
        self.positions: dict[int, int] = {}
        self._case_positions: dict[str, int] = {}
        self.engine = prediction if subject.engine is None else subject.engine
        self.conversion_names = frozenset(
            self._original_name(n) for n in self.engine.conversion_nodes
        )

    def collect(self) -> data.ModelContents:
        """Collect and return the contents, without drawings, weights and time."""
        self._add_nodes()
        self._add_layers()
        self._add_convolutions()
        self._add_findings()
        self._add_conversions()
        self._add_trace_lines()
        return self.model

    # Nodes ----------------------------------------------------------------------------------------

    def drawable_nodes(self) -> list[OnnxNode]:
        """Return the nodes that are drawn, in topological order: no Q, DQ or constants."""
        nodes = self.subject.model.ordered
        return [n for n in nodes if not is_qdq(n) and self._has_variable_output(n)]

    def _has_variable_output(self, node: OnnxNode) -> bool:
        constants = self.subject.view.constants
        return any(output and output not in constants for output in node.outputs)

    def _add_nodes(self) -> None:
        model = self.subject.model
        for node in self.drawable_nodes():
            self.positions[node.index] = len(self.model.nodes)
            self.model.nodes.append(
                data.NodeEntry(
                    name=display_name(node.name),
                    op=display_name(node.op, 60),
                    index=node.index,
                    shape=self.format_shape(node.output),
                    inputs=[display_name(t) for t in node.inputs if t and not model.is_constant(t)],
                    outputs=[display_name(t) for t in node.outputs if t],
                    scales=self._collect_scales(node),
                    attributes=self._collect_attributes(node),
                )
            )

    def format_shape(self, tensor: str) -> str:
        """Return a shape as text, such as ``1x64x80x80``; empty if unknown or for a scalar."""
        shape = self.subject.view.shape(tensor) if tensor else None
        return "x".join("?" if d is None or d < 0 else str(d) for d in shape) if shape else ""

    def _collect_attributes(self, node: OnnxNode) -> list[list[str]]:
        """Return attributes as pairs of name and value, with defaults for convolutions."""
        values: dict[str, Any] = {}
        if node.op in WEIGHTED:
            source = self.subject.view.weights(node).source
            weights = self.subject.model.constant_shape(source) or ()
            values["Weights shape"] = weights
            spatial = weights[2:]
            if "Conv" in node.op and spatial:
                values |= {"kernel_shape": spatial, "strides": [1] * len(spatial), "group": 1}
        with contextlib.suppress(ValueError):  # raised for an attribute of unknown type
            values |= node.attributes
        texts = {
            _ATTRIBUTE_LABELS.get(name, name): _format_attribute(
                value, ", " if name == "pads" else "x"
            )
            for name, value in values.items()
        }
        rows = list(texts.items())[:MAX_ATTRIBUTES]
        return [[display_name(name, 60), text] for name, text in rows if text]

    def _collect_scales(self, node: OnnxNode) -> list[data.NodeScale]:
        scales = []
        for position in range(len(node.inputs)):
            quantizer = self._find_input_quantizer(node, position)
            if quantizer is not None:
                scales.append(self._collect_scale(_input_role(node, position), quantizer))
        for tensor in filter(None, node.outputs):
            scales += [
                self._collect_scale("output", consumer)
                for consumer in dict.fromkeys(self.subject.model.consumers(tensor))
                if is_q(consumer)
            ]
        return scales

    def _find_input_quantizer(self, node: OnnxNode, position: int) -> OnnxNode | None:
        """Return the Q of the Q/DQ pair at a node's input, or the DQ if the pair has no Q.

        Returns:
            None for an input without Q/DQ, and for constants that are not weights.
        """
        view, model = self.subject.view, self.subject.model
        tensor = node.inputs[position]
        if tensor in view.constants:
            is_weights = _input_role(node, position) == "weights"
            return view.weights(node).first_quantizer if is_weights else None
        dq = model.producer(tensor)
        return find_first_quantizer(model, dq) if dq is not None and is_dq(dq) else None

    def _collect_scale(self, where: str, quantizer: OnnxNode) -> data.NodeScale:
        params = self.subject.view.params(quantizer)
        scale = params.scale
        low = high = None
        if scale is not None and scale.size and np.isfinite(scale).all():
            low, high = round_digits(scale.min(), 6), round_digits(scale.max(), 6)
        return data.NodeScale(
            where=where,
            tensor=display_name(quantizer.input(0)),
            quantizer=display_name(quantizer.name),
            precision=str(params.precision),
            scale=low,
            highest=high,
            channels=0 if scale is None else int(scale.size),
            zero_point=_format_zero_point(params.zero_point),
            stays=self._is_conversion(quantizer),
        )

    def _original_name(self, name: str) -> str:
        """Return the name of an ONNX node, given its own name or the name of TensorRT's copy."""
        return base_name(name) if self.subject.model.find_node(name) is None else name

    def _is_conversion(self, quantizer: OnnxNode) -> bool:
        """Return whether a quantizer, or a DQ after it, is a conversion at run time."""
        return quantizer.name in self.conversion_names or any(
            is_dq(consumer) and consumer.name in self.conversion_names
            for consumer in self.subject.model.consumers(quantizer.output)
        )

    def find_nodes(self, names: Iterable[str]) -> list[int]:
        """Return the positions of the drawn nodes that have one of the names.

        A Q or DQ is not drawn. Its name gives the positions of its consumers.
        """
        positions: dict[int, None] = {}
        for name in names:
            node = self.subject.model.find_node(self._original_name(name))
            if node is None:
                continue
            if node.index in self.positions:
                positions[self.positions[node.index]] = None
            elif is_qdq(node):
                positions.update(dict.fromkeys(self._find_drawn_consumers(node)))
        return list(positions)

    def find_first_node(self, names: Iterable[str]) -> int:
        """Return the first position that :meth:`find_nodes` finds; -1 if it finds none."""
        return next(iter(self.find_nodes(names)), -1)

    def _find_drawn_consumers(self, quantizer: OnnxNode) -> list[int]:
        """Return the positions of a Q's or DQ's drawn consumers, also after other Q and DQ.

        Without drawn consumers, return the position of the producer.
        """
        model = self.subject.model
        consumers: list[int] = []
        waiting, seen = [quantizer], {quantizer.index}
        while waiting and len(consumers) < MAX_CONSUMERS:
            for consumer in model.consumers(waiting.pop().output)[:MAX_CONSUMERS]:
                if consumer.index in self.positions:
                    consumers.append(self.positions[consumer.index])
                elif (
                    is_qdq(consumer)
                    and consumer.index not in seen
                    and len(seen) < MAX_QUANTIZERS_PASSED
                ):
                    seen.add(consumer.index)
                    waiting.append(consumer)
        if consumers:
            return consumers
        producer = model.producer(quantizer.input(0))
        if producer is None or producer.index not in self.positions:
            return []
        return [self.positions[producer.index]]

    # Layers and convolutions ----------------------------------------------------------------------

    def _add_layers(self) -> None:
        layers = self.engine.layers
        for number, layer in enumerate(layers):
            nodes = self._find_layer_nodes(layer)
            for position in nodes:
                self._set_layer(position, number)
            self.model.layers.append(
                data.LayerEntry(
                    name=display_name(layer.name),
                    title=self._layer_title(layer, nodes),
                    type=layer.type,
                    kind=time_kind(layer),
                    precision=str(first_tensor_precision(layer)),
                    inputs=[[display_name(t.tensor), str(t.precision)] for t in layer.inputs],
                    outputs=[[display_name(t.tensor), str(t.precision)] for t in layer.outputs],
                    nodes=nodes,
                    findings=[],
                    remark=describe_moved_quantizer(layer),
                    at=self._find_main_node(nodes) if nodes else self.find_first_node(layer.nodes),
                    ms=layer.ms,
                )
            )
        self._add_work_and_times(layers)
        # Several layers of a module, such as a convolution and an Add, may have the same title.
        titles = Counter(entry.title for entry in self.model.layers)
        for entry in self.model.layers:
            if titles[entry.title] > 1 and entry.nodes:
                entry.title += f" ({self.model.nodes[self._find_main_node(entry.nodes)].op})"

    def _find_layer_nodes(self, layer: EngineLayer) -> list[int]:
        nodes = map(self.subject.model.find_node, layer.nodes)
        return [
            self.positions[n.index] for n in nodes if n is not None and n.index in self.positions
        ]

    def _set_layer(self, position: int, layer: int) -> None:
        if self.model.nodes[position].layer < 0:
            self.model.nodes[position].layer = layer

    def _find_main_node(self, nodes: list[int]) -> int:
        """Return the node after which a layer is named: the first with weights, else the last."""
        return next((n for n in nodes if self.model.nodes[n].op in WEIGHTED), nodes[-1])

    def _layer_title(self, layer: EngineLayer, nodes: list[int]) -> str:
        if not nodes:
            return display_name(layer.name)
        node = self.model.nodes[self._find_main_node(nodes)]
        weighted = sum(self.model.nodes[n].op in WEIGHTED for n in nodes)
        return strip_operator(node.name, node.op) + (f" (+{weighted - 1})" if weighted > 1 else "")

    def _add_work_and_times(self, layers: Sequence[EngineLayer]) -> None:
        for entry, work in zip(self.model.layers, self.subject.work, strict=False):
            if work.kind not in ("unknown", "nothing"):
                entry.macs, entry.bytes = round(work.macs), round(work.bytes_moved)
        if self.subject.build is not None:
            rows = match_profile_rows(layers, self.subject.build.profile_rows)
            for entry, row in zip(self.model.layers, rows, strict=True):
                entry.measured = None if row is None else round(row.ms, 5)

    def _add_convolutions(self) -> None:
        layer_numbers = _number_layers(self.engine.layers)
        findings = {c.name: c.findings for c in self.subject.prediction.convolutions}
        for conv in self.engine.convolutions:
            node = self._find_convolution(conv)
            number = layer_numbers.get(conv.layer or "", -1)
            if node >= 0:
                self.model.nodes[node].conv = len(self.model.convs)
                if number >= 0:
                    self.model.nodes[node].layer = number
            self.model.convs.append(
                data.ConvolutionEntry(
                    node=node,
                    name=display_name(conv.name),
                    op=conv.op,
                    weights=conv.weights,
                    precision=str(conv.precision),
                    inputs=[str(p) for p in conv.inputs],
                    output=str(conv.output),
                    evidence=str(conv.evidence),
                    layer=number,
                    fused=[display_name(n) for n in conv.fused],
                    findings=list(findings.get(conv.name, ())),
                    cases=[self._add_case(name) for name in conv.cases],
                )
            )
            if conv.layer:  # the names of fused nodes in the layer may differ from the model's
                for position in self.find_nodes(conv.fused):
                    self._set_layer(position, number)

    def _find_convolution(self, conv: ConvOutcome) -> int:
        """Return the position of a convolution's node; -1 if the node is not drawn."""
        if self.engine is self.subject.prediction:
            return self.positions.get(conv.index, -1)
        return self.find_first_node([conv.name])  # nodes of a repaired model have other indices

    def _add_case(self, name: str) -> int:
        """Return the position of the evidence for a rule; add the evidence on first use."""
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

    # Findings, conversions, lines -----------------------------------------------------------------

    def _display_text(self, text: str, code: str) -> str:
        return display_message(as_options(name_floats(text, code, self._float_type)))

    def _add_findings(self) -> None:
        prediction, time = self.subject.prediction, self.subject.time
        times = [] if time is None else [time]
        on_request = {f.id for f in split_fixable(prediction.findings)[1]}
        by_convolution = {c.name: self.positions.get(c.index, -1) for c in prediction.convolutions}
        for finding in prediction.findings:
            convolutions = [by_convolution.get(name, -1) for name in finding.convolutions]
            drawn = [position for position in convolutions if position >= 0]
            nodes = list(dict.fromkeys([*self.find_nodes([finding.node]), *drawn]))
            self._add_finding_to_nodes(nodes, finding.id)
            fix = self._display_text(finding.fix, finding.code)
            self.model.findings.append(
                data.FindingEntry(
                    id=finding.id,
                    code=finding.code,
                    title=name_floats(title_of(finding.code), finding.code, self._float_type),
                    severity=str(finding.severity),
                    at=display_name(finding.node),
                    message=self._display_text(finding.message, finding.code),
                    fix=" ".join(filter(None, (fix, describe_slower_fix(finding, times)))),
                    evidence=str(finding.evidence),
                    node=nodes[0] if nodes else -1,
                    nodes=nodes,
                    values=finding.values,
                    saves_ms=finding.saves_ms,
                    saving_note=describe_included_saving(finding),
                    automatic=finding.automatic,
                    on_request=finding.id in on_request,
                    request_cost=describe_request_cost([finding.code], times)
                    if finding.id in on_request
                    else "",
                )
            )

    def _add_finding_to_nodes(self, positions: Iterable[int], finding: int) -> None:
        """Add the number of a finding to nodes, and once to each of their layers."""
        for position in positions:
            node = self.model.nodes[position]
            node.findings.append(finding)
            if node.layer >= 0 and finding not in self.model.layers[node.layer].findings:
                self.model.layers[node.layer].findings.append(finding)

    def _add_conversions(self) -> None:
        prediction = self.subject.prediction
        layer_numbers = self._find_conversion_layers()
        findings: dict[str, list[int]] = defaultdict(list)
        for finding in prediction.findings:
            findings[finding.node].append(finding.id)
        for name in self.engine.conversion_nodes:
            number = layer_numbers.get(name, -1)
            own_findings: list[int] = []
            for node in {name, self._original_name(name)}:
                own_findings += findings.get(node, ())
            entry = data.ConversionEntry(
                name=display_name(name),
                node=self.find_first_node([name]),
                layer=number,
                from_="",
                to="",
                tensor="",
                findings=sorted(own_findings),
            )
            if number >= 0:
                layer = self.model.layers[number]
                entry.ms, entry.measured = layer.ms, layer.measured
                if layer.inputs:
                    entry.tensor, entry.from_ = layer.inputs[0]
                if layer.outputs:
                    entry.to = layer.outputs[0][1]
            self.model.conversions.append(entry)

    def _find_conversion_layers(self) -> dict[str, int]:
        """Return the position of each conversion layer, by layer name and by node name."""
        layers = enumerate(self.engine.layers)
        conversions = [(i, layer) for i, layer in layers if layer.type == "Conversion"]
        by_node = {name: i for i, layer in conversions for name in layer.nodes}
        # TensorRT's copies of quantizers exist only as layer names.
        return by_node | {layer.name: i for i, layer in conversions}

    def _add_trace_lines(self) -> None:
        """Add each simulated log line to the nodes that the line names.

        A line that names a Q, a DQ or weights is added to their consumers.
        """
        by_trt_name = {n.parser_name: n.name for n in self.subject.model.nodes}
        consumers = self._find_weight_consumers()
        for event in self.subject.prediction.trace:
            if event.kind == trace.RUNNING:
                continue
            positions: dict[int, None] = {}
            for name in _parse_event_names(event):
                positions.update(dict.fromkeys(consumers.get(name, ())))
                positions.update(dict.fromkeys(self.find_nodes([by_trt_name.get(name, name)])))
            nodes = [self.model.nodes[p] for p in positions]
            nodes = [node for node in nodes if len(node.lines) < MAX_NODE_LINES]
            for node in nodes:
                node.lines.append(len(self.model.lines))
            if nodes:
                self._add_trace_line(event)

    def _add_trace_line(self, event: Event) -> None:
        text = trace.render(event)
        if event.pass_name and not text.startswith(event.pass_name):
            text = f"{event.pass_name}: {text}"
        case = self._add_case(event.case) if event.case else -1
        self.model.lines.append(data.TraceLine(display_name(text, 700), case))

    def _find_weight_consumers(self) -> dict[str, list[int]]:
        consumers: dict[str, list[int]] = defaultdict(list)
        for node in self.subject.model.nodes:
            if node.op in WEIGHTED and node.index in self.positions:
                source = self.subject.view.weights(node).source
                consumers[source].append(self.positions[node.index])
        return consumers


def _number_layers(layers: Sequence[EngineLayer]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for number, layer in enumerate(layers):
        numbers.setdefault(layer.name, number)
    return numbers


def _parse_event_names(event: Event) -> dict[str, None]:
    """Return the node names in the two layer names of a log line, as TensorRT writes them."""
    parsed = [parse_layer_name(name) for name in (event.subject, event.object)]
    return dict.fromkeys(name for fused in parsed for name in fused.bases)


def _input_role(node: OnnxNode, position: int) -> str:
    if position == 0:
        return "input"
    return "weights" if node.op in WEIGHTED and position == 1 else "other input"


def _format_zero_point(zero_point: npt.NDArray[Any] | None) -> str:
    if zero_point is None:
        return "unknown"
    if not zero_point.size:
        return "0"
    return str(int(zero_point[0])) if (zero_point == zero_point[0]).all() else "several"


def _format_attribute(value: Any, separator: str) -> str:
    """Return the value of an attribute as text; empty for tensors and graphs."""
    if isinstance(value, str):
        return display_name(value, 80)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        return display_name(separator.join(_format_attribute(v, separator) for v in value[:16]), 80)
    return ""


def time_kind(layer: EngineLayer) -> str:
    """Return the kind of a layer for sums of times, such as ``conversion`` or ``int8``.

    Layers in FP8 and INT4 have the kind ``int8``.
    """
    if layer.type == "Conversion":
        return "conversion"
    if layer.type in ("Reformat", "NoOp"):
        return "copy"
    return data.INT8 if choose_paint(first_tensor_precision(layer)) == data.INT8 else data.FLOAT


def first_tensor_precision(layer: EngineLayer) -> Precision:
    """Return the data type of a layer's first input; without inputs, of the first output."""
    ends = layer.inputs or layer.outputs
    return ends[0].precision if ends else Precision.UNKNOWN


# Analysis of a model ------------------------------------------------------------------------------


@dataclass(slots=True)
class ReportSubject:
    """A model and all results about it.

    Attributes:
        model: Indexed ONNX model.
        prediction: Prediction of the engine. With a GPU, findings and layers have times.
        engine: Prediction of the model without its errors; None if it is unknown. This is
            `prediction` if TensorRT accepts the model.
        target: TensorRT version, restricted to the GPU's compute capability if a GPU is given.
        time: Estimate of the engine's time; None without a GPU or if no engine can be built.
        verification: Comparison of the prediction with the build; None without a build.
        build: Contents of the build's files; None without a build.
        work: Operations and memory traffic of each predicted layer; empty if the target names no
            layers.
        view: View of the model for matching patterns.
    """

    model: Model
    prediction: Prediction
    target: Target
    time: TimeEstimate | None = None
    verification: Verification | None = None
    build: Build | None = None
    work: list[LayerWork] = field(default_factory=list)
    view: View = field(init=False)
    engine: Prediction | None = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.model)
        self.engine = self.prediction


def analyze_model(
    model: ModelSource | Model,
    inputs: ReportInputs,
    gpu: Gpu | None,
    build: Build | None,
    target: Target | None = None,
) -> ReportSubject:
    """Predict a model; with a build, verify the prediction; with a GPU, estimate the time.

    Args:
        model: The model.
        inputs: Options of the user.
        gpu: GPU to estimate the time for; None for no estimate.
        build: Build to compare with; None for no comparison.
        target: TensorRT version, restricted to the GPU. None: the version in `inputs`. With a
            build, `target` is ignored, and the version in `inputs` or else of the build is used.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build belongs to another model.
        QdqtoolError: The version in `inputs` is unknown.
    """
    model = load(model)
    verification = None
    if build is not None:
        verification, target = verify_model(model, build, inputs.target, inputs.gpu)
        assert verification.prediction is not None
        prediction = verification.prediction
    else:
        if target is None:
            target = target_named(inputs.target or DEFAULT_TARGET)
            target = target if gpu is None else target.with_capability(gpu.cc, gpu.name)
        target = choose_typing(model, target)
        # With a GPU, promises are withdrawn together with their savings.
        predict_model = predict_without_gpu if gpu is None else predict
        prediction = predict_model(model, target, assume=inputs.assume)
    subject = ReportSubject(model, prediction, target, verification=verification, build=build)
    if gpu is not None:
        _estimate_time(subject, gpu, inputs.assume)
    if prediction.rejected:
        subject.engine = _predict_without_errors(subject, inputs.assume)
        prediction.findings = list_shown_findings(prediction)
        add_findings(prediction, (), model)  # the page needs consecutive numbers
    subject.work = _estimate_work(subject)
    return subject


def _predict_without_errors(
    subject: ReportSubject, assume: Mapping[str, str] | None
) -> Prediction | None:
    """Predict a rejected model after the fixes of its errors.

    The simulation of the model itself has the causes of most errors in place, such as nonzero zero
    points, so its data types are not those of a model without errors. Limits of a GPU have no
    effect on the simulation.

    Returns:
        None with a build, or if ``fix`` cannot remove all errors.
    """
    errors = subject.prediction.errors()
    if all(isinstance(finding.causes[0].reason, GpuLimit) for finding in errors):
        return subject.prediction
    codes = {finding.code for finding in errors if finding.automatic}
    if subject.build is None and codes:
        target = apply_assumptions(subject.target, assume)
        with contextlib.suppress(QdqtoolError):
            engine = rehearse(subject.model, target, requested=codes).prediction
            return None if engine.rejected else engine
    return None


def _estimate_time(subject: ReportSubject, gpu: Gpu, assume: Mapping[str, str] | None) -> None:
    model, prediction, target = subject.model, subject.prediction, subject.target
    build = subject.build
    gpu = gpus.remove_unsupported_int8(target, gpu)
    assumed_target = apply_assumptions(target, assume)
    subject.time = estimate_time(
        model,
        prediction,
        gpu,
        assumed_target,
        float_type=float_layer_precision(build) if build else gpu.float_type,
        cuda_graph=build is not None and is_timed_as_cuda_graph(build),
    )
    if build is None:
        add_fix_savings(model, prediction, subject.time, assumed_target)
    prediction.time = subject.time.as_json()
    prediction.compute_capabilities = target.capability_names or [gpu.cc]
    add_findings(prediction, gpu_findings(prediction, gpu, model), model)
    mark_included_savings(prediction.findings)
    if build is None and prediction.rejected:
        subject.time = None  # the page shows no times of an engine that cannot be built
        for finding in prediction.findings:
            finding.saves_ms = finding.saving_included_in = None


def _estimate_work(subject: ReportSubject) -> list[LayerWork]:
    """Return the work of each layer; assume FP16 for float layers if no time was estimated.

    The work is empty if the layers are those of a repaired model.
    """
    if subject.engine is not None and subject.engine is not subject.prediction:
        return []
    workload = subject.time.workload if subject.time is not None else None
    if workload is None:
        model = model_variants.resolve_inputs(subject.model, 1)
        workload = predict_workload(model, subject.prediction)
    return workload.layers if len(workload.layers) == len(subject.prediction.layers) else []


def choose_gpu(build: Build | None, options: GpuOptions) -> Gpu | None:
    """Return the GPU of the options, else the GPU of the build; None if neither is known.

    Raises:
        QdqtoolError: The GPU of the options is unknown, `clock` is set without a known GPU, or
            `power` is set for a build.
    """
    if build is not None:
        if options.power is not None:
            raise QdqtoolError(
                "`power` has no effect with a build; give `clock` if the log has no clock",
                code="option-without-effect",
                parameter="power",
            )
        return find_build_gpu(build, options.gpu, options.clock)
    if options.gpu is None:
        return None
    return gpus.choose_gpu(options.gpu, options.clock, options.power)
