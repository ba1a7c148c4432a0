"""Runs TensorRT's passes on a model; what comes out has no findings yet (:mod:`qdqtool.prediction` adds them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.trt import importer, pipeline
from qdqtool.trt.marks import sentence
from qdqtool.trt.outcome import Outcome
from qdqtool.trt.targets import Target
from qdqtool.types import CHOICES, SILU_ADD, Assumption, Counts, ModelInfo, Prediction, SiluAdd

Assume = Mapping[str, str]
"""Choices by name, such as ``{"silu-add": "fused"}``."""


def simulate(model: Model, target: Target, assume: Assume | None = None) -> Prediction:
    """The prediction of a classic target, without findings.

    Where it rests on a choice on which reports differ, the other choice is simulated as well and reported in
    ``assumptions``; a model without such places is simulated once.

    Args:
        model: The model.
        target: The target; its own default is assumed unless ``assume`` says otherwise.
        assume: Choices by name.

    Raises:
        QdqtoolError: A choice has no such name or value.
    """
    chosen = assumed_target(target, assume)
    prediction, places = _once(model, chosen)
    if places:
        value = _value(chosen)
        other = next(v for v in SiluAdd if v != value)
        alternative, _ = _once(model, _with(target, other))
        if _visible(alternative) != _visible(prediction):
            given = assume is not None and SILU_ADD in assume
            prediction.assumptions.append(Assumption(
                SILU_ADD, value, {other: _counts(alternative)}, places, given,
                "chosen by the user" if given else target.residual_proof,
            ))
    return prediction


def settled(model: Model, target: Target) -> Prediction:
    """The prediction of exactly this target: no other choice is looked at."""
    return _once(model, target)[0]


def assumed_target(target: Target, assume: Assume | None) -> Target:
    """The target with the user's choices in place of its own.

    Raises:
        QdqtoolError: A choice has no such name or value, or is none on the target.
    """
    for name, value in (assume or {}).items():
        values = CHOICES.get(name)
        if values is None:
            raise QdqtoolError(f"nothing is assumed by the name '{name[:40]}'; choose one of {', '.join(CHOICES)}")
        if value not in values:
            raise QdqtoolError(f"{name} cannot be '{value[:40]}'; choose one of {', '.join(values)}")
        if target.is_rtx:
            raise QdqtoolError(f"{name} is settled on {target.name}: no pointwise Add joins a convolution there")
        target = _with(target, SiluAdd(value))
    return target


def _with(target: Target, value: SiluAdd) -> Target:
    return replace(target, residual_through_activation=value == SiluAdd.FUSED)


def _value(target: Target) -> SiluAdd:
    return SiluAdd.FUSED if target.residual_through_activation else SiluAdd.APART


def _once(model: Model, target: Target) -> tuple[Prediction, tuple[str, ...]]:
    network = importer.build(model)
    run = pipeline.run(network, target)
    outcome = Outcome(model, network, target)
    prediction = Prediction(
        model=ModelInfo(model.path, model.sha256, model.opset, len(model.nodes)),
        target=target.name,
        convolutions=outcome.convolutions,
        layers=outcome.layers,
        trace=run.trace,
        refusals=run.refusals,
        conversions=len(outcome.conversion_nodes),
        conversion_nodes=outcome.conversion_nodes,
        target_evidence="; ".join(filter(None, (
            f"{target.evidence}: {target.proof}",
            sentence((c for layer in network.layers.values() for c in layer.cases), target),
        ))),
        counts=dict(network.counts),
        regions=outcome.regions(),
        float_products=outcome.float_products,
    )
    return prediction, tuple(network.residuals_behind_activation)


def _counts(prediction: Prediction) -> Counts:
    summary = prediction.summary()
    return Counts(summary["int8"], summary["int8_to_int8"], summary["conversions"])


def _visible(prediction: Prediction) -> object:
    """What users see of it: types and fusions of every convolution, and the conversions."""
    return prediction.conversion_nodes, [
        (c.precision, tuple(c.inputs), c.output, tuple(c.fused)) for c in prediction.convolutions
    ]
