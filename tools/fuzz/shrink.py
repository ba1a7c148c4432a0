"""Makes a network on which prediction and build disagree as small as it gets while they still do."""

from collections.abc import Callable

import onnx

from qdqtool.extraction.moves import LOOSE
from qdqtool.extraction.select import Shrinker
from tools.fuzz.driver import Answer

Disagrees = Callable[[onnx.ModelProto], bool]


def shrink(proto: onnx.ModelProto, disagrees: Disagrees, limit: int = 400) -> onnx.ModelProto:
    """The smallest network found that still disagrees.

    Args:
        proto: A network that disagrees.
        disagrees: Predicts and builds.
        limit: Number of builds to spend.
    """
    return Shrinker(proto, disagrees, LOOSE, limit).run()


def shrink_answer(
    proto: onnx.ModelProto, answer: Callable[[onnx.ModelProto], Answer]
) -> onnx.ModelProto:
    """Shrinks while a disagreement of the same kind (status, or the same two precisions) stays."""
    kind = _kind(answer(proto).wrong)

    def disagrees(smaller: onnx.ModelProto) -> bool:
        return bool(kind & _kind(answer(smaller).wrong))

    return shrink(proto, disagrees) if kind else proto


def _kind(wrong: list[tuple[str, str, str]]) -> set[tuple[bool, str, str]]:
    return {(bool(name), predicted, built[:60]) for name, predicted, built in wrong}
