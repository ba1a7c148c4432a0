"""Delta debugging."""

from __future__ import annotations

import onnx
import pytest

from qdqtool.errors import BuilderError
from qdqtool.extraction.moves import ALL, channels, spatial
from qdqtool.extraction.shrink import Shrinker
from tests.extraction.networks import residual


def has_add(model: onnx.ModelProto) -> bool:
    return any(n.op_type == "Add" for n in model.graph.node)


def test_to_the_last_node() -> None:
    small = Shrinker(residual(), has_add).run()
    onnx.checker.check_model(small, full_check=True)
    assert [n.op_type for n in small.graph.node] == ["Add"]
    assert all(max(d.dim_value for d in v.type.tensor_type.shape.dim) == 1 for v in small.graph.input)


def test_every_step_holds_and_is_a_valid_model() -> None:
    def holds(model: onnx.ModelProto) -> bool:
        onnx.checker.check_model(model, full_check=True)
        return sum(n.op_type == "Conv" for n in model.graph.node) >= 2

    shrinker = Shrinker(residual(), holds)
    for answer in shrinker.steps():
        assert holds(shrinker.proto)
        assert isinstance(answer, bool)
    assert sum(n.op_type == "Conv" for n in shrinker.proto.graph.node) == 2


def test_no_model_is_tried_twice_and_the_limit_holds() -> None:
    seen: list[bytes] = []

    def holds(model: onnx.ModelProto) -> bool:
        seen.append(model.SerializeToString(deterministic=True))
        return has_add(model)

    Shrinker(residual(), holds, ALL, limit=40).run()
    assert len(seen) == len(set(seen)) <= 40


def test_what_raises_does_not_hold_but_a_lost_compiler_ends_it() -> None:
    def fails(model: onnx.ModelProto) -> bool:
        raise ValueError("no")

    assert len(Shrinker(residual(), fails, limit=5).run().graph.node) == len(residual().graph.node)

    def lost(model: onnx.ModelProto) -> bool:
        raise BuilderError("gone")

    with pytest.raises(BuilderError, match="gone"):
        Shrinker(residual(), lost).run()


def test_channels_and_pixels_are_divided_alike() -> None:
    first = next(channels(residual()))
    typed = onnx.shape_inference.infer_shapes(first, check_type=True, strict_mode=True)
    dims = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*typed.graph.input, *typed.graph.output)]
    assert dims == [[1, 1, 16, 16], [1, 1, 16, 16]]
    small = next(spatial(residual()))
    typed = onnx.shape_inference.infer_shapes(small, check_type=True, strict_mode=True)
    assert [d.dim_value for d in typed.graph.output[0].type.tensor_type.shape.dim] == [1, 8, 1, 1]
