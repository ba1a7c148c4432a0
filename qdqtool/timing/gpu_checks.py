"""Findings about running a predicted engine on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Evidence
from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding
from qdqtool.reasons.gpus import GpuFact, GpuLimit
from qdqtool.timing.gpus import Gpu, find_gpu, find_rates, load_rates
from qdqtool.trt.gpu_support import GpuSupport, find_gpu_support
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.targets import target_named

FIRST_BF16 = 8.0  # first compute capability with BF16
_OPEN_CAPABILITIES = 10.0  # unknown compute capabilities from here on may belong to future GPUs


def gpu_from_capability(sm: str) -> Gpu:
    """Return a GPU that has a compute capability, to check what it supports.

    Times for this GPU are meaningless: its SMs, clock and memory are placeholders. An unknown
    compute capability from 10.0 on has the rates of the next lower known capability, with a
    note.

    Args:
        sm: Compute capability such as ``8.6``, or a GPU's name (``GTX 1660``).

    Raises:
        QdqtoolError: The text is neither a compute capability nor a GPU's name, or no GPU has the
            compute capability.
    """
    if any(c.isalpha() for c in sm.strip().lower().removeprefix("sm").strip("_")):
        return find_gpu(sm)
    rates, notes = find_rates(sm)
    names = list(load_rates())
    if rates.cc not in names and float(rates.cc) < _OPEN_CAPABILITIES:
        raise QdqtoolError(
            f"`sm` {sm[:40]}: no GPU has this compute capability; choose one of {', '.join(names)}",
            code="unknown-choice",
            parameter="sm",
        )
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

    Empty for TensorRT-RTX, whose prediction already considers its GPUs.

    Args:
        prediction: The prediction.
        gpu: The GPU.
        model: The model. None: no findings about depthwise convolutions.
    """
    if target_named(prediction.target).is_rtx:
        return []
    rates = gpu.rates
    name = f"{gpu.name} (compute capability {rates.cc}, {rates.architecture})"
    report = FindingReport(prediction.target)
    facts = [*_int8_facts(prediction, gpu, model), *_type_and_support_facts(prediction, gpu)]
    for fact, convolutions, evidence, values in facts:
        first = convolutions[0] if convolutions else ""
        reason = GpuLimit("GPU", "", fact, name, len(convolutions), first, values)
        fatal = False if fact == GpuFact.PARTLY else None
        report.add(reason, convolutions=convolutions, evidence=evidence, fatal=fatal)
    return report.findings


_SUPPORT_FACTS = {
    GpuSupport.TOO_NEW: GpuFact.SINCE,
    GpuSupport.DROPPED: GpuFact.DROPPED,
    GpuSupport.PARTIAL: GpuFact.PARTLY,
}

# Fact, names of the affected convolutions, evidence of the rule, and values of the message.
_Fact = tuple[GpuFact, list[str], Evidence, tuple[str, ...]]


def _int8_facts(prediction: Prediction, gpu: Gpu, model: Model | None) -> Iterator[_Fact]:
    int8 = [c for c in prediction.convolutions if c.is_int8]
    names, rates = [c.name for c in int8], gpu.rates
    if not int8:
        return
    if not gpu.has_int8:
        yield GpuFact.NO_INT8, names, rates.evidence, ()
        return
    if rates.int8_path == "dp4a":
        fact = GpuFact.DP4A_FP16 if rates.fp16 > rates.fp32_pipe else GpuFact.DP4A_FP32
        yield GpuFact.DP4A_TENSOR if gpu.has_tensor_cores else fact, names, rates.evidence, ()
    if rates.int8_path != "tensor":
        yield from _facts_without_tensor_cores(int8, model)
    if gpu.has_dla:
        yield GpuFact.JETSON, [], Evidence.SEEN if rates.cc == "8.7" else Evidence.ASSUMED, ()


def _facts_without_tensor_cores(int8: list[ConvOutcome], model: Model | None) -> Iterator[_Fact]:
    pointwise = [c.name for c in int8 if "PWN(" in (c.layer or "")]
    if pointwise:
        yield GpuFact.FUSION, pointwise, Evidence.DOCUMENTED, ()
    indices = find_depthwise_convolutions(model) if model is not None else frozenset()
    depthwise = [c.name for c in int8 if c.index in indices]
    if depthwise:
        yield GpuFact.KERNELS, depthwise, Evidence.DOCUMENTED, ()


def _type_and_support_facts(prediction: Prediction, gpu: Gpu) -> Iterator[_Fact]:
    fp8 = [c.name for c in prediction.convolutions if c.is_fp8]
    if fp8 and not gpu.has_fp8:
        yield GpuFact.NO_FP8, fp8, Evidence.DOCUMENTED, ()
    if prediction.model.has_bfloat16 and float(gpu.cc) < FIRST_BF16:
        yield GpuFact.NO_BF16, [], Evidence.DOCUMENTED, ()
    floats = [c.name for c in prediction.convolutions if not c.is_quantized]
    if floats and gpu.rates.fp16 < gpu.rates.fp32_pipe:
        yield GpuFact.NO_FP16, floats, gpu.rates.evidence, ()
    target = prediction.named_target
    support, versions = find_gpu_support(gpu.cc, target)
    fact = _SUPPORT_FACTS.get(support)
    if fact is not None:
        # The end of support for Xavier is inferred from JetPack, and was not seen in a build.
        evidence = Evidence.ASSUMED if gpu.cc == "7.2" else Evidence.DOCUMENTED
        yield fact, [], evidence, (target.title, versions)


def find_depthwise_convolutions(model: Model) -> frozenset[int]:
    """Return the indices of the depthwise convolutions: one input channel per group."""
    view = View(model)
    indices = set()
    for node in view.nodes_with_weights:
        if node.op == "Conv" and node.attributes.get("group", 1) != 1:
            shape = view.weight_shape(node)
            if shape is not None and len(shape) > 1 and shape[1] == 1:
                indices.add(node.index)
    return frozenset(indices)
