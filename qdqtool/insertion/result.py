"""Result of :func:`qdqtool.insert`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx

from qdqtool.insertion.format_choice import FormatChoice, FormatFit
from qdqtool.insertion.losses import ActivationLosses
from qdqtool.insertion.output_errors import Fp16Agreement
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.scales import GroupScale
from qdqtool.insertion.smoothing import ScaleMigration
from qdqtool.ir.graph import Model
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import save
from qdqtool.reasons.finding import Finding
from qdqtool.reasons.placement import SkippedNode
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import InputFiles, forbid_overwrite
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    import onnx_graphsurgeon


INSERTION_SCHEMA = "qdqtool/insertion/1"


@dataclass(repr=False)
class Insertion:
    """A Q/DQ model, with its scales and the reasons why nodes remain float.

    Attributes:
        model: The Q/DQ model.
        quantized: Tensors with a Q/DQ pair, in graph order, with their scales.
        skipped: Nodes that could have been quantized but remain float, with the reasons.
        calibration: Methods, number of images, preprocessing and warnings. The keys are the field
            names of the JSON output.
        groups: Scale groups with more than one source, with the bits of precision that each source
            loses.
        notes: Notes on changes of the model, and on options without effect.
        warnings: Problems that the user should look at.
        target: TensorRT version that the model was made for.
        prediction: Prediction for the Q/DQ model; None if ``predict=False``.
        source: Path of the float model; empty for a model in memory.
        output: Path to which :meth:`save` wrote the model; empty until then.
        read: Files that were read; :meth:`save` does not overwrite them.
        losses: Accuracy that quantized activations cost at the outputs; None if not measured.
        float_type: Type of the layers without Q/DQ, ``fp32`` or ``fp16``.
        precision: Format of the Q/DQ pairs, ``int8`` or ``fp8``; ``fp16`` if ``precision="auto"``
            chose the float model.
        unchanged: Whether `model` is the unchanged float model.
        fits: Precision of the activations in INT8 and FP8; empty without statistics.
        choice: Choice of the format by ``precision="auto"``; None for other precisions.
        float32: Tensors that remain FP32 in an FP16 model, with their largest magnitudes.
        agreement: Difference between the outputs of an FP16 model and of the float model; None if
            not measured.
        smoothed: Channel scales that SmoothQuant moved from activations into weights.
        findings: Findings about scales and normalizations, which the warnings report. All other
            findings are in ``prediction``.
        compute_capabilities: Compute capabilities of the GPUs that ``target`` builds for; empty for
            all.
        requested_target: The target, with the TensorRT version that the user named. This and the
            next two attributes are None if the result does not come from :func:`qdqtool.insert`.
        load_float_model: Function that returns the float model.
        measure_scales: Function that measures scales of tensors of the float model on the
            calibration data. It returns an empty dict if the data cannot be read again.
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
    agreement: Fp16Agreement | None = None
    smoothed: list[ScaleMigration] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    compute_capabilities: list[str] = field(default_factory=list)
    precision: str = "int8"
    fits: list[FormatFit] = field(default_factory=list)
    choice: FormatChoice | None = None
    unchanged: bool = False
    requested_target: Target | None = field(default=None, repr=False, compare=False)
    load_float_model: Callable[[], Model] | None = field(default=None, repr=False, compare=False)
    measure_scales: Callable[[Model, Sequence[str]], dict[str, float]] | None = field(
        default=None, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return (
            f"<Insertion of {self.source or 'a model in memory'} for {self.named_target.title}: "
            f"{format_count(len(self.quantized), 'tensor')} quantized, "
            f"{format_count(len(self.warnings), 'warning')}>"
        )

    @property
    def named_target(self) -> Target:
        """The target of the version that the user named."""
        return self.requested_target or target_named(self.target)

    @property
    def ok(self) -> bool:
        """Whether the result has no warnings, and no findings more severe than a note.

        Warnings about the images, such as too few images, are ignored.
        """
        about_images = self.calibration.get("warnings", ())
        return all(w in about_images for w in self.warnings) and (
            self.prediction is None or self.prediction.ok
        )

    def summary(self) -> Json:
        """Return the counts of quantized activations and weights, skipped nodes, and images."""
        return {
            "activations": len(self.activations),
            "weights": len(self.weights),
            "skipped": len(self.skipped),
            "images": self.calibration.get("images", 0),
        }

    @property
    def activations(self) -> list[QuantizedTensor]:
        """Quantized tensors that are not weights."""
        return [q for q in self.quantized if q.method != "weights-max"]

    @property
    def weights(self) -> list[QuantizedTensor]:
        """Quantized weights."""
        return [q for q in self.quantized if q.method == "weights-max"]

    def to_graphsurgeon(self) -> onnx_graphsurgeon.Graph:
        """Return a copy of the model as an onnx-graphsurgeon graph."""
        return to_graphsurgeon(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model atomically.

        The weights of a model of more than 2 GB go to ``<name>.data`` next to it.

        Raises:
            QdqtoolError: ``path`` is a file that was read (the model, its weights, an image), the
                folder of ``path`` is missing, or the file cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.model, path, source=self.source)
        self.output = os.fspath(path)
        if self.prediction is not None:
            self.prediction.model.path = self.output

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "schema": INSERTION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.source,
            "output": self.output,
            "target": self.target,
            "requested_target": self.named_target.display_name,
            "compute_capabilities": list(self.compute_capabilities),
            "quantized": [q.as_json() for q in self.quantized],
            "skipped": [s.as_json() for s in self.skipped],
            "calibration": self.calibration,
            "groups": [_group_json(i, g) for i, g in enumerate(self.groups)],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "losses": self.losses.as_json() if self.losses else None,
            "float_type": self.float_type,
            "precision": self.precision,
            "unchanged": self.unchanged,
            "formats": [f.as_json() for f in self.fits],
            "choice": self.choice.as_json() if self.choice else None,
            "float32": maxima_as_json(self.float32),
            "smoothed": [s.as_json() for s in self.smoothed],
            "agreement": self.agreement.as_json() if self.agreement else None,
            "prediction": self.prediction.summary() if self.prediction else None,
        }


def maxima_as_json(tensors: dict[str, float]) -> list[Json]:
    """Return a JSON object for each tensor and its largest value; null for NaN and infinity."""
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
