"""Runs TensorRT's passes on a model; what comes out has no findings yet (:mod:`qdqtool.prediction` adds them)."""

from __future__ import annotations

from qdqtool.graph import Model
from qdqtool.trt import importer, pipeline
from qdqtool.trt.outcome import Outcome
from qdqtool.trt.targets import Target
from qdqtool.types import ModelInfo, Prediction


def simulate(model: Model, target: Target) -> Prediction:
    """The prediction of a classic target, without findings."""
    network = importer.build(model)
    run = pipeline.run(network, target)
    outcome = Outcome(model, network, target)
    return Prediction(
        model=ModelInfo(model.path, model.sha256, model.opset, len(model.nodes)),
        target=target.name,
        convolutions=outcome.convolutions,
        layers=outcome.layers,
        trace=run.trace,
        refusals=run.refusals,
        conversions=len(outcome.conversion_nodes),
        conversion_nodes=outcome.conversion_nodes,
        target_evidence=f"{target.evidence}: {target.proof}",
        counts=dict(network.counts),
    )
