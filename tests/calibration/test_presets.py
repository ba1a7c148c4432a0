import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import calibration
from calibration.images import prepare_image
from calibration.options import INTERPOLATIONS, RESIZES, YOLO_PREPROCESS, Preprocess
from calibration.presets import ALIASES, PRESETS, choose_preprocess, find_preprocess
from qdqtool.commands.options import PREPROCESS_NAMES
from qdqtool.errors import DataError
from tests.calibration.nets import write_pictures
from tests.errors import has

IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
HALF = np.full((2, 3), 0.5)
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC


def picture(width: int, height: int) -> Image.Image:
    """Return a smooth image with some noise, so that antialiasing and offsets show."""
    rng = np.random.default_rng(width)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = np.stack([x * 0.4, y * 0.3, x + y], -1) % 256
    return Image.fromarray((0.7 * waves + rng.integers(0, 70, waves.shape)).astype(np.uint8))


def crop_center(image: Image.Image, shorter: int, side: int, method: Any) -> np.ndarray:
    width, height = image.size
    longer = int(shorter * max(image.size) / min(image.size))
    size = (shorter, longer) if width < height else (longer, shorter)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return np.asarray(image.resize(size, method).crop((left, top, left + side, top + side)))


def normalize(pixels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    mean, std = numbers
    return ((pixels / 255.0 - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [(400, 300), (301, 517), (224, 224), (90, 120)], ids=str)
@pytest.mark.parametrize(
    ("name", "shorter", "side", "method", "numbers"),
    [
        ("imagenet", 256, 224, BILINEAR, IMAGENET),
        ("ultralytics-classify", 224, 224, BILINEAR, np.array([[0.0] * 3, [1.0] * 3])),
        (
            "clip",
            224,
            224,
            BICUBIC,
            np.array([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]),
        ),
        ("inception", 341, 299, BICUBIC, HALF),
        ("vit", 248, 224, BICUBIC, HALF),
    ],
)
def test_classification_presets(
    name: str,
    shorter: int,
    side: int,
    method: Any,
    numbers: np.ndarray,
    size: tuple[int, int],
) -> None:
    image = picture(*size)
    expected = normalize(crop_center(image, shorter, side, method), numbers)
    prepared = prepare_image(image, side, side, PRESETS[name].preprocess)[0]
    np.testing.assert_allclose(prepared, expected, atol=1e-5)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(pixels, np.float64).transpose(2, 0, 1)


def padded(color: np.ndarray, padding: float) -> np.ndarray:
    expected = np.full((3, 32, 32), padding)
    expected[:, :16] = color[:, None, None]
    return expected


SQUARE, TALL, WIDE = picture(16, 16), picture(300, 200), picture(400, 300)
STRETCHED = np.asarray(TALL.resize((64, 96), BILINEAR))
PLAIN = Image.new("RGB", (40, 20), (10, 20, 30))


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        pytest.param(
            "caffe",
            WIDE,
            channels_first(
                crop_center(WIDE, 256, 224, BILINEAR)[..., ::-1]
                - np.array([103.939, 116.779, 123.68])
            ),
            id="caffe subtracts the mean of blue, green and red",
        ),
        pytest.param("detr", TALL, normalize(STRETCHED, IMAGENET), id="detr stretches"),
        pytest.param(
            "imagenet-stretch", TALL, normalize(STRETCHED, IMAGENET), id="imagenet-stretch"
        ),
        pytest.param("rtdetr", TALL, channels_first(STRETCHED) / 255, id="rtdetr stretches"),
        pytest.param(
            "yolox",
            PLAIN,
            padded(np.array([30, 20, 10]), 114),
            id="yolox pads right and bottom and keeps pixels",
        ),
        pytest.param(
            "scrfd",
            PLAIN,
            padded((np.array([10, 20, 30]) - 127.5) / 128, -127.5 / 128),
            id="scrfd pads with black and takes red first",
        ),
        pytest.param("tf", SQUARE, channels_first(SQUARE) / 127.5 - 1, id="tf: -1 to 1"),
        pytest.param("none", SQUARE, channels_first(SQUARE), id="none leaves pixels"),
        pytest.param(
            "ultralytics-classify",
            TALL,
            channels_first(TALL.resize((64, 32), BILINEAR)) / 255,
            id="crop of an input that is not square resizes both sides",
        ),
    ],
)
def test_other_presets(name: str, image: Image.Image, expected: np.ndarray) -> None:
    prepared = prepare_image(image, *expected.shape[1:], PRESETS[name].preprocess)[0]
    np.testing.assert_allclose(prepared, expected, rtol=1e-6, atol=1e-5)


def test_crop_of_an_extreme_shape_is_bounded() -> None:
    image = Image.new("RGB", (60_000, 1))
    with pytest.raises(DataError, check=has("image-too-large")):
        prepare_image(image, 224, 224, PRESETS["imagenet"].preprocess)


# Names


def test_names_of_the_command_line_are_the_presets() -> None:
    assert tuple(PRESETS) == PREPROCESS_NAMES
    assert set(ALIASES.values()) <= set(PRESETS) and calibration.PRESETS is PRESETS


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_presets_are_complete(name: str) -> None:
    preset = PRESETS[ALIASES.get(name, name)]
    assert find_preprocess(name) == preset.preprocess and preset.networks
    assert preset.preprocess.resize in RESIZES
    assert preset.preprocess.interpolation in INTERPOLATIONS


@pytest.mark.parametrize(
    ("value", "code"), [("imagnet", "unknown-choice"), (3, "wrong-type"), ([], "wrong-type")]
)
def test_other_names_are_refused(value: Any, code: str) -> None:
    with pytest.raises(DataError, check=has(code, parameter="preprocess")):
        find_preprocess(value)


# Functions


def to_input(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((16, 16)), np.float32).transpose(2, 0, 1) / 127.5 - 1


def test_function_prepares_images(tmp_path: Path) -> None:
    write_pictures(tmp_path, 3)
    spec = calibration.InputSpec("images", (1, 3, 16, 16))
    data = calibration.open_data(tmp_path, [spec], to_input)
    samples = [sample["images"] for sample in data]
    with Image.open(min(tmp_path.iterdir())) as image:
        np.testing.assert_allclose(samples[0][0], to_input(image), atol=1e-6)
    assert data.source.preprocessing["name"] == "to_input"
    others = [
        calibration.open_data(tmp_path, [spec], f)
        for f in (to_input, lambda image: to_input(image) / 2)
    ]
    assert [data.fingerprint == other.fingerprint for other in others] == [True, False]


# Choice by the model's metadata

ULTRALYTICS = {"names": "{0: 'a'}", "stride": "32", "imgsz": "[64, 64]"}


@pytest.mark.parametrize(
    ("metadata", "name", "origin"),
    [
        ({}, "yolo", "default"),
        ({**ULTRALYTICS, "task": "detect"}, "yolo", "metadata"),
        ({**ULTRALYTICS, "task": "segment"}, "yolo", "metadata"),
        ({**ULTRALYTICS, "task": "classify"}, "ultralytics-classify", "metadata"),
        (
            {**ULTRALYTICS, "task": "detect", "description": "Ultralytics RT-DETR-l model"},
            "ultralytics-rtdetr",
            "metadata",
        ),
        ({"task": "detect", "head": "RTDETRDecoder"}, "ultralytics-rtdetr", "metadata"),
        ({"qdqtool.preprocess": "[1]"}, "yolo", "default"),
        ({"qdqtool.preprocess": '{"resize": "cut"}'}, "yolo", "default"),
        ({"qdqtool.preprocess": "[" * 10_000}, "yolo", "default"),
        ({"qdqtool.preprocess": '{"name": "to_input"}'}, "yolo", "function"),
    ],
    ids=str,
)
def test_choice_by_metadata(metadata: dict[str, str], name: str, origin: str) -> None:
    choice = choose_preprocess(metadata, None)
    assert (choice.preprocess, choice.origin) == (PRESETS[name].preprocess, origin)


@pytest.mark.parametrize("name", PRESETS)
def test_recorded_preprocessing_is_read_again(name: str) -> None:
    preprocess = PRESETS[name].preprocess
    recorded = json.dumps({"name": name, "origin": "option", **preprocess.as_json()})
    choice = choose_preprocess({"qdqtool.preprocess": recorded, "task": "classify"}, None)
    assert (choice.preprocess, choice.origin) == (preprocess, "model")


CUSTOM = Preprocess(scale=0.5)


@pytest.mark.parametrize(
    ("choice", "preprocess"), [(CUSTOM, CUSTOM), ("yolo", YOLO_PREPROCESS), (to_input, to_input)]
)
def test_choice_of_the_user_comes_first(choice: Any, preprocess: Any) -> None:
    assert choose_preprocess({**ULTRALYTICS, "task": "classify"}, choice).preprocess is preprocess


@pytest.mark.parametrize("name", ["imagenet", "detr", "rtdetr", "yolo"])
def test_network_with_integer_inputs_normalizes_pixels_itself(tmp_path: Path, name: str) -> None:
    """Normalized values would be rounded to a few integers."""
    write_pictures(tmp_path, 1)
    (sample,) = calibration.open_data(
        tmp_path, [calibration.InputSpec("images", (1, 3, 16, 16), "uint8")], name
    )
    assert sample["images"].max() > 100 and sample["images"].dtype == np.uint8
