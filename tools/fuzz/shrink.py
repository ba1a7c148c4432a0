"""Shrink a network while prediction and build still disagree."""

from collections.abc import Callable

import onnx

from qdqtool.extraction.reductions import (
    bypass_nodes,
    reduce_outputs,
    remove_nodes,
    store_constants,
)
from qdqtool.extraction.shrinking import ModelShrinker
from tools.fuzz.driver import Answer

Disagrees = Callable[[onnx.ModelProto], bool]


def shrink(proto: onnx.ModelProto, disagrees: Disagrees, limit: int = 400) -> onnx.ModelProto:
    """Return the smallest network that still disagrees.

    Args:
        proto: A network that disagrees.
        disagrees: Predicts and builds a network; whether both disagree.
        limit: Number of builds to spend.
    """
    reductions = (reduce_outputs, remove_nodes, store_constants, bypass_nodes)
    return ModelShrinker(proto, disagrees, reductions, limit).run()


def shrink_answer(
    proto: onnx.ModelProto, answer: Callable[[onnx.ModelProto], Answer]
) -> onnx.ModelProto:
    """Shrink while a disagreement of the same kind (status, two precisions) remains."""
    kinds = _kinds_of(answer(proto).wrong)

    def disagrees(smaller: onnx.ModelProto) -> bool:
        return bool(kinds & _kinds_of(answer(smaller).wrong))

    return shrink(proto, disagrees) if kinds else proto


def _kinds_of(wrong: list[tuple[str, str, str]]) -> set[tuple[bool, str, str]]:
    return {(bool(name), predicted, built[:60]) for name, predicted, built in wrong}
