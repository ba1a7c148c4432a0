"""Findings: what a model's Q/DQ placement costs on a target, why, and what to change.

``codes`` is what is known about each finding code, ``static`` finds what the model alone shows, ``causes`` what the
simulation shows, and :func:`advise` puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdqtool.graph import Model
    from qdqtool.types import Finding, Prediction


def advise(model: Model, prediction: Prediction) -> list[Finding]:
    """Everything worth telling about a prediction: build failures first, then the widest cost first.

    Numbers the findings from 0 and sets ``findings`` of each convolution to the ids that concern it.

    Args:
        model: The model that was predicted.
        prediction: Its outcome: convolutions, refusals and conversions; ``findings`` is not read.
    """
    from qdqtool.advice.collect import collect

    return collect(model, prediction)
