"""Shrink a network for which prediction and build disagree."""

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
    """Return the smallest network found for which prediction and build still disagree.

    Args:
        proto: A network for which prediction and build disagree.
        disagrees: Function that returns whether prediction and build of a network disagree.
        limit: Maximum number of builds.
    """
    reductions = (reduce_outputs, remove_nodes, store_constants, bypass_nodes)
    shrinker = ModelShrinker(proto, disagrees, reductions, limit)
    for _ in shrinker.steps():  # each step makes the model of the shrinker smaller
        pass
    return shrinker.proto


def shrink_answer(
    proto: onnx.ModelProto, answer: Callable[[onnx.ModelProto], Answer]
) -> onnx.ModelProto:
    """Shrink a network so that one of its kinds of disagreement remains.

    Kinds differ in the status, or in the predicted and the built precision.
    """
    kinds = _mismatch_kinds(answer(proto).wrong)

    def disagrees(smaller: onnx.ModelProto) -> bool:
        return bool(kinds & _mismatch_kinds(answer(smaller).wrong))

    return shrink(proto, disagrees) if kinds else proto


def _mismatch_kinds(wrong: list[tuple[str, str, str]]) -> set[tuple[bool, str, str]]:
    return {(bool(name), predicted, built[:60]) for name, predicted, built in wrong}
