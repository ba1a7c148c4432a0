"""Findings about running a predicted engine on a GPU."""

from __future__ import annotations

from qdqtool.findings.report import Report
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.reasons.gpus import GpuFact, GpuLacks
from qdqtool.timing.gpus import Gpu, find_gpu, find_rates
from qdqtool.trt.targets import target_named
from qdqtool.types import Evidence, Finding, Prediction

# Compute capability, and the first target that supports it and newer ones.
_FIRST_TARGETS = ((10.0, (10, 0)), (8.9, (8, 5)))
# Compute capability, and the first target that dropped it and older ones.
_DROPPED = ((5.3, (10, 0)), (7.0, (11, 0)))


def gpu_from_capability(sm: str) -> Gpu:
    """Return a GPU without a name, for findings, from a compute capability such as ``8.6``.

    A name (``GTX 1660``) gives the GPU of that name.
    """
    if any(c.isalpha() for c in sm.strip().lower().removeprefix("sm").strip("_")):
        return find_gpu(sm)
    rates, notes = find_rates(sm)
    return Gpu(
        name=f"sm {rates.cc}",
        aliases=(),
        sms=1,
        clock=1000.0,
        bandwidth=100.0,
        l2=1.0,
        power=0.0,
        rates=rates,
        evidence=Evidence.ASSUMED,
        source="",
        notes=notes,
    )


def gpu_findings(prediction: Prediction, gpu: Gpu, model: Model | None = None) -> list[Finding]:
    """Return findings about running a predicted engine on a GPU.

    Their ids continue those of the prediction. A prediction for TensorRT-RTX gets none, because
    its own rules refer to the GPUs that it supports.

    Args:
        prediction: The prediction.
        gpu: The GPU.
        model: The model, which shows the depthwise convolutions. Default: no findings about them.
    """
    if target_named(prediction.target).is_rtx:
        return []
    checks = _GpuChecks(prediction, gpu)
    checks.check_int8_rate()
    checks.check_int8_kernels(model)
    checks.check_float_rate()
    checks.check_target()
    start = max((finding.id for finding in prediction.findings), default=-1) + 1
    for number, finding in enumerate(checks.report.findings, start):
        finding.id = number
    return checks.report.findings


class _GpuChecks:
    def __init__(self, prediction: Prediction, gpu: Gpu) -> None:
        self.prediction, self.gpu, self.rates = prediction, gpu, gpu.rates
        self.report = Report(prediction.target)
        self.int8 = [c for c in prediction.convolutions if c.is_int8]

    def _add(self, fact: GpuFact, names: list[str], evidence: Evidence, *values: str) -> None:
        rates = self.rates
        gpu = f"{self.gpu.name} (compute capability {rates.cc}, {rates.architecture})"
        first = names[0] if names else ""
        refusal = GpuLacks("GPU", "", fact, gpu, len(names), first, values)
        self.report.add(refusal, convolutions=names, evidence=evidence)

    def check_int8_rate(self) -> None:
        names = [c.name for c in self.int8]
        if not names:
            return
        if not self.gpu.has_int8:
            self._add(GpuFact.NO_INT8, names, self.rates.evidence)
        elif self.rates.int8_path == "dp4a":
            fact = GpuFact.DP4A_FP32
            if self.gpu.has_tensor_cores:
                fact = GpuFact.DP4A_TENSOR
            elif self.rates.fp16 > self.rates.fp32_pipe:
                fact = GpuFact.DP4A_FP16
            self._add(fact, names, self.rates.evidence)

    def check_int8_kernels(self, model: Model | None) -> None:
        if not self.gpu.has_int8:
            return
        if self.rates.int8_path != "tensor":
            pointwise = [c.name for c in self.int8 if "PWN(" in (c.layer or "")]
            if pointwise:
                self._add(GpuFact.FUSION, pointwise, Evidence.DOCUMENTED)
            depthwise = find_depthwise(model) if model is not None else frozenset()
            slow = [c.name for c in self.int8 if c.index in depthwise]
            if slow:
                self._add(GpuFact.KERNELS, slow, Evidence.DOCUMENTED)
        if self.int8 and self.gpu.is_jetson:
            evidence = Evidence.SEEN if self.rates.cc == "8.7" else Evidence.ASSUMED
            self._add(GpuFact.JETSON, [], evidence)

    def check_float_rate(self) -> None:
        floats = [c.name for c in self.prediction.convolutions if not c.is_int8]
        if floats and self.rates.fp16 < self.rates.fp32_pipe:
            self._add(GpuFact.NO_FP16, floats, self.rates.evidence)

    def check_target(self) -> None:
        target = self.prediction.target
        version, cc = target_named(target).version, float(self.rates.cc)
        first = next((first for capability, first in _FIRST_TARGETS if cc >= capability), version)
        if first > version:
            self._add(GpuFact.SINCE, [], Evidence.ASSUMED, target, f"{first[0]}.{first[1]}")
        elif any(cc <= capability and version >= last for capability, last in _DROPPED):
            self._add(GpuFact.DROPPED, [], Evidence.ASSUMED, target, "")


def find_depthwise(model: Model) -> frozenset[int]:
    """Return the indices of the depthwise convolutions: one input channel per group."""
    view = View(model)
    indices = set()
    for node in view.weighted:
        if node.op == "Conv" and node.attributes.get("group", 1) != 1:
            shape = view.weight_shape(node)
            if shape is not None and len(shape) > 1 and shape[1] == 1:
                indices.add(node.index)
    return frozenset(indices)
