"""What :func:`qdqtool.insert` gives back."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import onnx

from qdqtool.findings.left_float import SkippedNode
from qdqtool.insertion.losses import ActivationLosses, OutputAgreement
from qdqtool.insertion.scales import GroupScale
from qdqtool.insertion.smoothing import ScaleMigration
from qdqtool.ir.modelfile import save
from qdqtool.trt.targets import DEFAULT_TARGET
from qdqtool.types import INSERTION_SCHEMA, TOOL_VERSION, Finding, Json, Prediction, QuantizedTensor
from qdqtool.util.files import InputFiles, forbid_overwrite
from qdqtool.util.notes import Note


@dataclass(repr=False)
class Insertion:
    """A Q/DQ model and how it came about.

    Attributes:
        model: The Q/DQ model.
        quantized: What got a Q/DQ pair, in graph order, with its scale.
        skipped: What could have been quantized and was left float, and why.
        calibration: Method, number of images, warnings; as in the JSON.
        groups: Scale groups of more than one source, with the bits that each source loses.
        notes: What was done to the model before.
        warnings: What the user should look at.
        target: Which TensorRT the model was made for.
        prediction: What TensorRT will make of it; None with ``predict=False``.
        source: Path of the float model; empty for one in memory.
        output: Where :meth:`save` wrote the model; empty before.
        read: The files that were read, none of which :meth:`save` overwrites.
        losses: What the quantized activations cost at the outputs, and the worst; None when that was not measured.
        float_type: Type of what is not quantized, ``fp32`` or ``fp16``.
        float32: Tensors that stay FP32 in a model in FP16, with the largest value that was seen.
        agreement: How far an FP16 model's outputs are from the float model's; None when that was not measured.
        smoothed: Where scales of activations were moved into weights.
        findings: What the warnings report of scales and normalizations; ``prediction`` has all others.
        compute_capabilities: Those of the GPUs that ``target`` builds for; empty where it is made for all.
    """

    model: onnx.ModelProto
    quantized: list[QuantizedTensor]
    skipped: list[SkippedNode]
    calibration: Json
    groups: list[GroupScale]
    notes: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    target: str = DEFAULT_TARGET
    prediction: Prediction | None = None
    source: str = ""
    output: str = ""
    read: InputFiles | None = field(default=None, repr=False, compare=False)
    losses: ActivationLosses | None = None
    float_type: str = "fp32"
    float32: dict[str, float] = field(default_factory=dict)
    agreement: OutputAgreement | None = None
    smoothed: list[ScaleMigration] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    compute_capabilities: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Insertion of {self.source or 'a model in memory'} for {self.target}: {len(self.quantized)} tensors "
            f"quantized, {len(self.warnings)} warnings>"
        )

    @property
    def ok(self) -> bool:
        """Whether there is nothing to look at: no warning, and no finding that is an error or a warning."""
        return not self.warnings and (self.prediction is None or self.prediction.ok)

    @property
    def activations(self) -> list[QuantizedTensor]:
        """The quantized tensors that are not weights."""
        return [q for q in self.quantized if q.method != "weights-max"]

    @property
    def weights(self) -> list[QuantizedTensor]:
        return [q for q in self.quantized if q.method == "weights-max"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model, atomically; one of over 2 GB gets its weights in ``<name>.data`` beside it.

        Raises:
            QdqtoolError: ``path`` is a file that was read (the model, its weights, an image), its folder is missing, or
                it cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.model, path, source=self.source)
        self.output = os.fspath(path)
        if self.prediction is not None:
            self.prediction.model.path = self.output

    def as_json(self) -> Json:
        return {
            "schema": INSERTION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.source,
            "output": self.output,
            "target": self.target,
            "compute_capabilities": list(self.compute_capabilities),
            "quantized": [q.as_json() for q in self.quantized],
            "skipped": [s.as_json() for s in self.skipped],
            "calibration": self.calibration,
            "groups": [_group_json(i, g) for i, g in enumerate(self.groups)],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "losses": self.losses.as_json() if self.losses else None,
            "float_type": self.float_type,
            "float32": largest_json(self.float32),
            "smoothed": [s.as_json() for s in self.smoothed],
            "agreement": self.agreement.as_json() if self.agreement else None,
            "prediction": self.prediction.summary() if self.prediction else None,
        }


def largest_json(tensors: dict[str, float]) -> list[Json]:
    """Tensors with the largest value that was seen, None for one that is not finite."""
    return [{"tensor": t, "largest": v if math.isfinite(v) else None} for t, v in tensors.items()]


def _group_json(index: int, scale: GroupScale) -> Json:
    return {
        "group": index,
        "scale": scale.scale,
        "method": scale.method,
        "quantized": list(scale.group.quantized),
        "members": [
            {"tensor": m.tensor, "amax": m.amax, "bits_lost": m.bits_lost} for m in scale.members
        ],
    }
