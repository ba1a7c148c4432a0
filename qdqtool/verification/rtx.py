"""TensorRT-RTX builds: compared convolution by convolution, as they have no named layers and no pass lines."""

from __future__ import annotations

from qdqtool.buildlog.agreement import BuildFacts, ConvolutionCounts, Mismatch, MismatchKind, TraceCounts
from qdqtool.buildlog.types import Build
from qdqtool.model.graph import Model
from qdqtool.types import Prediction
from qdqtool.verification.pairs import Pair
from qdqtool.verification.result import Verification


def verify_rtx_build(model: Model, prediction: Prediction, build: Build) -> Verification:
    """Compares a prediction with a TensorRT-RTX log that was kept."""
    from qdqtool.builders.run import log_names
    from qdqtool.verification.products import built_nodes

    rows = {n.index: n for n in built_nodes(model, build.layers, log_names(model)) if n.layer is not None}
    pairs = [Pair(c, rows.get(c.index)) for c in prediction.convolutions]
    return of_pairs(prediction, pairs, build.facts)


def of_pairs(prediction: Prediction, pairs: list[Pair], build: BuildFacts) -> Verification:
    """A verification from convolutions predicted and built; RTX has no named layers and no pass lines to compare."""
    unknown = tuple(p.predicted.name for p in pairs if p.agrees is None)
    wrong = [p for p in pairs if p.agrees is False]
    mismatches = [
        Mismatch(
            MismatchKind.CONVOLUTION,
            p.predicted.name,
            p.predicted.as_json(),
            p.built.as_json() if p.built else {},
            f"predicted {p.predicted.precision}, built {p.built.precision if p.built else 'unknown'}",
        )
        for p in wrong
    ]
    return Verification(
        build=build,
        convolutions=ConvolutionCounts(len(pairs), len(pairs) - len(unknown) - len(wrong), len(unknown), unknown),
        trace=TraceCounts(len(prediction.trace)),
        mismatches=mismatches,
        prediction=prediction,
    )
