"""Costs of leaving activations float: convolutions, conversions and time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from qdqtool.insertion.losses import ActivationLosses, TensorLoss
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.qdq import is_dq
from qdqtool.proto.slim import strip_large_weights
from qdqtool.trt.result import Prediction


def remove_pair(model: Model, activation: QuantizedTensor) -> Model:
    """Return a copy of a Q/DQ model in which one activation is float."""
    copy = model.copy()
    quantizer = copy.node(activation.node)
    editor = Editor(copy)
    editor.remove_pairs(quantizer, [n for n in copy.consumers(quantizer.output) if is_dq(n)])
    return editor.finish()


def predict_count_changes(
    losses: ActivationLosses,
    model: Model,
    activations: Sequence[QuantizedTensor],
    before: Prediction,
    predict: Callable[[Model], Prediction],
) -> ActivationLosses:
    """Predict the change in convolutions and conversions if an activation's consumers are excluded.

    The numbers are added to the losses of the activations, except those whose Q the model no longer
    has. `before` is the prediction of the finished Q/DQ model. `predict` predicts models in which
    these consumers are float.
    """
    variants = _float_variants(losses.tensors, model, activations)
    summary = before.summary()
    tensors = []
    for loss in losses.tensors:
        if loss.tensor in variants:
            after = predict(variants[loss.tensor]()).summary()
            added = None
            if summary["conversions"] is not None and after["conversions"] is not None:
                added = after["conversions"] - summary["conversions"]
            convolutions = summary["int8"] - after["int8"]
            loss = replace(loss, convolutions=convolutions, conversions=added)
        tensors.append(loss)
    return replace(losses, tensors=tensors)


def add_times(
    losses: ActivationLosses,
    model: Model,
    activations: Sequence[QuantizedTensor],
    total_ms: float,
    estimate_ms: Callable[[Model], float],
) -> ActivationLosses:
    """Estimate how much slower the engine is if an activation's consumers are excluded.

    The milliseconds are added to the losses whose gain is confirmed. `total_ms` is the time of the
    finished Q/DQ model. `estimate_ms` estimates models in which these consumers are
    float.
    """
    confirmed = [loss for loss in losses.tensors if loss.confirmed]
    times = {
        tensor: estimate_ms(make_variant()) - total_ms
        for tensor, make_variant in _float_variants(confirmed, model, activations).items()
    }
    return replace(losses, tensors=[replace(t, ms=times.get(t.tensor)) for t in losses.tensors])


def _float_variants(
    losses: Sequence[TensorLoss], model: Model, activations: Sequence[QuantizedTensor]
) -> dict[str, Callable[[], Model]]:
    """Return functions that make a model in which an activation's consumers are float, by tensor.

    The result lacks activations whose Q the model no longer has.
    """
    nodes = {n.name for n in model.nodes}
    slim = Model(strip_large_weights(model.proto), "", EDITED, types=model, constants=model)
    by_tensor = {a.tensor: a for a in activations}
    return {
        loss.tensor: partial(
            _exclude_consumers, slim, by_tensor[loss.tensor], activations, loss.readers
        )
        for loss in losses
        if by_tensor[loss.tensor].node in nodes
    }


def _exclude_consumers(
    model: Model,
    activation: QuantizedTensor,
    activations: Iterable[QuantizedTensor],
    names: Collection[str],
) -> Model:
    """Return the model without an activation's pair and without other pairs of its consumers.

    If an Add consumes the activation, its other input becomes float too, as with `exclude`.
    """
    copy = remove_pair(model, activation)
    editor, excluded = Editor(copy), set(names)
    quantizers = {other.node for other in activations}
    for q in [n for n in copy.nodes if n.name in quantizers]:
        dqs = [n for n in copy.consumers(q.output) if is_dq(n)]
        consumers = [{c.name for c in copy.consumers(dq.output)} for dq in dqs]
        ends = [dq for dq, own in zip(dqs, consumers, strict=True) if own and own <= excluded]
        if ends:
            editor.remove_pairs(q, ends)
    return editor.finish()
