"""Estimate the largest time that the fix of each finding can save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qdqtool.findings import codes
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Finding
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import estimate_engine
from qdqtool.timing.time_calibration import TimeCalibration
from qdqtool.timing.work import LayerWork, bytes_per_element
from qdqtool.timing.workload import EngineWorkload
from qdqtool.trt.result import Prediction

Array = npt.NDArray[np.float64]
_MIN_SAVING = 5e-5  # milliseconds; smaller savings are not reported


def add_savings(
    prediction: Prediction,
    simulated: Prediction,
    workload: EngineWorkload,
    ms: Array,
    profile_ms: Array,
    gpu: Gpu,
    correction: TimeCalibration | None,
) -> None:
    """Set ``saves_ms`` of each finding: the milliseconds that its fix saves at most.

    A fix for accuracy, or a fix that keeps a layer in float, saves no time. For other fixes, the
    convolutions are assumed to read and write INT8 and to absorb the poolings after them, so that
    conversions and reformats around the convolutions disappear. If a float convolution gets Q/DQ,
    the INT8 convolutions before it are also assumed to write INT8. Nothing is set for a GPU without
    INT8.

    Args:
        prediction: Prediction with the findings.
        simulated: Prediction with engine layers: `prediction` itself, or a prediction for a similar
            target if the target does not name layers.
        workload: Work of the layers of `simulated`.
        ms: Milliseconds of each layer and extra kernel in a running engine, of shape [kernels].
        profile_ms: The same milliseconds with the overhead of a profile, of shape [kernels], for
            findings about a conversion.
        gpu: The GPU.
        correction: Correction of the times; None for uncorrected times.
    """
    if not gpu.has_int8 or not prediction.findings:
        return
    best_seconds, _ = estimate_engine([_as_int8(w) for w in workload.layers], gpu)
    best_ms = best_seconds * 1e3
    if correction:
        best_ms = correction.apply(best_ms, np.ones(len(workload.layers)))
    finder = _SavingFinder(simulated, workload, ms, best_ms)
    layer_of = {c.name: c.layer for c in prediction.convolutions}
    for finding in prediction.findings:
        if not finding.gains or not codes.get(finding.code).saves_time:
            continue
        position = finder.positions.get(finding.node)
        if position is not None and simulated.layers[position].type == "Conversion":
            finding.saves_ms = round(float(profile_ms[position]), 5)
            continue
        saving = finder.find_saving(dict.fromkeys(map(layer_of.get, finding.convolutions)))
        finding.saves_ms = round(saving, 5) if saving > _MIN_SAVING else None


def add_insert_saving(prediction: Prediction, saved_ms: float) -> None:
    """Distribute the saving of ``insert`` to the findings about layers without Q/DQ.

    A layer without Q/DQ can cost more than its own kernels, because its neighbors then also compute
    or copy float. NO-QDQ gets the saving of the whole network. From this saving, the savings of
    ``fix`` and of the layers themselves are subtracted. The rest is distributed to the
    NOT-QUANTIZED findings, in proportion to the savings of their layers. In a network without Q/DQ,
    the sum over these findings is the saving of the network.

    Args:
        prediction: Prediction with the findings.
        saved_ms: Milliseconds by which the Q/DQ of ``insert`` make the network faster.
    """
    if saved_ms <= _MIN_SAVING:
        return
    gaining = [f for f in prediction.findings if f.gains]
    networks = [f for f in gaining if f.code == "NO-QDQ"]
    for finding in networks:
        finding.saves_ms = round(max(finding.saves_ms or 0.0, saved_ms), 5)
    layers = [f for f in gaining if f.code == "NOT-QUANTIZED"]
    fixable = [f for f in gaining if f.automatic and f.code != "NOT-QUANTIZED"]
    rest = saved_ms - _sum_savings(layers) - _sum_savings(fixable)
    if rest > _MIN_SAVING or networks:
        _distribute(rest, layers)


def mark_included_savings(findings: Sequence[Finding]) -> None:
    """Mark the OUT-FLOAT findings whose saving is included in that of NOT-QUANTIZED.

    If a layer gets Q/DQ, the layer before it writes INT8. The saving of NOT-QUANTIZED includes the
    time that this saves.

    Args:
        findings: Findings with their final ``saves_ms``.
    """
    code = "NOT-QUANTIZED"
    layers = {f.node for f in findings if f.code == code and f.saves_ms}
    for finding in findings:
        is_included = finding.code == "OUT-FLOAT" and not layers.isdisjoint(finding.nodes)
        if is_included and finding.saves_ms:
            finding.saving_included_in = code


def _sum_savings(findings: Iterable[Finding]) -> float:
    return sum(finding.saves_ms or 0.0 for finding in findings)


def _distribute(saved_ms: float, findings: Sequence[Finding]) -> None:
    """Add a saving to those of findings, in proportion to them."""
    total = _sum_savings(findings)
    for finding in findings:
        ms = finding.saves_ms or 0.0
        share = ms / total if total else 1 / len(findings)
        finding.saves_ms = round(max(0.0, ms + share * saved_ms), 5)


class _SavingFinder:
    """Estimates the milliseconds that are saved if layers read and write INT8.

    Attributes:
        positions: Position of each engine layer by its name.
    """

    def __init__(
        self, simulated: Prediction, workload: EngineWorkload, ms: Array, best_ms: Array
    ) -> None:
        self.layers, self.workload = simulated.layers, workload
        self.ms, self.best_ms = ms, best_ms
        self.positions = {layer.name: i for i, layer in enumerate(self.layers)}
        self.consumers: dict[str, list[int]] = defaultdict(list)
        for i, layer in enumerate(self.layers):
            for edge in layer.inputs:
                self.consumers[edge.tensor].append(i)
        self.producers = {
            edge.tensor: i for i, layer in enumerate(self.layers) for edge in layer.outputs
        }
        # Positions of the kernels that are not layers of the prediction, by name.
        self.extras: dict[str, set[int]] = defaultdict(set)
        for i, extra in enumerate(workload.extras, len(workload.layers)):
            self.extras[extra.name].add(i)
        # Cached, because findings often share layers.
        self._savings: dict[tuple[int, ...], float] = {}

    def find_saving(self, names: Iterable[str | None]) -> float:
        """Return the milliseconds saved if the named convolutions read and write INT8.

        INT8 convolutions that write float because a named convolution reads float are included.
        Names of other layers are ignored.
        """
        positions = [self.positions[name] for name in names if name in self.positions]
        named = [i for i in positions if self.workload.layers[i].kind in work.COMPUTING]
        slow = tuple(dict.fromkeys([*named, *self._find_float_writers(named)]))
        if slow not in self._savings:
            faster = sum(max(0.0, self.ms[i] - self.best_ms[i]) for i in slow)
            vanishing = sum(self.ms[j] for j in self._find_removed_kernels(slow))
            self._savings[slow] = float(faster + vanishing)
        return self._savings[slow]

    def _is_fusible(self, j: int) -> bool:
        """Return whether layer j is a float pooling or pointwise layer.

        An INT8 convolution before such a layer can fuse it.
        """
        work_of_layer = self.workload.layers[j]
        return work_of_layer.precision.is_float and (
            self.layers[j].type == "Pooling" or work_of_layer.kind == work.POINTWISE
        )

    def _find_float_writers(self, convolutions: Iterable[int]) -> list[int]:
        """Return the positions of INT8 convolutions whose float outputs `convolutions` read.

        Layers that the INT8 convolution could fuse may be between the two.
        """
        writers = []
        visited: set[int] = set()
        pending = [
            edge.tensor
            for i in convolutions
            if self.workload.layers[i].precision.is_float
            for edge in self.layers[i].inputs
        ]
        while pending:
            i = self.producers.get(pending.pop())
            if i is None or i in visited:
                continue
            visited.add(i)
            producer = self.workload.layers[i]
            if producer.kind in work.COMPUTING:
                if not producer.precision.is_float and producer.written_as.is_float:
                    writers.append(i)
            elif self._is_fusible(i):
                pending += [edge.tensor for edge in self.layers[i].inputs]
        return writers

    def _find_extras(self, *names: str) -> set[int]:
        return set().union(*(self.extras.get(name, ()) for name in names))

    def _find_changes(self, tensor: str) -> set[int]:
        """Return the positions of the kernels that change the type or layout of a tensor."""
        return self._find_extras(f"reformat of {tensor}", f"layout of {tensor}")

    def _find_removed_kernels(self, convolutions: Iterable[int]) -> set[int]:
        """Return the positions of kernels that disappear if the convolutions are INT8.

        These kernels change types or layouts, or compute activations, residual additions and
        poolings after the convolutions.
        """
        kernels: set[int] = set()
        pending = []
        for i in convolutions:
            layer = self.layers[i]
            for edge in layer.inputs:
                kernels |= self._find_changes(edge.tensor)
            kernels |= self._find_extras(f"PWN after {layer.name}")
            pending += [edge.tensor for edge in layer.outputs]
        while pending:
            tensor = pending.pop()
            kernels |= self._find_changes(tensor)
            for j in self.consumers.get(tensor, ()):
                if j in kernels:
                    continue
                if self.layers[j].type == "Conversion":
                    kernels.add(j)
                elif self._is_fusible(j):
                    kernels.add(j)
                    pending += [edge.tensor for edge in self.layers[j].outputs]
        return kernels


def _as_int8(w: LayerWork) -> LayerWork:
    """Return the work that a convolution has if it reads and writes INT8.

    The work of other layers is returned unchanged.
    """
    is_int8 = not w.precision.is_float and w.written_as == Precision.INT8
    if w.kind not in work.COMPUTING or is_int8:
        return w
    read_width, written_width = bytes_per_element(w.precision), bytes_per_element(w.written_as)
    return replace(
        w,
        precision=Precision.INT8,
        written_as=Precision.INT8,
        read=w.read / read_width,
        weights=w.weights / read_width,
        written=w.written / written_width,
    )
