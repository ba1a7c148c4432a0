"""The result of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.builders.run import choose_log_names
from qdqtool.buildlog.agreement import (
    BuildFacts,
    ConversionCounts,
    ConvolutionCounts,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.buildlog.types import Build
from qdqtool.ir.graph import Model
from qdqtool.trt.result import Prediction
from qdqtool.util.files import InputFiles, SavableResult
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_count, format_layer_counts
from qdqtool.verification.convolutions import find_built_nodes
from qdqtool.verification.local_build import ConvolutionPair, pair_convolutions
from qdqtool.version import TOOL_VERSION

VERIFICATION_SCHEMA = "qdqtool/verification/1"


@dataclass(slots=True, repr=False)
class Verification(SavableResult):
    """A prediction compared with a build.

    Attributes:
        build: Facts about the build.
        convolutions: Counts of convolutions and matrix products.
        layers: Counts of engine layers, compared by name and types.
        trace: Counts of the lines of the Q/DQ passes.
        conversions: Counts of the Q and DQ that remain in the engine.
        copies: Counts of the lines about removed or copied slices and concatenations.
        mismatches: Differences; of pass lines, layers and conversions, the first 50 each.
        prediction: The prediction that was compared.
        notes: Notes and warnings.
        times: Estimated and measured time, if the build was timed and its GPU is known.
        read: The input files.
    """

    build: BuildFacts
    convolutions: ConvolutionCounts = field(default_factory=ConvolutionCounts)
    layers: LayerCounts = field(default_factory=LayerCounts)
    trace: TraceCounts = field(default_factory=TraceCounts)
    conversions: ConversionCounts = field(default_factory=ConversionCounts)
    mismatches: list[Mismatch] = field(default_factory=list)
    prediction: Prediction | None = None
    notes: list[Note] = field(default_factory=list)
    copies: TraceCounts = field(default_factory=TraceCounts)
    times: Json | None = None
    read: InputFiles | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        c, count = self.convolutions, len(self.mismatches)
        agree = f"{c.agree} of {format_layer_counts(c.total - self.products, self.products)} agree"
        mismatches = "1 mismatch" if count == 1 else f"{count} mismatches"
        missing = "" if self.complete else f", incomplete: {', '.join(self._list_missing())}"
        return f"<Verification: {agree}, {mismatches}{missing}>"

    @property
    def products(self) -> int:
        """Number of matrix products among the convolutions that were compared; 0 if unknown."""
        listed = self.prediction.convolutions if self.prediction is not None else []
        return sum(c.is_product for c in listed) if len(listed) == self.convolutions.total else 0

    def _list_missing(self) -> list[str]:
        """Return the parts of the build that are missing, as texts."""
        unknown = self.convolutions.unknown
        types = [f"types of {format_count(unknown, 'convolution')}"] if unknown else []
        return [*self.build.missing, *types] or ["not stated"]

    @property
    def ok(self) -> bool:
        """Whether nothing mismatches, the build is complete, and no convolution is unknown."""
        return not self.mismatches and self.complete

    @property
    def complete(self) -> bool:
        """Whether the build is complete and states the types of all convolutions."""
        return self.build.complete and not self.convolutions.unknown

    @property
    def has_shapes(self) -> bool:
        """Whether the build lists shapes, so that a build of another model is detected."""
        return all(note.code != "no-shapes" for note in self.notes)

    def summary(self) -> Json:
        """Return the counts of agreement as JSON values."""
        names = ("convolutions", "layers", "trace", "conversions", "copies")
        return {**to_json_fields(self, *names), "mismatches": len(self.mismatches)}

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "schema": VERIFICATION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.prediction.model.as_json() if self.prediction else None,
            "target": self.prediction.target if self.prediction else None,
            "compute_capabilities": list(self.prediction.compute_capabilities)
            if self.prediction
            else [],
            "build": {**self.build.as_json(), "complete": self.complete},
            **to_json_fields(
                self,
                "convolutions",
                "layers",
                "trace",
                "conversions",
                "copies",
                "mismatches",
            ),
            **to_json_fields(self, "notes", "times"),
        }


def verify_rtx_build(model: Model, prediction: Prediction, build: Build) -> Verification:
    """Compare the convolutions of a prediction with a log of TensorRT-RTX."""
    nodes = find_built_nodes(model, build.layers, choose_log_names(model))
    pairs = pair_convolutions(prediction, nodes)
    return verification_from_pairs(prediction, pairs, build.facts)


def verification_from_pairs(
    prediction: Prediction, pairs: list[ConvolutionPair], build: BuildFacts
) -> Verification:
    """Return the verification of convolutions alone.

    TensorRT-RTX has no named layers and no pass lines to compare.
    """
    unknown = tuple(p.predicted.name for p in pairs if p.agrees is None)
    mismatches = [
        Mismatch(
            MismatchKind.CONVOLUTION,
            p.predicted.name,
            p.predicted.as_json(),
            p.built.as_json(),
            Difference.PRECISION,
            (p.predicted.precision, p.built.precision),
        )
        for p in pairs
        if p.built is not None and not p.agrees
    ]
    agree = len(pairs) - len(unknown) - len(mismatches)
    return Verification(
        build,
        ConvolutionCounts(len(pairs), agree, len(unknown), unknown),
        trace=TraceCounts(len(prediction.trace)),
        mismatches=mismatches,
        prediction=prediction,
    )
