"""TensorRT calibration caches: scales of a float network's tensors, and build commands.

Without Q/DQ, TensorRT runs a layer in INT8 only if all of its tensors have a scale. The Qs of a
Q/DQ model give scales for some tensors only. These rules give scales to more tensors:

* ``moved``: an operator that only moves values (Reshape, MaxPool, Concat ...) connects the tensor
  with tensors that have a scale. The tensor gets their scale.
* ``bounded``: the magnitudes cannot exceed those of the input (Relu, average pooling) or a limit
  (Clip).
* ``fixed``: the range does not depend on data (Sigmoid, Softmax).
* ``clipped``: the tensor's only consumer is a Relu or Clip, and the output of this consumer has a
  scale. The consumer clips larger values. NVIDIA's qdq-translator has this rule for Relu.
* ``unary``: the output of a convolution has no scale, and its only consumer is an Add. The other
  input and the output of the Add have scales. The output of the convolution gets scale 1.0. DLA
  3.13 and later (JetPack 6) then fuses the convolution and the Add (NVIDIA's qdq-translator,
  ``--add_unary_ew_scales_for_dla``).

If a convolution precedes another activation, such as SiLU, the convolution's output does not get
the scale of the activation's output, because the two ranges differ. A calibration measures the
range of the convolution's output.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.ir.bounds import WITHIN_ONE, find_bounds
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import (
    WEIGHTED,
    LayerKind,
    commuting_inputs,
    is_pointwise,
    operator_of,
)
from qdqtool.ir.qdq import FLOATS
from qdqtool.patterns.pointwise import run_time_inputs
from qdqtool.patterns.view import View
from qdqtool.trt.fault_checks import LARGEST_SCALE
from qdqtool.trt.targets import Target
from qdqtool.util.json_text import Json
from qdqtool.util.text import format_count

_CLIPPING = ("Relu", "Clip")
_BOUNDED = ("Relu", "LeakyRelu", "Clip", "Abs", "Neg", "HardSwish", "ReduceMax", "ReduceMin")
_MAX_ROUNDS = 16  # maximum number of rounds; in each, a scale moves up or down one branch
_MAX_NAMES = 4  # maximum number of tensors without a scale that the report names
_NO_LAYER = (LayerKind.SHAPE, LayerKind.CONSTANT)


@dataclass
class TensorScales:
    """Scales of the tensors of a network.

    Attributes:
        scales: amax / 127 by tensor.
        rules: Origin of each scale: a rule of this module, ``quantizer`` or ``measured``.
        missing: Float tensors without a scale, in graph order.
    """

    scales: dict[str, float]
    rules: dict[str, str]
    missing: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Number of scales of each origin."""
        return dict(Counter(self.rules.values()))


def list_float_tensors(model: Model) -> list[str]:
    """Return the float tensors that depend on the network's inputs, in graph order.

    Tensors of unknown type are included.
    """
    varying = View(model).varying
    tensors = [*model.inputs, *(t for node in model.ordered for t in node.outputs)]
    types = (*FLOATS, TensorProto.UNDEFINED)
    return [t for t in dict.fromkeys(tensors) if t in varying and model.elem_type(t) in types]


def complete_scales(
    model: Model,
    quantizer_scales: Mapping[str, float],
    measured: Mapping[str, float] | None = None,
    *,
    unary: bool = False,
) -> TensorScales:
    """Complete the scales of a float network by the rules of this module.

    Args:
        model: The network without Q/DQ.
        quantizer_scales: amax / 127 by tensor from quantizers. Tensors that the network does not
            have are ignored.
        measured: amax / 127 by tensor from a calibration, for tensors without a quantizer.
        unary: Whether to use the rule ``unary``.
    """
    tensors = list_float_tensors(model)
    names = set(tensors)
    result = TensorScales({}, {})
    for rule, table in (("measured", measured or {}), ("quantizer", quantizer_scales)):
        for tensor in names.intersection(table):
            result.scales[tensor], result.rules[tensor] = table[tensor], rule
    completion = _ScaleCompletion(model, names, result)
    completion.run(tensors)
    if unary:
        completion.add_unary_scales()
        completion.run(tensors)
    result.scales = {t: result.scales[t] for t in tensors if t in result.scales}
    result.missing = [t for t in tensors if t not in result.scales]
    return result


def measure_scales(
    model: Model,
    quantizer_scales: Mapping[str, float],
    measure: Callable[[Model, Sequence[str]], Mapping[str, float]] | None,
    *,
    unary: bool = False,
) -> TensorScales:
    """Complete scales by rules, then measure the tensors that have no scale or only a bound.

    A bound may be much larger than the actual range.

    Args:
        model: The network without Q/DQ.
        quantizer_scales: amax / 127 by tensor from quantizers.
        measure: Function that takes the model and tensors, and returns amax / 127 by tensor. None
            without calibration data.
        unary: Whether to use the rule ``unary``.
    """
    scales = complete_scales(model, quantizer_scales, unary=unary)
    bounded = [t for t, rule in scales.rules.items() if rule == "bounded"]
    if measure is None or not (bounded or scales.missing):
        return scales
    measured = measure(model, [*bounded, *scales.missing])
    return complete_scales(model, quantizer_scales, measured, unary=unary)


class _ScaleCompletion:
    def __init__(self, model: Model, names: set[str], result: TensorScales) -> None:
        self.model = model
        self.names = names
        self.result = result

    def run(self, tensors: list[str]) -> None:
        """Apply the rules until nothing changes; use bounds if no other rule gives a scale."""
        for _ in range(_MAX_ROUNDS):
            before = len(self.result.scales)
            self._apply_rule(tensors, self._scale_from_inputs)
            if len(self.result.scales) == before:
                self._apply_rule(tensors, self._scale_from_bound)
            if len(self.result.scales) == before:
                return

    def _apply_rule(
        self, tensors: list[str], rule: Callable[[Node], tuple[float, str] | None]
    ) -> None:
        for node in self.model.ordered:
            for tensor in node.outputs:
                self._set_if_missing(tensor, rule(node))
        for tensor in reversed(tensors):
            if tensor not in self.result.scales:
                for candidate in (
                    self._scale_from_moves(tensor),
                    self._scale_from_clipping(tensor),
                ):
                    self._set_if_missing(tensor, candidate)

    def add_unary_scales(self) -> None:
        for node in self.model.ordered:
            if node.op not in WEIGHTED or node.output in self.result.scales:
                continue
            consumers = self.model.consumers(node.output)
            if len(consumers) != 1 or consumers[0].op != "Add":
                continue
            others = [t for t in consumers[0].inputs if t != node.output]
            if len(others) == 1 and {others[0], consumers[0].output} <= self.result.scales.keys():
                self._set_if_missing(node.output, (1.0, "unary"))

    def _set_if_missing(self, tensor: str, candidate: tuple[float, str] | None) -> None:
        if candidate is not None and tensor in self.names and tensor not in self.result.scales:
            self.result.scales[tensor], self.result.rules[tensor] = candidate

    def _scale_from_inputs(self, node: Node) -> tuple[float, str] | None:
        if node.op in WITHIN_ONE:
            return 1.0 / LEVELS, "fixed"
        sources = commuting_inputs(self.model, node)
        if sources:
            scales = [self._known_scale(t) for t in sources]
            present = [s for s in scales if s is not None]
            return (max(present), "moved") if len(present) == len(scales) else None
        return None

    def _scale_from_bound(self, node: Node) -> tuple[float, str] | None:
        limits = [self._bounds_scale(node.output)]
        if operator_of(node).averages or node.op in _BOUNDED:
            limits.append(self._known_scale(node.input(0)))
        scales = [scale for scale in limits if scale is not None]
        return (min(scales), "bounded") if scales else None

    def _bounds_scale(self, tensor: str) -> float | None:
        """Return the scale for a tensor's bounds; None if unknown, zero or implausibly large."""
        bounds = find_bounds(self.model).get(tensor)
        if bounds is None:
            return None
        scale = max(abs(bounds.low), abs(bounds.high)) / LEVELS
        return scale if 0 < scale <= LARGEST_SCALE else None

    def _known_scale(self, tensor: str) -> float | None:
        """Return the scale of a tensor; for a constant, its largest magnitude / 127.

        None if unknown or not finite.
        """
        if tensor in self.result.scales:
            return self.result.scales[tensor]
        value = self.model.constant(tensor)
        if value is None or not value.size or value.dtype.kind != "f":
            return None
        largest = float(np.abs(value).max())
        return largest / LEVELS if np.isfinite(largest) else None

    def _scale_from_moves(self, tensor: str) -> tuple[float, str] | None:
        consumers = self.model.consumers(tensor)
        copies = []
        for node in consumers:
            if tensor not in commuting_inputs(self.model, node):
                continue
            scales = [self.result.scales.get(output) for output in filter(None, node.outputs)]
            if operator_of(node).cuts and (None in scales or len(consumers) > 1):
                continue  # the tensor may have larger values that are not in this output
            copies += [s for s in scales if s is not None]
        return (max(copies), "moved") if copies else None

    def _scale_from_clipping(self, tensor: str) -> tuple[float, str] | None:
        consumers = self.model.consumers(tensor)
        if len(consumers) != 1 or consumers[0].op not in _CLIPPING:
            return None
        scale = self.result.scales.get(consumers[0].output)
        is_kept = self.model.is_output(tensor)
        return None if scale is None or is_kept else (scale, "clipped")


# Precisions of layers --------------------------------------------------------------------------


@dataclass
class LayerPrecisions:
    """Layer precisions for options of trtexec.

    Attributes:
        layers: ``int8`` or ``fp16`` by layer, for ``--layerPrecisions``.
        outputs: ``int8`` or ``fp16`` by layer, for ``--layerOutputTypes``.
        unnamed: Nodes whose names are not unique. trtexec cannot set their precision.
    """

    layers: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)


def choose_precisions(model: Model, scales: TensorScales, int8: set[str]) -> LayerPrecisions:
    """Choose the layer precisions for a build with a cache, without Q/DQ.

    With these precisions, the build quantizes the same layers as a build of the Q/DQ model.

    Args:
        model: The network without Q/DQ.
        scales: Scales of the network's tensors.
        int8: Names of the nodes with weights that are quantized.
    """
    names = Counter(node.parser_name for node in model.nodes)
    missing, varying = set(scales.missing), set(list_float_tensors(model))
    precisions = LayerPrecisions()
    floats: set[str] = set()  # outputs of layers in FP16
    for node in model.ordered:
        if operator_of(node).kind in _NO_LAYER or varying.isdisjoint(node.outputs):
            continue
        precision = _choose_precision(model, node, missing, int8, floats)
        if precision == "fp16":
            floats.update(node.outputs)
        writes_float = precision == "fp16" or not missing.isdisjoint(node.outputs)
        if precision is None:
            continue
        name = node.parser_name
        if names[name] != 1:
            precisions.unnamed.append(node.name)
            continue
        precisions.layers[name] = precision
        if writes_float:
            precisions.outputs[name] = "fp16"
    return precisions


def _choose_precision(
    model: Model, node: Node, missing: set[str], int8: set[str], floats: set[str]
) -> str | None:
    if node.op in WEIGHTED:
        return "int8" if node.name in int8 and missing.isdisjoint(node.inputs) else "fp16"
    if not missing.isdisjoint((*node.inputs, *node.outputs)):
        return "fp16"
    sources = run_time_inputs(model, node)
    is_fused = is_pointwise(node) or node.op == "BatchNormalization"
    return "fp16" if is_fused and sources and floats.issuperset(sources) else None


def format_precisions(precisions: LayerPrecisions) -> list[str]:
    """Return trtexec options that set layer precisions; empty if no precision is to be set."""
    flags = []
    for option, table in (
        ("--layerPrecisions", precisions.layers),
        ("--layerOutputTypes", precisions.outputs),
    ):
        if table:
            pairs = (f"{_quote_name(name)}:{precision}" for name, precision in table.items())
            flags.append(f"{option}={','.join(pairs)}")
    return ["--precisionConstraints=prefer", *flags] if flags else []


def _quote_name(layer: str) -> str:
    return f"'{layer}'" if set(layer) & set(":,") else layer


# Caches -----------------------------------------------------------------------------------------


def cache_header(target: Target) -> str:
    """Return the first line of a cache, such as ``TRT-8502-EntropyCalibration2`` for 8.5.2.

    TensorRT ignores a cache of another version or calibrator. Since TensorRT 10, the minor number
    and the patch number have two digits each (``TRT-100300-EntropyCalibration2``).

    Raises:
        QdqtoolError: The target cannot read a calibration cache.
    """
    if not target.has_calibrators:
        raise QdqtoolError(
            f"`target` {target.display_name}: this version has no calibrators, so it cannot read "
            "a calibration cache; build the Q/DQ model instead",
            code="unsupported",
            parameter="target",
        )
    return f"TRT-{target.table_number}-EntropyCalibration2"


@dataclass
class CacheReport:
    """A calibration cache, and the trtexec options of a build with the cache.

    Attributes:
        path: File of the cache.
        model: File of the float model.
        header: First line of the cache.
        scales: Scales of the tensors.
        precisions: Layer precisions of the build.
        flags: Options of trtexec for the layer precisions; empty if the target's trtexec has no
            such options.
    """

    path: str
    model: str
    header: str
    scales: TensorScales
    precisions: LayerPrecisions
    flags: list[str]

    @property
    def command(self) -> str:
        """The trtexec command that builds for a Jetson's DLA, with the GPU as fallback."""
        arguments = [
            f"--onnx={self.model}",
            f"--calib={self.path}",
            "--int8",
            "--fp16",
            "--useDLACore=0",
            "--allowGPUFallback",
            *self.flags,
        ]
        return " ".join(["trtexec", *map(shlex.quote, arguments)])

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "path": self.path,
            "model": self.model,
            "header": self.header,
            "tensors": len(self.scales.scales),
            "rules": self.scales.counts,
            "missing": list(self.scales.missing),
            "layer_precisions": dict(self.precisions.layers),
            "layer_output_types": dict(self.precisions.outputs),
            "unnamed_nodes": list(self.precisions.unnamed),
            "flags": list(self.flags),
            "command": self.command,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text report, without the trtexec command."""
        counts = ", ".join(f"{n} {rule}" for rule, n in self.scales.counts.items())
        total = len(self.scales.scales) + len(self.scales.missing)
        yield (
            f"Wrote {self.path}: scales of {len(self.scales.scales)} of {total} tensors "
            f"({counts}); first line {self.header}"
        )
        missing = self.scales.missing
        if missing:
            more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
            yield (
                f"  {format_count(len(missing), 'tensor')} without a known range: "
                f"{', '.join(missing[:_MAX_NAMES])}{more}. Layers with such tensors run in FP16. "
                "Calibration images (`data`) would supply the ranges."
            )
        if self.precisions.unnamed:
            yield (
                f"  {format_count(len(self.precisions.unnamed), 'node')} without a precision, "
                "because trtexec cannot tell nodes of the same name apart; give each node a unique "
                "name"
            )


def write_cache(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    target: Target,
    scales: TensorScales,
    precisions: LayerPrecisions,
) -> CacheReport:
    """Write a calibration cache for a float model, and return the report.

    Raises:
        QdqtoolError: The target cannot read a cache, or the file cannot be written.
        DataError: The format of a cache does not allow a scale or a tensor name.
    """
    from calibration.cache import write_tensorrt_cache

    header = cache_header(target)
    write_tensorrt_cache(path, scales.scales, header)
    return CacheReport(
        os.fspath(path),
        os.fspath(model) or "float.onnx",
        header,
        scales,
        precisions,
        format_precisions(precisions) if target.trtexec.layer_types else [],
    )
