from typing import Any

import onnx
import pytest

from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import (
    complete_shapes,
    find_common_size,
    metadata_size,
    store_image_size,
    with_size,
)
from tests.calibration.nets import conv_net


def network(*shape: int | None) -> onnx.ModelProto:
    x = onnx.helper.make_tensor_value_info("in0", onnx.TensorProto.FLOAT, shape)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = onnx.helper.make_node("Relu", ["in0"], ["y"])
    return onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, None),
        ("640", (640, 640)),
        ("[1, 65536]", (1, 65536)),
        ("[65536, 1]", (65536, 1)),
        ("[1, 65537]", None),
        ("[65537, 1]", None),
        ("[0, 5]", None),
        ("[5, 0]", None),
        ("[-1, 5]", None),
        ("[5]", None),
        ("[5, 6, 7]", None),
        ("[5.5, 6]", None),
        ('["5", 6]', None),
        ("0", None),
        ("(5, 6)", (5, 6)),
        ("(5, 6, 7)", None),
        ("5x6", (5, 6)),
        ("(5,)", None),
        ("{}", None),
        ("null", None),
        pytest.param("[" * 100_000, None, id="nested"),
        ("-", None),
    ],
)
def test_metadata_size(text: str | None, size: tuple[int, int] | None) -> None:
    model = conv_net()
    if text is not None:
        model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value=text))
    assert metadata_size(Model(model)) == size


@pytest.mark.parametrize(
    ("shape", "batch", "complete"),
    [
        ((1, 3, 64, 64), 1, None),
        ((None, 3, 64, 64), 8, (8, 3, 64, 64)),
        ((None, 3, None, None), -1, (-1, 3, 320, 480)),
        ((1, None, 32, None), 8, (1, 1, 32, 480)),
        ((1, None, None, 3), 1, (1, 320, 480, 3)),
        ((None, None, 7), 1, (1, 1, 7)),
    ],
)
def test_open_dimensions_get_sizes(
    shape: tuple[int | None, ...], batch: int, complete: tuple[int, ...] | None
) -> None:
    model = Model(network(*shape))
    model.proto.metadata_props.add(key="imgsz", value="[320, 480]")
    assert complete_shapes(model, batch) == ({} if complete is None else {"in0": complete})


def test_size_without_metadata_is_640() -> None:
    assert complete_shapes(Model(network(1, 3, None, None))) == {"in0": (1, 3, 640, 640)}


def test_remembered_size_comes_before_that_of_the_exporter() -> None:
    model = Model(network(1, 3, None, None))
    model.proto.metadata_props.add(key="imgsz", value="[320, 480]")
    for size in ((96, 96), (64, 128)):
        store_image_size(model, size)
        assert metadata_size(model) == size
    assert model.metadata["imgsz"] == "[320, 480]" and len(model.metadata) == 2


def test_size_of_fixed_inputs_is_not_remembered() -> None:
    model = Model(network(1, 3, 64, 64))
    store_image_size(model, (96, 96))
    assert not model.metadata


RECORDED, EXPORTED = {"qdqtool.size": "[256, 192]"}, {"imgsz": "[640, 640]"}


def model_with(metadata: dict[str, str], *dims: int | None) -> Model:
    proto = network(*dims)
    onnx.helper.set_model_props(proto, metadata)
    return Model(proto)


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (({}, 1, 3, None, None), ({}, 1, 3, None, None), None),
        ((RECORDED, 1, 3, None, None), (EXPORTED, 1, 3, None, None), (256, 192)),
        ((EXPORTED, 1, 3, None, None), (RECORDED, 1, 3, None, None), (256, 192)),
        (({}, 1, 3, None, None), (EXPORTED, 1, 3, None, None), (640, 640)),
        ((RECORDED, 1, 3, None, None), ({}, 1, 3, 320, 320), (320, 320)),
    ],
)
def test_find_common_size_prefers_fixed_then_recorded_sizes(
    first: tuple[Any, ...], second: tuple[Any, ...], size: tuple[int, int] | None
) -> None:
    assert find_common_size(model_with(*first), model_with(*second)) == size


def test_with_size_sets_dynamic_size_without_changing_the_model() -> None:
    model = model_with(EXPORTED, 1, 3, None, None)
    sized = with_size(model, (256, 192))
    assert complete_shapes(sized) == {"in0": (1, 3, 256, 192)}
    assert complete_shapes(model) == {"in0": (1, 3, 640, 640)} and sized.sha256 == model.sha256
    fixed = model_with({}, 1, 3, 320, 320)
    assert with_size(fixed, (256, 192)) is fixed
