"""``qdqtool.predict``: what TensorRT will do with a Q/DQ model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from qdqtool.graph import Model
from qdqtool.modelfile import ModelSource, load
from qdqtool.trt.simulation import simulate
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import Prediction


def predict(model: ModelSource | Model, target: str | Target = DEFAULT_TARGET, *, advice: bool = True) -> Prediction:
    """Says which convolutions TensorRT will run in INT8, which not, and why. Needs no GPU and no TensorRT.

    Args:
        model: Path, ModelProto or bytes of a Q/DQ model. Weights are not needed: external data may be missing.
        target: ``trt8.0``, ``trt8.4``, ``trt8.5``, ``trt8.6``, ``trt10``, ``trt11`` or ``rtx1.7``.
        advice: Whether to look for findings as well.

    Returns:
        The prediction: outcomes of every Conv, ConvTranspose, Gemm and MatMul, engine layers, the optimizer's trace,
        conversions that stay at run time, and findings with their fixes.

    Raises:
        ModelError: The model cannot be read.
        QdqtoolError: The target is not known.
    """
    chosen = target_named(target)
    with _collector_paused():
        index = load(model)
        if chosen.is_rtx:
            from qdqtool.rtx.predict import predict_rtx

            return predict_rtx(index, chosen.name)
        prediction = simulate(index, chosen)
        if advice:
            from qdqtool.advice import advise

            prediction.findings = advise(index, prediction)
    return prediction


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A large network is many objects, all of which stay: looking for garbage among them takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
