"""A prediction compared with a build: the result of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.buildlog.agreement import (
    BuildFacts,
    ConversionCounts,
    ConvolutionCounts,
    LayerCounts,
    Mismatch,
    TraceCounts,
)
from qdqtool.io.files import Guard
from qdqtool.io.outputs import Saved
from qdqtool.types import TOOL_VERSION, VERIFICATION_SCHEMA, Json, Prediction


@dataclass(slots=True, repr=False)
class Verification(Saved):
    """A prediction compared with a build.

    Attributes:
        build: Which build.
        convolutions: Convolution by convolution.
        layers: Engine layers by name and types.
        trace: Lines of the Q/DQ passes.
        conversions: Q and DQ that stay in the engine.
        copies: Lines of slice and concatenation removal, and of the copies made where that is refused.
        mismatches: Everything that differs.
        prediction: What was compared with the build.
        notes: What else the user should know.
        times: Estimated against measured time, where the build was timed and its GPU is known.
        read: The files it was made from.
    """

    build: BuildFacts
    convolutions: ConvolutionCounts = field(default_factory=ConvolutionCounts)
    layers: LayerCounts = field(default_factory=LayerCounts)
    trace: TraceCounts = field(default_factory=TraceCounts)
    conversions: ConversionCounts = field(default_factory=ConversionCounts)
    mismatches: list[Mismatch] = field(default_factory=list)
    prediction: Prediction | None = None
    notes: list[str] = field(default_factory=list)
    copies: TraceCounts = field(default_factory=TraceCounts)
    times: Json | None = None
    read: Guard | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        c = self.convolutions
        return f"<Verification: {c.agree} of {c.total} convolutions agree, {len(self.mismatches)} mismatches>"

    @property
    def ok(self) -> bool:
        """Whether everything agrees with a build that is complete and leaves nothing open."""
        return not self.mismatches and self.complete and not self.convolutions.unknown

    @property
    def complete(self) -> bool:
        return self.build.complete

    def as_json(self) -> Json:
        return {
            "schema": VERIFICATION_SCHEMA, "tool": TOOL_VERSION,
            "model": self.prediction.model.as_json() if self.prediction else None,
            "target": self.prediction.target if self.prediction else None, "build": self.build.as_json(),
            "convolutions": self.convolutions.as_json(), "layers": self.layers.as_json(),
            "trace": self.trace.as_json(), "conversions": self.conversions.as_json(),
            "copies": self.copies.as_json(), "mismatches": [m.as_json() for m in self.mismatches],
            "notes": list(self.notes), "times": self.times,
        }
